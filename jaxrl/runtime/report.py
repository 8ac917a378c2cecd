"""report.html and curve.png of a run directory: what was run, what was learned, what the model said.

Reads what a run wrote (also while it is running, or after a crash) and makes one page that needs nothing else: no
script, no font, no network, and a policy in its head that forbids them. It must not know how numbers came about;
which metrics become which chart is the table CHARTS.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from jaxrl.runtime.chart import Series, area_chart, line_chart, share_bar
from jaxrl.runtime.curve import write_curve
from jaxrl.runtime.log import REWARD, evaluated_at, held_out, points, read_metrics, trained_nothing
from jaxrl.runtime.record import read_records
from jaxrl.runtime.run_dir import RunDir, write_atomic
from jaxrl.runtime.style import CSS
from jaxrl.runtime.view import SHADES, choose, episode_html

Steps = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Chart:
    """One chart: metrics whose names start with one of `metrics` (or equal it), drawn as `kind`."""

    title: str
    metrics: tuple[str, ...]
    note: str
    kind: Literal["line", "smooth", "share"] = "line"


CHARTS = (
    Chart("Training reward", (REWARD,), "Mean over the episodes of a step.", "smooth"),
    Chart("Held-out evaluation", ("test/",), "Held-out tasks, sampled alike every time."),
    Chart("How episodes ended", ("rollout/stop/",), "Fractions of all episodes of a step.", "share"),
    Chart(
        "Groups by outcome",
        ("env/all/by_group/frac_mixed", "env/all/by_group/frac_all_good", "env/all/by_group/frac_all_bad"),
        "Where members are compared with their group, only mixed groups teach.",
        "share",
    ),
    Chart("Entropy", ("optim/entropy",), "Of the policy over sampled tokens, in nats.", "smooth"),
    Chart(
        "KL divergence",
        ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2", "optim/kl_ref"),
        "Sampler against trainer, and policy against reference.",
    ),
    Chart("Gradient norm", ("optim/grad_norm",), "Before clipping.", "smooth"),
    Chart("Clip fraction", ("optim/clip_fraction",), "Tokens whose ratio left the trust region."),
    Chart("Learning rate", ("optim/lr",), ""),
    Chart("Turns per episode", ("env/all/turns_per_episode",), "", "smooth"),
    Chart("Sampled tokens per turn", ("env/all/ac_tokens_per_turn",), "", "smooth"),
    Chart("Throughput", ("engine/tokens_per_second",), "Sampled tokens per second.", "smooth"),
    Chart(
        "Staleness", ("async/staleness_mean", "async/staleness_max"), "Policy versions between sampling and training."
    ),
)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_TRANSCRIPT_STEPS = 3  # first, middle and last recorded step
_MOST_LINES = 6


def write_report(run_dir: str | Path) -> Path:
    """Write report.html and curve.png of a run; returns the page's path.

    Raises FileNotFoundError when the directory holds no metrics, ValueError when its files are damaged.
    """
    run = RunDir(Path(run_dir))
    if not run.metrics.exists():
        raise FileNotFoundError(f"{run.path} has no metrics.jsonl: give the directory of a run (its log_path)")
    steps = read_metrics(run.metrics)
    write_atomic(run.report, page(run, steps))
    name = held_out_name(steps)
    write_curve(
        run.curve,
        title=run.path.resolve().name,
        train=points(steps, REWARD),
        held_out=points(steps, name) if name else ((), ()),
        held_out_label=f"held-out {_last_part(name)}" if name else "",
    )
    return run.report


def page(run: RunDir, steps: Steps) -> str:
    """The page of a run as HTML."""
    name = escape(run.path.resolve().name)
    charts = "".join(_figure(c, body) for c in CHARTS if (body := _chart(c, steps)))
    said = f'<p class="outcome">{escape(outcome(steps))}</p>'
    sections = (
        f"<header><h1>{name}</h1>{said}{_tiles(steps)}{_provenance(run)}</header>",
        _section("Curves", f'<div class="charts">{charts}</div>' if charts else ""),
        _section("Where the time went", _timing(steps)),
        _section("Transcripts", _transcripts(run)),
        _section("All metrics", _table(steps)),
        _section("Configuration", _configuration(run)),
    )
    return _PAGE.format(title=f"{name} \u00b7 jaxrl", css=CSS, body="\n".join(filter(None, sections)))


def outcome(steps: Steps) -> str:
    """What was learned, in a sentence, and how many steps taught nothing, if any did."""
    if not steps:
        return "No step was recorded yet: there is nothing to show."
    return _learned(steps) + _idle(steps)


def _learned(steps: Steps) -> str:
    name = held_out_name(steps)
    what, (xs, ys) = (
        (f"Held-out {_last_part(name)}", points(steps, name)) if name else ("Training reward", points(steps, REWARD))
    )
    if not ys:
        return f"{len(steps)} steps; no reward was recorded."
    show = _rate if name and not name.endswith("/total") else _short
    if len(ys) == 1:
        return f"{what} at step {xs[0]:g}: {show(ys[0])}."
    verb = "rose" if ys[-1] > ys[0] else "fell" if ys[-1] < ys[0] else "stayed"
    if verb == "stayed":
        return f"{what} stayed at {show(ys[0])} from step {xs[0]:g} to step {xs[-1]:g}."
    best = "" if max(ys) <= max(ys[0], ys[-1]) else f" (best {show(max(ys))} at step {xs[ys.index(max(ys))]:g})"
    return f"{what} {verb} from {show(ys[0])} at step {xs[0]:g} to {show(ys[-1])} at step {xs[-1]:g}{best}."


def _idle(steps: Steps) -> str:
    idle = sum(map(trained_nothing, steps))
    return f" {idle} of {len(steps)} steps trained nothing: no group had anything to teach." if idle else ""


def held_out_name(steps: Steps) -> str | None:
    """The held-out metric that the run is judged by."""
    return held_out({name: 0.0 for step in steps for name in step})


# --- numbers -------------------------------------------------------------------------------------


def _names(steps: Steps) -> list[str]:
    return sorted({name for step in steps for name in step} - {"step"})


def _short(value: float) -> str:
    return f"{value:.4g}"


def _rate(value: float) -> str:
    return f"{value:.1%}"


def _seconds(value: float) -> str:
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _total(steps: Steps, name: str) -> float:
    return sum(points(steps, name)[1])


def _last_part(name: str | None) -> str:
    if not name:
        return ""
    return "reward" if name.endswith("reward/total") else name.rsplit("/", 1)[-1]


# --- sections ------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _figure(chart: Chart, body: str) -> str:
    return (
        f"<figure><figcaption><b>{chart.title}</b> <span class='quiet'>{chart.note}</span></figcaption>{body}</figure>"
    )


def _tiles(steps: Steps) -> str:
    tiles = [("steps", str(len(steps)))]
    name = held_out_name(steps)
    for label, metric in ((f"held-out {_last_part(name)}", name), ("training reward", REWARD)):
        ys = points(steps, metric)[1] if metric else []
        if ys:
            show = _rate if metric == name and not label.endswith("reward") else _short
            tiles.append((label, show(ys[0]) + (f" \u2192 {show(ys[-1])}" if len(ys) > 1 else "")))
    for label, metric, show in (
        ("duration", "time/total", _seconds),
        ("sampled tokens", "engine/decode_tokens", lambda n: f"{n:,.0f}"),
    ):
        if total := _total(steps, metric):
            tiles.append((label, show(total)))
    return '<div class="tiles">' + "".join(f"<div><b>{escape(v)}</b>{escape(k)}</div>" for k, v in tiles) + "</div>"


def _provenance(run: RunDir) -> str:
    starts = _json(run.versions) or []
    if not starts:
        return ""
    last = starts[-1]
    packages = last.get("packages", {})
    shown = [f"{p} {packages[p]}" for p in ("jaxrl", "jax", "jaxlib") if p in packages] + [
        f"Python {last.get('python')}"
    ]
    git = (last.get("git") or {}).get("jaxrl") or (last.get("git") or {}).get("working_directory")
    if git:
        shown.append(f"git {git['sha'][:10]}{' with local changes' if git['dirty'] else ''}")
    shown.append(f"started {starts[0].get('time')}" + (f", resumed {len(starts) - 1} times" if len(starts) > 1 else ""))
    command = f"<code>{escape(' '.join(map(str, last.get('command', []))))}</code>"
    facts = escape(" \u00b7 ".join(shown))
    return f'<p class="quiet">{facts}<br>{command}</p>'


def _chart(chart: Chart, steps: Steps) -> str:
    """Empty when none of its metrics was recorded."""
    names = [n for n in _names(steps) if any(n == m or (m.endswith("/") and n.startswith(m)) for m in chart.metrics)]
    if chart.kind == "share":
        return _share_chart(names, steps)
    if chart.metrics == ("test/",):
        names = _headline_metrics(names)
    lines = [Series(_label(chart, n, names), *points(steps, n)) for n in names if points(steps, n)[0]]
    smooth = chart.kind == "smooth"
    return line_chart(lines, span=_span(steps), smooth=smooth, zero=not smooth) if lines else ""


def _span(steps: Steps) -> tuple[float, float]:
    """The steps that every chart of the run shows, whether or not its metrics were recorded to the end."""
    last = steps[-1]
    return steps[0]["step"], evaluated_at(last["step"], last) if held_out(last) else last["step"]


def _share_chart(names: Sequence[str], steps: Steps) -> str:
    """Shares need a value at every step; a cause that did not occur was a share of 0."""
    used = [s for s in steps if any(n in s for n in names)]
    if not used:
        return ""
    seen = sorted((n for n in names if _total(used, n) > 0), key=lambda n: -_total(used, n))
    xs = [s["step"] for s in used]
    labels = (_last_part(n).removeprefix("frac_").replace("_", " ") for n in seen)
    shares = [Series(label, xs, [s.get(n, 0.0) for s in used]) for label, n in zip(labels, seen, strict=True)]
    return area_chart(shares, span=_span(steps))


def _headline_metrics(names: Sequence[str]) -> list[str]:
    """Of the many test/ metrics those that say how good the policy is."""
    endings = ("/success", "/correct", "/reward/total")
    return sorted((n for n in names if n.endswith(endings)), key=lambda n: (len(n), n))[:_MOST_LINES]


def _label(chart: Chart, name: str, names: Sequence[str]) -> str:
    if chart.metrics == ("test/",) and len(names) > 1:
        return name.removeprefix("test/").removeprefix("env/").removeprefix("all/")
    return name.rsplit("/", 1)[-1]


def _timing(steps: Steps) -> str:
    """Parts of a step that do not contain each other: time/<one name>."""
    total = _total(steps, "time/total")
    names = [n for n in _names(steps) if n.startswith("time/") and n.count("/") == 1 and n != "time/total"]
    parts = sorted(((n.removeprefix("time/"), _total(steps, n)) for n in names), key=lambda p: -p[1])
    rest = total - sum(v for _, v in parts)
    if rest > 0.005 * total:
        parts.append(("other", rest))
    parts = [p for p in parts if p[1] > 0]
    note = "" if rest >= -0.005 * total else '<p class="quiet">Parts overlap: sampling ran beside training.</p>'
    return share_bar(parts, _seconds) + note if parts else ""


def _table(steps: Steps) -> str:
    rows = "".join(_row(name, steps) for name in _names(steps))
    head = "<tr><th>metric</th><th>first</th><th>last</th><th>least</th><th>most</th></tr>"
    return (
        f"<details><summary>{len(_names(steps))} metrics</summary><table>{head}{rows}</table></details>" if rows else ""
    )


def _row(name: str, steps: Steps) -> str:
    everything = [s[name] for s in steps if name in s]
    finite = [v for v in everything if math.isfinite(v)]
    odd = len(everything) - len(finite)
    warning = f' <span class="odd">{odd} not finite</span>' if odd else ""
    shown = (everything[0], everything[-1], min(finite, default=math.nan), max(finite, default=math.nan))
    return f"<tr><td>{escape(name)}{warning}</td>{''.join(f'<td>{_short(v)}</td>' for v in shown)}</tr>"


def _configuration(run: RunDir) -> str:
    config = _json(run.config)
    if config is None:
        return ""
    text = escape(json.dumps(config, indent=2, sort_keys=True))
    return f"<details><summary>config.json</summary><pre>{text}</pre></details>"


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


# --- transcripts ---------------------------------------------------------------------------------


def _transcripts(run: RunDir) -> str:
    training, test = (sorted(run.rollouts.glob(f"{kind}_*.jsonl")) for kind in ("step", "test"))
    shown = _episodes(_spread(training, _TRANSCRIPT_STEPS), "") + _episodes(test[-1:], "held-out, ")
    if not shown:
        return ""
    scale = "".join(f'<span class="p{i}">\u2007</span>' for i in range(SHADES))
    key = (
        '<p class="quiet">Grey text came from the environment and is masked. Sampled tokens are shaded by surprise: '
        f'likely <span class="scale">{scale}</span> unlikely. Point at one for its id, log-prob and policy version.</p>'
    )
    return key + "".join(shown)


def _episodes(files: Iterable[Path], prefix: str) -> list[str]:
    """The best and the worst episode of each file; the first of all is unfolded."""
    chosen = [(f"{prefix}{label}", record) for file in files for label, record in choose(read_records(file))]
    return [
        episode_html(record, label=label, is_open=i == 0 and not prefix) for i, (label, record) in enumerate(chosen)
    ]


def _spread(files: Sequence[Path], n: int) -> list[Path]:
    """The last, the first and evenly spaced ones between, the last first: it shows what was learned."""
    if len(files) <= n:
        return list(reversed(files))
    return [files[round(i * (len(files) - 1) / (n - 1))] for i in reversed(range(n))]
