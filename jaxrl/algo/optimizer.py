"""The optimizer: clipping by global norm, AdamW, and a learning-rate schedule, as configuration.

Knows gradients and step numbers. Knows nothing about losses or models. The learning rate is applied by the training
step from its own step number, not by a counter inside the optimizer, so that what is reported is what was used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[jax.Array], jax.Array]
"""Step number, from 0, to the learning rate that step uses."""

SCHEDULES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "constant": jnp.ones_like,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + jnp.cos(jnp.pi * done)),
}
"""Share of the decay that is left, from the share of the decaying steps that is done."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) on clipped gradients.

    The rate climbs linearly over `warmup_steps` (the first step already moves), then follows `schedule` from
    `learning_rate` down to `final_fraction` of it at `total_steps`; a training run fills in its own length for None.
    Weight decay spares vectors (norms, biases).
    max_grad_norm: None does not clip.
    """

    learning_rate: float = 1e-4
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final_fraction: float | None = None
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        _check_schedule(self)
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a moving average needs a decay in [0, 1)")
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: expected a finite number of at least 0")
        if not self.eps > 0:
            raise ValueError(f"eps={self.eps}: expected above 0, or a gradient of zero divides by zero")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm}: expected above 0, or None for no clipping")


def _check_schedule(config: OptimizerConfig) -> None:
    """Raise for a schedule that is unknown, incomplete, or has a knob it does not use (I12)."""
    if config.schedule not in SCHEDULES:
        raise ValueError(f"schedule={config.schedule!r}: expected one of {', '.join(SCHEDULES)}")
    if config.warmup_steps < 0:
        raise ValueError(f"warmup_steps={config.warmup_steps}: expected at least 0")
    if config.schedule == "constant":
        for name in ("total_steps", "final_fraction"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name}={getattr(config, name)} has no effect on schedule='constant'")
    elif config.total_steps is not None and config.total_steps <= config.warmup_steps:
        raise ValueError(
            f"schedule={config.schedule!r} decays from warmup_steps={config.warmup_steps} to total_steps, which "
            f"must lie after it (got {config.total_steps})"
        )
    if config.final_fraction is not None and not 0 <= config.final_fraction <= 1:
        raise ValueError(f"final_fraction={config.final_fraction}: expected a share of learning_rate in [0, 1]")


def make_schedule(config: OptimizerConfig) -> Schedule:
    """Step number to learning rate, float32. Raises ValueError for a decay whose total_steps nobody filled in."""
    if config.schedule != "constant" and config.total_steps is None:
        raise ValueError(f"schedule={config.schedule!r} decays until total_steps, which must be given")
    floor, warmup = config.final_fraction or 0.0, config.warmup_steps
    decaying = (config.total_steps or warmup + 1) - warmup

    def rate(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum(1.0, (step + 1) / max(warmup, 1))
        left = SCHEDULES[config.schedule](jnp.clip((step - warmup) / decaying, 0.0, 1.0))
        return config.learning_rate * warm * (floor + (1 - floor) * left)

    return rate


def make_transform(config: OptimizerConfig) -> optax.GradientTransformation:
    """Gradients to a direction, to be multiplied by minus the learning rate and added."""
    parts = [optax.scale_by_adam(config.b1, config.b2, config.eps)]
    if config.max_grad_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(config.max_grad_norm))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=_matrices))
    init, update = optax.chain(*parts)

    def lenient(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
            return update(updates, state, params)

    return optax.GradientTransformation(init, lenient)


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)
