"""Schedules by hand, AdamW by hand, and knobs that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.optimizer import OptimizerConfig, make_schedule, make_transform


def rates(config: OptimizerConfig, steps: int) -> list[float]:
    return [float(make_schedule(config)(jnp.int32(s))) for s in range(steps)]


def test_schedules_by_hand() -> None:
    np.testing.assert_allclose(rates(OptimizerConfig(1.0), 3), [1, 1, 1])
    np.testing.assert_allclose(rates(OptimizerConfig(1.0, warmup_steps=4), 6), [0.25, 0.5, 0.75, 1, 1, 1])
    linear = OptimizerConfig(2.0, "linear", total_steps=4, final_fraction=0.5)
    np.testing.assert_allclose(rates(linear, 6), [2, 1.75, 1.5, 1.25, 1, 1])
    cosine = OptimizerConfig(1.0, "cosine", warmup_steps=1, total_steps=5)
    half = 0.5**0.5 / 2
    np.testing.assert_allclose(rates(cosine, 7), [1, 1, 0.5 + half, 0.5, 0.5 - half, 0, 0], atol=1e-7)


@given(st.sampled_from(["linear", "cosine"]), st.integers(0, 10), st.integers(1, 20), st.floats(0, 1))
def test_schedule_climbs_then_falls_within_bounds(schedule: str, warmup: int, decay: int, floor: float) -> None:
    config = OptimizerConfig(1.0, schedule, warmup_steps=warmup, total_steps=warmup + decay, final_fraction=floor)
    rate = np.asarray(make_schedule(config)(jnp.arange(40)))
    assert (rate >= 0).all()
    assert rate[0] > 0
    assert (np.diff(rate[: warmup + 1]) >= -1e-6).all()
    assert (np.diff(rate[warmup:]) <= 1e-6).all()
    np.testing.assert_allclose(rate[-1], floor, atol=1e-6)


def test_adamw_and_clipping_by_hand() -> None:
    config = OptimizerConfig(weight_decay=0.1, max_grad_norm=1.0)
    transform = make_transform(config)
    params = {"w": jnp.full((1, 2), 2.0), "norm": jnp.array([2.0])}
    grads = {"w": jnp.array([[3.0, 0.0]]), "norm": jnp.array([4.0])}  # norm 5
    state = transform.init(params)
    direction, state = transform.update(grads, state, params)
    np.testing.assert_allclose(direction["w"], [[1.2, 0.2]], rtol=1e-5)  # sign of the gradient, plus 0.1 of the weight
    np.testing.assert_allclose(direction["norm"], [1.0], rtol=1e-5)  # vectors are not decayed
    direction, _ = transform.update(jax.tree.map(lambda g: -g, grads), state, params)
    mean = (0.1 * 0.8 * 0.9 - 0.1 * 0.8) / (1 - 0.81)
    square = (0.05 * 0.64 * 0.95 + 0.05 * 0.64) / (1 - 0.95**2)
    np.testing.assert_allclose(direction["norm"], [mean / square**0.5], rtol=1e-4)


def test_no_clipping() -> None:
    config = OptimizerConfig(max_grad_norm=None, b1=0.0, b2=0.0, eps=1.0)
    transform = make_transform(config)
    direction, _ = transform.update(jnp.array([3.0]), transform.init(jnp.zeros(1)), jnp.zeros(1))
    np.testing.assert_allclose(direction, [3 / 4])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"schedule": "cosin"}, "expected one of constant, linear, cosine"),
        ({"total_steps": 5}, "has no effect on schedule='constant'"),
        ({"final_fraction": 0.1}, "has no effect on schedule='constant'"),
        ({"schedule": "linear", "total_steps": 0}, "must lie after it"),
        ({"schedule": "cosine", "total_steps": 5, "warmup_steps": 5}, "must lie after it"),
        ({"schedule": "linear", "total_steps": 5, "final_fraction": 1.5}, r"in \[0, 1\]"),
        ({"warmup_steps": -1}, "at least 0"),
        ({"b1": 1.0}, r"in \[0, 1\)"),
        ({"learning_rate": float("nan")}, "finite number"),
        ({"eps": 0.0}, "divides by zero"),
        ({"max_grad_norm": 0.0}, "None for no clipping"),
    ],
)
def test_I12_errors_teach(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**knobs)


def test_a_decay_needs_its_end() -> None:
    with pytest.raises(ValueError, match="decays until total_steps, which must be given"):
        make_schedule(OptimizerConfig(schedule="cosine"))
