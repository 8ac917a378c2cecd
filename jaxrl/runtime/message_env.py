"""Lifts a MessageEnv to the token level: the renderer writes, the transcript grows, sampled ids stay as sampled.

Knows renderers and both environment interfaces; knows nothing of engines, budgets or groups.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

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
    MessageStepResult,
    Observation,
    RLDataset,
    StepResult,
    StopCondition,
    awaitable,
)
from jaxrl.settings import at_least
from jaxrl.types import Conclusion, Message, StopReason, Task, are_messages

_CLOSE_SECONDS = 30.0


BeforeTurn = Callable[[int], Sequence[Message]]
"""turns left (this one included) -> messages to show before the turn."""


@dataclass(frozen=True)
class TurnRules:
    """What the message level does about turns that could not be read, and what it adds in front of a turn.

    A turn is malformed when its framing is broken, or when it holds tool calls of which none could be read. Broken
    framing ends the episode with PARSE_FAILURE after `parse_retries` corrections in a row; unreadable calls are
    answered by the env itself, and end it after `max_unread_turns` in a row.

    failed_parse_reward: of the turn that ends an episode with PARSE_FAILURE. parse_penalty: subtracted for every
    malformed turn that does not. mask_malformed: those turns stay in the context and are not trained.
    before_turn: messages shown after the env's reply, such as `announce_turns_left`; not before the first turn,
    whose messages are the env's, and only where turns are limited.
    """

    failed_parse_reward: float = -0.1
    parse_retries: int = 0
    max_unread_turns: int | None = None
    parse_penalty: float = 0.0
    mask_malformed: bool = False
    correction: str = "Your last turn could not be read. Close every tag you open, and answer again."
    before_turn: BeforeTurn | None = None

    def __post_init__(self) -> None:
        if self.parse_retries < 0:
            raise ValueError(f"parse_retries={self.parse_retries}: expected 0 or more")
        if self.max_unread_turns is not None and self.max_unread_turns < 0:
            raise ValueError(f"max_unread_turns={self.max_unread_turns}: expected 0 or more, or None for no limit")
        if not self.parse_penalty >= 0:
            raise ValueError(f"parse_penalty={self.parse_penalty}: expected 0 or more; it is subtracted")
        for name in ("parse_penalty", "mask_malformed"):
            if getattr(self, name) and not (self.parse_retries or self.max_unread_turns != 0):
                raise ValueError(f"{name} has no effect when no malformed turn is survived; set parse_retries")
        if self.correction != TurnRules.correction and not self.parse_retries:
            raise ValueError("correction has no effect without parse_retries: set how many turns are corrected")


def announce_turns_left(turns: int) -> Sequence[Message]:
    """Tell the model how many turns it has."""
    return (Message("user", f"{turns} turn{'s' * (turns != 1)} left."),)


class EnvFromMessageEnv(Env):
    """One message-level episode seen as tokens. Owns the transcript, and the MessageEnv it closes."""

    def __init__(self, env: MessageEnv, task: Task, renderer: Renderer, *, rules: TurnRules | None = None) -> None:
        self.message_env = env
        self.task = task
        self._renderer = renderer
        self._rules = rules or TurnRules()
        self._transcript: Transcript | None = None
        self._broken = 0  # turns in a row whose framing was broken
        self._unread = 0  # turns in a row of whose calls none could be read
        self._calls = 0
        self._over = False

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The opening messages, rendered with the env's tools."""
        messages = await awaitable(self.message_env.reset(self.task), "reset", self.describe)
        if not are_messages(messages) or not messages:
            raise TypeError(
                f"reset of {self.describe()} returned {messages!r:.80}: expected a sequence of Message, at least one, "
                'such as [Message("user", task.prompt)]'
            )
        self._transcript = begin(self._renderer, messages, self.message_env.tool_specs)
        return self._transcript.tokens, self._renderer.stop

    async def step(self, action: Sequence[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Parse the turn, hand the message to the env, render its reply.

        A turn cut by its budget ends the episode (MAX_TOKENS); `TurnRules` says what becomes of malformed ones. Of
        the calls, as many run as `max_tool_calls` allows, and the episode ends where more were asked for.

        Errors: RuntimeError after the end, where a reward would count twice.
        """
        if self._over:
            raise RuntimeError("step() after the episode's end: an env is one episode, so make another")
        result = await self._step(action, extra or ActionExtra("stop"))
        self._over = result.episode_done
        return result

    async def _step(self, action: Sequence[int], extra: ActionExtra) -> StepResult:
        parsed = self._renderer.parse(action)
        if parsed.outcome is Outcome.LENGTH:
            return StepResult(0.0, True, stop_reason=StopReason.MAX_TOKENS)
        broken = parsed.outcome is Outcome.MALFORMED
        unread = bool(parsed.message.malformed_calls) and not parsed.message.tool_calls
        self._broken = self._broken + 1 if broken else 0
        self._unread = self._unread + 1 if unread else 0
        most = self._rules.max_unread_turns
        if self._broken > self._rules.parse_retries or (most is not None and self._unread > most):
            return StepResult(self._rules.failed_parse_reward, True, stop_reason=StopReason.PARSE_FAILURE)
        if broken:
            result = MessageStepResult(messages=(Message("user", self._rules.correction),), metrics={"malformed": 1.0})
            return self._next(action, result, extra, malformed=True)
        message, over = self._within_calls(parsed.message, extra.max_tool_calls)
        if over and not message.tool_calls:  # a turn without its calls would look like an answer
            return StepResult(0.0, True, stop_reason=StopReason.MAX_TOOL_CALLS)
        result = await awaitable(self.message_env.step(message), "step", self.describe)
        if not isinstance(result, MessageStepResult):
            raise TypeError(f"step of {self.describe()} returned {result!r:.80}: expected a MessageStepResult")
        if not (result.terminated or result.truncated or over):
            return self._next(action, result, extra, malformed=unread)
        reason = StopReason.MAX_TOOL_CALLS
        if result.terminated or result.truncated:
            reason = StopReason.TERMINATED if result.terminated else StopReason.ENV
        return StepResult(
            result.reward - self._rules.parse_penalty * unread,
            True,
            metrics=result.metrics,
            stop_reason=reason,
            masked=unread and self._rules.mask_malformed,
        )

    def _within_calls(self, message: Message, most: int | None) -> tuple[Message, bool]:
        """The message up to the first call that is no longer allowed, and whether there is one. Calls that could not be
        read run nothing and so count nothing, but those after that call go with it."""
        left = None if most is None else most - self._calls
        allowed = message.tool_calls[:left]
        self._calls += len(allowed)
        seen = tuple(bad for bad in message.malformed_calls if bad.place <= len(allowed))
        over = len(allowed) < len(message.tool_calls)
        return replace(message, tool_calls=allowed, malformed_calls=seen), over

    def _next(
        self, action: Sequence[int], result: MessageStepResult, extra: ActionExtra, *, malformed: bool
    ) -> StepResult:
        """The episode goes on: the turn and the replies join the transcript."""
        assert self._transcript is not None, "initial_observation comes first"
        replies = [*result.messages]
        if self._rules.before_turn is not None and extra.turns_left:
            replies += self._rules.before_turn(extra.turns_left)
        self._transcript, rewrite = observe(act(self._transcript, action), replies)
        return StepResult(
            result.reward - self._rules.parse_penalty * malformed,
            False,
            self._transcript.tokens,
            self._renderer.stop,
            metrics=result.metrics,
            rewrite=rewrite,
            masked=malformed and self._rules.mask_malformed,
        )

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """The MessageEnv's own."""
        return await awaitable(self.message_env.conclude(reason), "conclude", self.describe)

    async def close(self) -> None:
        """Close the MessageEnv."""
        await awaitable(self.message_env.close(), "close", self.describe)

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
    rules: TurnRules = field(default_factory=TurnRules)
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_task("task", self.task)
        _check_factory(self.env_factory)

    async def make_envs(self) -> Sequence[Env]:
        """One env per member, all of the same task. When one cannot be made, those before it are closed."""
        envs: list[Env] = []
        async with AsyncExitStack() as made:
            while len(envs) < self.group_size:
                envs.append(await self._make_env())
                made.push_async_callback(_close, envs[-1])
            made.pop_all()  # from here on they are the group's to close
        return envs

    async def remake(self, member: int) -> Env:
        """One more env of the same task."""
        return await self._make_env()

    async def _make_env(self) -> Env:
        made = self.env_factory(self.task)
        env = await made if inspect.isawaitable(made) else made
        if not isinstance(env, MessageEnv):
            raise TypeError(f"env_factory={self.env_factory!r} returned {env!r:.80}: expected a MessageEnv")
        return EnvFromMessageEnv(env, self.task, self.renderer, rules=self.rules)

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
    rules: TurnRules = field(default_factory=TurnRules)
    tags: tuple[str, ...] = ()
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks is empty: a dataset needs at least one Task")
        for i, task in enumerate(self.tasks):
            _check_task(f"tasks[{i}]", task)
        _check_factory(self.env_factory)
        for name in ("batch_size", "group_size"):
            at_least(name, getattr(self, name), 1)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The builders of batch `index`; the last batch may be smaller."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset of {len(self)} batches")
        chosen = self._order()[index * self.batch_size : (index + 1) * self.batch_size]
        return [
            MessageEnvGroupBuilder(
                self.tasks[i], self.env_factory, self.renderer, self.group_size, self.rules, self.tags
            )
            for i in chosen
        ]

    def __len__(self) -> int:
        return -(-len(self.tasks) // self.batch_size)

    def _order(self) -> np.ndarray:
        if self.shuffle_seed is None:
            return np.arange(len(self.tasks))
        return np.random.default_rng(self.shuffle_seed).permutation(len(self.tasks))


def _check_task(name: str, task: Task) -> None:
    if not isinstance(task, Task):
        raise TypeError(f"{name}={task!r:.80}: expected a Task, such as Task(prompt, target=...)")


def _check_factory(factory: EnvFactory) -> None:
    if not callable(factory):
        raise TypeError(
            f"env_factory={factory!r:.80}: expected what makes an env of a task, such as its class; every episode gets "
            "a new env"
        )
