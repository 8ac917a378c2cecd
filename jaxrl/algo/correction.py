"""The mismatch between the sampler and the old policy, made up for: a factor of the policy's term, or fewer tokens.

    w = exp(o - q)   of a token: how much likelier the trainer's policy before the batch holds it than the sampler did

Both are recorded before the step, so a correction is data: numpy over datums, pooled over whole episodes, with nothing
to differentiate. A part is a row of `CORRECTIONS`; several are joined by "+" and multiply. Knows nothing about the loss
it multiplies: neither KL nor entropy terms are scaled (as in TRL).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from jaxrl.types import Datum

Factor = Callable[..., list[np.ndarray]]
"""(data_D, log_weights_D, *, knobs) -> one factor for each token of each datum; log weights are 0 where untrained."""


def token_truncate(
    data_D: Sequence[Datum], log_weights_D: Sequence[np.ndarray], *, weight_min: float = 0.0, weight_max: float = 2.0
) -> list[np.ndarray]:
    """w clamped to [weight_min, weight_max]: truncated importance sampling (Yao et al. 2025, fengyao.notion.site).

    weight_max=2 in SkyRL, verl and tunix; OpenRLHF and slime clamp on both sides. weight_max=inf is decoupled PPO
    (AReaL, arXiv 2505.24298).
    """
    return [np.clip(_exp(w), weight_min, weight_max) for w in log_weights_D]


def token_mask(
    data_D: Sequence[Datum], log_weights_D: Sequence[np.ndarray], *, weight_min: float = 0.5, weight_max: float = 5.0
) -> list[np.ndarray]:
    """w inside [weight_min, weight_max], 0 outside: IcePop (arXiv 2510.18855)."""
    return [_inside(_exp(w), weight_min, weight_max) for w in log_weights_D]


def sequence_truncate(
    data_D: Sequence[Datum], log_weights_D: Sequence[np.ndarray], *, weight_max: float = 2.0
) -> list[np.ndarray]:
    """min(product of the episode's w, weight_max). 2 in verl, 5 in SkyRL."""
    return [np.minimum(_exp(w), weight_max) for w in _sums(data_D, log_weights_D)]


def sequence_mask(
    data_D: Sequence[Datum], log_weights_D: Sequence[np.ndarray], *, weight_min: float = 0.0, weight_max: float = 3.0
) -> list[np.ndarray]:
    """The product of the episode's w inside the band, 0 outside (TRL's default). Long episodes leave it sooner."""
    return [_inside(_exp(w), weight_min, weight_max) for w in _sums(data_D, log_weights_D)]


def geometric_mask(
    data_D: Sequence[Datum],
    log_weights_D: Sequence[np.ndarray],
    *,
    geometric_min: float = 0.99,
    geometric_max: float = 1.01,
) -> list[np.ndarray]:
    """1 where the geometric mean of the episode's w lies in the band, else 0. SkyRL's bounds; NeMo's are tighter."""
    means = _means(data_D, log_weights_D)
    return [np.where(_inside(_exp(w), geometric_min, geometric_max) > 0, 1.0, 0.0) for w in means]


CORRECTIONS: dict[str, Factor] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
}


def correct(
    parts: Sequence[Callable[[Sequence[Datum], Sequence[np.ndarray]], list[np.ndarray]]],
    data_D: Sequence[Datum],
    *,
    denominator: Literal["all", "kept"] = "all",
) -> list[Datum]:
    """The datums with the product of the parts (their knobs bound) as `Datum.correction`.

    denominator: whether tokens with a factor of 0 still count in the aggregation's denominators (all: SkyRL, AReaL,
    slime), or are not trained at all (kept: verl). Raises ValueError for datums whose old log-probs nobody scored.
    """
    log_weights_D = [_log_weights(d) for d in data_D]
    factors_D = [np.ones(len(d.tokens)) for d in data_D]
    for part in parts:
        factors_D = [a * b for a, b in zip(factors_D, part(data_D, log_weights_D), strict=True)]
    return [_corrected(d, factor, denominator == "kept") for d, factor in zip(data_D, factors_D, strict=True)]


def _corrected(d: Datum, factor: np.ndarray, drop: bool) -> Datum:
    corrected = replace(d, correction=np.where(d.mask, factor, 1.0).astype(np.float32))
    return replace(corrected, mask=d.mask & (factor > 0)) if drop else corrected


def _log_weights(d: Datum) -> np.ndarray:
    """o - q of the trained tokens, 0 at the others."""
    if d.logprobs_old is None:
        raise ValueError(
            f"a datum of group {d.group}, episode {d.episode} has no old log-probs: score the batch under the policy "
            "before its first step (Datum.logprobs_old), or leave the correction out"
        )
    return np.where(d.mask, d.logprobs_old.astype(np.float64) - d.logprobs.astype(np.float64), 0.0)


def _exp(log_weight: np.ndarray) -> np.ndarray:
    """The weight, at most the largest number there is."""
    return np.exp(np.minimum(log_weight, _LARGEST))


_LARGEST = math.log(np.finfo(np.float64).max)


def _sums(data_D: Sequence[Datum], values_D: Sequence[np.ndarray]) -> list[np.ndarray]:
    """At each token, the sum of its episode's values (0 where untrained)."""
    totals: dict[tuple[int, int], float] = {}
    for d, values in zip(data_D, values_D, strict=True):
        totals[d.group, d.episode] = totals.get((d.group, d.episode), 0.0) + float(values.sum())
    return [np.full(len(d.tokens), totals[d.group, d.episode]) for d in data_D]


def _means(data_D: Sequence[Datum], values_D: Sequence[np.ndarray]) -> list[np.ndarray]:
    """At each token, the mean over its episode's trained tokens."""
    counts_D = _sums(data_D, [d.mask.astype(np.float64) for d in data_D])
    return [s / np.maximum(n, 1.0) for s, n in zip(_sums(data_D, values_D), counts_D, strict=True)]


def _inside(weight: np.ndarray, low: float, high: float) -> np.ndarray:
    """The weight in [low, high], 0 outside."""
    return np.where((weight >= low) & (weight <= high), weight, 0.0)
