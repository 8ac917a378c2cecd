"""Distances to a reference that are data: in the advantages, in the rewards. In the loss: `test_golden.py`."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.kl import advantage, advantage_centred, advantage_whitened, reward
from jaxrl.types import Datum

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "loss_golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["other_cases"]}


def from_case(case: dict, sampler: str) -> list[Datum]:
    """Rows as episodes, behind a first token; what is not trained keeps its poison in the reference."""
    data_D = []
    for i, mask in enumerate(case["mask"]):
        trained = np.array([0, *mask]) > 0
        column = lambda name, i=i: np.array([0, *case[name][i]], np.float32)  # noqa: E731
        zeros, whole = np.zeros(len(trained), np.float32), np.zeros(len(trained), np.int32)
        q = np.where(trained, column(sampler), 0)
        data_D.append(Datum(whole, trained, q, zeros, whole, i, i, logprobs_ref=column("logprobs_ref")))
    return data_D


def test_golden_tinkers_centred_penalty() -> None:
    case = CASES["kl_in_advantage/tinker_centred"]
    penalised = advantage_centred(from_case(case, "logprobs_rollout"), kl_coef=0.1)
    np.testing.assert_allclose([d.advantages[1:] for d in penalised], case["expected_added_advantages"], atol=1e-7)


def test_golden_token_level_k1_in_the_reward() -> None:
    """Its tokens' rewards; with a discount of 1 they are the returns to go that a token is credited with."""
    case = CASES["kl_in_reward/token_level_k1"]
    data_D = from_case(case, "logprobs_old")
    penalised = advantage(data_D, kl_coef=0.1)
    np.testing.assert_allclose([d.advantages[1:] for d in penalised], case["expected_token_rewards"], atol=1e-7)
    to_go = advantage(data_D, kl_coef=0.1, kl_discount=1.0)
    rewards, mask = np.array(case["expected_token_rewards"]), np.array(case["mask"])
    expected = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1] * mask
    np.testing.assert_allclose([d.advantages[1:] for d in to_go], expected, atol=1e-7)


def test_golden_sequence_level_k1_in_the_reward() -> None:
    case = CASES["kl_in_reward/sequence_level_k1(TRL RLOO)"]
    lost = reward(from_case(case, "logprobs_old"), kl_coef=0.05)
    np.testing.assert_allclose([-lost[0, 0], -lost[1, 1]], case["expected_reward_delta"], atol=1e-7)


def episode(seed: int, n: int) -> Datum:
    rng = np.random.default_rng(seed)
    mask = rng.random(n) < 0.5
    mask[0], mask[1] = False, True
    f32 = lambda: rng.normal(size=n).astype(np.float32)  # noqa: E731
    return Datum(np.zeros(n, np.int32), mask, np.where(mask, f32(), 0), f32(), np.zeros(n, np.int32), 0, 0, None, f32())


@given(st.integers(0, 999), st.floats(0.0, 1.0), st.sampled_from([advantage, advantage_centred]))
def test_I5_an_episode_that_splits_is_penalised_as_the_whole(seed: int, discount: float, penalise) -> None:
    """And tokens that are not trained neither bear nor cause anything, whatever lies in their columns."""
    whole, other = episode(seed, 12), replace(episode(seed + 1, 7), episode=1)
    head = np.arange(12) < 6
    parts = [replace(whole, mask=whole.mask & side) for side in (head, ~head)]
    (want, _), (*got, _) = (
        penalise(data_D, kl_coef=0.3, kl_discount=discount) for data_D in ([whole, other], [*parts, other])
    )
    for part, side in zip(got, (head, ~head), strict=True):
        np.testing.assert_allclose(part.advantages[side], want.advantages[side], rtol=1e-5, atol=1e-6)
    poisoned = replace(whole, logprobs_ref=np.where(whole.mask, whole.logprobs_ref, np.nan))
    again = penalise([poisoned, other], kl_coef=0.3, kl_discount=discount)[0]
    np.testing.assert_array_equal(again.advantages, want.advantages)
    np.testing.assert_array_equal(again.advantages[~whole.mask], whole.advantages[~whole.mask])


@given(st.integers(0, 999))
def test_centred_penalties_sum_to_zero(seed: int) -> None:
    data_D = [replace(episode(seed, 9), advantages=np.zeros(9, np.float32)), replace(episode(seed + 1, 5), episode=1)]
    penalised = advantage_centred(data_D, kl_coef=0.5)
    added = sum(float((p.advantages - d.advantages).sum()) for p, d in zip(penalised, data_D, strict=True))
    assert abs(added) < 1e-5


def test_empty_and_all_masked_batches() -> None:
    masked = replace(episode(0, 6), mask=np.zeros(6, bool))
    assert advantage_centred([], kl_coef=1.0) == []
    assert reward([]) == {}
    (same,) = advantage_centred([masked], kl_coef=1.0, kl_discount=0.5)
    np.testing.assert_array_equal(same.advantages, masked.advantages)


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match="group 0, episode 0 has no reference log-probs: score the batch"):
        advantage([replace(episode(0, 6), logprobs_ref=None)])


def test_whitened_returns_are_those_of_penalised_rewards() -> None:
    """REINFORCE++: the penalty is in the returns before they are whitened, so it is scaled with them."""
    case = CASES["kl_in_reward/token_level_k1"]
    data_D = [replace(d, advantages=np.where(d.mask, r, 0).astype(np.float32)) for d, r in
              zip(from_case(case, "logprobs_old"), (1.0, 0.0), strict=True)]  # fmt: skip
    whitened = advantage_whitened(data_D, kl_coef=0.1)
    rewards, mask = np.array(case["expected_token_rewards"]), np.array(case["mask"]) > 0
    returns = np.cumsum((rewards * mask)[:, ::-1], axis=1)[:, ::-1] + np.array([[1.0], [0.0]])
    kept = returns[mask]
    expected = np.where(mask, (returns - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), 0)
    np.testing.assert_allclose([d.advantages[1:] for d in whitened], expected, atol=1e-6)
    assert advantage_whitened([]) == []
