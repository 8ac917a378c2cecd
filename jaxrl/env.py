"""The nouns an environment author implements: Env, MessageEnv, group builders, datasets.

Knows messages and token ids (types.py) and nothing else: no renderer, no engine, no trio. `Env` is one episode
at token level; `MessageEnv` is one at message level, which `jaxrl.runtime.message_env` lifts to an `Env` with a
renderer.
"""

import abc
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jaxrl.settings import at_least
from jaxrl.types import (
    Conclusion,
    Logs,
    Message,
    Metrics,
    StopReason,
    Task,
    ToolSpec,
    Trajectory,
    are_messages,
    check_numbers,
)

T = TypeVar("T")

Observation = tuple[int, ...]
"""The whole context the next action is sampled from, as token ids."""

StopCondition = tuple[int, ...] | tuple[str, ...]
"""Token ids, or strings, that end an action."""


class EnvironmentFault(Exception):
    """The environment (not the policy) failed. Never turned into a reward: see `jaxrl.types.ENDINGS`."""


def awaitable(said: Awaitable[T], method: str, describe: Callable[[], str]) -> Awaitable[T]:
    """What a method of an env gave, to be awaited. Raises TypeError where it is written without `async`."""
    if not inspect.isawaitable(said):
        raise TypeError(f'{method} of {describe()} is not async: write "async def {method}"')
    return said


@dataclass(frozen=True)
class StepResult:
    """What an action led to. `stop_reason` is read only when `episode_done`; None then means TERMINATED."""

    reward: float
    episode_done: bool
    next_observation: Observation = ()
    next_stop_condition: StopCondition = ()
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    stop_reason: StopReason | None = None
    rewrite: str | None = None  # why next_observation does not extend observation + action
    masked: bool = False  # the action stays in the context but is not trained

    def __post_init__(self) -> None:
        check_numbers("StepResult", self.reward, self.metrics)


@dataclass(frozen=True)
class ActionExtra:
    """What the runtime knows about an action and the env does not.

    stop: whether a stop condition was met, or the budget ran out. turns_left: turns the limits allow after this one.
    max_tool_calls: calls the limits allow an episode. None is unlimited.
    """

    stop: Literal["stop", "length"]
    turns_left: int | None = None
    max_tool_calls: int | None = None


class Env(abc.ABC):
    """One episode at token level. Single use: there is no reset."""

    @abc.abstractmethod
    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The opening context and what ends an action."""

    @abc.abstractmethod
    async def step(self, action: Sequence[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Act with the sampled ids (stop token included)."""

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """Grade an episode that a limit or a timeout ended, which `step` was not told. None: nothing to add.

        Called at most once, before `close`. A timeout is trained only if this returns something.
        """
        return None

    async def close(self) -> None:
        """Release what the episode holds. Called exactly once, also after an error or a cancellation."""
        return

    def describe(self) -> str:
        """What error messages call it."""
        return type(self).__name__


@dataclass(frozen=True)
class MessageStepResult:
    """What a message led to. `reward` may be given at any step; `messages` are the replies to the model."""

    terminated: bool = False
    truncated: bool = False
    messages: Sequence[Message] = ()
    reward: float = 0.0
    metrics: Metrics = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_numbers("MessageStepResult", self.reward, self.metrics)
        if not are_messages(self.messages):
            raise TypeError(
                f"MessageStepResult: messages={self.messages!r:.80}: expected a sequence of Message, such as "
                '[Message("user", "try again")]'
            )


class MessageEnv(abc.ABC):
    """One episode at message level. Single use: `reset` is called exactly once."""

    @abc.abstractmethod
    async def reset(self, task: Task) -> Sequence[Message]:
        """Start the episode on `task` and return the opening messages."""

    @abc.abstractmethod
    async def step(self, message: Message) -> MessageStepResult:
        """Act with the assistant message the model produced."""

    @property
    def tool_specs(self) -> Sequence[ToolSpec]:
        """The tools shown to the model."""
        return ()

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """Grade an episode that a limit or a timeout ended, which `step` was not told. None: nothing to add.

        Called at most once, before `close`. A timeout is trained only if this returns something.
        """
        return None

    @property
    @abc.abstractmethod
    def messages(self) -> Sequence[Message]:
        """The conversation so far, the opening included."""

    async def close(self) -> None:
        """Release what the episode holds. Called exactly once, also after an error or a cancellation."""
        return


EnvFactory = Callable[[Task], MessageEnv] | Callable[[Task], Awaitable[MessageEnv]]


class EnvGroupBuilder(abc.ABC):
    """Makes the envs of one group: several attempts at one task. Picklable."""

    @property
    def coupled(self) -> bool:
        """Whether the members play with or against each other, so that none can be replayed without the others."""
        return False

    @abc.abstractmethod
    async def make_envs(self) -> Sequence[Env]:
        """Fresh envs of the same task and starting state, one per member."""

    async def remake(self, member: int) -> Env | None:
        """A fresh env for one member whose attempt failed. None: take it from a fresh `make_envs`, close the others."""
        return None

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        """Rewards that need the whole group, added to the step rewards. Default: zeros.

        Called once every member has ended, with those that can be trusted (no faults), in member order, and their
        envs, which are closed by then. Returns one (reward, metrics) for each.
        """
        return [(0.0, {}) for _ in trajectories_G]

    async def cleanup(self) -> None:
        """Release what the group holds, after every member has closed. Called exactly once."""
        return

    def logging_tags(self) -> Sequence[str]:
        """Names under which the group's metrics are also reported."""
        return ()

    def describe(self) -> str:
        """The group's task in a few words, for records and error messages."""
        return type(self).__name__


class RLDataset(abc.ABC):
    """Batches of group builders. Pure in the index: the same index always gives the same batch."""

    @abc.abstractmethod
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The builders of batch `index`, 0 <= index < len(self)."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of batches."""


@dataclass(frozen=True)
class GroupDataset(RLDataset):
    """Given groups in batches of `batch_size`, in their order; the last batch may be smaller."""

    groups: Sequence[EnvGroupBuilder]
    batch_size: int

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups is empty: a dataset needs at least one EnvGroupBuilder")
        at_least("batch_size", self.batch_size, 1)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`; IndexError when there is none."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset of {len(self)} batches")
        return self.groups[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self) -> int:
        return -(-len(self.groups) // self.batch_size)


class RLDatasetBuilder(abc.ABC):
    """Configuration of a task distribution: what a recipe names and a run writes into its config.json."""

    @abc.abstractmethod
    async def __call__(self, renderer: Any) -> tuple[RLDataset, RLDataset | None]:
        """(training data, held-out data or None). `renderer`: the `jaxrl.chat` Renderer of the model to train."""
