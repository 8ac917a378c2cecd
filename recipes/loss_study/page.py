"""The report of a study: study.html, study.png, table.md and table.json, made anew from whatever runs are there.

One page that needs nothing else: no script, no font, no network; the figure is in it. Knows results as text and HTML;
must not know how a run is made.
"""

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxrl.runtime.chart import Series, line_chart
from jaxrl.runtime.run_dir import write_atomic
from jaxrl.runtime.style import CSS
from recipes.loss_study.figure import write_figure
from recipes.loss_study.result import (
    BAND,
    COLUMNS,
    Row,
    Runs,
    baseline_of,
    curve,
    ended_of,
    games_of,
    gaps_of,
    grid_of,
    read_runs,
    rows,
    variants_of,
)
from recipes.loss_study.study import Combination
from recipes.loss_study.table import as_json, errors, heads, markdown, number, tests, texts

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{css}
img {{ display: block; width: 100%; height: auto; background: #fff; border-radius: 10px; }}
ul {{ padding-left: 1.2rem; }} li {{ margin: .2rem 0; }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

NOTES = (
    f"Lines and bands are {BAND}. Intervals are in the table: with three seeds they are 2.5 standard deviations to "
    "either side, and where one seed of them broke down, nothing can be said of their mean.",
    "All runs start from the same model and play the same games in the same order; a seed is that of the adapter's "
    "first values and of sampling. What differs between two runs is the variant, the seed and the gap. Without a gap, "
    "variants that differ in nothing but what they clip are the same run.",
    "A sampler k steps behind draws every token with the weights of k optimizer steps ago (fewer at the start), by "
    "setting, not by the machine's timing. Held-out games are played by the newest weights, without noise.",
    "A run diverges when its loss or gradient is no longer finite. It leaves no policy to keep, so its held-out reward "
    "counts as 0 from that step on; its other numbers are those of the steps it made. A run that did not come to its "
    "end yet is left out of everything but the number of runs asked for.",
    "A policy can also break down with finite numbers: it then loses all games, all rewards of a group are equal, "
    "nothing is left to learn from, and the number of updates stays behind the number of steps.",
    "Sampler-trainer KL is estimated on the sampled tokens before the update (v1: mean of log q - log p); without a "
    "gap it is rounding. Its axis is logarithmic above 0.01.",
    "The clip fraction is of trained tokens, and what it counts is the loss's own: tokens whose gradient is cut to 0 "
    "(grpo, dr_grpo, dapo, dppo; for gspo all tokens of an episode whose mean ratio left its range, which is hundreds "
    "of times narrower); for cispo tokens whose weight reached its bound, whose gradient goes on with that weight; for "
    "importance_sampling, which has no such rule, nothing. So it does not compare across losses.",
    "Variants are rows of this repository's table. dapo is DAPO's loss, advantage and aggregation, without its dynamic "
    "sampling (groups of equal rewards are not replaced) and without its shaping of overlong episodes. dr_grpo and "
    "dppo divide by the most tokens a game can sample; importance_sampling sums over tokens.",
)


def scale_notes(runs: Runs, settings: dict[str, Any] | None) -> list[str]:
    """What the scale of a loss does to its run: exact for Adam, and counted for clipping."""
    said = (
        "Adam divides a running mean of the gradient by the root of a running mean of its square, plus eps (1e-8). A "
        "factor on the loss that is the same in every batch therefore changes the step only as far as eps counts "
        "beside that root. A factor that differs from batch to batch does change it: where the loss is a sum over "
        "tokens (token_sum), a batch with more of them weighs more in both running means."
    )
    if settings is None:
        return [said]
    limit, cut = float(settings["max_grad_norm"]), []
    for variant in variants_of(runs):
        steps = [s for (v, _), cell in runs.items() if v == variant for run in cell.ended.values() for s in run.steps]
        norms = [s["optim/grad_norm"] for s in steps if "optim/grad_norm" in s]
        if above := sum(norm > limit for norm in norms):
            cut.append(f"{variant}: {above} of {len(norms)} updates")
    reached = f"which happened in {', '.join(cut)}" if cut else "which never happened here"
    return [said, f"A gradient is clipped where its norm is above {limit:g}, {reached}."]


def write_study(folder: Path) -> Path:
    """Write the report of the runs in `folder`; returns the page's path. Errors: those of `read_runs`, OSError."""
    runs = read_runs(folder)
    table = rows(runs)
    write_figure(folder / "study.png", runs)
    write_atomic(folder / "table.md", markdown(table, baseline_of(runs), games_of(runs)) + "\n")
    write_atomic(folder / "table.json", json.dumps(as_json(table), indent=1) + "\n")
    settings = folder / "study.json"
    page = study_page(
        folder.resolve().name,
        runs,
        table,
        figure=(folder / "study.png").read_bytes(),
        settings=json.loads(settings.read_text()) if settings.exists() else None,
    )
    write_atomic(folder / "study.html", page)
    return folder / "study.html"


def _diverged(runs: Runs) -> list[str]:
    return [
        f"{Combination(variant, gap, seed).name}: in step {run.diverged}"
        for (variant, gap), cell in runs.items()
        for seed, run in cell.ended.items()
        if run.diverged is not None
    ]


def study_page(name: str, runs: Runs, table: Sequence[Row], *, figure: bytes, settings: dict[str, Any] | None) -> str:
    """The page as HTML."""
    image = f'<img alt="curves" src="data:image/png;base64,{base64.b64encode(figure).decode()}">'
    outcome = "".join(f"<p class='outcome'>{escape(said)}</p>" for said in outcomes(runs, table))
    diverged = _diverged(runs)
    sections = (
        f"<header><h1>{escape(name)}</h1>{outcome}{_tiles(runs)}</header>",
        _section("Curves", f"<figure>{image}</figure>"),
        _section("Table", _table(runs, table)),
        _section("Runs that diverged", _list(diverged) if diverged else ""),
        _section("How to read this", _list([*NOTES, *scale_notes(runs, settings)])),
        _section("Where the time went", _time(runs)),
        _section("Settings", _settings(settings)),
    )
    return _PAGE.format(title=f"{escape(name)} · jaxrl", css=CSS, body="\n".join(filter(None, sections)))


def outcomes(runs: Runs, table: Sequence[Row]) -> list[str]:
    """What the differences to the baseline support at each gap, in a sentence: no more than that."""
    over = baseline_of(runs)
    said = []
    for gap in gaps_of(runs):
        place = f"{str(gap)[0].upper()}{str(gap)[1:]}"
        here = [row for row in table if row.gap == gap]
        base = next((row.cells[0] for row in here if row.variant == over and row.ended), None)
        if base is None:
            said.append(f"{place}: no run of {over} came to its end yet, so there is nothing to compare with.")
            continue
        pairs = [(row.variant, row.difference) for row in here if row.difference is not None]
        resolved = sorted(((d.estimate, v) for v, d in pairs if d.resolved), key=lambda p: -p[0].mean)
        text = f"{place}: {over} ends at a held-out reward of {number(base, 3, interval=True)}"
        text += "".join(f"; {v} {number(e, 3, interval=True, sign='+')} against it" for e, v in resolved)
        if others := [v for v, d in pairs if not d.resolved]:
            text += f"; no difference to it is resolved for {', '.join(others)}"
        if single := [v for v, d in pairs if d.estimate.count < 2]:
            text += f" (one seed says nothing of {', '.join(single)})"
        said.append(f"{text}.")
    return said


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _tiles(runs: Runs) -> str:
    ended, asked = ended_of(runs), sum(cell.asked for cell in runs.values())
    seconds = sum(s.get("time/total", 0.0) for run in ended for s in run.steps)
    tiles = (
        ("runs", f"{len(ended)} of {asked}"),
        ("variants", str(len(variants_of(runs)))),
        ("gaps", str(len(gaps_of(runs)))),
        ("seeds", str(len({seed for cell in runs.values() for seed in cell.ended}))),
        ("steps a run", str(max((int(s["step"]) + 1 for run in ended for s in run.steps[-1:]), default=0))),
        ("in all", f"{seconds / 60:.0f} min"),
    )
    return '<div class="tiles">' + "".join(f"<div><b>{escape(v)}</b>{escape(k)}</div>" for k, v in tiles) + "</div>"


def _table(runs: Runs, table: Sequence[Row]) -> str:
    titles = heads(baseline_of(runs))
    lines = []
    for gap in gaps_of(runs):
        lines.append(f"<tr><th colspan='{len(titles) + 1}'>{escape(str(gap))}</th></tr>")
        for row in (r for r in table if r.gap == gap):
            cells = "".join(f"<td>{_cell(text)}</td>" for text in texts(row))
            lines.append(f"<tr><td>{escape(row.variant)}</td>{cells}</tr>")
    heading = "".join(f"<th>{escape(title)}</th>" for title in titles)
    notes = escape("; ".join(f"{c.title}: {c.note}" for c in COLUMNS))
    said = (f"Means over seeds. {errors(games_of(runs))}", tests(baseline_of(runs)), f"{notes}.")
    return f"<table><tr><th>variant</th>{heading}</tr>{''.join(lines)}</table>" + "".join(
        f"<p class='quiet'>{text}</p>" for text in said
    )


def _cell(text: str) -> str:
    bold = text.removeprefix("**").removesuffix("**")
    return escape(text) if bold == text else f"<b>{escape(bold)}</b>"


def _time(runs: Runs) -> str:
    """Wall time over steps, a chart a gap."""
    charts, steps = [], grid_of(runs, "time/total")
    for gap in gaps_of(runs):
        cells = {v: runs[v, gap] for v in variants_of(runs) if (v, gap) in runs}
        chosen = {v: curve(cell, "time/total", steps) for v, cell in cells.items()}
        series = [Series(v, c.xs, [e.mean for e in c.estimates]) for v, c in chosen.items() if c.xs]
        caption = f"<b>{escape(str(gap))}</b> <span class='quiet'>Seconds a step, evaluations included.</span>"
        charts.append(f"<figure><figcaption>{caption}</figcaption>{line_chart(series, zero=True)}</figure>")
    return f'<div class="charts">{"".join(charts)}</div>'


def _settings(settings: dict[str, Any] | None) -> str:
    if settings is None:
        return ""
    text = escape(json.dumps(settings, indent=2))
    return f"<details><summary>study.json</summary><pre>{text}</pre></details>"
