"""Small charts as inline SVG: lines over steps, shares stacked to one, parts of a whole.

Pure strings from numbers; colours are CSS variables of the page (`report.py`), so that charts follow its light or
dark scheme. Knows nothing of metrics' names or of runs. Every label is escaped.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 216
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 10, 32  # LEFT holds a tick such as -0.00125
_DOTS_UP_TO = 60  # points; with more, dots hide the line
_SMOOTH_FROM = 40  # points; with fewer, the raw line is clear enough


@dataclass(frozen=True)
class Series:
    """One line: y over x. NaN in `ys` breaks it."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


Span = tuple[float, float] | None
"""The first and the last step of a chart's axis; None for those that it shows."""


def line_chart(series: Sequence[Series], *, span: Span = None, smooth: bool = False, zero: bool = False) -> str:
    """Lines over steps. `smooth` draws a running mean over long, noisy lines; `zero` keeps 0 in view."""
    finite = [y for s in series for y in s.ys if math.isfinite(y)]
    if not finite:
        return _empty()
    ticks = _ticks(min([*finite, 0.0] if zero else finite), max(finite))
    span = span or _span(series)
    x_of, y_of = _scales(span, ticks[0], ticks[-1])
    parts = [_grid(ticks, y_of, _number), _x_axis(span, x_of)]
    for i, s in enumerate(series):
        long = smooth and len(s.ys) >= _SMOOTH_FROM
        parts.append(_line(s, x_of, y_of, f"line s{i % 8}" + (" raw" if long else "")))
        if long:
            parts.append(_line(Series(s.label, s.xs, _running_mean(s.ys)), x_of, y_of, f"line s{i % 8}"))
        if len(s.xs) <= _DOTS_UP_TO:
            parts.append(_dots(s, x_of, y_of, f"dot s{i % 8}" + (" raw" if long else "")))
    return _svg(parts) + _legend([s.label for s in series])


def area_chart(series: Sequence[Series], *, span: Span = None) -> str:
    """Shares over steps, stacked in the order given. All series have the same `xs`; NaN counts as 0."""
    xs = series[0].xs if series else ()
    if not xs:
        return _empty()
    span = span or _span(series)
    x_of, y_of = _scales(span, 0.0, 1.0)
    low = [0.0] * len(xs)
    parts = []
    for i, s in enumerate(series):
        high = [a + (y if math.isfinite(y) else 0.0) for a, y in zip(low, s.ys, strict=True)]
        edge = [(x_of(x), y_of(min(y, 1.0))) for x, y in zip(xs, high, strict=True)]
        back = [(x_of(x), y_of(min(y, 1.0))) for x, y in zip(xs, low, strict=True)]
        points = " ".join(_point(p) for p in _widened(edge) + _widened(back)[::-1])
        parts.append(f'<polygon class="area s{i % 8}" points="{points}"><title>{escape(s.label)}</title></polygon>')
        low = high
    parts += [_grid([0.0, 0.25, 0.5, 0.75, 1.0], y_of, _percent), _x_axis(span, x_of)]
    return _svg(parts) + _legend([s.label for s in series])


def share_bar(parts: Sequence[tuple[str, float]], unit: Callable[[float], str]) -> str:
    """One horizontal bar divided among non-negative parts, largest share and value in the legend."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return _empty()
    bars, x = [], 0.0
    for i, (label, value) in enumerate(parts):
        width = 100 * value / total
        said = escape(f"{label}: {unit(value)} ({value / total:.0%})")
        place = f'x="{x:.3f}" y="0" width="{width:.3f}" height="10"'
        bars.append(f'<rect class="area s{i % 8}" {place}><title>{said}</title></rect>')
        x += width
    svg = f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img">{"".join(bars)}</svg>'
    return svg + _legend([f"{label} {value / total:.0%} ({unit(value)})" for label, value in parts])


def _span(series: Sequence[Series]) -> tuple[float, float]:
    xs = [x for s in series for x in s.xs]
    return min(xs), max(xs)


def _scales(
    span: tuple[float, float], low: float, high: float
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    first, width = span[0], max(span[1] - span[0], 1e-9)
    height = max(high - low, 1e-12)

    def x_of(x: float) -> float:
        return LEFT + (x - first) / width * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return TOP + (high - y) / height * (HEIGHT - TOP - BOTTOM)

    return x_of, y_of


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose [low, high]."""
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-9):
        pad = abs(high) * 0.5
        low, high = low - pad, high + (pad or 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(start, stop + 1)]


def _number(value: float) -> str:
    """All digits of a round number: two ticks must not read alike. 12 leave out what floating point adds."""
    short = f"{value:.12g}" if abs(value) < 1e4 else f"{value / 1e3:.12g}k"
    return short.replace("e-0", "e-").replace("e+0", "e")


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _grid(ticks: Sequence[float], y_of: Callable[[float], float], text: Callable[[float], str]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(t):.1f}" y2="{y_of(t):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y_of(t) + 3.5:.1f}" text-anchor="end">{text(t)}</text>'
        for t in ticks
    )


def _x_axis(span: tuple[float, float], x_of: Callable[[float], float]) -> str:
    low, high = span
    ticks = [t for t in _ticks(low, high) if low <= t <= high and t == int(t)] if high > low else [low]
    marks = "".join(
        f'<text class="tick" x="{x_of(t):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{_number(t)}</text>'
        for t in ticks
    )
    return marks + f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>'


def _line(s: Series, x_of: Callable[[float], float], y_of: Callable[[float], float], css: str) -> str:
    return "".join(
        f'<polyline class="{css}" points="{" ".join(_point((x_of(x), y_of(y))) for x, y in run)}"/>' for run in _runs(s)
    )


def _runs(s: Series) -> Iterator[list[tuple[float, float]]]:
    """Stretches of finite points."""
    run: list[tuple[float, float]] = []
    for x, y in zip(s.xs, s.ys, strict=True):
        if math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _dots(s: Series, x_of: Callable[[float], float], y_of: Callable[[float], float], css: str) -> str:
    return "".join(
        f'<circle class="{css}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.4">'
        f"<title>{escape(s.label)}, step {x:g}: {y:.4g}</title></circle>"
        for x, y in zip(s.xs, s.ys, strict=True)
        if math.isfinite(y)
    )


def _running_mean(ys: Sequence[float]) -> list[float]:
    """Mean over a tenth of the points around each, NaN left out."""
    reach = max(2, len(ys) // 20)
    means = []
    for i in range(len(ys)):
        around = [y for y in ys[max(0, i - reach) : i + reach + 1] if math.isfinite(y)]
        means.append(sum(around) / len(around) if around else math.nan)
    return means


def _widened(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """A single step has no width; show it across the chart."""
    return points if len(points) > 1 else [(LEFT, points[0][1]), (WIDTH - RIGHT, points[0][1])]


def _point(p: tuple[float, float]) -> str:
    return f"{p[0]:.1f},{p[1]:.1f}"


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _legend(labels: Sequence[str]) -> str:
    keys = "".join(f'<span class="key s{i % 8}">{escape(label)}</span>' for i, label in enumerate(labels))
    return f'<div class="legend">{keys}</div>' if len(labels) > 1 else ""


def _empty() -> str:
    return '<p class="quiet">nothing recorded</p>'
