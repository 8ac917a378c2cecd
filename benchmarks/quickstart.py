"""Does RL lift the tiny model? The quickstart's learning curve for several seeds, as data and as a picture.

    python -m benchmarks.quickstart [seed ...]        default: 0 1 2; writes benchmarks/quickstart/

Each seed is the very run of `make quickstart` (recipes.guess_number with its defaults) in a process of its own. Kept
are its metrics, one file a seed; the table is printed and written to benchmarks/quickstart/README.md with the date
and the machine.
"""

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.machine import here_and_now
from jaxrl.runtime.log import points

OUT = Path(__file__).parent / "quickstart"
NAME = "test/env/all/success"


def run(seed: int) -> tuple[list[dict[str, float]], float]:
    """Train with this seed; return the steps' metrics and the seconds it took."""
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch) / "run"
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "recipes.guess_number", f"log_path={where}", f"seed={seed}"], check=True)
        took = time.monotonic() - began
        shutil.copyfile(where / "metrics.jsonl", OUT / f"seed_{seed}.jsonl")
        return read(OUT / f"seed_{seed}.jsonl"), took


def read(path: Path) -> list[dict[str, float]]:
    """The steps of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def held_out(steps: list[dict[str, float]]) -> list[tuple[float, float]]:
    """(steps trained, success)."""
    return list(zip(*points(steps, NAME), strict=True))


def draw(curves: dict[int, list[tuple[float, float]]]) -> None:
    """One line a seed and their mean, to curve.png."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=160)
    for (seed, curve), marker in zip(curves.items(), itertools.cycle("os^Dv")):
        look = {"color": "#7aa6c2", "linewidth": 1.2, "marker": marker, "markersize": 4}
        axes.plot(*zip(*curve, strict=True), **look, label=f"seed {seed}")
    mean = [
        (x, sum(c[i][1] for c in curves.values()) / len(curves)) for i, (x, _) in enumerate(next(iter(curves.values())))
    ]
    axes.plot(*zip(*mean, strict=True), color="#0b4f6c", linewidth=2.4, label=f"mean of {len(curves)} seeds")
    axes.set(xlabel="GRPO steps", ylabel="held-out games won", ylim=(0, 1.02), xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(OUT / "curve.png")


def table(curves: dict[int, list[tuple[float, float]]], seconds: dict[int, float]) -> str:
    """The result as Markdown."""
    rows = [f"| {s} | {c[0][1]:.3f} | {c[-1][1]:.3f} | {seconds[s]:.0f} |" for s, c in curves.items()]
    first = sum(c[0][1] for c in curves.values()) / len(curves)
    last = sum(c[-1][1] for c in curves.values()) / len(curves)
    where = here_and_now()
    return "\n".join(
        [
            "# The quickstart, several seeds",
            "",
            f"`python -m benchmarks.quickstart {' '.join(map(str, curves))}`, {where['date']}, {where['machine']},",
            f"{where['cores']} cores of {where['processor']}, Python {where['python']}.",
            "Success is the share of 128 held-out games won, sampled at temperature 1 before and after RL; seconds",
            "include the warm start and all compilation, and whatever else the machine was doing.",
            "",
            "| seed | before RL | after RL | seconds |",
            "| --- | --- | --- | --- |",
            *rows,
            f"| mean | {first:.3f} | {last:.3f} | {sum(seconds.values()) / len(seconds):.0f} |",
            "",
        ]
    )


def main(seeds: list[int]) -> None:
    """Run, keep, draw, tell."""
    OUT.mkdir(exist_ok=True)
    results = {seed: run(seed) for seed in seeds}
    curves = {seed: held_out(steps) for seed, (steps, _) in results.items()}
    draw(curves)
    text = table(curves, {seed: took for seed, (_, took) in results.items()})
    (OUT / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [0, 1, 2])
