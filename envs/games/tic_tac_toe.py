"""Tic-tac-toe. A state is a board of nine characters, X, O or a space; seat 0 is X and moves first."""

import re

from envs.games.rules import DRAW, Move, Payoffs, Rules, checked, read, won_by

State = str

MARKS = "XO"
CELLS = "123456789"

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def _brief(seat: int) -> str:
    return f"Tic-tac-toe. You are {MARKS[seat]}. Name a free cell."


def _to_move(state: State) -> int:
    return (9 - state.count(" ")) % 2


def _winner(state: State) -> int | None:
    """The seat with three in a line."""
    for a, b, c in _LINES:
        if state[a] != " " and state[a] == state[b] == state[c]:
            return MARKS.index(state[a])
    return None


def _outcome(state: State) -> Payoffs | None:
    winner = _winner(state)
    if winner is not None:
        return won_by(winner)
    return None if " " in state else DRAW


def _legal_moves(state: State) -> tuple[Move, ...]:
    if _winner(state) is not None:
        return ()
    return tuple(cell for cell, mark in zip(CELLS, state, strict=True) if mark == " ")


def _play(state: State, move: Move) -> State:
    cell = CELLS.index(checked(move, _legal_moves(state)))
    return state[:cell] + MARKS[_to_move(state)] + state[cell + 1 :]


def _render(state: State, seat: int) -> str:
    """Three rows; a free cell shows its number. The same for both seats."""
    shown = "".join(cell if mark == " " else mark for cell, mark in zip(CELLS, state, strict=True))
    return "\n".join(shown[row : row + 3] for row in (0, 3, 6))


def _parse(state: State, text: str) -> Move:
    return read(_NUMBER, text, _legal_moves(state))


TIC_TAC_TOE: Rules[State] = Rules(
    name="tic_tac_toe",
    starts=(" " * 9,),
    brief=_brief,
    to_move=_to_move,
    legal_moves=_legal_moves,
    play=_play,
    outcome=_outcome,
    render=_render,
    parse=_parse,
)
