"""Many episodes at once cost time only where their environments do, and leave nothing behind.

The small sister of `benchmarks/rollouts.py`: counts and virtual seconds in place of a stopwatch.
"""

import gc
import tracemalloc

import pytest
import trio

from benchmarks.rollouts import Size, StubSampler, play_round
from jaxrl.types import StopReason, TrajectoryGroup

pytestmark = pytest.mark.slow

SMALL = Size(groups=25, members=8)


async def test_two_hundred_episodes_take_the_time_of_one(autojump_clock: trio.abc.Clock) -> None:
    sampler, began = StubSampler(SMALL), trio.current_time()
    groups_P = await play_round(SMALL, sampler)
    assert trio.current_time() - began == pytest.approx(5.0, abs=1e-9), "10 turns of half a second, and nothing else"
    assert (sampler.most, sampler.live) == (200, 0)
    assert [len(g.trajectories_G) for g in groups_P] == [8] * 25
    for trajectory in (t for g in groups_P for t in g.trajectories_G):
        assert trajectory.stop_reason is StopReason.TERMINATED
        assert [len(t.observation) for t in trajectory.transitions] == [64 + 64 * turn for turn in range(10)]
        assert trajectory.reward == 1.0


async def test_as_many_tasks_as_episodes_and_groups_and_none_is_left(autojump_clock: trio.abc.Clock) -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as nursery:
        nursery.start_soon(play_round, SMALL, StubSampler(SMALL))
        await trio.sleep(0.25)
        living = trio.lowlevel.current_statistics().tasks_living
        assert living - before == 1 + 25 + 200, "the round, a task a group, a task an episode: none for a turn"
    assert trio.lowlevel.current_statistics().tasks_living == before


def test_what_a_round_holds_grows_with_its_tokens_and_goes_with_it() -> None:
    """Contexts are kept whole, 8 bytes a position of each turn; what comes on top must not grow with the episode."""
    size = Size(groups=2, members=4, latency=0.0)
    play(size)  # first use of everything
    gc.collect()
    tracemalloc.start()
    try:
        groups_P = play(size)
        held, _ = tracemalloc.get_traced_memory()
        turns = 2 * 4 * size.turns
        contexts = 8 * sum(len(t.observation) for g in groups_P for e in g.trajectories_G for t in e.transitions)
        assert held < contexts + 2000 * turns, f"{(held - contexts) / turns:.0f} bytes a turn beside its context"
        groups_P.clear()
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
        assert left < 20_000, "bytes that outlive the round"
    finally:
        tracemalloc.stop()


def test_rounds_leave_no_objects_behind() -> None:
    size = Size(groups=2, members=4, latency=0.0)
    counts = []
    for _ in range(5):
        play(size)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[-1] - counts[1] <= 10, f"objects alive after each round: {counts}"


def play(size: Size) -> list[TrajectoryGroup]:
    return trio.run(play_round, size, StubSampler(size))
