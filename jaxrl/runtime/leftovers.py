"""What a process holds that could be left behind: threads, child processes, open files, trio tasks, temporary files.

Knows the operating system and trio; must not know environments. Processes and files are read from /proc, so they are
seen on Linux only; elsewhere the two are taken to be none.
"""

import math
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

_IDLE_WORKER = "Trio thread "
"""What trio calls a thread of its cache that has nothing to do; one that works is named after its work."""

_PROC = Path("/proc")
_PAUSE = 0.02


@dataclass(frozen=True)
class Held:
    """What the process holds now, each thing by a name that people can read."""

    threads: Counter[str]
    processes: Counter[str]
    files: Counter[str]
    tasks: Counter[str]
    temporary: Counter[str]

    def beyond(self, before: "Held") -> list[str]:
        """What is held now and was not `before`, as "kind: name" lines."""
        kinds = ("threads", "processes", "files", "tasks", "temporary")
        return [
            f"{kind}: {name}" + (f" ({count} times)" if count > 1 else "")
            for kind in kinds
            for name, count in sorted((getattr(self, kind) - getattr(before, kind)).items())
        ]


def held() -> Held:
    """Look. To be called in a trio task."""
    return Held(_threads(), _processes(), _files(), _tasks(), _temporary())


async def left_since(before: Held, seconds: float) -> list[str]:
    """What is held beyond `before`, after everything had `seconds` to end by itself."""
    left = held().beyond(before)
    for _ in range(math.ceil(seconds / _PAUSE)):
        if not left:
            break
        await trio.sleep(_PAUSE)
        left = held().beyond(before)
    return left


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """In the block, `tempfile` and the processes that are started use a folder of their own, removed afterwards.

    So what is left in it was left by the block, whatever else runs on the machine.
    """
    kept = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = kept[0]
            del os.environ["TMPDIR"]
            os.environ.update({} if kept[1] is None else {"TMPDIR": kept[1]})


def _threads() -> Counter[str]:
    """Threads, each by its name and number: one that went is not made up for by another that came."""
    working = [t for t in threading.enumerate() if not t.name.startswith(_IDLE_WORKER)]
    return Counter(f"{t.name}, thread {t.ident}" for t in working)


def _processes() -> Counter[str]:
    """Children of this process, those included that have ended and that nobody has waited for."""
    found: Counter[str] = Counter()
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except OSError:
            continue  # it ended while we looked
        state, parent = tail.split()[:2]
        if int(parent) == os.getpid():
            found[f"{head.partition('(')[2]}, pid {stat.parent.name}{', not waited for' * (state == 'Z')}"] += 1
    return found


def _files() -> Counter[str]:
    """Open files by their path. Of pipes and sockets only how many there are."""
    found: Counter[str] = Counter()
    for descriptor in _PROC.glob("self/fd/*"):
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue  # that of the listing itself
        found[target.partition(":[")[0]] += 1
    return found


def _tasks() -> Counter[str]:
    """Every task of this trio run, whoever owns it."""
    root = trio.lowlevel.current_root_task()
    waiting, found = [root] if root else [], Counter[str]()
    while waiting:
        task = waiting.pop()
        found[f"{task.name}, task {id(task):x}"] += 1
        waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return found


def _temporary() -> Counter[str]:
    return Counter(str(path) for path in Path(tempfile.gettempdir()).iterdir())
