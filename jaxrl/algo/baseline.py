"""A baseline that moves with training: one running mean of rewards for each role, for games without groups.

Knows the members of groups and numbers. Must not know where the means are kept between steps: they go in and come
out as plain numbers by name, which JSON holds to the last bit.

A trajectory does not say what role it played. The members of a coupled group are the seats of one game, in order
(`jaxrl.seats`), so a role is by default the seat in a game of the group's tags.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl.algo.members import Members

Baselines = Mapping[str, float]


def _seats(members: Members) -> list[str]:
    return [f"{'/'.join(members.tags)}#{seat}" for seat in members.seats_G]


def _tags(members: Members) -> list[str]:
    return ["/".join(members.tags) for _ in members.seats_G]


ROLES: dict[str, Callable[[Members], list[str]]] = {"seat": _seats, "tags": _tags}
"""Who shares a baseline: members with the same place in groups of the same tags, or everyone in those groups."""


def moving_baseline(
    members_P: Sequence[Members],
    baselines: Baselines,
    *,
    decay: float = 0.95,
    initial: float = 0.0,
    role: str = "seat",
) -> tuple[list[np.ndarray], dict[str, float]]:
    """A = R - the mean reward of the role so far (SPIRAL, Liu et al. 2025, arXiv 2506.24119). Also the means after.

    A batch is measured by the means before it, and moves them once: for n episodes with mean m, to
    decay^n b + (1 - decay^n) m. So no reward is in its own baseline, and the order of the batch is of no account.
    SPIRAL goes episode by episode and updates first, which for the first of them is decay times our advantage.
    A role that was not met before starts from `initial`.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for members in members_P:
        for name, reward in zip(ROLES[role](members), members.rewards_G.tolist(), strict=True):
            rewards[name].append(reward)
    before = {name: baselines.get(name, initial) for name in rewards}
    advantages_P = [
        members.rewards_G - np.array([before[name] for name in ROLES[role](members)], np.float64)
        for members in members_P
    ]
    after = {name: _moved(before[name], values, decay) for name, values in rewards.items()}
    return advantages_P, {**baselines, **after}


def _moved(before: float, rewards: Sequence[float], decay: float) -> float:
    kept = decay ** len(rewards)
    return kept * before + (1 - kept) * (math.fsum(rewards) / len(rewards))
