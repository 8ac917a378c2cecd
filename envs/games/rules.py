"""What a game of two seats is: pure functions of a frozen state. And how a move is found in what a player says.

Knows no particular game, no conversation and no model. A move is a short text, such as "5" or "B2": what is legal,
what is played and what the other seat is told are the same text.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

Move = str

Payoffs = tuple[float, float]
"""What each seat won or lost, in the game's own units. They sum to zero."""

SEATS = (0, 1)


class IllegalMove(ValueError):
    """No move, or none that the rules allow. The text is addressed to the player: what was wrong, what is possible."""


@dataclass(frozen=True)
class Rules(Generic[S]):
    """A zero-sum game of two seats that move one at a time, by its functions.

    starts: the states it may start from, each as likely as the others; what chance decides, such as a deal, is decided
    there. brief: seat -> what its player is told of the rules. render: (state, seat) -> what that seat sees. play:
    raises IllegalMove. outcome: None while the game goes on. parse: (state, text) -> a legal move, else IllegalMove.
    stake: the most a seat can lose. hidden: whether a seat sees less than the whole state.
    """

    name: str
    starts: Sequence[S]
    brief: Callable[[int], str]
    to_move: Callable[[S], int]
    legal_moves: Callable[[S], tuple[Move, ...]]
    play: Callable[[S, Move], S]
    outcome: Callable[[S], Payoffs | None]
    render: Callable[[S, int], str]
    parse: Callable[[S, str], Move]
    stake: float = 1.0
    hidden: bool = False


def won_by(seat: int, amount: float = 1.0) -> Payoffs:
    """One seat takes `amount` from the other."""
    return (amount, -amount) if seat == 0 else (-amount, amount)


DRAW: Payoffs = (0.0, 0.0)

_BRACKETED = re.compile(r"\[([^\[\]]*)\]")


def read(pattern: re.Pattern[str], text: str, legal: Sequence[Move]) -> Move:
    """The one move that `text` names, where `pattern` says what looks like a move; with brackets, in the last pair.

    So a terse player just names a move, and one that thinks aloud puts it in brackets: "4 is taken, so [5]". Case and
    spaces inside a move do not matter. Raises IllegalMove, naming the moves that are legal.
    """
    bracketed = _BRACKETED.findall(text)
    named = {_plain(match.group()) for match in pattern.finditer(bracketed[-1] if bracketed else text)}
    if len(named) != 1:
        raise IllegalMove(f"Say one move. Possible: {' '.join(legal)}")
    (move,) = named
    return checked({_plain(each): each for each in legal}.get(move, move), legal)


def checked(move: Move, legal: Sequence[Move]) -> Move:
    """`move`, when it is legal. Raises IllegalMove, naming those that are."""
    if move not in legal:
        raise IllegalMove(f"{move[:9]} is not possible. Possible: {' '.join(legal)}")
    return move


def _plain(move: str) -> str:
    return "".join(move.split()).lower()
