"""Weights of an optimizer batch: golden numbers, and that only tokens, episodes and groups matter."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from algo_cases import constant_of, datum
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.aggregate import AGGREGATIONS, denominator, local_weights, token_weights
from jaxrl.types import Datum

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "loss_golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["other_cases"]}


def from_mask(mask: list[float], group: int, episode: int) -> Datum:
    """A datum whose targets have this mask: one leading token is never trained."""
    n = len(mask) + 1
    zeros = np.zeros(n, np.float32)
    trained = np.array([0.0, *mask]) > 0
    return Datum(np.zeros(n, np.int32), trained, zeros, zeros, np.zeros(n, np.int32), group, episode)


def test_golden_prompt_mean() -> None:
    case = CASES["prompt_mean/weights"]
    data = [from_mask(m, g, i) for i, (m, g) in enumerate(zip(case["mask"], case["group_ids"], strict=True))]
    got = [w[1:] for w in token_weights(data, "prompt_mean")]
    np.testing.assert_allclose(got, case["expected_token_weights"])
    together = [replace(d, group=0) for d in data]
    for a, b in zip(token_weights(together, "prompt_mean"), token_weights(together, "token_mean"), strict=True):
        np.testing.assert_allclose(a, b)


def test_I5_golden_an_episode_that_splits_is_not_over_counted() -> None:
    case = CASES["episode_split/weights"]
    data = [from_mask(m, 0, e) for m, e in zip(case["mask"], case["episode_ids"], strict=True)]
    expected = case["expected_token_weights"]["episode_mean_token_mean(slime rollout_mask_sums)"]
    for name in ("episode_mean_token_mean", "seq_mean_token_mean"):
        np.testing.assert_allclose([w[1:] for w in token_weights(data, name)], expected)
    mass = {"token_sum": [4, 2], "token_mean": [2 / 3, 1 / 3], "seq_mean_token_sum": [2, 1]}
    for name, wanted in mass.items():
        first, second, third = (w.sum() for w in token_weights(data, name))
        np.testing.assert_allclose([first + second, third], wanted)
    first, second, third = (w.sum() for w in token_weights(data, "seq_mean_token_sum_norm", constant=8.0))
    np.testing.assert_allclose([first + second, third], [4 / 16, 2 / 16])  # two episodes, not three rows


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_empty_and_all_masked_batches_are_zero(name: str) -> None:
    assert token_weights([], name, constant=constant_of(name)) == []
    masked = [from_mask([0.0, 0.0], 0, 0), from_mask([0.0], 1, 1)]
    for w in token_weights(masked, name, constant=constant_of(name)):
        np.testing.assert_array_equal(w, 0)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_masked_episode_counts_in_no_denominator(name: str) -> None:
    """The loss of a trained and a masked episode is that of the trained one alone."""
    kept, masked = from_mask([1.0] * 10, 0, 0), from_mask([0.0] * 100, 1, 1)
    both = token_weights([kept, masked], name, constant=constant_of(name))
    alone = token_weights([kept], name, constant=constant_of(name))
    np.testing.assert_allclose(both[0], alone[0])
    np.testing.assert_array_equal(both[1], 0)


@pytest.mark.parametrize("name", [n for n in AGGREGATIONS if not n.endswith("token_sum")])
def test_means_have_mass_one(name: str, data_D: list[Datum]) -> None:
    total = sum(w.sum() for w in token_weights(data_D, name, constant=constant_of(name)))
    tokens = sum(int(d.mask.sum()) for d in data_D)
    expected = tokens / (6 * 8) if name == "seq_mean_token_sum_norm" else 1.0
    np.testing.assert_allclose(total, expected)


@given(seed=st.integers(0, 1000), name=st.sampled_from(sorted(AGGREGATIONS)))
def test_I5_properties(seed: int, name: str) -> None:
    """Weights follow their datum under permutation, and splitting an episode anywhere changes no token's weight."""
    rng = np.random.default_rng(seed)
    data = [datum(rng, int(rng.integers(2, 9)), int(rng.integers(0, 3)), e) for e in range(5)]
    weights = token_weights(data, name, constant=constant_of(name))
    order = rng.permutation(5)
    permuted = token_weights([data[i] for i in order], name, constant=constant_of(name))
    for i, w in zip(order, permuted, strict=True):
        np.testing.assert_allclose(w, weights[i])
        assert (w[~data[i].mask] == 0).all()
    cut = int(rng.integers(1, len(data[0].tokens)))
    halves = [
        replace(data[0], mask=data[0].mask & ((np.arange(len(data[0].mask)) < cut) == is_first))
        for is_first in (True, False)
    ]
    split = token_weights([*halves, *data[1:]], name, constant=constant_of(name))
    np.testing.assert_allclose(split[0] + split[1], weights[0])
    for a, b in zip(split[2:], weights[1:], strict=True):
        np.testing.assert_allclose(a, b)


# --- a batch that arrives in parts ---------------------------------------------------------------

# Group 0: an episode of 3 + 1 trained tokens that split, and one of 2. Group 1: one of 2, and one that is masked.
SMALL = [([1, 1, 1], 0, 0), ([0, 1], 0, 0), ([1, 1], 0, 1), ([1, 1], 1, 2), ([0, 0], 1, 3)]
BY_HAND = {
    "token_sum": ([1, 1, 1, 1], 0, 0),
    "token_mean": ([1, 1, 1, 1], 6, 2),
    "seq_mean_token_mean": ([1 / 4, 1 / 4, 1 / 2, 1 / 2], 2, 1),
    "seq_mean_token_sum": ([1, 1, 1, 1], 2, 1),
    "seq_mean_token_sum_norm": ([1 / 8, 1 / 8, 1 / 8, 1 / 8], 2, 1),
    "episode_mean_token_mean": ([1 / 4, 1 / 4, 1 / 2, 1 / 2], 2, 1),
    "prompt_mean": ([1 / 6, 1 / 6, 1 / 6, 1 / 2], 1, 1),
    "prompt_mean_token_sum": ([1, 1, 1, 1], 1, 1),
}
"""Local weight of the datums that are trained, and what each group adds to the count."""


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_local_weights_and_counts_by_hand(name: str) -> None:
    data = [from_mask([float(x) for x in m], g, e) for m, g, e in SMALL]
    expected, *counts = BY_HAND[name]
    for part, count, wanted in ((data[:3], counts[0], expected[:3]), (data[3:], counts[1], [*expected[3:], 0])):
        weights, got = local_weights(part, name, constant=constant_of(name))
        assert got == count
        assert [w.max() for w in weights] == pytest.approx(wanted)
    whole, count = local_weights(data, name, constant=constant_of(name))
    assert count == sum(counts)
    assert [w.max() for w in whole] == pytest.approx([*expected, 0])
    assert local_weights([], name, constant=constant_of(name)) == ([], 0)


def test_a_batch_without_anything_to_count_divides_by_one() -> None:
    assert [denominator(n) for n in (0, 1, 7)] == [1, 1, 7]


@given(seed=st.integers(0, 1000), parts=st.integers(1, 4), name=st.sampled_from(sorted(AGGREGATIONS)))
def test_I5_parts_have_the_weights_of_the_whole(seed: int, parts: int, name: str) -> None:
    """Whatever the partition of the groups, and to the last bit."""
    rng = np.random.default_rng(seed)
    data = [datum(rng, int(rng.integers(1, 9)), int(rng.integers(0, 5)), int(rng.integers(0, 3))) for _ in range(9)]
    part_of = rng.integers(0, parts, 5)
    picked = [[i for i, d in enumerate(data) if part_of[d.group] == part] for part in range(parts)]
    local = [local_weights([data[i] for i in indices], name, constant=constant_of(name)) for indices in picked]
    total = denominator(sum(count for _, count in local))
    whole = token_weights(data, name, constant=constant_of(name))
    for indices, (weights, _) in zip(picked, local, strict=True):
        for i, w in zip(indices, weights, strict=True):
            np.testing.assert_array_equal(w / total, whole[i])


def test_I12_errors_teach(data_D: list[Datum]) -> None:
    with pytest.raises(ValueError, match="did you mean token_mean"):
        token_weights(data_D, "tokens_mean")
    with pytest.raises(ValueError, match="divides by a constant length"):
        token_weights(data_D, "seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="would have no effect"):
        token_weights(data_D, "token_mean", constant=8.0)
