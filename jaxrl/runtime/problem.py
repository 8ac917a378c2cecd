"""Single-turn question and answer: a problem, its one-turn env, the group of attempts at it.

Knows messages and what a problem can check. Must not know tokens, nor any subject: an environment brings problems,
which are plain values with two checks, so it need not import this file.

The reward is answer + format_coef * (format - 1). Checks read the content of the response and nothing else: what the
question, an example or the system prompt spells can never be credited. A check that raises is an error of the
environment, not a wrong answer.
"""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from jaxrl.chat.renderer import Renderer
from jaxrl.env import Env, EnvGroupBuilder, MessageEnv, MessageStepResult
from jaxrl.runtime.message_env import MessageEnvGroupBuilder, TurnRules
from jaxrl.settings import at_least
from jaxrl.types import ENDINGS, Conclusion, Message, StopReason, Task

Score = bool | float
"""What a check says: yes or no, or a finite number for partial credit."""


class Problem(Protocol):
    """A question and how a response to it is judged. Immutable, picklable. Checks may be `async`."""

    @property
    def question(self) -> str:
        """What the user asks."""
        ...

    @property
    def reference_answer(self) -> str:
        """A right answer, for people who read records."""
        ...

    def check_answer(self, text: str, /) -> Score | Awaitable[Score]:
        """Whether the response is right."""
        ...

    def check_format(self, text: str, /) -> Score | Awaitable[Score]:
        """Whether the response has the form that was asked for."""
        ...


def any_format(text: str) -> bool:
    """The check of a problem that asks for no form."""
    return True


@dataclass(frozen=True)
class FunctionProblem:
    """A problem from functions of any kind: plain, async, partial, callable objects.

    A lambda works too, as long as nothing has to pickle the problem.
    """

    question: str
    check_answer: Callable[[str], Score | Awaitable[Score]]
    reference_answer: str = ""
    check_format: Callable[[str], Score | Awaitable[Score]] = any_format


@dataclass(frozen=True)
class BoxedProblem:
    r"""A problem whose answer must stand, as it is written here, in the response's only \boxed{...}."""

    question: str
    reference_answer: str

    def check_answer(self, text: str) -> bool:
        """Equal up to white space around it. Numbers outside the box count for nothing."""
        found = read_boxed(text)
        return found is not None and found.strip() == self.reference_answer.strip()

    def check_format(self, text: str) -> bool:
        """Exactly one box."""
        return read_boxed(text) is not None


_BOX = re.compile(r"\\boxed\s*\{")


def read_boxed(text: str) -> str | None:
    r"""What the only \boxed{...} of `text` holds; None without a box, with several, or with one that never closes.

    Several are refused even if one is right: a list of guesses is no answer.
    """
    boxes = list(_BOX.finditer(text))
    if len(boxes) != 1:
        return None
    start, depth = boxes[0].end(), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


class ProblemEnv(MessageEnv):
    """One attempt at a problem: the opening is system, few-shot messages and the question; the first response ends it.

    The question asked is the prompt of the task, which members of a group share, so it is read from the problem once
    a group and not once an episode. Metrics: `format`, `correct`.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        system: str | None = None,
        few_shot: Sequence[Message] = (),
        format_coef: float = 0.1,
    ) -> None:
        self.problem = problem
        self._prefix = (*([] if system is None else [Message("system", system)]), *few_shot)
        self._format_coef = format_coef
        self._messages: tuple[Message, ...] = ()

    async def reset(self, task: Task) -> Sequence[Message]:
        """Ask the task's prompt."""
        if self._messages:
            raise RuntimeError("this ProblemEnv was already reset; an env is one episode, so make a new one")
        self._messages = (*self._prefix, Message("user", task.prompt))
        return self._messages

    async def step(self, message: Message) -> MessageStepResult:
        """Grade the response."""
        self._messages = (*self._messages, message)
        formed = await _ask("check_format", self.problem.check_format, message.content)
        correct = await _ask("check_answer", self.problem.check_answer, message.content)
        reward = correct + self._format_coef * (formed - 1.0)
        return MessageStepResult(terminated=True, reward=reward, metrics={"format": formed, "correct": correct})

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """A response cut by a budget is badly formed and not right; else rambling on would beat a wrong form."""
        if not ENDINGS[reason].overlong:
            return None
        return Conclusion(-self._format_coef, {"format": 0.0, "correct": 0.0})

    @property
    def messages(self) -> Sequence[Message]:
        """The opening, and the response once there is one."""
        return self._messages


async def _ask(name: str, check: Callable[[str], Score | Awaitable[Score]], text: str) -> float:
    """What a check says of the response, as a number. Anything but a yes, a no or a finite number is an error."""
    said = check(text)
    score = await said if inspect.isawaitable(said) else said
    if not isinstance(score, bool | int | float | np.bool_ | np.integer | np.floating):
        raise TypeError(f"{name} returned {score!r}; expected True, False or a number (did it forget to return?)")
    if not math.isfinite(score):
        raise ValueError(f"{name} returned {score}; expected a finite number. Raise an error to give no reward")
    return float(score)


# --- groups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """`group_size` attempts at one problem. The question is read here, once, and is the same for every attempt.

    system, few_shot: what stands before the question. rules: for malformed turns; by default a response of broken
    structure earns what a wrong form does.
    """

    problem: Problem
    renderer: Renderer
    group_size: int
    system: str | None = None
    few_shot: tuple[Message, ...] = ()
    format_coef: float = 0.1
    rules: TurnRules | None = None
    tags: tuple[str, ...] = ()
    task: Task = field(init=False)

    def __post_init__(self) -> None:
        at_least("group_size", self.group_size, 1)
        _check_few_shot(self.few_shot)
        task = Task(self.problem.question, target=self.problem.reference_answer)
        object.__setattr__(self, "task", task)  # frozen

    async def make_envs(self) -> Sequence[Env]:
        """One env per attempt."""
        return await self._group().make_envs()

    async def remake(self, member: int) -> Env | None:
        """A fresh env for a retry of one attempt."""
        return await self._group().remake(member)

    def logging_tags(self) -> Sequence[str]:
        """The dataset's tags."""
        return self.tags

    def describe(self) -> str:
        """The question."""
        return self.task.prompt

    def _group(self) -> MessageEnvGroupBuilder:
        form = {"system": self.system, "few_shot": self.few_shot, "format_coef": self.format_coef}
        return MessageEnvGroupBuilder(
            self.task,
            partial(_make_env, self.problem, form),
            self.renderer,
            self.group_size,
            rules=self.rules or TurnRules(failed_parse_reward=-self.format_coef),
        )


def _make_env(problem: Problem, form: dict, task: Task) -> ProblemEnv:
    return ProblemEnv(problem, **form)


def _check_few_shot(messages: Sequence[Message]) -> None:
    if messages and messages[-1].role == "user":
        raise ValueError(
            "few_shot ends with a message of the user, so the question would come second in a row; end it with the "
            "assistant's answer"
        )
