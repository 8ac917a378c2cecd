"""Self-play: a seat at a table whose other seat is played by the same policy, and the group that such a table is.

Knows matches and tables; must not know particular games, nor tokens. The two members of a group are the two seats of
one match. They start from the same state, but from different sides of it, so a member's reward says nothing about how
good the other's was, and its mean over the group, which is always 0, is no baseline: use one for each seat
(advantage=moving_baseline).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.games.match import LOSS, Match, begin, forfeit, measured, say, told
from envs.games.rules import SEATS, Rules
from envs.games.unplayed import AFTER_THE_END, Lift, SkipsUnplayed
from jaxrl.env import Env, EnvGroupBuilder, MessageEnv, MessageStepResult
from jaxrl.seats import Table, YourTurn
from jaxrl.types import Conclusion, Message, Metrics, StopReason, Task, Trajectory


@dataclass
class Board:
    """What the two seats of a match share."""

    table: Table
    match: Match


class Seat(MessageEnv):
    """One seat. Its turn ends with a legal move, or with the whole match."""

    def __init__(self, board: Board, seat: int) -> None:
        self._board, self.seat = board, seat
        self._messages: list[Message] = []
        self._ended: MessageStepResult | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        """Sit down, and wait for the first turn. When the match ends before it, a word that it did."""
        self._board.table.sit(self.seat)
        result = await self._turn()
        self._messages += result.messages or [Message("user", "The game is over.")]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Move, and wait for the next turn; or hear what was wrong with the move."""
        if self._ended is not None:
            raise RuntimeError(AFTER_THE_END)
        self._messages.append(message)
        self._board.match, complaint = say(self._board.match, message.content)
        if complaint is not None:
            result = MessageStepResult(messages=(Message("user", complaint),))
        else:
            self._pass()
            result = await self._turn()
        self._messages += result.messages
        return result

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """A limit in the middle of the turn forfeits. A timeout does not: the wall clock is not the policy's."""
        if reason is StopReason.TIMEOUT:
            return None
        if self._ended is not None:
            return Conclusion(self._ended.reward, self._ended.metrics)
        self._board.match = forfeit(self._board.match, self.seat)
        self._board.table.end()
        return Conclusion(LOSS, measured(self._board.match, self.seat))

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    @property
    def match(self) -> Match:
        return self._board.match

    @property
    def unplayed(self) -> MessageStepResult | None:
        return self._ended if all(m.role != "assistant" for m in self._messages) else None

    async def close(self) -> None:
        """Get up."""
        self._board.table.leave(self.seat)

    def _pass(self) -> None:
        if self.match.over:
            self._board.table.end()
        else:
            self._board.table.pass_to(self.match.to_move)

    async def _turn(self) -> MessageStepResult:
        """Wait for the turn, or for the end."""
        turn = await self._board.table.turn(self.seat)
        rewards = self.match.rewards
        if rewards is not None:
            metrics = measured(self.match, self.seat)
            self._ended = MessageStepResult(terminated=True, reward=rewards[self.seat], metrics=metrics)
        elif isinstance(turn, YourTurn):
            return MessageStepResult(messages=(Message("user", told(self.match, self.seat)),))
        else:
            self._ended = MessageStepResult(truncated=True)
        return self._ended


@dataclass(frozen=True)
class TableGroupBuilder(EnvGroupBuilder):
    """A group that is one match: its two members are the seats, in order. start: which of the game's."""

    rules: Rules[Any]
    start: int
    lift: Lift

    @property
    def coupled(self) -> bool:
        """Each seat waits for the other."""
        return True

    async def make_envs(self) -> Sequence[Env]:
        """A fresh table, and who sits at it."""
        match = begin(self.rules, self.start)
        board, task = Board(Table(len(SEATS), first=match.to_move), match), Task(self.describe())
        return [SkipsUnplayed(seat, self.lift(seat, task)) for seat in (Seat(board, s) for s in SEATS)]

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        """For the opponent of a seat whose turn could not be read, the other side of that seat's reward."""
        if any(isinstance(env, SkipsUnplayed) and env.player.match.over for env in envs_G):
            return [(0.0, {}) for _ in trajectories_G]
        unread = [t.reward for t in trajectories_G if t.stop_reason is StopReason.PARSE_FAILURE]
        return [
            (0.0, {"forfeit": 1.0})
            if t.stop_reason is StopReason.PARSE_FAILURE
            else (-sum(unread), {"success": 1.0, "win": 1.0} if unread else {})
            for t in trajectories_G
        ]

    def logging_tags(self) -> Sequence[str]:
        """The game. With the place in the group it is the role of a moving baseline."""
        return (self.rules.name,)

    def describe(self) -> str:
        """The game and its start."""
        return f"{self.rules.name} from start {self.start}, against itself"
