"""Tasks of the games: which start, from which seat, against which draws. Knows no rule of play."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from envs.games.rules import SEATS, Rules
from jaxrl.types import Task

Split = Literal["train", "test"]


def tasks(split: Split, count: int, rules: Rules[Any], *, seats: Sequence[int] = SEATS, seed: int = 0) -> list[Task]:
    """`count` duels; a longer list starts with the shorter one.

    Every run of as many as there are starts times seats holds each pair once. The splits are two random streams: they
    share starts, and not what a scripted opponent draws.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    if count < 0:
        raise ValueError(f"count is {count}; expected 0 or more")
    if not seats or not set(seats) <= set(SEATS):
        raise ValueError(f"seats is {tuple(seats)}; expected 0, 1 or both")
    rng = np.random.default_rng((seed, get_args(Split).index(split)))
    pairs = list(itertools.product(range(len(rules.starts)), seats))
    made: list[Task] = []
    while len(made) < count:
        shuffled = [pairs[i] for i in rng.permutation(len(pairs))]
        made += [_task(rules, start, seat, int(rng.integers(2**31))) for start, seat in shuffled]
    return made[:count]


def _task(rules: Rules[Any], start: int, seat: int, seed: int) -> Task:
    return Task(rules.brief(seat), metadata={"start": start, "seat": seat, "seed": seed})
