"""The report of a study: study.html, study.png, table.md and table.json, made anew from whatever runs are there.

One page that needs nothing else: no script, no font, no network; the figure is in it. Knows results as text and HTML;
must not know how a run is made.
"""

import base64
import json
import math
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
    as_json,
    cell,
    curve,
    gaps_of,
    markdown,
    read_runs,
    rows,
    variants_of,
)

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
    f"Bands and ± are {BAND}. With three seeds a t-interval is wide: 2.5 standard deviations to either side.",
    "All runs start from the same model and play the same games in the same order; a seed is that of the adapter's "
    "first values and of sampling. What differs between two runs is the variant, the seed and the gap.",
    "A sampler k steps behind draws every token with the weights of k optimizer steps ago (fewer at the start), by "
    "setting, not by the machine's timing. Held-out games are played by the newest weights, without noise.",
    "The learning rate is the one in the table. Adam divides a gradient by its own running size, so how an aggregation "
    "scales the loss (a sum over tokens against a mean) changes nothing except through clipping by global norm: the "
    "norm at which that begins is high here, and the size of the raw gradient is in the table.",
    "Sampler-trainer KL is estimated on the sampled tokens before the update (v1: mean of log q - log p); without a "
    "gap it is rounding. The clip fraction is of tokens whose gradient a trust region cut: 0 for losses without one.",
)


def write_study(folder: Path) -> Path:
    """Write the report of the runs in `folder`; returns the page's path. Errors: those of `read_runs`, OSError."""
    runs = read_runs(folder)
    table = rows(runs)
    write_figure(folder / "study.png", runs)
    write_atomic(folder / "table.md", markdown(table) + "\n")
    write_atomic(folder / "table.json", json.dumps(as_json(table), indent=1) + "\n")
    settings = folder / "study.json"
    page = study_page(
        folder.resolve().name,
        runs,
        table,
        figure=(folder / "study.png").read_bytes(),
        settings=json.loads(settings.read_text()) if settings.exists() else None,
        diverged=_diverged(folder),
    )
    write_atomic(folder / "study.html", page)
    return folder / "study.html"


def _diverged(folder: Path) -> list[str]:
    notes = sorted(folder.glob("*/diverged.json"))
    return [f"{note.parent.name}: {json.loads(note.read_text())['diverged']}" for note in notes]


def study_page(
    name: str,
    runs: Runs,
    table: Sequence[Row],
    *,
    figure: bytes,
    settings: dict[str, Any] | None,
    diverged: Sequence[str],
) -> str:
    """The page as HTML."""
    image = f'<img alt="curves" src="data:image/png;base64,{base64.b64encode(figure).decode()}">'
    outcome = "".join(f"<p class='outcome'>{escape(said)}</p>" for said in outcomes(table))
    sections = (
        f"<header><h1>{escape(name)}</h1>{outcome}{_tiles(runs)}</header>",
        _section("Curves", f"<figure>{image}</figure>"),
        _section("Table", _table(table)),
        _section("Where the time went", _time(runs)),
        _section("Runs that diverged", _list(diverged) if diverged else ""),
        _section("How to read this", _list(NOTES)),
        _section("Settings", _settings(settings)),
    )
    return _PAGE.format(title=f"{escape(name)} · jaxrl", css=CSS, body="\n".join(filter(None, sections)))


def outcomes(table: Sequence[Row]) -> list[str]:
    """Who is ahead at each gap, in a sentence."""
    said = []
    for gap in dict.fromkeys(row.gap for row in table):
        ranked = sorted(
            (row for row in table if row.gap == gap and not math.isnan(row.cells[0].mean)),
            key=lambda row: -row.cells[0].mean,
        )
        if not ranked:
            continue
        first, last = ranked[0], ranked[-1]
        text = (
            f"{str(gap)[0].upper()}{str(gap)[1:]}: {first.variant} ends at {first.cells[0].mean:.1%} of held-out games"
        )
        if last is not first:
            text += f", {last.variant} at {last.cells[0].mean:.1%}"
        said.append(f"{text}.")
    return said


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _tiles(runs: Runs) -> str:
    made = [steps for seeds in runs.values() for steps in seeds.values()]
    seconds = sum(s.get("time/total", 0.0) for steps in made for s in steps)
    tiles = (
        ("runs", str(len(made))),
        ("variants", str(len(variants_of(runs)))),
        ("gaps", str(len(gaps_of(runs)))),
        ("seeds", str(len({seed for seeds in runs.values() for seed in seeds}))),
        ("steps a run", str(max(int(steps[-1]["step"]) + 1 for steps in made))),
        ("in all", f"{seconds / 60:.0f} min"),
    )
    return '<div class="tiles">' + "".join(f"<div><b>{escape(v)}</b>{escape(k)}</div>" for k, v in tiles) + "</div>"


def _table(table: Sequence[Row]) -> str:
    heads = "".join(f"<th title='{escape(c.note)}'>{escape(c.title)}</th>" for c in COLUMNS)
    lines = []
    for gap in dict.fromkeys(row.gap for row in table):
        lines.append(f"<tr><th colspan='{len(COLUMNS) + 2}'>{escape(str(gap))}</th></tr>")
        for row in (r for r in table if r.gap == gap):
            cells = "".join(
                f"<td>{escape(cell(v, c, interval=i == 0))}</td>"
                for i, (v, c) in enumerate(zip(row.cells, COLUMNS, strict=True))
            )
            lines.append(f"<tr><td>{escape(row.variant)}</td>{cells}<td>{row.seeds}</td></tr>")
    notes = escape("; ".join(f"{c.title}: {c.note}" for c in COLUMNS))
    return (
        f"<table><tr><th>variant</th>{heads}<th>seeds</th></tr>{''.join(lines)}</table>"
        f"<p class='quiet'>Means over seeds. {notes}.</p>"
    )


def _time(runs: Runs) -> str:
    """Wall time over steps, a chart a gap."""
    charts = []
    for gap in gaps_of(runs):
        chosen = {v: curve(runs[v, gap], "time/total") for v in variants_of(runs) if (v, gap) in runs}
        series = [Series(v, c.xs, [e.mean for e in c.estimates]) for v, c in chosen.items()]
        caption = f"<b>{escape(str(gap))}</b> <span class='quiet'>Seconds a step, evaluations included.</span>"
        charts.append(f"<figure><figcaption>{caption}</figcaption>{line_chart(series, zero=True)}</figure>")
    return f'<div class="charts">{"".join(charts)}</div>'


def _settings(settings: dict[str, Any] | None) -> str:
    if settings is None:
        return ""
    text = escape(json.dumps(settings, indent=2))
    return f"<details><summary>study.json</summary><pre>{text}</pre></details>"
