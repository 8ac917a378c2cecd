"""Groups of episodes as nurseries: everything a group starts ends with the group.

A batch is a nursery of groups, a group a nursery of episodes. Every env is closed and every group cleaned up exactly
once, shielded from cancellation but bounded in time, and cleanup never runs under a live episode. An error ends the
run (the policy is fail-fast): siblings are cancelled, cleanup runs, and what the user sees is that error, with the
task, the turn and the env in its notes.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from jaxrl.env import Env, EnvGroupBuilder
from jaxrl.runtime.episode import Limits, episode_seed, run_episode
from jaxrl.runtime.sampler import Sampler
from jaxrl.types import Trajectory, TrajectoryGroup, Transition

Release = Callable[[], Awaitable[None]]
"""A close or a cleanup."""

CLEANUP_SECONDS = 30.0
"""How long one env's close, or one group's cleanup, may take before it is given up."""


@dataclass(frozen=True)
class RolloutPlan:
    """How the episodes of a batch are sampled.

    identity: names the batch among all batches of all runs, such as (seed, "train", step); with group and member it
    determines every random number of an episode. temperature: of the policy, 0 for greedy (evaluation only).
    """

    identity: tuple[int | str, ...]
    limits: Limits
    temperature: float = 1.0


async def run_batch(
    sampler: Sampler, builders_P: Sequence[EnvGroupBuilder], plan: RolloutPlan
) -> list[TrajectoryGroup]:
    """The groups of a batch, in the order of their builders."""
    groups_P: list[TrajectoryGroup | None] = [None] * len(builders_P)

    async def one(index: int) -> None:
        groups_P[index] = await run_group(sampler, builders_P[index], plan, group=index)

    async with trio.open_nursery() as nursery:
        for index in range(len(builders_P)):
            nursery.start_soon(one, index)
    return [group for group in groups_P if group is not None]


async def run_group(sampler: Sampler, builder: EnvGroupBuilder, plan: RolloutPlan, *, group: int) -> TrajectoryGroup:
    """All episodes of one group, in the order of its envs, with their rewards."""
    trajectories: dict[int, Trajectory] = {}

    async def one(member: int, env: Env, prompt: Hashable | None) -> None:
        seed = episode_seed(*plan.identity, group, member)
        turns: list[Transition] = []
        where = lambda: f"in turn {len(turns) + 1} of {env.describe()}, member {member}"  # noqa: E731
        async with _released(env.close, where), sampler.session(group=prompt, seed=seed) as session:
            reason = await run_episode(env, session, plan.limits, temperature=plan.temperature, transitions=turns)
        trajectories[member] = Trajectory(tuple(turns), reason)

    async with _released(builder.cleanup, lambda: f"in group {group}, task {builder.describe()!r}"):
        envs = await builder.make_envs()
        prompt = (*plan.identity, group) if len(envs) > 1 else None  # nobody to share it with
        async with trio.open_nursery() as nursery:
            for member, env in enumerate(envs):
                nursery.start_soon(one, member, env, prompt)
        ordered = tuple(trajectories[m] for m in range(len(envs)))
        shared = await builder.compute_group_rewards(ordered, envs)
        rewards = tuple(t.reward + extra for t, (extra, _) in zip(ordered, shared, strict=True))
        if not all(map(math.isfinite, rewards)):
            raise ValueError(f"rewards {list(rewards)}: each must be a finite number; raise an error to say no reward")
    return TrajectoryGroup(
        trajectories_G=ordered,
        rewards_G=rewards,
        metrics_G=tuple(metrics for _, metrics in shared),
        tags=tuple(builder.logging_tags()),
    )


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
                await _bounded(release)
            except Exception as second:
                error.add_note(f"afterwards {_name(release)} failed too: {second!r}")
            raise
        except BaseException:
            await _bounded(release)
            raise
        await _bounded(release)
    except Exception as error:
        error.add_note(where())
        raise


async def _bounded(release: Release) -> None:
    """Run a release to its end although the task is being cancelled, but not for ever."""
    with trio.move_on_after(CLEANUP_SECONDS, shield=True) as scope:
        await release()
    if scope.cancelled_caught:
        raise TimeoutError(f"{_name(release)} took more than {CLEANUP_SECONDS:g} s and was given up")


def _name(release: Release) -> str:
    return getattr(release, "__qualname__", repr(release))
