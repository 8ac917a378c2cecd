"""The tool-use game: a question about facts the model must look up, and sometimes compute with.

Knows the tools, the end of an episode and the rewards. It must not know tokens, nor how questions are made.

Rewards, each given once, on the turn that earns it. Without the right answer they sum to at most 0.3, so they get
a small model started and are not worth farming:

    0.1   the first tool call that succeeds
    0.2   the lookups the question needs, in equal shares (looking up other keys earns nothing)
    0.7   the right final answer
    1.0   in all

The episode ends with the first message that makes no call (it is graded), or when malformed calls exceed the cap.
"""

import json
from collections.abc import Mapping, Sequence

from envs.tool_use.answers import read_answer
from envs.tool_use.calculator import calculate
from envs.tool_use.facts import Value, facts
from jaxrl.env import MessageEnv, MessageStepResult
from jaxrl.tools import CallReport, ToolError, report_calls, tool, tool_table, tool_to_spec
from jaxrl.types import Message, Task, ToolSpec

CALL_REWARD, LOOKUP_REWARD, ANSWER_REWARD = 0.1, 0.2, 0.7

INSTRUCTIONS = "Look facts up with the tools; never guess. End with one line, like\nAnswer: 42"


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses
    """
    return calculate(expression)


class FactTools:
    """The two tools that read one episode's facts, and the memory of which keys were read."""

    def __init__(self) -> None:
        self.facts: Mapping[str, Value] = {}
        self.seen: set[str] = set()

    def list_fact_keys(self) -> str:
        """List the keys of all facts."""
        return " ".join(self.facts)

    def lookup(self, key: str) -> str:
        """Get the value of a fact.

        Args:
            key: exact key
        """
        if key not in self.facts:
            raise ToolError(f"no fact has key {json.dumps(key[:40])}; list_fact_keys gives the keys")
        self.seen.add(key)
        return str(self.facts[key])


TOOLS = ("list_fact_keys", "lookup", "calculator")


class ToolUseEnv(MessageEnv):
    """One episode. `max_malformed` malformed calls are answered with their error; one more ends the episode.

    tools: the tools on offer. Level 1 needs lookup alone, and each one less makes every prompt shorter.
    """

    def __init__(self, max_malformed: int = 3, tools: Sequence[str] = TOOLS) -> None:
        unknown = [name for name in tools if name not in TOOLS]
        if unknown or not tools:
            raise ValueError(f"tools={tuple(tools)}: expected one or more of {', '.join(TOOLS)}")
        self._max_malformed = max_malformed
        self._facts = FactTools()
        every = [tool(self._facts.list_fact_keys), tool(self._facts.lookup), calculator]
        self._tools = tool_table([each for each in every if each.name in tools])
        self._task: Task | None = None
        self._messages: list[Message] = []
        self._counts = {"tool_calls": 0.0, "tool_errors": 0.0, "malformed_calls": 0.0}
        self._earned = 0.0
        self._done = False

    @property
    def tool_specs(self) -> Sequence[ToolSpec]:
        return [tool_to_spec(each) for each in self._tools.values()]

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    async def reset(self, task: Task) -> Sequence[Message]:
        if self._task is not None:
            raise RuntimeError("this ToolUseEnv was already reset; an env is one episode, so make a new one")
        self._task = task
        self._facts.facts = facts(task.metadata["split"])
        self._messages = [Message("system", INSTRUCTIONS), Message("user", task.prompt)]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        if self._task is None or self._done:
            raise RuntimeError("no episode is running; call reset once, and step only until it ends")
        self._messages.append(message)
        if not message.tool_calls and not message.malformed_calls:
            return self._finish(self._task, message)
        report = await report_calls(self._tools, message)
        return self._continue(self._task, report)

    def _continue(self, task: Task, report: CallReport) -> MessageStepResult:
        self._messages.extend(report.messages)
        for name in self._counts:
            self._counts[name] += report.metrics[name]
        reward = self._shaped_reward(task)
        if self._counts["malformed_calls"] > self._max_malformed:
            self._done = True
            metrics = {**report.metrics, **self._metrics(task, answered=False, correct=False)}
            return MessageStepResult(terminated=True, messages=report.messages, reward=reward, metrics=metrics)
        return MessageStepResult(messages=report.messages, reward=reward, metrics=report.metrics)

    def _finish(self, task: Task, message: Message) -> MessageStepResult:
        self._done = True
        answer = read_answer(message.content)
        correct = answer is not None and answer == task.target
        metrics = self._metrics(task, answered=answer is not None, correct=correct)
        return MessageStepResult(terminated=True, reward=ANSWER_REWARD * correct, metrics=metrics)

    def _shaped_reward(self, task: Task) -> float:
        """What the episode has earned by now, less what it was given before: so nothing counts twice."""
        succeeded = self._counts["tool_calls"] > self._counts["tool_errors"]
        earned = CALL_REWARD * succeeded + LOOKUP_REWARD * self._lookups(task)
        reward, self._earned = earned - self._earned, earned
        return reward

    def _lookups(self, task: Task) -> float:
        """The fraction of the needed keys that was looked up."""
        keys = set(task.metadata["keys"])
        return len(keys & self._facts.seen) / len(keys)

    def _metrics(self, task: Task, *, answered: bool, correct: bool) -> dict[str, float]:
        return {
            "answered": float(answered),
            "correct": float(correct),
            "lookups": self._lookups(task),
            f"level_{task.metadata['level']}/correct": float(correct),
        }


def make_env(task: Task, *, max_malformed: int = 3, tools: Sequence[str] = TOOLS) -> ToolUseEnv:
    """An env factory: a fresh env; the task arrives with `reset`. Options: `functools.partial(make_env, ...)`."""
    return ToolUseEnv(max_malformed, tools)
