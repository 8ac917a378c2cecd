"""Groups as a rollout leaves them, made by hand: what advantages are computed from."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.algo.advantage import compute_advantages
from jaxrl.types import Metrics, Sample, StopReason, Trajectory, TrajectoryGroup, Transition


def episode(
    lengths: Sequence[int] = (1,),
    rewards: Sequence[float] = (),
    states: Sequence[int] = (),
    reason: StopReason = StopReason.TERMINATED,
    metrics: Metrics | None = None,
    masked: Sequence[int] = (),
) -> Trajectory:
    """An episode of turns of so many sampled tokens, each after one newly observed token.

    rewards: of the steps, 0 where none is given. states: those observed tokens, 100 and up where none are given.
    metrics: of the last step. masked: turns that are not trained.
    """
    context: tuple[int, ...] = ()
    turns = []
    for i, n in enumerate(lengths):
        context += (states[i] if states else 100 + i,)
        action = Sample((7,) * n, (-0.5,) * n, (0,) * n, "stop")
        last = i == len(lengths) - 1
        reward = rewards[i] if rewards else 0.0
        turns.append(
            Transition(context, action, reward, last, metrics=(metrics or {}) if last else {}, masked=i in masked)
        )
        context += action.tokens
    return Trajectory(tuple(turns), reason)


def group(
    rewards: Sequence[float],
    reasons: Sequence[StopReason] | None = None,
    *,
    lengths: Sequence[Sequence[int]] | None = None,
    tags: tuple[str, ...] = (),
    viable: bool = True,
) -> TrajectoryGroup:
    """Members with these total rewards; what is no step's reward is the group's."""
    reasons = reasons or [StopReason.TERMINATED] * len(rewards)
    lengths = lengths or [(1,)] * len(rewards)
    episodes = tuple(episode(n, reason=r) for n, r in zip(lengths, reasons, strict=True))
    return TrajectoryGroup(episodes, tuple(rewards), ({},) * len(rewards), tags, viable=viable)


def of_episodes(*episodes: Trajectory, extra: float = 0.0) -> TrajectoryGroup:
    """Members whose rewards are those of their steps; `extra` is a group reward of each."""
    return TrajectoryGroup(episodes, tuple(e.reward + extra for e in episodes), ({},) * len(episodes))


def with_metrics(*metrics: Mapping[str, float], extra: Sequence[float] | None = None) -> TrajectoryGroup:
    """One-turn members that reported these."""
    totals = extra or [sum(m.values()) for m in metrics]
    return TrajectoryGroup(tuple(episode(metrics=m) for m in metrics), tuple(totals), ({},) * len(metrics))


def advantages_of(groups_P: Sequence[TrajectoryGroup], method: str, **given: Any) -> list[list[Any]]:
    """`compute_advantages`, for tests that know whether a row gives one number an episode or one a turn."""
    return [list(advantages_G) for advantages_G in compute_advantages(groups_P, method, **given)]


def flat(advantages_P_G: Sequence[Sequence]) -> np.ndarray:
    """All numbers in order, of turns too."""
    return np.concatenate([np.zeros(0), *(np.ravel(a) for advantages_G in advantages_P_G for a in advantages_G)])
