"""Players as strategies: from a state to how likely each legal move is. So what they achieve can be computed exactly.

Knows the rules of any game; must not know conversations. A strategy is a pure function and, made by the functions here,
can be pickled. In a game with hidden cards a strategy is handed the whole state and has to look at its own card only.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from envs.games.rules import Move, Payoffs, Rules

Strategy = Callable[[Any], Mapping[Move, float]]
"""state -> the probability of each legal move (those of 0 may be missing)."""


def random_player(rules: Rules[Any]) -> Strategy:
    """Every legal move is as likely as any other."""
    return partial(_uniform, rules)


def mixed_player(strong: Strategy, weak: Strategy, error_rate: float) -> Strategy:
    """Plays `weak` with probability `error_rate`, drawn anew each move, else `strong`."""
    if not 0.0 <= error_rate <= 1.0:
        raise ValueError(f"error_rate={error_rate}: expected a probability, 0 <= error_rate <= 1")
    return partial(_mixed, strong, weak, error_rate)


def choose(strategy: Strategy, state: Any, rng: np.random.Generator) -> Move:
    """Draw a move."""
    chances = strategy(state)
    moves, weights = list(chances), np.array(list(chances.values()))
    return moves[int(rng.choice(len(moves), p=weights / weights.sum()))]


def expected(rules: Rules[Any], strategies: Sequence[Strategy]) -> Payoffs:
    """What each seat wins on average, over the starts and all that the strategies may do. Exact; visits every state
    that can be reached once."""
    seen: dict[Any, float] = {}

    def first(state: Any) -> float:
        if state not in seen:
            ended = rules.outcome(state)
            chances = {} if ended else strategies[rules.to_move(state)](state)
            seen[state] = ended[0] if ended else sum(p * first(rules.play(state, m)) for m, p in chances.items() if p)
        return seen[state]

    value = sum(map(first, rules.starts)) / len(rules.starts)
    return value, -value


def _uniform(rules: Rules[Any], state: Any) -> dict[Move, float]:
    legal = rules.legal_moves(state)
    return dict.fromkeys(legal, 1 / len(legal))


def _mixed(strong: Strategy, weak: Strategy, error_rate: float, state: Any) -> dict[Move, float]:
    chances: dict[Move, float] = {}
    for strategy, share in ((strong, 1 - error_rate), (weak, error_rate)):
        for move, p in strategy(state).items():
            chances[move] = chances.get(move, 0.0) + share * p
    return chances
