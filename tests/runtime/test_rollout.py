"""Groups as nurseries: order, seeds, and that nothing outlives a group whatever fails in it."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from episodes import ENGINE, TALKER, CountingBuilder, ScriptedEngine, nap, talker

from jaxrl.algo.aggregate import token_weights
from jaxrl.algo.batch import pack
from jaxrl.algo.step import make_eval_logprobs
from jaxrl.env import EnvironmentFault, StepResult
from jaxrl.runtime.engine import Engine, open_engine
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.loop import Teaching, training_data
from jaxrl.runtime.rollout import CLEANUP_SECONDS, RolloutPlan, run_batch, run_group
from jaxrl.runtime.sampler import SamplerLost
from jaxrl.runtime.strategy import MinViableGroup, RetryOnFailure
from jaxrl.tools import ToolFault
from jaxrl.types import StopReason, TrajectoryGroup

PLAN = RolloutPlan((0, "train", 0), Limits(6))
PLACES = ["make_envs", "initial_observation", "step", "close", "compute_group_rewards", "cleanup"]


def scripted() -> Any:
    return ScriptedEngine(lambda seed, turn, context: (40 + seed % 50, 41 + turn))


def prompts(count: int, **fields: Any) -> list[CountingBuilder]:
    """Builders whose groups differ in prompt, length of prompt and size."""
    rng = np.random.default_rng(0)
    return [
        CountingBuilder([], size=2 + i % 3, prompt=tuple(rng.integers(1, 256, 5 + 7 * i).tolist()), **fields)
        for i in range(count)
    ]


# --- what a group is ------------------------------------------------------------------------------


async def test_a_group_is_in_the_order_of_its_envs_whoever_finishes_first() -> None:
    def act(where: str, member: int) -> Any:
        if where == "step":
            return nap(0.02 * (3 - member))
        return None

    log: list[str] = []
    group = await run_group(scripted(), CountingBuilder(log, act=act), PLAN, group=4)
    assert [t.reward for t in group.trajectories_G] == [0.0, 1.0, 2.0]
    assert group.rewards_G == (0.5, 1.5, 2.5)
    assert group.metrics_G == ({"bonus": 0.5},) * 3
    assert log.index("close 2") < log.index("close 0") < log.index("compute_group_rewards")
    assert log[-1] == "cleanup"


async def test_cleanup_never_runs_under_a_live_episode() -> None:
    log: list[str] = []
    await run_group(scripted(), CountingBuilder(log), PLAN, group=0)
    assert log[-2:] == ["compute_group_rewards", "cleanup"]
    assert Counter(line.split()[0] for line in log) == {
        "make_envs": 1,
        "initial_observation": 3,
        "step": 6,
        "close": 3,
        "compute_group_rewards": 1,
        "cleanup": 1,
    }


async def test_I14_members_start_from_one_observation_and_share_the_engines_prompt() -> None:
    engine = scripted()
    groups = await run_batch(partial(run_group, engine), prompts(3), PLAN)
    for builder, group in zip(prompts(3), groups, strict=True):
        assert {t.transitions[0].observation for t in group.trajectories_G} == {builder.prompt}
        assert len(group.trajectories_G) == builder.size
    assert Counter(engine.groups) == {(0, "train", 0, 0): 2, (0, "train", 0, 1): 3, (0, "train", 0, 2): 4}
    assert len({s.seed for s in engine.sessions}) == 9


@pytest.mark.parametrize("survivors", [0, 1])
async def test_groups_that_are_too_small_or_cut_short_are_groups_too(survivors: int) -> None:
    plan = RolloutPlan((0,), Limits(6))
    short: Any = ScriptedEngine(lambda *_: (1,), 20)
    builder = CountingBuilder([], size=survivors, prompt=(1,) * 20)
    group = await run_group(short, builder, plan, group=0)
    assert [t.stop_reason for t in group.trajectories_G] == [StopReason.CONTEXT_OVERFLOW] * survivors
    assert [t.transitions for t in group.trajectories_G] == [()] * survivors
    data, useful = training_data([group], Teaching("mean"))
    assert data == useful == []


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_a_reward_that_is_no_number_is_an_error_not_a_group_without_signal(reward: float) -> None:
    class Broken(CountingBuilder):
        async def compute_group_rewards(self, trajectories_G: Any, envs_G: Any) -> Any:
            return [(0.0, {}), (reward, {})]

    with pytest.raises(ValueError, match=r"reward (nan|inf) of member 1: expected a finite number") as caught:
        await run_group(scripted(), Broken([], size=2), PLAN, group=7)
    assert "in group 7, task 'count'" in caught.value.__notes__


# --- I3 and I7, with a real engine ----------------------------------------------------------------


async def rolled(
    builders: list[CountingBuilder], temperature: float = 1.0, play: Any = run_group
) -> tuple[list[TrajectoryGroup], Engine]:
    plan = RolloutPlan((3, "train", 1), Limits(6), temperature)
    async with open_engine(TALKER, talker(), config=ENGINE) as engine:
        return await run_batch(partial(play, engine), builders, plan), engine


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_I3_the_trainers_logprobs_are_the_samplers_through_the_whole_path(temperature: float) -> None:
    groups, _ = await rolled(prompts(5, turns=3), temperature)
    data, _ = training_data(groups, Teaching("mean"))
    assert len(data) == sum(b.size for b in prompts(5))
    batch = pack(data, token_weights(data, "token_mean"), width=127, rows=4)
    logprobs = make_eval_logprobs(TALKER, None, temperature=temperature)
    scored = np.asarray(logprobs(talker().params, None, batch))
    assert batch.mask.sum() == sum(
        len(t.action.tokens) for g in groups for e in g.trajectories_G for t in e.transitions
    )
    assert np.abs(scored - batch.logp_sampler)[batch.mask].max() < 1e-4
    assert (batch.logp_sampler[batch.mask] < 0).all()
    assert np.exp(batch.logp_sampler[batch.mask]).std() > 0.01, "a uniform model would hide errors"


async def test_I7_trajectories_do_not_depend_on_when_a_group_starts() -> None:
    expected, _ = await rolled(prompts(5))
    started: list[list[int]] = []
    for order in ([4, 2, 0, 3, 1], [1, 3, 4, 0, 2]):

        async def later(*args: Any, group: int, order: list[int] = order) -> TrajectoryGroup:
            for _ in range(7 * order.index(group)):
                await trio.lowlevel.checkpoint()
            started[-1].append(group)
            return await run_group(*args, group=group)

        started.append([])
        groups, _ = await rolled(prompts(5), play=later)
        assert started[-1] == order
        assert [tokens(g) for g in groups] == [tokens(g) for g in expected]
    distinct = {tokens(g) for g in expected}
    assert len(distinct) == 5


def tokens(group: TrajectoryGroup) -> tuple:
    return tuple(tuple((t.observation, t.action.tokens) for t in e.transitions) for e in group.trajectories_G)


# --- I9 -------------------------------------------------------------------------------------------


class Broken(Exception):
    """What the environment of a test raises."""


def breaks(place: str, member: int) -> Callable[[str, int], Any]:
    """Envs that never end by themselves, but for the place that raises."""

    def act(where: str, who: int) -> Any:
        if where == place and who in (member, -1):
            raise Broken(place)
        return nap(1000) if where == "step" and place in ("initial_observation", "step") else None

    return act


async def failure(run: Awaitable[Any]) -> tuple[BaseException, list[str]]:
    """The one error inside the groups that `run` raises, with its notes and theirs."""
    try:
        await run
    except Exception as raised:
        error: BaseException = raised
        notes: list[str] = list(getattr(raised, "__notes__", ()))
        while isinstance(error, BaseExceptionGroup):
            (error,) = error.exceptions
            notes += getattr(error, "__notes__", ())
        return error, notes
    pytest.fail("nothing was raised")


@pytest.mark.parametrize("place", PLACES)
async def test_I9_whatever_raises_everything_is_closed_once_and_the_error_is_what_is_seen(
    place: str, autojump_clock: trio.abc.Clock
) -> None:
    logs: list[list[str]] = [[], []]
    engine = scripted()
    builders = [
        CountingBuilder(logs[0], act=breaks(place, 1), name="the task"),
        CountingBuilder(logs[1], act=lambda where, member: nap(1000) if where == "step" else None),
    ]
    error, notes = await failure(run_batch(partial(run_group, engine), builders, PLAN))
    assert isinstance(error, Broken)
    assert str(error) == place
    assert "in group 0, task 'the task'" in notes
    if place in ("initial_observation", "step"):
        assert "in turn 1 of Counting, member 1" in notes
    if place == "close":
        assert "in turn 3 of Counting, member 1" in notes
    assert trio.current_time() < 1000, "siblings were cancelled, not waited for"
    opened = {0} if place == "make_envs" else {1}
    for log in logs:
        counts = Counter(log)
        assert counts["cleanup"] == 1
        assert [counts[f"close {m}"] for m in range(3)] == ([0] * 3 if log is logs[0] and opened == {0} else [1] * 3)
        assert log.index("cleanup") == len(log) - 1
    assert engine.live_sessions == 0


async def test_I9_a_failing_close_does_not_hide_the_error_before_it() -> None:
    def act(where: str, member: int) -> Any:
        if where in ("step", "close", "cleanup") and member in (1, -1):
            raise Broken(where)

    error, notes = await failure(run_group(scripted(), CountingBuilder([], size=2, act=act), PLAN, group=0))
    assert str(error) == "step"
    assert "afterwards Counting.close failed too: Broken('close')" in notes
    assert "afterwards CountingBuilder.cleanup failed too: Broken('cleanup')" in notes


@pytest.mark.parametrize("place", PLACES)
async def test_I9_an_env_that_ends_the_process_is_a_fault_with_its_place(place: str) -> None:
    def act(where: str, member: int) -> Any:
        if where == place and member in (1, -1):
            raise SystemExit(3)

    log: list[str] = []
    error, notes = await failure(run_group(scripted(), CountingBuilder(log, act=act, name="the task"), PLAN, group=0))
    assert isinstance(error, EnvironmentFault)
    assert str(error) == "SystemExit(3): an environment must not end the process"
    assert "in group 0, task 'the task'" in notes
    assert any("Counting, member 1" in note for note in notes) == (place in ("initial_observation", "step", "close"))
    assert log[-1] == "cleanup"


async def test_an_env_that_ends_the_process_is_played_again_like_any_that_fails() -> None:
    def act(where: str, member: int) -> Any:
        if (where, member) == ("step", 1) and not left:
            left.append(1)
            raise SystemExit(3)

    left: list[int] = []
    builder = CountingBuilder([], act=act)
    group = await run_group(scripted(), builder, replace(PLAN, strategy=RetryOnFailure(1)), group=0)
    assert group.rewards_G == (0.5, 1.5, 2.5)
    (error,) = group.errors
    assert (error.kind, error.member, error.turn) == ("EnvironmentFault", 1, 1)


@pytest.mark.parametrize("place", ["close", "cleanup"])
async def test_I9_a_release_that_hangs_is_given_up(place: str, autojump_clock: trio.abc.Clock) -> None:
    def act(where: str, member: int) -> Any:
        return nap(10_000) if where == place and member in (1, -1) else None

    log: list[str] = []
    error, _ = await failure(run_group(scripted(), CountingBuilder(log, act=act), PLAN, group=0))
    assert isinstance(error, TimeoutError)
    assert str(error).startswith({"close": "Counting.close took", "cleanup": "CountingBuilder.cleanup took"}[place])
    assert trio.current_time() == CLEANUP_SECONDS
    assert Counter(log)["cleanup"] == 1


@pytest.mark.parametrize("place", ["make_envs", "initial_observation", "step", "compute_group_rewards"])
async def test_I9_a_cancelled_group_is_closed_although_closing_takes_time(
    place: str, autojump_clock: trio.abc.Clock
) -> None:
    finished: list[str] = []

    def act(where: str, member: int) -> Any:
        async def release() -> None:
            await nap(5)
            finished.append(f"{where} {member}")

        if where == place:
            return nap(1000)
        return release() if where in ("close", "cleanup") else None

    engine = scripted()
    with trio.move_on_after(3) as scope:
        await run_batch(partial(run_group, engine), [CountingBuilder([], size=2, act=act)], PLAN)
    assert scope.cancelled_caught
    closed = [] if place == "make_envs" else ["close 0", "close 1"]
    assert sorted(finished) == ["cleanup -1", *closed]
    assert engine.live_sessions == 0


async def test_I9_a_real_engine_has_no_session_and_no_slot_left() -> None:
    for member in range(3):

        def act(where: str, who: int, member: int = member) -> Any:
            if (where, who) == ("step", member):
                raise Broken
            return None

        async with open_engine(TALKER, talker(), config=ENGINE) as engine:
            error, _ = await failure(
                run_batch(partial(run_group, engine), [*prompts(3), CountingBuilder([], act=act)], PLAN)
            )
            assert isinstance(error, Broken)
            assert (engine.live_sessions, engine.slots_in_use) == (0, 0)
            with trio.move_on_after(0.005):
                await run_batch(partial(run_group, engine), prompts(4, turns=8), PLAN)
            assert (engine.live_sessions, engine.slots_in_use) == (0, 0)
            groups = await run_batch(partial(run_group, engine), prompts(2), PLAN)
            assert [len(g.trajectories_G) for g in groups] == [2, 3]


# --- what a review found --------------------------------------------------------------------------


async def test_I9_a_fault_on_the_way_out_of_a_cancellation_does_not_end_the_run(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Member 0 fails and the group is lost; member 1's own nursery fails while it is being cancelled."""

    async def stubborn() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise OSError("the socket was gone too")

    async def late() -> None:
        await trio.sleep(1)
        raise ValueError("first")

    def act(where: str, member: int) -> Any:
        if where == "step" and member == 0:
            return late()
        return stubborn() if where == "step" and member == 1 else None

    plan = replace(PLAN, strategy=RetryOnFailure(0))
    group = await run_group(scripted(), CountingBuilder([], size=3, act=act), plan, group=0)
    assert not group.viable
    assert group.trajectories_G[0].stop_reason is StopReason.ENV_ERROR
    assert {e.kind for e in group.errors} == {"ValueError", "OSError"}


@pytest.mark.parametrize("wrap", ["cause", "second in a group"])
async def test_a_lost_sampler_is_found_wherever_it_hides(wrap: str) -> None:
    def act(where: str, member: int) -> Any:
        if where != "step":
            return
        if wrap == "cause":
            raise ToolFault("lookup failed") from SamplerLost("gone")
        raise ExceptionGroup("two", [OSError("x"), SamplerLost("gone")])

    log: list[str] = []
    with pytest.raises((ExceptionGroup, ToolFault)):
        await run_group(scripted(), CountingBuilder(log, act=act), replace(PLAN, strategy=RetryOnFailure(5)), group=0)
    assert log.count("make_envs") == 1


async def test_a_fault_has_to_be_raised_and_cannot_be_an_ending() -> None:
    class Quiet(CountingBuilder):
        async def make_envs(self) -> Any:
            envs = await super().make_envs()
            for env in envs:
                env.step = self.fail  # type: ignore[method-assign]
            return envs

        async def fail(self, action: Any, *, extra: Any = None) -> StepResult:
            return StepResult(1.0, True, stop_reason=StopReason.GRADER_ERROR)

    with pytest.raises(ExceptionGroup) as caught:
        await run_group(scripted(), Quiet([]), PLAN, group=0)
    assert caught.group_contains(EnvironmentFault, match=r"ended its episode with StopReason.GRADER_ERROR; a fault has")
    group = await run_group(scripted(), Quiet([]), replace(PLAN, strategy=MinViableGroup(1, 0)), group=0)
    assert {t.stop_reason for t in group.trajectories_G} <= {StopReason.ENV_ERROR, StopReason.CANCELLED}


async def test_a_group_grader_is_tried_again_like_an_episode() -> None:
    tries: list[int] = []

    def act(where: str, member: int) -> Any:
        if where == "compute_group_rewards":
            tries.append(1)
            if len(tries) == 1:
                raise OSError("the judge was busy")

    group = await run_group(
        scripted(), CountingBuilder([], act=act), replace(PLAN, strategy=RetryOnFailure(1)), group=0
    )
    assert group.viable
    assert [e.stop_reason for e in group.errors] == [StopReason.GRADER_ERROR]
    assert group.rewards_G == (0.5, 1.5, 2.5)
