"""Low-rank adapters as a pytree beside the frozen base (Hu et al. 2021, arXiv 2106.09685).

An adapter is {target: {"a": [L, in, R], "b": [L, R, out]}} in float32, stacked over layers (small, so one
optimizer leaf a matrix and no copy worth counting). It is applied unmerged inside the same forward pass,
`y = x W + (alpha / rank) (x A) B`, by the trainer and the sampler alike, so publishing new weights copies
nothing and the reference policy is the same base with no adapter.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.config import ModelConfig
from jaxrl.models.linear import matmul
from jaxrl.models.spec import Params, ParamSpec, layer_specs
from jaxrl.settings import above_zero, at_least

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Adapter = dict[str, dict[str, jax.Array]]


@dataclass(frozen=True)
class LoraConfig:
    """Which matrices get an adapter, of what rank, scaled by alpha / rank."""

    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        at_least("lora.rank", self.rank, 1)  # to train all weights give no LoRA at all
        above_zero("lora.alpha", self.alpha)
        unknown = [t for t in self.targets if t not in TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"lora targets={self.targets}: expected one or more of {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def lora_specs(model: ModelConfig, lora: LoraConfig) -> dict[str, dict[str, ParamSpec]]:
    """Specs of an adapter: A uniform in variance, B zero, so that a new adapter changes nothing."""
    layer = layer_specs(model)
    specs = {}
    for name in lora.targets:
        (i, o), (axis_in, axis_out) = layer[name].shape, layer[name].axes
        a = ParamSpec((model.layers, i, lora.rank), ("layers", axis_in, None), i**-0.5)
        b = ParamSpec((model.layers, lora.rank, o), ("layers", None, axis_out), 0.0)
        specs[name] = {"a": a, "b": b}
    return specs


def linear(x: jax.Array, layer: Params, adapter: Any, name: str, scale: float) -> jax.Array:
    """`x` through projection `name` of one layer: base, adapter if it has one, bias if it has one.

    x: [..., in]. adapter: {name: {"a": [in, R], "b": [R, out]}} of this layer, or None.
    """
    y = matmul(x, layer[name])
    if adapter is not None and name in adapter:
        a, b = adapter[name]["a"].astype(x.dtype), adapter[name]["b"].astype(x.dtype)
        y = y + scale * matmul(matmul(x, a), b)
    bias = layer.get(f"{name}_bias")
    return y if bias is None else y + bias.astype(y.dtype)


def at_layer(adapter: Any, index: int) -> Any:
    """The adapter of one layer (None stays None)."""
    return jax.tree.map(lambda x: x[index], adapter)


def merge(params: Params, adapter: Adapter, lora: LoraConfig) -> Params:
    """The base with the adapter added in, for export. The sum is taken in float32, then cast back."""

    def merged(layer: Params, index: int) -> Params:
        out = dict(layer)
        for name, ab in adapter.items():
            delta = lora.scale * (ab["a"][index] @ ab["b"][index])
            out[name] = (layer[name].astype(jnp.float32) + delta).astype(layer[name].dtype)
        return out

    return params | {"layers": tuple(merged(layer, i) for i, layer in enumerate(params["layers"]))}
