"""What every retriever is: queries in, passages with scores out. Also the threads that blocking ones search in.

Knows passages and trio; must not know any index, embedder or wire format.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import trio

from envs.search.corpus import Passage, encodable

THREADS = 4
"""Searches of one trio run that block at the same time; more would wait for each other in the interpreter."""

_Result = TypeVar("_Result")
_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("searches that block")


@dataclass(frozen=True)
class Hit:
    """A passage that was found. Higher scores are better; what a score means is the retriever's own."""

    passage: Passage
    score: float


class Retriever(Protocol):
    """Finds passages. A small, hashable, picklable value, which opens what it needs when it is first asked."""

    async def prepare(self) -> None:
        """Build or open what searching needs, or find the server answering. Raises what a search would."""
        ...

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """For each query its `k` best passages, best first: fewer when there are fewer, none when nothing matches.

        Errors: ValueError for k < 1; ImportError for a missing package; EnvironmentFault for a server that fails.
        """
        ...


def check_k(k: int) -> None:
    """Raise ValueError unless at least one passage is asked for."""
    if k < 1:
        raise ValueError(f"k={k}: expected at least 1 passage a query")


def finite(score: Any) -> float:
    """The number that a server gave. Raises ValueError for one that cannot be ordered, TypeError for what is none."""
    try:
        number = float(score)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"a score is {number}")
    return number


def readable(queries: Sequence[str]) -> list[str]:
    """The queries, as UTF-8 can hold them."""
    return [encodable(query) for query in queries]


async def in_thread(function: Callable[..., _Result], *args: object) -> _Result:
    """`function(*args)` in a thread that is waited for, also when cancelled: none outlives its scope."""
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(THREADS)
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(partial(function, *args), limiter=limiter)


def best(scores: np.ndarray, k: int) -> list[int]:
    """Indices of the `k` highest scores above zero, highest first; of equal ones the first comes first."""
    k = min(k, len(scores))
    if k < len(scores):
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        candidates = np.flatnonzero((scores >= least) & (scores > 0))
    else:
        candidates = np.flatnonzero(scores > 0)
    return [int(i) for i in candidates[np.argsort(-scores[candidates], kind="stable")][:k]]
