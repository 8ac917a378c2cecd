"""Scripted players of twenty questions, for warm starts and as yardsticks.

A player is a pure function of what it saw and of a numpy Generator; it knows the table, and never the task.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from envs.twenty_questions.answers import answer_about, property_asked, thing_guessed
from envs.twenty_questions.game import opening
from envs.twenty_questions.knowledge import KNOWLEDGE, PROPERTIES, THINGS, Answer
from jaxrl.types import Message, Task

Player = Callable[[Sequence[Message], np.random.Generator], str]
"""(conversation so far, randomness) -> the next question or guess."""


def possible(messages: Sequence[Message], things: Sequence[str] = THINGS) -> list[str]:
    """The things of which the table would have given every answer; unknown is an answer like the others."""
    left = list(things)
    for said, reply in itertools.pairwise(messages):
        if said.role != "assistant":
            continue
        guess, name = thing_guessed(said.content), property_asked(said.content)
        if guess is not None:
            left = [thing for thing in left if thing != guess]
        elif name is not None:
            left = [thing for thing in left if KNOWLEDGE[thing][name].value == reply.content]
    return left


def splitting_player(things: Sequence[str] = THINGS) -> Player:
    """Asks what leaves the fewest things possible in the worst case; guesses when one is left, or nothing tells two
    apart. Deterministic."""

    def play(messages: Sequence[Message], rng: np.random.Generator) -> str:
        left = possible(messages, things)
        worst = {name: max(_split(left, name)) for name in PROPERTIES}
        best = min(worst, key=worst.__getitem__)
        if len(left) <= 1 or worst[best] == len(left):
            return f"Guess: {left[0] if left else things[0]}"
        return f"{best}?"

    return play


def random_player(things: Sequence[str] = THINGS) -> Player:
    """Asks for any property, or guesses anything; deaf to the answers."""

    def play(messages: Sequence[Message], rng: np.random.Generator) -> str:
        says = [*(f"{name}?" for name in PROPERTIES), *(f"Guess: {thing}" for thing in things)]
        return says[int(rng.integers(len(says)))]

    return play


def mixed_player(strength: float, things: Sequence[str] = THINGS) -> Player:
    """Plays like the splitting player with probability `strength` a turn, else like the random one."""
    if not 0.0 <= strength <= 1.0:
        raise ValueError(f"strength={strength}: expected a probability, 0 <= strength <= 1")
    strong, weak = splitting_player(things), random_player(things)
    return lambda messages, rng: (strong if rng.random() < strength else weak)(messages, rng)


def demonstrate(task: Task, player: Player, rng: np.random.Generator) -> list[Message]:
    """Play one whole episode against the table, won or lost; its conversation, which ends with the last turn."""
    messages = opening(task)
    for turn in range(task.metadata["turns"]):
        said = player(tuple(messages), rng)
        messages.append(Message("assistant", said))
        guess = thing_guessed(said)
        if guess == task.target or turn + 1 == task.metadata["turns"]:
            break
        answer = Answer.NO if guess is not None else answer_about(task.target, said)
        messages.append(Message("user", answer.value))
    return messages


def _split(things: Sequence[str], name: str) -> list[int]:
    return [sum(KNOWLEDGE[thing][name] is answer for thing in things) for answer in Answer]
