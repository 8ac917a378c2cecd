"""Baselines that move with training: what the loop keeps of them, whichever group finishes first."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl.algo.shaping import Shaping
from jaxrl.runtime import loop
from jaxrl.runtime.loop import Mode, Schedule, Teaching, _Batch, baselines_after, train_loop, training_data
from jaxrl.runtime.supply import Place, Played
from jaxrl.types import Sample, StopReason, Trajectory, TrajectoryGroup, Transition

MOVING = Teaching("moving_baseline", knobs={"decay": 0.5})


def group(*rewards: float, stop: StopReason = StopReason.TERMINATED, viable: bool = True) -> TrajectoryGroup:
    turns = (Transition((1, 2), Sample((3,), (-1.0,), (0,), "stop"), 0.0, True),)
    episodes = tuple(Trajectory(turns, stop) for _ in rewards)
    return TrajectoryGroup(episodes, rewards, ({},) * len(rewards), ("duel",), viable=viable)


def advantages(data: list) -> list[float]:
    return [float(d.advantages[-1]) for d in data]


class Rehearsal:
    """Stands for a run: notes what its learner was given."""

    def __init__(self, teaching: Teaching, minibatch: int | None = None) -> None:
        self.teaching, self.mode = teaching, Mode(minibatch=minibatch)
        self.baselines: Any = {}
        self.given: list[float] = []
        note = lambda data: self.given.extend(advantages(data)) or {}  # noqa: E731
        self.learner = SimpleNamespace(update=note, accumulate=note, finish=dict)

    async def on_device(self, call: Any, *args: Any) -> Any:
        return call(*args)


async def learned(run: Any, groups: list[TrajectoryGroup], order: list[int]) -> None:
    batch = _Batch(run)
    for number in order:
        await batch.add(Played(Place(number, 0, number), 0, groups[number]))
    await batch.learn()


async def test_a_step_is_measured_by_the_baseline_before_it_and_moves_it_once() -> None:
    run = Rehearsal(MOVING)
    groups = [group(1.0, -1.0), group(0.0, 1.0), group(9.0, 9.0, viable=False), group(3.0, stop=StopReason.ENV_ERROR)]
    await learned(run, groups, [0, 1, 2, 3])
    assert run.given == [1.0, -1.0, 0.0, 1.0]
    assert run.baselines == {"duel#0": 0.75 * 0.5, "duel#1": 0.0}, "who failed or was given up moves nothing"
    run.given.clear()
    await learned(run, groups[:1], [0])
    assert run.given == [0.625, -1.0]


@pytest.mark.parametrize("minibatch", [None, 1, 2])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
async def test_I7_who_finishes_first_moves_no_baseline(minibatch: int | None, order: list[int]) -> None:
    groups = [group(0.1, 0.7), group(0.2, -0.3), group(1.1, 0.4)]
    alone, run = Rehearsal(MOVING), Rehearsal(MOVING, minibatch)
    for _ in range(3):
        await learned(alone, groups, [0, 1, 2])
        await learned(run, groups, order)
    assert run.baselines == alone.baselines
    assert sorted(run.given) == sorted(alone.given)


def test_a_baseline_is_of_the_rewards_that_are_trained() -> None:
    cut, teaching = (
        group(1.0, stop=StopReason.MAX_TURNS),
        Teaching("moving_baseline", shaping=Shaping(clamp_on_limit=True)),
    )
    assert baselines_after([cut], teaching, {}) == {"duel#0": 0.0}
    data, _ = training_data([cut], teaching, baselines={"duel#0": 0.25})
    assert advantages(data) == [-0.25]


async def test_I10_a_resumed_run_goes_on_with_the_baselines_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps, against two and a kill and two, through the JSON of a checkpoint: equal to the last bit."""
    batches = [[group(0.1 * step, 1 / (step + 3)), group(-0.7, 0.3 * step)] for step in range(4)]

    async def train(run: Any, supply: Any, step: int) -> dict[str, float]:
        await learned(run, batches[step], [0, 1])
        return {}

    async def nothing(run: Any, step: int) -> dict[str, float]:
        return {}

    async def run_from(start: int, stop: int, supplied: dict[str, Any] | None) -> tuple[Rehearsal, dict[str, Any]]:
        run: Any = Rehearsal(MOVING)
        saved: dict[int, str] = {}
        run.schedule = Schedule(stop, 0, 1)
        run.learner.state = None
        run.log = run.progress = SimpleNamespace(write=lambda *a: None, update=lambda *a: None)
        run.checkpointer = SimpleNamespace(save=lambda step, state, extra: saved.update({step: json.dumps(extra)}))
        run.train = SimpleNamespace()
        await train_loop(run, start=start, supplied=supplied)
        return run, json.loads(saved[stop])

    monkeypatch.setattr(loop, "train_step", train)
    monkeypatch.setattr(loop, "evaluate", nothing)
    straight, kept = await run_from(0, 4, None)
    first, half = await run_from(0, 2, None)
    second, kept_again = await run_from(2, 4, half)
    assert first.given + second.given == straight.given
    assert kept_again["baselines"] == kept["baselines"] != {}


def test_the_batch_knows_groups_that_teach_nothing_and_shapes_none_into_one_that_does() -> None:
    gpg = Teaching("gpg")
    data, useful = training_data([group(1.0, 0.0), group(0.0, 0.0)], gpg)
    assert (advantages(data), len(useful)) == ([1.0, -1.0], 1), "two of four members have a gradient"
    mixed = TrajectoryGroup(
        (*group(1.0).trajectories_G, *group(1.0, stop=StopReason.MAX_TURNS).trajectories_G), (1.0, 1.0), ({}, {})
    )
    shaping = Shaping(clamp_on_limit=True)
    data, useful = training_data([group(1.0, 0.0), mixed], Teaching("gpg", shaping=shaping))
    assert (advantages(data), len(useful)) == ([1.0, -1.0], 1)


def test_rows_of_turns_reach_the_tokens() -> None:
    def turns(*rewards: float) -> Trajectory:
        context: tuple[int, ...] = ()
        made = []
        for n, reward in enumerate(rewards):
            context = (*context, 1 + n)
            made.append(Transition(context, Sample((7,), (-1.0,), (0,), "stop"), reward, False))
            context = (*context, 7)
        return Trajectory(tuple(made), StopReason.TERMINATED)

    played = TrajectoryGroup((turns(0.0, 1.0), turns(0.0)), (1.0, 0.0), ({}, {}))
    data, _ = training_data([played], Teaching("gigpo", knobs={"gamma": 0.5}))
    assert [d.advantages[d.mask].tolist() for d in data] == [[0.75, 0.5], [-0.75]]
    assert all(d.advantages.dtype == np.float32 for d in data)
