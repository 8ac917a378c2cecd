"""Key/value storage: rows of positions, written in blocks, read as a dense working set.

Storage (who holds which row) is the engine's affair; the compute path only sees what `read` gives it, so that
pages can replace rows later. Per layer, keys are [N, K, C, S] and values [N, K, S, C]: on XLA:CPU the other
orders cost up to 14x in attention.

Anything at or beyond a row's length is garbage that no mask admits. Blocks are therefore written whole, padding
included, and rows have `slack` spare positions so that a block never crosses the end.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxrl.models.config import ModelConfig

Leaf = Any
"""An array of numpy or JAX; inside `jax.tree.map`, whatever the mapped function makes of one."""


@struct.dataclass
class KV:
    """Keys [N, K, C, S] and values [N, K, S, C], one array a layer: a store of N rows, a working set or a tail."""

    k: tuple[Leaf, ...]
    v: tuple[Leaf, ...]

    @property
    def rows(self) -> int:
        return self.k[0].shape[0]

    @property
    def positions(self) -> int:
        return self.k[0].shape[3]


def empty(config: ModelConfig, rows: int, positions: int, dtype: DTypeLike) -> KV:
    """A zeroed store."""
    heads, width = config.kv_heads, config.head_width
    return KV(
        k=tuple(jnp.zeros((rows, heads, width, positions), dtype) for _ in range(config.layers)),
        v=tuple(jnp.zeros((rows, heads, positions, width), dtype) for _ in range(config.layers)),
    )


def read(store: KV, rows_B: Int[Array, " B"] | None, positions: int | None) -> KV:
    """The working set of some rows (None: all of them, in order, and not copied) up to `positions`."""
    if rows_B is None:
        return store

    def take(x: jax.Array, axis: int) -> jax.Array:
        return lax.slice_in_dim(x, 0, positions, axis=axis)[rows_B]

    return KV(k=tuple(take(k, 3) for k in store.k), v=tuple(take(v, 2) for v in store.v))


def write(store: KV, rows_B: Int[Array, " B"], starts_B: Int[Array, " B"], block: KV) -> KV:
    """Write a block of positions per row, in place when the store is donated. Rows >= N are dropped.

    One windowed scatter a tensor: B updates, whatever the block's length.
    """

    def put(x: jax.Array, update: jax.Array, axis: int) -> jax.Array:
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, axis)
        )
        where = jnp.stack([rows_B, starts_B], axis=-1).astype(jnp.int32)
        return lax.scatter(
            x, where, update.astype(x.dtype), numbers, unique_indices=False, mode=lax.GatherScatterMode.FILL_OR_DROP
        )

    return KV(
        k=tuple(put(x, u, 3) for x, u in zip(store.k, block.k, strict=True)),
        v=tuple(put(x, u, 2) for x, u in zip(store.v, block.v, strict=True)),
    )
