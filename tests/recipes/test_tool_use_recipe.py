"""The tool-use recipe: what it shows, and what it says when it has no model."""

import json
import runpy
import sys

import numpy as np
import pytest

from envs import tool_use
from recipes.tool_use import ScriptedPlayer, ToolUse, check_model_is_named


@pytest.mark.filterwarnings("ignore:'recipes.tool_use' found in sys.modules")
def test_without_a_model_the_error_says_where_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["recipes/tool_use.py", "max_steps=1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recipes.tool_use", run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "model_name" in said
    assert "fetch_real.py" in said
    assert "Traceback" not in said


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
