"""Rubrics: weighted criteria that an answer is graded by, each by a model or by a function.

Knows conversations and what a grader says; must not know episodes or files.

A score is normalised to 0 ... 1 of its criterion's scale, and a rubric's is the weighted sum over the sum of the
positive weights. A criterion of negative weight takes off what it scores; so a rubric's score is at most 1, and can be
below 0 only with such criteria. A score that could not be had is an error, never a 0.
"""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from envs.preference.asking import GRADE, GRADE_FIELDS, check_template, fence, read_score
from envs.preference.comparison import Conversation, JudgeFault, spoken
from envs.preference.judges import MakeModel, asked
from envs.preference.judging import Judging, ask
from envs.preference.limit import Limit

PATTERN = r"<score>(.*?)</score>"
"""Where the score stands in a grader's reply."""


@dataclass(frozen=True)
class Criterion:
    """A criterion that a model grades, on a scale from `low` to `high`.

    pattern: a regular expression whose first group is the score in the grader's reply; its last match counts.
    instruction: how the score is to be written; "" stands for one that fits scale and pattern's default.
    """

    text: str
    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0
    name: str = ""
    pattern: str = PATTERN
    instruction: str = ""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("text is blank: a criterion says what it asks for")
        _check_scale(self.weight, self.low, self.high)
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression: {error}") from error
        if not groups:
            raise ValueError(f"pattern={self.pattern!r} has no group: put ( ) around the score")
        if self.pattern != PATTERN and not self.instruction:
            raise ValueError(
                f"pattern={self.pattern!r} without an instruction: say how the grader is to write its score"
            )

    @property
    def asked_for(self) -> str:
        """The last words of the question."""
        return (
            self.instruction or f"End with the score, a number from {self.low:g} to {self.high:g}: <score>...</score>"
        )


@dataclass(frozen=True)
class Measure:
    """A criterion that a function grades, plain or async: of the prompt and what followed it, on the scale given."""

    function: Callable[[Conversation, Conversation], float | Awaitable[float]]
    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        _check_scale(self.weight, self.low, self.high)


Rubric = tuple[Criterion | Measure, ...]


@dataclass(frozen=True)
class Grader:
    """Who grades what no function does. None for rubrics of functions only.

    template: with {answer} and {criterion}, and where wanted {prompt}, {instruction} and {fence}.
    """

    make_model: MakeModel | None = None
    template: str = GRADE
    system: str | None = None
    judging: Judging = field(default_factory=lambda: Judging(limit=Limit("grader", 16)))

    def __post_init__(self) -> None:
        check_template(self.template, GRADE_FIELDS)


def check_rubric(rubric: Sequence[Criterion | Measure], grader: Grader) -> None:
    """Raise ValueError for a rubric without a positive weight, and for criteria that nobody is there to grade."""
    if not any(criterion.weight > 0 for criterion in rubric):
        raise ValueError(f"a rubric of {len(rubric)} criteria has none with a positive weight: nothing would be good")
    if grader.make_model is None and any(isinstance(criterion, Criterion) for criterion in rubric):
        raise ValueError("the rubric has criteria for a model to grade, and the grader has none: give it make_model")


async def grade(
    rubric: Sequence[Criterion | Measure], prompt: Conversation, completion: Conversation, grader: Grader
) -> tuple[float, ...]:
    """The normalised score of each criterion, all asked for at once.

    Raises JudgeFault when one cannot be had after the retries of `grader.judging`; the others are then called off.
    """
    scores: list[float] = [math.nan] * len(rubric)
    faults: list[JudgeFault] = []

    async def one(index: int, criterion: Criterion | Measure) -> None:
        try:
            said = await ask(lambda: _score(criterion, prompt, completion, grader), grader.judging)
        except JudgeFault as fault:
            faults.append(JudgeFault(f"criterion {label(rubric, index)}: {fault}"))
            nursery.cancel_scope.cancel()
            return
        scores[index] = (said - criterion.low) / (criterion.high - criterion.low)

    async with trio.open_nursery() as nursery:
        for index, criterion in enumerate(rubric):
            nursery.start_soon(one, index, criterion)
    if faults:
        raise faults[0]
    return tuple(scores)


def total(rubric: Sequence[Criterion | Measure], scores: Sequence[float]) -> float:
    """The rubric's score: the weighted sum over the sum of the positive weights."""
    whole = sum(max(criterion.weight, 0.0) for criterion in rubric)
    return sum(criterion.weight * score for criterion, score in zip(rubric, scores, strict=True)) / whole


def label(rubric: Sequence[Criterion | Measure], index: int) -> str:
    """The name of a criterion, else its number from 1."""
    return rubric[index].name or str(index + 1)


async def _score(
    criterion: Criterion | Measure, prompt: Conversation, completion: Conversation, grader: Grader
) -> float:
    """On the criterion's own scale. Raises JudgeFault outside of it."""
    if isinstance(criterion, Measure):
        return await _measured(criterion, prompt, completion)
    assert grader.make_model is not None, "check_rubric was passed"
    texts = {"prompt": spoken(prompt), "answer": spoken(completion), "criterion": criterion.text}
    question = grader.template.format(fence=fence(*texts.values()), instruction=criterion.asked_for, **texts)
    said = await asked(grader.make_model, question, grader.system)
    return read_score(said, criterion.pattern, criterion.low, criterion.high)


async def _measured(measure: Measure, prompt: Conversation, completion: Conversation) -> float:
    said = measure.function(prompt, completion)
    score = float(await said if inspect.isawaitable(said) else said)
    if not measure.low <= score <= measure.high:
        raise ValueError(
            f"the function of measure {measure.name!r} returned {score}: expected {measure.low:g} to {measure.high:g}"
        )
    await trio.lowlevel.checkpoint()
    return score


def _check_scale(weight: float, low: float, high: float) -> None:
    if not (math.isfinite(weight) and weight):
        raise ValueError(f"weight={weight}: expected a number other than 0")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low={low}, high={high}: expected a scale, low < high")
