"""One episode graded by a rubric on its own, without comparing it with others.

Knows episodes and rubrics; must not know files. The reward is score + format_coef * (format - 1). A grader that
fails is an error of the environment, so the episode is not trained.
"""

from collections.abc import Callable, Sequence
from functools import partial

from envs.preference.comparison import Conversation, visible
from envs.preference.episode import PreferenceEnv
from envs.preference.group import any_format
from envs.preference.rubric import Grader, Rubric, check_rubric, grade, label, total
from jaxrl.env import MessageEnv, MessageStepResult
from jaxrl.types import ENDINGS, Conclusion, Message, StopReason, Task


class RubricEnv(MessageEnv):
    """One episode on a task whose target is a rubric. Turns are those of PreferenceEnv; the last one is graded.

    Metrics: rubric_score, format, answer_characters, and rubric/<name or number> for each criterion.
    """

    def __init__(
        self,
        grader: Grader,
        *,
        format_coef: float = 0.1,
        check_format: Callable[[str], bool] = any_format,
    ) -> None:
        self._grader, self._format_coef, self._check_format = grader, format_coef, check_format
        self._turns = PreferenceEnv()
        self._rubric: Rubric = ()
        self._prompt: Conversation = ()

    async def reset(self, task: Task) -> Sequence[Message]:
        """Show the opening. Raises ValueError when the task's rubric cannot be graded."""
        self._rubric = tuple(task.target)
        check_rubric(self._rubric, self._grader)
        self._prompt = tuple(await self._turns.reset(task))
        return self._prompt

    async def step(self, message: Message) -> MessageStepResult:
        """Go on, or grade the whole."""
        result = await self._turns.step(message)
        if not result.terminated:
            return result
        completion = visible(self.messages[len(self._prompt) :])
        scores = await grade(self._rubric, self._prompt, completion, self._grader)
        score, formed = total(self._rubric, scores), float(bool(self._check_format(message.content)))
        parts = {f"rubric/{label(self._rubric, i)}": value for i, value in enumerate(scores)}
        return MessageStepResult(
            terminated=True,
            reward=score + self._format_coef * (formed - 1.0),
            metrics={**result.metrics, "rubric_score": score, "format": formed, **parts},
        )

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """An answer cut by a budget scores nothing and has no form; else rambling on would beat a wrong form."""
        if not ENDINGS[reason].overlong:
            return None
        return Conclusion(-self._format_coef, {"rubric_score": 0.0, "format": 0.0})

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return self._turns.messages


def graded_by(
    grader: Grader, *, format_coef: float = 0.1, check_format: Callable[[str], bool] = any_format
) -> "partial[RubricEnv]":
    """An env factory for tasks whose target is a rubric, such as those of `read_rubrics`."""
    return partial(_make, grader, format_coef, check_format)


def _make(grader: Grader, format_coef: float, check_format: Callable[[str], bool], task: Task) -> RubricEnv:
    return RubricEnv(grader, format_coef=format_coef, check_format=check_format)
