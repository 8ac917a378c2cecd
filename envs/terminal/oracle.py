"""Attempts at a task without a model: its reference solution, or nothing at all.

Knows trials and episodes. A sound task gives 1 to its reference solution and 0 to whoever does nothing. The same
solutions, typed into the tool, are demonstrations for a model to imitate.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import trio

from envs.terminal.environment import INSTRUCTIONS, HarborEnv, harbor_task
from envs.terminal.grading import Rewards, total
from envs.terminal.harbor_task import SOLUTION, Step, UnsupportedTask, load_task
from envs.terminal.trial import Trial, TrialOptions
from jaxrl.types import Message, ToolCall

Player = Literal["oracle", "nothing"]
"""The reference solution, or nobody."""


@dataclass(frozen=True)
class Attempt:
    """What an attempt came to: its reward, and those of each step that was graded."""

    reward: float
    steps: tuple[Rewards, ...]

    def step_rewards(self, key: str | None = None) -> list[float]:
        """One number a step."""
        return [total(each, key) for each in self.steps]


async def attempt(directory: Path, player: Player, options: TrialOptions | None = None) -> Attempt:
    """Let the reference solution, or nobody, work on each step of the task in `directory`."""
    trial = Trial(load_task(directory), options)
    try:
        await trial.start()
        while not trial.over:
            if player == "oracle":
                await trial.solve()
            await trial.hand_in()
        return Attempt(trial.reward(), tuple(each.rewards for each in trial.graded))
    finally:
        with trio.CancelScope(shield=True):
            await trial.aclose()


async def demonstrate(
    directory: Path,
    options: TrialOptions | None = None,
    *,
    commands: Sequence[str] | None = None,
    instructions: str | None = INSTRUCTIONS,
) -> tuple[list[Message], float]:
    """An episode in which one command is typed for each step: its conversation, and its reward.

    commands: None types the reference solutions.
    """
    typed = commands or [typed_solution(step) for step in load_task(directory).steps]
    env = HarborEnv(options, instructions=instructions)
    reward = 0.0
    try:
        await env.reset(harbor_task(directory))
        for command in typed:
            await env.step(Message("assistant", tool_calls=(ToolCall("bash", json.dumps({"command": command})),)))
            result = await env.step(Message("assistant", "Done."))
            reward += result.reward
            if result.terminated or result.truncated:
                break
        return list(env.messages), reward
    finally:
        with trio.CancelScope(shield=True):
            await env.close()


_NOT_TYPED = re.compile(r"#!.*|set -[a-z]+( pipefail)?|cd /app/?")


def typed_solution(step: Step) -> str:
    """A reference solution as one would type it into a shell that is in the working directory already."""
    path = step.solution / SOLUTION if step.solution is not None else None
    if path is None or not path.is_file():
        raise UnsupportedTask(f"step {step.name!r} has no reference solution, {SOLUTION}")
    lines = path.read_text("utf-8").splitlines()
    while lines and (not lines[0].strip() or _NOT_TYPED.fullmatch(lines[0].strip())):
        lines.pop(0)
    return "\n".join(lines).strip()
