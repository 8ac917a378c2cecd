"""The scripted player: it solves every task by the intended route. It reads the task's metadata, so it is an oracle.

Numbers come from the tools' replies in the real env, not from the target: a wrong table would show.
"""

import json

import trio

from envs.tool_use.game import ToolUseEnv
from jaxrl.types import Message, Task, ToolCall


def demonstrate(task: Task) -> list[Message]:
    """Play one whole episode and return its conversation (which ends with the answer). Not inside a trio task."""
    return trio.run(_play, task, ToolUseEnv())


async def _play(task: Task, env: ToolUseEnv) -> list[Message]:
    await env.reset(task)
    if task.metadata["level"] == 3:
        await _call(env, "list_fact_keys")
    values = [await _call(env, "lookup", key=key) for key in task.metadata["keys"]]
    answer = values[-1]
    if task.metadata["operation"]:
        left, right = values
        answer = await _call(env, "calculator", expression=f"{left} {task.metadata['operation']} {right}")
    await env.step(Message("assistant", f"Answer: {answer}"))
    return list(env.messages)


async def _call(env: ToolUseEnv, name: str, **arguments: str) -> str:
    call = ToolCall(name, json.dumps(arguments))
    result = await env.step(Message("assistant", tool_calls=(call,)))
    return result.messages[0].content
