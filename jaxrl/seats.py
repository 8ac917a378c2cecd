"""Turns at a table: the envs of one group are the players of one game, and none of them waits for a ghost.

A group builder makes one `Table` in `make_envs` and gives it to its envs, one seat each:

    reset    table.sit(seat); outcome = await table.turn(seat)
    step     play the move; table.pass_to(other), or table.end(); outcome = await table.turn(seat)
    close    table.leave(seat)

The first to happen decides how the game ended, for every seat alike: `end`, which everybody sees as GameOver, or a
seat that leaves before it, which everybody else sees as SeatLeft. An env that fails, times out or is cancelled is
closed by its rollout, so its seat leaves by itself. Knows trio; must not know envs, rewards or rules of games.
"""

from dataclasses import dataclass

import trio

SEATING_SECONDS = 120.0
"""How long those at the table wait, from the first to sit, for the others to do so."""


@dataclass(frozen=True)
class YourTurn:
    """The seat is to move."""


@dataclass(frozen=True)
class GameOver:
    """A player ended the game by its rules."""


@dataclass(frozen=True)
class SeatLeft:
    """A seat was left before the game was over. sat: False when it was never taken."""

    seat: int
    sat: bool


Turn = YourTurn | GameOver | SeatLeft


class Table:
    """The seats of one game and whose turn it is. Owns who waits for a turn.

    Every method but `turn` is atomic: no other task runs inside it. The game begins when all seats are taken; a seat
    that is still free `seating_seconds` after the first was taken counts as left.
    """

    def __init__(self, seats: int, *, first: int = 0, seating_seconds: float = SEATING_SECONDS) -> None:
        if seats < 1:
            raise ValueError(f"seats={seats}: a table needs at least 1")
        if not seating_seconds > 0:
            raise ValueError(f"seating_seconds={seating_seconds}: expected a positive number of seconds")
        self.seats = seats
        self._to_move = self._checked(first, "first")
        self._taken: set[int] = set()
        self._left: set[int] = set()
        self._end: GameOver | SeatLeft | None = None
        self._seating_seconds = seating_seconds
        self._seated_by: float | None = None
        self._changed = trio.Event()

    @property
    def outcome(self) -> GameOver | SeatLeft | None:
        """How the game ended; None while it goes on. For a player who is in the middle of a long move."""
        return self._end

    def sit(self, seat: int) -> None:
        """Take a seat, once. Raises RuntimeError when it was taken before: a game cannot be rejoined."""
        self._checked(seat)
        if seat in self._taken | self._left:
            raise RuntimeError(
                f"seat {seat} was taken before, and a game cannot be rejoined: make a fresh Table (in make_envs) for "
                "every attempt of a group, and give each env its own seat"
            )
        self._taken.add(seat)
        if self._seated_by is None:
            self._seated_by = trio.current_time() + self._seating_seconds
        self._wake()

    async def turn(self, seat: int) -> Turn:
        """Wait until the seat is to move, or the game has ended. Raises RuntimeError when it does not sit there."""
        self._require_seated(seat, "turn")
        await trio.lowlevel.checkpoint()
        while (outcome := self._outcome(seat)) is None:
            with trio.CancelScope(deadline=self._patience()) as scope:
                await self._changed.wait()
            if scope.cancelled_caught and self._absent():
                self._finish(SeatLeft(min(self._absent()), sat=False))
        return outcome

    def pass_to(self, seat: int) -> None:
        """Give the turn to a seat (one's own too). Without effect when somebody has left meanwhile.

        Raises RuntimeError after `end`.
        """
        self._checked(seat)
        if isinstance(self._end, GameOver):
            raise RuntimeError(f"pass_to({seat}) after end(): the game is over, and nobody is to move")
        self._to_move = seat
        self._wake()

    def end(self) -> None:
        """The game is over, for everybody. Without effect when it ended before."""
        self._finish(GameOver())

    def leave(self, seat: int) -> None:
        """Get up, whether or not the game is over and whether or not the seat was taken. May be called again."""
        self._left.add(self._checked(seat))
        self._finish(SeatLeft(seat, seat in self._taken))

    def _finish(self, how: GameOver | SeatLeft) -> None:
        if self._end is None:
            self._end = how
            self._wake()

    def _outcome(self, seat: int) -> Turn | None:
        if self._end is not None:
            return self._end
        return YourTurn() if self._to_move == seat and not self._absent() else None

    def _absent(self) -> set[int]:
        return set(range(self.seats)) - self._taken

    def _patience(self) -> float:
        """When to stop waiting for those who have not sat down yet."""
        assert self._seated_by is not None, "whoever waits has sat down"
        return self._seated_by if self._absent() else float("inf")

    def _wake(self) -> None:
        """Let everyone who waits look again."""
        self._changed.set()
        self._changed = trio.Event()

    def _require_seated(self, seat: int, verb: str) -> None:
        self._checked(seat)
        if seat not in self._taken:
            raise RuntimeError(f"{verb}({seat}) before sit({seat}): take the seat first, in the env's reset")
        if seat in self._left:
            raise RuntimeError(f"{verb}({seat}) after leave({seat}): whoever left does not play on")

    def _checked(self, seat: int, name: str = "seat") -> int:
        if not 0 <= seat < self.seats:
            raise ValueError(f"{name}={seat}: this table has seats 0 to {self.seats - 1}")
        return seat
