"""One question, asked of a process of its own that can be killed: limits on memory, processor time and wall time.

Knows processes and limits; it must not know what is asked. A worker (worker.py) loads a file, says "ready", reads one
JSON object and answers on its output. The clock runs from "ready" on, since a slow start is nobody's answer. The limits
on memory and processor time are its own, so that it ends even when whoever started it is gone; nothing outlives the
call, also when the call is cancelled.

Running over a limit and failing are outcomes, not errors. Not starting at all is an error: of the machine.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

START_SECONDS = 120.0
"""How long a worker may take to import what it needs."""

_MAIN = Path(__file__).with_name("worker.py")
_READY = b"ready\n"


@dataclass(frozen=True)
class WorkerLimits:
    """What one question may take. processes: how many may run at once (the first to ask in a trio run decides)."""

    seconds: float = 5.0
    memory_bytes: int = 2**31
    processes: int = 2

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_bytes", "processes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected more than 0")


DEFAULT_LIMITS = WorkerLimits()


@dataclass(frozen=True)
class Said:
    """What the worker answered; None when it gave no answer, and then why."""

    answer: str | None
    reason: str = ""


_slots: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("workers of one question")


async def ask(worker: Path, question: Mapping[str, Any], limits: WorkerLimits) -> Said:
    """Start a process for the file `worker`, ask its `answer`, see it end. RuntimeError if it does not start."""
    command = [sys.executable, "-I", str(_MAIN), str(worker)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    async with _limiter(limits.processes), trio.open_nursery() as nursery:
        run = partial(trio.run_process, command, **pipes, check=False, deliver_cancel=_kill)
        said = await _converse(await nursery.start(run), question, limits)
        nursery.cancel_scope.cancel()
    if isinstance(said, Said):
        return said
    raise RuntimeError(f"the worker {worker.name} did not start: {said or 'it said nothing'}")


async def _converse(process: trio.Process, question: Mapping[str, Any], limits: WorkerLimits) -> Said | str:
    """The answer; or, of a worker that does not start, what it said instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    heard = b""
    with trio.move_on_after(START_SECONDS):
        while not heard.startswith(_READY):
            more = await process.stdout.receive_some()
            if not more:
                break
            heard += more
    if not heard.startswith(_READY):
        return heard.decode(errors="replace")
    asked = {**question, "memory_bytes": limits.memory_bytes, "cpu_seconds": limits.seconds}
    with trio.move_on_after(limits.seconds):
        try:
            await process.stdin.send_all(json.dumps(asked).encode())
            await process.stdin.aclose()
        except trio.BrokenResourceError:
            return Said(None, "the worker was gone before it was asked")
        heard = heard.removeprefix(_READY) + b"".join([part async for part in process.stdout])
        code = await process.wait()
        return _outcome(code, heard.decode(errors="replace").strip())
    return Said(None, f"no answer within {limits.seconds:g} s")


def _outcome(code: int, said: str) -> Said:
    if code == 0 and said:
        return Said(said)
    return Said(None, f"the worker ended with code {code}: {said[-200:] or 'it said nothing'}")


def _limiter(processes: int) -> trio.CapacityLimiter:
    try:
        return _slots.get()
    except LookupError:
        _slots.set(trio.CapacityLimiter(processes))
        return _slots.get()


async def _kill(process: trio.Process) -> None:
    process.kill()  # it has nothing to tidy up, and would not listen while it computes
