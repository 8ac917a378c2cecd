"""Chaos: whatever an environment or a tool does, the run ends with that error or goes on, and nothing is left."""

import contextlib
import json
import math
import os
import pickle
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from chaos import (
    BROKEN_UTF8,
    CONTROL_TOKENS,
    ENV_PLACES,
    GROUP_PLACES,
    Block,
    ChaosBuilder,
    ChaosDataset,
    ChaosTool,
    ClosedTwice,
    Fault,
    Hang,
    HoldPipe,
    Ledger,
    Raise,
    RandomTime,
    Trouble,
    flood,
    nothing_left,
)
from episodes import BYTES, END, RENDERER, ScriptedEngine, ScriptedSession, said
from small_run import Late, small, write_model
from trio.testing import MockClock

from jaxrl.env import EnvironmentFault
from jaxrl.runtime.engine import Stats
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.loop import Mode, Run, Sampling, Schedule, Teaching, train_loop
from jaxrl.runtime.record import read_records, rollout_file
from jaxrl.runtime.rollout import CLEANUP_SECONDS, MAKE_SECONDS, RolloutPlan, run_group
from jaxrl.runtime.strategy import FailFast, MinViableGroup, RetryOnFailure, Strategy
from jaxrl.train import AsyncConfig, main
from jaxrl.types import Datum, Sample, StopReason, TrajectoryGroup


class Broken(Exception):
    """What chaos raises."""


TOLERANT: tuple[Strategy, ...] = (RetryOnFailure(2), MinViableGroup(2, 1))
STRATEGIES: tuple[Strategy, ...] = (FailFast(), *TOLERANT)
MODES = {
    "in turn": Mode(),
    "streaming": Mode(minibatch=1),
    "ahead": Mode(steps_ahead=2, groups_per_batch=2),
    "ahead, pinned": Mode(steps_ahead=1, groups_per_batch=2, in_flight_updates=False),
    "streaming ahead": Mode(steps_ahead=1, groups_per_batch=2, minibatch=2),
    "replacing": Mode(max_attempts=3),
}
STEPS = 5
MARKERS = frozenset(
    BYTES.special(name)
    for name in ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>")
)
LIMITS = Limits(200, max_turns=2, episode_seconds=50, sample_seconds=50, grader_seconds=50)
FAULTS: dict[str, Callable[[], Fault]] = {
    "raises": lambda: Raise(Broken("chaos")),
    "hangs": Hang,
    "takes random time": lambda: RandomTime(5.0),
}


def virtual() -> bool:
    """Whether sleeping costs nothing."""
    return isinstance(trio.lowlevel.current_clock(), MockClock)


def text(seed: int, turn: int, context: Sequence[int]) -> tuple[int, ...]:
    """A policy that says one thing."""
    return said("a")


def call(seed: int, turn: int, context: Sequence[int]) -> tuple[int, ...]:
    """A policy that calls the chaos tool."""
    opened, closed = (BYTES.special(t) for t in ("<tool_call>", "</tool_call>"))
    return (opened, *BYTES.encode('\n{"name": "chaos", "arguments": {}}\n'), closed, END)


def terminating(place: str) -> int:
    """Turns of an env: past the limit where only `conclude` is of interest."""
    return 9 if place == "conclude" else 2


async def play(
    ledger: Ledger,
    *troubles: Trouble,
    strategy: Strategy,
    limits: Limits = LIMITS,
    script: Any = text,
    guard: float = 60.0,
    **builder: Any,
) -> TrajectoryGroup:
    """One group; nothing is left of it and the books balance, whatever came of it."""
    engine: Any = ScriptedEngine(script, 200_000)
    plan = RolloutPlan((0, "train", 0), limits, strategy=strategy)
    with nothing_left():
        try:
            with trio.fail_after(10_000 if virtual() else guard):
                made = ChaosBuilder(RENDERER, ledger, troubles=troubles, **builder)
                return await run_group(engine, made, plan, group=0)
        finally:
            ledger.check()
            assert engine.live_sessions == 0


def endings(group: TrajectoryGroup) -> list[StopReason]:
    return [t.stop_reason for t in group.trajectories_G]


# --- every place, every fault, every strategy -----------------------------------------------------


@pytest.mark.parametrize("remakes", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("place", [*GROUP_PLACES, *ENV_PLACES])
async def test_F01_an_error_anywhere_is_the_error_or_an_ending(
    place: str, strategy: Strategy, remakes: bool, autojump_clock: MockClock
) -> None:
    ledger = Ledger()
    trouble = Trouble(place, Raise(Broken("chaos")), members=(1,))
    first = Trouble("step", Raise(Broken("first")), members=(1,), attempts=1)
    troubles = (trouble, first) if place == "remake" else (trouble,)
    playing = partial(play, ledger, *troubles, strategy=strategy, turns=terminating(place), remakes=remakes)
    if not strategy.tolerant:
        with pytest.RaisesGroup(Broken, flatten_subgroups=True, allow_unwrapped=True):
            await playing()
        assert sum(ledger.struck.values()) == 1
        return
    group = await playing()
    assert len(group.errors) == sum(ledger.struck.values())
    assert {e.kind for e in group.errors} == {"Broken"}
    for trajectory, reward in zip(group.trajectories_G, group.rewards_G, strict=True):
        assert math.isfinite(reward)
        assert trajectory.ending.in_baseline or not trajectory.ending.trained
    if place in ("close", "cleanup"):
        assert (group.viable, group.rewards_G) == (True, (0.0, 1.0, 2.0))
    elif place == "make_envs" or (place == "make" and not group.trajectories_G):
        assert (group.viable, group.trajectories_G) == (False, ())
    elif place != "compute_group_rewards":
        assert group.viable is isinstance(strategy, MinViableGroup)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("place", ["reset", "step", "conclude", "close", "compute_group_rewards", "cleanup"])
async def test_a_hang_anywhere_is_bounded(place: str, strategy: Strategy, autojump_clock: MockClock) -> None:
    ledger = Ledger()
    hang = Trouble(place, Hang(), members=(1,))
    playing = partial(play, ledger, hang, strategy=strategy, turns=terminating(place), gradable=place == "conclude")
    ends = place in ("conclude", "close", "compute_group_rewards", "cleanup")
    if not strategy.tolerant and ends:
        late = pytest.RaisesExc((TimeoutError, trio.TooSlowError))
        with pytest.RaisesGroup(late, flatten_subgroups=True, allow_unwrapped=True):
            await playing()
    else:
        group = await playing()
        assert len(group.errors) == ledger.struck[place]
        if place in ("reset", "step"):
            assert endings(group)[1] is StopReason.TIMEOUT
    assert trio.current_time() <= 3 * (50 + CLEANUP_SECONDS)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("place", ["make_envs", "make", "remake"])
async def test_a_builder_that_hangs_is_given_up_and_named(
    place: str, strategy: Strategy, autojump_clock: MockClock
) -> None:
    ledger = Ledger()
    hang = Trouble(place, Hang(), members=(1,))
    first = Trouble("step", Raise(Broken("first")), members=(1,), attempts=1)
    playing = partial(play, ledger, *((hang, first) if place == "remake" else (hang,)), strategy=strategy)
    said = f"ChaosBuilder.{'remake' if place == 'remake' else 'make_envs'} took more than 600 s and was given up"
    if strategy.tolerant:
        group = await playing()
        late = [e for e in group.errors if e.kind == "TimeoutError"]
        assert [e.message for e in late] == [said] * ledger.struck[place]
        assert group.viable is (place == "remake" and isinstance(strategy, MinViableGroup))
    elif place != "remake":  # nothing is made again
        only = pytest.RaisesExc(TimeoutError, match=said)
        with pytest.RaisesGroup(only, flatten_subgroups=True, allow_unwrapped=True) as caught:
            await playing()
        assert "in group 0, task 'hi'" in _notes(caught.value)
    assert trio.current_time() == ledger.struck[place] * MAKE_SECONDS


@pytest.mark.parametrize("place", ["make_envs", "make", "remake", "reset", "step", "close", "cleanup"])
async def test_a_hang_ends_when_it_is_cancelled(place: str, autojump_clock: MockClock) -> None:
    ledger = Ledger()
    first = Trouble("step", Raise(Broken("first")), members=(1,), attempts=1)
    with trio.move_on_after(20) as scope:
        await play(ledger, Trouble(place, Hang()), first, strategy=RetryOnFailure(3), limits=Limits(200))
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert trio.current_time() <= 20 + 2 * CLEANUP_SECONDS
    ledger.check()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
async def test_random_times_change_nothing(seed: int, strategy: Strategy, autojump_clock: MockClock) -> None:
    places = [p for p in (*GROUP_PLACES, *ENV_PLACES) if p != "remake"]
    troubles = [Trouble(place, RandomTime(3.0, seed * 10 + i)) for i, place in enumerate(places)]
    limits = Limits(200, episode_seconds=10_000)
    calm = await play(Ledger(), strategy=strategy, limits=limits)
    slow = await play(Ledger(), *troubles, strategy=strategy, limits=limits)
    assert slow == calm
    assert trio.current_time() > 0


async def test_an_error_while_another_member_hangs_in_its_close(autojump_clock: MockClock) -> None:
    ledger = Ledger()
    troubles = (Trouble("step", Raise(Broken("one")), members=(0,)), Trouble("close", Hang(), members=(1,)))
    with pytest.RaisesGroup(
        pytest.RaisesExc(Broken, match="one"), pytest.RaisesExc(TimeoutError), flatten_subgroups=True
    ):
        await play(ledger, *troubles, strategy=FailFast())
    assert trio.current_time() == CLEANUP_SECONDS
    assert ledger.count("cleanup") == 1


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", TOLERANT, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("fault", FAULTS)
async def test_tools_that_misbehave(fault: str, strategy: Strategy, autojump_clock: MockClock) -> None:
    tools = (ChaosTool(FAULTS[fault]()),)
    group = await play(Ledger(), strategy=strategy, script=call, tools=tools, gradable=False)
    expected = {
        "raises": StopReason.TOOL_ERROR,
        "hangs": StopReason.TIMEOUT,
        "takes random time": StopReason.TERMINATED,
    }[fault]
    assert expected in endings(group)
    assert set(endings(group)) <= {expected, StopReason.CANCELLED}
    assert group.viable is (fault == "takes random time")


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [text, call])
@pytest.mark.parametrize("reply", [BROKEN_UTF8, CONTROL_TOKENS, "\0\x1b[2J\r", ""])
async def test_hostile_text_is_text(reply: str, script: Any) -> None:
    tools = (ChaosTool(content=reply),)
    group = await play(Ledger(), strategy=FailFast(), script=script, tools=tools, reply=reply)
    plain = await play(Ledger(), strategy=FailFast(), script=script, tools=(ChaosTool(),), reply="go on")
    assert endings(group) == [StopReason.TERMINATED] * 3
    special = lambda tokens: [t for t in tokens if t in MARKERS]  # noqa: E731
    for hostile, calm in zip(group.trajectories_G, plain.trajectories_G, strict=True):
        first, second = hostile.transitions
        assert second.observation[: len(first.observation) + len(first.action.tokens)] == (
            first.observation + first.action.tokens
        )
        assert special(second.observation) == special(calm.transitions[1].observation), "no marker was forged"


async def test_a_flood_overflows_the_context_and_nothing_else() -> None:
    group = await play(Ledger(), strategy=FailFast(), reply=flood(1_000_000), turns=3, gradable=False)
    assert endings(group) == [StopReason.CONTEXT_OVERFLOW] * 3
    assert all(len(t.transitions) == 1 for t in group.trajectories_G)


# --- processes, on the real clock -----------------------------------------------------------------


@pytest.mark.parametrize("command", ["sleep 1000 & echo started", "while true; do :; done", "yes"])
async def test_F21_children_that_hold_pipes_end_with_the_episode(command: str) -> None:
    if command == "yes":
        command = "while true; do echo y; sleep 0.05; done"
    limits = Limits(200, episode_seconds=0.4)
    began = trio.current_time()
    trouble = Trouble("step", HoldPipe(command), members=(1,))
    group = await play(Ledger(), trouble, strategy=MinViableGroup(2, 0), limits=limits, guard=20, gradable=False)
    assert endings(group) == [StopReason.TERMINATED, StopReason.TIMEOUT, StopReason.TERMINATED]
    assert trio.current_time() - began < 5


async def test_F23_code_that_blocks_delays_the_others_and_harms_nobody() -> None:
    trouble = Trouble("step", Block(0.1), members=(1,), attempts=1)
    group = await play(Ledger(), trouble, strategy=FailFast())
    assert endings(group) == [StopReason.TERMINATED] * 3


async def test_F23_code_that_blocks_in_threads_delays_nobody() -> None:
    class InThread:
        async def __call__(self) -> None:
            await trio.to_thread.run_sync(partial(trio.run, Block(0.2)))

    began = trio.current_time()
    await play(Ledger(), Trouble("reset", InThread()), strategy=FailFast(), size=8)
    assert trio.current_time() - began < 8 * 0.2


# --- the kit itself -------------------------------------------------------------------------------


def test_the_books_find_what_is_wrong() -> None:
    ledger = Ledger()
    group, env = ledger.open_group(), ledger.open_env(0)
    ledger.note("make_envs", group)
    with pytest.raises(AssertionError, match=r"closed \[\] of 1 envs"):
        ledger.check()
    ledger.note("cleanup", group)
    ledger.note("close", env)
    with pytest.raises(AssertionError, match="cleaned up under a live episode"):
        ledger.check()
    with pytest.raises(ClosedTwice):
        ledger.note("close", env)


@pytest.mark.parametrize("what", ["a file", "a thread", "a process", "a task"])
async def test_what_is_left_is_found(what: str, tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        stop, processes = trio.Event(), list[trio.Process]()

        async def bring() -> None:
            if what == "a task":
                nursery.start_soon(trio.sleep_forever)
            elif what == "a thread":
                nursery.start_soon(partial(trio.to_thread.run_sync, partial(trio.from_thread.run, stop.wait)))
                await trio.sleep(0.1)
            elif what == "a process":
                processes.append(await trio.lowlevel.open_process(["sleep", "100"]))

        with pytest.raises(AssertionError, match="left behind"), nothing_left(within=0.05):  # noqa: PT012
            await bring()
            handle = (tmp_path / "x").open("w") if what == "a file" else None
        stop.set()
        if handle is not None:
            handle.close()
        for process in processes:
            process.kill()
            await process.wait()
        nursery.cancel_scope.cancel()


def test_faults_travel_and_a_place_that_is_none_is_refused() -> None:
    for fault in (Raise(Broken("x")), Hang(), RandomTime(), Block(1.0), HoldPipe()):
        assert pickle.loads(pickle.dumps(Trouble("step", fault))).place == "step"
    with pytest.raises(ValueError, match="place='stop': expected one of"):
        Trouble("stop", Hang())


# --- the loop, in every mode ----------------------------------------------------------------------


class LoopEngine(ScriptedEngine):
    """What the loop asks of an engine, without a model: a version that is published, and stamped on each token."""

    def __init__(self) -> None:
        super().__init__(text, 200_000)
        self.version, self.policy, self.compilations, self.stats = 0, "now", 0, Stats()

    @asynccontextmanager
    async def session(self, *, group: Any, seed: int, policy: Any = None) -> AsyncIterator[ScriptedSession]:
        pinned = self.version if policy is not None else None
        async with super().session(group=group, seed=seed) as session:
            draw = session.sample

            async def sample(*given: Any, **how: Any) -> Sample:
                drawn = await draw(*given, **how)
                version = self.version if pinned is None else pinned
                return Sample(drawn.tokens, drawn.logprobs, (version,) * len(drawn.tokens), drawn.stop)

            session.sample = sample  # type: ignore[method-assign]
            yield session

    async def publish(self, weights: Any, *, version: int, copy: bool) -> None:
        await trio.sleep(0.1 if virtual() else 0.0)
        self.version = version


class LoopLearner:
    """Keeps what it is given instead of learning from it."""

    weights = state = None

    def __init__(self) -> None:
        self.steps: list[list[Datum]] = []
        self._parts: list[Datum] = []

    def update(self, data_D: Sequence[Datum]) -> dict[str, float]:
        self.steps.append([*data_D])
        return {}

    def accumulate(self, data_D: Sequence[Datum]) -> None:
        self._parts += data_D

    def finish(self) -> dict[str, float]:
        self.steps.append(self._parts)
        self._parts = []
        return {}


class Log:
    """Keeps the metrics of each step."""

    def __init__(self) -> None:
        self.written: list[dict[str, float]] = []

    def write(self, step: int, metrics: dict[str, float]) -> None:
        assert step == len(self.written)
        self.written.append(metrics)


class Here(Run):
    """A run whose learner needs no thread: while a thread works, an autojump clock would jump."""

    async def on_device(self, call: Callable[..., Any], *args: Any) -> Any:
        await trio.sleep(0.5 if virtual() else 0.0)
        return call(*args)


async def loop(
    folder: Path,
    ledger: Ledger,
    mode: Mode,
    strategy: Strategy,
    *troubles: Trouble,
    alone: bool = False,
    record: int = 0,
    batches: int = 12,
    **env: Any,
) -> tuple[list[dict[str, float]], list[list[Datum]]]:
    """A run of `STEPS` steps of two groups, some of which are in trouble: its metrics, and what was trained.

    alone: one group a batch, always in trouble.
    """
    groups = ({"troubles": troubles, **env},) if alone else ({"troubles": troubles, **env}, {})
    engine, learner, log = LoopEngine(), LoopLearner(), Log()
    run: Any = Here(
        engine=engine,  # type: ignore[arg-type]
        learner=learner,  # type: ignore[arg-type]
        limiter=trio.CapacityLimiter(1),
        train=ChaosDataset(RENDERER, ledger, groups, batches, every=1 if alone else 3),
        test=None,
        schedule=Schedule(STEPS, 0, 2),
        sampling=Sampling(0, LIMITS, 1.0, LIMITS, 1.0, strategy),
        teaching=Teaching("mean"),
        run_dir=SimpleNamespace(rollouts=folder),  # type: ignore[arg-type]
        checkpointer=SimpleNamespace(save=lambda step, state, extra: json.dumps(extra)),  # type: ignore[arg-type]
        log=log,  # type: ignore[arg-type]
        progress=SimpleNamespace(update=lambda step, metrics: None),  # type: ignore[arg-type]
        decode=BYTES.decode,
        groups_to_record=record,
        mode=mode,
    )
    with nothing_left():
        try:
            with trio.fail_after(100_000 if virtual() else 60):
                await train_loop(run, start=0)
        finally:
            ledger.check()
            assert engine.live_sessions == 0
    return log.written, learner.steps


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TOLERANT, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["reset", "step", "conclude", "close", "compute_group_rewards"])
async def test_F01_a_run_goes_on_in_every_mode_and_its_counts_add_up(
    place: str, fault: str, mode: str, strategy: Strategy, tmp_path: Path, autojump_clock: MockClock
) -> None:
    ledger, how = Ledger(), MODES[mode]
    trouble = Trouble(place, FAULTS[fault](), members=(1,))
    turns = {"turns": terminating(place), "gradable": place == "conclude"}
    metrics, trained = await loop(tmp_path, ledger, how, strategy, trouble, **turns)
    assert len(metrics) == len(trained) == STEPS
    for step in metrics:
        assert sum(v for k, v in step.items() if k.startswith("rollout/stop/")) == pytest.approx(1.0)
    if fault != "takes random time":
        errors = sum(step.get("rollout_errors/total", 0.0) for step in metrics)
        assert errors == ledger.struck[place] if how.max_attempts == 1 else 0 < errors <= ledger.struck[place]
        assert ledger.struck[place] > 0
    for step, data in enumerate(trained):
        ages = {step - int(v) for d in data for v in d.versions[d.mask]}
        assert ages <= set(range(how.steps_ahead + 1))
        assert len({d.group for d in data}) >= 1, "the other group teaches, whatever became of this one"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [p for p in (*GROUP_PLACES, *ENV_PLACES) if p != "remake"])
async def test_I9_under_fail_fast_the_run_ends_with_the_error_in_every_mode(
    place: str, mode: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    ledger = Ledger()
    trouble = Trouble(place, Raise(Broken("chaos")), members=(1,))
    with pytest.RaisesGroup(Broken, flatten_subgroups=True, check=lambda g: bool(_notes(g))) as caught:
        await loop(tmp_path, ledger, MODES[mode], FailFast(), trouble, turns=terminating(place))
    assert any("task 'task 0.0'" in note for note in _notes(caught.value))


def _notes(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [*getattr(error, "__notes__", ()), *(note for e in error.exceptions for note in _notes(e))]
    return [*getattr(error, "__notes__", ())]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after", [0.05, 3.0, 17.0, 60.0])
async def test_I9_a_cancelled_run_leaves_nothing_in_every_mode(
    mode: str, after: float, tmp_path: Path, autojump_clock: MockClock
) -> None:
    ledger = Ledger()
    troubles = [Trouble(p, RandomTime(8.0, i)) for i, p in enumerate(("make", "reset", "step", "close", "cleanup"))]
    with trio.move_on_after(after) as scope:
        await loop(tmp_path, ledger, MODES[mode], RetryOnFailure(1), *troubles)
    assert scope.cancelled_caught or after == 60.0
    ledger.check()


@pytest.mark.parametrize("mode", MODES)
async def test_I13_when_nobody_can_be_trusted_the_run_says_so_and_does_not_train_zeros(
    mode: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    trouble = Trouble("step", Raise(Broken("chaos")))
    how = MODES[mode]
    with pytest.RaisesGroup(
        pytest.RaisesExc(EnvironmentFault, match=r"groups of a step failed.*(\n.*)*Broken: chaos \(task 'task \d.0'"),
        flatten_subgroups=True,
    ):
        await loop(tmp_path, Ledger(), how, MinViableGroup(1, 1), trouble, alone=True)


@pytest.mark.parametrize("mode", MODES)
async def test_hostile_text_reaches_the_records_and_breaks_none(mode: str, tmp_path: Path) -> None:
    trouble = Trouble("step", Raise(Broken(f"file {BROKEN_UTF8}{CONTROL_TOKENS}")), members=(1,))
    how = {"record": 2, "reply": BROKEN_UTF8 + CONTROL_TOKENS}
    metrics, _ = await loop(tmp_path, Ledger(), MODES[mode], MinViableGroup(2, 0), trouble, **how)
    assert len(metrics) == STEPS
    records = [r for step in range(STEPS) for r in read_records(rollout_file(tmp_path, step, kind="step"))]
    assert any(r["error"] and r["error"].startswith("Broken: file caf") for r in records)


@pytest.mark.parametrize("mode", MODES)
async def test_A11_a_run_longer_than_its_data_ends_in_every_mode(
    mode: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    metrics, trained = await loop(tmp_path, Ledger(), MODES[mode], FailFast(), batches=2)
    assert len(metrics) == len(trained) == STEPS


# --- graders --------------------------------------------------------------------------------------


class Graded(ChaosBuilder):
    """Compares answers in a thread, as a grader of mathematics does; one of them takes for ever."""

    seconds: float = 0.0

    async def compute_group_rewards(self, trajectories_G: Any, envs_G: Any) -> Any:
        def grade() -> float:
            threading.Event().wait(self.seconds)
            return 1.0

        return [(await trio.to_thread.run_sync(grade, abandon_on_cancel=True), {}) for _ in trajectories_G]


@pytest.mark.parametrize("seconds", [0.0, 1.5])
async def test_F15_a_grader_in_a_thread_has_a_deadline(seconds: float) -> None:
    ledger, engine, limits = Ledger(), ScriptedEngine(text, 1000), Limits(200, grader_seconds=0.2)
    builder = Graded(RENDERER, ledger)
    builder.seconds = seconds
    began = trio.current_time()
    with nothing_left(within=5.0):
        plan = RolloutPlan((0,), limits, strategy=RetryOnFailure(0))
        group = await run_group(engine, builder, plan, group=0)  # type: ignore[arg-type]
        took = trio.current_time() - began
    if seconds:
        assert endings(group) == [StopReason.GRADER_ERROR] * 3
        assert took < 1.0
    else:
        assert group.rewards_G == (1.0, 2.0, 3.0)
    ledger.check()


# --- the death of who waits ------------------------------------------------------------------------

PARENT = """
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
import trio
from scripted import ChatterBuilder, HashSampler
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.executor import open_executor
from jaxrl.runtime.rollout import RolloutPlan

async def main():
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        async with open_executor(pool, HashSampler()) as run:
            builder = ChatterBuilder(deed="sleep", diary=Path(sys.argv[1]))
            await run(builder, RolloutPlan((0,), Limits(6)), group=0)

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_F11_when_the_parent_is_killed_the_envs_of_its_workers_are_closed(how: int, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    diary.touch()

    def written() -> list[list[str]]:
        return [line.split() for line in diary.read_text().splitlines()]

    async def until(event: str, count: int) -> None:
        with trio.fail_after(30):
            while sum(line[0] == event for line in written()) < count:  # noqa: ASYNC110
                await trio.sleep(0.02)

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", PARENT, str(diary)], env=environment, start_new_session=True
    )
    try:
        await until("deed", 1)
        os.kill(process.pid, how)
        await process.wait()
        await until("close", 3)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # idle workers of a pool whose owner was killed stay
        with trio.CancelScope(shield=True):
            await process.wait()
    assert sum(line[0] == "close" for line in written()) == 3, "each once"


# --- a whole run ----------------------------------------------------------------------------------


class Moody(Late):
    """Fails now and then, whatever is done to it."""

    made = 0

    async def step(self, message: Any) -> Any:
        Moody.made += 1
        if Moody.made % 5 == 0:
            raise Broken(BROKEN_UTF8)
        return await super().step(message)


@pytest.mark.slow
def test_a_whole_run_goes_on_with_an_environment_that_fails_now_and_then(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    ahead = AsyncConfig(max_steps_off_policy=1, groups_per_batch=2)
    data = {"env_factory": lambda task: Moody(), "val_tasks": ()}
    config = small(model, tmp_path / "run", rollout_strategy=MinViableGroup(2, 2), off_policy=ahead, data=data)
    with nothing_left(within=10.0):
        run = main(config)
    steps = read_metrics(run / "metrics.jsonl")
    assert [s["step"] for s in steps] == [0, 1, 2, 3]
    assert sum(s.get("rollout_errors/Broken", 0.0) for s in steps) > 0
    assert all(s["async/staleness_max"] <= 1 for s in steps if "async/staleness_max" in s)
