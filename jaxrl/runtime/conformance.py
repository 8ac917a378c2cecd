"""Whether an environment keeps its side of the contract: one call in anyone's test, or one command.

    await check_environment(builder, player=player)              in an async test that runs under trio
    python -m jaxrl.runtime.conformance my_module:MyBuilder key=value

It lies here and not beside the environments, because it plays them as a run does (`run_group`) and writes turns with a
renderer, and environments may import neither. Must not know any particular environment.

CHECKS lists what is looked at. A failure says which check, what was seen and what was expected. Every play is of a copy
of the builder that was pickled, so one of several plays never hides what another left in it.
"""

import argparse
import importlib
import inspect
import math
import pickle
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import chz
import numpy as np
import trio

from jaxrl.chat.families import renderer_for
from jaxrl.chat.renderer import Renderer
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import (
    ActionExtra,
    Env,
    EnvGroupBuilder,
    EnvironmentFault,
    MessageEnv,
    Observation,
    RLDatasetBuilder,
    StepResult,
    StopCondition,
)
from jaxrl.runtime.asyncio_bridge import open_asyncio
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.failure import one_line_errors, the_one
from jaxrl.runtime.leftovers import held, left_since, own_temporary_folder
from jaxrl.runtime.play import group_at, turn_tokens
from jaxrl.runtime.rollout import RolloutPlan, run_group
from jaxrl.types import (
    ENDINGS,
    Conclusion,
    Message,
    Metrics,
    Sample,
    StopReason,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    Transition,
    common_prefix,
)

Player = Callable[[str, int], str | ToolCall | Message]
"""(text of the context so far, number of the turn from 0) -> the turn. A function of these two and nothing else."""

HUGE = 100_000
"""Characters of the turn that is too long."""


class Nonconforming(AssertionError):
    """An environment failed a check. The text names the check, what was seen, and what was expected."""

    def __init__(self, check: str, seen: str, expected: str) -> None:
        super().__init__(f"[{check}] {seen}; expected {expected}")
        self.check = check


@dataclass(frozen=True)
class Subject:
    """What is checked, and how it is played.

    turns: after how many of them a run would end an episode. ends_within: how many turns the environment itself says
    that an episode has at most; None where only the run limits it. seconds: for one play of a group. patience: seconds
    in which what is closed has to be gone. cancellations: at how many moments of a play it is cancelled, at most.
    """

    builder: EnvGroupBuilder
    renderer: Renderer
    player: Player | None = None
    turns: int = 24
    ends_within: int | None = None
    seconds: float = 60.0
    patience: float = 2.0
    cancellations: int = 32

    def __post_init__(self) -> None:
        for name in ("turns", "seconds", "cancellations"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected more than 0")
        if self.ends_within is not None and not 1 <= self.ends_within <= self.turns:
            raise ValueError(f"ends_within={self.ends_within}: expected 1 to turns={self.turns}, or None")

    @property
    def limits(self) -> Limits:
        """The limits of an episode. Turns may be as long as they like."""
        return Limits(max_tokens=10 * HUGE, max_turns=self.turns)


async def check_environment(
    builder: EnvGroupBuilder,
    *,
    renderer: Renderer | None = None,
    player: Player | None = None,
    without: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> None:
    """Check everything that CHECKS lists; raise `Nonconforming` for the first that fails.

    builder: of one group. renderer: that its envs write with; None is the byte-level ChatML of the tiny model. player:
    plays well, if there is somebody; without it only what goes wrong is played. without: names of checks to leave out.
    say: is told each check when it has passed. settings: fields of `Subject`.
    Resources: none is left. Nothing else may run in the process meanwhile, since what it opens would look like a leak.
    """
    unknown = [name for name in without if name not in CHECKS]
    if unknown:
        raise ValueError(f"without names {', '.join(unknown)}: the checks are {', '.join(CHECKS)}")
    subject = Subject(builder, renderer or renderer_for(byte_tokenizer()), player, **settings)
    with own_temporary_folder():
        for name, check in CHECKS.items():
            if name not in without:
                await check(subject)
                if say is not None:
                    say(name)


# --- who speaks -----------------------------------------------------------------------------------

Speak = Callable[[Sequence[int], int, StopCondition], Sample]
"""(context, number of the turn, what ends it) -> the turn."""


def speakers(subject: Subject) -> dict[str, Speak]:
    """Everybody who plays, by name: the player, if there is one, and those who say what nobody should."""
    renderer = subject.renderer
    said: dict[str, Callable[[int, StopCondition], tuple[int, ...]]] = {
        "empty": lambda turn, stop: turn_tokens("", renderer, stop),
        "garbage": lambda turn, stop: turn_tokens(_garbage(turn), renderer, stop),
        "huge": lambda turn, stop: turn_tokens("x" * HUGE if turn == 0 else "", renderer, stop),
        "malformed_call": lambda turn, stop: _malformed_call(renderer, stop),
        "wrong_call": lambda turn, stop: _call(
            renderer, ToolCall("no_such_tool", '{"x": [1, null, {"y": "z"}]}'), stop
        ),
    }
    by_name: dict[str, Speak] = {name: partial(_say, tokens) for name, tokens in said.items()}
    by_name["cut"] = lambda context, turn, stop: _sample(renderer.tokenizer.encode("I was about to"), "length")
    good = {} if subject.player is None else {"player": partial(_played, subject.player, renderer)}
    return {**good, **by_name}


def _say(
    tokens: Callable[[int, StopCondition], tuple[int, ...]], context: Sequence[int], turn: int, stop: Any
) -> Sample:
    return _sample(tokens(turn, stop))


def _played(player: Player, renderer: Renderer, context: Sequence[int], turn: int, stop: StopCondition) -> Sample:
    said = player(renderer.tokenizer.decode(context), turn)
    if isinstance(said, ToolCall):
        return _sample(_call(renderer, said, stop))
    return _sample(renderer.turn(said) if isinstance(said, Message) else turn_tokens(said, renderer, stop))


def _sample(tokens: Sequence[int], stop: Any = "stop") -> Sample:
    return Sample(tuple(tokens), (0.0,) * len(tokens), (0,) * len(tokens), stop)


def _garbage(turn: int) -> str:
    """Another mess each turn, the same in every play."""
    rng = np.random.default_rng(turn)
    signs = "\0\r\n\t\\\"'{}[]<>|&;$`%\u202e\ufeff\U0001f600é١-9.e+/*#" + "".join(map(chr, range(1, 32)))
    return "".join(signs[i] for i in rng.permutation(len(signs))) + "</tool_call><|im_end|>" * (turn % 2)


def _call(renderer: Renderer, call: ToolCall, stop: StopCondition) -> tuple[int, ...]:
    return turn_tokens(call, renderer, stop)


def _malformed_call(renderer: Renderer, stop: StopCondition) -> tuple[int, ...]:
    """A call whose inside lost a piece. The markers around it stay."""
    whole = _call(renderer, ToolCall("no_such_tool", '{"first": "one", "second": 2}'), stop)
    kept = {*renderer.marker_ids.values(), *renderer.stop_ids}
    lost = range(len(whole) * 2 // 3, len(whole))
    return tuple(token for i, token in enumerate(whole) if token in kept or i not in lost)


@dataclass(frozen=True)
class _Voices:
    """A sampler whose sessions say what `speak` says."""

    speak: Speak

    @asynccontextmanager
    async def session(self, **settings: Any) -> AsyncIterator["_Voice"]:
        yield _Voice(self.speak)


class _Voice:
    """A session without a model. Holds any context."""

    capacity = 10**9

    def __init__(self, speak: Speak) -> None:
        self._speak, self._turn = speak, 0
        self.tokens: list[int] = []

    async def sample(self, new_tokens: Sequence[int], *, stop: Any = (), **settings: Any) -> Sample:
        await trio.lowlevel.checkpoint()
        self.tokens += new_tokens
        said = self._speak(tuple(self.tokens), self._turn, stop)
        self.tokens += said.tokens
        self._turn += 1
        return said

    def rewind(self, length: int) -> None:
        del self.tokens[length:]


# --- a play, and what is seen of it ---------------------------------------------------------------


@dataclass
class _Seen:
    """What one play did. again: ask envs that have ended, or started, once more, which must be an error."""

    check: str
    again: bool = False
    openings: dict[int, tuple[Observation, StopCondition]] = field(default_factory=dict)
    ended_by_itself: int = 0
    made: int = 0
    closed: dict[int, int] = field(default_factory=dict)
    cleaned: int = 0

    def require(self, good: object, seen: str, expected: str) -> None:
        if not good:
            raise Nonconforming(self.check, seen, expected)


class _WatchedEnv(Env):
    """An env of the subject, and the rules it has to keep in every single call."""

    def __init__(self, env: Env, member: int, seen: _Seen) -> None:
        self.env, self._member, self._seen = env, member, seen
        self._where = f"{env.describe()}, member {member}"
        self._held: Observation = ()
        self._turn = 0

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        observation, stop = await self._asked("initial_observation", self.env.initial_observation)
        self._seen.openings[self._member] = observation, stop
        self._check_context("the first observation", observation, stop)
        self._held = tuple(observation)
        if self._seen.again:
            await self._refused("a second initial_observation()", self.env.initial_observation)
        return observation, stop

    async def step(self, action: Sequence[int], *, extra: ActionExtra | None = None) -> StepResult:
        self._turn += 1
        step = partial(self.env.step, action, extra=extra)
        result = await self._asked("step", step)
        self._seen.require(
            math.isfinite(result.reward), f"{self._place}: the reward is {result.reward}", "a finite number"
        )
        if not result.episode_done:
            self._check_next(tuple(action), result)
            return result
        reason = result.stop_reason or StopReason.TERMINATED
        self._seen.require(
            not ENDINGS[reason].fault and reason is not StopReason.CANCELLED,
            f"{self._place}: the episode ended with {reason.name}",
            "an ending that is no fault; a fault is raised as an error",
        )
        if reason in (StopReason.TERMINATED, StopReason.ENV):
            self._seen.ended_by_itself += 1
            if self._seen.again:
                await self._refused("step() after the end", step)
        return result

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        said = await self._asked(f"conclude({reason.name})", partial(self.env.conclude, reason))
        self._seen.require(
            said is None or math.isfinite(said.reward),
            f"{self._place}: conclude({reason.name}) gave the reward {said and said.reward}",
            "a finite number, or None",
        )
        return said

    async def close(self) -> None:
        self._seen.closed[self._member] = self._seen.closed.get(self._member, 0) + 1
        await self._asked("close", self.env.close)

    def describe(self) -> str:
        return self.env.describe()

    @property
    def _place(self) -> str:
        return f"{self._where}, turn {self._turn}"

    async def _asked(self, what: str, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call()
        except Exception as error:
            blamed = the_one(error) if isinstance(error, BaseExceptionGroup) else error
            if isinstance(blamed, Nonconforming):
                raise
            raise Nonconforming(
                self._seen.check,
                f"{self._place}: {what} raised {type(blamed).__name__}: {str(blamed)[:300]}",
                "a reply or an ending: whatever the model says is not the environment's failure",
            ) from error

    async def _refused(self, what: str, call: Callable[[], Awaitable[Any]]) -> None:
        """The call has to raise an error that explains itself."""
        try:
            await call()
        except (RuntimeError, ValueError, EnvironmentFault) as error:
            self._seen.require(
                len(str(error).split()) > 3,
                f"{self._place}: {what} raised {type(error).__name__}({str(error)!r})",
                "a text that says what is wrong and what to do",
            )
            return
        except Exception as error:
            raise Nonconforming(
                self._seen.check,
                f"{self._place}: {what} raised {type(error).__name__}: {str(error)[:300]}",
                "a RuntimeError or ValueError that says that an env is one episode",
            ) from error
        raise Nonconforming(
            self._seen.check,
            f"{self._place}: {what} was answered as if nothing had happened",
            "a RuntimeError that says that an env is one episode (a reward would be counted twice)",
        )

    def _check_context(self, name: str, tokens: Any, stop: Any) -> None:
        """What a context is made of: `tokens`, all of it or what is new, and what ends the turn after it."""
        ids = isinstance(tokens, Sequence) and all(isinstance(t, int | np.integer) and t >= 0 for t in tokens)
        self._seen.require(ids and len(tokens), f"{self._where}: {name} is {tokens!r:.200}", "token ids")
        kinds = {type(each) for each in stop}
        self._seen.require(
            stop and len(kinds) == 1 and kinds <= {int, str},
            f"{self._where}: the stop condition of {name} is {stop!r:.200}",
            "token ids or strings, at least one: else no turn would ever end",
        )

    def _check_next(self, action: tuple[int, ...], result: StepResult) -> None:
        before, now = (*self._held, *action), tuple(result.next_observation)
        extends = now[: len(before)] == before
        self._seen.require(
            extends or result.rewrite is not None,
            f"{self._place}: the next observation does not begin with the one before and the turn",
            "that it does, id for id, or a `rewrite` that says why history was rewritten",
        )
        fresh = now[len(before) :] if extends else now
        self._check_context(f"what is new after turn {self._turn}", fresh, result.next_stop_condition)
        self._held = now


class _Watched(EnvGroupBuilder):
    """The subject's builder, watched."""

    def __init__(self, builder: EnvGroupBuilder, seen: _Seen) -> None:
        self.builder, self._seen = builder, seen

    @property
    def coupled(self) -> bool:
        return self.builder.coupled

    async def make_envs(self) -> Sequence[Env]:
        envs = await self.builder.make_envs()
        self._seen.made = len(envs)
        self._seen.require(envs, "make_envs() gave no env", "at least one")
        return [_WatchedEnv(env, member, self._seen) for member, env in enumerate(envs)]

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        envs = [env.env if isinstance(env, _WatchedEnv) else env for env in envs_G]
        for member in range(len(envs) if len(envs) > 1 else 0):  # whom others left behind with a fault
            await self._rewards([trajectories_G[member]], [envs[member]])
        return await self._rewards(trajectories_G, envs)

    async def _rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        try:
            rewards = await self.builder.compute_group_rewards(trajectories_G, envs_G)
        except Exception as error:
            raise Nonconforming(
                self._seen.check,
                f"compute_group_rewards raised {type(error).__name__} for {len(envs_G)} of {self._seen.made} members: "
                f"{str(error)[:300]}",
                "a reward for each of those that can be trusted, who may be fewer than the group",
            ) from error
        self._check_rewards(rewards, len(envs_G))
        return rewards

    def _check_rewards(self, rewards: Sequence[tuple[float, Metrics]], members: int) -> None:
        self._seen.require(
            len(rewards) == members,
            f"compute_group_rewards gave {len(rewards)} rewards for {members} members",
            "one (reward, metrics) for each of those that can be trusted, who may be fewer than the group",
        )
        for member, (reward, _) in enumerate(rewards):
            self._seen.require(
                math.isfinite(reward),
                f"compute_group_rewards gave member {member} the reward {reward}",
                "a finite number",
            )

    async def cleanup(self) -> None:
        self._seen.cleaned += 1
        await self.builder.cleanup()

    def logging_tags(self) -> Sequence[str]:
        return self.builder.logging_tags()

    def describe(self) -> str:
        return self.builder.describe()


async def play(subject: Subject, seen: _Seen, speak: Speak) -> TrajectoryGroup:
    """Play a copy of the group to its end; Nonconforming when it takes too long or something was not closed once."""
    plan = RolloutPlan(("conformance",), subject.limits)
    builder = _Watched(_copy(subject.builder, seen.check), seen)
    group: TrajectoryGroup | None = None
    try:
        async with open_asyncio():
            with trio.move_on_after(subject.seconds):
                group = await run_group(_Voices(speak), builder, plan, group=0)
    except BaseExceptionGroup as several:
        raise the_one(several) from None
    _check_released(seen)
    if group is None:
        raise Nonconforming(
            seen.check,
            f"{subject.builder.describe()!r} had not ended after {subject.seconds:g} s",
            f"that {subject.turns} turns take less (seconds= allows more)",
        )
    return group


def _check_released(seen: _Seen) -> None:
    closed = [seen.closed.get(member, 0) for member in range(seen.made)]
    seen.require(
        all(n == 1 for n in closed) and seen.cleaned == 1,
        f"the envs were closed {closed} times and the group was cleaned up {seen.cleaned} times",
        "once each",
    )


def _copy(builder: EnvGroupBuilder, check: str) -> EnvGroupBuilder:
    try:
        return pickle.loads(pickle.dumps(builder))
    except (pickle.PickleError, TypeError, AttributeError, ImportError, RecursionError) as error:
        raise Nonconforming(
            check,
            f"{type(builder).__name__} cannot be pickled: {error}",
            "a builder that can travel to a worker: a frozen dataclass of plain values and module-level functions, "
            "where make_envs makes what cannot travel",
        ) from error


# --- the checks -----------------------------------------------------------------------------------


async def check_pickles(subject: Subject) -> None:
    """The builder can be pickled, and its copy makes the same group."""
    copy = _copy(subject.builder, "pickles")
    said = [(b.describe(), tuple(b.logging_tags()), b.coupled) for b in (subject.builder, copy)]
    if said[0] != said[1]:
        raise Nonconforming("pickles", f"the builder says {said[0]}, its pickled copy {said[1]}", "the same of both")
    first, again = [await _openings(subject, each) for each in (subject.builder, copy)]
    if first != again:
        raise Nonconforming("pickles", "the envs of the pickled copy open with other tokens", "the same task and state")


async def _openings(subject: Subject, builder: EnvGroupBuilder) -> dict[int, Any]:
    """What each member begins with."""
    seen = _Seen("start")
    await play(replace(subject, builder=builder, turns=1, ends_within=None), seen, speakers(subject)["empty"])
    return seen.openings


async def check_start(subject: Subject) -> None:
    """Every env opens with tokens after which it is the model's turn; members of a group open alike, unless coupled."""
    openings = await _openings(subject, subject.builder)
    turn = _turn_opening(subject.renderer)
    for member, (observation, _) in openings.items():
        if tuple(observation[len(observation) - len(turn) :]) != turn:
            tail = subject.renderer.tokenizer.decode(observation[-40:])
            raise Nonconforming(
                "start",
                f"the first observation of member {member} ends with {tail!r}",
                f"it to end with {subject.renderer.tokenizer.decode(turn)!r}, which opens the model's turn (pass the "
                "renderer that the builder has)",
            )
    if not subject.builder.coupled and len(set(openings.values())) > 1:
        raise Nonconforming(
            "start",
            f"the {len(openings)} members of the group open with different tokens",
            "one task and one state for all: else their rewards cannot be compared",
        )


def _turn_opening(renderer: Renderer) -> tuple[int, ...]:
    """What any opening ends with, from its last stop token on."""
    one, other = (renderer.open([Message("user", text)]) for text in ("ab", "ba"))
    shared = 0
    while shared < min(len(one), len(other)) and one[-1 - shared] == other[-1 - shared]:
        shared += 1
    tail = one[len(one) - shared :]
    stops = [i for i, token in enumerate(tail) if token in renderer.stop_ids]
    return tail[stops[-1] + 1 :] if stops else tail


async def check_turns(subject: Subject) -> None:
    """Whatever is said, every call is answered, rewards are finite, and the episode ends within its limits."""
    for name, speak in speakers(subject).items():
        group = await play(subject, _Seen(f"turns: {name}"), speak)
        for member, trajectory in enumerate(group.trajectories_G):
            turns, most = len(trajectory.transitions), subject.ends_within
            if most is not None and (turns > most or trajectory.stop_reason is StopReason.MAX_TURNS):
                raise Nonconforming(
                    f"turns: {name}",
                    f"member {member} was still playing after {turns} turns",
                    f"an end within {most} turns (ends_within)",
                )


async def check_repeats(subject: Subject) -> None:
    """The same actions lead to the same observations, rewards and endings, whatever the global generators hold."""
    for name in _some(subject):
        first = _story(await play(subject, _Seen("repeats"), speakers(subject)[name]))
        with _other_global_state():
            again = _story(await play(subject, _Seen("repeats"), speakers(subject)[name]))
        _same(first, again, "repeats", f"played twice by {name}, with other global random states")


async def check_global_random(subject: Subject) -> None:
    """A play leaves the global generators of `random` and numpy as they were: nobody else's draws may depend on it."""
    for name in _some(subject):
        before = _global_state()
        await play(subject, _Seen("global_random"), speakers(subject)[name])
        for which, now in _global_state().items():
            if now != before[which]:
                raise Nonconforming(
                    "global_random",
                    f"the state of {which} changed while {name} played",
                    "a generator of the episode's own, such as numpy.random.default_rng(seed), or the state put back",
                )


async def check_independent(subject: Subject) -> None:
    """Groups that are played at the same time go as they go alone."""
    names = [*_some(subject), "garbage", *_some(subject)]
    alone = {name: _story(await play(subject, _Seen("independent"), speakers(subject)[name])) for name in set(names)}
    together: list[Any] = [None] * len(names)

    async def one(index: int) -> None:
        together[index] = _story(await play(subject, _Seen("independent"), speakers(subject)[names[index]]))

    try:
        async with trio.open_nursery() as nursery:
            for index in range(len(names)):
                nursery.start_soon(one, index)
    except BaseExceptionGroup as several:
        raise the_one(several) from None
    for name, story in zip(names, together, strict=True):
        _same(alone[name], story, "independent", f"played by {name} beside {len(names) - 1} other groups")


async def check_leaves_nothing(subject: Subject) -> None:
    """After a play there are no more threads, processes, open files, tasks and temporary files than before it."""
    await play(subject, _Seen("leaves_nothing"), _first(subject))  # what is made once a process is no leak
    for name, speak in speakers(subject).items():
        before = held()
        await play(subject, _Seen("leaves_nothing"), speak)
        if left := await left_since(before, subject.patience):
            raise Nonconforming("leaves_nothing", f"a play by {name} left {'; '.join(left)[:500]}", _NOTHING)


async def check_cancelled(subject: Subject) -> None:
    """Cancelled at any moment, a play ends soon, has released everything once, raises nothing and leaves nothing."""
    speak = _first(subject)
    counted = _AtStep(None)
    with _watching(counted):
        await play(subject, _Seen("cancelled"), speak)
    for moment in sorted({1 + i * counted.taken // subject.cancellations for i in range(subject.cancellations)}):
        seen, before = _Seen(f"cancelled at step {moment} of {counted.taken}"), held()
        at = _AtStep(moment)
        with trio.CancelScope() as at.scope, _watching(at):
            await play(subject, seen, speak)
        took = trio.current_time() - at.when
        seen.require(
            took <= subject.patience, f"it took {took:.1f} s to end", f"at most {subject.patience:g} s (patience)"
        )
        if seen.cleaned or seen.made:
            _check_released(seen)
        left = await left_since(before, subject.patience)
        seen.require(not left, f"left behind: {'; '.join(left)[:500]}", _NOTHING)


_NOTHING = "nothing: an env releases what it holds in close(), a builder in cleanup(), each also when it is cancelled"


async def check_after_the_end(subject: Subject) -> None:
    """An env is one episode: starting it twice and stepping it after its end are errors that say so."""
    for speak in speakers(subject).values():
        seen = _Seen("after_the_end", again=True)
        await play(subject, seen, speak)
        if seen.ended_by_itself:
            return


CHECKS: Mapping[str, Callable[[Subject], Awaitable[None]]] = {
    "pickles": check_pickles,
    "start": check_start,
    "turns": check_turns,
    "after_the_end": check_after_the_end,
    "repeats": check_repeats,
    "global_random": check_global_random,
    "independent": check_independent,
    "leaves_nothing": check_leaves_nothing,
    "cancelled": check_cancelled,
}
"""Every check by its name, in the order in which they are made."""


def _first(subject: Subject) -> Speak:
    """The player, or else whoever is left."""
    return next(iter(speakers(subject).values()))


def _some(subject: Subject) -> list[str]:
    """The player, if there is one, and somebody who says another thing every turn."""
    return ["player"] * (subject.player is not None) + ["garbage"]


@dataclass(eq=False)
class _AtStep(trio.abc.Instrument):
    """Counts how often a task is given the thread, and cancels `scope` at one of these steps. when: that was."""

    step: int | None
    scope: trio.CancelScope | None = None
    taken: int = 0
    when: float = math.inf

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.taken += 1
        if self.taken == self.step and self.scope is not None:
            self.when = trio.current_time()
            self.scope.cancel()


@contextmanager
def _watching(instrument: trio.abc.Instrument) -> Iterator[None]:
    trio.lowlevel.add_instrument(instrument)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(instrument)


Story = list[list[Any]]
"""What every member went through: (what, it) pairs in order."""


def _story(group: TrajectoryGroup) -> Story:
    return [
        [
            *(pair for i, turn in enumerate(t.transitions) for pair in _of_turn(i + 1, turn)),
            ("ending", t.stop_reason.name),
            ("conclusion", t.conclusion and t.conclusion.reward),
            ("total reward", reward),
        ]
        for t, reward in zip(group.trajectories_G, group.rewards_G, strict=True)
    ]


def _of_turn(number: int, turn: Transition) -> list[Any]:
    return [(f"observation of turn {number}", turn.observation), (f"reward of turn {number}", turn.reward)]


def _same(first: Story, second: Story, check: str, how: str) -> None:
    for member, (one, other) in enumerate(zip(first, second, strict=True)):
        for (what, a), (_, b) in zip(one, other, strict=False):
            if a != b:
                raise Nonconforming(
                    check,
                    f"{how}, member {member} has another {what}: {_differing(a, b)}",
                    "the same for the same actions: whatever is drawn follows from the task alone",
                )
        if len(one) != len(other):
            raise Nonconforming(
                check, f"{how}, member {member} has another number of turns", "the same for the same actions"
            )


def _differing(a: Any, b: Any) -> str:
    """Two values, or the parts of two token sequences from where they part."""
    if not isinstance(a, tuple) or not isinstance(b, tuple):
        return f"{a!r} and {b!r}"
    start = common_prefix(a, b)
    return f"from token {start} on {list(a[start : start + 12])} and {list(b[start : start + 12])}"


def _global_state() -> dict[str, bytes]:
    return {"random": pickle.dumps(random.getstate()), "numpy.random": pickle.dumps(np.random.get_state())}


@contextmanager
def _other_global_state() -> Iterator[None]:
    """In the block the global generators hold something else."""
    kept = random.getstate(), np.random.get_state()
    random.seed(20_001)
    np.random.seed(20_001)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


# --- the command ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the command line names, and say each check that passed. Returns the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` of a module there would
    renderer = renderer_for(byte_tokenizer())
    player = None if options.player is None else _named(options.player)
    settings = {name: getattr(options, name) for name in ("ends_within", "seconds", "turns", "cancellations")}

    async def check() -> None:
        builder = await _built(_named(options.builder), options.overrides, renderer, options.split, options.index)
        print(f"{type(builder).__name__}: {builder.describe()}")
        await check_environment(
            builder,
            renderer=renderer,
            player=player,
            without=options.without,
            say=lambda n: print(f"ok {n}"),
            **settings,
        )

    try:
        trio.run(check)
    except Nonconforming as failure:
        print(f"FAILED {failure}", file=sys.stderr)
        return 1
    return 0


async def _built(target: Any, overrides: Sequence[str], renderer: Renderer, split: str, index: int) -> EnvGroupBuilder:
    """The builder that a name and its arguments make; of a dataset, the group at `index`."""
    if isinstance(target, type) and issubclass(target, Env | MessageEnv):
        raise ValueError(
            f"{target.__name__} is an environment: expected its RLDatasetBuilder, or a function (renderer) -> "
            "EnvGroupBuilder, such as a MessageEnvGroupBuilder of a task and a MessageEnv"
        )
    takes = inspect.signature(target).parameters
    given = {"renderer": renderer} if "renderer" in takes else {}
    made = chz.Blueprint(target).apply(given).make_from_argv(list(overrides))
    if isinstance(made, RLDatasetBuilder):
        train, test = await made(renderer)
        data = train if split == "train" else test
        if data is None:
            raise ValueError(f"split={split}: {type(made).__name__} holds nothing out")
        return group_at(data, index)
    if isinstance(made, EnvGroupBuilder):
        return made
    raise ValueError(f"{target!r} made a {type(made).__name__}: expected an EnvGroupBuilder or an RLDatasetBuilder")


def _named(name: str) -> Any:
    """module:name."""
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"{name!r}: expected module:name, such as my_env:MyBuilder")
    found = getattr(importlib.import_module(module), attribute, None)
    if found is None:
        raise ValueError(f"{name!r}: the module {module} has no {attribute}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.runtime.conformance", description="Check an environment against its contract."
    )
    parser.add_argument(
        "builder", help="module:name of a group builder, a dataset builder, or a function that makes one"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="its arguments; a renderer is passed by itself"
    )
    parser.add_argument("--player", help="module:name of a function (text of the context, turn) -> what to say")
    parser.add_argument("--turns", type=int, default=24, help="turns after which a run ends an episode (default 24)")
    parser.add_argument("--ends-within", type=int, help="turns the environment itself says an episode has at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one play of a group (default 60)")
    parser.add_argument("--cancellations", type=int, default=32, help="moments to cancel a play at (default 32)")
    parser.add_argument("--without", action="append", default=[], choices=list(CHECKS), help="leave a check out")
    parser.add_argument("--split", choices=("train", "test"), default="train", help="of a dataset builder")
    parser.add_argument("--index", type=int, default=0, help="which group of a dataset builder (default 0)")
    return parser


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
