"""What does a sandbox add to a command? Bubblewrap against a plain process, beside a trainer of this size.

    python -m benchmarks.sandboxes                 prints one line of JSON
    python -m benchmarks.sandboxes write           ... and adds it to benchmarks/sandboxes/results.jsonl

The command is `true`, run by bash from a process that holds 2 GiB, as a trainer does: to start a process by copying
such a parent is slow. overhead_ms is the median in a sandbox less the median without; the median of `shell` is that of
one more line in a shell that stays. open_ms is a sandbox from nothing to its end. Then 64 sandboxes run a command at
once; `failures` of them are not 0 only if one did not say what it was asked.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import trio

from benchmarks.machine import here_and_now
from envs.terminal import Bubblewrap, SandboxSpec
from envs.terminal.shell import Shell

OUT = Path(__file__).parent / "sandboxes"
COMMANDS, AT_ONCE, HELD_GIB = 200, 64, 2


async def milliseconds(once: Callable[[], Awaitable[Any]], times: int) -> list[float]:
    """How long each of so many calls took."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        await once()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


async def plainly() -> None:
    """The command without a sandbox."""
    await trio.run_process(["/bin/bash", "-c", "true"], stdout=subprocess.DEVNULL)


async def opened() -> None:
    """A sandbox, and nothing in it."""
    async with Bubblewrap()(SandboxSpec()):
        pass


async def measure() -> dict[str, Any]:
    """The line that is printed."""
    plain = statistics.median(await milliseconds(plainly, COMMANDS))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    async with Bubblewrap()(SandboxSpec()) as box:
        inside = statistics.median(await milliseconds(lambda: box.run("true"), COMMANDS))
        async with Shell(box) as shell:
            line = statistics.median(await milliseconds(lambda: shell.run("true"), COMMANDS))
    system = resource.getrusage(resource.RUSAGE_SELF).ru_stime - before
    opening = statistics.median(await milliseconds(opened, 20))
    began, failures = time.perf_counter(), await at_once()
    return {
        "overhead_ms": round(inside - plain, 2),
        "command_ms": round(inside, 2),
        "plain_ms": round(plain, 2),
        "shell_ms": round(line, 2),
        "own_system_ms": round(system / (2 * COMMANDS) * 1e3, 2),
        "open_ms": round(opening, 1),
        "at_once": AT_ONCE,
        "at_once_seconds": round(time.perf_counter() - began, 1),
        "failures": failures,
    }


async def at_once() -> int:
    """How many of `AT_ONCE` sandboxes that are open together did not do what they were asked."""
    said: list[str] = []

    async def one(index: int) -> None:
        async with Bubblewrap()(SandboxSpec()) as box:
            said.append((await box.run(f"sleep 1; echo {index}")).stdout.strip())

    async with trio.open_nursery() as nursery:
        for index in range(AT_ONCE):
            nursery.start_soon(one, index)
    return AT_ONCE - len({*said} & {str(index) for index in range(AT_ONCE)})


def main(write: bool) -> None:
    """Measure, print, and keep if asked to."""
    held = np.ones(HELD_GIB * 2**30 // 8)
    found = trio.run(measure)
    assert held[-1] == 1.0
    line = json.dumps(found | here_and_now() | {"held_gib": HELD_GIB, "root": os.geteuid() == 0})
    print(line)
    if write:
        OUT.mkdir(exist_ok=True)
        with (OUT / "results.jsonl").open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] == ["write"])
