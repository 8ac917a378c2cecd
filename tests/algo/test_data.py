"""From episodes to datums: what is trained, where it splits, and that nothing is trained twice."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.data import (
    assemble_training_data,
    duplicated_tokens,
    split_reasons,
    trainable,
    trajectory_to_data,
)
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.types import Datum, Message, Sample, StopReason, Trajectory, TrajectoryGroup, Transition


def sample(*tokens: int, version: int = 0) -> Sample:
    return Sample(tokens, tuple(-0.1 * t for t in tokens), (version,) * len(tokens), "stop")


def turn(observation: tuple[int, ...], action: Sample, rewrite: str | None = None) -> Transition:
    return Transition(observation, action, 0.0, False, rewrite=rewrite)


def episode(*turns: Transition, stop: StopReason = StopReason.TERMINATED) -> Trajectory:
    return Trajectory(turns, stop)


def one(trajectory: Trajectory, advantage: float | tuple[float, ...] = 1.0) -> list[Datum]:
    return trajectory_to_data(trajectory, advantage, group=0, episode=0)


def test_I1_turns_that_extend_are_one_datum() -> None:
    (d,) = one(
        episode(
            turn((1, 2), sample(3, 4)),
            turn((1, 2, 3, 4, 5), sample(6, version=1)),
            turn((1, 2, 3, 4, 5, 6), sample(7)),  # nothing between the turns
        ),
        advantage=-0.5,
    )
    assert d.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert d.mask.tolist() == [False, False, True, True, False, True, True]
    np.testing.assert_allclose(d.logprobs, [0, 0, -0.3, -0.4, 0, -0.6, -0.7], rtol=1e-6)
    assert d.versions.tolist() == [-1, -1, 0, 0, -1, 1, 0]
    np.testing.assert_array_equal(d.advantages, np.where(d.mask, -0.5, 0))  # every trained token, and only those
    assert (d.tokens.dtype, d.mask.dtype, d.logprobs.dtype) == (np.int32, bool, np.float32)


def test_I1_a_changed_prefix_starts_a_new_datum_and_is_counted() -> None:
    e = episode(
        turn((1, 2), sample(3, 4)),
        turn((1, 2, 9, 5), sample(6), rewrite="thinking_stripped"),
        turn((1, 2, 9, 5, 6, 8), sample(7)),
        turn((4,), sample(2)),
    )
    first, second, third = one(e)
    assert first.tokens.tolist() == [1, 2, 3, 4]
    assert second.tokens.tolist() == [1, 2, 9, 5, 6, 8, 7]
    assert second.mask.tolist() == [False] * 4 + [True, False, True]
    assert third.tokens.tolist() == [4, 2]
    assert split_reasons(e) == Counter(thinking_stripped=1, prefix_changed=1)


def plain_datum(tokens: list[int], episode: int = 0) -> Datum:
    n = len(tokens)
    zeros = np.zeros(n, np.float32)
    return Datum(np.array(tokens, np.int32), np.ones(n, bool), zeros, zeros, np.zeros(n, np.int32), 0, episode)


def test_tokens_that_a_split_duplicates_are_counted_by_hand() -> None:
    data = [plain_datum(t) for t in ([1, 2, 3, 4], [1, 2, 9, 5, 6], [1, 2, 9, 5, 7], [8])]
    assert duplicated_tokens(data) == 2 + 4
    elsewhere = plain_datum([1, 2, 3, 4], episode=1)
    assert duplicated_tokens([*data, elsewhere]) == 2 + 4, "other episodes share nothing"
    assert duplicated_tokens([]) == 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=6))
def test_duplicated_tokens_are_all_tokens_less_the_distinct_beginnings(sequences: list[list[int]]) -> None:
    distinct = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
    assert duplicated_tokens([plain_datum(s) for s in sequences]) == sum(map(len, sequences)) - len(distinct)


def test_I1_an_action_that_comes_back_different_is_a_changed_prefix() -> None:
    e = episode(turn((1, 2), sample(3, 4)), turn((1, 2, 3), sample(5)), turn((1, 2, 3, 6), sample(7)))
    assert [d.tokens.tolist() for d in one(e)] == [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6, 7]]
    assert split_reasons(e) == Counter(prefix_changed=2)


# --- advantages of turns --------------------------------------------------------------------------


def test_each_sampled_token_has_the_advantage_of_its_turn() -> None:
    e = episode(turn((1, 2), sample(3, 4)), turn((1, 2, 3, 4, 5), sample(6)), turn((1, 2, 3, 4, 5, 6), sample(7, 8)))
    (d,) = one(e, (0.5, -1.0, 2.0))
    assert d.advantages.tolist() == [0, 0, 0.5, 0.5, 0, -1, 2, 2]
    (same,) = one(e, (0.25,) * 3)
    np.testing.assert_array_equal(same.advantages, one(e, 0.25)[0].advantages)


def test_an_episode_that_splits_keeps_the_numbers_of_its_turns() -> None:
    e = episode(
        turn((1, 2), sample(3, 4)),
        turn((1, 2, 9, 5), sample(6), rewrite="thinking_stripped"),
        turn((1, 2, 9, 5, 6, 8), sample(7)),
        turn((4,), sample(2)),
    )
    first, second, third = one(e, (1.0, 2.0, 3.0, 4.0))
    assert first.advantages.tolist() == [0, 0, 1, 1]
    assert second.advantages.tolist() == [0, 0, 0, 0, 2, 0, 3]
    assert third.advantages.tolist() == [0, 4]


def test_a_masked_turn_keeps_its_mask_and_the_others_their_numbers() -> None:
    malformed = replace(turn((1, 3, 4), sample(5, 5)), masked=True)
    (d,) = one(episode(turn((1,), sample(3)), malformed, turn((1, 3, 4, 5, 5, 6), sample(7))), (1.0, 9.0, 2.0))
    assert d.mask.tolist() == [False, True, False, False, False, False, True]
    assert d.advantages.tolist() == [0, 1, 0, 0, 0, 0, 2]


def test_as_many_advantages_as_turns_or_one() -> None:
    e = episode(turn((1,), sample(2)), turn((1, 2, 3), sample(4)))
    for wrong in ((1.0,), (1.0,) * 3, ()):
        with pytest.raises(ValueError, match=f"episode 0 of group 0 has 2 turns and {len(wrong)} advantages"):
            one(e, wrong)
    assert one(episode(), ()) == []
    assert one(replace(e, stop_reason=StopReason.ENV_ERROR), (0.0, 0.0)) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=50))
def test_I6_every_sampled_token_is_trained_once_with_the_advantage_of_its_turn(
    turns: list[tuple[int, int, bool]],
) -> None:
    context: tuple[int, ...] = (0,)
    played = []
    for number, (shown, sampled, rewrite) in enumerate(turns):
        context = (1,) * (shown + 1) if rewrite else context + (1,) * shown
        played.append(turn(context, sample(*(2,) * sampled, version=number)))
        context += (2,) * sampled
    advantages = tuple(10.0 + number for number in range(len(turns)))
    data = one(episode(*played), advantages)
    got = [(int(v), float(a)) for d in data for v, a in zip(d.versions[d.mask], d.advantages[d.mask], strict=True)]
    assert got == [(n, advantages[n]) for n, (_, sampled, _) in enumerate(turns) for _ in range(sampled)]


# --- which groups -----------------------------------------------------------------------------------


def test_golden_dynamic_sampling_keeps_what_teaches() -> None:
    read = json.loads((Path(__file__).parent.parent / "golden" / "loss_golden.json").read_text())
    (case,) = [c for c in read["other_cases"] if c["name"] == "dynamic_sampling/keep_mask"]
    groups = [
        TrajectoryGroup((episode(turn((1,), sample(2))),) * len(r), tuple(map(float, r)), ({},) * len(r))
        for r in case["rewards"]
    ]
    assert trainable(groups) == case["expected_keep"]


def test_nothing_after_the_last_sampled_token() -> None:
    (d,) = one(episode(turn((1,), sample(2)), turn((1, 2, 3, 4), sample())))
    assert d.tokens.tolist() == [1, 2]
    assert d.mask[-1]
    assert one(episode(turn((1, 2), sample()))) == []
    assert one(episode()) == []


@pytest.mark.parametrize("stop", [StopReason.TIMEOUT, StopReason.ENV_ERROR, StopReason.CANCELLED])
def test_I13_untrained_endings_give_no_datum(stop: StopReason) -> None:
    assert one(episode(turn((1,), sample(2)), stop=stop)) == []


def test_an_empty_observation_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty observation"):
        one(episode(turn((), sample(2))))


def test_M03_assistant_turns_of_the_prompt_are_context() -> None:
    shown = [Message("user", "2+2?"), Message("assistant", "4"), Message("user", "3+3?")]
    prompt = renderer_for(byte_tokenizer()).open(shown)
    (d,) = one(episode(turn(prompt, sample(54, 258))))
    assert np.flatnonzero(d.mask).tolist() == [len(prompt), len(prompt) + 1]


def test_M11_a_cap_of_one_turn_is_no_cap_of_the_episode() -> None:
    context: tuple[int, ...] = (1,)
    turns = []
    for _ in range(3):
        turns.append(turn(context, sample(*range(40))))
        context = (*context, *range(40), 2)
    (d,) = one(episode(*turns))
    assert d.mask.sum() == 120


def test_assemble_numbers_groups_and_episodes_and_masks_overlong() -> None:
    good, cut = episode(turn((1,), sample(2))), episode(turn((1,), sample(3)), stop=StopReason.MAX_TOKENS)
    failed = episode(turn((1,), sample(4)), stop=StopReason.ENV_ERROR)
    groups = [TrajectoryGroup((good, failed), (1.0, 0.0), ({}, {})), TrajectoryGroup((cut, good), (0.0, 1.0), ({}, {}))]
    advantages = [[1.0, 0.0], [-0.5, 0.5]]
    data = assemble_training_data(groups, advantages)
    assert [(d.group, d.episode) for d in data] == [(0, 0), (1, 2), (1, 3)]
    masked = assemble_training_data(groups, advantages, overlong_masking=True)
    assert [(d.group, d.episode) for d in masked] == [(0, 0), (1, 3)]
    assert assemble_training_data([], []) == []


tokens = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(
    st.lists(
        st.tuples(tokens, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=6
    )
)
def test_I6_every_sampled_token_is_trained_exactly_once(turns: list) -> None:
    """Also when the history is rewritten at random, and whatever tokens repeat."""
    context: tuple[int, ...] = (0,)
    transitions = []
    for version, (extra, action, rewrite) in enumerate(turns):
        context = (1, *extra) if rewrite else context + extra
        transitions.append(turn(context, sample(*action, version=version)))
        context += tuple(action)
    e = episode(*transitions)
    data = one(e)
    trained = [tuple(d.tokens[d.mask & (d.versions == v)].tolist()) for v in range(len(turns)) for d in data]
    assert [t for t in trained if t] == [tuple(action) for _, action, _ in turns]
    assert sum(int(d.mask.sum()) for d in data) == sum(len(action) for _, action, _ in turns)
    assert len(data) == 1 + split_reasons(e).total()
    for d in data:
        assert d.mask[-1]
        assert not d.mask[0]
        assert (d.advantages[~d.mask] == 0).all()
