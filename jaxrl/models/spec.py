"""One tree of parameter specs, from which shapes, dtypes, shardings and initial values are read.

A parameter tree is nested dicts, with `layers` a tuple of one dict per layer: decoding unrolls over it without
copying (slices of a stacked array are materialised by XLA:CPU: measured, twice the time and a second copy of
the weights), and training stacks it inside the step (`forward.stack_layers`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl.models.config import ModelConfig

Params = dict[str, Any]


class ParamSpec(NamedTuple):
    """Shape, logical axis of each dimension (see `sharding.py`), and standard deviation at birth.

    `scale` is None for a parameter that starts at one (a norm gain), 0.0 for one that starts at zero.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    scale: float | None


def _is_spec(x: object) -> bool:
    return isinstance(x, ParamSpec)


def layer_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Specs of one decoder layer. Matrices are stored [in, out]."""
    m, f, c = config.width, config.ff_width, config.head_width
    q, kv = config.heads * c, config.kv_width
    deep = (2 * config.layers) ** -0.5  # residual branches start small (GPT-2)
    specs = {
        "input_norm": ParamSpec((m,), ("embed",), None),
        "q_proj": ParamSpec((m, q), ("embed", "heads"), m**-0.5),
        "k_proj": ParamSpec((m, kv), ("embed", "kv_heads"), m**-0.5),
        "v_proj": ParamSpec((m, kv), ("embed", "kv_heads"), m**-0.5),
        "o_proj": ParamSpec((q, m), ("heads", "embed"), deep * q**-0.5),
        "post_norm": ParamSpec((m,), ("embed",), None),
        "gate_proj": ParamSpec((m, f), ("embed", "mlp"), m**-0.5),
        "up_proj": ParamSpec((m, f), ("embed", "mlp"), m**-0.5),
        "down_proj": ParamSpec((f, m), ("mlp", "embed"), deep * f**-0.5),
    }
    biased = {
        "q_proj": config.qkv_bias,
        "k_proj": config.qkv_bias,
        "v_proj": config.qkv_bias,
        "o_proj": config.out_bias,
        "gate_proj": config.mlp_bias,
        "up_proj": config.mlp_bias,
        "down_proj": config.mlp_bias,
    }
    for name, on in biased.items():
        if on:
            weight = specs[name]
            specs[f"{name}_bias"] = ParamSpec(weight.shape[1:], weight.axes[1:], 0.0)
    if config.qk_norm:
        specs["q_norm"] = ParamSpec((c,), (None,), None)
        specs["k_norm"] = ParamSpec((c,), (None,), None)
    return specs


def param_specs(config: ModelConfig) -> Params:
    """The spec tree of the whole model."""
    v, m = config.vocab_size, config.width
    specs: Params = {
        "embed": ParamSpec((v, m), ("vocab", "embed"), m**-0.5 if config.tie_embeddings else 1.0),
        "layers": tuple(layer_specs(config) for _ in range(config.layers)),
        "final_norm": ParamSpec((m,), ("embed",), None),
    }
    if not config.tie_embeddings:
        specs["lm_head"] = ParamSpec((m, v), ("embed", "vocab"), m**-0.5)
    return specs


def abstract(specs: Any, dtype: DTypeLike) -> Any:
    """The same tree as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs, is_leaf=_is_spec)


def logical_axes(specs: Any) -> Any:
    """The same tree as tuples of logical axis names."""
    return jax.tree.map(lambda s: s.axes, specs, is_leaf=_is_spec)


def init(specs: Any, dtype: DTypeLike, *, seed: int | Sequence[int]) -> Any:
    """Random values for a spec tree; a leaf's values depend on `seed` and the leaf's place in the tree.

    Drawn on the host by numpy: compiling one random program per shape took longer than training a tiny model's
    first steps, and a host array can be placed shard by shard.
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=_is_spec)
    seeds = np.random.SeedSequence(seed).spawn(len(leaves))
    return treedef.unflatten(
        [_init_leaf(spec, dtype, np.random.default_rng(s)) for spec, s in zip(leaves, seeds, strict=True)]
    )


def _init_leaf(spec: ParamSpec, dtype: DTypeLike, rng: np.random.Generator) -> jax.Array:
    if spec.scale is None:
        return jnp.ones(spec.shape, dtype)
    if spec.scale == 0.0:
        return jnp.zeros(spec.shape, dtype)
    return jnp.asarray(np.float32(spec.scale) * rng.standard_normal(spec.shape, np.float32), dtype)


def count(specs: Any) -> int:
    """Number of parameters."""
    return sum(int(jnp.prod(jnp.array(s.shape))) for s in jax.tree.leaves(specs, is_leaf=_is_spec))
