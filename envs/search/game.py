"""The search game: a question whose answer lies in a corpus that only a tool can read.

Knows the tool, the end of an episode and the reward. It must not know tokens, how questions are made, nor how
passages are found. The episode ends with the first message that makes no call, which is graded; or when malformed
calls exceed their cap. What the model itself writes of "results" beside a call counts for nothing.

Reward: correct + format_coef * (format - 1). format: the last message ends with one "Answer: ..." line, and there is
no other. correct: that answer equals an accepted one in normal form (see answers.py). An episode that is cut by a
budget, or ended by malformed calls, gets -format_coef, so cutting oneself short is never better than a wrong answer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from envs.search.answers import is_right, read_answer
from envs.search.retriever import Hit, Retriever, check_k
from jaxrl.env import MessageEnv, MessageStepResult
from jaxrl.tools import CallReport, ToolError, ToolResult, report_calls, tool, tool_table, tool_to_spec
from jaxrl.types import ENDINGS, Conclusion, Message, StopReason, Task, ToolSpec

INSTRUCTIONS = (
    "Find the answer with the search tool; never guess. Search again when the passages do not tell. "
    "End with one line, like\nAnswer: Paris"
)
NOTHING = "No passages found."
MAX_QUERIES = 8
"""Queries one call may make."""
MAX_QUERY_LENGTH = 1000
"""Characters of a query."""


@dataclass(frozen=True)
class Rules:
    """k: passages a query finds. passage_length: characters of one that are shown, its title included; None is all.

    max_searches: calls of an episode that search; one more is refused with a message. max_malformed: malformed calls
    that are answered with their error; one more ends the episode. show_tools: whether the instructions and the tool
    are shown; a model that knows the form from demonstrations can do without.
    """

    k: int = 3
    passage_length: int | None = 500
    max_searches: int = 4
    max_malformed: int = 3
    format_coef: float = 0.1
    show_tools: bool = True

    def __post_init__(self) -> None:
        check_k(self.k)
        for name, least in (("passage_length", 1), ("max_searches", 1), ("max_malformed", 0), ("format_coef", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name}={value}: expected at least {least}")


class Search:
    """The tool of one episode, and what it has shown."""

    def __init__(self, retriever: Retriever, rules: Rules) -> None:
        self._retriever, self._rules = retriever, rules
        self.count = 0
        self.shown: set[str] = set()

    async def search(self, query_list: list[str]) -> ToolResult:
        """Search the corpus. Each query finds passages of its own.

        Args:
            query_list: what to look for, such as ["capital of Chad"]
        """
        check_queries(query_list)
        if self.count >= self._rules.max_searches:
            raise ToolError(
                f"this was search {self.count + 1}, and only {self._rules.max_searches} are allowed; answer with what "
                "you have found"
            )
        self.count += 1
        found = await self._retriever.search(query_list, self._rules.k)
        self.shown.update(hit.passage.id for hits in found for hit in hits)
        empty = sum(not hits for hits in found)
        return ToolResult(self._written(query_list, found), metrics={"queries": len(found), "empty_results": empty})

    def _written(self, queries: Sequence[str], found: Sequence[Sequence[Hit]]) -> str:
        parts = [self._listed(hits) for hits in found]
        if len(parts) == 1:
            return parts[0]
        return "\n\n".join(
            f"Results for {json.dumps(q, ensure_ascii=False)}:\n{p}" for q, p in zip(queries, parts, strict=True)
        )

    def _listed(self, hits: Sequence[Hit]) -> str:
        lines = (f"{rank}. {self._shown(hit)}" for rank, hit in enumerate(hits, 1))
        return "\n".join(lines) or NOTHING

    def _shown(self, hit: Hit) -> str:
        title, text, most = hit.passage.title, " ".join(hit.passage.text.split()), self._rules.passage_length
        line = f"{title}: {text}" if title else text
        return line if most is None or len(line) <= most else line[:most].rstrip() + "..."


def check_queries(queries: Sequence[str]) -> None:
    """Raise ToolError, for the model, unless there are some queries and each can be searched for."""
    if not 1 <= len(queries) <= MAX_QUERIES:
        raise ToolError(f"query_list has {len(queries)} queries; give 1 to {MAX_QUERIES}")
    for number, query in enumerate(queries, 1):
        if not query.strip():
            raise ToolError(f"query {number} is empty; say what to look for")
        if len(query) > MAX_QUERY_LENGTH:
            raise ToolError(
                f"query {number} has {len(query)} characters, and at most {MAX_QUERY_LENGTH} are allowed; ask for "
                "a few words that the passage must have"
            )


class SearchEnv(MessageEnv):
    """One episode. Task: `target` is the accepted answers; metadata "evidence", if any, the ids of needed passages."""

    def __init__(self, retriever: Retriever, rules: Rules = Rules()) -> None:
        self._rules = rules
        self._search = Search(retriever, rules)
        self._tools = tool_table([tool(self._search.search)])
        self._task: Task | None = None
        self._messages: list[Message] = []
        self._malformed = 0
        self._done = False

    @property
    def tool_specs(self) -> Sequence[ToolSpec]:
        return [tool_to_spec(each) for each in self._tools.values()] if self._rules.show_tools else ()

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    async def reset(self, task: Task) -> Sequence[Message]:
        """Ask the task's question. Raises ValueError for a target that no answer could equal."""
        if self._task is not None:
            raise RuntimeError("this SearchEnv was already reset; an env is one episode, so make a new one")
        if isinstance(task.target, str) or not any(is_right(each, [each]) for each in task.target):
            raise ValueError(f"target is {task.target!r}; expected a list of the accepted answers, such as ['Paris']")
        self._task = task
        opening = [Message("system", INSTRUCTIONS)] if self._rules.show_tools else []
        self._messages = [*opening, Message("user", task.prompt)]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """Run the calls, or grade the answer."""
        if self._task is None or self._done:
            raise RuntimeError("no episode is running; call reset once, and step only until it ends")
        self._messages.append(message)
        if not message.tool_calls and not message.malformed_calls:
            return self._finish(self._task, read_answer(message.content))
        return self._continue(self._task, await report_calls(self._tools, message))

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """An episode cut by a budget is badly formed and not right."""
        if not ENDINGS[reason].overlong or self._task is None:
            return None
        return Conclusion(-self._rules.format_coef, self._metrics(self._task, formed=False, correct=False))

    def _continue(self, task: Task, report: CallReport) -> MessageStepResult:
        self._messages.extend(report.messages)
        self._malformed += int(report.metrics["malformed_calls"])
        if self._malformed <= self._rules.max_malformed:
            return MessageStepResult(messages=report.messages, metrics=report.metrics)
        self._done = True
        metrics = {**report.metrics, **self._metrics(task, formed=False, correct=False)}
        return MessageStepResult(
            terminated=True, messages=report.messages, reward=-self._rules.format_coef, metrics=metrics
        )

    def _finish(self, task: Task, answer: str | None) -> MessageStepResult:
        self._done = True
        formed = answer is not None
        correct = formed and is_right(answer, task.target)
        reward = correct + self._rules.format_coef * (formed - 1.0)
        return MessageStepResult(
            terminated=True, reward=reward, metrics=self._metrics(task, formed=formed, correct=correct)
        )

    def _metrics(self, task: Task, *, formed: bool, correct: bool) -> dict[str, float]:
        """correct, format; searches made; evidence: the share of the passages the question needs that were shown."""
        measured = {"format": float(formed), "correct": float(correct), "searches": float(self._search.count)}
        needed = set(task.metadata.get("evidence", ()))
        if needed:
            measured["evidence"] = len(needed & self._search.shown) / len(needed)
        if "hops" in task.metadata:
            measured[f"hops_{task.metadata['hops']}/correct"] = float(correct)
        return measured


def make_env(task: Task, *, retriever: Retriever, rules: Rules = Rules()) -> SearchEnv:
    """An env factory: a fresh env; the task arrives with `reset`. Options: `functools.partial(make_env, ...)`."""
    return SearchEnv(retriever, rules)
