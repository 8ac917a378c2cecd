"""The learning curve of a run as a PNG: training reward and held-out success over steps.

Knows matplotlib and two lists of points. It must not know where they come from.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

TRAIN_COLOUR, TEST_COLOUR = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermillion, told apart by all

Points = tuple[Sequence[float], Sequence[float]]


def write_curve(path: str | Path, *, title: str, train: Points, held_out: Points, held_out_label: str) -> None:
    """Draw (steps, values) of both; either may be empty. Overwrites `path`. Raises OSError."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _plot(axes, train, "training reward", colour=TRAIN_COLOUR, style="-", marker="")
    if held_out[0]:
        right = axes.twinx() if _other_scale(train, held_out) else axes
        _plot(right, held_out, held_out_label, colour=TEST_COLOUR, style="--", marker="o")
        if right is not axes:
            _name(right, held_out_label, TEST_COLOUR)
            _name(axes, "training reward", TRAIN_COLOUR)
            right.spines[["top", "left", "bottom"]].set_visible(False)
    if len(figure.axes) == 1:  # two are told apart by their names, which a legend would hide behind the other's line
        _explain(axes)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=150)


def _plot(axes: Axes, points: Points, label: str, *, colour: str, style: str, marker: str) -> None:
    if points[0]:
        marker = marker or ("." if len(points[0]) == 1 else "")
        axes.plot(*points, style, color=colour, label=label, marker=marker, markersize=5, linewidth=1.8)


def _explain(axes: Axes) -> None:
    """What its lines are, if there are any."""
    labels = [str(line.get_label()) for line in axes.get_lines()]
    if labels:
        axes.set_ylabel(", ".join(labels))
        axes.legend(frameon=False, loc="best")
    else:
        axes.text(0.5, 0.5, "nothing was recorded yet", transform=axes.transAxes, ha="center", color="gray")


def _name(axes: Axes, label: str, colour: str) -> None:
    axes.set_ylabel(label, color=colour)
    axes.tick_params(axis="y", colors=colour)


def _other_scale(train: Points, held_out: Points) -> bool:
    """Two axes when one curve would flatten the other."""
    if not train[0]:
        return False
    spans = sorted(max(map(abs, ys)) or 1.0 for _, ys in (train, held_out))
    return spans[1] > 3 * spans[0]
