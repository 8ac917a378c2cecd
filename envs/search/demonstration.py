"""The scripted player: it searches by the intended route and answers. It reads the task's metadata, so it is an oracle.

A careless player forgets what it is looking for: it asks for the entity alone. What it answers is what it was shown:
where no passage tells, it says that it does not know.
"""

import json
from collections.abc import Sequence

import numpy as np
import trio

from envs.search.game import Rules, SearchEnv
from envs.search.questions import FIELDS
from envs.search.retriever import Retriever
from jaxrl.types import Message, Task, ToolCall

UNKNOWN = "Answer: unknown"


def good_queries(task: Task) -> list[str]:
    """One query a hop: the first finds the entity by its value, the last what is asked."""
    path, values, entity = task.metadata["path"], task.metadata["values"], task.metadata["entity"]
    found = [f"{_words(name)} {value}" for name, value in zip(path[:-1], values[:-1], strict=True)]
    return [*found, f"{entity} {_words(path[-1])}"]


def careless_queries(task: Task) -> list[str]:
    """The same, without what is asked."""
    return [*good_queries(task)[:-1], task.metadata["entity"]]


def _words(name: str) -> str:
    return FIELDS[name].asked.removeprefix("the ")


def demonstrate(
    task: Task, retriever: Retriever, rules: Rules, rng: np.random.Generator, *, strength: float = 1.0
) -> list[Message]:
    """Play one whole episode, a search a turn, and return its conversation. Not inside a trio task.

    strength: the probability of playing with care.
    """
    queries = good_queries(task) if rng.random() < strength else careless_queries(task)
    return trio.run(_play, task, SearchEnv(retriever, rules), queries)


async def _play(task: Task, env: SearchEnv, queries: Sequence[str]) -> list[Message]:
    await env.reset(task)
    told = False
    for query in queries:
        call = ToolCall("search", json.dumps({"query_list": [query]}, ensure_ascii=False))
        result = await env.step(Message("assistant", tool_calls=(call,)))
        told = any(task.target[0] in reply.content for reply in result.messages)
    await env.step(Message("assistant", f"Answer: {task.target[0]}" if told else UNKNOWN))
    return list(env.messages)
