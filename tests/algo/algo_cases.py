"""A tiny model's numbers and ragged data, shared by the tests of jaxrl.algo."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from jaxrl.algo.aggregate import token_weights
from jaxrl.algo.batch import Batch, pack
from jaxrl.algo.kl import KL_LOSSES, loss_term
from jaxrl.algo.loss import Loss, make_loss
from jaxrl.types import Datum

VOCAB = 96
CHUNK = 8
TEMPERATURE = 0.8
WIDTH, ROWS = 32, 4


STEP_LOSSES: dict[str, Loss] = {
    **{name: make_loss(name) for name in ("cross_entropy", "reinforce", "importance_sampling", "ppo")},
    "gspo": make_loss("gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),  # episodes pooled
    "m2po": make_loss("m2po", {"second_moment_max": 0.2}),  # the batch sorted
    "clip_cov": make_loss("clip_cov", {"covariance_low": 0.0, "covariance_share": 0.1}),  # tokens drawn
    "dpo": make_loss("dpo"),  # groups pooled, a reference read
    "everything": make_loss(
        "gmpo", anchor_old=True, corrected=True, kl=partial(loss_term, KL_LOSSES["ratio_k3"], kl_coef=0.1)
    ),
}
"""One of each kind that a training step has to treat in another way; `test_loss.py` goes through all forms."""


def datum(rng: np.random.Generator, length: int, group: int = 0, episode: int = 0) -> Datum:
    """Random tokens, a random mask that leaves the first token out, plausible log-probs, one advantage."""
    mask = rng.random(length) < 0.6
    mask[0] = False
    around = lambda: np.where(mask, rng.normal(-4.5, 0.3, length), 0.0).astype(np.float32)  # noqa: E731
    return Datum(
        tokens=rng.integers(0, VOCAB, length).astype(np.int32),
        mask=mask,
        logprobs=around(),
        advantages=np.where(mask, rng.normal(0.0, 1.0), 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        group=group,
        episode=episode,
        logprobs_old=around(),
        logprobs_ref=around(),
        correction=np.where(mask, rng.uniform(0.5, 1.5, length), 1.0).astype(np.float32),
    )


def ragged() -> list[Datum]:
    """Seven datums in three groups and six episodes, 112 positions; the last two are one episode that split."""
    rng = np.random.default_rng(0)
    layout = [(5, 0, 0), (19, 0, 1), (33, 1, 2), (12, 1, 3), (26, 2, 4), (15, 2, 5), (9, 2, 5)]
    return [datum(rng, *x) for x in layout]


def constant_of(aggregation: str) -> float | None:
    """The constant an aggregation needs, if it needs one."""
    return 8.0 if aggregation == "seq_mean_token_sum_norm" else None


def packed(
    data: Sequence[Datum], aggregation: str = "seq_mean_token_mean", *, loss: str = "ppo", **shape: int
) -> Batch:
    """The whole batch weighed and packed, four rows of 32 unless said otherwise, with the columns the loss reads."""
    weights = token_weights(data, aggregation, constant=constant_of(aggregation))
    return pack(data, weights, columns=STEP_LOSSES[loss].columns, **({"width": WIDTH, "rows": ROWS} | shape))


def assert_trees_close(a: object, b: object, tolerance: float = 1e-5) -> None:
    """Equal up to rounding, relative to the largest entry of each leaf."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        scale = float(np.abs(y).max(initial=0.0))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(scale, 1e-3))
