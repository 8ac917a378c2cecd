"""Packing: nothing lost, nothing moved, shapes bounded."""

from dataclasses import replace

import numpy as np
import pytest
from algo_cases import VOCAB, datum, packed
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.aggregate import token_weights
from jaxrl.algo.batch import OPTIONAL, Batch, choose_width, datum_values, pack, padding_fraction
from jaxrl.types import Datum

ARRAYS = [f for f in Batch.__dataclass_fields__ if f not in ("count", *OPTIONAL)]


def unpacked(batch: Batch) -> list[dict[str, np.ndarray]]:
    """The segments of a batch, in the order of rows."""
    out = []
    for n, b in np.ndindex(*batch.tokens.shape[:2]):
        for segment in range(1, int(batch.segments[n, b].max(initial=0)) + 1):
            here = batch.segments[n, b] == segment
            out.append({name: getattr(batch, name)[n, b][here] for name in ARRAYS})
    return out


def test_by_hand() -> None:
    """Four positions and two positions in one row of six; targets are the next tokens."""
    f32 = lambda *x: np.array(x, np.float32)  # noqa: E731
    mask = lambda *x: np.array(x, bool)  # noqa: E731
    i32 = lambda *x: np.array(x, np.int32)  # noqa: E731
    short = Datum(i32(1, 2, 3), mask(0, 0, 1), f32(0, 0, -1), f32(0, 0, 2), i32(-1, -1, 5), 0, 0)
    long = Datum(
        i32(4, 5, 6, 7, 8), mask(0, 1, 0, 0, 1), f32(0, -2, 0, 0, -3), f32(0, 1, 0, 0, 1), i32(-1, 6, -1, -1, 7), 0, 1
    )
    b = pack([short, long], token_weights([short, long], "token_mean"), width=6, rows=1)
    third = np.float32(1 / 3)
    expected = {
        "tokens": [4, 5, 6, 7, 1, 2],
        "targets": [5, 6, 7, 8, 2, 3],
        "positions": [0, 1, 2, 3, 0, 1],
        "segments": [1, 1, 1, 1, 2, 2],
        "mask": [1, 0, 0, 1, 0, 1],
        "logp_sampler": [-2, 0, 0, -3, 0, -1],
        "advantage": [1, 0, 0, 1, 0, 2],
        "weight": [third, 0, 0, third, 0, third],
        "versions": [6, -1, -1, 7, -1, 5],
        "episodes": [1, 1, 1, 1, 0, 0],
        "groups": [0, 0, 0, 0, 0, 0],
    }
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(b, name)[0, 0], expected[name], err_msg=name)
    assert b.count == 1
    assert padding_fraction(b) == 0


@given(st.lists(st.integers(1, 17), max_size=12), st.integers(1, 3), st.integers(0, 99))
def test_packing_is_a_permutation_of_the_data(lengths: list[int], rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = [datum(rng, n, episode=e) for e, n in enumerate(lengths)]
    weights = token_weights(data, "token_mean")
    b = pack(data, weights, width=16, rows=rows)
    n = b.tokens.shape[0]
    assert n & (n - 1) == 0
    assert n >= max(1, int(b.count)) > n // 2 or b.count <= 1
    assert (b.segments[int(b.count) :] == 0).all()
    assert (b.weight[b.segments == 0] == 0).all()
    assert not b.mask[b.segments == 0].any()
    want = sorted(
        (d.tokens[1:].tolist(), d.mask[1:].tolist(), w[1:].astype(np.float32).tolist())
        for d, w in zip(data, weights, strict=True)
        if len(d.tokens) > 1
    )
    got = sorted((s["targets"].tolist(), s["mask"].tolist(), s["weight"].tolist()) for s in unpacked(b))
    assert got == want
    for s in unpacked(b):
        np.testing.assert_array_equal(s["positions"], np.arange(len(s["positions"])))
        np.testing.assert_array_equal(s["tokens"][1:], s["targets"][:-1])
    again = pack(data, weights, width=16, rows=rows)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(b, name), getattr(again, name))


def test_optional_columns_are_there_when_asked_for(data_D: list[Datum]) -> None:
    plain, whole = (packed(data_D, loss=loss) for loss in ("ppo", "everything"))
    assert [getattr(plain, name) for name in OPTIONAL] == [None] * 4
    assert whole.observed is None
    for name, field in (("logp_old", "logprobs_old"), ("logp_ref", "logprobs_ref"), ("correction", "correction")):
        got, want = getattr(whole, name)[whole.mask], np.concatenate([getattr(d, field)[d.mask] for d in data_D])
        np.testing.assert_array_equal(np.sort(got), np.sort(want))
    unscored = [*data_D[1:], replace(data_D[0], logprobs_ref=None)]
    with pytest.raises(ValueError, match="group 0, episode 0 has no logprobs_ref, which the loss reads"):
        packed(unscored, loss="dpo")


@given(st.lists(st.integers(1, 17), max_size=12), st.integers(1, 3))
def test_values_at_positions_come_back_to_the_tokens_they_are_of(lengths: list[int], rows: int) -> None:
    rng = np.random.default_rng(len(lengths))
    data = [datum(rng, n, episode=e) for e, n in enumerate(lengths)]
    batch = pack(data, [np.zeros(len(d.tokens)) for d in data], width=16, rows=rows)
    for d, values in zip(data, datum_values(batch.targets.astype(np.float32), data), strict=True):
        np.testing.assert_array_equal(values, [0, *d.tokens[1:]])


def test_I5_pools_are_numbered_by_what_they_are_not_by_when_they_came(data_D: list[Datum]) -> None:
    """So that a draw among tokens, which hashes the number of an episode, does not depend on the order of the data."""
    for order in (data_D, data_D[::-1]):
        batch = packed(order)
        assert sorted(np.unique(batch.episodes[batch.mask])) == list(range(6))
        for d in order:
            n, b, t = np.argwhere((batch.targets == d.tokens[1]) & (batch.positions == 0) & (batch.segments > 0))[0]
            assert (batch.episodes[n, b, t], batch.groups[n, b, t]) == (d.episode, d.group)


def test_padding_fraction_and_buckets(data_D: list[Datum]) -> None:
    assert padding_fraction(packed(data_D)) == pytest.approx(1 - 112 / 128)
    assert packed(data_D).tokens.shape == (1, 4, 32)
    one_row = packed(data_D, rows=1)
    assert (one_row.tokens.shape, int(one_row.count)) == ((4, 1, 32), 4)
    roomy = packed(data_D, micro_batches=8)
    assert (roomy.tokens.shape, int(roomy.count)) == ((8, 4, 32), 1)
    assert padding_fraction(roomy) == padding_fraction(packed(data_D))


def test_empty_batch() -> None:
    b = pack([], [], width=8, rows=2)
    assert (b.tokens.shape, int(b.count), padding_fraction(b)) == ((1, 2, 8), 0, 0.0)


def test_choose_width(data_D: list[Datum]) -> None:
    assert choose_width(data_D, [64, 16, 32]) == 32
    assert choose_width([], [64, 16]) == 16
    with pytest.raises(ValueError, match=r"group 1, episode 2 has 33 tokens and needs 32 positions, but .* 16"):
        choose_width(data_D, [8, 16])


def test_errors_teach(data_D: list[Datum]) -> None:
    with pytest.raises(ValueError, match=r"33 tokens and needs 32 positions, but the widest row has 24"):
        packed(data_D, width=24)
    with pytest.raises(ValueError, match="need 4 micro-batches of 1 rows of 32 positions, but micro_batches=2"):
        packed(data_D, rows=1, micro_batches=2)
    first = Datum(*(x[:1] for x in (np.array([VOCAB - 1]), np.ones(1, bool), *np.zeros((3, 1)))), group=0, episode=0)
    with pytest.raises(ValueError, match="trains its first token"):
        packed([first])
