"""The self-play recipe: what its groups are, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import trio

from envs import games
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import EnvGroupBuilder
from jaxrl.train import parse
from recipes.tictactoe_selfplay import DEFAULTS, Games, PoorPlayer, check_goes_together

RENDERER = renderer_for(byte_tokenizer())


def groups(builder: Games) -> list[EnvGroupBuilder]:
    train, _ = trio.run(builder, RENDERER)
    return [group for i in range(len(train)) for group in train.get_batch(i)]


def test_the_defaults_hold_together() -> None:
    config = parse([], **DEFAULTS)
    check_goes_together(config)
    assert config.packing is not None
    assert max(config.packing.widths) >= config.engine.context - 1
    assert config.max_turns is not None
    assert config.max_turns >= 2 * 5, "five moves, and as many that were corrected"
    assert config.loss_fn_config == {"advantage": "moving_baseline", "entropy": "fixed", "entropy_coef": 0.02}


def test_I14_in_self_play_a_group_is_one_game_and_its_members_are_the_seats() -> None:
    made = groups(Games(batch_size=3, steps=2, test_games=4))
    assert len(made) == 6
    assert all(isinstance(group, games.TableGroupBuilder) and group.coupled for group in made)
    seats: Any = trio.run(made[0].make_envs)
    assert [env.player.seat for env in seats] == [0, 1]
    assert seats[0].player.match is seats[1].player.match


@pytest.mark.parametrize("opponent", ["random", "perfect"])
def test_I14_against_somebody_else_a_group_is_one_seat_of_one_game(opponent: Any) -> None:
    made = groups(Games(opponent=opponent, batch_size=4, steps=2, group_size=3))
    assert all(isinstance(group, games.DuelGroupBuilder) and not group.coupled for group in made)
    tasks = [group.task for group in made if isinstance(group, games.DuelGroupBuilder)]
    assert sorted(task.metadata["seat"] for task in tasks) == [0] * 4 + [1] * 4
    assert len({task.metadata["seed"] for task in tasks}) == 8
    assert len(trio.run(made[0].make_envs)) == 3
    assert {tuple(group.logging_tags()) for group in made} == {(opponent,)}


def test_a_pool_takes_turns_and_may_hold_the_policy_in_training() -> None:
    made = groups(Games(opponent="past", past=("a", "current", "b"), batch_size=3, steps=2))
    assert [group.logging_tags()[0] for group in made] == ["a", "current", "b"] * 2


def test_held_out_games_are_the_same_every_time_and_from_both_seats() -> None:
    (_, test), (_, again) = (trio.run(Games(batch_size=size, test_games=6), RENDERER) for size in (2, 5))
    assert test is not None
    assert again is not None
    held_out, same = list(test.get_batch(0)), list(again.get_batch(0))
    assert len(test) == 1
    assert [group.logging_tags()[0] for group in held_out] == ["random"] * 6 + ["perfect"] * 6
    for one, other in zip(held_out, same, strict=True):
        assert isinstance(one, games.DuelGroupBuilder)
        assert isinstance(other, games.DuelGroupBuilder)
        assert one.task == other.task
    seats = [group.task.metadata["seat"] for group in held_out if isinstance(group, games.DuelGroupBuilder)]
    assert seats.count(0) == seats.count(1) == 6


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        (["dataset_builder.game=chess"], "expected one of tic_tac_toe, connect_four, nim, kuhn_poker"),
        (["dataset_builder.opponent=past"], "name the policies that play"),
        (["dataset_builder.past=a"], "name the policies that play"),
        (["dataset_builder.error_rate=0.5"], "no effect on opponent=self"),
        (["dataset_builder.game=nim"], r"warm_start\.demonstrator\.game=tic_tac_toe.*set both alike"),
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


@pytest.mark.parametrize("game", games.GAMES)
def test_the_poor_player_knows_the_form_and_not_the_way(game: str) -> None:
    rng, rules = np.random.default_rng(0), games.GAMES[game]
    for _ in range(3 if game == "connect_four" else 20):
        shown = PoorPlayer(game=game).play(rng).messages
        assert [m.role for m in shown] == ["user", "assistant"] * (len(shown) // 2)
        assert shown
    player = games.mixed_player(games.perfect_player(rules), games.random_player(rules), PoorPlayer().error_rate)
    if game == "tic_tac_toe":
        worth = games.expected(rules, (player, games.perfect_player(rules)))[0]
        assert worth < -0.5, "there is something to learn"
