"""Scripted players of the guessing game, for warm starts and as yardsticks.

A player is a pure function of what it saw (the conversation) and of a numpy Generator. It must never see the task:
what it cannot read in the messages, it does not know.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from envs.guess_number.game import HIGHER, LOWER, GuessNumberEnv, read_guess
from jaxrl.types import Message, Task

Player = Callable[[Sequence[Message], np.random.Generator], int]
"""(conversation so far, randomness) -> the next guess."""

_PROMPT = re.compile(r"Guess 1-([0-9]+)\.")


class Possible(NamedTuple):
    """What the conversation leaves possible: low <= secret <= top, out of [1, high]."""

    low: int
    top: int
    high: int


def possible(messages: Sequence[Message]) -> Possible:
    """Read the range and every reply in the conversation."""
    prompts = [found for message in messages if message.role == "user" and (found := _PROMPT.match(message.content))]
    if not prompts:
        raise ValueError("no message reads 'Guess 1-<high>.'; pass the whole conversation, the opening included")
    high = int(prompts[0][1])
    low, top = 1, high
    for said, reply in itertools.pairwise(messages):
        guess = read_guess(said.content, high) if said.role == "assistant" else None
        if guess is not None and reply.content == HIGHER:
            low = max(low, guess + 1)
        elif guess is not None and reply.content == LOWER:
            top = min(top, guess - 1)
    return Possible(low, top, high)


def random_player(messages: Sequence[Message], rng: np.random.Generator) -> int:
    """Uniform over the whole range: deaf to the replies, so it may repeat itself or contradict them."""
    return int(rng.integers(1, possible(messages).high + 1))


def stubborn_player(messages: Sequence[Message], rng: np.random.Generator) -> int:
    """Always the top of the range, whatever it was told: a guess wasted."""
    return possible(messages).high


def bisecting_player(messages: Sequence[Message], rng: np.random.Generator) -> int:
    """The middle of what is possible: optimal, and deterministic."""
    low, top, _ = possible(messages)
    return (low + top) // 2


def mixed_player(p: float, *, strong: Player = bisecting_player, weak: Player = random_player) -> Player:
    """Plays `strong` with probability `p`, else `weak`, drawn anew each turn."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p is {p}; expected a probability, 0 <= p <= 1")
    return lambda messages, rng: (strong if rng.random() < p else weak)(messages, rng)


def demonstrate(task: Task, player: Player, rng: np.random.Generator) -> list[Message]:
    """Play one whole episode, won or lost, and return its conversation (which ends with the last guess)."""
    episode_rng = rng.spawn(1)[0]
    env = GuessNumberEnv()
    env.start(task)
    ended = False
    while not ended:
        guess = player(env.messages, episode_rng)
        ended = env.guess(Message("assistant", str(guess))).terminated
    return list(env.messages)
