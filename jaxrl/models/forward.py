"""The decoder as pure functions: embed, block, head, and the whole-sequence pass the trainer uses.

`block` is the one definition of a layer. What it attends to is the caller's business: it hands q, k, v to an
`attend` function and gets the mixed values back, so the trainer (packed rows), prefill and decoding (cached
segments) run the same mathematics on the same parameters. Knows nothing of losses, tokens' meaning or caches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl.models.attention import causal_mask, merge, part
from jaxrl.models.config import ModelConfig, rope_frequencies
from jaxrl.models.linear import accumulator, matmul_wide
from jaxrl.models.lora import linear
from jaxrl.models.spec import Params

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [B,T,H,C], k [B,T,K,C], v [B,T,K,C]) -> mixed values [B, T, H*C]."""

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}

_NO_WINDOW = np.iinfo(np.int32).max


def rms_norm(x: Float[Array, "*rows M"], gain: Float[Array, " M"], eps: float) -> Float[Array, "*rows M"]:
    """Root-mean-square normalisation in float32, back in the dtype of x (Zhang & Sennrich, arXiv 1910.07467)."""
    wide = x.astype(accumulator(x.dtype))
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * gain.astype(x.dtype)


def rotate(x_BTHC: Float[Array, "B T H C"], positions_BT: Int[Array, "B T"], config: ModelConfig) -> jax.Array:
    """Rotary position embedding, halves convention of the Hugging Face checkpoints. Angles in float32."""
    angles = positions_BT[..., None].astype(jnp.float32) * rope_frequencies(config)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    wide = x_BTHC.astype(accumulator(x_BTHC.dtype))
    a, b = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHC.dtype)


def embed(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
    """Token embeddings in the dtype of the weights."""
    return params["embed"][tokens]


def block(
    x_BTM: Float[Array, "B T M"],
    layer: Params,
    adapter: Any,
    positions_BT: Int[Array, "B T"],
    attend: Attend,
    *,
    config: ModelConfig,
    lora_scale: float,
) -> Float[Array, "B T M"]:
    """One decoder layer. `adapter` is this layer's slice of a LoRA adapter, or None."""

    def project(x: jax.Array, name: str) -> jax.Array:
        return linear(x, layer, adapter, name, lora_scale)

    def heads(x: jax.Array, count: int) -> jax.Array:
        return x.reshape(*x.shape[:2], count, config.head_width)

    h = rms_norm(x_BTM, layer["input_norm"], config.norm_eps)
    q = heads(project(h, "q_proj"), config.heads)
    k = heads(project(h, "k_proj"), config.kv_heads)
    v = heads(project(h, "v_proj"), config.kv_heads)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.norm_eps)
        k = rms_norm(k, layer["k_norm"], config.norm_eps)
    mixed = attend(rotate(q, positions_BT, config), rotate(k, positions_BT, config), v)
    x_BTM = x_BTM + project(mixed.astype(x_BTM.dtype), "o_proj")

    h = rms_norm(x_BTM, layer["post_norm"], config.norm_eps)
    gated = _ACTIVATIONS[config.activation](project(h, "gate_proj")) * project(h, "up_proj")
    return x_BTM + project(gated, "down_proj")


def head_matrix(params: Params) -> Float[Array, "M V"]:
    """The output projection, which is the transposed embedding when they are tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"].T


def logits(params: Params, hidden: Float[Array, "*rows M"], config: ModelConfig) -> Float[Array, "*rows V"]:
    """Final norm and output projection, float32."""
    return matmul_wide(rms_norm(hidden, params["final_norm"], config.norm_eps), head_matrix(params))


def stack_layers(params: Params) -> Params:
    """The layers as one dict of arrays with a leading L, for `lax.scan`. One transient copy of the weights."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])


def hidden_states(
    params: Params,
    adapter: Any,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"],
    *,
    config: ModelConfig,
    lora_scale: float = 1.0,
    remat: bool = True,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Float[Array, "B T M"]:
    """Hidden states before the final norm of packed rows: causal within each segment, scanned over layers.

    positions_BT count from 0 in each segment; segments_BT is 1, 2, ... and 0 for padding. `remat` recomputes a
    layer in the backward pass. `constrain` pins the sharding of activations.
    """
    windows = jnp.array([_NO_WINDOW if w is None else w for w in config.layer_windows], jnp.int32)
    windowed = any(w is not None for w in config.layer_windows)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array) -> jax.Array:
        mask = causal_mask(positions_BT, segments_BT, window if windowed else None)
        return merge([part(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask)])

    def step(x: jax.Array, xs: tuple[Params, Any, jax.Array]) -> tuple[jax.Array, None]:
        layer, layer_adapter, window = xs
        x = block(
            x,
            layer,
            layer_adapter,
            positions_BT,
            lambda q, k, v: attend(q, k, v, window),
            config=config,
            lora_scale=lora_scale,
        )
        return constrain(x), None

    body = jax.checkpoint(step) if remat else step
    x = constrain(embed(params, tokens_BT))
    return lax.scan(body, x, (stack_layers(params), adapter, windows))[0]
