"""The other side of a duel: a strategy, or anyone who answers messages, such as a past adapter or a hosted model.

Knows matches. A side plays its whole turn, a second attempt after a bad one included, and forfeits like anybody else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import trio

from envs.games.match import Match, play, say, told
from envs.games.players import Strategy, choose
from jaxrl.types import Message, Task


class Opponent(Protocol):
    """Anyone who answers a conversation, such as those of `jaxrl.runtime.opponents`."""

    async def reply(self, messages: Sequence[Message]) -> Message:
        """The assistant message that follows."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...


class Side(Protocol):
    """Who plays the other seat of one match."""

    async def take_turn(self, match: Match) -> Match:
        """The match after its turn."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...


MakeSide = Callable[[Task], Side]
"""Makes the other side of one episode."""


def scripted(strategy: Strategy) -> MakeSide:
    """The other side is a strategy. What it draws depends on the task's seed and the number of the move only."""
    return partial(_scripted, strategy)


def conversing(make_opponent: Callable[[], Opponent]) -> MakeSide:
    """The other side answers messages, and is told what a player in its seat is told."""
    return partial(_conversing, make_opponent)


@dataclass(frozen=True)
class _Scripted:
    strategy: Strategy
    seed: int

    async def take_turn(self, match: Match) -> Match:
        await trio.lowlevel.checkpoint()
        rng = np.random.default_rng((self.seed, len(match.moves)))
        return play(match, choose(self.strategy, match.state, rng))

    async def close(self) -> None:
        return


class _Conversing:
    """Owns the opponent and its side of the conversation."""

    def __init__(self, opponent: Opponent) -> None:
        self._opponent = opponent
        self._messages: list[Message] = []

    async def take_turn(self, match: Match) -> Match:
        heard: str | None = told(match, match.to_move)
        while heard is not None:
            self._messages.append(Message("user", heard))
            said = await self._opponent.reply(tuple(self._messages))
            self._messages.append(said)
            match, heard = say(match, said.content)
        return match

    async def close(self) -> None:
        await self._opponent.close()


def _scripted(strategy: Strategy, task: Task) -> Side:
    return _Scripted(strategy, task.metadata["seed"])


def _conversing(make_opponent: Callable[[], Opponent], task: Task) -> Side:
    return _Conversing(make_opponent())
