"""Groups played elsewhere are the groups played here; a worker's death, error or end is seen at once."""

import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from distributed import Client, LocalCluster
from episodes import ENGINE, TALKER, talker
from scripted import ChatterBuilder, HashSampler, HashSession, Odd

from jaxrl.runtime.endpoint import open_endpoint
from jaxrl.runtime.engine import open_engine
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.executor import (
    Answer,
    Unpicklable,
    WorkerError,
    WorkerLost,
    loads,
    open_executor,
    pack_job,
    play_group,
)
from jaxrl.runtime.rollout import PlayGroup, RolloutPlan, run_group
from jaxrl.runtime.wire import ConnectionLost
from jaxrl.types import TrajectoryGroup

pytestmark = pytest.mark.slow

PLAN = RolloutPlan((0, "train", 5), Limits(6), temperature=0.8)
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=SPAWN) as executor:
        yield executor


@pytest.fixture(scope="module")
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def dask() -> Iterator[Executor]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield client.get_executor()


@pytest.fixture(params=["threads", "processes", "dask"])
def executor(request: pytest.FixtureRequest) -> Executor:
    return request.getfixturevalue(request.param)


async def all_groups(run: PlayGroup, builders: list[ChatterBuilder]) -> list[TrajectoryGroup]:
    groups: dict[int, TrajectoryGroup] = {}

    async def one(index: int) -> None:
        groups[index] = await run(builders[index], PLAN, group=index)

    async with trio.open_nursery() as nursery:
        for index in range(len(builders)):
            nursery.start_soon(one, index)
    return [groups[i] for i in range(len(builders))]


def diary(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


async def until_written(path: Path, what: str, seconds: float = 20) -> None:
    with trio.fail_after(seconds):
        while not any(line[0] == what for line in diary(path)):  # noqa: ASYNC110  another process writes it
            await trio.sleep(0.01)


async def warm(run: PlayGroup) -> None:
    """Have every worker begin, and finish what was queued."""
    await all_groups(run, [ChatterBuilder(size=1, turns=1)] * 4)


@asynccontextmanager
async def nothing_left(sampler: HashSampler) -> AsyncIterator[None]:
    """After the block there are the sessions, threads, files and children that there were before it."""
    before = held()
    yield
    await sampler.until_live(0)
    with trio.move_on_after(5):  # a socket is closed a moment after its session, on a busy machine a long one
        while more_than(before):  # noqa: ASYNC110  the kernel sends no event
            await trio.sleep(0.001)
    assert not more_than(before), (before, held())


def more_than(before: tuple[int, int, int]) -> bool:
    """What earlier tests left may end meanwhile, so less is right too."""
    return any(now > then for now, then in zip(held(), before, strict=True))


def held() -> tuple[int, int, int]:
    return threading.active_count(), len(os.listdir("/dev/fd")), len(multiprocessing.active_children())


# --- the same groups ------------------------------------------------------------------------------


async def test_groups_played_elsewhere_are_the_groups_played_here(executor: Executor) -> None:
    builders = [ChatterBuilder(size=1 + i % 3, turns=2 + i) for i in range(4)]
    here = await all_groups(partial(run_group, HashSampler()), builders)
    sampler = HashSampler()
    async with open_executor(executor, sampler) as run:
        there = await all_groups(run, builders)
    assert not sampler.live
    if isinstance(executor, ThreadPoolExecutor):
        assert there == here
        return
    for group in there:
        for trajectory in group.trajectories_G:
            assert {t.metrics["jax"] for t in trajectory.transitions} == {0.0}, "a worker has imported JAX"
    assert [unmeasured(g) for g in there] == [unmeasured(g) for g in here]
    assert Counter(a["group"] for a in sampler.asked) == {
        None: 2,  # groups of one have nobody to share a prompt with
        (*PLAN.identity, 1): 2,
        (*PLAN.identity, 2): 3,
    }


def unmeasured(group: TrajectoryGroup) -> Any:
    steps = [
        [(t.observation, t.action, t.reward, t.episode_done, t.rewrite) for t in e.transitions]
        for e in group.trajectories_G
    ]
    return steps, group.rewards_G, group.metrics_G, group.tags, [e.stop_reason for e in group.trajectories_G]


async def test_a_real_engine_draws_the_same_for_other_processes(processes: Executor) -> None:
    builders = [ChatterBuilder(size=2, turns=3), ChatterBuilder(size=3, turns=2)]
    groups: list[Any] = []
    for there in (False, True):
        async with open_engine(TALKER, talker(), config=ENGINE) as engine:
            if there:
                async with open_executor(processes, engine) as run:
                    groups.append(await all_groups(run, builders))
            else:
                groups.append(await all_groups(partial(run_group, engine), builders))
            assert (engine.live_sessions, engine.slots_in_use) == (0, 0)
    here, there = ([tokens(g) for g in side] for side in groups)
    assert there == here
    assert len({t for g in here for e in g for turn in e for t in turn}) > 10


def tokens(group: TrajectoryGroup) -> list[list[tuple[int, ...]]]:
    return [[t.action.tokens for t in e.transitions] for e in group.trajectories_G]


# --- errors ---------------------------------------------------------------------------------------


def only(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    return error


def notes(error: BaseException) -> str:
    inner = notes(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else ""
    return "\n".join([*getattr(error, "__notes__", ()), inner])


async def test_a_workers_error_is_itself_and_tells_where_it_comes_from(executor: Executor) -> None:
    sampler = HashSampler()
    shapes: list[list[type]] = []
    async with open_executor(executor, sampler) as there:
        for run in (partial(run_group, sampler), there):
            with pytest.raises(Exception) as caught:  # noqa: PT011  its shape is what is compared
                await run(ChatterBuilder(deed="odd"), PLAN, group=3)
            error, shape = caught.value, []
            assert "in group 3, task 'chat 3'" in notes(error)
            inner = only(error)
            assert isinstance(inner, Odd)
            assert inner.detail == 7
            while isinstance(error, BaseExceptionGroup):
                shape.append(type(error))
                error = error.exceptions[0]
            shapes.append(shape)
            assert not sampler.live
        assert shapes[0] == shapes[1]
        assert "in worker " in notes(caught.value)
        assert 'raise Odd("the die is on edge", 7)' in notes(caught.value), "the line that raised it"


async def test_an_error_that_does_not_survive_the_journey_keeps_its_text(executor: Executor) -> None:
    async with open_executor(executor, HashSampler()) as run:
        with pytest.raises(WorkerError) as caught:
            await run(ChatterBuilder(deed="strange"), PLAN, group=3)
        assert "Strange: not of this process" in notes(caught.value)


async def test_the_samplers_error_reaches_the_worker_and_comes_home(processes: Executor) -> None:
    async def refuse(session: HashSession) -> None:
        raise ValueError("temperature=0.8: the engine is in a mood")

    async with open_executor(processes, HashSampler(act=refuse)) as run:
        with pytest.raises(ExceptionGroup) as caught:
            await run(ChatterBuilder(size=1), PLAN, group=0)
    assert isinstance(only(caught.value), ValueError)
    assert str(only(caught.value)) == "temperature=0.8: the engine is in a mood"


async def test_a_builder_that_cannot_travel_is_named_with_what_keeps_it(executor: Executor) -> None:
    lock = threading.Lock()
    sampler = HashSampler()
    async with open_executor(executor, sampler) as run:
        with pytest.raises(Unpicklable) as caught:
            await run(ChatterBuilder(size=2, extra=lock), PLAN, group=1)
        assert str(caught.value).startswith("ChatterBuilder cannot be sent to the rollout executor: TypeError: cannot")
        assert f"what keeps it here is extra={lock!r}"[:50] in str(caught.value)
        assert "in group 1, task 'chat 2'" in notes(caught.value)
        with pytest.raises(Unpicklable, match="what keeps it here is extra=<function"):
            await run(ChatterBuilder(extra=lambda: 0), PLAN, group=1)
        assert sampler.asked == []


async def test_a_builder_that_no_worker_can_find_is_told_where_to_be_defined(
    processes: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(ChatterBuilder):
        pass

    Local.__qualname__ = "Local"
    monkeypatch.setattr(sys.modules[__name__], "Local", Local, raising=False)  # as in a script, under its main guard
    async with open_executor(processes, HashSampler()) as run:
        with pytest.raises(Unpicklable, match=r"attribute 'Local'.* Define it at the top level of a module") as caught:
            await run(Local(size=2), PLAN, group=1)
    assert "in worker " in notes(caught.value)


async def test_an_executor_that_forks_is_refused() -> None:
    forks, serves = (ProcessPoolExecutor(1, multiprocessing.get_context(way)) for way in ("fork", "forkserver"))
    with forks, pytest.raises(ValueError, match=r'mp_context=multiprocessing.get_context\("spawn"\)'):
        async with open_executor(forks, HashSampler()):
            pass
    async with open_executor(serves, HashSampler()):
        serves.shutdown()


async def test_an_executor_that_is_shut_down_says_so() -> None:
    with ThreadPoolExecutor(1) as executor:
        pass
    async with open_executor(executor, HashSampler()) as run:
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown") as caught:
            await run(ChatterBuilder(), PLAN, group=4)
    assert "in group 4, task 'chat 3', played by ThreadPoolExecutor" in notes(caught.value)


# --- cancelling -----------------------------------------------------------------------------------


async def test_I9_a_cancelled_group_stops_there_cleans_up_and_leaves_the_worker_free(
    executor: Executor, tmp_path: Path
) -> None:
    sampler, path = HashSampler(), tmp_path / "diary"
    async with open_executor(executor, sampler) as run:
        await warm(run)
        async with nothing_left(sampler), trio.open_nursery() as nursery:
            nursery.start_soon(partial(run, ChatterBuilder(deed="sleep", diary=path), PLAN, group=0))
            await until_written(path, "deed")
            assert sampler.live
            began = time.perf_counter()
            nursery.cancel_scope.cancel()
        assert time.perf_counter() - began < 1.0
        assert Counter(line[0] for line in diary(path)) == {"begin": 3, "deed": 1, "close": 3}, "closed before it ended"
        assert len((await run(ChatterBuilder(size=2), PLAN, group=1)).rewards_G) == 2


async def test_I9_cancelling_while_the_sampler_draws_frees_its_sessions(executor: Executor) -> None:
    async def forever(session: HashSession) -> None:
        await trio.sleep_forever()

    async with open_executor(executor, HashSampler()) as run:
        await warm(run)
    sampler = HashSampler(act=forever)
    async with open_executor(executor, sampler) as run, nothing_left(sampler), trio.open_nursery() as nursery:
        nursery.start_soon(partial(run, ChatterBuilder(size=3), PLAN, group=0))
        await sampler.until_live(3, 20)
        nursery.cancel_scope.cancel()


async def test_a_group_that_is_cancelled_before_it_began_never_begins(executor: Executor, tmp_path: Path) -> None:
    sampler, path = HashSampler(), tmp_path / "diary"
    async with open_executor(executor, sampler) as run, trio.open_nursery() as nursery:
        for group in range(2):  # as many as there are workers
            busy = ChatterBuilder(deed="sleep", diary=tmp_path / f"busy {group}")
            nursery.start_soon(partial(run, busy, PLAN, group=group))
        for group in range(2):
            await until_written(tmp_path / f"busy {group}", "deed")
        with trio.move_on_after(0.1):
            await run(ChatterBuilder(diary=path), PLAN, group=2)
        nursery.cancel_scope.cancel()
    async with open_executor(executor, sampler) as run:
        await warm(run)  # whatever was queued has had its turn
    assert diary(path) == []


async def test_a_job_that_is_run_late_or_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "diary"

    async def played(job: bytes) -> Answer:
        return loads(await trio.to_thread.run_sync(play_group, job))

    async with open_endpoint(HashSampler()) as endpoint:
        async with endpoint.tie() as tie:
            job = pack_job(endpoint.address, tie.name, ChatterBuilder(size=2, diary=path), PLAN, 0)
            assert (await played(job)).group is not None
            again = await played(job)
        late = await played(job)
    for answer in (again, late):
        assert answer.group is None
        error = answer.failure.error()
        assert isinstance(error, ConnectionLost)
        assert "refused: it has been cancelled, or is being run a second time" in str(error)
    assert Counter(line[0] for line in diary(path))["begin"] == 2


async def test_a_worker_that_does_not_stop_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl.runtime.executor.STOP_SECONDS", 0.05)
    sampler = HashSampler()

    async def cancelled_when_stuck(executor: Executor) -> None:
        async with open_executor(executor, sampler) as run, trio.open_nursery() as nursery:
            nursery.start_soon(partial(run, Stuck(size=1), PLAN, group=0))
            await trio.to_thread.run_sync(STUCK.wait)
            nursery.cancel_scope.cancel()

    with ThreadPoolExecutor(1) as executor:
        try:
            with pytest.raises(ExceptionGroup) as caught:
                await cancelled_when_stuck(executor)
        finally:
            FREE.set()
    assert isinstance(only(caught.value), TimeoutError)
    assert str(only(caught.value)) == "the job did not stop within 0.05 s and was given up"
    assert not sampler.live


STUCK, FREE = threading.Event(), threading.Event()


class Stuck(ChatterBuilder):
    """Blocks its thread, and so every task of its process, until FREE is set."""

    async def make_envs(self) -> Any:
        STUCK.set()
        FREE.wait()
        return await super().make_envs()


async def test_the_end_of_the_endpoint_ends_what_runs(threads: Executor, tmp_path: Path) -> None:
    path = tmp_path / "diary"

    async def left_too_early() -> None:
        async with trio.open_nursery() as nursery, open_executor(threads, HashSampler()) as run:
            nursery.start_soon(partial(run, ChatterBuilder(deed="sleep", diary=path), PLAN, group=0))
            await until_written(path, "deed")

    with pytest.raises(ExceptionGroup) as caught:
        await left_too_early()
    assert caught.value.split(ConnectionLost)[1] is None, "each session that was open says so, and nothing else is said"
    assert Counter(line[0] for line in diary(path))["close"] == 3


# --- crashes: last, for a cluster takes its time to recover ---------------------------------------


async def test_a_worker_that_crashes_is_seen_within_a_second(tmp_path: Path) -> None:
    sampler, path = HashSampler(), tmp_path / "diary"
    with ProcessPoolExecutor(1, mp_context=SPAWN) as executor:
        async with open_executor(executor, sampler) as run:
            with pytest.raises(BrokenProcessPool) as caught:
                await run(ChatterBuilder(deed="kill", diary=path), PLAN, group=6)
            seen = time.time()
            await sampler.until_live(0)
    assert seen - died(path) < 1.0
    assert "in group 6, task 'chat 3', played by ProcessPoolExecutor" in notes(caught.value)


class Mute(Executor):
    """Starts a process a job, and never says what became of it."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future:
        self.process = SPAWN.Process(target=fn, args=args, kwargs=kwargs)
        self.process.start()
        return Future()


async def test_a_worker_that_crashes_is_seen_although_its_executor_says_nothing(tmp_path: Path) -> None:
    sampler, path, executor = HashSampler(), tmp_path / "diary", Mute()
    async with open_executor(executor, sampler) as run:
        with pytest.raises(WorkerLost, match="the worker has gone without an answer"):
            await run(ChatterBuilder(deed="kill", diary=path), PLAN, group=6)
        seen = time.time()
        await sampler.until_live(0)
    assert seen - died(path) < 1.0
    executor.process.join()
    executor.process.close()


async def test_a_worker_that_crashes_is_seen_although_its_executor_would_try_again(
    dask: Executor, tmp_path: Path
) -> None:
    sampler, path = HashSampler(), tmp_path / "diary"
    async with open_executor(dask, sampler) as run:
        with pytest.raises(WorkerLost, match="the worker has gone without an answer"):
            await run(ChatterBuilder(deed="kill", diary=path), PLAN, group=6)
        seen = time.time()
        await sampler.until_live(0)
        assert seen - died(path) < 1.0
        await warm(run)
        assert Counter(line[0] for line in diary(path))["deed"] == 1, "it was played once"


async def test_a_crash_ends_the_batch(tmp_path: Path) -> None:
    path, sampler = tmp_path / "diary", HashSampler()
    builders = [ChatterBuilder(deed="sleep"), ChatterBuilder(deed="exit", diary=path)]
    with ProcessPoolExecutor(2, mp_context=SPAWN) as executor:
        async with open_executor(executor, sampler) as run:
            with pytest.raises(ExceptionGroup) as caught:
                await all_groups(run, builders)
            seen = time.time()
    assert caught.group_contains((BrokenProcessPool, WorkerLost))  # the pool does not watch a late starter: CPython
    assert seen - died(path) < 1.0


def died(path: Path) -> float:
    """When the deed was done."""
    return float(next(line[3] for line in diary(path) if line[0] == "deed"))
