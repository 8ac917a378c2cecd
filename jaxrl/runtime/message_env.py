"""Lifts a MessageEnv to the token level: the renderer writes, the transcript grows, sampled ids stay as sampled.

Knows renderers and both environment interfaces; knows nothing of engines, budgets or groups.
"""

import inspect
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import trio

from jaxrl.chat.renderer import Outcome, Renderer
from jaxrl.chat.transcript import Transcript, act, begin, observe
from jaxrl.env import (
    ActionExtra,
    Env,
    EnvFactory,
    EnvGroupBuilder,
    MessageEnv,
    Observation,
    RLDataset,
    StepResult,
    StopCondition,
)
from jaxrl.types import StopReason, Task

_CLOSE_SECONDS = 30.0


class EnvFromMessageEnv(Env):
    """One message-level episode seen as tokens. Owns the transcript, and the MessageEnv it closes."""

    def __init__(self, env: MessageEnv, task: Task, renderer: Renderer, *, failed_parse_reward: float) -> None:
        self.message_env = env
        self.task = task
        self._renderer = renderer
        self._failed_parse_reward = failed_parse_reward
        self._transcript: Transcript | None = None

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The opening messages, rendered with the env's tools."""
        messages = await self.message_env.reset(self.task)
        self._transcript = begin(self._renderer, messages, self.message_env.tool_specs)
        return self._transcript.tokens, self._renderer.stop_tokens

    async def step(self, action: Sequence[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Parse the turn, hand the message to the env, render its reply.

        A turn cut by its budget ends the episode (MAX_TOKENS), and so does broken framing (PARSE_FAILURE, with
        `failed_parse_reward`). What is wrong inside well-framed calls goes to the env in the message.
        """
        assert self._transcript is not None, "initial_observation comes first"
        parsed = self._renderer.parse(action)
        match parsed.outcome:
            case Outcome.LENGTH:
                return StepResult(0.0, True, stop_reason=StopReason.MAX_TOKENS)
            case Outcome.MALFORMED:
                return StepResult(self._failed_parse_reward, True, stop_reason=StopReason.PARSE_FAILURE)
            case Outcome.STOPPED:
                pass
        result = await self.message_env.step(parsed.message)
        if result.terminated or result.truncated:
            reason = StopReason.TERMINATED if result.terminated else StopReason.ENV
            return StepResult(result.reward, True, metrics=result.metrics, stop_reason=reason)
        self._transcript, rewrite = observe(act(self._transcript, action), result.messages, closed=True)
        return StepResult(
            result.reward,
            False,
            self._transcript.tokens,
            self._renderer.stop_tokens,
            metrics=result.metrics,
            rewrite=rewrite,
        )

    async def close(self) -> None:
        """Close the MessageEnv."""
        await self.message_env.close()

    def describe(self) -> str:
        """The MessageEnv's name."""
        return type(self.message_env).__name__


async def _close(env: Env) -> None:
    """Close an env that nobody is going to use, also while being cancelled, but not for ever."""
    with trio.move_on_after(_CLOSE_SECONDS, shield=True):
        await env.close()


@dataclass(frozen=True)
class MessageEnvGroupBuilder(EnvGroupBuilder):
    """`group_size` attempts at one task, each in a fresh env of `env_factory`."""

    task: Task
    env_factory: EnvFactory
    renderer: Renderer
    group_size: int
    failed_parse_reward: float = -0.1
    tags: tuple[str, ...] = ()

    async def make_envs(self) -> Sequence[Env]:
        """One env per member, all of the same task. When one cannot be made, those before it are closed."""
        envs: list[Env] = []
        async with AsyncExitStack() as made:
            while len(envs) < self.group_size:
                envs.append(await self._make_env())
                made.push_async_callback(_close, envs[-1])
            made.pop_all()  # from here on they are the group's to close
        return envs

    async def _make_env(self) -> Env:
        made = self.env_factory(self.task)
        env = await made if inspect.isawaitable(made) else made
        return EnvFromMessageEnv(env, self.task, self.renderer, failed_parse_reward=self.failed_parse_reward)

    def logging_tags(self) -> Sequence[str]:
        """The dataset's tags."""
        return self.tags

    def describe(self) -> str:
        """The task's prompt."""
        return self.task.prompt


@dataclass(frozen=True)
class MessageEnvDataset(RLDataset):
    """Tasks in batches of `batch_size` groups. `shuffle_seed` None keeps their order."""

    tasks: Sequence[Task]
    env_factory: EnvFactory
    renderer: Renderer
    batch_size: int
    group_size: int
    failed_parse_reward: float = -0.1
    tags: tuple[str, ...] = ()
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks is empty: a dataset needs at least one Task")
        for name in ("batch_size", "group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The builders of batch `index`; the last batch may be smaller."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset of {len(self)} batches")
        chosen = self._order()[index * self.batch_size : (index + 1) * self.batch_size]
        return [
            MessageEnvGroupBuilder(
                self.tasks[i], self.env_factory, self.renderer, self.group_size, self.failed_parse_reward, self.tags
            )
            for i in chosen
        ]

    def __len__(self) -> int:
        return -(-len(self.tasks) // self.batch_size)

    def _order(self) -> np.ndarray:
        if self.shuffle_seed is None:
            return np.arange(len(self.tasks))
        return np.random.default_rng(self.shuffle_seed).permutation(len(self.tasks))
