"""Kuhn poker (Kuhn 1950): three cards, one each, one chip in the pot from each, one bet of one chip.

A state is the deal and the actions so far. The deal is the start, and each of the six is as likely; a seat sees its
own card only.
"""

import itertools
import re
from typing import NamedTuple

from envs.games.rules import Move, Payoffs, Rules, checked, read, won_by

CARDS = "JQK"

_ANTE, _BET = 1.0, 1.0
_WORD = re.compile(r"\b(?:check|bet|fold|call)\b", re.IGNORECASE)

_LEGAL: dict[tuple[Move, ...], tuple[Move, ...]] = {
    (): ("check", "bet"),
    ("check",): ("check", "bet"),
    ("bet",): ("fold", "call"),
    ("check", "bet"): ("fold", "call"),
}
"""What may follow each history; every other history is the end."""


class State(NamedTuple):
    """The card of each seat, and what was done."""

    cards: tuple[str, str]
    history: tuple[Move, ...] = ()


def _brief(seat: int) -> str:
    return "Kuhn poker. Cards J<Q<K. Say check, bet, call or fold."


def _to_move(state: State) -> int:
    return len(state.history) % 2


def _legal_moves(state: State) -> tuple[Move, ...]:
    return _LEGAL.get(state.history, ())


def _play(state: State, move: Move) -> State:
    return State(state.cards, (*state.history, checked(move, _legal_moves(state))))


def _outcome(state: State) -> Payoffs | None:
    """A fold loses the ante; else the higher card wins it, and the bet if there was one."""
    if state.history in _LEGAL:
        return None
    if state.history[-1] == "fold":
        return won_by(_to_move(state), _ANTE)
    first, second = map(CARDS.index, state.cards)
    return won_by(int(second > first), _ANTE + _BET * (state.history[-1] == "call"))


def _render(state: State, seat: int) -> str:
    """The seat's own card, and what was done."""
    done = f" Done: {' '.join(state.history)}." if state.history else ""
    return f"Your card: {state.cards[seat]}.{done}"


def _parse(state: State, text: str) -> Move:
    return read(_WORD, text, _legal_moves(state))


KUHN_POKER: Rules[State] = Rules(
    name="kuhn_poker",
    starts=tuple(State(cards) for cards in itertools.permutations(CARDS, 2)),
    brief=_brief,
    to_move=_to_move,
    legal_moves=_legal_moves,
    play=_play,
    outcome=_outcome,
    render=_render,
    parse=_parse,
    stake=_ANTE + _BET,
    hidden=True,
)
