"""The recipe of shorter answers: its prompts, its judges, and what it refuses."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import trio

from envs.preference import (
    ANSWERS,
    FIRST,
    OPPOSITES,
    SECOND,
    TIE,
    Comparison,
    Conversation,
    FunctionJudge,
    ModelJudge,
    PairwisePreferenceGroupBuilder,
    RewardModelJudge,
    Shorter,
    WellFormed,
    opposite,
    question,
    well_formed,
)
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.chat.transcript import begin
from jaxrl.env import GroupDataset, RLDataset
from jaxrl.train import parse
from jaxrl.types import Message
from recipes.shorter_answers import (
    DEFAULTS,
    Chatterbox,
    ShorterAnswers,
    check_goes_together,
    outcome,
)

RENDERER = renderer_for(byte_tokenizer())


def spoke(text: str) -> Conversation:
    return (Message("assistant", text),)


def groups(data: RLDataset | None) -> list[PairwisePreferenceGroupBuilder]:
    assert isinstance(data, GroupDataset)
    return [group for group in data.groups if isinstance(group, PairwisePreferenceGroupBuilder)]


def built(**changes: object) -> list[PairwisePreferenceGroupBuilder]:
    """The training groups of some settings."""
    return groups(trio.run(ShorterAnswers(**changes), RENDERER)[0])  # type: ignore[arg-type]


def test_the_defaults_hold_together() -> None:
    config = parse([], **DEFAULTS)
    check_goes_together(config)
    data = config.dataset_builder
    assert isinstance(data, ShorterAnswers)
    assert config.packing is not None
    assert max(config.packing.widths) >= config.engine.context - 1
    assert config.engine.slots >= data.batch_size * data.group_size
    assert config.num_groups_to_log >= data.test_prompts, "the comparison with the policy before reads them"
    longest = max((opposite(word, len(ANSWERS) - 1) for word in OPPOSITES), key=len)
    assert len(RENDERER.turn(Message("assistant", longest))) <= config.max_tokens
    opening = max(len(begin(RENDERER, [Message("user", question(word))]).tokens) for word in OPPOSITES)
    assert opening + config.max_tokens <= config.engine.context


def test_every_demonstration_is_well_formed_and_of_its_length_as_often_as_of_another() -> None:
    rng = np.random.default_rng(0)
    shown = [Chatterbox().play(rng).messages for _ in range(500)]
    assert all(well_formed(asked.content)(said.content) for asked, said in shown)
    words = [len(said.content.split()) for _, said in shown]
    assert len(set(words)) == len(ANSWERS)
    assert min(words.count(n) for n in set(words)) > 60


@pytest.mark.parametrize(
    ("prompt", "text", "formed"),
    [
        *(("Opposite of hot?", "cold.", True), ("Opposite of hot?", "It is Cold.", True)),
        *(("Opposite of hot?", "cold", False), ("Opposite of hot?", "hot.", False), ("Opposite of hot?", "", False)),
        *(("Opposite of in?", "spout.", False), ("Opposite of hot?", "cold. Or so.", False)),
        *(("Why?", "So.", True), ("Why?", "So", False), ("Why?", ".", False), ("Why?", "", False)),
    ],
)
def test_what_is_well_formed(prompt: str, text: str, formed: bool) -> None:
    assert well_formed(prompt)(text) is formed


def test_the_shorter_of_two_well_formed_answers_is_preferred() -> None:
    judge = Shorter(WellFormed("cold"))
    for first, second, verdict in (
        ("cold.", "It is cold.", FIRST),
        ("It is cold.", "cold.", SECOND),
        ("cold.", "cold. ", FIRST),
        ("old.", "It is cold.", SECOND),
        ("x", "", TIE),
        ("cold.", "Cold.", TIE),
    ):
        assert judge(Comparison((), spoke(first), spoke(second))) == verdict
    turns = (*spoke("A."), Message("user", "And?"), *spoke("So it is."))
    assert Shorter()(Comparison((), turns, spoke("A longer one."))) == FIRST


def test_I14_held_out_prompts_are_the_same_every_time_and_have_a_reference() -> None:
    train, test = trio.run(ShorterAnswers(batch_size=3, group_size=2, steps=4, test_prompts=5), RENDERER)
    assert (len(train), len(train.get_batch(0)), groups(train)[0].group_size) == (4, 3, 2)
    assert [group.group_size for group in groups(test)] == [1] * 5
    for group in groups(test):
        (reference,) = group.references
        assert group.check_format(reference)
    _, again = trio.run(ShorterAnswers(batch_size=9, steps=1, test_prompts=5), RENDERER)
    assert [g.task for g in groups(again)] == [g.task for g in groups(test)]
    assert all(group.references == () for group in groups(train))
    assert trio.run(ShorterAnswers(test_prompts=0), RENDERER)[1] is None


def test_all_words_are_asked_for_before_one_is_again() -> None:
    asked = [group.task.prompt for group in built(batch_size=8, steps=6)]
    assert set(asked[: len(OPPOSITES)]) == {question(word) for word in OPPOSITES}


def test_the_judge_that_is_named_is_the_one_that_judges() -> None:
    assert isinstance(built()[0].judge, FunctionJudge)
    hosted = {"judge": "model", "judge_url": "https://api.example.com/v1", "judge_model": "m", "judges_at_once": 3}
    group = pickle.loads(pickle.dumps(built(**hosted)[0]))
    assert isinstance(group.judge, ModelJudge)
    assert group.judging.limit.at_once == 3
    first, *_, last = built(judge="checkpoint", judge_model="tiny", judge_reference="tiny")
    assert isinstance(first.judge, RewardModelJudge)
    assert first.judge is last.judge, "its weights are loaded once"


def test_prompts_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"Why {i}?", "reference": "So."} if i else {"prompt": "Why 0?"} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, test = trio.run(ShorterAnswers(prompts=str(path), batch_size=2, steps=2, test_prompts=2), RENDERER)
    held_out = {group.task.prompt for group in groups(test)}
    assert {group.task.prompt for group in groups(train)} == {f"Why {i}?" for i in range(6)} - held_out
    with pytest.raises(ValueError, match=r"test_prompts=6: .* has 6 prompts"):
        trio.run(ShorterAnswers(prompts=str(path), test_prompts=6), RENDERER)


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        (["dataset_builder.prompts=x.jsonl"], r"prompts=x\.jsonl, but the warm start shows opposites"),
        (["dataset_builder.judge=model"], r"judge=model needs dataset_builder\.judge_url"),
        (["dataset_builder.judge=checkpoint"], r"judge=checkpoint needs dataset_builder\.judge_model"),
        (["dataset_builder.judge_model=m"], r"judge_model has no effect with judge=shorter"),
        (["dataset_builder.batch_size=0"], r"batch_size=0: expected at least 1"),
    ],
)
def test_I12_what_does_not_go_together_is_refused(arguments: list[str], teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        check_goes_together(parse(arguments, **DEFAULTS))


def test_a_run_without_held_out_answers_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no held-out answers"):
        outcome(tmp_path, RENDERER)
