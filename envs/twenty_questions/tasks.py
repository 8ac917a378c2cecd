"""Tasks of twenty questions: which secrets, in which order. The prompt cannot give the secret away."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from envs.twenty_questions.knowledge import THINGS
from jaxrl.types import Task

Split = Literal["train", "test"]


def tasks(
    split: Split,
    count: int,
    *,
    things: Sequence[str] = THINGS,
    turns: int = 20,
    listed: bool = False,
    seed: int = 0,
) -> list[Task]:
    """`count` tasks with a secret among `things`; a longer list starts with the shorter one.

    Every run of as many tasks as there are things holds each once. The splits are two random streams: they share
    things, not orders. listed: whether the prompt lists the things, for players who cannot know them.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    for name, value, least in (("count", count, 0), ("turns", turns, 1), ("number of things", len(set(things)), 1)):
        if value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
    rng = np.random.default_rng((seed, get_args(Split).index(split)))
    rounds = -(-count // len(things))
    secrets = [things[i] for _ in range(rounds) for i in rng.permutation(len(things))]
    prompt = f"{turns} questions: ask yes or no, or say Guess: x." + (f" Things: {' '.join(things)}." if listed else "")
    return [Task(prompt=prompt, target=secret, metadata={"turns": turns}) for secret in secrets[:count]]
