"""The entropy bonus: a term -c H of every trained token, H the entropy of the whole distribution it was drawn from.

With the aggregation's weights the loss falls by c times the weighted sum of H (TRL takes a mean over tokens whatever
the loss does). The coefficient is part of the training state, since one that adapts must be resumed. Minus the mean
log-prob of the sampled tokens also estimates H, but is no bonus: its gradient has expectation 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class EntropyBonus:
    """start: the first coefficient. step: (coefficient, mean entropy of a step in nats) -> that of the next step."""

    start: float
    step: Callable[[jax.Array, jax.Array], jax.Array]


def fixed(*, entropy_coef: float = 0.001) -> EntropyBonus:
    """The same coefficient throughout."""
    return EntropyBonus(entropy_coef, lambda coef, entropy: coef)


def adaptive(
    *,
    entropy_coef: float = 0.0,
    entropy_target: float = 0.2,
    entropy_rate: float = 0.005,
    entropy_coef_max: float = 0.1,
) -> EntropyBonus:
    """Up by entropy_rate after a step below the target, down after one above; from 0 to entropy_coef_max.

    Skywork-OR1 (He et al. 2025, arXiv 2505.22312), whose coefficient has no upper bound and is used only below the
    target.
    """

    def step(coef: jax.Array, entropy: jax.Array) -> jax.Array:
        moved = jnp.where(entropy < entropy_target, coef + entropy_rate, coef - entropy_rate)
        return jnp.clip(moved, 0.0, entropy_coef_max)

    return EntropyBonus(entropy_coef, step)


ENTROPY_BONUSES: dict[str, Callable[..., EntropyBonus]] = {"fixed": fixed, "adaptive": adaptive}
