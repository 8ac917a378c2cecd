"""Players that cannot be beaten: minimax where everything is seen, the known equilibria of Kuhn poker where it is not.

Connect four is too large to be solved this way; there the search stops after some moves and calls the rest a draw.
"""

import functools
from collections.abc import Callable
from typing import Any

from envs.games.kuhn_poker import State as KuhnState
from envs.games.players import Strategy
from envs.games.rules import Move, Rules

LOOKAHEAD = {"connect_four": 3}
"""Games whose search is cut, and after how many moves."""


def perfect_player(rules: Rules[Any], *, lookahead: int | None = None) -> Strategy:
    """Any of the best moves, each as likely. lookahead: moves the search goes on for; None is that of LOOKAHEAD, or to
    the end. Among moves that win it prefers none, so it may take its time."""
    if lookahead is not None and lookahead < 1:
        raise ValueError(f"lookahead={lookahead}: expected at least 1, or None for the game's own")
    if rules.hidden:
        if lookahead is not None:
            raise ValueError(f"lookahead={lookahead} has no effect in {rules.name}: its player does not search")
        return functools.partial(kuhn_equilibrium, 0.0)
    return functools.partial(_best, rules, LOOKAHEAD.get(rules.name) if lookahead is None else lookahead)


def kuhn_equilibrium(alpha: float, state: KuhnState) -> dict[Move, float]:
    """An equilibrium of Kuhn poker, worth -1/18 of a chip to seat 0. alpha: how often it bets the jack, from 0 to 1/3.

    Looks at the mover's own card only.
    """
    if not 0.0 <= alpha <= 1 / 3:
        raise ValueError(f"alpha={alpha}: expected a number from 0 to 1/3")
    seat = len(state.history) % 2
    bold = _aggression(alpha)[state.history][state.cards[seat]]
    meek, active = ("fold", "call") if state.history[-1:] == ("bet",) else ("check", "bet")
    return {meek: 1 - bold, active: bold}


def _aggression(alpha: float) -> dict[tuple[Move, ...], dict[str, float]]:
    """How likely each card bets, or calls."""
    return {
        (): {"J": alpha, "Q": 0.0, "K": 3 * alpha},
        ("check",): {"J": 1 / 3, "Q": 0.0, "K": 1.0},
        ("bet",): {"J": 0.0, "Q": 1 / 3, "K": 1.0},
        ("check", "bet"): {"J": 0.0, "Q": alpha + 1 / 3, "K": 1.0},
    }


def _best(rules: Rules[Any], lookahead: int | None, state: Any) -> dict[Move, float]:
    value = minimax(rules)
    left = None if lookahead is None else lookahead - 1
    worth = {move: -value(rules.play(state, move), left) for move in rules.legal_moves(state)}
    best = [move for move, w in worth.items() if w == max(worth.values())]
    return dict.fromkeys(best, 1 / len(best))


@functools.cache
def minimax(rules: Rules[Any]) -> Callable[[Any, int | None], float]:
    """(state, moves to look ahead) -> what it is worth to the seat to move, in a game where nothing is hidden.

    The seats must take turns. Remembers every state it was asked about.
    """
    if rules.hidden:
        raise ValueError(f"minimax needs all to be seen, and {rules.name} has hidden cards; use kuhn_equilibrium")

    @functools.lru_cache(maxsize=2**18)
    def value(state: Any, left: int | None = None) -> float:
        ended = rules.outcome(state)
        if ended is not None:
            return ended[rules.to_move(state)]
        if left == 0:
            return 0.0
        left = None if left is None else left - 1
        return max(-value(rules.play(state, move), left) for move in rules.legal_moves(state))

    return value
