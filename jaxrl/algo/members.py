"""The members of a group whose rewards count, and whether numbers differ enough to teach anything.

Knows groups of trajectories, how episodes end, and numbers. Must not know estimators, losses or JAX. What makes a
group degenerate is decided here: who failed is not among the members at all, so nothing computed from them can
be moved by a failure; and values that agree within the tolerance are the same value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jaxrl.types import Metrics, Trajectory, TrajectoryGroup

CONSTANT_TOLERANCE = 1e-6
"""Rewards that differ by less than this (relative to the largest, if that is above 1) are the same reward."""


@dataclass(frozen=True)
class Members:
    """The members of one group that count, in the order of the group.

    rewards_G: total rewards, as they are trained on. seats_G: each one's place in the whole group. metrics_G: of
    the group reward. tags: the group's.
    """

    rewards_G: Float[np.ndarray, " G"]
    seats_G: tuple[int, ...]
    trajectories_G: tuple[Trajectory, ...]
    metrics_G: tuple[Metrics, ...]
    tags: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.seats_G)


def members(group: TrajectoryGroup) -> Members:
    """Who counts, read from the table of endings. Raises ValueError when the reward of one is not finite."""
    seats = tuple(i for i, t in enumerate(group.trajectories_G) if t.ending.in_baseline)
    rewards = np.array([group.rewards_G[i] for i in seats], np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"rewards {list(group.rewards_G)} of members that count ({list(seats)}) contain a value that is not "
            "finite. A member whose grading failed should end with StopReason.GRADER_ERROR, which keeps it out of the "
            "baseline"
        )
    return Members(
        rewards,
        seats,
        tuple(group.trajectories_G[i] for i in seats),
        tuple(group.metrics_G[i] for i in seats),
        group.tags,
    )


def turn_lengths(members: Members) -> list[np.ndarray]:
    """Trained tokens of each turn of each member: those it sampled, none in a masked turn."""
    return [
        np.array([0 if turn.masked else len(turn.action.tokens) for turn in t.transitions], np.float64)
        for t in members.trajectories_G
    ]


def lengths(members: Members) -> Float[np.ndarray, " G"]:
    """Trained tokens of each member."""
    return np.array([turns.sum() for turns in turn_lengths(members)], np.float64)


def turn_rewards(members: Members) -> list[np.ndarray]:
    """The rewards of each member by turn; they sum to its total.

    What no step gave (group reward, conclusion, shaping) belongs to the last turn.
    """
    rewards_G = []
    for trajectory, total in zip(members.trajectories_G, members.rewards_G, strict=True):
        rewards = np.array([turn.reward for turn in trajectory.transitions], np.float64)
        rewards[-1:] = total - rewards[:-1].sum()
        rewards_G.append(rewards)
    return rewards_G


def metric(members: Members, name: str) -> list[float | None]:
    """What each member reported as `name`, summed over its turns, conclusion and group reward; None if it did not."""
    values: list[float | None] = []
    for trajectory, extra in zip(members.trajectories_G, members.metrics_G, strict=True):
        concluded = trajectory.conclusion.metrics if trajectory.conclusion else {}
        reported = [m[name] for m in [*(t.metrics for t in trajectory.transitions), concluded, extra] if name in m]
        values.append(float(sum(reported)) if reported else None)
    return values


def informative(values: Float[np.ndarray, " N"]) -> bool:
    """Whether values can teach anything: at least two, and not all the same within the tolerance."""
    if len(values) < 2:
        return False
    return bool(np.ptp(values) > CONSTANT_TOLERANCE * max(1.0, float(np.abs(values).max())))


def centred(values: Float[np.ndarray, " N"], rows: Float[np.ndarray, " M"] | None = None) -> Float[np.ndarray, " N"]:
    """Values less the mean of `rows` (by default their own); exactly 0 where those are all the same."""
    rows = values if rows is None else rows
    return values - rows.mean() if informative(rows) else np.zeros(len(values))


def standardised(
    values: Float[np.ndarray, " N"], *, ddof: float, epsilon: float, rows: Float[np.ndarray, " M"] | None = None
) -> Float[np.ndarray, " N"]:
    """`centred`, over (the standard deviation of the rows + epsilon)."""
    rows = values if rows is None else rows
    return centred(values, rows) / (rows.std(ddof=ddof) + epsilon) if informative(rows) else np.zeros(len(values))


def weighted_deviations(
    values: Sequence[np.ndarray], weights: Sequence[np.ndarray], ddof: float
) -> tuple[list[np.ndarray], float]:
    """Values less their weighted mean over all, and the weighted variance; zeros, and 1, if all that weighs agrees.

    The variance is over the sum of the weights - ddof, so that a weight is a number of observations, such as tokens.
    """
    x, w = concatenated(values), concatenated(weights)
    if w.sum() <= ddof or not informative(x[w > 0]):
        return [np.zeros(len(v)) for v in values], 1.0
    mean = np.average(x, weights=w)
    return [v - mean for v in values], float((w * (x - mean) ** 2).sum() / (w.sum() - ddof))


def concatenated(parts: Sequence[np.ndarray]) -> Float[np.ndarray, " N"]:
    """All the values in one row; of nothing, nothing."""
    return np.concatenate([np.zeros(0), *parts])
