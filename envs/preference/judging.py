"""Comparisons under way: all at once, within a limit, tried again when the judge fails.

Knows judges and what they raise; must not know groups or rewards.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from envs.preference.comparison import Comparison, Judge, JudgeFault, Preference
from envs.preference.limit import Limit
from jaxrl.env import EnvironmentFault

T = TypeVar("T")

SIXTEEN = Limit("judge", 16)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judging:
    """How often and how long a judge is asked.

    retries: attempts at one verdict after the first, on top of those that a hosted model makes by itself. seconds: for
    one attempt, waiting for a place not included; None is no limit. limit: how many are asked at once, in all groups
    together.
    """

    retries: int = 2
    seconds: float | None = None
    limit: Limit = SIXTEEN

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries={self.retries}: expected 0 or more")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds}: expected a positive number, or None for no limit")


@dataclass(frozen=True)
class Missing:
    """A verdict that the judge still owed after its last attempt, and why."""

    reason: str


async def ask(question: Callable[[], Awaitable[T]], judging: Judging) -> T:
    """What `question` gives, after as many attempts as are allowed. Raises JudgeFault when none of them succeeds.

    Only an EnvironmentFault and running over `seconds` are worth another attempt.
    """
    failures: list[str] = []
    for _ in range(judging.retries + 1):
        async with judging.limit.places():
            try:
                with trio.fail_after(math.inf if judging.seconds is None else judging.seconds):
                    return await question()
            except EnvironmentFault as fault:
                failures.append(str(fault))
            except trio.TooSlowError:
                failures.append(f"no verdict within {judging.seconds} s")
    raise JudgeFault(f"no verdict after {len(failures)} attempts (retries={judging.retries}); the last: {failures[-1]}")


async def compare_all(judge: Judge, comparisons: Sequence[Comparison], judging: Judging) -> list[Preference | Missing]:
    """The verdicts, in the order of the comparisons, all asked for at once. What stays without one goes to the log."""
    verdicts: list[Preference | Missing] = [Missing("not asked")] * len(comparisons)

    async def one(index: int, comparison: Comparison) -> None:
        try:
            verdicts[index] = await ask(lambda: _verdict(judge, comparison), judging)
        except JudgeFault as fault:
            _log.warning("a comparison is left out: %s", fault)
            verdicts[index] = Missing(str(fault))

    async with trio.open_nursery() as nursery:
        for index, comparison in enumerate(comparisons):
            nursery.start_soon(one, index, comparison)
    return verdicts


async def _verdict(judge: Judge, comparison: Comparison) -> Preference:
    verdict = await judge(comparison)
    if not isinstance(verdict, Preference):
        raise TypeError(f"the judge returned {verdict!r}: expected a Preference, such as FIRST, TIE or SECOND")
    return verdict
