"""The nouns of a terminal task that is made by code: its steps, what is checked after each, and plausible mistakes.

Knows what a task is, not how it is written to disk (generate.py), graded (grader.py) or run. Paths of fixtures and of
checks are relative to /app, the working directory of every task; instructions and commands spell them out.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from envs.terminal.sandbox import File

Difficulty = Literal["easy", "medium", "hard"]
DIFFICULTIES: tuple[Difficulty, ...] = get_args(Difficulty)

Content = str | bytes | File
"""A fixture. Text and bytes are files of mode 644."""

Kind = Literal["text", "bytes", "listing", "mode", "link", "absent"]


@dataclass(frozen=True)
class Check:
    """One thing that must hold of `path`. Bytes `wanted` become a file beside the grader, a str stays in its table.

    key: which reward it counts for. A key is worth 1 when all its checks hold, and 0 otherwise.
    """

    kind: Kind
    path: str
    wanted: str | bytes
    key: str = "reward"


def text(path: str, wanted: str, key: str = "reward") -> Check:
    """The lines of a file. White space at the end of a line and empty lines at the end of the file are forgiven."""
    return Check("text", path, wanted.encode(), key)


def exact(path: str, wanted: str | bytes, key: str = "reward") -> Check:
    """A file, byte for byte."""
    return Check("bytes", path, wanted.encode() if isinstance(wanted, str) else wanted, key)


def listing(directory: str, paths: Iterable[str], key: str = "reward") -> Check:
    """All that a directory holds, at any depth: files at `paths` (relative to it) and the directories they need."""
    found = {*paths}
    found |= {path[:i] for path in found for i, letter in enumerate(path) if letter == "/"}
    return Check("listing", directory, rows(*sorted(found)).encode(), key)


def mode(path: str, wanted: int, key: str = "reward") -> Check:
    """The permission bits of a file or directory."""
    return Check("mode", path, f"{wanted:o}", key)


def link(path: str, target: str, key: str = "reward") -> Check:
    """A symbolic link that leads to `target`, however it is spelled."""
    return Check("link", path, f"/app/{target}", key)


def absent(path: str, key: str = "reward") -> Check:
    """Nothing is there."""
    return Check("absent", path, "", key)


@dataclass(frozen=True)
class Step:
    """One instruction and what it takes to do it. Most tasks are one step.

    solution: bash, run in /app, after which every check holds. mistakes: bash that does what a hasty reader would, each
    worth 0 of every reward key. files: put into /app before the step. name and min_reward: of a step of several; with
    a smaller reward the episode ends there.
    """

    instruction: str
    solution: str
    checks: tuple[Check, ...]
    mistakes: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=dict)
    name: str = ""
    min_reward: float | None = None


@dataclass(frozen=True)
class OwnTask:
    """A family of tasks: one for every seed, which alone decides what `make` draws."""

    name: str
    difficulty: Difficulty
    make: Callable[[random.Random], Step | tuple[Step, ...]]

    def steps(self, seed: int) -> tuple[Step, ...]:
        """The steps of one instance, in order."""
        made = self.make(random.Random(f"{self.name}/{seed}"))
        return made if isinstance(made, tuple) else (made,)


def rows(*each: object) -> str:
    """Lines of text, each ended by a newline."""
    return "".join(f"{row}\n" for row in each)
