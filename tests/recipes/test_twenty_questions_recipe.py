"""The recipe of twenty questions: its games, who answers, and what it refuses."""

import pickle

import numpy as np
import pytest
import trio

from envs.twenty_questions import THINGS, ModelAnswerer, thing_guessed
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.chat.transcript import begin
from jaxrl.runtime.message_env import MessageEnvDataset
from jaxrl.train import parse
from recipes.twenty_questions import DEFAULTS, PoorPlayer, TwentyQuestions, check_goes_together, chosen_things

RENDERER = renderer_for(byte_tokenizer())


def test_the_defaults_hold_together() -> None:
    config = parse([], **DEFAULTS)
    check_goes_together(config)
    data = config.dataset_builder
    assert isinstance(data, TwentyQuestions)
    assert config.packing is not None
    assert max(config.packing.widths) >= config.engine.context - 1
    assert config.max_turns == data.turns
    rng = np.random.default_rng(0)
    played = [PoorPlayer().play(rng).messages for _ in range(50)]
    turns = [len(RENDERER.turn(m)) for shown in played for m in shown if m.role == "assistant"]
    assert max(turns) <= config.max_tokens
    opening = len(begin(RENDERER, played[0][:1]).tokens)
    assert opening + data.turns * (config.max_tokens + 15) <= config.engine.context + 15


def test_I14_a_group_plays_one_secret_and_held_out_games_are_the_same_every_time() -> None:
    train, test = trio.run(TwentyQuestions(batch_size=3, group_size=2, steps=4, test_games=5), RENDERER)
    assert (len(train), len(train.get_batch(0))) == (4, 3)
    assert isinstance(test, MessageEnvDataset)
    assert (len(test), len(test.get_batch(0)), test.group_size) == (1, 5, 1)
    _, again = trio.run(TwentyQuestions(batch_size=9, group_size=3, steps=1, test_games=5), RENDERER)
    assert isinstance(again, MessageEnvDataset)
    assert again.tasks == test.tasks


def test_things_come_from_all_over_the_table() -> None:
    assert chosen_things(None) == chosen_things(len(THINGS)) == THINGS
    assert len(set(chosen_things(12))) == 12
    assert THINGS.index(chosen_things(12)[-1]) > len(THINGS) * 0.8
    with pytest.raises(ValueError, match="things=0: expected 1 to"):
        chosen_things(0)


def test_the_poor_player_knows_the_form_and_not_the_way() -> None:
    rng = np.random.default_rng(0)
    shown = [PoorPlayer().play(rng).messages for _ in range(60)]
    lost = [m for m in shown if sum(each.role == "assistant" for each in m) == 6]
    assert 10 < len(lost) < 55
    assert all(thing_guessed(m[-1].content) for m in shown if m not in lost), "an episode ends with a right guess"


def test_an_endpoint_answers_when_one_is_named() -> None:
    builder = TwentyQuestions(answerer_url="https://api.example.com/v1", answerer_model="some-model")
    train, _ = trio.run(builder, RENDERER)
    assert isinstance(train, MessageEnvDataset)
    env = pickle.loads(pickle.dumps(train.env_factory))(train.tasks[0])
    assert isinstance(env._answerer, ModelAnswerer)


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        (["dataset_builder.things=20"], r"dataset_builder\.things=20, but warm_start\.demonstrator\.things=8"),
        (["dataset_builder.turns=9"], r"dataset_builder\.turns=9, but"),
        (["dataset_builder.answerer_model=x"], "an endpoint needs both"),
        (["dataset_builder.answerer_key_env=KEY"], "answerer_key_env has no effect"),
    ],
)
def test_I12_what_does_not_go_together_is_refused(arguments: list[str], teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        check_goes_together(parse(arguments, **DEFAULTS))
