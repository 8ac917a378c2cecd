"""Connect four, 7 columns of 6. A state is two sets of discs as bits, seven a column: bit 7c + r is row r from below.

The seventh bit of a column stays empty, so that lines never run over from one column into the next.
"""

import re
from typing import NamedTuple

from envs.games.rules import DRAW, Move, Payoffs, Rules, checked, read, won_by

COLUMNS, ROWS = 7, 6
MARKS = "XO"

_STRIDE = ROWS + 1
_DIRECTIONS = (1, _STRIDE, _STRIDE - 1, _STRIDE + 1)  # up, right, right and down, right and up
_NAMES = tuple(str(column + 1) for column in range(COLUMNS))
_TOPS = tuple(1 << (_STRIDE * column + ROWS - 1) for column in range(COLUMNS))
_BOTTOMS = tuple(1 << (_STRIDE * column) for column in range(COLUMNS))
_COLUMNS = tuple((_STRIDE * column, (1 << ROWS) - 1) for column in range(COLUMNS))
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


class State(NamedTuple):
    """The discs of each seat."""

    first: int = 0
    second: int = 0


def four_in_line(discs: int) -> bool:
    """Whether four of the discs lie in a row, a column or a diagonal."""
    for shift in _DIRECTIONS:
        pairs = discs & (discs >> shift)
        if pairs & (pairs >> (2 * shift)):
            return True
    return False


def _brief(seat: int) -> str:
    return f"Connect four. You are {MARKS[seat]}. Name a column, 1-{COLUMNS}."


def _to_move(state: State) -> int:
    return (state.first | state.second).bit_count() % 2


def _outcome(state: State) -> Payoffs | None:
    for seat in (1 - _to_move(state), _to_move(state)):
        if four_in_line(state[seat]):
            return won_by(seat)
    return DRAW if not _open_columns(state) else None


def _open_columns(state: State) -> tuple[Move, ...]:
    discs = state.first | state.second
    return tuple(name for name, top in zip(_NAMES, _TOPS, strict=True) if not discs & top)


def _legal_moves(state: State) -> tuple[Move, ...]:
    return () if four_in_line(state.first) or four_in_line(state.second) else _open_columns(state)


def _play(state: State, move: Move) -> State:
    column = _NAMES.index(checked(move, _legal_moves(state)))
    shift, whole = _COLUMNS[column]
    landed = (((state.first | state.second) + _BOTTOMS[column]) & ~(state.first | state.second)) & (whole << shift)
    first, second = state
    return State(first | landed, second) if _to_move(state) == 0 else State(first, second | landed)


def _render(state: State, seat: int) -> str:
    """Six rows from above, dots where nothing lies, then the columns' numbers. The same for both seats."""
    rows = ["".join(_mark(state, column, row) for column in range(COLUMNS)) for row in reversed(range(ROWS))]
    return "\n".join([*rows, "".join(_NAMES)])


def _mark(state: State, column: int, row: int) -> str:
    bit = 1 << (_STRIDE * column + row)
    return next((mark for mark, discs in zip(MARKS, state, strict=True) if discs & bit), ".")


def _parse(state: State, text: str) -> Move:
    return read(_NUMBER, text, _legal_moves(state))


CONNECT_FOUR: Rules[State] = Rules(
    name="connect_four",
    starts=(State(),),
    brief=_brief,
    to_move=_to_move,
    legal_moves=_legal_moves,
    play=_play,
    outcome=_outcome,
    render=_render,
    parse=_parse,
)
