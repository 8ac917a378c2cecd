"""Recorded episodes hold every token once and give every context back."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.advantage import compute_advantages
from jaxrl.algo.data import assemble_training_data, trainable
from jaxrl.runtime.record import (
    contexts,
    episode_records,
    groups_from_records,
    read_records,
    rollout_file,
    token_pieces,
    write_records,
)
from jaxrl.types import Conclusion, Sample, StopReason, Trajectory, TrajectoryGroup, Transition


def decode(tokens):
    return bytes(tokens).decode(errors="replace")


def encode(text):
    return tuple(text.encode())


def turn(observation, action, *, reward=0.0, done=False, logprob=-0.1, **more):
    n = len(action)
    sample = Sample(tuple(action), (logprob,) * n, tuple(range(n)), "stop")
    return Transition(tuple(observation), sample, reward, done, **more)


def group():
    first, second = encode("ask"), encode("go é!")
    context = first + second + encode("more")
    grown = Trajectory(
        (
            turn(first, second),
            turn(context, encode("end"), reward=1.0, done=True, metrics={"m": 2}, logs={"l": "[/b]"}),
        ),
        StopReason.TERMINATED,
    )
    rewritten = Trajectory(
        (turn(first, second), turn(encode("as other"), encode("x"), rewrite="compaction", logprob=-math.inf)),
        StopReason.ENV_ERROR,
        error="OSError: gone",
    )
    empty = Trajectory((), StopReason.CANCELLED)
    return TrajectoryGroup((grown, rewritten, empty), (1.5, math.nan, 0.0), ({"g": 1.0}, {}, {}), ("guess", "easy"))


def test_I1_contexts_come_back_token_for_token(tmp_path):
    path = rollout_file(tmp_path / "rollouts", 12)
    assert path.name == "step_000012.jsonl"
    records = episode_records([group()], decode, step=12, tasks=["t7"])
    write_records(path, records)
    found = read_records(path)
    assert found == records
    for record, trajectory in zip(found, group().trajectories_G, strict=True):
        assert contexts(record) == [t.observation for t in trajectory.transitions]
        assert [tuple(t["action"]) for t in record["turns"]] == [t.action.tokens for t in trajectory.transitions]
        assert record["stop_reason"] == trajectory.stop_reason.value


def test_a_record_holds_new_tokens_only_and_says_what_happened():
    one, two, three = episode_records([group()], decode, step=0)
    assert one["turns"][1]["observation_text"] == "more"
    assert one["turns"][0]["action_text"] == ["g", "o", " ", "", "é", "!"]
    assert one["turns"][0]["versions"] == [0, 1, 2, 3, 4, 5]
    assert (one["reward"], one["tags"], one["metrics"]) == (1.5, ["guess", "easy"], {"g": 1.0})
    assert one["turns"][1]["logs"] == {"l": "[/b]"}
    assert two["turns"][1]["rewrite"] == "compaction"
    assert (two["turns"][1]["kept"], two["turns"][1]["observation_text"]) == (2, " other")
    assert (two["error"], two["reward"], two["turns"][1]["logprobs"]) == ("OSError: gone", None, [None])
    assert three["turns"] == []


def training_batch():
    """Groups with everything a datum depends on: rewrites, masked turns, faults, graded timeouts, a refused group."""
    first, second = encode("ask"), encode("go")
    again = first + second + encode("more")
    masked = Trajectory(
        (turn(first, second, masked=True), turn(again, encode("end"), reward=1.0, done=True, logprob=-1 / 3)),
        StopReason.TERMINATED,
    )
    rewritten = Trajectory(
        (turn(first, second), turn(encode("as other"), encode("x"), rewrite="compaction")), StopReason.MAX_TURNS
    )
    broken = Trajectory((turn(first, second),), StopReason.ENV_ERROR, error="OSError: gone")
    graded = Trajectory((turn(first, second),), StopReason.TIMEOUT, conclusion=Conclusion(0.25))
    late = Trajectory((turn(first, second),), StopReason.TIMEOUT)
    return [
        TrajectoryGroup((masked, rewritten, broken, graded, late), (1.0, 0.1, 7.0, 0.25, 9.0), ({},) * 5, ("easy",)),
        TrajectoryGroup((masked, rewritten), (1.0, 0.0), ({}, {}), viable=False),
        TrajectoryGroup((masked, masked), (1.0, 1.0), ({}, {})),
    ]


def datums(groups):
    useful = [g for g, teaches in zip(groups, trainable(groups), strict=True) if teaches]
    return assemble_training_data(useful, compute_advantages(useful, "mean_std"))


def test_I1_groups_from_records_give_the_datums_of_the_groups_that_were_recorded(tmp_path):
    groups = training_batch()
    write_records(tmp_path / "step.jsonl", episode_records(groups, decode, step=3))
    found = groups_from_records(reversed(read_records(tmp_path / "step.jsonl")))
    assert [g.rewards_G for g in found] == [g.rewards_G for g in groups]
    assert [g.tags for g in found] == [g.tags for g in groups]
    assert trainable(found) == trainable(groups) == [True, False, False]
    ours, theirs = datums(found), datums(groups)
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        assert (a.group, a.episode) == (b.group, b.episode)
        for column in ("tokens", "mask", "logprobs", "advantages", "versions"):
            np.testing.assert_array_equal(getattr(a, column), getattr(b, column))


def test_records_that_lack_a_member_are_refused():
    records = episode_records(training_batch(), decode, step=3)
    with pytest.raises(ValueError, match=r"group 0 of step 3 has records of members \[1, 2, 3, 4\]"):
        groups_from_records(records[1:])


def test_what_was_not_finite_comes_back_as_nan():
    (found,) = groups_from_records(episode_records([group()], decode, step=0))
    assert math.isnan(found.rewards_G[1])
    assert math.isnan(found.trajectories_G[1].transitions[1].action.logprobs[0])


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float32_log_probs_are_exact(logprob):
    trajectory = Trajectory((turn((1,), (2,), logprob=logprob),), StopReason.TERMINATED)
    (record,) = episode_records([TrajectoryGroup((trajectory,), (0.0,), ({},))], decode, step=0)
    assert np.float32(json.loads(json.dumps(record))["turns"][0]["logprobs"][0]) == np.float32(logprob)


def test_a_torn_file_gives_its_whole_lines(tmp_path):
    path = tmp_path / "step_000000.jsonl"
    write_records(path, episode_records([group()], decode, step=0))
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_records(path)) == 2


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "step_000000.jsonl"
    path.write_text('{"schema": 99}\n')
    with pytest.raises(ValueError, match="schema 99"):
        read_records(path)


def test_no_groups_are_an_empty_file(tmp_path):
    write_records(tmp_path / "x.jsonl", episode_records([], decode, step=0))
    assert read_records(tmp_path / "x.jsonl") == []


@given(st.text(max_size=40))
def test_pieces_concatenate_to_the_text(text):
    pieces = token_pieces(encode(text), decode)
    assert len(pieces) == len(encode(text))
    assert "".join(pieces) == text


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_still_give_a_piece_each(data):
    assert len(token_pieces(tuple(data), decode)) == len(data)


def test_a_tokenizer_that_drops_the_first_space_keeps_it_inside():
    words = ["▁the", "▁cat", "s"]

    def pieces_decode(tokens):
        return "".join(words[t] for t in tokens).replace("▁", " ").removeprefix(" ")

    assert token_pieces((0, 1, 2, 1), pieces_decode) == ["the", " cat", "s", " cat"]
