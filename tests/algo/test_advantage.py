"""Advantages: golden numbers, what a group that teaches nothing gets, and who counts."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.advantage import ADVANTAGES, compute_advantages, group_advantages
from jaxrl.algo.data import trainable
from jaxrl.types import Sample, StopReason, Trajectory, TrajectoryGroup, Transition

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "loss_golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["advantage_cases"]}
GOLDEN_OF = {"mean": "mean_centred", "mean_std": "grpo/sample_std/eps=1e-06", "leave_one_out": "rloo"}
FAULTS = [reason for reason in StopReason if reason.value.endswith("_error")]


def group(rewards: list[float], reasons: list[StopReason] | None = None) -> TrajectoryGroup:
    reasons = reasons or [StopReason.TERMINATED] * len(rewards)
    turn = Transition((1,), Sample((2,), (-0.5,), (0,), "stop"), 0.0, True)
    return TrajectoryGroup(tuple(Trajectory((turn,), r) for r in reasons), tuple(rewards), ({},) * len(rewards))


def by_group(case: dict) -> list[TrajectoryGroup]:
    ids, rewards = np.array(case["group_ids"]), np.array(case["rewards"])
    return [group(rewards[ids == i].tolist()) for i in np.unique(ids)]


@pytest.mark.parametrize("method", ADVANTAGES)
def test_golden(method: str) -> None:
    case = CASES[GOLDEN_OF[method]]
    advantages = compute_advantages(by_group(case), method)
    np.testing.assert_allclose(np.concatenate(advantages), case["expected_advantages"], atol=1e-9)


@pytest.mark.parametrize("method", ADVANTAGES)
def test_golden_constant_group_and_group_of_one_are_exactly_zero(method: str) -> None:
    assert compute_advantages([group([1.0, 1.0, 1.0]), group([0.7])], method) == [[0.0] * 3, [0.0]]


@pytest.mark.parametrize("method", ADVANTAGES)
def test_rounding_noise_is_no_signal(method: str) -> None:
    noisy = group([0.3, 0.1 + 0.2, 0.1 * 3])
    large = group([1e6, 1e6 + 1e-3, 1e6])
    assert compute_advantages([noisy, large], method) == [[0.0] * 3, [0.0] * 3]
    assert trainable([noisy, large, group([0.0, 1.0])]) == [False, False, True]


@pytest.mark.parametrize("reason", FAULTS)
def test_I13_golden_a_faulty_member_has_no_advantage_and_moves_nobody(reason: StopReason) -> None:
    case = CASES["missing_member/nan_excluded"]
    reasons = [StopReason.TERMINATED if valid else reason for valid in case["params"]["valid"]]
    for rewards in (case["rewards"], [1.0, 0.0, float("nan"), 0.0], [1.0, 0.0, 99.0, 0.0]):
        got = compute_advantages([group(rewards, reasons)], "mean")[0]
        np.testing.assert_allclose(got, case["expected_advantages"], atol=1e-12)


@pytest.mark.parametrize("method", ADVANTAGES)
def test_I13_one_survivor_is_zero(method: str) -> None:
    reasons = [StopReason.TERMINATED, StopReason.ENV_ERROR, StopReason.CANCELLED]
    one = group([1.0, 0.0, 0.0], reasons)
    assert compute_advantages([one], method) == [[0.0] * 3]
    assert trainable([one]) == [False]


def test_empty_batch_and_empty_group() -> None:
    assert compute_advantages([], "mean") == []
    assert compute_advantages([group([])], "mean_std") == [[]]


def test_cut_episodes_stay_in_the_baseline() -> None:
    reasons = [StopReason.TERMINATED, StopReason.MAX_TOKENS, StopReason.PARSE_FAILURE]
    assert compute_advantages([group([1.0, 0.0, -1.0], reasons)], "mean") == [[1.0, 0.0, -1.0]]


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match="did you mean mean_std"):
        compute_advantages([group([1.0, 0.0])], "mean_sd")
    with pytest.raises(ValueError, match="GRADER_ERROR"):
        compute_advantages([group([1.0, float("nan")])], "mean")


@given(
    rewards=st.lists(st.floats(-100, 100), max_size=6),
    counted=st.lists(st.booleans(), min_size=6, max_size=6),
    method=st.sampled_from(sorted(ADVANTAGES)),
)
def test_properties(rewards: list[float], counted: list[bool], method: str) -> None:
    """Centred over the survivors, zero elsewhere, and equivariant to the order of the group."""
    rewards_G, counted_G = np.array(rewards), np.array(counted[: len(rewards)], bool)
    got = group_advantages(rewards_G, counted_G, method)
    assert (got[~counted_G] == 0).all()
    assert abs(got.sum()) < 1e-6 * (1 + np.abs(got).max(initial=0))
    back = group_advantages(rewards_G[::-1], counted_G[::-1], method)[::-1]
    np.testing.assert_allclose(back, got, atol=1e-6, rtol=1e-6)
