"""A model against an opponent that does not learn.

Knows matches and sides; must not know particular games. The members of a group have the same start, the same seat and,
where the other side is a strategy, an opponent whose draws are the same, so their rewards can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from envs.games.match import LOSS, Match, begin, forfeit, measured, say, told
from envs.games.rules import SEATS, Rules
from envs.games.side import MakeSide, Side
from envs.games.unplayed import AFTER_THE_END, Lift, SkipsUnplayed
from jaxrl.env import Env, EnvGroupBuilder, MessageEnv, MessageStepResult
from jaxrl.types import Conclusion, Message, StopReason, Task


class Duel(MessageEnv):
    """One seat of a match, the one that the task says. Owns the other side."""

    def __init__(self, rules: Rules[Any], side: Side) -> None:
        self._rules, self._side = rules, side
        self._match: Match | None = None
        self._seat = 0
        self._messages: list[Message] = []
        self._ended: MessageStepResult | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        """The rules, and the opponent's first move when it begins."""
        if self._match is not None:
            raise RuntimeError("this Duel was already started; an env is one episode, so make a new one")
        self._match, self._seat = begin(self._rules, task.metadata["start"]), task.metadata["seat"]
        if self._seat not in SEATS:
            raise ValueError(f"the task's seat is {self._seat!r}: expected 0 or 1")
        result = await self._answered()
        self._messages += result.messages or [Message("user", "The game is over.")]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Move, and hear the opponent's; or what was wrong with the move."""
        if self._ended is not None and self.unplayed is None:
            raise RuntimeError(AFTER_THE_END)
        self._messages.append(message)
        if self._ended is not None:  # unplayed: an episode has a turn all the same
            return self._ended
        self._match, complaint = say(self.match, message.content)
        if complaint is not None:
            result = MessageStepResult(messages=(Message("user", complaint),))
        else:
            result = await self._answered()
        self._messages += result.messages
        return result

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """A limit in the middle of the turn forfeits. A timeout does not: the wall clock is not the policy's."""
        if reason is StopReason.TIMEOUT:
            return None
        if self._ended is not None:
            return Conclusion(self._ended.reward, self._ended.metrics)
        self._match = forfeit(self.match, self._seat)
        return Conclusion(LOSS, measured(self.match, self._seat))

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    @property
    def match(self) -> Match:
        """The match as it stands."""
        if self._match is None:
            raise RuntimeError("no match is being played; call reset first")
        return self._match

    @property
    def unplayed(self) -> MessageStepResult | None:
        """How the match ended, when it did so before the first move here."""
        return self._ended if all(m.role != "assistant" for m in self._messages) else None

    async def close(self) -> None:
        """Close the other side."""
        await self._side.close()

    async def _answered(self) -> MessageStepResult:
        """Let the other side move until it is the turn of this one, or the end."""
        while not self.match.over and self.match.to_move != self._seat:
            self._match = await self._side.take_turn(self.match)
        rewards = self.match.rewards
        if rewards is None:
            return MessageStepResult(messages=(Message("user", told(self.match, self._seat)),))
        metrics = measured(self.match, self._seat)
        self._ended = MessageStepResult(terminated=True, reward=rewards[self._seat], metrics=metrics)
        return self._ended


def duel(rules: Rules[Any], side: MakeSide) -> "partial[Duel]":
    """An env factory."""
    return partial(_make, rules, side)


def _make(rules: Rules[Any], side: MakeSide, task: Task) -> Duel:
    return Duel(rules, side(task))


@dataclass(frozen=True)
class DuelGroupBuilder(EnvGroupBuilder):
    """`group_size` attempts at one duel."""

    task: Task
    rules: Rules[Any]
    side: MakeSide
    lift: Lift
    group_size: int
    tags: tuple[str, ...] = ()

    async def make_envs(self) -> Sequence[Env]:
        """One env per member, each with an opponent of its own, who is not asked for anything yet."""
        return [self._env() for _ in range(self.group_size)]

    async def remake(self, member: int) -> Env:
        """One more of the same."""
        return self._env()

    def _env(self) -> Env:
        player = Duel(self.rules, self.side(self.task))
        return SkipsUnplayed(player, self.lift(player, self.task))

    def logging_tags(self) -> Sequence[str]:
        """The dataset's tags."""
        return self.tags

    def describe(self) -> str:
        """The game, its start and the seat."""
        return f"{self.task.prompt} Seat {self.task.metadata['seat']}, start {self.task.metadata['start']}."
