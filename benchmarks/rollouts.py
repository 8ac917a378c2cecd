"""How many episodes can wait for their environments at once? Rollouts without a model, against the clock.

    python -m benchmarks.rollouts                 prints one line of JSON
    python -m benchmarks.rollouts write           ... and adds it to benchmarks/rollouts/results.jsonl

2,000 episodes of 10 turns play at once, in groups of 8, and every turn waits half a second for its environment. A
sampler that answers at once stands in for the engine, so what is left is the runtime's own work: the ideal is 5 s, and
10 such rounds must not grow the process. The test of the same name plays a small one on a virtual clock.
"""

import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

from benchmarks.machine import here_and_now
from jaxrl.env import Env, EnvGroupBuilder, Observation, StepResult, StopCondition
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.rollout import RolloutPlan, run_batch, run_group
from jaxrl.types import Sample, TrajectoryGroup

OUT = Path(__file__).parent / "rollouts"
ROUNDS = 10


@dataclass(frozen=True)
class Size:
    """How much is played; the tokens are those of one prompt, one observation and one action."""

    groups: int = 250
    members: int = 8
    turns: int = 10
    latency: float = 0.5
    prompt_tokens: int = 64
    observation_tokens: int = 32
    action_tokens: int = 32

    @property
    def ideal(self) -> float:
        """Seconds if nothing but the environments took time."""
        return self.turns * self.latency


@dataclass(eq=False)
class StubSession:
    """Says the same turn again and again, at once."""

    capacity: int
    turn: Sample
    tokens: list[int] = field(default_factory=list)

    async def sample(
        self, new_tokens: Sequence[int], *, stop: Any = (), max_tokens: int, temperature: float = 1.0
    ) -> Sample:
        """Append what is given and what is said."""
        await trio.lowlevel.checkpoint()
        self.tokens += new_tokens
        self.tokens += self.turn.tokens
        return self.turn

    def rewind(self, length: int) -> None:
        """Forget what comes after."""
        del self.tokens[length:]


class StubSampler:
    """Sessions that cost nothing. Counts those that are open, and the most there were."""

    def __init__(self, size: Size) -> None:
        context = size.prompt_tokens + size.turns * (size.observation_tokens + size.action_tokens)
        length = size.action_tokens
        self._capacity, self._turn = context, Sample((7,) * length, (-1.0,) * length, (0,) * length, "stop")
        self.live = self.most = 0

    @asynccontextmanager
    async def session(
        self, *, group: Hashable | None = None, seed: int, policy: str | None = None
    ) -> AsyncIterator[StubSession]:
        """Lease a session."""
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            yield StubSession(self._capacity, self._turn)
        finally:
            self.live -= 1


class Slow(Env):
    """A script that waits before each answer."""

    def __init__(self, size: Size) -> None:
        self._size, self._turns, self._context = size, 0, (1,) * size.prompt_tokens

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The prompt, at once."""
        return self._context, (7,)

    async def step(self, action: Sequence[int], *, extra: Any = None) -> StepResult:
        """Wait, then answer."""
        await trio.sleep(self._size.latency)
        self._turns += 1
        if self._turns == self._size.turns:
            return StepResult(1.0, True)
        self._context = (*self._context, *action, *(2,) * self._size.observation_tokens)
        return StepResult(0.0, False, self._context, (7,))


@dataclass(frozen=True)
class SlowBuilder(EnvGroupBuilder):
    """A group of Slow."""

    size: Size

    async def make_envs(self) -> Sequence[Env]:
        """One a member."""
        return [Slow(self.size) for _ in range(self.size.members)]


async def play_round(size: Size, sampler: StubSampler) -> list[TrajectoryGroup]:
    """All groups at once."""
    plan = RolloutPlan((0, "benchmark"), Limits(max_tokens=size.action_tokens))
    return await run_batch(partial(run_group, sampler), [SlowBuilder(size)] * size.groups, plan)


def timed_round(size: Size) -> tuple[float, int]:
    """Seconds of one round, and the turns that it played."""
    began = time.perf_counter()
    groups_P = trio.run(play_round, size, StubSampler(size))
    seconds = time.perf_counter() - began
    return seconds, sum(len(t.transitions) for group in groups_P for t in group.trajectories_G)


def resident_mb() -> float:
    """Memory of this process now, in MB."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # of macOS, in bytes, and only the most so far


def measure(size: Size, rounds: int) -> dict[str, Any]:
    """Play the rounds; what they took, as one JSON-able object."""
    load = round(os.getloadavg()[0], 2)  # of others, who share the cores
    seconds, turns, resident = [], [], []
    for _ in range(rounds):
        took, played = timed_round(size)
        seconds.append(round(took, 3))
        turns.append(played)
        resident.append(round(resident_mb(), 1))
    slope = float(np.polyfit(range(rounds), resident, 1)[0]) if rounds > 1 else 0.0
    return {
        "benchmark": "rollouts",
        **here_and_now(),
        "load_before": load,
        "episodes": size.groups * size.members,
        "turns": turns[0],
        "latency_seconds": size.latency,
        "ideal_seconds": size.ideal,
        "wall_seconds": seconds,
        "ratio_median": round(float(np.median(seconds)) / size.ideal, 3),
        "ratio_worst": round(max(seconds) / size.ideal, 3),
        "rss_mb": resident,
        "rss_slope_mb_per_round": round(slope, 3),
    }


def main(arguments: list[str]) -> None:
    """Measure, print, perhaps keep."""
    line = json.dumps(measure(Size(), ROUNDS))
    print(line)
    if arguments == ["write"]:
        OUT.mkdir(exist_ok=True)
        with (OUT / "results.jsonl").open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
