"""A tiny model, ragged data, and the compiled functions that several files share."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algo.aggregate import token_weights
from jaxrl.algo.batch import Batch, pack
from jaxrl.algo.loss import make_loss
from jaxrl.algo.step import Gradients, make_gradients
from jaxrl.models import spec
from jaxrl.models.config import ModelConfig, tiny
from jaxrl.models.lora import LoraConfig, lora_specs
from jaxrl.types import Datum

VOCAB = 96
CHUNK = 8
WIDTH, ROWS = 32, 4


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    return tiny(VOCAB, layers=2, width=64)


@pytest.fixture(scope="session")
def lora() -> LoraConfig:
    return LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))


@pytest.fixture(scope="session")
def base(model: ModelConfig) -> spec.Params:
    return spec.init(spec.param_specs(model), jnp.dtype(jnp.float32), key=jax.random.key(0))


@pytest.fixture(scope="session")
def adapter(model: ModelConfig, lora: LoraConfig) -> dict:
    """An adapter that does something: B is not zero."""
    fresh = spec.init(lora_specs(model, lora), jnp.dtype(jnp.float32), key=jax.random.key(1))
    noise = jax.random.key(2)
    return {k: {"a": ab["a"], "b": 0.3 * jax.random.normal(noise, ab["b"].shape)} for k, ab in fresh.items()}


def datum(rng: np.random.Generator, length: int, group: int = 0, episode: int = 0) -> Datum:
    """Random tokens, a random mask that leaves the first token out, plausible log-probs and advantages."""
    mask = rng.random(length) < 0.6
    mask[0] = False
    return Datum(
        tokens=rng.integers(0, VOCAB, length).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, rng.normal(-4.5, 0.3, length), 0.0).astype(np.float32),
        advantages=np.where(mask, rng.normal(0.0, 1.0), 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        group=group,
        episode=episode,
    )


@pytest.fixture(scope="session")
def data_D() -> list[Datum]:
    """Seven ragged datums in three groups and six episodes; the last two are one episode that split."""
    rng = np.random.default_rng(0)
    layout = [(5, 0, 0), (19, 0, 1), (33, 1, 2), (12, 1, 3), (26, 2, 4), (15, 2, 5), (9, 2, 5)]
    return [datum(rng, *x) for x in layout]


def packed(data: Sequence[Datum], aggregation: str = "seq_mean_token_mean", **shape: int) -> Batch:
    constant = 16.0 if aggregation == "seq_mean_token_sum_norm" else None
    weights = token_weights(data, aggregation, constant=constant)
    return pack(data, weights, **({"width": WIDTH, "rows": ROWS} | shape))


@pytest.fixture(scope="session")
def gradients(model: ModelConfig, lora: LoraConfig) -> Callable[[str], Gradients]:
    """Compiled gradient functions under LoRA, one a loss, shared by all tests."""
    return functools.cache(lambda name: make_gradients(model, lora, make_loss(name), temperature=0.8, head_chunk=CHUNK))


def assert_trees_close(a: object, b: object, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Equal up to rounding, relative to the largest entry of each leaf."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=max(atol, rtol * float(np.abs(y).max(initial=0.0))))
