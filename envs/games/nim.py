"""Nim in normal play: take any number of stones from one heap; whoever takes the last stone wins.

A state is the heaps and who is to move. Heaps have letters, and "B2" takes two stones from the second.
"""

import re
from typing import NamedTuple

from envs.games.rules import Move, Payoffs, Rules, checked, read, won_by

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_MOVE = re.compile(r"\b[A-Za-z] ?[0-9]+\b")


class State(NamedTuple):
    """Stones of each heap, and the seat to move."""

    heaps: tuple[int, ...]
    seat: int = 0


def _brief(seat: int) -> str:
    return "Nim. A2 takes 2 from heap A. Take the last stone to win."


def _to_move(state: State) -> int:
    return state.seat


def _legal_moves(state: State) -> tuple[Move, ...]:
    heaps = zip(LETTERS, state.heaps, strict=False)
    return tuple(f"{letter}{taken}" for letter, stones in heaps for taken in range(1, stones + 1))


def _play(state: State, move: Move) -> State:
    checked(move, _legal_moves(state))
    heap = LETTERS.index(move[0])
    left = state.heaps[heap] - int(move[1:])
    return State((*state.heaps[:heap], left, *state.heaps[heap + 1 :]), 1 - state.seat)


def _outcome(state: State) -> Payoffs | None:
    """Whoever is to move and finds no stone has lost."""
    return None if any(state.heaps) else won_by(1 - state.seat)


def _render(state: State, seat: int) -> str:
    """The heaps, the same for both seats."""
    return " ".join(f"{letter}{stones}" for letter, stones in zip(LETTERS, state.heaps, strict=False))


def _parse(state: State, text: str) -> Move:
    return read(_MOVE, text, _legal_moves(state))


def nim(*starts: tuple[int, ...]) -> Rules[State]:
    """Nim from any of these heaps. Raises ValueError for heaps that are no game."""
    for heaps in starts:
        if not 1 <= len(heaps) <= len(LETTERS) or min(heaps) < 0 or not any(heaps):
            raise ValueError(f"heaps {heaps}: expected 1 to {len(LETTERS)} numbers of stones, 0 or more, not all 0")
    if not starts:
        raise ValueError("nim() has no heaps to start from: give at least one tuple, such as (3, 4, 5)")
    return Rules(
        name="nim",
        starts=tuple(State(tuple(heaps)) for heaps in starts),
        brief=_brief,
        to_move=_to_move,
        legal_moves=_legal_moves,
        play=_play,
        outcome=_outcome,
        render=_render,
        parse=_parse,
    )


NIM = nim((3, 4, 5))
