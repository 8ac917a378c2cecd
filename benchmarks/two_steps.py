"""How long does a recipe take to its second step? Each as the README calls it, with max_steps=2, as a newcomer waits.

    python -m benchmarks.two_steps [recipe ...]        default: all of them; writes benchmarks/two_steps/

Everything between the command and its last line is counted: importing, building the model, the warm start, the
held-out evaluation before the first step and after the second, the report. The first time nothing is compiled yet; the
second time JAX's compilation cache (JAX_COMPILATION_CACHE_DIR) holds what the first one compiled. tool_use is missing:
it wants a pretrained model.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import here_and_now

OUT = Path(__file__).parent / "two_steps"
KEPT = OUT / "results.json"
RECIPES = (
    "guess_number",
    "math_rl",
    "search_qa",
    "shorter_answers",
    "terminal_rl",
    "text_arena",
    "tictactoe_selfplay",
    "twenty_questions",
)

HEAD = """# Two steps of each recipe

    python -m benchmarks.two_steps [recipe ...]

Seconds from the command to its end with max_steps=2 and a recipe's other defaults: warm start, two evaluations and
report included. "Cached" had what the first time compiled in JAX's compilation cache.

| recipe | nothing cached | cached | cores | processor | date |
|---|---|---|---|---|---|
"""


def seconds(recipe: str, cache: Path) -> float:
    """From the command to its end."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [sys.executable, "-m", f"recipes.{recipe}", "max_steps=2", f"log_path={scratch}/run"]
        began = time.monotonic()
        subprocess.run(command, check=True, env=environment)
        return time.monotonic() - began


def measure(recipe: str) -> dict[str, Any]:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (round(seconds(recipe, Path(cache))) for _ in range(2))
    return {"cold": cold, "cached": warm} | here_and_now()


def row(recipe: str, line: Mapping[str, Any]) -> str:
    """It as Markdown."""
    cells = [recipe, *(str(line[name]) for name in ("cold", "cached", "cores", "processor", "date"))]
    return f"| {' | '.join(cells)} |"


def main(recipes: list[str]) -> None:
    """Run these, and write the table of all that were ever run."""
    if unknown := sorted(set(recipes) - set(RECIPES)):
        raise SystemExit(f"no such recipe: {', '.join(unknown)}; expected some of {', '.join(RECIPES)}")
    OUT.mkdir(exist_ok=True)
    for recipe in recipes or RECIPES:
        write(read() | {recipe: measure(recipe)})


def read() -> dict[str, dict[str, Any]]:
    """Recipe -> what was kept of it."""
    return json.loads(KEPT.read_text()) if KEPT.is_file() else {}


def write(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep it, and the table of it."""
    KEPT.write_text(json.dumps(found, indent=1) + "\n")
    rows = [row(each, line) for each, line in sorted(found.items())]
    (OUT / "README.md").write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
