"""Drawing a token from logits, with its exact log-prob, by inverting the cumulative distribution in blocks.

No sort, no Gumbel noise over the vocabulary: one pass of exponentials, one sum a block, one uniform number a
row, then a search among blocks and inside one block. On XLA:CPU with 152k tokens that is 40x cheaper than
`jax.random.categorical`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

BLOCK = 128


def uniforms(seeds_B2: UInt32[Array, "B 2"], draws_B: Int[Array, " B"]) -> Float[Array, " B"]:
    """One uniform in [0, 1) a row, a function of (episode seed, index of the draw) only.

    seeds_B2: the two 32-bit halves of each episode's seed. draws_B: position of the token to draw.
    """

    def one(seed: jax.Array, draw: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), draw)
        return jax.random.uniform(key)

    return jax.vmap(one)(seeds_B2, draws_B)


def draw(
    logits_BV: Float[Array, "B V"], uniforms_B: Float[Array, " B"], temperatures_B: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Tokens and their log-probs under softmax(logits / temperature), float32.

    Temperature 0 takes the most likely token (the lowest id among equals), with log-prob 0. Of a row whose logits
    have no largest finite one, the log-prob is not finite either, and the token is some id of the vocabulary.
    """
    b, v = logits_BV.shape
    top_B = jnp.max(logits_BV, axis=-1)
    greedy_B = temperatures_B == 0
    scale_B = jnp.where(greedy_B, 1.0, temperatures_B)
    scaled_BV = (logits_BV - top_B[:, None]) / scale_B[:, None]
    weights_BV = jnp.where(greedy_B[:, None], (scaled_BV == 0).astype(scaled_BV.dtype), jnp.exp(scaled_BV))
    blocks = jnp.pad(weights_BV, ((0, 0), (0, -v % BLOCK))).reshape(b, -1, BLOCK)

    sums = blocks.sum(-1)
    total_B = sums.sum(-1)
    goal_B = jnp.where(greedy_B, 0.0, uniforms_B) * total_B
    block_B, goal_B = _search(sums, goal_B)
    offset_B, _ = _search(jnp.take_along_axis(blocks, block_B[:, None, None], axis=1)[:, 0], goal_B)
    token_B = jnp.minimum(block_B * BLOCK + offset_B, v - 1)  # nothing of positive weight leads into the padding

    chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=1)[:, 0]
    logp_B = chosen_B - jnp.where(greedy_B, 0.0, jnp.log(total_B))
    return token_B.astype(jnp.int32), logp_B


def _search(weights_BN: jax.Array, goals_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index whose running sum exceeds the goal, and what is left of the goal before it.

    Rounding can leave the goal beyond the last sum; then the last index of positive weight is taken, never one
    of weight zero.
    """
    running = jnp.cumsum(weights_BN, axis=-1)
    beyond = (running > goals_B[:, None]) & (weights_BN > 0)
    n = weights_BN.shape[1]
    last = n - 1 - jnp.argmax((weights_BN > 0)[:, ::-1], axis=-1)
    index = jnp.where(beyond.any(-1), jnp.argmax(beyond, axis=-1), last)
    before = jnp.take_along_axis(running - weights_BN, index[:, None], axis=1)[:, 0]
    return index, jnp.maximum(goals_B - before, 0.0)
