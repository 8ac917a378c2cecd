"""Who is compared with whom, and what the verdicts come to. Pure.

Knows places in a group and preferences; must not know answers, judges or episodes.

The reward of a member is the mean over its comparisons, never the sum, so that it does not grow with the group. A
verdict that is missing is left out of both sides' means: it is no loss. On the scale "plus_minus" a win is 1, a loss
-1 and a tie 0, so what one side gets the other loses; on "win_rate" they are 1, 0 and 0.5. The two differ by a
constant and a factor of 2, so after an advantage has centred them only the weight against other rewards does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from envs.preference.comparison import Preference

Pattern = Literal["all_pairs_both_ways", "all_pairs_one_way"]
"""Whether each pair is shown to the judge in both orders, or in one."""

Scale = Literal["plus_minus", "win_rate"]

_SLOPE: dict[Scale, float] = {"plus_minus": 2.0, "win_rate": 1.0}
_OFFSET: dict[Scale, float] = {"plus_minus": -1.0, "win_rate": 0.0}

NEUTRAL = 0.5
"""The share of a member that was compared with nobody."""


@dataclass(frozen=True)
class Standing:
    """What a member's comparisons came to.

    share: the mean of what it got of each win, None when no verdict is left. first_share: the mean of what the answer
    shown first got in the same comparisons, which is 0.5 for a judge that does not care about the order, once it has
    been asked in both.
    """

    judged: int
    missing: int
    share: float | None
    first_share: float


def check_pattern(pattern: str, matchup_group_size: int | None) -> None:
    """Raise ValueError for a pattern that does not exist, and for matchups of fewer than two."""
    if pattern not in get_args(Pattern):
        raise ValueError(f"pattern={pattern!r}: expected one of {', '.join(get_args(Pattern))}")
    if matchup_group_size is not None and matchup_group_size < 2:
        raise ValueError(f"matchup_group_size={matchup_group_size}: expected at least 2, or None for the whole group")


def check_scale(scale: str) -> None:
    """Raise ValueError for a scale that does not exist."""
    if scale not in _SLOPE:
        raise ValueError(f"scale={scale!r}: expected one of {', '.join(_SLOPE)}")


def matchups(members: int, matchup_group_size: int | None = None) -> list[range]:
    """The members in runs of about that many, which are compared among themselves only. Nobody is left alone.

    The runs are as even as they can be, and none is larger than asked for, unless somebody were alone otherwise.
    """
    if matchup_group_size is None or members < 2:
        return [range(members)]
    runs = min(-(-members // matchup_group_size), members // 2)
    return [range(i * members // runs, (i + 1) * members // runs) for i in range(runs)]


def pairs(
    members: int,
    pattern: Pattern = "all_pairs_both_ways",
    *,
    matchup_group_size: int | None = None,
    references: int = 0,
) -> list[tuple[int, int]]:
    """(shown first, shown second) of every comparison; references are the places after the members'.

    One way, who is first alternates, so that each is first in half of its comparisons, or one more or less. A
    reference is compared with every member, and with no reference.
    """
    check_pattern(pattern, matchup_group_size)
    unordered = [(i, j) for run in matchups(members, matchup_group_size) for i in run for j in run if i < j]
    unordered += [(i, members + r) for i in range(members) for r in range(references)]
    if pattern == "all_pairs_one_way":
        return [(i, j) if (j - i) % 2 else (j, i) for i, j in unordered]
    return [order for i, j in unordered for order in ((i, j), (j, i))]


def standings(members: int, shown: Sequence[tuple[int, int]], verdicts: Sequence[Preference | None]) -> list[Standing]:
    """What each member's comparisons came to. A verdict of None is missing."""
    shares: list[list[float]] = [[] for _ in range(members)]
    firsts: list[list[float]] = [[] for _ in range(members)]
    missing = [0] * members
    for (first, second), verdict in zip(shown, verdicts, strict=True):
        for place in (first, second):
            if place >= members:
                continue
            if verdict is None:
                missing[place] += 1
                continue
            shares[place].append(verdict.first if place == first else 1.0 - verdict.first)
            firsts[place].append(verdict.first)
    return [
        Standing(
            judged=len(got),
            missing=lost,
            share=_mean(got) if got else None if lost else NEUTRAL,
            first_share=_mean(first) if first else NEUTRAL,
        )
        for got, first, lost in zip(shares, firsts, missing, strict=True)
    ]


def reward(share: float, scale: Scale = "plus_minus") -> float:
    """What a mean share of the wins is worth."""
    return _OFFSET[scale] + _SLOPE[scale] * share


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
