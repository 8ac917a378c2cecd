"""An episode that was over before its player ever moved, because the opponent gave the game away in its first turn.

An episode has at least one turn, so such a player is asked for a word all the same. The wrapper here takes it, ends
the episode with the reward that the match gave, and keeps the word from being trained: it did not earn anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from envs.games.match import Match
from jaxrl.env import ActionExtra, Env, MessageEnv, MessageStepResult, Observation, StepResult, StopCondition
from jaxrl.types import Conclusion, StopReason, Task

AFTER_THE_END = "step() after the match's end: an env is one episode, so make another"

Lift = Callable[[MessageEnv, Task], Env]
"""How a message-level env becomes tokens: such as `partial(EnvFromMessageEnv, renderer=renderer)`."""


class Player(Protocol):
    """A message-level env of one seat in a match."""

    @property
    def match(self) -> Match:
        """The match as it stands."""
        ...

    @property
    def unplayed(self) -> MessageStepResult | None:
        """How the match ended, when it did so before this seat's first move."""
        ...


class SkipsUnplayed(Env):
    """`env`, which lifts `player`; an unplayed match is over with the first action, which is masked."""

    def __init__(self, player: Player, env: Env) -> None:
        self.player = player
        self._env, self._skipped = env, False

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The lifted env's."""
        return await self._env.initial_observation()

    async def step(self, action: Sequence[int], *, extra: ActionExtra | None = None) -> StepResult:
        """The lifted env's, unless there is nothing to play."""
        ended = self.player.unplayed
        if ended is None:
            return await self._env.step(action, extra=extra)
        if self._skipped:
            raise RuntimeError(AFTER_THE_END)
        self._skipped = True
        result = StepResult(ended.reward, episode_done=True, metrics=ended.metrics, masked=True)
        return result if ended.terminated else replace(result, stop_reason=StopReason.ENV)

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """The lifted env's."""
        return await self._env.conclude(reason)

    async def close(self) -> None:
        """Close the lifted env."""
        await self._env.close()

    def describe(self) -> str:
        """The lifted env's name."""
        return self._env.describe()
