"""Log-probs and entropies of the action tokens, without ever holding the logits of all positions.

Knows hidden states, the head and which targets are trained. Knows nothing about losses. Positions are compacted row
by row so that those with a trained target come first (rows stay where they are, so a sharded batch needs no
communication), and the head runs over chunks of columns: a chunk without any trained target is skipped, and each
is recomputed in the backward pass. The largest array is [B, chunk, V].
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl.models.config import ModelConfig
from jaxrl.models.forward import logits
from jaxrl.models.linear import accumulator
from jaxrl.models.spec import Params


def action_logprobs(
    params: Params,
    hidden_BTM: Float[Array, "B T M"],
    targets_BT: Int[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    config: ModelConfig,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(logp_BT, entropy_BT) of softmax(logits / temperature) at the positions in the mask, 0 elsewhere. float32.

    logp is that of the target, entropy that of the whole distribution (natural logarithms). Gradient flows to the
    hidden states and to the head and final norm of `params`; through the entropy only if `entropy_gradient`.
    """
    t = targets_BT.shape[1]
    chunk = min(chunk, t)
    order_BT = jnp.argsort(~mask_BT, axis=1, stable=True)
    back_BT = jnp.argsort(order_BT, axis=1)
    hidden = _chunked(_reorder(hidden_BTM, order_BT, back_BT), chunk)
    targets = _chunked(jnp.take_along_axis(targets_BT, order_BT, 1), chunk)
    valid = _chunked(jnp.take_along_axis(mask_BT, order_BT, 1), chunk)
    head = {name: params[name] for name in ("embed", "lm_head", "final_norm") if name in params}

    def score(head: Params, h: jax.Array, target: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp, entropy = _scores(head, h, target, config, temperature)
        entropy = entropy if entropy_gradient else lax.stop_gradient(entropy)
        return jnp.where(keep, logp, 0.0), jnp.where(keep, entropy, 0.0)

    def skip(head: Params, h: jax.Array, target: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros(keep.shape, accumulator(h.dtype))
        return zeros, zeros

    @jax.checkpoint
    def step(carry: None, xs: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        h, target, keep, needed = xs
        return carry, lax.cond(needed, score, skip, head, h, target, keep)

    _, (logp, entropy) = lax.scan(step, None, (hidden, targets, valid, valid.any(axis=(1, 2))))
    return _unchunked(logp, back_BT), _unchunked(entropy, back_BT)


def _scores(
    head: Params, h: jax.Array, target: jax.Array, config: ModelConfig, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of the target and entropy, of one chunk."""
    return token_scores(logits(head, h, config) / temperature, target)


def token_scores(
    z: Float[Array, "*tokens V"], target: Int[Array, "*tokens"]
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens"]]:
    """(log softmax(z) at the target, entropy of softmax(z)), in nats. Reductions over V only, so V may be sharded."""
    top = lax.stop_gradient(z.max(axis=-1, keepdims=True))
    weights = jnp.exp(z - top)
    total = weights.sum(axis=-1)
    log_total = jnp.log(total) + top[..., 0]
    chosen = jnp.where(jnp.arange(z.shape[-1], dtype=target.dtype) == target[..., None], z, 0.0).sum(axis=-1)
    return chosen - log_total, log_total - (weights * z).sum(axis=-1) / total


@jax.custom_vjp
def _reorder(x_BTM: jax.Array, order_BT: jax.Array, back_BT: jax.Array) -> jax.Array:
    """Rows permuted along T. The backward pass permutes back, which is a gather and not a scatter."""
    return jnp.take_along_axis(x_BTM, order_BT[..., None], axis=1)


def _reorder_forward(x: jax.Array, order: jax.Array, back: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _reorder(x, order, back), back


def _reorder_backward(back: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.take_along_axis(g, back[..., None], axis=1), None, None


_reorder.defvjp(_reorder_forward, _reorder_backward)


def _chunked(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] -> [chunks, B, chunk, ...], T padded with zeros."""
    b, t = x.shape[:2]
    x = jnp.pad(x, [(0, 0), (0, -t % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(b, -1, chunk, *x.shape[2:]), 1, 0)


def _unchunked(x: jax.Array, back_BT: jax.Array) -> jax.Array:
    """[chunks, B, chunk] -> [B, T] in the original order."""
    b, t = back_BT.shape
    return jnp.take_along_axis(jnp.moveaxis(x, 0, 1).reshape(b, -1)[:, :t], back_BT, axis=1)
