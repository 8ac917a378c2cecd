"""A tiny model, ragged data, and the compiled functions that several files share."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from algo_cases import CHUNK, STEP_LOSSES, TEMPERATURE, VOCAB, ragged

from jaxrl.algo.step import Gradients, make_gradients
from jaxrl.models import spec
from jaxrl.models.config import ModelConfig, tiny
from jaxrl.models.lora import Adapter, LoraConfig, lora_specs
from jaxrl.types import Datum

FLOAT32 = jnp.dtype(jnp.float32)


@pytest.fixture(scope="session")
def model() -> ModelConfig:
    return tiny(VOCAB, layers=2, width=64)


@pytest.fixture(scope="session")
def lora() -> LoraConfig:
    return LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))


@pytest.fixture(scope="session")
def base(model: ModelConfig) -> spec.Params:
    return spec.init(spec.param_specs(model), FLOAT32, seed=0)


@pytest.fixture(scope="session")
def adapter(model: ModelConfig, lora: LoraConfig) -> Adapter:
    """An adapter that does something: B is not zero."""
    fresh = spec.init(lora_specs(model, lora), FLOAT32, seed=1)
    rng = np.random.default_rng(2)
    noise = lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape, np.float32))  # noqa: E731
    return {k: {"a": ab["a"], "b": noise(ab["b"])} for k, ab in fresh.items()}


@pytest.fixture(scope="session")
def data_D() -> list[Datum]:
    return ragged()


@pytest.fixture(scope="session")
def gradients(model: ModelConfig, lora: LoraConfig) -> Callable[[str], Gradients]:
    """Compiled gradient functions under LoRA, one a loss, shared by all tests."""
    return functools.cache(
        lambda name: make_gradients(model, lora, STEP_LOSSES[name], temperature=TEMPERATURE, head_chunk=CHUNK)
    )
