"""The chunked head: equal to the dense one in value and gradient, and never of its size."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algo_cases import TEMPERATURE, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.algo.logprob import action_logprobs, token_scores
from jaxrl.models import spec
from jaxrl.models.config import ModelConfig, tiny
from jaxrl.models.forward import logits

B, T = 3, 11


def dense(params: Any, hidden: jax.Array, targets: jax.Array, mask: jax.Array, config: ModelConfig) -> tuple:
    """The definition."""
    logp = jax.nn.log_softmax(logits(params, hidden, config) / TEMPERATURE)
    chosen = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return jnp.where(mask, chosen, 0), jnp.where(mask, entropy, 0)


@pytest.fixture(scope="module")
def inputs(model: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    h, t, g = jax.random.split(jax.random.key(7), 3)
    hidden = jax.random.normal(h, (B, T, model.width))
    return hidden, jax.random.randint(t, (B, T), 0, VOCAB), jax.random.normal(g, (2, B, T))


@functools.cache
def compiled(config: ModelConfig, chunk: int | None) -> Any:
    """(params, hidden, targets, mask, cotangents) -> (values, gradients), of the chunked or the dense head."""

    def values(params: Any, hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> tuple:
        if chunk is None:
            return dense(params, hidden, targets, mask, config)
        return action_logprobs(
            params, hidden, targets, mask, config=config, temperature=TEMPERATURE, chunk=chunk, entropy_gradient=True
        )

    def run(params: Any, hidden: jax.Array, targets: jax.Array, mask: jax.Array, cotangents: jax.Array) -> tuple:
        out, pull = jax.vjp(lambda p, h: values(p, h, targets, mask), params, hidden)
        return out, pull((cotangents[0], cotangents[1]))

    return jax.jit(run)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [4, 11, 64])
def test_equals_the_dense_head(chunk: int, tied: bool, model: ModelConfig, inputs: tuple) -> None:
    """Values, and gradients to hidden states, head matrix and final norm; at a temperature."""
    config = tiny(VOCAB, layers=1, width=64) if tied else ModelConfig(VOCAB, 64, 64, 1, 2, 1, 32, 64)
    params = spec.init(spec.param_specs(config), jnp.dtype(jnp.float32), seed=3)
    hidden, targets, cotangents = inputs
    mask = jax.random.bernoulli(jax.random.key(5), 0.5, (B, T)).at[1].set(False).at[2].set(True)
    got = compiled(config, chunk)(params, hidden, targets, mask, cotangents)
    want = compiled(config, None)(params, hidden, targets, mask, cotangents)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-5), got, want)
    assert got[0][0].dtype == jnp.float32


@settings(max_examples=25)
@given(st.lists(st.booleans(), min_size=B * T, max_size=B * T))
def test_I4_any_mask(bits: list[bool]) -> None:
    """Equal to the dense head; hidden states of untrained positions, NaN or not, get exactly zero."""
    config = tiny(VOCAB, layers=1, width=64)
    params = spec.init(spec.param_specs(config), jnp.dtype(jnp.float32), seed=3)
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(B, T, 64)).astype(np.float32)
    targets, mask = rng.integers(0, VOCAB, (B, T)).astype(np.int32), np.array(bits).reshape(B, T)
    cotangents = rng.normal(size=(2, B, T)).astype(np.float32)
    (logp, entropy), (_, dh) = compiled(config, 4)(params, hidden, targets, mask, cotangents)
    (want, want_entropy), (_, want_dh) = compiled(config, None)(params, hidden, targets, mask, cotangents)
    np.testing.assert_allclose(logp, want, atol=1e-5)
    np.testing.assert_allclose(entropy, want_entropy, atol=1e-5)
    np.testing.assert_allclose(dh, want_dh, atol=1e-5)
    assert (np.asarray(dh)[~mask] == 0).all()
    assert (np.asarray(logp)[~mask] == 0).all()


def test_entropy_gives_no_gradient_unless_asked(model: ModelConfig, base: Any, inputs: tuple) -> None:
    hidden, targets, _ = inputs
    kwargs = {"config": model, "temperature": 1.0, "chunk": 8}
    entropy = lambda h: action_logprobs(base, h, targets, jnp.ones((B, T), bool), **kwargs)[1].sum()  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(entropy))(hidden), 0)


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("frozen", [True, False])
def test_structure_no_logits_of_all_positions_and_no_gradient_of_a_frozen_head(frozen: bool) -> None:
    v, t, chunk = 4099, 512, 16
    config = ModelConfig(v, 64, 64, 1, 2, 1, 32, 1024)
    params = spec.abstract(spec.param_specs(config), jnp.dtype(jnp.float32))
    head = {"lm_head": params["lm_head"], "final_norm": params["final_norm"]}
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731

    def loss(hidden: jax.Array, head: Any, targets: jax.Array, mask: jax.Array) -> jax.Array:
        return action_logprobs(head, hidden, targets, mask, config=config, temperature=1.0, chunk=chunk)[0].sum()

    gradient = jax.jit(jax.grad(loss, argnums=0 if frozen else (0, 1)))
    shapes = array(jnp.float32, 2, t, 64), head, array(jnp.int32, 2, t), array(jnp.bool_, 2, t)
    compiled = gradient.lower(*shapes).compile()
    text = compiled.as_text()
    products = re.findall(r"= f32\[([\d,]+)\]\S* (?:dot|custom-call|convolution)\(", text)
    assert any(p in (f"{2 * chunk},{v}", f"2,{chunk},{v}") for p in products), products
    weight_gradients = [p for p in products if p in (f"64,{v}", f"{v},64")]
    assert bool(weight_gradients) != frozen, products
    assert f"[2,{t},{v}]" not in text
    assert f"[{2 * t},{v}]" not in text
    head_bytes = 4 * 64 * v
    allowed = 8 * 2 * chunk * v * 4 + (0 if frozen else 4 * head_bytes)
    assert compiled.memory_analysis().temp_size_in_bytes < allowed < 2 * t * v * 4


GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "loss_golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["other_cases"]}


def test_golden_entropy_bonus() -> None:
    """Its value and its gradient with respect to the logits, which differentiates the whole distribution."""
    case = CASES["entropy_bonus/token_mean"]
    with jax.enable_x64(True):
        z, target = jnp.array(case["logits"], jnp.float64), jnp.zeros(2, jnp.int32)
        bonus = lambda z: -case["params"]["coef"] * token_scores(z, target)[1].mean()  # noqa: E731
        value, grad = jax.value_and_grad(bonus)(z)
        np.testing.assert_allclose(token_scores(z, target)[1], case["expected_entropy"], atol=1e-9)
        np.testing.assert_allclose(value, case["expected_loss"], atol=1e-9)
        np.testing.assert_allclose(grad, case["expected_grad_logits"], atol=1e-9)


def test_golden_log_probs_at_a_temperature() -> None:
    case = CASES["temperature_and_top_p"]
    z = jnp.array(case["logits"])
    at = {t: np.array([token_scores(z / t, jnp.array(i))[0] for i in range(3)]) for t in (1.0, 0.7)}
    np.testing.assert_allclose(at[1.0], case["expected_logprobs"]["T=1"], atol=1e-6)
    np.testing.assert_allclose(at[0.7], case["expected_logprobs"]["T=0.7"], atol=1e-6)
    np.testing.assert_allclose(np.exp(at[1.0] - at[0.7]), case["expected_ratio_T1_over_T07"], atol=1e-6)


def test_golden_top_p_makes_every_ratio_the_mass_that_was_kept() -> None:
    """Why truncated samples are not trained on as if they were whole (I3)."""
    case = CASES["temperature_and_top_p"]
    z = jnp.array(case["logits"])
    kept = jnp.where(jnp.arange(3) < 2, z, -jnp.inf)
    whole, cut = (np.array([token_scores(x, jnp.array(i))[0] for i in range(2)]) for x in (z, kept))
    np.testing.assert_allclose(cut, case["expected_logprobs"]["top_p keeps tokens 0,1 (renormalised)"], atol=1e-6)
    np.testing.assert_allclose(np.exp(whole - cut), case["expected_constant_ratio_full_over_top_p"], atol=1e-6)
