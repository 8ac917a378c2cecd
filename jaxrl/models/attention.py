"""Attention as partial softmaxes that merge: one core for training, prefill and decoding.

Keys and values come in segments (the group's prompt, the episode's history, the tokens of this call). `part`
attends to one segment and returns an unnormalised output with its running maximum and sum; `merge` joins any
number of parts exactly (the online softmax of Milakov & Gimelshein 2018, arXiv 1805.02867).

Layouts, chosen for XLA:CPU and neutral elsewhere: q [B, T, H, C]; keys transposed [B, K, C, S]; values
[B, K, S, C]. Scores, maxima and sums are float32.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl.models.linear import accumulator

EMPTY = -1e30
"""The running maximum of a part that saw nothing: finite, so that differences of maxima stay finite."""


class Part(NamedTuple):
    """Attention to one segment: `out` = sum of exp(score - top) v, `total` = sum of exp(score - top)."""

    out: Float[Array, "B K G T C"]
    top: Float[Array, "B K G T"]
    total: Float[Array, "B K G T"]


def part(
    q_BTHC: Float[Array, "B T H C"],
    k_BKCS: Float[Array, "B K C S"],
    v_BKSC: Float[Array, "B K S C"],
    mask_BTS: Bool[Array, "B T S"],
) -> Part:
    """Attend to one segment. A query that may see nothing of it contributes nothing (total 0)."""
    b, t, h, c = q_BTHC.shape
    kv = k_BKCS.shape[1]
    groups = h // kv
    q = (q_BTHC * c**-0.5).reshape(b, t, kv, groups, c).transpose(0, 2, 3, 1, 4).reshape(b, kv, groups * t, c)
    scores = jnp.matmul(q, k_BKCS.astype(q.dtype), preferred_element_type=accumulator(q.dtype))
    # One select before everything else: a passed-over key costs one pass and gets no gradient.
    scores = jnp.where(mask_BTS[:, None, None], scores.reshape(b, kv, groups, t, -1), EMPTY)
    top = lax.stop_gradient(scores.max(-1))
    weights = jnp.exp(scores - top[..., None])
    flat = weights.astype(v_BKSC.dtype).reshape(b, kv, groups * t, -1)
    out = jnp.matmul(flat, v_BKSC, preferred_element_type=accumulator(q.dtype)).reshape(b, kv, groups, t, c)
    sees_BT = mask_BTS.any(-1)[:, None, None]
    return Part(jnp.where(sees_BT[..., None], out, 0.0), top, jnp.where(sees_BT, weights.sum(-1), 0.0))


def merge(parts: list[Part]) -> Float[Array, "B T X"]:
    """Join the parts into attention outputs [B, T, H*C], float32. At least one part must see something."""
    top = parts[0].top
    for p in parts[1:]:
        top = jnp.maximum(top, p.top)
    weights = [jnp.exp(p.top - top) for p in parts]
    out = sum(p.out * w[..., None] for p, w in zip(parts, weights, strict=True))
    total = sum(p.total * w for p, w in zip(parts, weights, strict=True))
    out = out / jnp.maximum(total, 1e-30)[..., None]
    b, kv, groups, t, c = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, kv * groups * c)


def causal_mask(
    positions_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"], window: Int[Array, ""] | int | None
) -> Bool[Array, "B T T"]:
    """Which keys a query sees in packed rows: same segment, not later, and within the window. Segment 0 is padding.

    A padding query sees itself, so that no row of the softmax is empty.
    """
    q, k = positions_BT[:, :, None], positions_BT[:, None, :]
    index = jnp.arange(positions_BT.shape[1])
    seen = (segments_BT[:, :, None] == segments_BT[:, None, :]) & (index[None, :, None] >= index[None, None, :])
    return seen if window is None else seen & (q - k < window)


def within(
    query_positions_BT: Int[Array, "B T"], key_positions_BS: Int[Array, "B S"], window: int | None
) -> Bool[Array, "B T S"]:
    """Keys no farther back than the window (all of them when it is None)."""
    if window is None:
        return jnp.ones((*query_positions_BT.shape, key_positions_BS.shape[1]), bool)
    return query_positions_BT[:, :, None] - key_positions_BS[:, None, :] < window
