"""What several model tests share: the committed checkpoints, our logits, and a small random model."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from make_fixtures import CASES, FIXTURES

from jaxrl.models.config import ModelConfig
from jaxrl.models.forward import hidden_states, logits
from jaxrl.models.lora import LoraConfig, lora_specs
from jaxrl.models.spec import ParamSpec, param_specs

NAMES = sorted(CASES)


def folder(name: str) -> Path:
    """The checkpoint directory of a case."""
    return FIXTURES / name


def expected(name: str) -> dict[str, np.ndarray]:
    """tokens [2, 24], logits [2, 24, V], inv_freq [C/2] of a case, from transformers."""
    with np.load(FIXTURES / name / "expected.npz") as file:
        return dict(file)


def our_logits(
    config: ModelConfig,
    params: Any,
    tokens: Any,
    positions: Any = None,
    segments: Any = None,
    adapter: Any = None,
    **kw,
) -> np.ndarray:
    """Logits [B, T, V] of rows that are one sequence each, unless positions and segments say otherwise."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(tokens.shape[1])[None].repeat(len(tokens), 0) if positions is None else positions
    segments = jnp.ones_like(tokens) if segments is None else segments

    def run(*args: Any) -> jax.Array:
        return logits(args[0], hidden_states(*args, config=config, **kw), config)

    return np.asarray(jax.jit(run)(params, adapter, tokens, jnp.asarray(positions), jnp.asarray(segments)))


def random_params(config: ModelConfig, dtype: Any = jnp.float32, seed: int = 0) -> Any:
    """Parameters that are all random, norms and biases too."""
    rng = np.random.default_rng(seed)

    def value(spec: ParamSpec) -> jax.Array:
        noise = rng.standard_normal(spec.shape, np.float32)
        return jnp.asarray(noise * spec.scale if spec.scale else 0.2 * noise + (spec.scale is None), dtype)

    return jax.tree.map(value, param_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec))


def random_adapter(config: ModelConfig, lora: LoraConfig, seed: int = 3) -> Any:
    """An adapter whose B is random too, so that it changes something."""
    rng = np.random.default_rng(seed)

    def value(spec: ParamSpec) -> jax.Array:
        return jnp.asarray((spec.scale or 0.1) * rng.standard_normal(spec.shape, np.float32))

    return jax.tree.map(value, lora_specs(config, lora), is_leaf=lambda x: isinstance(x, ParamSpec))
