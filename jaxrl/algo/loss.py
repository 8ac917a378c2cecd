"""Loss forms: what one token costs, given its log-probs and advantage. All losses are minimised.

Pure functions over arrays of any shape. Knows nothing about aggregation (the weights multiply afterwards),
packing or models. A form is a row of `LOSSES`; `make_loss` binds its knobs and selects the trained tokens before
the form sees them, and again after (I4): a value at a masked position is never read, so that NaN there gives
neither a NaN loss nor a NaN gradient.

x: log-prob under the parameters being trained; q: the sampler's; A: advantage; r = exp(x - q).
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


class TokenInputs(NamedTuple):
    """What a loss sees. Gradient flows through `logp_new` only."""

    logp_new: Float[Array, "*tokens"]
    logp_sampler: Float[Array, "*tokens"]
    advantage: Float[Array, "*tokens"]
    mask: Bool[Array, "*tokens"]


class TokenLoss(NamedTuple):
    """Per token: the loss, and values whose mean over trained tokens is a metric. 0 where masked."""

    loss: Float[Array, "*tokens"]
    metrics: dict[str, Float[Array, "*tokens"]]


LossFn = Callable[[TokenInputs], TokenLoss]
Form = Callable[[TokenInputs, Mapping[str, float]], tuple[jax.Array, jax.Array]]
"""(inputs, knobs) -> (loss, whether a clip cut the token's gradient), per token."""


def importance_sampling(inputs: TokenInputs, knobs: Mapping[str, float]) -> tuple[jax.Array, jax.Array]:
    """-r A: the policy gradient corrected for the sampler's distribution, without a trust region."""
    x, q, advantage, mask = inputs
    return -jnp.exp(x - q) * advantage, jnp.zeros_like(mask)


def reinforce(inputs: TokenInputs, knobs: Mapping[str, float]) -> tuple[jax.Array, jax.Array]:
    """-x A (Williams 1992, doi 10.1007/BF00992696): right only where the sampler is the policy."""
    return -inputs.logp_new * inputs.advantage, jnp.zeros_like(inputs.mask)


def ppo(inputs: TokenInputs, knobs: Mapping[str, float]) -> tuple[jax.Array, jax.Array]:
    """-min(r A, clip(r, low, high) A) (Schulman et al. 2017, arXiv 1707.06347). Thresholds are absolute ratios."""
    x, q, advantage, _ = inputs
    low, high = knobs["clip_low_threshold"], knobs["clip_high_threshold"]
    frozen = lax.stop_gradient(jnp.exp(x - q))
    over, under = (advantage > 0) & (frozen > high), (advantage < 0) & (frozen < low)
    clipped = over | under
    ratio = jnp.where(over, high, jnp.where(under, low, jnp.exp(jnp.where(clipped, 0.0, x - q))))
    return -ratio * advantage, clipped


def cross_entropy(inputs: TokenInputs, knobs: Mapping[str, float]) -> tuple[jax.Array, jax.Array]:
    """-x: supervised learning of the masked-in tokens, whatever their advantage."""
    return -inputs.logp_new, jnp.zeros_like(inputs.mask)


@dataclass(frozen=True)
class LossRow:
    """One loss: its form, its knobs with their defaults, and whether the tokens were sampled by a policy."""

    form: Form
    knobs: Mapping[str, float] = field(default_factory=dict)
    sampled: bool = True


LOSSES: dict[str, LossRow] = {
    "importance_sampling": LossRow(importance_sampling),
    "ppo": LossRow(ppo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "reinforce": LossRow(reinforce),
    "cross_entropy": LossRow(cross_entropy, sampled=False),
}


def make_loss(name: str, config: Mapping[str, float] | None = None) -> LossFn:
    """The loss `name` with its knobs (`loss_fn_config`) bound. Unknown names and knobs are errors."""
    row = _row(name)
    knobs = dict(row.knobs) | _checked_knobs(name, row, config or {})

    def loss(inputs: TokenInputs) -> TokenLoss:
        safe = TokenInputs(
            *(jnp.where(inputs.mask, x, 0.0) for x in inputs[:3]),
            mask=inputs.mask,
        )
        value, clipped = row.form(safe, knobs)
        metrics = {"clip_fraction": clipped.astype(value.dtype)} | (_mismatch(safe) if row.sampled else {})
        return TokenLoss(
            jnp.where(safe.mask, value, 0.0), {k: jnp.where(safe.mask, v, 0.0) for k, v in metrics.items()}
        )

    return loss


def _mismatch(inputs: TokenInputs) -> dict[str, jax.Array]:
    """Two estimates of KL(sampler || trainer): q - x, and half its square (joschu.net/blog/kl-approx)."""
    difference = inputs.logp_sampler - lax.stop_gradient(inputs.logp_new)
    return {"kl_sample_train_v1": difference, "kl_sample_train_v2": 0.5 * difference**2}


def _row(name: str) -> LossRow:
    if name not in LOSSES:
        close = difflib.get_close_matches(name, LOSSES) or list(LOSSES)
        raise ValueError(f"loss {name!r} does not exist; did you mean {', '.join(close)}?")
    return LOSSES[name]


def _checked_knobs(name: str, row: LossRow, config: Mapping[str, float]) -> dict[str, float]:
    """The given knobs as floats, each one known to this form and sensible."""
    for knob, value in config.items():
        if knob not in row.knobs:
            raise ValueError(_unknown_knob(name, row, knob))
        if not math.isfinite(value):
            raise ValueError(f"{knob}={value} of loss {name!r} is not a finite number")
    low, high = (config.get(k, row.knobs.get(k, 1.0)) for k in ("clip_low_threshold", "clip_high_threshold"))
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"loss {name!r} has clip_low_threshold={low} and clip_high_threshold={high}, but they are absolute bounds "
            "on the ratio and must enclose 1: write 0.8 and 1.2 for what other code bases call epsilon 0.2"
        )
    return {knob: float(value) for knob, value in config.items()}


def _unknown_knob(name: str, row: LossRow, knob: str) -> str:
    owners = [other for other, r in LOSSES.items() if knob in r.knobs]
    if owners:
        return f"knob {knob!r} has no effect on loss {name!r}; it belongs to {', '.join(owners)}"
    known = sorted(row.knobs) or sorted({k for r in LOSSES.values() for k in r.knobs})
    close = difflib.get_close_matches(knob, known, cutoff=0.4) or known
    has = f"its knobs are {', '.join(sorted(row.knobs))}" if row.knobs else "it has none"
    return f"loss {name!r} has no knob {knob!r} ({has}); the nearest names are {', '.join(close)}"
