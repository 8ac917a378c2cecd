"""Tasks of the guessing game: which secrets, in which order. Knows no rule of play.

The prompt depends on `high` and `turns` only, so it cannot give the secret away.
"""

from typing import Literal, get_args

import numpy as np

from jaxrl.types import Task

Split = Literal["train", "test"]


def tasks(split: Split, count: int, *, high: int, turns: int, seed: int = 0) -> list[Task]:
    """`count` tasks with secrets in [1, high]; a longer list starts with the shorter one.

    Every run of `high` tasks holds each secret once, so an evaluation over a multiple of `high` tasks is exact
    in the secret. The splits are two random streams: with so few secrets they share secrets, not orders.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    for name, value, least in (("count", count, 0), ("high", high, 1), ("turns", turns, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
    rng = np.random.default_rng([seed, get_args(Split).index(split)])
    secrets = [int(secret) for _ in range(-(-count // high)) for secret in rng.permutation(high) + 1]
    return [_task(secret, high, turns) for secret in secrets[:count]]


def _task(secret: int, high: int, turns: int) -> Task:
    prompt = f"Guess 1-{high}. {turns} tries."
    return Task(prompt=prompt, target=secret, metadata={"high": high, "turns": turns})
