"""The figure of a study: a column of panels for every gap, a line for every variant.

Knows matplotlib and results; must not know where they come from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.optimize import isotonic_regression

from recipes.loss_study.result import BAND, Cell, Curve, Runs, curve, gaps_of, grid_of, variants_of
from recipes.loss_study.study import HELD_OUT

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333", "#7A5195")  # Okabe and Ito's
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


_REACH = 2  # steps to either side that a running mean takes in


@dataclass(frozen=True)
class Panel:
    """A row of the figure. band: whether the spread over seeds is drawn, too, and what diverged.

    linear: up to where the axis is linear; it is logarithmic beyond. None is linear everywhere.
    """

    title: str
    metric: str
    band: bool = False
    limits: tuple[float, float] | None = None
    linear: float | None = None
    height: float = 1.0


PANELS = (
    Panel("held-out reward", HELD_OUT, band=True, limits=(-0.02, 1.0), height=2.6),
    Panel("sampler-trainer KL (v1)", "optim/kl_sample_train_v1", linear=0.01),
    Panel("clip fraction", "optim/clip_fraction"),
    Panel("entropy (nats)", "optim/entropy"),
)
"""The rows of the figure."""


def write_figure(path: Path, runs: Runs) -> None:
    """Draw and write a PNG. Raises OSError."""
    gaps, variants = gaps_of(runs), variants_of(runs)
    width = 1.0 + 3.7 * len(gaps)
    figure = Figure(figsize=(width, 1.2 + 1.7 * sum(p.height for p in PANELS)), layout="constrained")
    figure.set_layout_engine("constrained", w_pad=0.02, wspace=0.0)
    grid = figure.subplots(
        len(PANELS), len(gaps), sharex=True, sharey="row", squeeze=False, height_ratios=[p.height for p in PANELS]
    )
    for i, panel in enumerate(PANELS):
        steps = grid_of(runs, panel.metric)
        for j, gap in enumerate(gaps):
            axes = grid[i][j]
            _scale(axes, panel)
            ends = {}
            for k, variant in enumerate(variants):
                cell = runs.get((variant, gap))
                if cell is not None and cell.ended:
                    ends[k] = _draw(axes, cell, curve(cell, panel.metric, steps), k, panel)
            if panel.limits:
                _label(axes, {variants[k]: (xy, _colour(k)) for k, xy in ends.items() if xy}, panel.limits)
            _finish(axes, title=str(gap) if i == 0 else "", ylabel=panel.title if j == 0 else "")
            if i == len(PANELS) - 1:
                axes.set_xlabel("optimizer step")
    handles = _handles(runs)
    figure.legend(
        handles=handles, loc="outside upper center", ncols=max(2, min(len(handles), int(width / 1.5))), frameon=False
    )
    figure.supxlabel(_caption(runs), fontsize=8, color="#666666")
    figure.savefig(path, format="png", dpi=130)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def _handles(runs: Runs) -> list[Line2D]:
    """The legend: every variant that is drawn, with how many of its runs diverged, and what marks that."""
    handles, diverged = [], False
    for k, variant in enumerate(variants_of(runs)):
        cells = [cell for (v, _), cell in runs.items() if v == variant]
        ended, lost = sum(len(cell.ended) for cell in cells), sum(cell.diverged for cell in cells)
        diverged |= lost > 0
        if ended:
            label = f"{variant} ({lost} of {ended} diverged)" if lost else variant
            handles.append(Line2D([], [], color=_colour(k), marker=_marker(k), markersize=4, label=label))
    if diverged:
        handles.append(Line2D([], [], color="#333333", linestyle="", label="a run diverged", **_CROSS))
    return handles


def _caption(runs: Runs) -> str:
    seeds = sorted({len(cell.ended) for cell in runs.values()})
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return (
        f"Top: {BAND} (seeds: {count}); a run that diverged counts as 0 from there. Below: means over the seeds that "
        f"made an update,\nsmoothed over {2 * _REACH + 1} steps; where the games of every group end alike there is no "
        "update, and a line ends or has a gap."
    )


def _scale(axes: Axes, panel: Panel) -> None:
    if panel.limits:
        axes.set_ylim(*panel.limits)
    if panel.linear is not None:
        axes.set_yscale("symlog", linthresh=panel.linear)


_CROSS = {"marker": "x", "markersize": 8, "markeredgewidth": 2}


def _draw(axes: Axes, cell: Cell, line: Curve, index: int, panel: Panel) -> tuple[float, float] | None:
    """A variant's line; returns where it ends."""
    if not line.xs:
        return None
    means, colour = [e.mean for e in line.estimates], _colour(index)
    if not panel.band:
        axes.plot(*unbroken(line.xs, smooth(line.xs, means)), color=colour, linewidth=1.5)
        return line.xs[-1], means[-1]
    axes.plot(line.xs, means, color=colour, linewidth=1.8, marker=_marker(index), markersize=4, zorder=3)
    low, high = [e.lowest for e in line.estimates], [e.highest for e in line.estimates]
    axes.fill_between(line.xs, low, high, color=colour, alpha=0.08, linewidth=0)
    for edge in (low, high):
        axes.plot(line.xs, edge, color=colour, linewidth=0.5, alpha=0.35)
    for at in (run.diverged for run in cell.ended.values() if run.diverged is not None):
        axes.plot([at], [0.0], color=colour, clip_on=False, zorder=4, **_CROSS)
    return line.xs[-1], means[-1]


def smooth(xs: Sequence[float], ys: Sequence[float], reach: float = _REACH) -> list[float]:
    """A running mean over what lies within `reach` steps to either side."""
    x_N, y_N = np.asarray(xs, float), np.asarray(ys, float)
    return [float(y_N[np.abs(x_N - x) <= reach].mean()) for x in x_N]


def unbroken(xs: Sequence[float], ys: Sequence[float], longest: float = 2 * _REACH) -> tuple[list[float], list[float]]:
    """The line with a NaN in every gap that is longer than that, so that nothing is drawn across it."""
    places = [i for i in range(1, len(xs)) if xs[i] - xs[i - 1] > longest]
    return (
        [float(x) for x in np.insert(np.asarray(xs, float), places, math.nan)],
        [float(y) for y in np.insert(np.asarray(ys, float), places, math.nan)],
    )


_APART = 0.042  # of the height of a panel: a line of text


def _label(axes: Axes, ends: dict[str, tuple[tuple[float, float], str]], limits: tuple[float, float]) -> None:
    """Names beside the ends of lines, next to their ends as far as they do not overlap."""
    height = limits[1] - limits[0]
    places = spread([y for (_, y), _ in ends.values()], _APART * height, limits)
    for (name, ((x, y), colour)), place in zip(ends.items(), places, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.035, place),
            textcoords=axes.get_yaxis_transform(),
            color=colour,
            fontsize=7.5,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "shrinkA": 1, "shrinkB": 3},
        )


def spread(ys: Sequence[float], apart: float, limits: tuple[float, float]) -> list[float]:
    """The numbers, moved as little as can be (least squares) to lie that far apart, and within limits if they fit."""
    if not ys:
        return []
    order = np.argsort(ys, kind="stable")
    steps = apart * np.arange(len(ys))
    least, most = limits[0] + apart / 2, limits[1] - apart / 2 - steps[-1]
    moved = np.clip(isotonic_regression(np.asarray(ys, float)[order] - steps).x, least, max(least, most)) + steps
    places = np.empty(len(ys))
    places[order] = moved
    return places.tolist()


def _finish(axes: Axes, *, title: str, ylabel: str) -> None:
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    if ylabel:
        axes.set_ylabel(ylabel)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
