"""The recipe of textarena: what its groups are, what it refuses with and without the package, and two steps of it."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from envs import games
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import EnvGroupBuilder
from jaxrl.runtime.log import read_metrics
from jaxrl.train import main, parse
from recipes.text_arena import DEFAULTS, RandomPlayer, TextArena, check_goes_together

RENDERER = renderer_for(byte_tokenizer())
installed = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="needs textarena: pip install 'jaxrl[textarena]'"
)

SMALL = """
    warm_start.steps=3 warm_start.batch_size=4 dataset_builder.batch_size=4 dataset_builder.group_size=2
    dataset_builder.test_games=2 engine.slots=16 engine.row_buckets=16 packing.rows=4 max_steps=2 eval_every=0
"""


def groups(builder: TextArena) -> list[EnvGroupBuilder]:
    train, _ = trio.run(builder, RENDERER)
    return [group for i in range(len(train)) for group in train.get_batch(i)]


def test_the_defaults_hold_together() -> None:
    config = parse([], **DEFAULTS)
    check_goes_together(config)
    assert config.packing is not None
    assert max(config.packing.widths) >= config.engine.context - 1
    assert config.max_turns is not None
    assert config.max_turns >= 2 * 5, "five moves, and as many that were corrected"


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        (["dataset_builder.game=TwentyQuestions-v0"], "wants that service's key"),
        (["dataset_builder.game=chess"], "expected a variant of Alquerque"),
        (["dataset_builder.opponent=past"], "name the policies that play"),
        (["dataset_builder.past=a"], "name the policies that play"),
        (["dataset_builder.game=Nim-v0"], r"warm_start\.demonstrator\.game=TicTacToe-v0.*set both alike"),
        (["dataset_builder.squeeze=False"], r"warm_start\.demonstrator\.squeeze=True.*set both alike"),
        (["loss_fn_config.advantage=mean"], "the two seats of one game.*moving_baseline"),
        (["dataset_builder.opponent=random"], "several attempts from one seat.*advantage=mean"),
        (
            ["dataset_builder.opponent=past", "dataset_builder.past=a,current", "loss_fn_config.advantage=mean"],
            r"past names a, which frozen_policies does not: give frozen_policies\.a=",
        ),
    ],
)
def test_I12_what_does_not_go_together_is_refused(arguments: list[str], teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        check_goes_together(parse(arguments, **DEFAULTS))


@pytest.mark.skipif(importlib.util.find_spec("textarena") is not None, reason="textarena is installed")
def test_without_the_package_the_extra_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxrl\[textarena\]'"):
        groups(TextArena())


@pytest.mark.full
@installed
def test_I14_in_self_play_a_group_is_one_game_and_against_somebody_else_one_seat_of_one() -> None:
    tables = groups(TextArena(batch_size=3, steps=2))
    assert len(tables) == 6
    assert all(isinstance(group, games.TableGroupBuilder) and group.coupled for group in tables)
    duels = groups(TextArena(opponent="random", batch_size=4, steps=2, group_size=3, starts=2))
    assert all(isinstance(group, games.DuelGroupBuilder) and not group.coupled for group in duels)
    assert len(trio.run(duels[0].make_envs)) == 3
    pool = groups(TextArena(opponent="past", past=("a", "current"), batch_size=4, steps=1))
    assert [group.logging_tags()[0] for group in pool] == ["a", "current"] * 2


@pytest.mark.full
@installed
def test_held_out_games_are_the_same_every_time() -> None:
    made = [trio.run(TextArena(batch_size=size, test_games=4), RENDERER)[1] for size in (2, 5)]
    held_out = [[vars(group)["task"] for group in test.get_batch(0)] for test in made if test]
    assert len(held_out) == 2
    assert held_out[0] == held_out[1]


@pytest.mark.full
@installed
def test_a_game_nobody_plays_at_random_has_no_random_games() -> None:
    for data in (TextArena(game="Tak-v0"), TextArena(game="Tak-v0", opponent="random", test_games=0)):
        with pytest.raises(ValueError, match=r"lists no moves.*against self or past.*test_games=0"):
            trio.run(data, RENDERER)
    assert groups(TextArena(game="Tak-v0", test_games=0, batch_size=2, steps=1))


@pytest.mark.full
@installed
def test_the_random_player_knows_the_form() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        shown = RandomPlayer().play(rng).messages
        assert [m.role for m in shown] == ["user", "assistant"] * (len(shown) // 2)
        assert all(m.content in "012345678" for m in shown[1::2])
        assert "Available" not in shown[0].content


@pytest.mark.full
@installed
@pytest.mark.slow
def test_two_steps_against_a_random_player(tmp_path: Path) -> None:
    against = ["dataset_builder.opponent=random", "loss_fn_config.advantage=mean"]
    config: Any = parse([*SMALL.split(), *against, f"log_path={tmp_path / 'run'}"], **DEFAULTS)
    check_goes_together(config)
    steps = read_metrics(main(config) / "metrics.jsonl")
    assert [m["step"] for m in steps] == [0, 1]
    assert 0 <= steps[0]["test/env/random/success"] <= 1
