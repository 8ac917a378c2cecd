"""The nouns that every layer speaks: messages, turns, trajectories, datums, endings.

Plain frozen dataclasses of Python and numpy values. This file knows nothing about models, renderers, JAX or
trio. The dense, device-side counterpart of a list of `Datum` is `jaxrl.algo.batch.Batch`.

Dimension letters used across the project:

    _P tasks (groups) of a batch, _G members of a group, _T tokens of one sequence, _D datums  (ragged, Python)
    B rows, T positions, V vocabulary, M model width, F feed-forward width, H query heads,
    K key/value heads, C head width, L layers, R LoRA rank, S cache positions                  (dense, arrays)

Ragged nests are spelled with underscores (`rewards_P_G`), dense arrays with joined capitals (`logp_BT`).
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Role = Literal["system", "user", "assistant", "tool"]
Metrics = Mapping[str, float]
Logs = Mapping[str, str | float]


# --- messages ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolCall:
    """One call the model asked for. `arguments` is the JSON text of an object, as the model wrote it."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class MalformedToolCall:
    """A tool-call block whose content could not be read; `error` is addressed to the model.

    id: the one it was given, in families whose calls have one. place: how many readable calls of its message stand
    before it.
    """

    text: str
    error: str
    id: str | None = None
    place: int = 0


@dataclass(frozen=True)
class Message:
    """One chat message. `thinking` is None when the turn has no thinking block (and "" for an empty block)."""

    role: Role
    content: str = ""
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[MalformedToolCall, ...] = ()
    name: str | None = None  # for role "tool": which tool answered
    call_id: str | None = None  # for role "tool": the id of the call it answers, in families whose calls have one

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"Message(role={self.role!r}): content={self.content!r:.80}: expected a str")

    @property
    def calls(self) -> tuple[ToolCall | MalformedToolCall, ...]:
        """Every call in the order of the turn, whether it could be read or not."""
        readable = [(k, 1, call) for k, call in enumerate(self.tool_calls)]
        malformed = [(bad.place, 0, bad) for bad in self.malformed_calls]  # in front of the call that has its number
        return tuple(call for _, _, call in sorted([*malformed, *readable], key=lambda placed: placed[:2]))


def are_messages(value: object) -> bool:
    """Whether a value is a sequence of messages. A text is a sequence too, of texts."""
    return isinstance(value, Sequence) and all(isinstance(each, Message) for each in value)


@dataclass(frozen=True)
class ToolSpec:
    """What the model is told about a tool. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


# --- tasks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What one episode is about: the prompt, the target to grade against, anything else the env wants."""

    prompt: str
    target: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):  # an empty one is for envs that do not ask it
            raise TypeError(f"Task: prompt={self.prompt!r:.80}: expected a str")


# --- endings: one enum, one table -----------------------------------------------------------------


class StopReason(enum.Enum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    ENV = "env"
    MAX_TURNS = "max_turns"
    CONTEXT_OVERFLOW = "context_overflow"
    MAX_TOKENS = "max_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    PARSE_FAILURE = "parse_failure"
    TIMEOUT = "timeout"
    ENV_ERROR = "env_error"
    TOOL_ERROR = "tool_error"
    GRADER_ERROR = "grader_error"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Ending:
    """What a stop reason means for training.

    trained: the episode's tokens get a gradient.
    in_baseline: its reward counts in the group's baseline.
    overlong: it was cut by a budget (penalised or masked when those options are on).
    fault: the environment failed, not the policy; its reward is never trusted and a strategy may retry it.
    """

    trained: bool
    in_baseline: bool
    overlong: bool
    fault: bool


_KEPT = Ending(trained=True, in_baseline=True, overlong=False, fault=False)
_OVERLONG = Ending(trained=True, in_baseline=True, overlong=True, fault=False)
_FAULT = Ending(trained=False, in_baseline=False, overlong=False, fault=True)

ENDINGS: Mapping[StopReason, Ending] = {
    StopReason.TERMINATED: _KEPT,
    StopReason.ENV: _KEPT,
    StopReason.MAX_TURNS: _OVERLONG,
    StopReason.CONTEXT_OVERFLOW: _OVERLONG,
    StopReason.MAX_TOKENS: _OVERLONG,
    StopReason.MAX_TOOL_CALLS: _OVERLONG,
    StopReason.PARSE_FAILURE: _KEPT,
    StopReason.TIMEOUT: _FAULT,
    StopReason.ENV_ERROR: _FAULT,
    StopReason.TOOL_ERROR: _FAULT,
    StopReason.GRADER_ERROR: _FAULT,
    StopReason.CANCELLED: Ending(trained=False, in_baseline=False, overlong=False, fault=False),
}

GRADED_TIMEOUT = _KEPT
"""A timeout whose finished part the env could grade (`Env.conclude`): trained and counted like any other episode."""


# --- what a rollout produces ---------------------------------------------------------------------


def check_numbers(kind: str, reward: object, metrics: object) -> None:
    """Raise TypeError where a reward or a metric is no number; those of numpy and booleans are numbers.

    Whether they are finite is for whoever counts them to say.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{kind}: metrics={metrics!r:.80}: expected a mapping of names to numbers")
    if not hasattr(reward, "__float__"):
        raise TypeError(f"{kind}: reward={reward!r:.80}: expected a number")
    for name, value in metrics.items():
        if not hasattr(value, "__float__"):
            raise TypeError(f"{kind}: metrics[{name!r}]={value!r:.80}: expected a number")


@dataclass(frozen=True)
class Sample:
    """One sampled turn: ids, their log-probs under the sampling distribution, and who sampled them.

    `tokens` ends with the stop token when `stop == "stop"` and a token id stopped it; `logprobs` are natural
    logarithms, float32, one per token; `versions` are the policy versions whose weights drew each token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: Literal["stop", "length"]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.logprobs) == len(self.versions)


@dataclass(frozen=True)
class Transition:
    """One turn: the whole context that was sampled from, the action, and what the env made of it."""

    observation: tuple[int, ...]
    action: Sample
    reward: float
    episode_done: bool
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    rewrite: str | None = None  # why `observation` does not extend the turn before it; None when it does
    masked: bool = False  # stays in the context but is not trained, such as a malformed turn that was retried


@dataclass(frozen=True)
class Conclusion:
    """An env's last word on an episode that something else ended: a limit or a timeout."""

    reward: float = 0.0
    metrics: Metrics = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_numbers("Conclusion", self.reward, self.metrics)


@dataclass(frozen=True)
class Trajectory:
    """One episode. `error` is "Type: message" for the endings that are faults."""

    transitions: tuple[Transition, ...]
    stop_reason: StopReason
    error: str | None = None
    conclusion: Conclusion | None = None

    @property
    def reward(self) -> float:
        """Sum of the step rewards and of the conclusion's (without the group reward)."""
        return float(sum(t.reward for t in self.transitions) + (self.conclusion.reward if self.conclusion else 0.0))

    @property
    def ending(self) -> Ending:
        """The row of `ENDINGS`; for an episode that ran out of time and was graded all the same, `GRADED_TIMEOUT`."""
        if self.stop_reason is StopReason.TIMEOUT and self.conclusion is not None:
            return GRADED_TIMEOUT
        return ENDINGS[self.stop_reason]


@dataclass(frozen=True)
class RolloutError:
    """An attempt at an episode that failed for reasons of its own, whether or not a later attempt went well.

    kind: the exception's type. stop_reason: what the attempt ended with. env: who failed. member, turn (from 1):
    where, or None for what concerns the whole group.
    """

    kind: str
    message: str
    stop_reason: StopReason
    task: str
    env: str
    member: int | None = None
    turn: int | None = None

    def __str__(self) -> str:
        where = "" if self.member is None else f", member {self.member}"
        where += "" if self.turn is None else f", turn {self.turn}"
        return f"{self.kind}: {self.message} (task {self.task!r}, {self.env}{where})"


@dataclass(frozen=True)
class TrajectoryGroup:
    """The episodes of one task, in the order of the builder's envs.

    rewards_G: total rewards, step rewards plus group reward.
    metrics_G: metrics of each member's group reward.
    tags: the builder's logging tags.
    errors: what failed on the way, retried attempts included.
    viable: whether the strategy accepts the group; one that it does not is not trained, whoever survived.
    """

    trajectories_G: tuple[Trajectory, ...]
    rewards_G: tuple[float, ...]
    metrics_G: tuple[Metrics, ...]
    tags: tuple[str, ...] = ()
    errors: tuple[RolloutError, ...] = ()
    viable: bool = True

    def __post_init__(self) -> None:
        assert len(self.trajectories_G) == len(self.rewards_G) == len(self.metrics_G)


SCORED = ("logprobs_old", "logprobs_ref", "correction")
"""Columns of a datum that are filled in after the rollout, if at all."""


@dataclass(frozen=True)
class Datum:
    """One contiguous token sequence to train on. All arrays have length N = number of tokens.

    tokens: int32 ids. mask: bool, True where the token was sampled by the policy. logprobs: float32, the
    sampler's log-prob of that token (0 where mask is False). advantages: float32 (0 where mask is False).
    versions: int32 policy version (-1 where no policy sampled the token). group, episode: indices inside the batch;
    an episode whose history was rewritten has several datums.

    Scored where a loss asks for it, else None, each float32: logprobs_old, under the policy before the batch;
    logprobs_ref, under the reference; correction, a factor of the policy's term (1 where mask is False).
    """

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray
    group: int
    episode: int
    logprobs_old: np.ndarray | None = None
    logprobs_ref: np.ndarray | None = None
    correction: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name in ("mask", "logprobs", "advantages", "versions", *SCORED):
            column = getattr(self, name)
            assert column is None or len(column) == n, f"{name} has {len(column)} entries for {n} tokens"


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if tuple(a[:n]) == tuple(b[:n]):  # the usual case, compared in C
        return n
    return next(i for i in range(n) if a[i] != b[i])
