"""Rewards of episodes that ran into a budget: a soft penalty on length, and no credit above zero.

Knows trajectories, how they ended, and numbers. What a row of the table of endings calls overlong is shaped;
everything else is left as it is. Training reads shaped rewards; whether a group can teach is decided on the rewards
as the envs gave them, and metrics report those too.
"""

from dataclasses import dataclass, replace

from jaxrl.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class SoftOverlong:
    """Penalty on the length of episodes that a budget ended, times `factor`.

    The ramp is that of DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 13), which puts it on every long answer; here an
    episode that ended by itself is never penalised for the length it took.

    max_tokens, buffer: sampled tokens of an episode; the penalty falls from 0 to -1 over the last `buffer` of them.
    """

    max_tokens: int
    buffer: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_tokens:
            raise ValueError(f"buffer={self.buffer}: expected 1 to max_tokens={self.max_tokens}")
        if not self.factor > 0:
            raise ValueError(f"factor={self.factor}: expected a number above 0")


@dataclass(frozen=True)
class Shaping:
    """What happens to the rewards of overlong episodes.

    clamp_on_limit: a reward above zero becomes zero. overlong: the soft penalty, added afterwards.
    """

    clamp_on_limit: bool = False
    overlong: SoftOverlong | None = None


def soft_overlong(tokens: int, penalty: SoftOverlong) -> float:
    """0 up to max_tokens - buffer, then linear to -1 at max_tokens, and -1 above; times the factor."""
    free = penalty.max_tokens - penalty.buffer
    return penalty.factor * max(-1.0, min(0.0, (free - tokens) / penalty.buffer))


def shape(group: TrajectoryGroup, shaping: Shaping) -> TrajectoryGroup:
    """The group with the rewards to train on."""
    rewards = tuple(_shaped(t, float(r), shaping) for t, r in zip(group.trajectories_G, group.rewards_G, strict=True))
    return replace(group, rewards_G=rewards)


def _shaped(trajectory: Trajectory, reward: float, shaping: Shaping) -> float:
    if not trajectory.ending.overlong:
        return reward
    if shaping.clamp_on_limit:
        reward = min(reward, 0.0)
    if shaping.overlong is not None:
        reward += soft_overlong(sum(len(t.action.tokens) for t in trajectory.transitions), shaping.overlong)
    return reward
