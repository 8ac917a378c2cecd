"""Every recipe of the README, from its command line: two steps of the tiny model, from the warm start to the report.

The defaults are a recipe's own but for the size of a batch: sixteen episodes, and a warm start of two steps. They run
in this process, as `python -m` would run them, to import JAX once and to compile quickly.
"""

import contextlib
import functools
import io
import math
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandboxes import missing

from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.runtime.log import read_metrics
from recipes.shorter_answers import outcome

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPES = re.findall(r"^\|.*\| `recipes\.(\w+)` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
SHORT = """max_steps=2 warm_start.steps=2 warm_start.batch_size=4 dataset_builder.batch_size=4
    dataset_builder.group_size=4 engine.slots=16 engine.row_buckets=16"""
NAMES = {
    "env/all/reward/total",
    "env/all/turns_per_episode",
    "rollout/terminated_ratio",
    "data/datums_per_episode",
    "engine/decode_tokens",
    "time/total",
}
"""Some of what every step reports."""

ARGUMENTS = {
    "guess_number": "dataset_builder.test_games=16",
    "math_rl": "dataset_builder.test_problems=16",
    "shorter_answers": "dataset_builder.test_prompts=16",
    "text_arena": "dataset_builder.test_games=8",
    "tictactoe_selfplay": "dataset_builder.test_games=8",
    "twenty_questions": "dataset_builder.test_games=16",
    # its defaults are for SmolLM2, whose tokens are longer than bytes
    "tool_use": """model_name=tiny max_tokens=8 engine.context=1024 engine.prompt_context=1024
        engine.extend_lengths=256 engine.position_buckets=1024 packing.widths=1024 packing.rows=2 engine.slots=4
        engine.row_buckets=2 dataset_builder.batch_size=2 dataset_builder.group_size=2 dataset_builder.test_tasks=4""",
    "search_qa": """dataset_builder.test_count=16 dataset_builder.cache={tmp}/index
        warm_start.demonstrator.cache={tmp}/index""",
    "terminal_rl": "dataset_builder.own_tasks={tmp}/tasks warm_start.demonstrator.own_tasks={tmp}/tasks",
}
"""What a recipe needs besides, where it may write, and held-out tasks for one batch of the engine."""

OF_ITS_OWN: dict[str, set[str]] = {
    "math_rl": {"env/all/format", "env/all/correct", "time/train", "test/env/all/correct"},
    "shorter_answers": {"env/all/win_rate", "env/all/answer_characters", "test/env/all/win_rate"},
    "tool_use": {"rollout/stop/max_tokens", "time/train"},
}
"""What the first step of a recipe reports besides."""

Finished = Callable[[str], tuple[Path, str]]


def run_recipe(recipe: str, tmp: Path, *arguments: str) -> tuple[Path, str]:
    """(run directory, what it printed) of `python -m recipes.<recipe> <arguments>`, shortened to two steps."""
    run = tmp / "run"
    needed = ARGUMENTS.get(recipe, "").format(tmp=tmp).split()
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["", f"log_path={run}", *SHORT.split(), *needed, *arguments])
        patch.delitem(sys.modules, f"recipes.{recipe}", raising=False)  # imported by a test, it would be there twice
        runpy.run_module(f"recipes.{recipe}", run_name="__main__", alter_sys=True)
    return run, said.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A recipe's finished run, made once."""
    return functools.cache(lambda recipe: run_recipe(recipe, tmp_path_factory.mktemp(recipe)))


def runnable(recipe: str) -> Any:
    """The recipe as a parameter; textarena is only where the references are."""
    return pytest.param(recipe, marks=pytest.mark.full) if recipe == "text_arena" else recipe


def skip_where_it_cannot_run(recipe: str) -> None:
    if recipe == "terminal_rl" and (why := missing()):
        pytest.skip(why)
    if recipe == "text_arena":
        pytest.importorskip("textarena", reason="needs textarena: pip install 'jaxrl[textarena]'")


@pytest.mark.parametrize("recipe", [runnable(recipe) for recipe in RECIPES])
def test_two_steps_from_the_line_in_the_readme(recipe: str, finished: Finished) -> None:
    skip_where_it_cannot_run(recipe)
    run, _ = finished(recipe)
    steps = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in steps] == [0, 1]
    for metrics in steps:
        assert set(metrics) >= NAMES
    assert all("test/env/all/reward/total" in metrics for metrics in (steps[0], steps[-1]))
    assert set(steps[0]) >= OF_ITS_OWN.get(recipe, set())
    assert (run / "report.html").stat().st_size > 10_000
    assert (run / "curve.png").stat().st_size > 1_000
    assert list((run / "checkpoints").iterdir())


@pytest.mark.parametrize("recipe", [runnable("tictactoe_selfplay"), runnable("text_arena")])
def test_what_one_seat_wins_in_self_play_the_other_loses(recipe: str, finished: Finished) -> None:
    skip_where_it_cannot_run(recipe)
    run, _ = finished(recipe)
    first = read_metrics(run / "metrics.jsonl")[0]
    assert first["env/all/reward/total"] == pytest.approx(0.0)
    assert 0 <= first["test/env/random/success"] <= 1


def test_nobody_beats_the_perfect_player(finished: Finished) -> None:
    run, _ = finished("tictactoe_selfplay")
    first, last = read_metrics(run / "metrics.jsonl")
    for name in ("env/tic_tac_toe/success", "test/env/perfect/success"):
        assert 0 <= first[name] <= 1
    assert last["test/env/perfect/win"] == 0.0


def test_what_came_of_self_play_plays_against_its_past(finished: Finished, tmp_path: Path) -> None:
    past, _ = finished("tictactoe_selfplay")
    against = ("dataset_builder.opponent=past", "dataset_builder.past=one,current", f"frozen_policies.one={past}")
    run, _ = run_recipe("tictactoe_selfplay", tmp_path, *against, "loss_fn_config.advantage=mean")
    assert {"env/one/success", "env/current/success"} <= set(read_metrics(run / "metrics.jsonl")[0])


def test_shorter_answers_says_how_it_went(finished: Finished) -> None:
    run, said = finished("shorter_answers")
    found = outcome(run, renderer_for(byte_tokenizer()))
    assert 0.0 <= found.win_rate <= 1.0
    assert all(math.isnan(length) or length > 0 for length in found.length)
    assert "of the comparisons with those before" in said
