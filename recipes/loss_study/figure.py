"""The figure of a study: a column of panels for every gap, a line for every variant.

Knows matplotlib and results; must not know where they come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.loss_study.result import BAND, Curve, Runs, curve, gaps_of, variants_of
from recipes.loss_study.study import HELD_OUT

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333", "#7A5195")  # Okabe and Ito's
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


_REACH = 2  # steps to either side that a running mean takes in


@dataclass(frozen=True)
class Panel:
    """A row of the figure. band: whether the spread over seeds is drawn, too."""

    title: str
    metric: str
    band: bool = False
    limits: tuple[float, float] | None = None
    height: float = 1.0


PANELS = (
    Panel("held-out games won", HELD_OUT, band=True, limits=(0.0, 1.02), height=2.2),
    Panel("sampler-trainer KL (v1)", "optim/kl_sample_train_v1"),
    Panel("clip fraction", "optim/clip_fraction"),
    Panel("entropy (nats)", "optim/entropy"),
)
"""The rows of the figure."""


def write_figure(path: Path, runs: Runs) -> None:
    """Draw and write a PNG. Raises OSError."""
    gaps, variants, rows = gaps_of(runs), variants_of(runs), PANELS
    figure = Figure(figsize=(1.0 + 3.3 * len(gaps), 1.0 + 1.75 * sum(p.height for p in rows)), layout="constrained")
    grid = figure.subplots(
        len(rows), len(gaps), sharex=True, sharey="row", squeeze=False, height_ratios=[p.height for p in rows]
    )
    for i, panel in enumerate(rows):
        for j, gap in enumerate(gaps):
            axes = grid[i][j]
            for k, variant in enumerate(variants):
                if (variant, gap) in runs:
                    _draw(axes, curve(runs[variant, gap], panel.metric), variant, k, panel)
            _finish(axes, title=str(gap) if i == 0 else "", ylabel=panel.title if j == 0 else "")
            if panel.limits:
                axes.set_ylim(*panel.limits)
            if i == len(rows) - 1:
                axes.set_xlabel("optimizer step")
    handles = {str(line.get_label()): line for axes in grid[0] for line in axes.get_lines()}
    figure.legend(
        [handles[v] for v in variants if v in handles],
        [v for v in variants if v in handles],
        loc="outside upper center",
        ncols=min(4, len(variants)),
        frameon=False,
    )
    figure.supxlabel(f"Top: {BAND}. Below: means, smoothed over {2 * _REACH + 1} steps.", fontsize=8, color="#666666")
    figure.savefig(path, format="png", dpi=130)


def _draw(axes: Axes, line: Curve, variant: str, index: int, panel: Panel) -> None:
    means = [e.mean for e in line.estimates]
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    if not panel.band:
        means = smooth(means)
    axes.plot(
        line.xs,
        means,
        color=colour,
        label=variant,
        linewidth=1.6,
        marker=marker if panel.band else None,
        markersize=4,
    )
    if panel.band:
        halves = [0.0 if math.isnan(e.half) else e.half for e in line.estimates]
        low, high = ([m + s * h for m, h in zip(means, halves, strict=True)] for s in (-1, 1))
        axes.fill_between(line.xs, low, high, color=colour, alpha=0.1, linewidth=0)


def smooth(values: Sequence[float], reach: int = _REACH) -> list[float]:
    """A running mean over `reach` values to either side."""
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in around]


def _finish(axes: Axes, *, title: str, ylabel: str) -> None:
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    if ylabel:
        axes.set_ylabel(ylabel)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
