"""A model small enough to compile in a second, and what an independent pass over its whole sequences says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import forward, spec
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import LoraConfig, lora_specs
from jaxrl.runtime.engine import Weights

VOCAB = 300
LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
MODEL = ModelConfig(
    vocab_size=VOCAB, width=64, ff_width=96, layers=2, heads=4, kv_heads=2, head_width=16, max_positions=512
)
LONGEST = 192
"""Tokens of an episode here, at most."""


@dataclass(frozen=True)
class SmallPolicy:
    """A model, weights that make its distribution uneven, and log-probs by one pass over a whole sequence."""

    model: ModelConfig
    weights: Weights
    lora: LoraConfig
    logprobs: Callable[..., np.ndarray]


def random_adapter(model: ModelConfig, lora: LoraConfig, seed: int) -> Any:
    """An adapter whose B is not zero."""
    rng = np.random.default_rng(seed + 1)
    adapter = spec.init(lora_specs(model, lora), jnp.float32, seed=seed)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape, np.float32)), adapter)


@pytest.fixture(scope="session")
def policy() -> SmallPolicy:
    """Base weights scaled up (a random model is nearly uniform, which would hide errors) and a random adapter."""
    params = spec.init(spec.param_specs(MODEL), jnp.float32, seed=0)
    params["lm_head"] = 3.0 * params["lm_head"]

    @partial(jax.jit, static_argnames="scale")
    def distribution(weights: Weights, tokens: jax.Array, length: jax.Array, scale: float) -> jax.Array:
        positions = jnp.arange(tokens.shape[0])[None]
        hidden = forward.hidden_states(
            weights.params,
            weights.adapter,
            tokens[None],
            positions,
            (positions < length).astype(jnp.int32),
            config=MODEL,
            lora_scale=scale,
        )
        return forward.logits(weights.params, hidden, MODEL)[0]

    def logprobs(weights: Weights, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Log-prob of tokens[1:], each given all before it, [N - 1]."""
        padded = np.zeros(LONGEST, np.int32)
        padded[: len(tokens)] = tokens
        logits = distribution(weights, padded, np.int32(len(tokens)), LORA.scale)
        rows = np.asarray(logits, np.float64)[: len(tokens) - 1] / temperature
        return rows[np.arange(len(rows)), tokens[1:]] - np.logaddexp.reduce(rows, axis=-1)

    return SmallPolicy(MODEL, Weights(params, random_adapter(MODEL, LORA, 1)), LORA, logprobs)
