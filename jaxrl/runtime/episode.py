"""One episode: an Env and a Session talk until a limit, the env, or an error ends it.

Knows the token-level Env, the sampler's Session and the limits. Knows no renderer, no group and no training.
"""

import hashlib
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial

import trio

from jaxrl.env import ActionExtra, Env, EnvironmentFault, Observation, StepResult, awaitable
from jaxrl.runtime.sampler import Session
from jaxrl.types import ENDINGS, Conclusion, Sample, StopReason, Transition, common_prefix


@dataclass(frozen=True)
class Limits:
    """Budgets of an episode; None is unlimited (the sampler's context always binds).

    max_tokens: sampled tokens of one turn. max_turns: turns. max_sampled_tokens: sampled tokens of an episode.
    max_episode_tokens: prompt, observations and samples together. max_tool_calls: calls of an episode.
    episode_seconds: from the first observation to the last step. sample_seconds: one turn's sampling, waiting
    included. grader_seconds: one grading, of an episode or of a group.
    """

    max_tokens: int
    max_turns: int | None = None
    max_sampled_tokens: int | None = None
    max_episode_tokens: int | None = None
    max_tool_calls: int | None = None
    episode_seconds: float | None = None
    sample_seconds: float | None = None
    grader_seconds: float | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value, seconds = getattr(self, f.name), f.name.endswith("_seconds")
            if value is not None and not (value > 0 if seconds else value >= 1):
                least = "a number above 0" if seconds else "at least 1"
                raise ValueError(f"{f.name}={value}: expected {least}, or None for no limit")

    def turn_budget(self, turns: int, sampled: int, held: int, context: int) -> int | StopReason:
        """Tokens the next turn may sample, or the reason why there is no next turn.

        sampled, held: tokens of the episode so far, sampled ones and all. context: what the sampler can hold.
        """
        if self.max_turns is not None and turns >= self.max_turns:
            return StopReason.MAX_TURNS
        if held >= context:
            return StopReason.CONTEXT_OVERFLOW
        left = [self.max_tokens, context - held]
        if self.max_sampled_tokens is not None:
            left.append(self.max_sampled_tokens - sampled)
        if self.max_episode_tokens is not None:
            left.append(self.max_episode_tokens - held)
        return min(left) if min(left) > 0 else StopReason.MAX_TOKENS

    def turns_left(self, turns: int) -> int | None:
        """Turns after the first `turns`; None is unlimited."""
        return None if self.max_turns is None else self.max_turns - turns

    def say_seconds(self) -> str:
        """The limits of which one ended an episode with TIMEOUT."""
        limits = {name: getattr(self, name) for name in ("episode_seconds", "sample_seconds")}
        return " or ".join(f"{name}={seconds:g}" for name, seconds in limits.items() if seconds is not None)

    def grading(self) -> AbstractContextManager[trio.CancelScope]:
        """A block that may take `grader_seconds`; then it raises trio.TooSlowError."""
        return trio.fail_after(_seconds(self.grader_seconds))


async def run_episode(
    env: Env, session: Session, limits: Limits, *, temperature: float, transitions: list[Transition]
) -> StopReason:
    """Play `env` to its end and say why it ended.

    transitions: filled turn by turn, so that the caller holds the finished part of an episode that is interrupted.
    """
    with trio.move_on_after(_seconds(limits.episode_seconds)):
        return await _play(env, session, limits, temperature, transitions)
    return StopReason.TIMEOUT


async def _play(
    env: Env, session: Session, limits: Limits, temperature: float, transitions: list[Transition]
) -> StopReason:
    observation, stop = await awaitable(env.initial_observation(), "initial_observation", env.describe)
    rewrite: str | None = None
    sampled = 0
    while True:
        budget = limits.turn_budget(len(transitions), sampled, len(observation), session.capacity)
        if isinstance(budget, StopReason):
            return budget
        new = _return_to(session, observation)
        asked = partial(session.sample, new, stop=stop, max_tokens=budget, temperature=temperature)
        action = await _in_time(asked, limits.sample_seconds)
        if action is None:
            return StopReason.TIMEOUT
        sampled += len(action.tokens)
        left = limits.turns_left(len(transitions) + 1)
        said = env.step(action.tokens, extra=ActionExtra(action.stop, left, limits.max_tool_calls))
        result = await awaitable(said, "step", env.describe)
        if not isinstance(result, StepResult):
            raise TypeError(f"step of {env.describe()} returned {result!r:.80}: expected a StepResult")
        transitions.append(
            Transition(
                observation=observation,
                action=action,
                reward=result.reward,
                episode_done=result.episode_done,
                metrics=result.metrics,
                logs=result.logs,
                rewrite=rewrite,
                masked=result.masked,
            )
        )
        if result.episode_done:
            return _checked_reason(env, result.stop_reason or StopReason.TERMINATED)
        observation, stop, rewrite = result.next_observation, result.next_stop_condition, result.rewrite


async def _in_time(call: Callable[[], Awaitable[Sample]], seconds: float | None) -> Sample | None:
    """What `call` gives, or None when it took longer. A scope is much of what a turn costs: no limit, no scope."""
    if seconds is None:
        return await call()
    with trio.move_on_after(seconds):
        return await call()
    return None


def _checked_reason(env: Env, reason: StopReason) -> StopReason:
    """An env may say that it ended, not that it failed: a fault is an error, which a strategy can see."""
    if ENDINGS[reason].fault or reason is StopReason.CANCELLED:
        raise EnvironmentFault(
            f"{env.describe()} ended its episode with {reason}; a fault has to be raised as an error"
        )
    return reason


async def conclude(env: Env, reason: StopReason, limits: Limits) -> Conclusion | None:
    """Let the env grade an episode that it did not end itself. Raises trio.TooSlowError after `grader_seconds`."""
    if not (ENDINGS[reason].overlong or reason is StopReason.TIMEOUT):
        return None
    with limits.grading():
        concluded = await awaitable(env.conclude(reason), "conclude", env.describe)
    if not isinstance(concluded, Conclusion | None):
        raise TypeError(f"conclude of {env.describe()} returned {concluded!r:.80}: expected a Conclusion, or None")
    return concluded


def _seconds(limit: float | None) -> float:
    return math.inf if limit is None else limit


def _return_to(session: Session, observation: Observation) -> Observation:
    """Rewind to what the new context shares with the old one; return the tokens that are new."""
    shared = common_prefix(session.tokens, observation)
    session.rewind(shared)
    return observation[shared:]


def episode_seed(*identity: int | str) -> int:
    """A 64-bit seed from what an episode is (run seed, split, step, group, member), not from when it ran."""
    digest = hashlib.blake2b("/".join(map(str, identity)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
