"""What came of the runs: curves with a band over seeds, and one row of numbers for every variant and gap.

Reads metrics.jsonl of the runs that came to an end, so a study that goes on has results too. Two rules say what
counts: a run that diverged has no policy to keep, so its held-out reward is 0 from the step in which it did; a run that
is still under way, or was interrupted, counts nowhere, and the table says how many of the runs asked for are there.

Knows metric names and statistics of a few numbers; must not know how anything is written or drawn.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import chz
import numpy as np
from scipy.stats import t as student

from jaxrl.runtime import log
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.run_dir import RunDir
from recipes.loss_study.study import (
    COMMITTED,
    DIVERGED,
    HELD_OUT,
    Combination,
    Gap,
    Study,
    combinations,
    next_step,
    parse_name,
)

CONFIDENCE = 0.95

BAND = "mean over seeds, and from the lowest seed to the highest"
"""What lines and bands are, to be said wherever they are shown.

An interval of three seeds, of which one broke down, would cover the whole panel.
"""

GAMES = "test/env/all/total_episodes"
"""How many held-out games an evaluation plays."""

BASELINE = "grpo"
"""What the other variants are compared with; without it, the first of the legend is."""

Steps = list[dict[str, float]]


@dataclass(frozen=True)
class Ended:
    """A run that came to its end: the last step, or the one in which loss or gradient was not finite (diverged)."""

    steps: Steps
    diverged: int | None = None


@dataclass(frozen=True)
class Cell:
    """The runs of a variant at a gap. ended: by seed. asked: how many seeds the study asks for."""

    ended: dict[int, Ended]
    asked: int

    @property
    def diverged(self) -> int:
        """How many of them diverged."""
        return sum(run.diverged is not None for run in self.ended.values())


Runs = dict[tuple[str, Gap], Cell]
"""(variant, gap) -> what there is of it, maybe nothing yet."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, half the width of its interval (NaN with fewer than two), and the lowest and highest seed."""

    mean: float
    half: float
    count: int
    lowest: float = math.nan
    highest: float = math.nan


@dataclass(frozen=True)
class Curve:
    """Estimates over steps."""

    xs: list[float]
    estimates: list[Estimate]


@dataclass(frozen=True)
class Column:
    """A number of every run. `of` reads it from the run; NaN when it was not recorded."""

    title: str
    note: str
    of: Callable[[Ended], float]
    digits: int


def read_runs(folder: Path) -> Runs:
    """The runs in a study's directory and those it asks for, in the order of the legend.

    Raises FileNotFoundError when none has come to an end.
    """
    there = dict(_found(folder))
    if not any(there.values()):
        raise FileNotFoundError(
            f"{folder} holds no run of a study that came to its end; give the log_path of one, or let it run"
        )
    runs: Runs = {}
    every = sorted({*there, *_asked(folder)}, key=lambda c: (_rank(c.variant), c.gap.staleness, c.gap.noise, c.seed))
    for combination in every:
        key, run = (combination.variant, combination.gap), there.get(combination)
        cell = runs.setdefault(key, Cell({}, 0))
        runs[key] = Cell(cell.ended | ({combination.seed: run} if run else {}), cell.asked + 1)
    return runs


def _found(folder: Path) -> Iterator[tuple[Combination, Ended | None]]:
    """The runs that were begun, and how they ended."""
    for path in sorted(folder.glob("*/metrics.jsonl")):
        if (combination := parse_name(path.parent.name)) is not None:
            steps = read_metrics(RunDir(path.parent).metrics)
            if (path.parent / DIVERGED).is_file():
                yield combination, Ended(steps, next_step(steps))
            else:
                yield combination, Ended(steps) if _is_whole(steps) else None


def _is_whole(steps: Steps) -> bool:
    return bool(steps) and steps[-1].get("progress/done_frac") == 1.0


def _asked(folder: Path) -> list[Combination]:
    """The runs that the last command asked for."""
    note = folder / "study.json"
    if not note.exists():
        return []
    settings = json.loads(note.read_text())
    compared = ("variants", "seeds", "staleness", "noise")
    return combinations(chz.replace(Study(), **{name: tuple(settings[name]) for name in compared}))


def _rank(variant: str) -> tuple[int, str]:
    return (COMMITTED.index(variant) if variant in COMMITTED else len(COMMITTED), variant)


def variants_of(runs: Runs) -> list[str]:
    """Variants, in the order of the legend."""
    return list(dict.fromkeys(variant for variant, _ in runs))


def gaps_of(runs: Runs) -> list[Gap]:
    """Gaps, the smallest first."""
    return sorted({gap for _, gap in runs}, key=lambda g: (g.staleness, g.noise))


def ended_of(runs: Runs) -> list[Ended]:
    """All runs that came to an end."""
    return [run for cell in runs.values() for run in cell.ended.values()]


def baseline_of(runs: Runs) -> str:
    """The variant that the others are compared with."""
    return BASELINE if BASELINE in variants_of(runs) else variants_of(runs)[0]


def games_of(runs: Runs) -> int | None:
    """How many held-out games an evaluation plays; None where that was not recorded."""
    return next((int(step[GAMES]) for run in ended_of(runs) for step in run.steps if GAMES in step), None)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and half width of a t-interval over the values that are finite."""
    kept = [v for v in values if math.isfinite(v)]
    n = len(kept)
    if not kept:
        return Estimate(math.nan, math.nan, 0)
    if n == 1:
        return Estimate(kept[0], math.nan, 1, kept[0], kept[0])
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, n - 1))
    half = quantile * float(np.std(kept, ddof=1)) / math.sqrt(n)
    return Estimate(float(np.mean(kept)), half, n, min(kept), max(kept))


def points(steps: Steps, name: str) -> list[tuple[float, float]]:
    """(step, value) wherever the metric was recorded and finite."""
    return list(zip(*log.points(steps, name), strict=True))


def grid_of(runs: Runs, name: str) -> list[float]:
    """The steps at which any run that ended has the metric, and where the longest ends: what a curve may reach."""
    ended = ended_of(runs)
    ends = [round((s["step"] + 1) / s["progress/done_frac"]) for run in ended for s in run.steps[-1:]]
    return sorted({x for run in ended for x, _ in points(run.steps, name)} | {float(max(ends, default=0))})


def curve(cell: Cell, name: str, grid: Sequence[float]) -> Curve:
    """The metric over the steps of the grid: at each, over the seeds that have it there.

    A step that had nothing to learn from has no metrics of training, nor has one that a diverged run did not reach; but
    held-out reward it has: 0.
    """
    by_seed = [_over_steps(run, name, grid) for run in cell.ended.values()]
    xs = [x for x in grid if any(x in values for values in by_seed)]
    return Curve(xs, [estimate([values[x] for values in by_seed if x in values]) for x in xs])


def _over_steps(run: Ended, name: str, grid: Sequence[float]) -> dict[float, float]:
    lost = {x: 0.0 for x in grid if x >= run.diverged} if run.diverged is not None and name == HELD_OUT else {}
    return dict(points(run.steps, name)) | lost


def held_out(run: Ended) -> float:
    """The held-out reward of the policy that the run leaves behind: 0 when it diverged."""
    if run.diverged is not None:
        return 0.0
    values = points(run.steps, HELD_OUT)
    return values[-1][1] if values else math.nan


def _reduced(name: str, how: Callable[[list[float]], Any]) -> Callable[[Ended], float]:
    def of(run: Ended) -> float:
        values = [y for _, y in points(run.steps, name)]
        return float(how(values)) if values else math.nan

    return of


_TAIL = 5


def _tail(values: list[float]) -> float:
    return float(np.mean(values[-_TAIL:]))


def _step_seconds(run: Ended) -> float:
    both = [s["time/rollout"] + s["time/train"] for s in run.steps if "time/rollout" in s and "time/train" in s]
    return float(np.median(both)) if both else math.nan


COLUMNS = (
    Column("held-out reward", "at the end, 1 for a game won; 0 for a run that diverged", held_out, 3),
    Column("updates", "steps with something to learn from", _reduced("optim/grad_norm", len), 0),
    Column("clip fraction", "mean over updates", _reduced("optim/clip_fraction", np.mean), 4),
    Column("entropy", f"mean of the last {_TAIL} updates, nats", _reduced("optim/entropy", _tail), 3),
    Column("sampler-trainer KL", "v1, mean over updates", _reduced("optim/kl_sample_train_v1", np.mean), 4),
    Column("gradient norm", "median, before clipping", _reduced("optim/grad_norm", np.median), 3),
    Column("age of tokens", "most versions", _reduced("async/staleness_max", max), 0),
    Column("learning rate", "at the end", _reduced("optim/lr", lambda v: v[-1]), 5),
    Column("seconds a step", "median, without evaluation", _step_seconds, 2),
)
"""The columns of the table."""


@dataclass(frozen=True)
class Difference:
    """How much more held-out reward than the baseline, over the seeds that both have: the pairs differ in nothing else.

    chance: half of the interval that the games alone would give such a difference, were the two as good as each other.
    """

    over: str
    estimate: Estimate
    chance: float

    @property
    def resolved(self) -> bool:
        """Whether seeds and games both leave no difference out: three seeds may be alike by chance."""
        size = abs(self.estimate.mean)
        return size > self.estimate.half and size > self.chance  # False where either is NaN


def difference(runs: Runs, variant: str, gap: Gap) -> Difference | None:
    """The variant against the baseline at a gap; None for the baseline itself, and where no seed has both."""
    over = baseline_of(runs)
    theirs = runs[over, gap].ended if (over, gap) in runs else {}
    pairs = [(held_out(run), held_out(theirs[s])) for s, run in runs[variant, gap].ended.items() if s in theirs]
    if variant == over or not pairs:
        return None
    games = games_of(runs)
    share = min(max(float(np.mean(pairs)), 0.0), 1.0)
    error = math.sqrt(2 * share * (1 - share) / (games * len(pairs))) if games else math.nan
    return Difference(over, estimate([a - b for a, b in pairs]), NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error)


@dataclass(frozen=True)
class Row:
    """A variant at a gap: an estimate for each column, and the difference to the baseline.

    ended, diverged, asked: how many seeds came to an end, how many of these diverged, and how many there should be.
    """

    variant: str
    gap: Gap
    ended: int
    diverged: int
    asked: int
    cells: tuple[Estimate, ...]
    difference: Difference | None

    @property
    def seeds(self) -> str:
        """Those counts in words."""
        return f"{self.ended} of {self.asked}" + (f", {self.diverged} diverged" if self.diverged else "")


def rows(runs: Runs) -> list[Row]:
    """The table, gaps first, so that what competes stands together."""
    return [
        Row(
            variant,
            gap,
            len(cell.ended),
            cell.diverged,
            cell.asked,
            tuple(estimate([c.of(run) for run in cell.ended.values()]) for c in COLUMNS),
            difference(runs, variant, gap),
        )
        for gap in gaps_of(runs)
        for variant in variants_of(runs)
        if (cell := runs.get((variant, gap)))
    ]
