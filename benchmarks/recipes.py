"""What a model learns in each recipe: one run, as data, as a picture and as a table.

    python -m benchmarks.recipes [recipe ...]        default: all of them; writes benchmarks/recipes/

Each is the README's own command in a process of its own, on the tiny model, but for search_qa, which has SmolLM2
(`python tests/fetch_real.py` fetches it) because the tiny one cannot copy a name. Kept are its metrics; of them the
curve of the number in the table is drawn. The table in benchmarks/recipes/README.md has a row for every recipe that was
ever run, with the date and the time it took.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import here_and_now
from jaxrl.runtime.curve import write_curve
from jaxrl.runtime.log import points

OUT = Path(__file__).parent / "recipes"

MEASURES = {
    "math_rl": "test/env/all/correct",
    "search_qa": "test/env/all/correct",
    "shorter_answers": "test/env/all/reward/total",
    "terminal_rl": "test/env/all/reward/total",
    "text_arena": "test/env/all/success",
    "tictactoe_selfplay": "test/env/random/success",
    "twenty_questions": "test/env/all/success",
}
"""The evaluated number of each recipe."""

SMOLLM2 = ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ARGUMENTS = {
    "search_qa": f"""model_name={SMOLLM2} warm_start.steps=6 warm_start.batch_size=4 warm_start.learning_rate=2e-4
        max_steps=15 eval_every=5 learning_rate=3e-4 lora.alpha=32 max_tokens=48 engine.context=192
        engine.position_buckets=192 engine.extend_lengths=64 packing.widths=192""",
    "terminal_rl": "dataset_builder.test_tasks=24",
    "text_arena": "dataset_builder.test_games=128",
    "tictactoe_selfplay": "dataset_builder.test_games=128",
}
"""What differs from a recipe's defaults."""

HEAD = """# What a model learns in each recipe

    python -m benchmarks.recipes [recipe ...]

One run of each recipe's defaults with the tiny model, one seed. Held-out tasks, the same ones and sampled alike every
time; RL begins where the warm start ends.

- math_rl learns by heart: its tasks are sums of the training. Sums that were never shown stay wrong (0.21 before, 0.17
  after a run with a longer warm start).
- search_qa is SmolLM2-135M-Instruct, asked about countries of which it saw none in training; the tiny model cannot copy
  a name. Its warm start is 24 demonstrations, six in ten of which search for the wrong thing; the machine had other
  work. The command is in `ARGUMENTS` of benchmarks/recipes.py.
- tictactoe_selfplay and text_arena train against themselves; what is measured is games against a player at random,
  which training never meets, from both seats, a draw counting half. The games are more than the recipes' default
  (`ARGUMENTS`), and so are terminal_rl's tasks, so that a rise can be told from luck.

| recipe | measure | tasks | before RL | later | steps | minutes | cores | date |
|---|---|---|---|---|---|---|---|---|
"""


def run(recipe: str) -> None:
    """Train, and keep the metrics, the curve and what the table says."""
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch) / "run"
        began = time.monotonic()
        command = [sys.executable, "-m", f"recipes.{recipe}", *ARGUMENTS.get(recipe, "").split(), f"log_path={where}"]
        subprocess.run(command, check=True)
        minutes = (time.monotonic() - began) / 60
        shutil.copyfile(where / "metrics.jsonl", OUT / f"{recipe}.jsonl")
    kept = {"minutes": round(minutes, 1)} | here_and_now()
    (OUT / f"{recipe}.json").write_text(json.dumps(kept) + "\n")


def read(recipe: str) -> list[dict[str, float]]:
    """The steps that were kept."""
    return [json.loads(line) for line in (OUT / f"{recipe}.jsonl").read_text().splitlines()]


def tag_and_measure(recipe: str) -> tuple[str, str]:
    """Of which held-out episodes, and what of them."""
    tag, measure = MEASURES[recipe].removeprefix("test/env/").split("/", 1)
    return tag, measure


def draw(recipe: str) -> None:
    """The curve of what was kept: the number in the table, and the training reward where it can change."""
    steps, (tag, measure) = read(recipe), tag_and_measure(recipe)
    train = points(steps, "env/all/reward/total")
    against = "" if tag == "all" else f" against {tag}"
    write_curve(
        OUT / f"{recipe}.png",
        title=recipe,
        train=((), ()) if len({round(value, 6) for value in train[1]}) == 1 else train,  # 0 in self-play
        held_out=points(steps, MEASURES[recipe]),
        held_out_label=f"held-out {measure.removesuffix('/total')}{against}",
    )


def row(recipe: str) -> str:
    """One line of the table, from what was kept."""
    steps, (tag, measure) = read(recipe), tag_and_measure(recipe)
    kept = json.loads((OUT / f"{recipe}.json").read_text())
    _, seen = points(steps, MEASURES[recipe])
    tasks = steps[0][f"test/env/{tag}/total_episodes"]
    later = ", ".join(f"{value:.3f}" for value in seen[1:])
    return (
        f"| [{recipe}]({recipe}.png) | {measure} | {tasks:.0f} | {seen[0]:.3f} | {later} | {len(steps)} | "
        f"{kept['minutes']} | {kept['cores']} | {kept['date']} |"
    )


def main(recipes: list[str]) -> None:
    """Run these and write the table of all that were ever run."""
    unknown = sorted(set(recipes) - set(MEASURES))
    if unknown:
        raise SystemExit(f"no such recipe: {', '.join(unknown)}; expected some of {', '.join(MEASURES)}")
    OUT.mkdir(exist_ok=True)
    for recipe in recipes or MEASURES:
        run(recipe)
        write()


def write() -> None:
    """The curves and the table of all that was kept."""
    kept = [each for each in MEASURES if (OUT / f"{each}.json").is_file()]
    for recipe in kept:
        draw(recipe)
    (OUT / "README.md").write_text(HEAD + "\n".join(map(row, kept)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
