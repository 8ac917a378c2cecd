"""The recipe from the command line: interrupted in the middle of a rollout, and continued to its end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import trio

from envs.guess_number import read_guess
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.message_env import MessageEnvDataset
from jaxrl.train import main, parse
from recipes.guess_number import DEFAULTS, GuessNumber, PoorPlayer, check_goes_together

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = """
    warm_start.steps=2 warm_start.batch_size=4 dataset_builder.batch_size=2 dataset_builder.group_size=2
    dataset_builder.test_games=4 engine.slots=8 engine.context=128 engine.prompts=4 engine.members=4
    engine.row_buckets=8 engine.position_buckets=128 engine.extend_lengths=64 packing.widths=128 packing.rows=4
    max_turns=2 save_every=1 eval_every=0
"""


QUICK = """
import runpy, sys
sys.path.insert(0, "tests")
import compiling
compiling.compile_quickly()
runpy.run_module("recipes.guess_number", run_name="__main__", alter_sys=True)
"""
"""`python -m recipes.guess_number`, with a compiler in a hurry."""


def interrupted(run: Path, how: signal.Signals) -> None:
    """Start the recipe, send it a signal after its first checkpoint, and check how it ends."""
    command = [sys.executable, "-c", QUICK, *SMALL.split(), f"log_path={run}"]
    child = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 240
    while not list(run.glob("checkpoints/[0-9]*")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(how)
    said, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + how, errors
    assert said == ""
    last = errors.strip().splitlines()[-1]
    assert last.startswith("interrupted; behavior_if_log_dir_exists=resume goes on after step")
    assert "Traceback" not in errors
    assert not processes(group=child.pid), "a process outlived the run"


def test_I9_I10_ctrl_c_leaves_a_run_that_can_be_continued_and_no_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    interrupted(run, signal.SIGINT)
    done = max(int(p.name) for p in run.glob("checkpoints/[0-9]*"))
    config = parse(
        [*SMALL.split(), f"log_path={run}", f"max_steps={done + 1}", "behavior_if_log_dir_exists=resume"], **DEFAULTS
    )
    assert main(config) == run
    steps = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in steps] == list(range(done + 1))
    assert (run / "checkpoints" / str(done + 1)).is_dir()
    assert (run / "report.html").is_file()
    assert "test/env/all/reward/total" in steps[0]
    assert "test/env/all/reward/total" in steps[-1]


def test_I9_sigterm_ends_a_run_like_ctrl_c(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", signal.SIGTERM)


def processes(group: int) -> list[int]:
    """Processes of a process group that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_the_defaults_hold_together() -> None:
    config = parse([], **DEFAULTS)
    assert config.packing is not None
    assert max(config.packing.widths) >= config.engine.context - 1
    assert config.engine.members >= GuessNumber().group_size
    assert config.max_turns is None or config.max_turns >= GuessNumber().turns


def test_I14_a_group_plays_one_secret_and_held_out_games_are_the_same_every_time() -> None:
    renderer = renderer_for(byte_tokenizer())
    train, test = trio.run(GuessNumber(high=8, batch_size=3, group_size=2, steps=4, test_games=5), renderer)
    assert (len(train), len(train.get_batch(0))) == (4, 3)
    assert isinstance(test, MessageEnvDataset)
    assert (len(test), len(test.get_batch(0)), test.group_size) == (1, 5, 1)
    _, again = trio.run(GuessNumber(high=8, batch_size=9, group_size=3, steps=1, test_games=5), renderer)
    assert isinstance(again, MessageEnvDataset)
    assert again.tasks == test.tasks


def test_the_poor_player_knows_the_form_and_not_the_way() -> None:
    rng = np.random.default_rng(0)
    games = [PoorPlayer(high=8, turns=3).play(rng).messages for _ in range(50)]
    guesses = [m.content for game in games for m in game if m.role == "assistant"]
    assert all(read_guess(guess, 8) is not None for guess in guesses)
    lost = [game for game in games if sum(m.role == "assistant" for m in game) == 3]
    assert 10 < len(lost) < 50


def test_I12_a_warm_start_of_another_game_is_refused() -> None:
    config = parse(["dataset_builder.high=20"], **DEFAULTS)
    with pytest.raises(ValueError, match=r"dataset_builder\.high=20, but warm_start\.demonstrator\.high=15"):
        check_goes_together(config)
