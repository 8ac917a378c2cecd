"""A sampler that draws from a hash, and environments for workers: importable without JAX, in any process.

What a session draws is a function of its seed and its context, so two runs agree exactly or something was lost.
"""

import hashlib
import os
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from jaxrl.env import Env, EnvGroupBuilder, StepResult
from jaxrl.types import Sample

Act = Callable[["HashSession"], Awaitable[None]]
"""What a session does before it draws: wait, raise."""


async def at_once(session: "HashSession") -> None:
    await trio.lowlevel.checkpoint()


@dataclass(eq=False)
class HashSession:
    """Draws tokens 0 to 96; each one's log-prob and version follow from it."""

    seed: int
    capacity: int
    act: Act
    tokens: list[int] = field(default_factory=list)

    async def sample(
        self, new_tokens: Sequence[int], *, stop: Any = (), max_tokens: int, temperature: float = 1.0
    ) -> Sample:
        if len(self.tokens) + len(new_tokens) >= self.capacity:
            raise ContextFull(f"{len(new_tokens)} tokens do not fit")
        await self.act(self)
        self.tokens += new_tokens
        drawn: list[int] = []
        logprobs: list[float] = []
        while len(drawn) < min(max_tokens, self.capacity - len(self.tokens)):
            said = f"{self.seed} {temperature} {self.tokens} {drawn}".encode()
            token, odds = struct.unpack("<QQ", hashlib.blake2b(said, digest_size=16).digest())
            drawn.append(token % 97)
            logprobs.append(struct.unpack("<f", struct.pack("<f", -(odds % 9973) / 997))[0])
            if drawn[-1] in stop or chr(drawn[-1]) in stop:
                break
        self.tokens += drawn
        ended = bool(drawn) and (drawn[-1] in stop or chr(drawn[-1]) in stop)
        versions = tuple(t // 50 for t in drawn)
        return Sample(tuple(drawn), tuple(logprobs), versions, "stop" if ended else "length")

    def rewind(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]


class ContextFull(ValueError):
    """As the engine's."""


class HashSampler:
    """Sessions that draw from a hash. Counts those that are open; remembers how each was asked for."""

    def __init__(self, capacity: int = 4096, act: Act = at_once) -> None:
        self.capacity, self.act = capacity, act
        self.live: set[HashSession] = set()
        self.asked: list[dict[str, Any]] = []
        self._changed = trio.Event()

    @asynccontextmanager
    async def session(self, *, group: Hashable | None = None, seed: int, **policy: str) -> AsyncIterator[HashSession]:
        hash(group)
        if policy.get("policy") == "nobody":
            raise ValueError("policy='nobody': expected one of 'us'")
        self.asked.append({"group": group, "seed": seed, **policy})
        session = HashSession(seed, self.capacity, self.act)
        self.live.add(session)
        self._changed.set()
        try:
            yield session
        finally:
            self.live.discard(session)
            self._changed.set()

    async def until_live(self, count: int, seconds: float = 2.0) -> None:
        """Wait until so many sessions are open."""
        with trio.fail_after(seconds):
            while len(self.live) != count:
                self._changed = trio.Event()
                await self._changed.wait()


# --- environments that know which process they are in ---------------------------------------------


class Odd(Exception):
    """Pickles, and carries more than a text."""

    def __init__(self, text: str, detail: int) -> None:
        super().__init__(text, detail)
        self.detail = detail


def _lost() -> None:
    raise LookupError("what was pickled is not here")


class Elsewhere:
    """Pickles, and cannot be made again."""

    def __reduce__(self) -> Any:
        return _lost, ()


class Strange(Exception):
    """Pickles and does not come back, whoever has taught pickle about exceptions (Dask does)."""

    def __init__(self, text: str, *, detail: int) -> None:
        super().__init__(text)
        self.detail = detail, Elsewhere()


class Chatter(Env):
    """`turns` turns, each followed by two tokens, the second turn by a shorter history; then `deed` is done."""

    def __init__(self, member: int, turns: int, deed: str, diary: Path | None) -> None:
        self.member, self.turns, self.deed, self.diary = member, turns, deed, diary
        self.context: tuple[int, ...] = (5, 6, 7)
        self.done = 0

    def note(self, what: str) -> None:
        if self.diary is not None:
            with self.diary.open("a") as diary:
                diary.write(f"{what} {self.member} {os.getpid()} {time.time()}\n")

    async def initial_observation(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        self.note("begin")
        return self.context, (3, 4)

    async def step(self, action: Sequence[int], *, extra: Any = None) -> StepResult:
        self.done += 1
        self.context = (*self.context, *action, 8, 9) if self.done != 2 else (5, 6, 10)
        if self.member == 1:
            self.note("deed")
            await self.do()
        metrics = {"jax": float("jax" in sys.modules)}
        if self.done == self.turns:
            return StepResult(float(self.member), True, metrics=metrics)
        return StepResult(0.25, False, self.context, (3, 4), metrics=metrics, rewrite="cut" if self.done == 2 else None)

    async def do(self) -> None:
        if self.deed == "exit":
            os._exit(3)
        if self.deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.deed == "sleep":
            await trio.sleep(1000)
        if self.deed == "odd":
            raise Odd("the die is on edge", 7)
        if self.deed == "strange":
            raise Strange("not of this process", detail=1)

    async def close(self) -> None:
        await trio.sleep(0.01)
        self.note("close")


@dataclass(frozen=True)
class ChatterBuilder(EnvGroupBuilder):
    """`size` Chatters; member 1 does the deed."""

    size: int = 3
    turns: int = 4
    deed: str = ""
    diary: Path | None = None
    extra: Any = None

    async def make_envs(self) -> Sequence[Env]:
        return [Chatter(m, self.turns, self.deed, self.diary) for m in range(self.size)]

    async def compute_group_rewards(self, trajectories_G: Any, envs_G: Any) -> Any:
        return [(0.5, {"length": float(len(t.transitions))}) for t in trajectories_G]

    def logging_tags(self) -> Sequence[str]:
        return ("chatter",)

    def describe(self) -> str:
        return f"chat {self.size}"
