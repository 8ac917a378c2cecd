"""What came of the runs: curves with a band over seeds, and one row of numbers for every variant and gap.

Reads metrics.jsonl of whatever runs are there, so an unfinished study has results too. Knows metric names and
statistics of a few numbers; must not know how anything is drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.run_dir import RunDir
from recipes.loss_study.study import COMMITTED, HELD_OUT, Gap, parse_name

CONFIDENCE = 0.95

BAND = f"mean over seeds, with a {CONFIDENCE:.0%} t-interval"
"""What the bands and the +- are, to be said wherever they are shown."""

Steps = list[dict[str, float]]
Runs = dict[tuple[str, Gap], dict[int, Steps]]
"""(variant, gap) -> seed -> the steps of that run."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and half the width of its interval: NaN with fewer than two seeds."""

    mean: float
    half: float
    count: int


@dataclass(frozen=True)
class Curve:
    """Estimates over steps."""

    xs: list[float]
    estimates: list[Estimate]


@dataclass(frozen=True)
class Column:
    """A number of every run. `of` reads it from the run's steps; NaN when it was not recorded."""

    title: str
    note: str
    of: Callable[[Steps], float]
    digits: int


def read_runs(folder: Path) -> Runs:
    """The runs in a study's directory, in the order of the legend; runs without a single step are left out.

    Raises FileNotFoundError when there is none.
    """
    found: list[tuple[str, Gap, int, Steps]] = []
    for path in sorted(folder.glob("*/metrics.jsonl")):
        combination = parse_name(path.parent.name)
        if combination is not None and (steps := read_metrics(RunDir(path.parent).metrics)):
            found.append((combination.variant, combination.gap, combination.seed, steps))
    if not found:
        raise FileNotFoundError(f"{folder} holds no run of a study; give its log_path, or run it first")
    runs: Runs = {}
    for variant, gap, seed, steps in sorted(found, key=lambda f: (_rank(f[0]), f[1].staleness, f[1].noise, f[2])):
        runs.setdefault((variant, gap), {})[seed] = steps
    return runs


def _rank(variant: str) -> tuple[int, str]:
    return (COMMITTED.index(variant) if variant in COMMITTED else len(COMMITTED), variant)


def variants_of(runs: Runs) -> list[str]:
    """Variants, in the order of the legend."""
    return list(dict.fromkeys(variant for variant, _ in runs))


def gaps_of(runs: Runs) -> list[Gap]:
    """Gaps, the smallest first."""
    return sorted({gap for _, gap in runs}, key=lambda g: (g.staleness, g.noise))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and half width of a t-interval over the values that are finite."""
    kept = [v for v in values if math.isfinite(v)]
    n = len(kept)
    if n < 2:
        return Estimate(kept[0] if kept else math.nan, math.nan, n)
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, n - 1))
    return Estimate(float(np.mean(kept)), quantile * float(np.std(kept, ddof=1)) / math.sqrt(n), n)


def points(steps: Steps, name: str) -> list[tuple[float, float]]:
    """(optimizer steps made, value) wherever the metric was recorded and finite.

    An evaluation comes before its step, but for the one that ends the run.
    """
    found = [(s["step"], s[name]) for s in steps if name in s and math.isfinite(s[name])]
    if found and name.startswith("test/") and steps[-1].get("progress/done_frac") == 1.0:
        found[-1] = (found[-1][0] + 1, found[-1][1])
    return found


def curve(seeds: dict[int, Steps], name: str) -> Curve:
    """The metric over steps, wherever all seeds that are there have it."""
    by_seed = [dict(points(steps, name)) for steps in seeds.values()]
    xs = sorted(set.intersection(*(set(values) for values in by_seed))) if by_seed else []
    return Curve(xs, [estimate([values[x] for values in by_seed]) for x in xs])


def _values(steps: Steps, name: str) -> list[float]:
    return [y for _, y in points(steps, name)]


def _reduced(name: str, how: Callable[[list[float]], Any]) -> Callable[[Steps], float]:
    def of(steps: Steps) -> float:
        values = _values(steps, name)
        return float(how(values)) if values else math.nan

    return of


_TAIL = 5


def _tail(values: list[float]) -> float:
    return float(np.mean(values[-_TAIL:]))


def _step_seconds(steps: Steps) -> float:
    both = [s["time/rollout"] + s["time/train"] for s in steps if "time/rollout" in s and "time/train" in s]
    return float(np.median(both)) if both else math.nan


COLUMNS = (
    Column("held-out won", "share of games, at the end", _reduced(HELD_OUT, lambda v: v[-1]), 3),
    Column("best", "of all evaluations", _reduced(HELD_OUT, max), 3),
    Column("clip fraction", "mean over steps", _reduced("optim/clip_fraction", np.mean), 4),
    Column("entropy", f"mean of the last {_TAIL} steps, nats", _reduced("optim/entropy", _tail), 3),
    Column("sampler-trainer KL", "v1, mean over steps", _reduced("optim/kl_sample_train_v1", np.mean), 4),
    Column("gradient norm", "median, before clipping", _reduced("optim/grad_norm", np.median), 3),
    Column("age of tokens", "most versions", _reduced("async/staleness_max", max), 0),
    Column("learning rate", "at the end", _reduced("optim/lr", lambda v: v[-1]), 5),
    Column("seconds a step", "median, without evaluation", _step_seconds, 2),
)
"""The columns of the table."""


@dataclass(frozen=True)
class Row:
    """A variant at a gap: an estimate for each column."""

    variant: str
    gap: Gap
    seeds: int
    cells: tuple[Estimate, ...]


def rows(runs: Runs) -> list[Row]:
    """The table, gaps first, so that what competes stands together."""
    return [
        Row(variant, gap, len(seeds), tuple(estimate([c.of(steps) for steps in seeds.values()]) for c in COLUMNS))
        for gap in gaps_of(runs)
        for variant in variants_of(runs)
        if (seeds := runs.get((variant, gap)))
    ]


def cell(value: Estimate, column: Column, *, interval: bool) -> str:
    """A cell of the table as text, with its interval if that is asked for."""
    if math.isnan(value.mean):
        return "–"
    mean = f"{value.mean:.{column.digits}f}"
    return f"{mean} ± {value.half:.{column.digits}f}" if interval and not math.isnan(value.half) else mean


def markdown(table: Sequence[Row]) -> str:
    """The table as Markdown, and what its numbers are."""
    heads = ["sampler", "variant", *(c.title for c in COLUMNS), "seeds"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in table:
        cells = [cell(v, c, interval=i == 0) for i, (v, c) in enumerate(zip(row.cells, COLUMNS, strict=True))]
        lines.append(f"| {' | '.join([str(row.gap), row.variant, *cells, str(row.seeds)])} |")
    notes = "; ".join(f"{c.title}: {c.note}" for c in COLUMNS)
    return "\n".join(
        [*lines, "", f"All numbers are means over seeds; ± is half a {CONFIDENCE:.0%} t-interval. {notes}."]
    )


def as_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The table as JSON-able values; null where there is no number."""
    return [
        {
            "variant": row.variant,
            "staleness": row.gap.staleness,
            "noise": row.gap.noise,
            "seeds": row.seeds,
            **{
                c.title: {"mean": _json(v.mean), "half": _json(v.half)} for c, v in zip(COLUMNS, row.cells, strict=True)
            },
        }
        for row in table
    ]


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None
