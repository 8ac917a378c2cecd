"""What an optimizer step minimises, and a batch made ready for it.

Knows losses, weights of tokens and packing. Knows nothing about models: what a loss has to be told of another policy is
in the datums already, see `Datum.logprobs_old` and `Datum.logprobs_ref`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.algo.aggregate import check_aggregation, denominator
from jaxrl.algo.batch import Batch, choose_width, pack
from jaxrl.algo.entropy import EntropyBonus
from jaxrl.algo.loss import Loss
from jaxrl.types import Datum


@dataclass(frozen=True)
class Objective:
    """loss: of a token. aggregation, aggregation_constant: how much each token counts (`aggregate.AGGREGATIONS`).

    correct: datums with old log-probs -> datums with factors of the policy's term. entropy: the bonus that is added.
    """

    loss: Loss
    aggregation: str
    aggregation_constant: float | None = None
    correct: Callable[[Sequence[Datum]], list[Datum]] | None = None
    entropy: EntropyBonus | None = None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.aggregation_constant)

    @property
    def reads_old(self) -> bool:
        """Whether a batch is scored under the policy before its first step."""
        return self.loss.anchor_old or self.correct is not None

    @property
    def needs_substeps(self) -> bool:
        """Whether the old policy is only what the ratio is against, which is 1 until a substep has moved the policy."""
        return self.loss.anchor_old and self.correct is None

    @property
    def whole_batch(self) -> str | None:
        """Why a step's gradient cannot be taken part by part; None where it can."""
        if self.loss.row.whole_batch:
            return f"loss {self.loss.row.form.__name__!r} chooses tokens among those of the whole batch"
        if self.loss.observation_coef:
            return "observation_coef has a denominator of its own"
        return None


def packed(
    data_D: Sequence[Datum], weights_D: Sequence[np.ndarray], objective: Objective, *, widths: Sequence[int], rows: int
) -> Batch:
    """The datums under their weights, with the columns that the loss reads. Raises ValueError for what is no pair."""
    if objective.loss.row.pairs:
        _check_pairs(data_D)
    return pack(
        data_D,
        weights_D,
        width=choose_width(data_D, widths),
        rows=rows,
        columns=objective.loss.columns,
        observed_D=observation_weights(data_D) if objective.loss.observation_coef else (),
    )


def _check_pairs(data_D: Sequence[Datum]) -> None:
    """Raise unless every group is one episode of positive and one of negative advantage."""
    for group, signs in signs_by_group(data_D).items():
        if signs != PAIR:
            raise ValueError(
                f"the loss compares pairs, and group {group} has {len(signs)} episodes with advantages of sign "
                f"{signs}: give groups of two, one better than the other"
            )


PAIR = [-1.0, 1.0]
"""The signs of the episodes of a group that is a pair."""


def signs_by_group(data_D: Sequence[Datum]) -> dict[int, list[float]]:
    """Group -> the signs of the advantages of its episodes that have datums, ascending."""
    signs: dict[int, dict[int, float]] = {}
    for d in data_D:
        signs.setdefault(d.group, {})[d.episode] = float(np.sign(d.advantages[d.mask].sum()))
    return {group: sorted(of_episode.values()) for group, of_episode in signs.items()}


def observation_weights(data_D: Sequence[Datum]) -> list[np.ndarray]:
    """1 / their number for the tokens that the environment said in answer to the policy, 0 for all others.

    These are the tokens after the first trained one of a datum that no policy sampled: not the prompt, not a turn that
    stays as context only, and not what a later datum of an episode begins with, which was said once already.
    """
    heard_D = [~d.mask & (d.versions < 0) & (np.cumsum(d.mask) > 0) for d in data_D]
    total = denominator(int(sum(heard.sum() for heard in heard_D)))
    return [heard / total for heard in heard_D]


def substeps(data_D: Sequence[Datum], parts: int) -> list[list[Datum]]:
    """The datums by whole groups, in order, in `parts` parts as equal as groups allow; none of them empty."""
    groups = list(dict.fromkeys(d.group for d in data_D))
    chunks = np.array_split(np.array(groups), min(parts, len(groups)) or 1)
    return [[d for d in data_D if d.group in set(chunk.tolist())] for chunk in chunks if len(chunk)]
