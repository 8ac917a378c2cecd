"""The table of a study as text: what its numbers are, with which interval, and what that interval leaves out.

Knows rows of estimates; must not know how they came about.
"""

import math
from collections.abc import Sequence
from typing import Any

from recipes.loss_study.result import COLUMNS, CONFIDENCE, Estimate, Row

ALIKE = "†"
"""Beside an interval that is rounded to 0."""


def texts(row: Row) -> list[str]:
    """The row as text: held-out reward and its difference to the baseline, with intervals, seeds, the other columns."""
    cells = [number(v, c.digits, interval=i == 0) for i, (v, c) in enumerate(zip(row.cells, COLUMNS, strict=True))]
    if row.difference is None:
        return [cells[0], "–", row.seeds, *cells[1:]]
    mark = "**" if row.difference.resolved else ""
    said = number(row.difference.estimate, COLUMNS[0].digits, interval=True, sign="+")
    return [cells[0], f"{mark}{said}{mark}", row.seeds, *cells[1:]]


def number(value: Estimate, digits: int, *, interval: bool, sign: str = "") -> str:
    """An estimate as text, with its interval if that is asked for."""
    if math.isnan(value.mean):
        return "–"
    mean = f"{value.mean:{sign}.{digits}f}"
    mean = f"{0.0:.{digits}f}" if float(mean) == 0 else mean  # not -0.000
    if not interval or math.isnan(value.half):
        return mean
    half = f"{value.half:.{digits}f}"
    return f"{mean} ± {half}" + (ALIKE if float(half) == 0 else "")


def heads(over: str) -> list[str]:
    """The titles of `texts`."""
    return [COLUMNS[0].title, f"minus {over}", "seeds", *(c.title for c in COLUMNS[1:])]


def errors(games: int | None) -> str:
    """What the intervals hold and what they leave out."""
    least = f" (a standard error of up to {0.5 / math.sqrt(games):.3f})" if games else ""
    return (
        f"± is half a {CONFIDENCE:.0%} t-interval over seeds: training, and the sampling of moves. Which "
        f"{games or 'held-out'} games are held out{least} is the same for all runs and in no interval. "
        f"{ALIKE} marks seeds that agree so closely that ± is rounded to 0: of what another seed would do, or other "
        "games, it says nothing."
    )


def tests(over: str) -> str:
    """When a difference counts."""
    return (
        f"Differences are to {over} with the same seed, which also starts from the same adapter. In bold where one is "
        f"resolved: its t-interval leaves out 0, and it is larger than {CONFIDENCE:.0%} of the differences that the "
        "games alone would make between two equal policies. No correction is made for how many are compared: of 20 "
        "true zeros, about one would be out of its interval."
    )


def markdown(table: Sequence[Row], over: str, games: int | None) -> str:
    """The table as Markdown, and what its numbers are."""
    titles = ["sampler", "variant", *heads(over)]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    lines += [f"| {' | '.join([str(row.gap), row.variant, *texts(row)])} |" for row in table]
    notes = "; ".join(f"{c.title}: {c.note}" for c in COLUMNS)
    return "\n".join([*lines, "", f"All numbers are means over seeds. {errors(games)} {tests(over)} {notes}."])


def as_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The table as JSON-able values; null where there is no number."""
    return [
        {
            "variant": row.variant,
            "staleness": row.gap.staleness,
            "noise": row.gap.noise,
            "seeds": {"ended": row.ended, "diverged": row.diverged, "asked": row.asked},
            "difference": row.difference
            and {
                "over": row.difference.over,
                "mean": _json(row.difference.estimate.mean),
                "half": _json(row.difference.estimate.half),
                "chance": _json(row.difference.chance),
                "resolved": row.difference.resolved,
            },
            **{
                c.title: {"mean": _json(v.mean), "half": _json(v.half)} for c, v in zip(COLUMNS, row.cells, strict=True)
            },
        }
        for row in table
    ]


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None
