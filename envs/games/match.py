"""One match as it is played: the state, who said what move, and what a seat is told. A value; playing on makes another.

What an opponent said never appears in what a seat is told: only the move that was read from it, in the game's own
words. Must not know envs, tables or models.

A message that names no legal move is answered, once, with what was wrong with it; a second one in a row forfeits.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from envs.games.rules import IllegalMove, Move, Payoffs, Rules, won_by

PATIENCE = 1
"""Messages in a row without a legal move that are answered before the next one forfeits."""

LOSS = -1.0
"""The reward of a forfeit. Rewards are payoffs over the game's stake, so they lie in [-1, 1]."""


@dataclass(frozen=True)
class Match:
    """A game of `rules` from `state`; `moves` are those so far, with who made them.

    unread: messages in a row, of whoever is to move, that named no legal move. illegal: all such of each seat.
    forfeited: the seat that gave the game away.
    """

    rules: Rules[Any]
    state: Any
    moves: tuple[tuple[int, Move], ...] = ()
    unread: int = 0
    illegal: tuple[int, int] = (0, 0)
    forfeited: int | None = field(default=None)

    @property
    def to_move(self) -> int:
        """Whose turn it is."""
        return self.rules.to_move(self.state)

    @property
    def rewards(self) -> Payoffs | None:
        """What each seat gets, from -1 to 1; they sum to zero. None while the game goes on."""
        if self.forfeited is not None:
            return won_by(1 - self.forfeited, -LOSS)
        payoffs = self.rules.outcome(self.state)
        return None if payoffs is None else (payoffs[0] / self.rules.stake, payoffs[1] / self.rules.stake)

    @property
    def over(self) -> bool:
        """Whether the game has ended."""
        return self.rewards is not None


def begin(rules: Rules[Any], start: int) -> Match:
    """A match from one of the game's starts. Raises ValueError when it has none of that number."""
    if not 0 <= start < len(rules.starts):
        raise ValueError(f"start={start}: {rules.name} has {len(rules.starts)} starts, counted from 0")
    return Match(rules, rules.starts[start])


def say(match: Match, text: str) -> tuple[Match, str | None]:
    """Whoever is to move says `text`: the match after it, and what to answer when that was no legal move.

    No answer means that the turn is over, by a move or by a forfeit.
    """
    seat = match.to_move
    try:
        move = match.rules.parse(match.state, text)
    except IllegalMove as complaint:
        counted = tuple(n + (s == seat) for s, n in enumerate(match.illegal))
        after = replace(match, unread=match.unread + 1, illegal=(counted[0], counted[1]))
        return (after, str(complaint)) if after.unread <= PATIENCE else (forfeit(after, seat), None)
    return play(match, move), None


def play(match: Match, move: Move) -> Match:
    """The match after a move. Raises IllegalMove."""
    state = match.rules.play(match.state, move)
    return replace(match, state=state, moves=(*match.moves, (match.to_move, move)), unread=0)


def forfeit(match: Match, seat: int) -> Match:
    """The match, given away by a seat. A match that is over stays as it is."""
    return match if match.over else replace(match, forfeited=seat)


def told(match: Match, seat: int) -> str:
    """What a seat hears before its turn: the rules at first, the moves since its own last one, and what it sees."""
    own = [i for i, (mover, _) in enumerate(match.moves) if mover == seat]
    since = match.moves[own[-1] + 1 :] if own else match.moves
    lines = [f"Opponent: {move}" for _, move in since]
    return "\n".join([*([] if own else [match.rules.brief(seat)]), *lines, match.rules.render(match.state, seat)])


def measured(match: Match, seat: int) -> dict[str, float]:
    """How a finished match went for a seat. success counts a draw as half a win."""
    assert match.rewards is not None, "the match is over"
    reward = match.rewards[seat]
    return {
        "success": (1 + reward) / 2,
        "win": float(reward > 0),
        "draw": float(reward == 0),
        "forfeit": float(match.forfeited == seat),
        "first_seat": match.rewards[0],
        "illegal_moves": float(match.illegal[seat]),
        "moves": float(sum(mover == seat for mover, _ in match.moves)),
    }
