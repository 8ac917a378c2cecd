"""The tool-use recipe, end to end with the tiny model: it runs, it names its metrics, it says what it is missing."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envs import tool_use
from jaxrl.train import main, parse
from recipes.tool_use import DEFAULTS, ScriptedPlayer, ToolUse, check_model_is_named

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

SMALL = [
    "model_name=tiny",
    "max_steps=2",
    "max_tokens=8",
    "dataset_builder.test_tasks=2",
    "dataset_builder.group_size=2",
    "warm_start.steps=1",
    "warm_start.batch_size=2",
    "engine.slots=4",
    "engine.context=1024",
    "engine.prompt_context=1024",
    "engine.extend_lengths=256",
    "engine.position_buckets=1024",
    "packing.widths=1024",
]


def test_two_steps_of_the_tiny_model_write_two_lines_of_metrics(tmp_path: Path) -> None:
    run = main(parse([*SMALL, f"log_path={tmp_path / 'run'}"], **DEFAULTS))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert {"env/all/reward/total", "rollout/stop/max_tokens", "time/train"} <= set(lines[0])
    assert "test/env/all/reward/total" in lines[0]
    assert "test/env/all/reward/total" in lines[1]
    assert (run / "report.html").is_file()


def test_without_a_model_the_error_says_where_to_get_one() -> None:
    command = [sys.executable, "-m", "recipes.tool_use", "max_steps=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "model_name" in done.stderr
    assert "fetch_real.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_named_model_and_a_call_for_help_pass() -> None:
    check_model_is_named(["max_steps=1", "model_name=tiny"])
    check_model_is_named(["--help"])
    with pytest.raises(ValueError, match="model_name is not set"):
        check_model_is_named(["dataset_builder.seed=1"])


def test_the_prompt_shows_only_the_tools_that_are_offered() -> None:
    (task,) = tool_use.tasks("train", 1, levels=(1,))
    assert [spec.name for spec in tool_use.make_env(task, tools=ToolUse().tools).tool_specs] == ["lookup"]
    with pytest.raises(ValueError, match="expected one or more of"):
        tool_use.make_env(task, tools=("look",))


def test_the_scripted_player_shows_what_the_recipe_offers() -> None:
    shown = ScriptedPlayer().play(np.random.default_rng(0))
    _, question, call, reply, answer = shown.messages
    assert [spec.name for spec in shown.tools] == list(ToolUse().tools)
    assert json.loads(call.tool_calls[0].arguments)["key"] in question.content
    assert answer.content == f"Answer: {reply.content}"
    assert shown == ScriptedPlayer().play(np.random.default_rng(0))
