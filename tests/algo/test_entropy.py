"""The entropy bonus: how its coefficient goes, and that a step adds it to the loss."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algo_cases import CHUNK, TEMPERATURE, assert_trees_close, packed
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.entropy import EntropyBonus, adaptive, fixed
from jaxrl.algo.loss import make_loss
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.step import init_state, make_gradients, make_train_step
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import Adapter, LoraConfig
from jaxrl.types import Datum


def test_an_adaptive_coefficient_by_hand() -> None:
    bonus = adaptive(entropy_coef=0.01, entropy_target=1.0, entropy_rate=0.004, entropy_coef_max=0.015)
    coef, seen = jnp.float32(bonus.start), []
    for entropy in (0.5, 0.5, 2.0, 2.0, 2.0, 2.0, 2.0, 0.9):
        coef = bonus.step(coef, jnp.float32(entropy))
        seen.append(float(coef))
    np.testing.assert_allclose(seen, [0.014, 0.015, 0.011, 0.007, 0.003, 0.0, 0.0, 0.004], atol=1e-7)


@given(st.floats(0, 1), st.floats(0, 5), st.floats(0, 0.1))
def test_a_coefficient_stays_in_its_range(coef: float, entropy: float, most: float) -> None:
    after = float(adaptive(entropy_coef_max=most).step(jnp.float32(coef), jnp.float32(entropy)))
    assert 0 <= after <= np.float32(most)
    assert float(fixed(entropy_coef=coef).step(jnp.float32(coef), jnp.float32(entropy))) == np.float32(coef)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_a_step_adds_the_bonus_under_the_weights_of_the_loss(
    aggregation: str, model: ModelConfig, lora: LoraConfig, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    """With advantages of 0 the gradient is the bonus alone, linear in the coefficient; so is the loss's difference."""
    silent = packed([replace(d, advantages=0 * d.advantages) for d in data_D], aggregation)
    run = lambda bonus: make_gradients(  # noqa: E731
        model, lora, make_loss("ppo"), temperature=TEMPERATURE, head_chunk=CHUNK, entropy=bonus
    )(adapter, base, silent)
    (none, plain), (once, metrics), (twice, _) = run(None), run(fixed(entropy_coef=0.1)), run(fixed(entropy_coef=0.2))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(none))
    assert_trees_close(twice, jax.tree.map(lambda x: 2 * x, once))
    if aggregation == "token_mean":
        np.testing.assert_allclose(metrics["optim/loss"], -0.1 * plain["optim/entropy"], rtol=1e-5)


def test_the_coefficient_is_part_of_the_state(
    model: ModelConfig, lora: LoraConfig, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    bonus = EntropyBonus(0.5, lambda coef, entropy: coef + entropy)
    optimizer = OptimizerConfig(1e-3)
    step = make_train_step(
        model, lora, make_loss("ppo"), optimizer, temperature=TEMPERATURE, head_chunk=CHUNK, entropy=bonus
    )
    state, metrics = step(init_state(optimizer, adapter, entropy=bonus), base, packed(data_D))
    assert float(metrics["optim/entropy_coef"]) == 0.5
    np.testing.assert_allclose(state.entropy_coef, 0.5 + metrics["optim/entropy"], rtol=1e-6)
    after, metrics = step(state, base, packed([]))
    np.testing.assert_array_equal(after.entropy_coef, metrics["optim/entropy_coef"])  # a step of nothing says nothing
