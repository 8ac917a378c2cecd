"""Environments and engines that do as they are told, and a small policy that speaks bytes and knows when to stop."""

from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import trio

from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import Env, EnvGroupBuilder, MessageEnv, MessageStepResult, StepResult
from jaxrl.models import spec
from jaxrl.models.config import ModelConfig
from jaxrl.runtime.engine import Weights
from jaxrl.runtime.schedule import EngineConfig
from jaxrl.types import Message, Sample, StopReason, Task, ToolSpec

BYTES = byte_tokenizer()
RENDERER = renderer_for(BYTES)
END = BYTES.special("<|im_end|>")
TALKER = ModelConfig(
    vocab_size=BYTES.vocab_size,
    width=32,
    ff_width=48,
    layers=1,
    heads=2,
    kv_heads=1,
    head_width=16,
    max_positions=512,
)
ENGINE = EngineConfig(
    slots=8,
    context=128,
    prompts=4,
    prompt_context=32,
    members=4,
    decode_steps=4,
    extend_lengths=(32,),
    row_buckets=(8,),
    position_buckets=(128,),
)


def talker(seed: int = 0) -> Weights:
    """A random model with a bias: it ends a turn after a few bytes and says no other special token.

    Channel 0 of every embedding is large, so the head's row 0 works as a bias.
    """
    params = spec.init(spec.param_specs(TALKER), jnp.float32, seed=seed)
    params["embed"] = params["embed"].at[:, 0].set(6.0)
    params["lm_head"] = params["lm_head"].at[0, 256:].set(-8.0).at[0, END].set(1.2)
    return Weights(params)


def said(text: str) -> tuple[int, ...]:
    """A well-formed turn."""
    return (*BYTES.encode(text), END)


# --- an engine with a script ----------------------------------------------------------------------


Script = Callable[[int, int, Sequence[int]], Sequence[int]]
"""(seed, turn, context) -> the tokens of the turn."""


async def nap(seconds: float) -> None:
    """Sleep; for the `act` of a Counting env."""
    await trio.sleep(seconds)


@dataclass
class ScriptedSession:
    """What `Session` promises, without a model."""

    script: Script
    seed: int
    capacity: int
    tokens: list[int] = field(default_factory=list)
    turns: int = 0
    given: list[tuple[int, ...]] = field(default_factory=list)
    rewinds: list[int] = field(default_factory=list)

    async def sample(self, new_tokens: Sequence[int], *, stop: Any, max_tokens: int, temperature: float) -> Sample:
        await trio.lowlevel.checkpoint()
        self.given.append(tuple(new_tokens))
        self.tokens += new_tokens
        assert self.tokens, "nothing to sample from"
        assert len(self.tokens) + max_tokens <= self.capacity
        drawn = tuple(self.script(self.seed, self.turns, self.tokens))[:max_tokens]
        self.turns += 1
        self.tokens += drawn
        ended = bool(drawn) and drawn[-1] in stop
        return Sample(drawn, (-0.5,) * len(drawn), (0,) * len(drawn), "stop" if ended else "length")

    def rewind(self, length: int) -> None:
        if length < len(self.tokens):
            self.rewinds.append(length)
        del self.tokens[length:]


class ScriptedEngine:
    """Sessions that follow a script; counts those that are open and keeps all of them."""

    def __init__(self, script: Script, capacity: int = 10_000) -> None:
        self._script, self._capacity = script, capacity
        self.live_sessions = 0
        self.sessions: list[ScriptedSession] = []
        self.groups: list[Hashable] = []

    @asynccontextmanager
    async def session(self, *, group: Hashable, seed: int) -> AsyncIterator[ScriptedSession]:
        session = ScriptedSession(self._script, seed, self._capacity)
        self.sessions.append(session)
        self.groups.append(group)
        self.live_sessions += 1
        try:
            yield session
        finally:
            self.live_sessions -= 1


def lines(*texts: str) -> Script:
    """Say these, one a turn, each ended properly."""
    return lambda seed, turn, context: said(texts[turn])


# --- environments ---------------------------------------------------------------------------------


class Echo(MessageEnv):
    """Replies `reply` for `turns` turns, then ends; the reward of a turn is a function of what was said."""

    def __init__(
        self,
        *,
        turns: int = 3,
        reply: Message | None = None,
        reward: Callable[[Message], float] = lambda message: 0.0,
        truncate: bool = False,
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        self._turns, self._reply, self._reward, self._truncate = (
            turns,
            reply or Message("user", "go on"),
            reward,
            truncate,
        )
        self._tools = tools
        self._messages: list[Message] = []
        self.heard: list[Message] = []
        self.closed = 0

    async def reset(self, task: Task) -> Sequence[Message]:
        self._messages = [Message("user", task.prompt)]
        return tuple(self._messages)

    async def step(self, message: Message) -> MessageStepResult:
        self.heard.append(message)
        last = len(self.heard) == self._turns
        self._messages += [message, self._reply]
        reward, metrics = self._reward(message), {"turns": 1.0}
        if last:
            return MessageStepResult(not self._truncate, self._truncate, reward=reward, metrics=metrics)
        return MessageStepResult(messages=(self._reply,), reward=reward, metrics=metrics)

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    @property
    def tool_specs(self) -> Sequence[ToolSpec]:
        return self._tools

    async def close(self) -> None:
        self.closed += 1


class Counting(Env):
    """A token-level episode: each turn is followed by two ids. What it does goes to `log`."""

    def __init__(
        self,
        member: int,
        log: list[str],
        *,
        turns: int = 2,
        prompt: tuple[int, ...] = (1, 2, 3),
        act: Callable[[str, int], Any] = lambda where, member: None,
    ) -> None:
        self.member, self.log, self.turns, self.prompt, self._act = member, log, turns, prompt, act
        self.context: tuple[int, ...] = prompt
        self.done = 0

    async def _do(self, where: str) -> None:
        self.log.append(f"{where} {self.member}")
        waiting = self._act(where, self.member)
        if waiting is not None:
            await waiting

    async def initial_observation(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        await self._do("initial_observation")
        return self.prompt, ()

    async def step(self, action: Sequence[int], *, extra: Any = None) -> StepResult:
        await self._do("step")
        self.done += 1
        self.context += (*action, 8, 9)
        if self.done == self.turns:
            return StepResult(float(self.member), True, stop_reason=StopReason.TERMINATED)
        return StepResult(0.0, False, self.context)

    async def close(self) -> None:
        await self._do("close")


@dataclass(frozen=True)
class CountingBuilder(EnvGroupBuilder):
    """`size` Counting envs. `act(where, member)` may raise, or return something to await; member -1 is the builder."""

    log: list[str]
    size: int = 3
    turns: int = 2
    prompt: tuple[int, ...] = (1, 2, 3)
    act: Callable[[str, int], Any] = lambda where, member: None
    name: str = "count"

    async def _do(self, where: str) -> None:
        self.log.append(where)
        waiting = self.act(where, -1)
        if waiting is not None:
            await waiting

    async def make_envs(self) -> Sequence[Env]:
        await self._do("make_envs")
        return [Counting(m, self.log, turns=self.turns, prompt=self.prompt, act=self.act) for m in range(self.size)]

    async def compute_group_rewards(self, trajectories_G: Any, envs_G: Any) -> Any:
        await self._do("compute_group_rewards")
        return [(0.5, {"bonus": 0.5})] * len(trajectories_G)

    async def cleanup(self) -> None:
        await self._do("cleanup")

    def describe(self) -> str:
        return self.name
