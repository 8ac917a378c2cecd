"""Loss forms: golden values and gradients, masked tokens, and invariances of loss x aggregation."""

import contextlib
import functools
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algo_cases import constant_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.advantage import ADVANTAGES
from jaxrl.algo.aggregate import AGGREGATIONS, token_weights
from jaxrl.algo.loss import LOSSES, TokenInputs, make_loss
from jaxrl.algo.variants import VARIANTS
from jaxrl.types import Datum

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "loss_golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}

# golden case: loss, knobs, where the sampler's log-probs lie in the case
IMPLEMENTED: dict[str, tuple[str, dict[str, float], str]] = {
    "cross_entropy/token_sum": ("cross_entropy", {}, "old"),
    "cross_entropy/token_mean": ("cross_entropy", {}, "old"),
    "reinforce/token_sum": ("reinforce", {}, "old"),
    "reinforce/token_mean(=gpg policy loss)": ("reinforce", {}, "old"),
    "reinforce/seq_mean_token_sum": ("reinforce", {}, "old"),
    "importance_sampling/token_sum": ("importance_sampling", {}, "old"),
    "ppo_clip/token_sum": ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, "old"),
    "ppo_clip/token_mean": ("ppo", {}, "old"),
    "grpo(beta=0)/seq_mean_token_mean": ("ppo", {}, "old"),
    "dr_grpo/constant": ("ppo", {}, "old"),
    "dapo/token_mean": ("ppo", {"clip_high_threshold": 1.28}, "old"),
    "ppo_clip_bypass/token_mean": ("ppo", {"clip_high_threshold": 1.28}, "rollout"),
}
PAIRS = list(itertools.product(LOSSES, AGGREGATIONS))


def weights_of(mask: np.ndarray, aggregation: str) -> np.ndarray:
    """Weights of rows that are one episode and one group each."""
    rows, n = mask.shape[0], mask.shape[1] + 1
    lead = np.concatenate([np.zeros((rows, 1), bool), mask.astype(bool)], axis=1)
    zeros = np.zeros(n, np.float32)
    data = [Datum(np.zeros(n, np.int32), lead[i], zeros, zeros, np.zeros(n, np.int32), i, i) for i in range(rows)]
    return np.stack(token_weights(data, aggregation, constant=constant_of(aggregation)))[:, 1:]


@functools.cache
def compiled(name: str, knobs: tuple[tuple[str, float], ...]) -> Any:
    loss = make_loss(name, dict(knobs))

    def total(x: jax.Array, q: jax.Array, advantage: jax.Array, mask: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(weight * loss(TokenInputs(x, q, advantage, mask)).loss)

    return jax.jit(jax.value_and_grad(total))


def value_and_grad(
    name: str, x: Any, q: Any, advantage: Any, mask: Any, weight: Any, knobs: Mapping[str, float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted loss and its gradient with respect to x, in the dtype of the weights."""
    x, q, advantage = (jnp.asarray(a, weight.dtype) for a in (x, q, advantage))
    run = compiled(name, tuple((knobs or {}).items()))
    value, grad = run(x, q, advantage, jnp.asarray(np.asarray(mask, bool)), jnp.asarray(weight))
    return np.asarray(value), np.asarray(grad)


@pytest.mark.parametrize("case", IMPLEMENTED)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_golden(case: str, dtype: str) -> None:
    name, knobs, sampler = IMPLEMENTED[case]
    c = CASES[case]
    mask = np.array(c["mask"])
    weight = weights_of(mask, c["params"]["aggregation"]).astype(dtype)
    assert c["params"].get("L_max") == constant_of(c["params"]["aggregation"])
    wide = jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()
    with wide:
        x, q, a = (c[k] for k in ("logprobs_new", f"logprobs_{sampler}", "advantages"))
        value, grad = value_and_grad(name, x, q, a, mask, weight, knobs)
        assert str(grad.dtype) == dtype
    tolerance = 1e-6 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(value, c["expected_loss"], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(grad, c["expected_grad"], atol=tolerance, rtol=tolerance)
    assert (grad[mask == 0] == 0).all()


def random_rows(seed: int, rows: int = 3, width: int = 5) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    x, q = rng.normal(-2, 1, (2, rows, width)).astype(np.float32)
    a = np.repeat(rng.normal(0, 1, (rows, 1)), width, 1).astype(np.float32)
    return x, q, a, rng.random((rows, width)) < 0.6


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
def test_I4_poison_at_masked_tokens_changes_nothing(name: str, aggregation: str, poison: float) -> None:
    x, q, a, mask = random_rows(0)
    weight = weights_of(mask, aggregation).astype(np.float32)
    clean = value_and_grad(name, x, q, a, mask, weight)
    dirty = (np.where(mask, y, poison).astype(np.float32) for y in (x, q, a))
    value, grad = value_and_grad(name, *dirty, mask, weight)
    np.testing.assert_array_equal(value, clean[0])
    np.testing.assert_array_equal(grad, clean[1])
    assert (grad[~mask] == 0).all()
    assert np.isfinite(grad).all()
    assert (grad[mask] != 0).any()


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
def test_I4_a_batch_without_trained_tokens_is_zero(name: str, aggregation: str) -> None:
    x, q, a, _ = random_rows(1)
    mask = np.zeros(x.shape, bool)
    value, grad = value_and_grad(name, x * np.nan, q, a, mask, weights_of(mask, aggregation).astype(np.float32))
    assert value == 0
    assert (grad == 0).all()


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
def test_I5_padding_order_and_split_do_not_matter(name: str, aggregation: str) -> None:
    """Value and gradient: wider rows, more rows, permuted rows, and rows one at a time under the batch's weights."""
    x, q, a, mask = random_rows(2)
    weight = weights_of(mask, aggregation).astype(np.float32)
    value, grad = value_and_grad(name, x, q, a, mask, weight)

    pad = lambda y: np.pad(y, [(0, 2), (0, 3)], constant_values=7 if y.dtype != bool else 0)  # noqa: E731
    padded = [pad(y) for y in (x, q, a, mask)]
    v, g = value_and_grad(name, *padded, weights_of(padded[3], aggregation).astype(np.float32))
    np.testing.assert_allclose(v, value, rtol=1e-6)
    np.testing.assert_allclose(g[:3, :5], grad, rtol=1e-6)

    order = np.array([2, 0, 1])
    moved = [y[order] for y in (x, q, a, mask)]
    v, g = value_and_grad(name, *moved, weights_of(moved[3], aggregation).astype(np.float32))
    np.testing.assert_allclose(v, value, rtol=1e-6)
    np.testing.assert_allclose(g, grad[order], rtol=1e-6)

    parts = [value_and_grad(name, *(y[i : i + 1] for y in (x, q, a, mask, weight))) for i in range(3)]
    np.testing.assert_allclose(sum(p[0] for p in parts), value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), grad, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_jit_equals_eager(name: str) -> None:
    x, q, a, mask = map(jnp.asarray, random_rows(3))
    loss = make_loss(name)
    eager, jitted = loss(TokenInputs(x, q, a, mask)), jax.jit(loss)(TokenInputs(x, q, a, mask))
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-6), eager, jitted)


@pytest.mark.parametrize("name", [n for n in LOSSES if LOSSES[n].sampled])
def test_on_policy_every_gradient_is_reinforce(name: str) -> None:
    x, _, a, mask = random_rows(4)
    weight = weights_of(mask, "token_mean").astype(np.float32)
    _, grad = value_and_grad(name, x, x, a, mask, weight)
    np.testing.assert_allclose(grad, np.where(mask, -weight * a, 0), rtol=1e-6)
    metrics = make_loss(name)(TokenInputs(*map(jnp.asarray, (x, x, a, mask)))).metrics
    for values in metrics.values():
        np.testing.assert_array_equal(values, 0)


@given(seed=st.integers(0, 10_000), name=st.sampled_from([n for n in LOSSES if LOSSES[n].sampled]))
def test_gradient_is_linear_in_the_advantage(seed: int, name: str) -> None:
    x, q, a, mask = random_rows(seed)
    weight = weights_of(mask, "token_sum").astype(np.float32)
    _, grad = value_and_grad(name, x, q, a, mask, weight)
    _, twice = value_and_grad(name, x, q, 2 * a, mask, weight)
    np.testing.assert_allclose(twice, 2 * grad, rtol=1e-5)
    _, none = value_and_grad(name, x, q, 0 * a, mask, weight)
    np.testing.assert_array_equal(none, 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ppo_table_of_ratios(advantage: float) -> None:
    """Ratio to (value, coefficient), against the definition of the clipped objective."""
    ratios = np.array([0.01, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0, 1e30, np.inf], np.float32)
    x, q = np.log(ratios), np.zeros_like(ratios)
    a, mask = np.full_like(ratios, advantage), np.ones(ratios.shape, bool)
    out = make_loss("ppo")(TokenInputs(*map(jnp.asarray, (x, q, a, mask))))
    clipped = (ratios > 1.2) if advantage > 0 else (ratios < 0.8)
    np.testing.assert_array_equal(out.metrics["clip_fraction"], clipped)
    expected = -np.minimum(ratios * advantage, np.clip(ratios, 0.8, 1.2) * advantage)
    np.testing.assert_allclose(out.loss, expected, rtol=1e-5)
    _, grad = value_and_grad("ppo", x, q, a, mask, np.ones_like(ratios))
    np.testing.assert_allclose(grad[clipped], 0)
    finite = ~clipped & np.isfinite(ratios)
    np.testing.assert_allclose(grad[finite], -ratios[finite] * advantage, rtol=1e-5)


def test_mismatch_metrics() -> None:
    x, q = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
    metrics = make_loss("importance_sampling")(TokenInputs(x, q, jnp.ones(2), jnp.array([True, True]))).metrics
    np.testing.assert_allclose(metrics["kl_sample_train_v1"], [-0.5, 1.0])
    np.testing.assert_allclose(metrics["kl_sample_train_v2"], [0.125, 0.5])
    assert "kl_sample_train_v1" not in make_loss("cross_entropy")(TokenInputs(x, q, x, jnp.array([True, True]))).metrics


def test_I12_errors_teach() -> None:
    with pytest.raises(ValueError, match="did you mean importance_sampling"):
        make_loss("importance_samplng")
    with pytest.raises(ValueError, match="nearest names are clip_high_threshold"):
        make_loss("ppo", {"clip_hi_threshold": 1.2})
    with pytest.raises(ValueError, match=r"no effect on loss 'reinforce'; it belongs to ppo"):
        make_loss("reinforce", {"clip_low_threshold": 0.8})
    with pytest.raises(ValueError, match=r"absolute bounds .* write 0.8 and 1.2"):
        make_loss("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2})
    with pytest.raises(ValueError, match="not a finite number"):
        make_loss("ppo", {"clip_high_threshold": float("nan")})


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_exists(name: str) -> None:
    row = VARIANTS[name]
    assert row.advantage in ADVANTAGES
    assert row.aggregation in AGGREGATIONS
    assert row.kl is None
    make_loss(row.loss, row.loss_fn_config)
