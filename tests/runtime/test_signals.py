"""Ctrl-C and SIGTERM end what runs in the same way: everything is closed once, and one error says which it was."""

import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import trio
from episodes import CountingBuilder, ScriptedEngine, nap

from jaxrl.runtime.episode import Limits
from jaxrl.runtime.failure import Terminated
from jaxrl.runtime.rollout import RolloutPlan, run_batch, run_group
from jaxrl.runtime.signals import run_interruptible


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """A test that a signal gets away from must not end the others."""
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


async def send(how: int) -> None:
    """The signal, as another process sends it."""
    os.kill(os.getpid(), how)
    await trio.sleep(10)
    pytest.fail("it went unnoticed")


@pytest.mark.parametrize(
    ("how", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)], ids=["SIGINT", "SIGTERM"]
)
def test_I9_a_signal_in_the_middle_of_a_group_closes_everything_once(how: int, kind: type[BaseException]) -> None:
    log: list[str] = []
    engine: Any = ScriptedEngine(lambda seed, turn, context: (40, 41))

    async def act(where: str, member: int) -> None:
        if where == "step" and member == 1:
            await send(how)
        await nap(10 if where == "step" else 0.01)

    async def main() -> None:
        await run_batch(partial(run_group, engine), [CountingBuilder(log, act=act)], RolloutPlan((0,), Limits(6)))

    with pytest.raises(kind) as caught:
        run_interruptible(main)
    assert type(caught.value) is kind
    assert sorted(e for e in log if e.startswith("c")) == ["cleanup", "close 0", "close 1", "close 2"]
    assert log[-1] == "cleanup"
    assert engine.live_sessions == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_sigterm_is_not_waited_for() -> None:
    """While what the first one ended is closed, the next one has its own effect: the end."""
    handlers: list[Any] = []

    async def main() -> None:
        try:
            await send(signal.SIGTERM)
        finally:
            handlers.append(signal.getsignal(signal.SIGTERM))

    with pytest.raises(Terminated):
        run_interruptible(main)
    assert handlers == [signal.SIG_DFL]


def test_a_handler_that_somebody_else_set_is_left_alone() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))

    async def main() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep(0.01)
        return "done"

    assert run_interruptible(main) == "done"
    assert heard == [signal.SIGTERM]


def test_results_and_errors_are_those_of_the_function_and_no_group() -> None:
    async def twice(value: int) -> int:
        await trio.lowlevel.checkpoint()
        return 2 * value

    async def fails() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(twice, 1))
            raise LookupError("missing")

    assert run_interruptible(twice, 4) == 8
    with pytest.raises(LookupError, match="missing") as caught:
        run_interruptible(fails)
    assert not isinstance(caught.value.__context__, BaseExceptionGroup)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_outside_the_main_thread_there_are_no_signals_and_it_runs() -> None:
    found: list[int] = []

    async def main() -> int:
        await trio.lowlevel.checkpoint()
        return 3

    thread = threading.Thread(target=lambda: found.append(run_interruptible(main)))
    thread.start()
    thread.join()
    assert found == [3]


def test_a_call_of_exit_inside_is_an_error_that_is_seen() -> None:
    async def main() -> None:
        async with trio.open_nursery():
            raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"asked the process to exit: SystemExit\(3\)"):
        run_interruptible(main)
