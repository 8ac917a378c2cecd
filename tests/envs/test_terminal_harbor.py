"""The package `harbor` itself, on the same tasks: its trials give the reward that ours give, and fail where ours do.

It needs Python 3.12 or later, so a process of such a Python runs it (harbor_reference.py): this one, where harbor can
be imported, or the one that JAXRL_HARBOR_PYTHON names. Elsewhere these tests are skipped.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from sandboxes import missing
from task_directory import rewards, write_task

from envs.terminal import Attempt, GraderError, TrialOptions, attempt
from envs.terminal.bubblewrap import find_bwrap
from envs.terminal.generate import write_tasks
from envs.terminal.oracle import Player

pytestmark = pytest.mark.full

PLAYERS: dict[str, Player] = {"oracle": "oracle", "nop": "nothing"}


def interpreter() -> str | None:
    """A Python that has harbor."""
    here = sys.executable if importlib.util.find_spec("harbor") else None
    return os.environ.get("JAXRL_HARBOR_PYTHON", here)


def harbor_says(tasks: Sequence[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """What harbor's trials gave, by the name of the task and the agent."""
    python = interpreter()
    if python is None:
        pytest.skip("harbor is not installed: set JAXRL_HARBOR_PYTHON to a Python 3.12 or later that has it")
    if why := missing():
        pytest.skip(why)
    script = Path(__file__).with_name("harbor_reference.py")
    path = f"{Path(find_bwrap()).parent}:{os.environ['PATH']}"
    argv = [python, str(script), *map(str, tasks)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=600, env={**os.environ, "PATH": path})
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    return {(Path(each["task"]).name, each["agent"]): each for each in found}


def we_say(task: Path, agent: str) -> Attempt | None:
    """What our trial gives; None where its grader failed."""
    try:
        return trio.run(attempt, task, PLAYERS[agent], TrialOptions())
    except GraderError:
        return None


def test_our_own_tasks_give_harbor_the_same_rewards(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    theirs = harbor_says(tasks)
    assert len(theirs) == 2 * len(tasks) >= 48
    for task in tasks:
        for agent, whole in (("oracle", 1.0), ("nop", 0.0)):
            said, ours = theirs[task.name, agent], we_say(task, agent)
            assert ours is not None
            assert said["error"] is None, (task.name, agent, said)
            assert set(said["rewards"].values()) == {whole}, (task.name, agent, said)
            assert ours.reward == whole, (task.name, agent)


JSON_FIRST = rewards("0.25") + rewards('{"reward": 0.75}', "reward.json")
STEPS = "".join(f'[[steps]]\nname = "{name}"\n{more}' for name, more in {"a": "min_reward = 0.5\n", "b": ""}.items())


def steps(first: str, second: str, toml: str = STEPS) -> dict[str, str]:
    """A task of two steps that give these rewards."""
    tests = {f"steps/{name}/tests/test.sh": rewards(given) for name, given in (("a", first), ("b", second))}
    return {"toml": toml, **{f"steps/{name}/instruction.md": name for name in "ab"}, **tests}


CONTRACT: dict[str, dict[str, str]] = {
    "json-first": {"test": JSON_FIRST},
    "exit-code": {"test": rewards("0.5") + "exit 1\n"},
    "negative": {"test": rewards(" -2.5\n")},
    "several": {"test": rewards('{"a": 1, "b": 0.5}', "reward.json")},
    "missing": {"test": "#!/bin/bash\ntrue\n"},
    "empty": {"test": rewards("")},
    "nan": {"test": rewards("nan")},
    "words": {"test": rewards("yes")},
    "json-text": {"test": rewards('{"reward": "1"}', "reward.json")},
    "json-infinite": {"test": rewards('{"reward": 1e999}', "reward.json")},
    "json-broken": {"test": rewards("0.5") + rewards("{", "reward.json")},
    "mean": steps("1", "0.5"),
    "final": steps("1", "0.5", 'multi_step_reward_strategy = "final"\n' + STEPS),
    "short": steps("0.25", "1"),
}


def test_the_contract_of_rewards_is_harbors(tmp_path: Path) -> None:
    tasks = [write_task(tmp_path / name, **files) for name, files in CONTRACT.items()]
    theirs = harbor_says(tasks)
    for task in tasks:
        said, ours = theirs[task.name, "nop"], we_say(task, "nop")
        if said["rewards"] is None:
            assert said["error"] is not None
            assert ours is None, task.name
        else:
            assert ours is not None, task.name
            expected = said["rewards"].get("reward", sum(said["rewards"].values()) / len(said["rewards"]))
            assert ours.reward == pytest.approx(expected), task.name
    failed = {task.name for task in tasks if theirs[task.name, "nop"]["rewards"] is None}
    assert failed == {"missing", "empty", "nan", "words", "json-text", "json-infinite", "json-broken"}
