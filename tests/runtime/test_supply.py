"""Groups under way: order of the data, replacement without a barrier, the bound on age, resuming."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import trio

from jaxrl.env import EnvGroupBuilder, RLDataset
from jaxrl.runtime.admission import Admission
from jaxrl.runtime.record import group_from_json, group_to_json
from jaxrl.runtime.supply import Place, Played, Stream, Supply
from jaxrl.types import RolloutError, Sample, StopReason, Trajectory, TrajectoryGroup, Transition


class Batches(RLDataset):
    """Batches of these sizes; a builder is its name."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def get_batch(self, index: int) -> Sequence[Any]:
        return [f"{index}.{i}" for i in range(self.sizes[index])]

    def __len__(self) -> int:
        return len(self.sizes)


def group(version: int, *rewards: float) -> TrajectoryGroup:
    action = Sample((5, 6), (-0.1, -1 / 3), (version, version), "stop")
    trajectory = Trajectory((Transition((1, 2), action, 0.0, True, metrics={"x": 1.0}),), StopReason.TERMINATED)
    return TrajectoryGroup((trajectory,) * len(rewards), rewards, ({},) * len(rewards), ("tag",))


class World:
    """A clock of versions and players that take as long as they are told."""

    def __init__(
        self, seconds: Callable[[int], float], rewards: Callable[[int], tuple[float, ...]] | None = None
    ) -> None:
        self.version = 0
        self.seconds, self.rewards = seconds, rewards or (lambda number: (0.0, 1.0))
        self.started: list[int] = []

    async def play(self, builder: EnvGroupBuilder, place: Place) -> TrajectoryGroup:
        self.started.append(place.number)
        version = self.version
        await trio.sleep(self.seconds(place.number))
        return group(version, *self.rewards(place.number))

    def supply(self, nursery: trio.Nursery, dataset: RLDataset, **kwargs: Any) -> Supply:
        teaches = lambda group: len(set(group.rewards_G)) > 1  # noqa: E731
        return Supply(Stream(dataset), self.play, nursery, version=lambda: self.version, teaches=teaches, **kwargs)


def test_the_stream_is_the_dataset_in_order_and_then_again_under_new_batch_numbers() -> None:
    stream = Stream(Batches(2, 1))
    places = [stream.place(n) for n in range(6)]
    assert [(p.batch, p.index) for p in places] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0)]
    assert [stream.builder(p) for p in places] == ["0.0", "0.1", "1.0", "0.0", "0.1", "1.0"]
    assert [stream.size(step) for step in range(3)] == [2, 1, 2]


async def steps(
    world: World, supply: Supply, count: int, admission: Admission, *, train: float = 1.0
) -> list[list[Played]]:
    """Take and train batches."""
    batches = []
    for step in range(count):
        supply.fill(admission, needed=admission.groups * (min(admission.steps_ahead, count - step - 1) + 1))
        batches.append([await supply.take(step) for _ in range(admission.groups)])
        await trio.sleep(train)
        world.version = step + 1
        supply.trained()
    return batches


async def test_in_turn_every_group_starts_with_the_weights_that_train_it(autojump_clock: trio.abc.Clock) -> None:
    world = World(lambda n: [3.0, 1.0, 2.0][n % 3])
    async with trio.open_nursery() as nursery:
        supply = world.supply(nursery, Batches(3, 3))
        batches = await steps(world, supply, 2, Admission(3))
    assert [sorted(p.place.number for p in b) for b in batches] == [[0, 1, 2], [3, 4, 5]]
    assert [p.version for p in batches[1]] == [1, 1, 1]
    assert supply.untrained == 0


async def test_groups_of_equal_rewards_are_replaced_at_once_and_up_to_the_cap(autojump_clock: trio.abc.Clock) -> None:
    constant = {0, 2, 3}
    world = World(lambda n: 1.0 + n, lambda n: (1.0, 1.0) if n in constant else (0.0, 1.0))
    async with trio.open_nursery() as nursery:
        supply = world.supply(nursery, Batches(2, 2, 2, 2), max_attempts=3)
        supply.fill(Admission(2), needed=2)
        taken = [await supply.take(0) for _ in range(2)]
    assert [p.place.number for p in taken] == [1, 4]
    assert [p.place.number for p in supply.replaced()] == [0, 2, 3]
    assert sorted(world.started) == [0, 1, 2, 3, 4], (
        "nobody waited for the slower sibling before starting a replacement"
    )


async def test_at_the_cap_a_batch_takes_what_there_is(autojump_clock: trio.abc.Clock) -> None:
    world = World(lambda n: 1.0, lambda n: (1.0, 1.0))
    async with trio.open_nursery() as nursery:
        supply = world.supply(nursery, Batches(2, 2, 2), max_attempts=2)
        for step in range(2):
            supply.fill(Admission(2), needed=2)
            taken = [await supply.take(step) for _ in range(2)]
            numbers = [p.place.number for p in [*taken, *supply.replaced()]]
            assert sorted(numbers) == list(range(4 * step, 4 * step + 4)), "which of them counts is of no consequence"
            world.version = step + 1
            supply.trained()
    assert sorted(world.started) == list(range(8))


async def test_groups_too_old_for_the_bound_are_an_error_and_not_a_wait_for_ever() -> None:
    world = World(lambda n: 0.0)
    async with trio.open_nursery() as nursery:
        supply = world.supply(nursery, Batches(2, 2))
        supply.fill(Admission(2), needed=2)
        with pytest.raises(RuntimeError, match=r"started with version 0, and step 1 .* 0 steps"):
            await supply.take(1)


LATENCIES: dict[str, Callable[[np.random.Generator], float]] = {
    "equal": lambda rng: 1.0,
    "exponential": lambda rng: float(rng.exponential(2.0)),
    "heavy tail": lambda rng: float(rng.pareto(1.1)),
    "one in ten hangs for long": lambda rng: 100.0 if rng.random() < 0.1 else 0.5,
    "instant": lambda rng: 0.0,
    "slower than training": lambda rng: float(rng.uniform(20, 30)),
}


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("latency", LATENCIES)
async def test_I8_no_trained_token_is_too_old_nothing_is_lost_and_nothing_trained_twice(
    latency: str, ahead: int, attempts: int, autojump_clock: trio.abc.Clock
) -> None:
    seconds = [LATENCIES[latency](rng) for rng in np.random.default_rng(7).spawn(400)]
    flat = set(np.random.default_rng(8).choice(400, 120, replace=False).tolist())
    world = World(seconds.__getitem__, lambda n: (1.0, 1.0) if n in flat else (0.0, 1.0))
    count, admission, dropped = 12, Admission(4, ahead), list[int]()
    async with trio.open_nursery() as nursery:
        supply = world.supply(nursery, Batches(*[5] * 80), max_attempts=attempts)
        trained = []
        for step in range(count):
            supply.fill(admission, needed=4 * (min(ahead, count - step - 1) + 1))
            batch = [await supply.take(step) for _ in range(4)]
            trained += [p.place.number for p in batch]
            dropped += [p.place.number for p in supply.replaced()]
            for played in batch:
                for trajectory in played.group.trajectories_G:
                    versions = [v for t in trajectory.transitions for v in t.action.versions]
                    assert all(0 <= step - v <= ahead for v in versions)
            await trio.sleep(1.0)
            world.version = step + 1
            supply.trained()
            assert supply.untrained <= 4 * (ahead + 1)
        dropped += [p.place.number for p in supply.replaced()]
        left = supply.untrained
        nursery.cancel_scope.cancel()
    assert max(Counter(trained + dropped).values()) == 1
    assert len(trained) == 4 * count
    assert len(world.started) == len(trained) + len(dropped) + left, "every group is trained, replaced, or under way"
    if attempts == 1:
        assert (dropped, left) == ([], 0)
        assert sorted(trained) == list(range(4 * count))


async def test_ahead_playing_and_training_share_the_time(autojump_clock: trio.abc.Clock) -> None:
    took = {}
    for ahead in (0, 1):
        world, began = World(lambda n: 1.0), trio.current_time()
        async with trio.open_nursery() as nursery:
            await steps(world, world.supply(nursery, Batches(*[2] * 20)), 20, Admission(2, ahead), train=1.0)
        took[ahead] = trio.current_time() - began
    assert took[0] == pytest.approx(40.0)
    assert took[1] == pytest.approx(21.0)


async def test_I10_a_resumed_supply_has_what_was_finished_and_plays_what_was_not(
    autojump_clock: trio.abc.Clock,
) -> None:
    world = World(lambda n: [1.0, 50.0, 2.0, 3.0, 60.0, 4.0][n])
    async with trio.open_nursery() as nursery:
        supply = world.supply(nursery, Batches(6))
        supply.fill(Admission(2, 2), needed=6)
        first = [(await supply.take(0)).place.number for _ in range(2)]
        await trio.sleep(10.0)
        supply.trained()
        state = supply.state()
        nursery.cancel_scope.cancel()
    assert first == [0, 2]
    assert (state["next"], state["unfinished"]) == (6, [1, 4])
    again = World(lambda n: 1.0)
    again.version = 1
    async with trio.open_nursery() as nursery:
        supply = again.supply(nursery, Batches(6))
        supply.restore(state)
        supply.fill(Admission(2, 2), needed=4)
        played = [await supply.take(1 + i // 2) for i in range(4)]
    assert sorted(again.started) == [1, 4]
    assert sorted(p.place.number for p in played) == [1, 3, 4, 5]
    assert {p.place.number: p.version for p in played} == {1: 1, 3: 0, 4: 1, 5: 0}
    (kept,) = [p.group for p in played if p.place.number == 3]
    assert kept == group(0, 0.0, 1.0), "to the last bit, log-probs included"


def test_errors_come_back_too() -> None:
    error = RolloutError("OSError", "gone", StopReason.ENV_ERROR, "task", "Env", 1, 2)
    failed = Trajectory((), StopReason.ENV_ERROR, "OSError: gone")
    mixed = TrajectoryGroup((failed,), (0.0,), ({},), ("a",), (error,), viable=False)
    assert group_from_json(group_to_json(mixed)) == mixed
