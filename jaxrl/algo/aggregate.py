"""Aggregation as data: how much each trainable token of an optimizer batch counts.

Knows datums and their masks. Knows nothing about losses or micro-batches: the weights hold every denominator, so
that the training step only sums (I5). They are computed over the whole optimizer batch, before it is packed or
split. A "sequence" is an episode, pooled over its datums: an episode whose history was rewritten counts once.

With n_e = trainable tokens of episode e, E = number of episodes with any, N = all trainable tokens, N_p and P the
same for groups, a rule gives each datum one weight, shared by its trainable tokens.
"""

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from jaxrl.types import Datum

Rule = Callable[[Sequence[Datum], np.ndarray, float], np.ndarray]
"""(data_D, trainable tokens of each datum, the constant) -> weight per trainable token of each datum."""


def _pooled(keys_D: Sequence[Hashable], counts_D: np.ndarray) -> tuple[np.ndarray, int]:
    """Trainable tokens of each datum's pool, and the number of pools that have any."""
    totals: dict[Hashable, int] = defaultdict(int)
    for key, count in zip(keys_D, counts_D.tolist(), strict=True):
        totals[key] += count
    return np.array([totals[key] for key in keys_D], np.float64), sum(total > 0 for total in totals.values())


def _episodes(data_D: Sequence[Datum]) -> list[Hashable]:
    return [(d.group, d.episode) for d in data_D]


def token_sum(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1."""
    return np.ones(len(data_D))


def token_mean(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1 / N (DAPO: Yu et al. 2025, arXiv 2503.14476)."""
    return np.full(len(data_D), 1.0 / max(counts_D.sum(), 1))


def seq_mean_token_mean(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1 / (E n_e) (GRPO: Shao et al. 2024, arXiv 2402.03300)."""
    tokens_D, episodes = _pooled(_episodes(data_D), counts_D)
    return 1.0 / (max(episodes, 1) * np.maximum(tokens_D, 1.0))


def seq_mean_token_sum(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1 / E: the episode is one action (RLOO: Ahmadian et al. 2024, arXiv 2402.14740)."""
    _, episodes = _pooled(_episodes(data_D), counts_D)
    return np.full(len(data_D), 1.0 / max(episodes, 1))


def seq_mean_token_sum_norm(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1 / (E constant), the constant being a length such as the token budget (Dr. GRPO: arXiv 2503.20783)."""
    return seq_mean_token_sum(data_D, counts_D, constant) / constant


def prompt_mean(data_D: Sequence[Datum], counts_D: np.ndarray, constant: float) -> np.ndarray:
    """1 / (P N_p): every group counts the same (ScaleRL: Khatri et al. 2025, arXiv 2510.13786)."""
    tokens_D, groups = _pooled([d.group for d in data_D], counts_D)
    return 1.0 / (max(groups, 1) * np.maximum(tokens_D, 1.0))


AGGREGATIONS: dict[str, Rule] = {
    "token_sum": token_sum,
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "episode_mean_token_mean": seq_mean_token_mean,  # a second name: sequences are episodes here
    "prompt_mean": prompt_mean,
}

_NEEDS_CONSTANT = ("seq_mean_token_sum_norm",)


def check_aggregation(name: str, constant: float | None) -> None:
    """Raise unless the name exists and has the constant exactly when it uses one (I12)."""
    if name not in AGGREGATIONS:
        close = difflib.get_close_matches(name, AGGREGATIONS) or list(AGGREGATIONS)
        raise ValueError(f"aggregation {name!r} does not exist; did you mean {', '.join(close)}?")
    if name in _NEEDS_CONSTANT and (constant is None or not constant > 0):
        raise ValueError(
            f"aggregation {name!r} divides by a constant length; give one above 0, such as the token budget of an "
            f"episode (got {constant}). The padded width would make the loss depend on padding"
        )
    if name not in _NEEDS_CONSTANT and constant is not None:
        raise ValueError(f"aggregation {name!r} uses no constant, so constant={constant} would have no effect")


def token_weights(data_D: Sequence[Datum], name: str, *, constant: float | None = None) -> list[np.ndarray]:
    """weights_D: for each datum one float64 per token, 0 where the token is not trained.

    data_D is the whole optimizer batch, of all hosts and micro-batches. Without a trainable token all are 0.
    """
    check_aggregation(name, constant)
    counts_D = np.array([int(d.mask.sum()) for d in data_D], np.int64)
    weight_D = AGGREGATIONS[name](data_D, counts_D, 1.0 if constant is None else constant)
    return [np.where(d.mask, weight, 0.0) for d, weight in zip(data_D, weight_D, strict=True)]
