"""Aggregation as data: how much each trainable token of an optimizer batch counts.

Knows datums and their masks. Knows nothing about losses or micro-batches: the weights hold every denominator, so
that the training step only sums (I5). They are computed over the whole optimizer batch, before it is packed or
split. A "sequence" is an episode, pooled over its datums: an episode whose history was rewritten counts once.

Every rule is a quotient. Its numerator, the local weight, needs no more than the datum's own group; its denominator
counts something of the batch, and counts of disjoint sets of whole groups add up. So a batch whose groups arrive one
by one is summed with local weights and divided once, at its end, by the total count.

With n_e = trainable tokens of episode e, E = number of episodes with any, N = all trainable tokens, N_p and P the
same for groups, a rule gives each datum one weight, shared by its trainable tokens.
"""

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.types import Datum

Local = Callable[[Sequence[Datum], np.ndarray, float], np.ndarray]
"""(data_D, trainable tokens of each datum, the constant) -> local weight per trainable token of each datum."""

Count = Callable[[Sequence[Datum], np.ndarray], int]
"""(data_D, trainable tokens of each datum) -> what these groups add to the denominator."""


def _totals(keys_D: Sequence[Hashable], counts_D: np.ndarray) -> dict[Hashable, int]:
    """Trainable tokens of each pool of datums."""
    totals: dict[Hashable, int] = defaultdict(int)
    for key, count in zip(keys_D, counts_D.tolist(), strict=True):
        totals[key] += count
    return totals


def _share(keys_D: Sequence[Hashable], counts_D: np.ndarray) -> np.ndarray:
    """1 / the trainable tokens of each datum's pool."""
    totals = _totals(keys_D, counts_D)
    return 1.0 / np.array([max(totals[key], 1) for key in keys_D], np.float64)


def _pools(keys_D: Sequence[Hashable], counts_D: np.ndarray) -> int:
    """How many pools have a trainable token."""
    return sum(total > 0 for total in _totals(keys_D, counts_D).values())


def _episode_keys(data_D: Sequence[Datum]) -> list[Hashable]:
    return [(d.group, d.episode) for d in data_D]


def _group_keys(data_D: Sequence[Datum]) -> list[Hashable]:
    return [d.group for d in data_D]


def one(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1."""
    return np.ones(len(data_D))


def per_constant(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1 / constant, which is a length such as the token budget."""
    return np.full(len(data_D), 1.0 / constant)


def per_episode_token(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1 / n_e."""
    return _share(_episode_keys(data_D), counts_D)


def per_group_token(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1 / N_p."""
    return _share(_group_keys(data_D), counts_D)


def nothing(data_D: Sequence[Datum], counts_D: np.ndarray) -> int:
    """0: a count of nothing divides nothing, see `denominator`."""
    return 0


def tokens(data_D: Sequence[Datum], counts_D: np.ndarray) -> int:
    """N."""
    return int(counts_D.sum())


def episodes(data_D: Sequence[Datum], counts_D: np.ndarray) -> int:
    """E."""
    return _pools(_episode_keys(data_D), counts_D)


def groups(data_D: Sequence[Datum], counts_D: np.ndarray) -> int:
    """P."""
    return _pools(_group_keys(data_D), counts_D)


@dataclass(frozen=True)
class Aggregation:
    """A rule: the weight of a trainable token is its local weight divided by `denominator` of the batch's count.

    says: that quotient, and where it comes from.
    """

    local: Local
    count: Count
    says: str


AGGREGATIONS: dict[str, Aggregation] = {
    "token_sum": Aggregation(one, nothing, "1 for every token (Tinker)."),
    "token_mean": Aggregation(one, tokens, "1 / N (DAPO: Yu et al. 2025, arXiv 2503.14476)."),
    "seq_mean_token_mean": Aggregation(
        per_episode_token, episodes, "1 / (n_e E) (GRPO: Shao et al. 2024, arXiv 2402.03300)."
    ),
    "seq_mean_token_sum": Aggregation(
        one, episodes, "1 / E: the episode is one action (RLOO: Ahmadian et al. 2024, arXiv 2402.14740)."
    ),
    "seq_mean_token_sum_norm": Aggregation(
        per_constant, episodes, "1 / (aggregation_constant E) (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783)."
    ),
    "episode_mean_token_mean": Aggregation(
        per_episode_token, episodes, "1 / (n_e E), by its other name: sequences are episodes here."
    ),
    "prompt_mean": Aggregation(
        per_group_token, groups, "1 / (N_p P): every group counts the same (ScaleRL: arXiv 2510.13786)."
    ),
    "prompt_mean_token_sum": Aggregation(
        one, groups, "1 / P: the mean over groups of token sums, such as the pairs of DPO."
    ),
}

NEEDS_CONSTANT = ("seq_mean_token_sum_norm",)


def check_aggregation(name: str, constant: float | None) -> None:
    """Raise unless the name exists and has the constant exactly when it uses one (I12)."""
    if name not in AGGREGATIONS:
        close = difflib.get_close_matches(name, AGGREGATIONS) or list(AGGREGATIONS)
        raise ValueError(f"aggregation {name!r} does not exist; did you mean {', '.join(close)}?")
    if name in NEEDS_CONSTANT and (constant is None or not constant > 0):
        raise ValueError(
            f"aggregation {name!r} divides by a constant length; give one above 0, such as the token budget of an "
            f"episode (got {constant}). The padded width would make the loss depend on padding"
        )
    if name not in NEEDS_CONSTANT and constant is not None:
        raise ValueError(f"aggregation {name!r} uses no constant, so constant={constant} would have no effect")


def denominator(count: int) -> int:
    """What local weights are divided by, given the batch's count: a batch without anything to count divides by 1."""
    return max(count, 1)


def local_weights(data_D: Sequence[Datum], name: str, *, constant: float | None = None) -> tuple[list[np.ndarray], int]:
    """(local weights_D, count) of some whole groups of an optimizer batch, each weight 0 where it is not trained.

    Over disjoint parts of a batch the counts add up, and the local weights divided by `denominator` of the sum are
    the `token_weights` of the whole.
    """
    check_aggregation(name, constant)
    rule = AGGREGATIONS[name]
    counts_D = np.array([int(d.mask.sum()) for d in data_D], np.int64)
    weight_D = rule.local(data_D, counts_D, 1.0 if constant is None else constant)
    weights_D = [np.where(d.mask, weight, 0.0) for d, weight in zip(data_D, weight_D, strict=True)]
    return weights_D, rule.count(data_D, counts_D)


def token_weights(data_D: Sequence[Datum], name: str, *, constant: float | None = None) -> list[np.ndarray]:
    """weights_D: for each datum one float64 per token, 0 where the token is not trained.

    data_D is the whole optimizer batch, of all hosts and micro-batches. Without a trainable token all are 0.
    """
    weights_D, count = local_weights(data_D, name, constant=constant)
    return [weight_T / denominator(count) for weight_T in weights_D]
