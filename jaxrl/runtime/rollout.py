"""Groups of episodes as nurseries: everything a group starts ends with the group.

A batch is a nursery of groups, a group a nursery of episodes. Every env is closed and every group cleaned up exactly
once, shielded from cancellation but bounded in time, and cleanup never runs under a live episode. What an error means
is the strategy's to say (`strategy.py`): under fail-fast it ends the run, siblings are cancelled, cleanup runs, and
what the user sees is that error, with the task, the turn and the env in its notes; a tolerant strategy retries in a
fresh env, or goes on without the member. An error is never a reward.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import trio

from jaxrl.env import Env, EnvGroupBuilder, EnvironmentFault
from jaxrl.runtime.episode import Limits, conclude, episode_seed, run_episode
from jaxrl.runtime.opponents import sampling_from
from jaxrl.runtime.sampler import Sampler, SamplerLost
from jaxrl.runtime.strategy import FailFast, Strategy
from jaxrl.tools import ToolFault, first_error
from jaxrl.types import Metrics, RolloutError, StopReason, Trajectory, TrajectoryGroup, Transition

T = TypeVar("T")

Release = Callable[[], Awaitable[None]]
"""A close or a cleanup."""

CLEANUP_SECONDS = 30.0
"""How long one env's close, or one group's cleanup, may take before it is given up."""

MAKE_SECONDS = 600.0
"""How long a builder may take to make envs before it is given up: the first container may have to be fetched."""


@dataclass(frozen=True)
class RolloutPlan:
    """How the episodes of a batch are sampled.

    identity: names the batch among all batches of all runs, such as (seed, "train", step); with group and member it
    determines every random number of an episode. temperature: of the policy, 0 for greedy (evaluation only).
    """

    identity: tuple[int | str, ...]
    limits: Limits
    temperature: float = 1.0
    strategy: Strategy = field(default_factory=FailFast)


class PlayGroup(Protocol):
    """Plays one group somewhere: `run_group` with a sampler, or what an executor makes of it."""

    async def __call__(self, builder: EnvGroupBuilder, plan: RolloutPlan, *, group: int) -> TrajectoryGroup: ...


async def run_batch(play: PlayGroup, builders_P: Sequence[EnvGroupBuilder], plan: RolloutPlan) -> list[TrajectoryGroup]:
    """The groups of a batch, in the order of their builders."""
    groups_P: list[TrajectoryGroup | None] = [None] * len(builders_P)

    async def one(index: int) -> None:
        groups_P[index] = await play(builders_P[index], plan, group=index)

    async with trio.open_nursery() as nursery:
        for index in range(len(builders_P)):
            nursery.start_soon(one, index)
    return [group for group in groups_P if group is not None]


async def run_group(sampler: Sampler, builder: EnvGroupBuilder, plan: RolloutPlan, *, group: int) -> TrajectoryGroup:
    """All episodes of one group, in the order of its envs, with their rewards."""
    playing = _Group(sampler, builder, plan, group)
    result: TrajectoryGroup | None = None
    try:
        async with _released(builder.cleanup, lambda: f"in group {group}, task {builder.describe()!r}"):
            await playing.play()
            await playing.grade()
            result = playing.result()
    except Exception as error:
        if not plan.strategy.tolerant:
            raise
        await trio.lowlevel.checkpoint_if_cancelled()  # the cleanup of a group that nobody waits for
        if result is None:
            raise
        return playing.result(after=error)  # played and graded; only the cleanup failed
    return result


class _Group:
    """One group being played. Owns its envs until they are closed, its retries, and what failed so far.

    This is the one place of the project that catches what an environment raises: under a tolerant strategy an error
    becomes an ending and a `RolloutError`; under fail-fast it is not caught at all.
    """

    def __init__(self, sampler: Sampler, builder: EnvGroupBuilder, plan: RolloutPlan, group: int) -> None:
        self._sampler, self._builder, self._plan, self._group = sampler, builder, plan, group
        self._envs: list[Env] = []
        self._trajectories: list[Trajectory] = []
        self._shared: dict[int, tuple[float, Metrics]] = {}
        self._errors: list[RolloutError] = []
        self._retries = plan.strategy.max_retries

    async def play(self) -> None:
        """Play every member, and again what failed, as the strategy allows."""
        while await self._make_envs():
            self._trajectories = [Trajectory((), StopReason.CANCELLED) for _ in self._envs]
            async with trio.open_nursery() as nursery:
                for member in range(len(self._envs)):
                    nursery.start_soon(self._play_member, member, nursery.cancel_scope)
            if not (self._builder.coupled and self._failed() and self._retry()):
                return

    async def grade(self) -> None:
        """Ask the builder for the rewards that need the whole group, over the members that can be trusted."""
        trusted = [m for m, t in enumerate(self._trajectories) if t.ending.in_baseline]
        while trusted:
            try:
                self._shared = await self._group_rewards(trusted)
                return
            except (Exception, BaseExceptionGroup) as error:
                fault = await self._bear(error, StopReason.GRADER_ERROR)
            if not self._retry():
                for m in trusted:
                    failed = self._trajectories[m]
                    self._trajectories[m] = replace(failed, stop_reason=StopReason.GRADER_ERROR, error=_said(fault))
                return

    async def _group_rewards(self, trusted: Sequence[int]) -> dict[int, tuple[float, Metrics]]:
        envs, trajectories = [self._envs[m] for m in trusted], [self._trajectories[m] for m in trusted]
        seed = episode_seed(*self._plan.identity, self._group, "grading")
        with sampling_from(self._sampler, seed=seed), self._plan.limits.grading():
            rewards = await self._builder.compute_group_rewards(trajectories, envs)
        shared = dict(zip(trusted, rewards, strict=True))
        for m, (extra, _) in shared.items():
            _check_finite(self._trajectories[m].reward + extra, m)
        return shared

    def result(self, *, after: Exception | None = None) -> TrajectoryGroup:
        """The group, in member order; what failed has its partial reward, which nobody counts.

        after: what the cleanup raised.
        """
        if after is not None:
            self._note(after, StopReason.ENV_ERROR)
        shared = [self._shared.get(m, (0.0, {})) for m in range(len(self._trajectories))]
        good = sum(t.ending.in_baseline for t in self._trajectories)
        return TrajectoryGroup(
            trajectories_G=tuple(self._trajectories),
            rewards_G=tuple(t.reward + extra for t, (extra, _) in zip(self._trajectories, shared, strict=True)),
            metrics_G=tuple(metrics for _, metrics in shared),
            tags=tuple(self._builder.logging_tags()),
            errors=tuple(self._errors),
            viable=bool(self._trajectories) and good >= self._plan.strategy.least(len(self._trajectories)),
        )

    async def _make_envs(self) -> bool:
        """Fresh envs for all members. False when they cannot be made and no retry is left."""
        while True:
            try:
                self._envs = await self._made()
                return True
            except (Exception, BaseExceptionGroup) as error:
                await self._bear(error, StopReason.ENV_ERROR)
            if not self._retry():
                return False

    async def _play_member(self, member: int, siblings: trio.CancelScope) -> None:
        trajectory = await self._attempt(member, self._envs[member])
        while True:
            self._trajectories[member] = trajectory
            if not trajectory.ending.fault or not self._plan.strategy.tolerant:
                return
            if self._builder.coupled or not self._retry():
                break
            self._trajectories[member] = Trajectory((), StopReason.CANCELLED)  # nothing failed while it is made again
            env = await self._remake(member)
            trajectory = await self._attempt(member, env) if env else trajectory
        if self._builder.coupled or self._failed() > len(self._envs) - self._plan.strategy.least(len(self._envs)):
            siblings.cancel()  # the group is lost: what the others do can no longer be used

    async def _attempt(self, member: int, env: Env) -> Trajectory:
        """One episode in one env, which is closed afterwards."""
        plan, turns = self._plan, list[Transition]()
        where = lambda: f"in turn {len(turns) + 1} of {env.describe()}, member {member}"  # noqa: E731
        seed = episode_seed(*plan.identity, self._group, member)  # of the episode: a retry draws the same numbers
        prompt = (*plan.identity, self._group) if len(self._envs) > 1 else None  # nobody to share it with
        grading, trajectory = False, None
        self._trajectories[member] = Trajectory((), StopReason.CANCELLED)
        try:
            with sampling_from(self._sampler, seed=seed):
                async with _released(env.close, where):
                    async with self._sampler.session(group=prompt, seed=seed) as session:
                        reason = await run_episode(
                            env, session, plan.limits, temperature=plan.temperature, transitions=turns
                        )
                    grading = True
                    conclusion = await conclude(env, reason, plan.limits)
                    finished = Trajectory(tuple(turns), reason, conclusion=conclusion)
                    _check_finite(finished.reward, member)
                    trajectory = finished
        except (Exception, BaseExceptionGroup) as error:
            reason = StopReason.GRADER_ERROR if grading and trajectory is None else _blame(error)
            fault = await self._bear(error, reason, member, env, len(turns) + 1)
            if trajectory is None:  # else only the close failed: the episode is whole
                trajectory = Trajectory(tuple(turns), reason, error=_said(fault))
            return trajectory
        if trajectory.ending.fault:
            text = f"a time limit ended the episode: {plan.limits.say_seconds()}"
            self._record("Timeout", text, reason, member, env, len(turns) + 1)
        return trajectory

    async def _remake(self, member: int) -> Env | None:
        """A fresh env for a retry; None when it cannot be made, which is a failed attempt too."""
        try:
            env = await _in_time(self._builder.remake, member)
            if env is None:
                made = await self._made()
                env = made.pop(member) if member < len(made) else None
                for other in made:
                    await self._discard(other)
                if env is None:
                    raise IndexError(f"make_envs gave {len(made)} envs, and there is a member {member} to make again")
        except (Exception, BaseExceptionGroup) as error:
            await self._bear(error, StopReason.ENV_ERROR, member)
            return None
        self._envs[member] = env
        return env

    async def _made(self) -> list[Env]:
        return list(await _in_time(self._builder.make_envs))

    async def _bear(
        self,
        error: BaseException,
        reason: StopReason,
        member: int | None = None,
        env: Env | None = None,
        turn: int | None = None,
    ) -> Exception:
        """Note a fault that the strategy tolerates, and return it; everything else is raised again.

        A cancellation goes on, also when the fault only happened on its way, such as in a close: nobody waits for
        what a retry would bring.
        """
        cancelled, fault = error.split(trio.Cancelled) if isinstance(error, BaseExceptionGroup) else (None, error)
        if not self._plan.strategy.tolerant or not isinstance(fault, Exception) or _lost_sampler(fault):
            raise error
        self._note(fault, reason, member, env, turn)
        if cancelled is not None:
            raise cancelled
        await trio.lowlevel.checkpoint_if_cancelled()
        return fault

    async def _discard(self, env: Env) -> None:
        """Close an env that nobody played. That it failed is noted, and keeps nobody else from being closed."""
        try:
            await bounded(env.close)
        except Exception as error:
            self._note(error, StopReason.ENV_ERROR, env=env)

    def _retry(self) -> bool:
        """Take one of the group's retries, if there is one."""
        self._retries -= 1
        return self._retries >= 0

    def _failed(self) -> int:
        return sum(t.ending.fault for t in self._trajectories)

    def _note(
        self,
        error: Exception,
        reason: StopReason,
        member: int | None = None,
        env: Env | None = None,
        turn: int | None = None,
    ) -> None:
        cause = first_error(error)
        self._record(type(cause).__name__, _text(cause), reason, member, env, turn)

    def _record(
        self, kind: str, message: str, reason: StopReason, member: int | None, env: Env | None, turn: int | None
    ) -> None:
        name = env.describe() if env else type(self._builder).__name__
        self._errors.append(RolloutError(kind, message, reason, self._builder.describe(), name, member, turn))


def _lost_sampler(error: BaseException | None) -> bool:
    """Whether a lost sampler is anywhere in an error: in a group, or what a tool's fault came from."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_lost_sampler, error.exceptions))
    return error is not None and (isinstance(error, SamplerLost) or _lost_sampler(error.__cause__))


def _check_finite(reward: float, member: int) -> None:
    if not math.isfinite(reward):
        raise ValueError(f"reward {reward} of member {member}: expected a finite number; raise an error to say none")


def _blame(error: BaseException) -> StopReason:
    return StopReason.TOOL_ERROR if isinstance(first_error(error), ToolFault) else StopReason.ENV_ERROR


def _said(error: Exception) -> str:
    cause = first_error(error)
    return f"{type(cause).__name__}: {_text(cause)}"


def _text(error: BaseException) -> str:
    """What an error says, as text that can be written: a file's name in it may hold bytes that are no UTF-8."""
    return str(error).encode("utf-8", "replace").decode("utf-8")


@asynccontextmanager
async def _released(release: Release, where: Callable[[], str]) -> AsyncIterator[None]:
    """Run a block, then `release`, whether the block ended, failed or was cancelled.

    An error gets the note `where()`. When both fail, the block's error is the one raised; the other is a note of it.
    """
    try:
        try:
            yield
        except Exception as error:
            try:
                await bounded(release)
            except Exception as second:
                error.add_note(f"afterwards {_name(release)} failed too: {second!r}")
            raise
        except BaseException:
            await bounded(release)
            raise
        await bounded(release)
    except SystemExit as error:  # of an env; it would end the run without a word
        fault = EnvironmentFault(f"{error!r}: an environment must not end the process")
        fault.add_note(where())
        raise fault from error
    except Exception as error:
        error.add_note(where())
        raise


async def bounded(release: Release) -> None:
    """Run a release to its end although the task is being cancelled, but not for ever."""
    with trio.move_on_after(CLEANUP_SECONDS, shield=True) as scope:
        await release()
    if scope.cancelled_caught:
        raise TimeoutError(f"{_name(release)} took more than {CLEANUP_SECONDS:g} s and was given up")


async def _in_time(make: Callable[..., Awaitable[T]], *args: int) -> T:
    """What a builder makes. Raises TimeoutError after MAKE_SECONDS."""
    with trio.move_on_after(MAKE_SECONDS):
        return await make(*args)
    raise TimeoutError(f"{_name(make)} took more than {MAKE_SECONDS:g} s and was given up")


def _name(method: Callable[..., object]) -> str:
    return getattr(method, "__qualname__", repr(method))
