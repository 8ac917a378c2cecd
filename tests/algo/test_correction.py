"""Corrections for the mismatch of sampler and trainer, as data. Values of each part: `test_golden.py`."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from algo_cases import ragged
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.correction import CORRECTIONS, correct, geometric_mask, sequence_mask, token_truncate
from jaxrl.types import Datum


def uncorrected() -> list[Datum]:
    return [replace(d, correction=None) for d in ragged()]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_on_policy_nothing_is_corrected(name: str) -> None:
    for d in correct([CORRECTIONS[name]], [replace(d, logprobs_old=d.logprobs) for d in uncorrected()]):
        np.testing.assert_array_equal(d.correction, 1)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_I4_untrained_tokens_are_left_alone(name: str) -> None:
    """Poison there changes no factor, and theirs is 1."""
    clean = correct([CORRECTIONS[name]], uncorrected())
    for poison in (np.nan, np.inf, -np.inf):
        bad = [replace(d, logprobs_old=np.where(d.mask, d.logprobs_old, poison)) for d in uncorrected()]
        for a, b in zip(correct([CORRECTIONS[name]], bad), clean, strict=True):
            np.testing.assert_array_equal(a.correction, b.correction)
            assert (a.correction[~a.mask] == 1).all()


@given(st.integers(0, 999), st.sampled_from([*CORRECTIONS]))
def test_I5_order_and_split_do_not_matter(seed: int, name: str) -> None:
    data_D, rng = uncorrected(), np.random.default_rng(seed)
    whole = data_D[2]
    head = np.arange(len(whole.tokens)) < rng.integers(2, 30)
    parts = [replace(whole, mask=whole.mask & side) for side in (head, ~head)]
    split = [*data_D[:2], *parts, *data_D[3:]]
    order = rng.permutation(len(split))
    want = correct([CORRECTIONS[name]], data_D)
    got = correct([CORRECTIONS[name]], [split[i] for i in order])
    back = {int(i): d for i, d in zip(order, got, strict=True)}
    joined = np.where(head, back[2].correction, back[3].correction)
    np.testing.assert_allclose(joined, want[2].correction, rtol=1e-5)
    for i in (0, 1):
        np.testing.assert_allclose(back[i].correction, want[i].correction, rtol=1e-6)


def test_parts_multiply() -> None:
    data_D = uncorrected()
    narrow = partial(geometric_mask, geometric_min=0.9, geometric_max=1.1)
    both, one, other = (correct(parts, data_D) for parts in ([narrow, token_truncate], [narrow], [token_truncate]))
    for a, b, c in zip(both, one, other, strict=True):
        np.testing.assert_allclose(a.correction, b.correction * c.correction, rtol=1e-6)


def test_denominator_kept_takes_rejected_tokens_out_of_the_mask() -> None:
    reject = partial(geometric_mask, geometric_min=0.0, geometric_max=1e-9)
    assert not any(d.mask.any() for d in correct([reject], uncorrected(), denominator="kept"))
    assert all(d.mask.any() for d in correct([reject], uncorrected(), denominator="all"))


def test_a_geometric_mean_is_a_mean_however_long_the_episode() -> None:
    for n in (10, 355, 5000):
        mask = np.arange(n) > 0
        zeros = np.zeros(n, np.float32)
        old = np.where(mask, 0.005, 0.0).astype(np.float32)
        d = Datum(np.zeros(n, np.int32), mask, zeros, zeros, np.zeros(n, np.int32), 0, 0, logprobs_old=old)
        (inside,) = correct([geometric_mask], [d])
        np.testing.assert_array_equal(inside.correction, 1)


def test_ratios_that_overflow_are_large_and_not_nan() -> None:
    """A product over a long episode leaves float32, and its mask still says no."""
    n = 3000
    long = replace(
        ragged()[0],
        **{name: np.zeros(n, np.float32) for name in ("logprobs", "advantages")},
        tokens=np.zeros(n, np.int32),
        mask=np.arange(n) > 0,
        versions=np.zeros(n, np.int32),
        logprobs_old=np.full(n, 5.0, np.float32),
        logprobs_ref=None,
        correction=None,
    )
    (masked,) = correct([sequence_mask], [long])
    np.testing.assert_array_equal(masked.correction[1:], 0)
    (truncated,) = correct([CORRECTIONS["sequence_truncate"]], [long])
    np.testing.assert_array_equal(truncated.correction[1:], 2)
    assert correct([token_truncate], []) == []
