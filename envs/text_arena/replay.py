"""A game of textarena as a pure function: from a name, a seed and the moves so far to how it stands.

Knows that package (the extra `textarena`), its seats and what it shows to each; it must not know episodes. What the
package keeps in objects is here a history that is played again from its beginning, in one go:

- Its games draw from the global generator of `random`. A replay seeds that, and puts its state back before anybody else
  can run, so that no game depends on another and nobody's draws depend on a game.
- The role names of its states are one mutable default for all games. A replay puts that back too.
- A history holds legal moves only. Of a move that is not, `position` says why; the package would forgive the first and
  end the game at the second, which is for whoever plays the game to decide.
- Nobody asks an env that has ended: it would answer as if nothing had happened.
- The variant without wrappers is made, so that it matters to nobody which wrappers are the default.
"""

import functools
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from envs.text_arena.catalogue import checked_name
from jaxrl.env import EnvironmentFault

try:
    import textarena  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:  # an extra: recipes that offer it can be read without it
    _missing: ModuleNotFoundError | None = error
else:
    _missing = None

BLUNDERS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What the games of the package may raise for a move that they did not expect."""

_REASON = re.compile(r"invalid move\. Reason: (.*?)(?: Please resubmit|$)", re.DOTALL)


class State(NamedTuple):
    """A game as it is played: its registered name, what its chance follows from, the moves so far, all legal."""

    name: str
    seed: int
    moves: tuple[str, ...] = ()


class Shown(NamedTuple):
    """Something that a seat was shown. kind: the package's name for it, such as GAME_BOARD."""

    kind: str
    text: str


@dataclass(frozen=True)
class Position:
    """How a game stands after a history.

    rewards: what each seat got; None while the game goes on. shown: to each seat since its own last move. invalid: why
    the last move is none; then the rest is as it was before that move, or meaningless.
    """

    to_move: int
    rewards: tuple[float, float] | None
    shown: tuple[tuple[Shown, ...], tuple[Shown, ...]]
    invalid: str | None = None


def require_textarena() -> Any:
    """The package. ModuleNotFoundError, naming the extra, unless it is installed."""
    if _missing is not None:
        raise ModuleNotFoundError(
            f"games of textarena need the extra `textarena`, and {_missing.name!r} is not installed: "
            "pip install 'jaxrl[textarena]'",
            name=_missing.name,
        ) from _missing
    return textarena


@functools.lru_cache(maxsize=8192)
def position(state: State) -> Position:
    """Play a history. ValueError for a game that is refused; EnvironmentFault when the game itself fails."""
    checked_name(state.name)
    package = require_textarena()
    with _as_it_was(package, state.seed):
        env = _made(package, state)
        seen = [0, 0]
        for number, move in enumerate(state.moves):
            mover = env.state.current_player_id
            before = [len(env.state.observations[seat]) for seat in (0, 1)]
            try:
                env.step(f"[{move}]")
            except BLUNDERS as error:
                if number + 1 < len(state.moves):
                    raise EnvironmentFault(f"{state.name} failed at move {number + 1}, {move!r}: {error!r}") from error
                return Position(mover, None, ((), ()), invalid="it could not be read")
            invalid = _complaint(env, mover)
            if invalid is not None:
                return Position(mover, None, ((), ()), invalid=invalid)
            seen[mover] = before[mover]
        return Position(env.state.current_player_id, _rewards(state, env), (_shown(env, 0, seen), _shown(env, 1, seen)))


def _made(package: Any, state: State) -> Any:
    env = package.make(f"{state.name}-raw")
    try:
        env.reset(num_players=2, seed=state.seed)
    except AssertionError as error:
        raise ValueError(f"{state.name} is no game for two: {error}") from error
    env.state.role_mapping = dict(env.state.role_mapping)
    return env


def _complaint(env: Any, mover: int) -> str | None:
    """Why the move that was just made is none; None when it is one."""
    forfeited = env.state.game_info[mover].get("invalid_move")
    if not forfeited and not env.state.error_count:
        return None
    told = [text for _, text, kind in env.state.observations[mover] if kind.name == "GAME_ADMIN"]
    reasons = (
        [str(env.state.game_info[mover].get("reason"))] if forfeited else _REASON.findall(told[-1] if told else "")
    )
    return " ".join(reasons[0].split()) if reasons else "it is against the rules"


def _rewards(state: State, env: Any) -> tuple[float, float] | None:
    if not env.state.done:
        return None
    rewards = {seat: float(env.state.rewards[seat]) for seat in (0, 1)}
    if rewards[0] + rewards[1] != 0 or abs(rewards[0]) > 1:
        raise EnvironmentFault(f"{state.name} paid {rewards}: expected a win of 1 and a loss of -1, or twice 0")
    return rewards[0], rewards[1]


def _shown(env: Any, seat: int, seen: list[int]) -> tuple[Shown, ...]:
    """What a seat was shown since its last move, that included; of the moves of players only the game's own account."""
    return tuple(
        Shown(kind.name, text)
        for _, text, kind in env.state.observations[seat][seen[seat] :]
        if kind.name not in ("PLAYER_ACTION", "GAME_ADMIN")
    )


@contextmanager
def _as_it_was(package: Any, seed: int) -> Iterator[None]:
    """In the block the global generator follows from `seed`; afterwards it and the package's defaults are as before."""
    state = random.getstate()
    shared = [
        default
        for method in (package.State.standard_resets, package.TwoPlayerState.reset)
        for default in method.__defaults__ or ()
        if isinstance(default, dict)
    ]
    kept = [dict(default) for default in shared]
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        for default, before in zip(shared, kept, strict=True):
            default.clear()
            default.update(before)


def registered(name: str) -> bool:
    """Whether the package has a game of that name."""
    return f"{name}-raw" in require_textarena().envs.registration.ENV_REGISTRY
