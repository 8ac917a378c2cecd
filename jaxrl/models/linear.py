"""Matrix products as every part of the model does them: low-precision operands, float32 accumulation.

XLA:CPU has a fast path for bf16 x bf16 -> f32 and none for bf16 -> bf16 or for mixed operands, which it serves
by first writing a float32 copy of the whole weight. So operands are cast down, never up, the accumulator is
float32, and the backward pass casts its cotangent down too. The same rules suit tensor cores and MXUs.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@jax.custom_vjp
def matmul_wide(x: Float[Array, "*rows I"], w: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """`x @ w` as accumulated: float32 (float64 for float64 operands). For logits."""
    return _dot(x, w.astype(x.dtype), ((x.ndim - 1,), (0,)))


def matmul(x: Float[Array, "*rows I"], w: Float[Array, "I O"]) -> Float[Array, "*rows O"]:
    """`x @ w` in the dtype of `x`."""
    return matmul_wide(x, w).astype(x.dtype)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype products are summed in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _dot(x: jax.Array, y: jax.Array, contract: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    return lax.dot_general(x, y, (contract, ((), ())), preferred_element_type=accumulator(x.dtype))


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul_wide(x, w), (x, w)


def _backward(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    g = g.astype(x.dtype)
    dx = _dot(g, w.astype(x.dtype), ((g.ndim - 1,), (1,))).astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    dw = _dot(x, g, (rows, rows)).astype(w.dtype)  # XLA drops it where w is frozen; a test reads the HLO
    return dx, dw


matmul_wide.defvjp(_forward, _backward)
