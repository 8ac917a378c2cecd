"""From the rewards of a group to one advantage per member.

Knows groups of trajectories, how episodes end, and numbers. Knows nothing about tokens, losses or JAX. An
estimator is a row of `ADVANTAGES`: a function of the rewards of the members that count, at least two of them and
not all equal. Everything that makes a group degenerate is decided once, in `group_advantages`.
"""

import difflib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from jaxrl.types import TrajectoryGroup

Estimator = Callable[[np.ndarray], np.ndarray]

CONSTANT_TOLERANCE = 1e-6
"""Rewards that differ by less than this (relative to the largest, if that is above 1) are the same reward."""

STD_EPSILON = 1e-6


def mean(rewards: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = R_i - mean(R) (Liu et al. 2025, arXiv 2503.20783: no division, so no bias towards easy or hard tasks)."""
    return rewards - rewards.mean()


def mean_std(rewards: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), sample standard deviation (Shao et al. 2024, arXiv 2402.03300)."""
    return mean(rewards) / (rewards.std(ddof=1) + STD_EPSILON)


def leave_one_out(rewards: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = R_i - mean of the others (Ahmadian et al. 2024, arXiv 2402.14740)."""
    return mean(rewards) * (len(rewards) / (len(rewards) - 1))


ADVANTAGES: dict[str, Estimator] = {
    "mean": mean,
    "mean_std": mean_std,
    "leave_one_out": leave_one_out,
}


def informative(rewards_G: Float[np.ndarray, " G"], counted_G: Bool[np.ndarray, " G"]) -> bool:
    """Whether a group can teach anything: two members that count, with different rewards."""
    kept = rewards_G[counted_G]
    if len(kept) < 2:
        return False
    return bool(np.ptp(kept) > CONSTANT_TOLERANCE * max(1.0, float(np.abs(kept).max())))


def group_advantages(
    rewards_G: Float[np.ndarray, " G"], counted_G: Bool[np.ndarray, " G"], method: str
) -> Float[np.ndarray, " G"]:
    """Advantages of one group. Members that do not count have advantage 0 and do not move the others."""
    if method not in ADVANTAGES:
        close = difflib.get_close_matches(method, ADVANTAGES) or list(ADVANTAGES)
        raise ValueError(f"advantage method {method!r} does not exist; did you mean {', '.join(close)}?")
    if not np.isfinite(rewards_G[counted_G]).all():
        raise ValueError(
            f"rewards {rewards_G.tolist()} contain a value that is not finite. A member whose grading failed should "
            "end with StopReason.GRADER_ERROR, which keeps it out of the baseline"
        )
    advantages_G = np.zeros(len(rewards_G))
    if informative(rewards_G, counted_G):
        advantages_G[counted_G] = ADVANTAGES[method](rewards_G[counted_G])
    return advantages_G


def counted(group: TrajectoryGroup) -> Bool[np.ndarray, " G"]:
    """Which members' rewards count in the baseline, read from the table of endings."""
    return np.array([t.ending.in_baseline for t in group.trajectories_G], bool)


def compute_advantages(groups_P: Sequence[TrajectoryGroup], method: str) -> list[list[float]]:
    """advantages_P_G: one number per member of each group, all zero for a group that teaches nothing."""
    return [
        group_advantages(np.array(group.rewards_G, np.float64), counted(group), method).tolist() for group in groups_P
    ]
