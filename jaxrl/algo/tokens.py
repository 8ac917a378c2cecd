"""What a loss sees of a batch: its trained tokens, and sums over those of an episode, a group or the batch.

Arrays of any one shape, [B, T] of a micro-batch or [N, B, T] of a whole optimizer batch. Knows nothing about loss
forms, packing or models. A sum over a pool is given back to every token of it, so that it can be read where the tokens
are, whichever row or micro-batch the rest of the pool lies in; masked tokens add nothing and get what their ids say.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class TokenInputs(NamedTuple):
    """Gradient flows through `logp_new` and `entropy` only.

    logp_new, x: under the parameters being trained. logp_sampler, q: recorded when the token was drawn. logp_old, o:
    under the parameters before the batch's first step. logp_ref, f: under the reference model. correction: a factor of
    the policy's term that makes up for q not being o. entropy: of the distribution that the token is drawn from.
    position: of the token in its sequence. episode, group: pools, numbered from 0, each below the number of tokens.
    None: nobody reads it. pooled: what the form's statistics said of the whole batch, by name. Natural logarithms.
    """

    logp_new: Float[Array, "*tokens"]
    logp_sampler: Float[Array, "*tokens"]
    advantage: Float[Array, "*tokens"]
    mask: Bool[Array, "*tokens"]
    logp_old: Float[Array, "*tokens"] | None = None
    logp_ref: Float[Array, "*tokens"] | None = None
    correction: Float[Array, "*tokens"] | None = None
    entropy: Float[Array, "*tokens"] | None = None
    position: Int[Array, "*tokens"] | None = None
    episode: Int[Array, "*tokens"] | None = None
    group: Int[Array, "*tokens"] | None = None
    pooled: Mapping[str, jax.Array] = {}

    @property
    def log_ratio(self) -> jax.Array:
        """x - o: the log-ratio to the anchor, which is the sampler where no old policy was scored."""
        return self.logp_new - (self.logp_sampler if self.logp_old is None else self.logp_old)


def pool_sum(values: jax.Array, ids: jax.Array | None, mask: jax.Array) -> jax.Array:
    """At every token, the sum of `values` over the masked-in tokens with its id."""
    assert ids is not None, "a form with statistics needs the ids of the pools it sums over"
    kept = jnp.where(mask, values, jnp.zeros((), values.dtype))
    totals = jax.ops.segment_sum(kept.ravel(), ids.ravel(), num_segments=ids.size)
    return totals[ids]


def pool_count(ids: jax.Array | None, mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """At every token, how many masked-in tokens have its id; at least 1, to divide by."""
    return jnp.maximum(pool_sum(mask.astype(dtype), ids, mask), 1.0)


def pool_mean(values: jax.Array, ids: jax.Array | None, mask: jax.Array) -> jax.Array:
    """At every token, the mean of `values` over the masked-in tokens with its id."""
    return pool_sum(values, ids, mask) / pool_count(ids, mask, values.dtype)


def batch_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over all masked-in tokens; 0 without any."""
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum().astype(values.dtype), 1.0)


def largest(values: jax.Array, drawn: jax.Array, mask: jax.Array, count: jax.Array) -> jax.Array:
    """Which masked-in tokens are among the `count` largest; of equal ones those with the larger `drawn`."""
    keys = (mask.ravel().astype(jnp.int32), values.ravel(), drawn.ravel())
    *_, last_value, last_drawn = (x[::-1][jnp.clip(count - 1, 0, x.size - 1)] for x in lax.sort(keys, num_keys=3))
    higher = (values > last_value) | ((values == last_value) & (drawn >= last_drawn))
    return mask & (higher | (count >= mask.sum(dtype=jnp.int32)))
