"""When a run evaluates and saves, and what becomes of a batch between rollout and update."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl.algo.shaping import Shaping
from jaxrl.runtime import loop
from jaxrl.runtime.engine import Stats
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.loop import (
    Mode,
    Sampling,
    Schedule,
    Teaching,
    data_metrics,
    engine_metrics,
    evaluate,
    only_pairs,
    train_loop,
    training_data,
)
from jaxrl.types import Datum, Sample, StopReason, Trajectory, TrajectoryGroup, Transition


def turn(observation: tuple[int, ...], action: tuple[int, ...], rewrite: str | None = None) -> Transition:
    sample = Sample(action, (-1.0,) * len(action), (0,) * len(action), "stop")
    return Transition(observation, sample, 0.0, False, rewrite=rewrite)


def group(*rewards: float, stop: StopReason = StopReason.TERMINATED, turns: Any = None) -> TrajectoryGroup:
    episodes = tuple(Trajectory(turns or (turn((1, 2), (3, 4)),), stop) for _ in rewards)
    return TrajectoryGroup(episodes, rewards, ({},) * len(rewards))


def taught(groups: list[TrajectoryGroup], teaching: Teaching) -> tuple[list[Datum], dict[str, float]]:
    data, useful = training_data(groups, teaching)
    return data, data_metrics(data, useful)


def test_only_groups_that_teach_become_datums_and_the_others_are_counted() -> None:
    data, metrics = taught([group(1, 0), group(1, 1), group(0.5), group(0, 0, 3)], Teaching("mean"))
    assert metrics == {"data/groups_trained": 2.0, "data/datums_per_episode": 1.0, "data/duplicated_tokens": 0.0}
    assert len(data) == 5
    assert [float(d.advantages[-1]) for d in data] == [0.5, -0.5, -1.0, -1.0, 2.0]
    assert len({d.episode for d in data}) == 5


def test_a_rewritten_episode_is_several_datums_and_the_reasons_are_counted() -> None:
    turns = (turn((1, 2), (3,)), turn((1, 9), (4,), "thinking_stripped"), turn((1, 9, 4, 7), (5,)), turn((8,), (6,)))
    data, metrics = taught([group(1, 0, turns=turns)], Teaching("mean"))
    assert len(data) == 6
    assert metrics["data/datums_per_episode"] == 3.0
    assert metrics["data/split/thinking_stripped"] == 2.0
    assert metrics["data/split/prefix_changed"] == 2.0


def test_what_rewriting_costs_is_counted_by_hand_on_three_turns() -> None:
    prompt, thought, said, heard = (1, 2), (8, 8), (3,), (4, 5)
    first, second = turn(prompt, thought + said), turn(prompt + said + heard, (8, 6), "thinking_stripped")
    third = turn((*prompt, *said, *heard, 8, 6, 7), (9,))
    data, metrics = taught([group(1, 0, turns=(first, second, third))], Teaching("mean"))
    assert [d.tokens.tolist() for d in data[:2]] == [[1, 2, 8, 8, 3], [1, 2, 3, 4, 5, 8, 6, 7, 9]]
    assert metrics == {
        "data/groups_trained": 1.0,
        "data/datums_per_episode": 2.0,
        "data/duplicated_tokens": 4.0,  # the prompt, once more in each of two episodes
        "data/split/thinking_stripped": 2.0,
    }
    unsplit = [*first.observation, *first.action.tokens, *second.observation[3:], *second.action.tokens, 7, 9]
    extended = (first, turn(tuple(unsplit[:7]), (8, 6)), turn((*unsplit[:9], 7), (9,)))
    _, metrics = taught([group(1, 0, turns=extended)], Teaching("mean"))
    assert metrics["data/datums_per_episode"] == 1.0
    assert metrics["data/duplicated_tokens"] == 0.0


@pytest.mark.parametrize("stop", [StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_OVERFLOW])
def test_episodes_cut_short_are_masked_when_asked_but_stay_in_the_baseline(stop: StopReason) -> None:
    cut = group(0, stop=stop).trajectories_G[0]
    kept = group(1).trajectories_G[0]
    mixed = TrajectoryGroup((kept, cut), (1.0, 0.0), ({}, {}))
    (all_data, _), (masked, _) = (training_data([mixed], Teaching("mean", on)) for on in (False, True))
    assert len(all_data) == 2
    assert [float(d.advantages[-1]) for d in masked] == [0.5], "the advantage still knows of the other"


def test_groups_of_two_that_are_no_pair_are_left_out_by_number_and_other_sizes_stay() -> None:
    cut, whole = (group(1, stop=stop).trajectories_G[0] for stop in (StopReason.MAX_TOKENS, StopReason.TERMINATED))
    unsaid = Trajectory((replace(whole.transitions[0], masked=True),), StopReason.TERMINATED)
    pair = lambda *two: TrajectoryGroup(two, (1.0, 0.0), ({}, {}))  # noqa: E731
    groups = [pair(whole, cut), group(1, 0), pair(unsaid, whole), pair(cut, whole), group(0, 0, 3), group(0, 1)]
    teaching = Teaching("mean", overlong_masking=True, shaping=Shaping(clamp_on_limit=True), pairs=True)
    data, useful = training_data(groups, teaching, first_group=10)
    assert len(useful) == 6
    data, useful = only_pairs(data, useful, first_group=10)
    assert [id(g) for g in useful] == [id(g) for g in (groups[1], groups[4], groups[5])]
    assert [(d.group, d.advantages[-1]) for d in data] == [(11, 0.5), (11, -0.5), *THREE, (15, -0.5), (15, 0.5)]


THREE = [(14, -1.0), (14, -1.0), (14, 2.0)]


def test_nothing_to_learn_is_a_normal_case() -> None:
    for groups in ([], [group(1, 1)], [group(1)]):
        data, metrics = taught(groups, Teaching("mean_std", True))
        assert data == []
        assert metrics == {"data/groups_trained": 0.0, "data/datums_per_episode": 0.0, "data/duplicated_tokens": 0.0}


# --- the schedule ---------------------------------------------------------------------------------


class Recorder:
    """Stands for the parts of a run that the schedule drives, and notes what they were asked."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.evaluated: list[int] = []
        self.trained: list[int] = []
        self.saved: list[int] = []
        self.written: dict[int, dict[str, float]] = {}
        self.log = SimpleNamespace(write=self.written.__setitem__)
        self.progress = SimpleNamespace(update=lambda step, metrics: None)
        self.checkpointer = SimpleNamespace(save=lambda step, state, extra: self.saved.append(step))
        self.learner = SimpleNamespace(state=None)
        self.mode = Mode()
        self.train = type("D", (), {"get_batch": lambda self, i: ["task"], "__len__": lambda self: 9})()

    async def on_device(self, call: Any, *args: Any) -> Any:
        return call(*args)


async def driven(monkeypatch: pytest.MonkeyPatch, schedule: Schedule, start: int = 0) -> Recorder:
    run: Any = Recorder(schedule)

    async def train(_: Any, supply: Any, step: int) -> dict[str, float]:
        run.trained.append(step)
        return {"trained": step}

    async def look(_: Any, step: int) -> dict[str, float]:
        run.evaluated.append(step)
        return {"test/x": step}

    monkeypatch.setattr(loop, "train_step", train)
    monkeypatch.setattr(loop, "evaluate", look)
    await train_loop(run, start=start)
    return run


@pytest.mark.parametrize(
    ("schedule", "start", "evaluated", "saved"),
    [
        (Schedule(5, 2, 2), 0, [0, 2, 5], [2, 4, 5]),
        (Schedule(6, 2, 3), 0, [0, 2, 4, 6], [3, 6]),
        (Schedule(3, 0, 0), 0, [0, 3], [3]),
        (Schedule(1, 1, 1), 0, [0, 1], [1]),
        (Schedule(6, 2, 2), 2, [2, 4, 6], [4, 6]),
        (Schedule(6, 2, 2), 6, [], []),
    ],
)
async def test_the_first_and_last_step_are_evaluated_and_the_last_is_saved(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, start: int, evaluated: list[int], saved: list[int]
) -> None:
    run = await driven(monkeypatch, schedule, start)
    assert (run.evaluated, run.saved) == (evaluated, saved)
    assert run.trained == list(run.written) == list(range(start, schedule.steps))
    for step, metrics in run.written.items():
        assert metrics["trained"] == step
        assert metrics["progress/done_frac"] == (step + 1) / schedule.steps


async def test_I10_what_a_resumed_run_writes_is_what_the_straight_run_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(6, 2, 2)
    straight, resumed = await driven(monkeypatch, schedule), await driven(monkeypatch, schedule, start=4)
    for step in (4, 5):
        ours, theirs = ({k: v for k, v in r.written[step].items() if k != "time/total"} for r in (resumed, straight))
        assert ours == theirs


async def test_without_held_out_tasks_there_is_no_evaluation() -> None:
    run: Any = SimpleNamespace(test=None)
    assert await evaluate(run, 3) == {}


async def test_I7_every_evaluation_draws_from_the_same_numbers_at_its_own_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = []

    async def record(play: Any, builders: Any, plan: Any) -> list:
        plans.append((plan.identity, plan.temperature, plan.limits.max_turns, list(builders)))
        return []

    monkeypatch.setattr(loop, "run_batch", record)
    test = SimpleNamespace(get_batch=lambda i: [f"{i}a", f"{i}b"], __len__=None)
    held_out = type("D", (), {"get_batch": lambda self, i: test.get_batch(i), "__len__": lambda self: 2})()
    sampling = Sampling(5, Limits(4), 1.0, Limits(4, max_turns=9), 0.5)
    run: Any = SimpleNamespace(
        test=held_out, sampling=sampling, groups_to_record=0, mode=Mode(), player=lambda pinned: None
    )
    for step in (0, 10):
        assert set(await evaluate(run, step)) == {"time/eval"}
    assert plans == [((5, "test"), 0.5, 9, ["0a", "0b", "1a", "1b"])] * 2


def test_engine_metrics_are_those_since_the_step_began() -> None:
    engine: Any = SimpleNamespace(stats=Stats(110, 60, 100, 3.0), compilations=4)
    metrics = engine_metrics(engine, Stats(10, 20, 50, 1.0))
    assert metrics == {
        "engine/prefill_tokens": 100.0,
        "engine/decode_tokens": 40.0,
        "engine/tokens_per_second": 20.0,
        "engine/row_occupancy": 0.8,
        "engine/compilations": 4.0,
    }
    idle = engine_metrics(engine, engine.stats.copy())
    assert np.isfinite(list(idle.values())).all()
