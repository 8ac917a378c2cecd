"""What a seat says and hears in a game between two scripted players: for warm starts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.games.match import begin, play, told
from envs.games.players import Strategy, choose
from envs.games.rules import Rules
from jaxrl.types import Message


def demonstrate(
    rules: Rules[Any], strategies: Sequence[Strategy], seat: int, rng: np.random.Generator
) -> list[Message]:
    """Play one whole game from a random start; the conversation of `seat`, which ends with its last move.

    Empty when the game ended before that seat could move.
    """
    match = begin(rules, int(rng.integers(len(rules.starts))))
    messages: list[Message] = []
    while not match.over:
        move = choose(strategies[match.to_move], match.state, rng)
        if match.to_move == seat:
            messages += [Message("user", told(match, seat)), Message("assistant", move)]
        match = play(match, move)
    return messages
