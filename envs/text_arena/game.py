"""A game of textarena in the form that `envs.games` gives to games, so that its seats and opponents play it.

Knows replays, and how a move is found in what a player says. Environments import nothing of each other, so whoever
brings the two together passes what belongs to games: `as_rules(game, games.Rules, games.IllegalMove)`.

A move is what stands in the last square brackets of a message, or the whole message when it is short. Nothing else of
it is ever sent to the game, which would show it to the opponent.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from envs.text_arena.catalogue import OFFLINE, checked_name, family
from envs.text_arena.replay import Shown, State, position, registered
from jaxrl.env import EnvironmentFault

R = TypeVar("R")

LONGEST = 40
"""Characters of a move."""

_BRACKETED = re.compile(r"\[([^\[\]]*)\]")
_RULER = re.compile(r"[-+=|_ ]+")
_LIST_OR_TITLE = re.compile(r"[A-Za-z ]+:(?: *'?\[.*)?")
_AROUND_BARS = re.compile(r" *\| *")


@dataclass(frozen=True)
class Game:
    """Which game, and how it is shown.

    starts: how many seeds it may start from; those of a game without chance are all alike. board_only: shows no
    prompt, for players who were shown games before. squeeze: takes out blank lines, rulers, titles, what pads a
    board, and lists of moves.
    """

    name: str
    starts: int = 16
    board_only: bool = False
    squeeze: bool = False

    def __post_init__(self) -> None:
        checked_name(self.name)
        if self.starts < 1:
            raise ValueError(f"starts={self.starts}: expected at least 1")


def as_rules(game: Game, make: Callable[..., R], illegal: Callable[[str], Exception]) -> R:
    """The game as `make` makes games (`envs.games.Rules`); a move that is none raises `illegal`.

    Raises ModuleNotFoundError without the package, ValueError for a name that it does not have.
    """
    if not registered(game.name):
        raise ValueError(f"textarena has no game {game.name!r}: a variant has a name such as ConnectFour-v0-large")
    return make(
        name=game.name,
        starts=tuple(State(game.name, seed) for seed in range(game.starts)),
        brief=partial(_brief, game),
        to_move=_to_move,
        legal_moves=candidates,
        play=partial(_play, illegal),
        outcome=_outcome,
        render=partial(_render, game),
        parse=partial(_parse, illegal),
    )


def candidates(state: State) -> tuple[str, ...]:
    """The legal moves among those that the mover was shown in brackets, and those that the catalogue has.

    Not every legal move of every game: who plays at random plays these.
    """
    stands = position(state)
    if stands.rewards is not None:
        return ()
    shown = [text for kind, text in stands.shown[stands.to_move] if kind != "PROMPT"] or [""]
    listed = [_plain(each) for text in (shown[-1], *shown) for each in _BRACKETED.findall(text)]
    named = dict.fromkeys([*listed, *OFFLINE[family(state.name)]])
    return tuple(move for move in named if move and position(_after(state, move)).invalid is None)


def random_player(state: State) -> dict[str, float]:
    """A strategy as `envs.games` has them: every candidate is as likely. EnvironmentFault where none is known."""
    moves = candidates(state)
    if not moves:
        raise EnvironmentFault(
            f"no move of {state.name} is known after {state.moves[-3:]}: give its catalogue row a vocabulary, or let a "
            "model play the other side"
        )
    return dict.fromkeys(moves, 1 / len(moves))


def _brief(game: Game, seat: int) -> str:
    return f"{game.name}. You are player {seat}."


def _to_move(state: State) -> int:
    return position(state).to_move


def _outcome(state: State) -> tuple[float, float] | None:
    return position(state).rewards


def _after(state: State, move: str) -> State:
    return state._replace(moves=(*state.moves, move))


def _play(illegal: Callable[[str], Exception], state: State, move: str) -> State:
    after = _after(state, move)
    invalid = "the game is over" if position(state).rewards is not None else position(after).invalid
    if invalid is not None:
        raise illegal(f"[{move[:LONGEST]}] is not possible: {invalid[:200]}")
    return after


def _parse(illegal: Callable[[str], Exception], state: State, text: str) -> str:
    bracketed = _BRACKETED.findall(text)
    move = _plain(bracketed[-1] if bracketed else text)
    if not move or len(move) > LONGEST:
        raise illegal("Say one move, in square brackets.")
    _play(illegal, state, move)
    return move


def _render(game: Game, state: State, seat: int) -> str:
    """What the game showed to a seat since its own last move; of several boards the last."""
    shown = position(state).shown[seat]
    boards = [each for each in shown if each.kind == "GAME_BOARD"][-1:]
    others = [] if game.board_only and boards else [each for each in shown if each.kind != "GAME_BOARD"]
    return "\n".join(_text(game, each) for each in (*others, *boards))


def _text(game: Game, shown: Shown) -> str:
    lines = [line.rstrip() for line in shown.text.strip("\n").splitlines()]
    if not game.squeeze:
        return "\n".join(lines)
    kept = [line for line in lines if line and not _RULER.fullmatch(line) and not _LIST_OR_TITLE.fullmatch(line)]
    return "\n".join(_AROUND_BARS.sub("|", line).strip() for line in kept)


def _plain(move: str) -> str:
    return " ".join(move.split())
