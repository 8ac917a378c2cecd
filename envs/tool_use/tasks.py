"""Questions about the almanac, generated from its table. Knows facts and wording; no rule of the game.

    level 1  one lookup, the key is given
    level 2  two lookups and arithmetic, the keys are given
    level 3  the keys are not given (list_fact_keys finds them): arithmetic, or a hop through a twin town

Every question of a split is in its pool, so the pool is the bundled benchmark; `tasks` samples it. A prompt holds
no digit, and the splits share no fact, so no answer can leak.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from envs.tool_use.facts import ATTRIBUTES, Split, Value, facts, key_of, towns
from jaxrl.types import Task

LEVELS = (1, 2, 3)

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def pool(split: Split, level: int) -> tuple[Task, ...]:
    """Every task of a split and level, in a fixed order."""
    facts(split)  # a wrong split is named here rather than as a missing cache entry
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; expected one of {LEVELS}")
    return _pool(split, level)


@functools.cache
def _pool(split: Split, level: int) -> tuple[Task, ...]:
    if level == 1:
        return tuple(_lookup_task(split, town, each) for town in towns(split) for each in ATTRIBUTES)
    pairs = [
        _pair_task(split, level, pair, each, sign)
        for each in ATTRIBUTES
        for pair in itertools.combinations(towns(split), 2)
        for sign in OPERATIONS
    ]
    hops = [_hop_task(split, town, each) for town in towns(split) for each in ATTRIBUTES]
    return tuple(pairs if level == 2 else pairs + hops)


def tasks(split: Split, count: int, *, seed: int = 0, levels: Sequence[int] = LEVELS) -> list[Task]:
    """`count` tasks, the levels in turn; a longer list starts with the shorter one.

    Each level's pool is shuffled and dealt without repeats until it is used up, then shuffled again.
    """
    if count < 0 or not levels:
        raise ValueError(f"count is {count} and levels is {levels!r}; expected count >= 0 and at least one level")
    decks = [_deck(pool(split, level), [seed, split == "test", level]) for level in levels]
    return [next(decks[i % len(decks)]) for i in range(count)]


def _deck(cards: Sequence[Task], seed: Sequence[int]) -> Iterator[Task]:
    rng = np.random.default_rng(list(seed))
    while True:
        yield from (cards[i] for i in rng.permutation(len(cards)))


def _lookup_task(split: Split, town: str, attribute: str) -> Task:
    key = key_of(split, town, attribute)
    return _task(split, 1, f"What is {key}?", _number(split, key), [key])


def _pair_task(split: Split, level: int, pair: tuple[str, str], attribute: str, sign: str) -> Task:
    keys = [key_of(split, town, attribute) for town in pair]
    left, right = keys if level == 2 else [f"the {attribute} of {town.title()}" for town in pair]
    answer = OPERATIONS[sign](*(_number(split, key) for key in keys))
    return _task(split, level, f"What is {left} {_WORDS[sign]} {right}?", answer, keys, sign)


def _hop_task(split: Split, town: str, attribute: str) -> Task:
    twin_key = key_of(split, town, "twin")
    key = key_of(split, str(facts(split)[twin_key]).lower(), attribute)
    prompt = f"What is the {attribute} of the twin of {town.title()}?"
    return _task(split, 3, prompt, _number(split, key), [twin_key, key])


def _task(split: Split, level: int, prompt: str, answer: int, keys: list[str], sign: str = "") -> Task:
    metadata = {"split": split, "level": level, "keys": tuple(keys), "operation": sign}
    return Task(prompt=prompt, target=answer, metadata=metadata)


def _number(split: Split, key: str) -> int:
    value: Value = facts(split)[key]
    if not isinstance(value, int):
        raise TypeError(f"fact {key!r} is {value!r}; expected a number")
    return value
