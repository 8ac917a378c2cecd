"""What a group does about faults: who is played again, with what, how often, and who counts in the end."""

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import trio
from episodes import Counting, CountingBuilder, ScriptedEngine, nap
from trio.testing import MockClock

from jaxrl.algo.advantage import compute_advantages
from jaxrl.env import Env
from jaxrl.runtime.episode import Limits, episode_seed
from jaxrl.runtime.loop import Teaching, training_data
from jaxrl.runtime.measure import rollout_metrics
from jaxrl.runtime.rollout import RolloutPlan, run_group
from jaxrl.runtime.sampler import SamplerLost
from jaxrl.runtime.strategy import FailFast, MinViableGroup, RetryOnFailure, Strategy
from jaxrl.tools import ToolFault
from jaxrl.types import Conclusion, RolloutError, StopReason, TrajectoryGroup

TERMINATED, TIMEOUT, CANCELLED = StopReason.TERMINATED, StopReason.TIMEOUT, StopReason.CANCELLED
ENV_ERROR, GRADER_ERROR = StopReason.ENV_ERROR, StopReason.GRADER_ERROR
PLACES = ("initial_observation", "step")


class Broken(Exception):
    """What the environment of a test raises."""


Trouble = Callable[[str, int, int], Any]
"""(where, member, attempt from 0) -> raises, gives something to await, or nothing. Member -1 is the builder."""


class Trial(Counting):
    """One attempt. `verdict` is what it says when something else ended it."""

    verdict: Conclusion | None = None
    closed = 0

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        await self._do("conclude")
        return self.verdict

    async def close(self) -> None:
        self.closed += 1
        await super().close()


@dataclass(frozen=True)
class Trials(CountingBuilder):
    """A group that keeps every env it made. Its envs' prompt and their number of turns say nothing of the attempt."""

    trouble: Trouble = lambda where, member, attempt: None
    verdict: Conclusion | None = None
    remakes: bool = True
    envs: list[Trial] = field(default_factory=list)

    async def _do(self, where: str) -> None:
        earlier = self.log.count(where)
        self.log.append(where)
        waiting = self.trouble(where, -1, earlier)
        if waiting is not None:
            await waiting

    def _make(self, member: int) -> Trial:
        attempt = sum(env.member == member for env in self.envs)
        act = lambda where, member: self.trouble(where, member, attempt)  # noqa: E731
        env = Trial(member, self.log, turns=self.turns, prompt=self.prompt, act=act)
        env.verdict = self.verdict
        self.envs.append(env)
        return env

    async def make_envs(self) -> Sequence[Env]:
        await self._do("make_envs")
        return [self._make(m) for m in range(self.size)]

    async def remake(self, member: int) -> Env | None:
        await self._do("remake")
        return self._make(member) if self.remakes else None


class Together(Trials):
    """Members that cannot be replayed one by one."""

    coupled: ClassVar[bool] = True


def raises(place: str, member: int, attempts: float = math.inf, error: Exception | None = None) -> Trouble:
    """One member fails in one place, the first `attempts` times."""

    def trouble(where: str, who: int, attempt: int) -> None:
        if (where, who) == (place, member) and attempt < attempts:
            raise error or Broken(place)

    return trouble


def engine() -> Any:
    return ScriptedEngine(lambda seed, turn, context: (40 + seed % 50, 41 + turn))


async def play(builder: Trials, strategy: Strategy, sampler: Any = None, **limits: float) -> TrajectoryGroup:
    """Play a group; whatever comes of it, everything was closed and cleaned up once, in that order."""
    sampler = sampler or engine()
    plan = RolloutPlan((0, "train", 0), Limits(6, **limits), strategy=strategy)  # type: ignore[arg-type]
    tasks = trio.lowlevel.current_statistics().tasks_living
    virtual = isinstance(trio.lowlevel.current_clock(), MockClock)
    try:
        with trio.fail_after(100_000 if virtual else 30):
            return await run_group(sampler, builder, plan, group=0)
    finally:
        assert [env.closed for env in builder.envs] == [1] * len(builder.envs)
        assert builder.log.count("cleanup") == 1
        assert builder.log[-1] == "cleanup", "never under a live episode"
        assert sampler.live_sessions == 0
        assert trio.lowlevel.current_statistics().tasks_living == tasks


def endings(group: TrajectoryGroup) -> list[StopReason]:
    return [t.stop_reason for t in group.trajectories_G]


# --- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("remakes", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("member", [0, 1, 2])
async def test_a_member_that_failed_is_played_again_in_its_place(place: str, member: int, remakes: bool) -> None:
    builder = Trials([], trouble=raises(place, member, 1), remakes=remakes)
    group = await play(builder, RetryOnFailure(1))
    assert group.viable
    assert endings(group) == [TERMINATED] * 3
    assert group.rewards_G == (0.5, 1.5, 2.5), "in the order of the members"
    assert len(group.errors) == 1


@pytest.mark.parametrize("remakes", [True, False])
async def test_F13_every_attempt_has_an_env_of_its_own(remakes: bool) -> None:
    builder = Trials([], trouble=raises("step", 1, 2), remakes=remakes)
    await play(builder, RetryOnFailure(3))
    started = [line for line in builder.log if line.startswith("initial_observation")]
    assert Counter(started) == {"initial_observation 0": 1, "initial_observation 1": 3, "initial_observation 2": 1}
    assert len(builder.envs) == (5 if remakes else 9), "a fresh group is made where one member cannot be"


async def test_I7_a_retry_draws_the_numbers_of_the_first_attempt() -> None:
    calm, shaken = engine(), engine()
    expected = await play(Trials([]), RetryOnFailure(), calm)
    group = await play(Trials([], trouble=raises("step", 1, 2)), RetryOnFailure(), shaken)
    seeds = [episode_seed(0, "train", 0, 0, member) for member in range(3)]
    assert Counter(s.seed for s in calm.sessions) == Counter(seeds)
    assert Counter(s.seed for s in shaken.sessions) == Counter([*seeds, seeds[1], seeds[1]])
    assert [t.transitions for t in group.trajectories_G] == [t.transitions for t in expected.trajectories_G]


async def test_retries_are_the_groups_and_not_the_members(autojump_clock: trio.abc.Clock) -> None:
    async def late(member: int) -> None:
        await nap(member + 1)
        raise Broken

    def failing(where: str, member: int, attempt: int) -> Any:
        return late(member) if (where, attempt) == ("step", 0) else None

    enough = await play(Trials([], trouble=failing), RetryOnFailure(3))
    assert (endings(enough), len(enough.errors), enough.viable) == ([TERMINATED] * 3, 3, True)
    short = await play(Trials([], trouble=failing), RetryOnFailure(2))
    assert (endings(short), len(short.errors), short.viable) == ([TERMINATED, TERMINATED, ENV_ERROR], 3, False)


@pytest.mark.parametrize("retries", [0, 2])
async def test_when_retries_run_out_the_group_is_given_up_and_its_siblings_cancelled(
    retries: int, autojump_clock: trio.abc.Clock
) -> None:
    def trouble(where: str, member: int, attempt: int) -> Any:
        if where == "step" and member == 1:
            raise Broken(where)
        return nap(1000) if where == "step" else None

    builder = Trials([], trouble=trouble)
    group = await play(builder, RetryOnFailure(retries))
    assert trio.current_time() < 1000
    assert endings(group) == [CANCELLED, ENV_ERROR, CANCELLED]
    assert not group.viable
    assert len(group.errors) == retries + 1
    assert len(builder.envs) == 3 + retries
    assert "compute_group_rewards" not in builder.log, "nobody is left to be rewarded"
    assert training_data([group], Teaching("mean")) == ([], [])


@pytest.mark.parametrize("strategy", [RetryOnFailure(2), MinViableGroup(2, 2)])
async def test_a_retry_that_cannot_be_made_is_a_failed_attempt(strategy: Strategy) -> None:
    def trouble(where: str, member: int, attempt: int) -> None:
        if (where, member, attempt) in {("step", 1, 0), ("remake", -1, 0)}:
            raise Broken(where)

    builder = Trials([], trouble=trouble)
    group = await play(builder, strategy)
    assert (endings(group), group.viable) == ([TERMINATED] * 3, True)
    assert [(e.message, e.member, e.turn) for e in group.errors] == [("step", 1, 1), ("remake", 1, None)]


async def test_a_spare_env_that_cannot_be_closed_keeps_no_other_open() -> None:
    def trouble(where: str, member: int, attempt: int) -> None:
        if (where, member, attempt) in {("step", 1, 0), ("close", 0, 1)}:
            raise Broken(where)

    group = await play(Trials([], trouble=trouble, remakes=False), RetryOnFailure(1))
    assert (endings(group), group.viable) == ([TERMINATED] * 3, True)
    assert [(e.message, e.stop_reason) for e in group.errors] == [("step", ENV_ERROR), ("close", ENV_ERROR)]


async def test_a_member_that_is_made_again_is_not_lost_yet(autojump_clock: trio.abc.Clock) -> None:
    def trouble(where: str, member: int, attempt: int) -> Any:
        async def late() -> None:
            await nap(1)
            raise Broken(where)

        if (where, attempt) == ("step", 0) and member == 0:
            raise Broken(where)
        if where == "step" and member == 1:
            return late()
        return nap(10) if where == "remake" else None

    group = await play(Trials([], trouble=trouble), MinViableGroup(2, 1))
    assert (endings(group), group.viable) == ([TERMINATED, ENV_ERROR, TERMINATED], True)


@pytest.mark.parametrize("failures", [1, 3])
async def test_envs_that_cannot_be_made_are_made_again_up_to_the_number(failures: int) -> None:
    builder = Trials([], trouble=raises("make_envs", -1, failures))
    group = await play(builder, RetryOnFailure(2))
    made = failures < 3
    assert (len(group.trajectories_G), group.viable) == ((3, True) if made else (0, False))
    assert [(e.kind, e.task, e.env, e.member) for e in group.errors] == [("Broken", "count", "Trials", None)] * failures
    assert builder.log.count("make_envs") == (failures + 1 if made else 3)


# --- fail fast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [*PLACES, "close"])
async def test_fail_fast_retries_nothing_and_shows_the_error(place: str) -> None:
    builder = Trials([], trouble=raises(place, 1))
    with pytest.RaisesGroup(pytest.RaisesExc(Broken, match=place)) as caught:
        await play(builder, FailFast())
    assert len(builder.envs) == 3
    notes = " ".join(caught.value.exceptions[0].__notes__)
    assert "of Trial, member 1" in notes
    assert "in turn" in notes


async def test_fail_fast_lives_with_a_timeout(autojump_clock: trio.abc.Clock) -> None:
    def trouble(where: str, member: int, attempt: int) -> Any:
        return nap(100) if (where, member) == ("step", 1) else None

    group = await play(Trials([], trouble=trouble), FailFast(), episode_seconds=5)
    assert (endings(group), group.viable) == ([TERMINATED, TIMEOUT, TERMINATED], True)
    assert [(e.kind, e.message) for e in group.errors] == [
        ("Timeout", "a time limit ended the episode: episode_seconds=5")
    ]


# --- the viable rest ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "least", "viable"),
    [(1, 3, True), (2, 3, False), (3, 1, True), (4, 1, False), (1, None, True), (2, None, False), (0, 9, True)],
)
async def test_F03_a_group_goes_on_with_what_is_left_if_that_is_enough(
    broken: int, least: int | None, viable: bool
) -> None:
    def trouble(where: str, member: int, attempt: int) -> None:
        if where == "initial_observation" and 0 <= member < broken:
            raise Broken(where)

    group = await play(Trials([], size=4, trouble=trouble), MinViableGroup(least, 0))
    assert group.viable is viable
    assert 0 < len(group.errors) <= broken or broken == 0
    if viable:
        assert len(group.errors) == broken
        assert endings(group) == [ENV_ERROR] * broken + [TERMINATED] * (4 - broken)


async def test_retries_come_before_the_rest() -> None:
    builder = Trials([], trouble=raises("step", 1))
    group = await play(builder, MinViableGroup(2, 2))
    assert (endings(group), group.viable) == ([TERMINATED, ENV_ERROR, TERMINATED], True)
    assert len(group.errors) == 3
    assert len(builder.envs) == 5


async def test_I13_who_failed_is_in_no_mean_and_moves_no_baseline() -> None:
    group = await play(Trials([], size=4, trouble=raises("step", 0)), MinViableGroup(2, 0))
    assert group.rewards_G[1:] == (1.5, 2.5, 3.5)
    metrics = rollout_metrics([group])
    assert metrics["env/all/reward/total"] == 2.5, "and not 1.875"
    assert metrics["env/all/bonus"] == 0.5
    assert metrics["rollout/stop/env_error"] == 0.25
    (advantages,) = compute_advantages([group], "mean")
    assert list(advantages) == pytest.approx([0.0, -1.0, 0.0, 1.0])
    data, _ = training_data([group], Teaching("mean"))
    assert {d.episode for d in data} == {1, 2, 3}, "a member that failed is not trained; one at the mean may be"


async def test_one_that_can_be_trusted_teaches_nothing() -> None:
    def trouble(where: str, member: int, attempt: int) -> None:
        if where == "step" and member > 0:
            raise Broken(where)

    group = await play(Trials([], trouble=trouble), MinViableGroup(1, 0))
    assert group.viable
    assert training_data([group], Teaching("mean")) == ([], [])


# --- members that play together -------------------------------------------------------------------


async def test_a_coupled_group_starts_again_as_a_whole(autojump_clock: trio.abc.Clock) -> None:
    def trouble(where: str, member: int, attempt: int) -> Any:
        if (where, member, attempt) == ("step", 1, 0):
            raise Broken(where)
        return nap(member + 1) if where == "step" else None

    builder = Together([], trouble=trouble)
    group = await play(builder, RetryOnFailure(1))
    assert (endings(group), group.viable) == ([TERMINATED] * 3, True)
    assert [env.member for env in builder.envs] == [0, 1, 2, 0, 1, 2]
    assert "remake" not in builder.log
    assert group.rewards_G == (0.5, 1.5, 2.5)
    assert [(e.kind, e.member) for e in group.errors] == [("Broken", 1)]


@pytest.mark.parametrize("strategy", [RetryOnFailure(1), MinViableGroup(1, 1)])
async def test_a_coupled_group_that_fails_again_has_no_rest(strategy: Strategy, autojump_clock: trio.abc.Clock) -> None:
    def trouble(where: str, member: int, attempt: int) -> Any:
        if (where, member) == ("step", 1):
            raise Broken(where)
        return nap(10) if where == "step" else None

    group = await play(Together([], trouble=trouble), strategy)
    assert (endings(group), group.viable) == ([CANCELLED, ENV_ERROR, CANCELLED], False)
    assert len(group.errors) == 2


# --- what fails around the episodes ---------------------------------------------------------------


async def test_I13_a_group_reward_that_fails_is_no_reward_at_all() -> None:
    group = await play(Trials([], trouble=raises("compute_group_rewards", -1)), MinViableGroup(1, 0))
    assert (endings(group), group.viable) == ([GRADER_ERROR] * 3, False)
    assert [(e.kind, e.stop_reason, e.member, e.env) for e in group.errors] == [
        ("Broken", GRADER_ERROR, None, "Trials")
    ]
    assert all(t.error == "Broken: compute_group_rewards" for t in group.trajectories_G)
    metrics = rollout_metrics([group])
    assert not metrics.get("env/all/reward/total"), "there is no reward to take the mean of"
    assert metrics["rollout/stop/grader_error"] == 1.0


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_I13_a_group_reward_that_is_no_number_is_a_graders_error(reward: float) -> None:
    class Odd(Trials):
        async def compute_group_rewards(self, trajectories_G: Any, envs_G: Any) -> Any:
            return [(reward, {})] * len(trajectories_G)

    group = await play(Odd([]), RetryOnFailure())
    assert endings(group) == [GRADER_ERROR] * 3
    assert all(math.isfinite(r) for r in group.rewards_G)


@pytest.mark.parametrize("strategy", [RetryOnFailure(0), MinViableGroup(3, 0)])
async def test_an_episode_is_whole_although_its_env_cannot_be_closed(strategy: Strategy) -> None:
    group = await play(Trials([], trouble=raises("close", 1)), strategy)
    assert (endings(group), group.viable, group.rewards_G) == ([TERMINATED] * 3, True, (0.5, 1.5, 2.5))
    assert [(e.kind, e.stop_reason, e.member) for e in group.errors] == [("Broken", ENV_ERROR, 1)]


async def test_a_group_is_whole_although_it_cannot_be_cleaned_up() -> None:
    group = await play(Trials([], trouble=raises("cleanup", -1)), RetryOnFailure())
    assert (endings(group), group.viable, group.rewards_G) == ([TERMINATED] * 3, True, (0.5, 1.5, 2.5))
    assert [(e.message, e.stop_reason) for e in group.errors] == [("cleanup", ENV_ERROR)]


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent_late", "grader_late", "expected"),
    [
        (False, False, StopReason.MAX_TURNS),
        (True, False, TIMEOUT),
        (False, True, GRADER_ERROR),
        (True, True, GRADER_ERROR),
    ],
)
async def test_F27_a_late_agent_that_solved_it_counts_and_a_late_grader_is_no_zero(
    agent_late: bool, grader_late: bool, expected: StopReason, autojump_clock: trio.abc.Clock
) -> None:
    def trouble(where: str, member: int, attempt: int) -> Any:
        if member != 1:
            return None
        return nap(1000) if {"step": agent_late, "conclude": grader_late}.get(where) else None

    builder = Trials([], turns=9, trouble=trouble, verdict=Conclusion(4.0, {"solved": 1.0}))
    limits = {"max_turns": 2, "episode_seconds": 5, "grader_seconds": 3}
    group = await play(builder, MinViableGroup(2, 0), **limits)
    assert trio.current_time() == 5 * agent_late + 3 * grader_late
    episode = group.trajectories_G[1]
    assert episode.stop_reason is expected
    graded = not grader_late
    assert (episode.ending.trained, episode.ending.in_baseline) == (graded, graded)
    assert episode.reward == (4.0 if graded else 0.0)
    assert len(group.errors) == grader_late
    assert rollout_metrics([group])["env/all/reward/total"] == pytest.approx(4.5), "of those that were graded"
    assert rollout_metrics([group])["env/all/solved"] == 1.0


@pytest.mark.parametrize("graded", [False, True])
async def test_a_timeout_counts_only_if_the_env_can_grade_it(graded: bool, autojump_clock: trio.abc.Clock) -> None:
    def trouble(where: str, member: int, attempt: int) -> Any:
        return nap(3) if (where, member) == ("step", 1) else None

    builder = Trials([], turns=3, trouble=trouble, verdict=Conclusion(4.0) if graded else None)
    group = await play(builder, RetryOnFailure(1), episode_seconds=5)
    assert (endings(group), group.viable) == ([TERMINATED, TIMEOUT, TERMINATED], graded)
    assert len(group.trajectories_G[1].transitions) == 1, "the finished part"
    assert [e.kind for e in group.errors] == ([] if graded else ["Timeout"] * 2)
    data, _ = training_data([group], Teaching("mean"))
    assert (1 in {d.episode for d in data}) is graded
    assert list(compute_advantages([group], "mean")[0]) == ([-2.0, 2.0, 0.0] if graded else [-1.0, 0.0, 1.0])


@pytest.mark.parametrize("place", ["step", "sample"])
async def test_a_turn_may_take_its_time_to_sample_and_an_episode_to_end(
    place: str, autojump_clock: trio.abc.Clock
) -> None:
    class Slow(ScriptedEngine):
        @asynccontextmanager
        async def session(self, **asked: Any) -> AsyncIterator[Any]:
            async with super().session(**asked) as session:
                first = session.sample

                async def sample(*given: Any, **how: Any) -> Any:
                    await trio.sleep(2.0)
                    return await first(*given, **how)

                session.sample = sample  # type: ignore[method-assign]
                yield session

    limits = {"sample_seconds": 1.0} if place == "sample" else {"sample_seconds": 2.5, "episode_seconds": 3.0}
    sampler = Slow(lambda seed, turn, context: (1, 2))
    group = await play(Trials([], turns=2), FailFast(), sampler, **limits)
    assert endings(group) == [TIMEOUT] * 3
    assert trio.current_time() == (1.0 if place == "sample" else 3.0)
    assert [len(t.transitions) for t in group.trajectories_G] == [0 if place == "sample" else 1] * 3


async def test_a_group_grader_that_is_late_is_a_graders_error(autojump_clock: trio.abc.Clock) -> None:
    def trouble(where: str, member: int, attempt: int) -> Any:
        return nap(1000) if where == "compute_group_rewards" else None

    group = await play(Trials([], trouble=trouble), RetryOnFailure(0), grader_seconds=2)
    assert trio.current_time() == 2
    assert endings(group) == [GRADER_ERROR] * 3
    assert [e.kind for e in group.errors] == ["TooSlowError"]


# --- what no strategy is asked about --------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FailFast(), RetryOnFailure(9), MinViableGroup(1, 9)])
@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_sampler_that_is_gone_is_never_tried_again(strategy: Strategy, wrapped: bool) -> None:
    lost = SamplerLost("gone")
    error = ExceptionGroup("an env's own nursery", [lost]) if wrapped else lost
    builder = Trials([], trouble=raises("step", 1, error=error))
    with pytest.RaisesGroup(SamplerLost, flatten_subgroups=True):
        await play(builder, strategy)
    assert len(builder.envs) == 3


@pytest.mark.parametrize("strategy", [RetryOnFailure(9), MinViableGroup(1, 9)])
@pytest.mark.parametrize("place", [*PLACES, "compute_group_rewards", "close", "cleanup", "make_envs"])
async def test_F05_a_cancelled_group_is_cancelled_and_not_a_failure(
    strategy: Strategy, place: str, autojump_clock: trio.abc.Clock
) -> None:
    def trouble(where: str, member: int, attempt: int) -> Any:
        return nap(10) if where == place and attempt == 0 else None

    builder = Trials([], trouble=trouble)
    with trio.move_on_after(5) as scope:
        await play(builder, strategy)
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert len(builder.envs) == (0 if place == "make_envs" else 3), "and nobody was played again"


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (Broken("x"), "Broken", ENV_ERROR),
        (ToolFault("tool 'look' failed"), "ToolFault", StopReason.TOOL_ERROR),
        (ExceptionGroup("wrapped", [ExceptionGroup("twice", [ToolFault("t")])]), "ToolFault", StopReason.TOOL_ERROR),
        (TimeoutError("slow"), "TimeoutError", ENV_ERROR),
    ],
)
async def test_an_error_says_what_where_and_whose(error: Exception, kind: str, reason: StopReason) -> None:
    def trouble(where: str, member: int, attempt: int) -> None:
        if (where, member) == ("step", 1):
            raise error

    group = await play(Trials([], trouble=trouble, name="the task"), MinViableGroup(2, 0))
    (said,) = group.errors
    leaf = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
    leaf = leaf.exceptions[0] if isinstance(leaf, ExceptionGroup) else leaf
    assert said == RolloutError(kind, str(leaf), reason, task="the task", env="Trial", member=1, turn=1)
    assert str(said) == f"{kind}: {leaf} (task 'the task', Trial, member 1, turn 1)"
    assert group.trajectories_G[1].stop_reason is reason


async def test_errors_are_counted_by_type_retried_ones_included() -> None:
    def trouble(where: str, member: int, attempt: int) -> None:
        if where == "step" and attempt == 0 and member in (0, 1):
            raise (Broken if member else OSError)(where)

    mended = await play(Trials([], trouble=trouble), RetryOnFailure())
    lost = await play(Trials([], trouble=raises("make_envs", -1)), RetryOnFailure(0))
    metrics = rollout_metrics([mended, lost])
    assert {name: value for name, value in metrics.items() if name.startswith("rollout_errors/")} == {
        "rollout_errors/Broken": 2.0,
        "rollout_errors/OSError": 1.0,
        "rollout_errors/total": 3.0,
        "rollout_errors/groups_skipped": 1.0,
    }
    assert sum(v for k, v in metrics.items() if k.startswith("rollout/stop/")) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetryOnFailure(-1), "max_retries=-1: expected 0 or more"),
        (lambda: MinViableGroup(2, -1), "max_retries=-1: expected 0 or more"),
        (lambda: MinViableGroup(0), "min_successful=0: expected at least 1"),
    ],
)
def test_I12_numbers_that_make_no_sense_are_refused(make: Callable[[], Strategy], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
