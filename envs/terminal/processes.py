"""Trees of processes and the memory they hold, as the host's /proc tells it.

Knows /proc and nothing of sandboxes. Processes may come and go while they are counted: one that is gone holds nothing.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def exceeds(leader: int, most: int) -> bool:
    """Whether `leader` and its descendants hold more than `most` bytes.

    Resident sizes count a page once for each process that maps it and are cheap; only where they exceed `most` is
    every page divided by the number of its users, which walks the page tables.
    """
    return _total(leader, _resident) > most and _total(leader, _proportional) > most


def _total(leader: int, measure: Callable[[int], int]) -> int:
    return sum(measure(pid) for pid in tree(leader))


def tree(leader: int) -> Iterator[int]:
    """`leader` and its descendants, parents first."""
    waiting = [leader]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children(pid)


def children(pid: int) -> list[int]:
    """The processes that have `pid` for a parent, oldest first for each of its threads."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for task in tasks for child in _read(f"/proc/{pid}/task/{task}/children").split()]


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(pid: int) -> int:
    rows = [row.split() for row in _read(f"/proc/{pid}/smaps_rollup").splitlines()]
    return sum(int(row[1]) * 1024 for row in rows if row[0] == "Pss:")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
