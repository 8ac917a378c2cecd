"""Judges: a function, a model that is asked in words, a reward model that scores each answer on its own.

Knows comparisons; must not know groups. All of them can be pickled if what they are made of can.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, get_args

import trio

from envs.preference.asking import COMPARE, COMPARE_FIELDS, check_template, comparing, read_verdict
from envs.preference.comparison import Comparison, Conversation, Judge, JudgeFault, Preference
from envs.preference.limit import Limit
from jaxrl.types import Message


@dataclass(frozen=True)
class FunctionJudge:
    """A function of the comparison, plain or async."""

    function: Callable[[Comparison], Preference | Awaitable[Preference]]

    async def __call__(self, comparison: Comparison, /) -> Preference:
        """What the function says."""
        said = self.function(comparison)
        if inspect.isawaitable(said):
            return await said
        await trio.lowlevel.checkpoint()
        return said


@dataclass(frozen=True)
class BothOrders:
    """The mean of what a judge says of the two orders, so that the place of an answer cannot matter.

    For comparisons that are made once, such as all_pairs_one_way. Asks for one order after the other.
    """

    judge: Judge

    async def __call__(self, comparison: Comparison, /) -> Preference:
        """A verdict of the one order and the swapped verdict of the other. Fails when either does."""
        one = await self.judge(comparison)
        other = (await self.judge(comparison.swapped())).swapped()
        return Preference((one.first + other.first) / 2)


# --- a model that is asked -----------------------------------------------------------------------


class Model(Protocol):
    """Anyone who answers a conversation, such as those of `jaxrl.runtime.opponents`."""

    async def reply(self, messages: Sequence[Message]) -> Message:
        """The assistant message that follows."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...


_CLOSE_SECONDS = 30.0

MakeModel = Callable[[], Model]
"""Makes the model that is asked one question, which is then closed."""


@dataclass(frozen=True)
class ModelJudge:
    """A model is shown both answers and asked which is better: hosted, or a frozen policy of this run.

    template: with {first} and {second}, and where wanted {prompt} and {fence}. system: a message before it. read: the
    preference in a reply; raises JudgeFault when there is none.
    """

    make_model: MakeModel
    template: str = COMPARE
    system: str | None = None
    read: Callable[[str], Preference] = read_verdict

    def __post_init__(self) -> None:
        check_template(self.template, COMPARE_FIELDS)

    async def __call__(self, comparison: Comparison, /) -> Preference:
        """One question, one reply."""
        return self.read(await asked(self.make_model, comparing(self.template, comparison), self.system))


async def asked(make_model: MakeModel, question: str, system: str | None = None) -> str:
    """What a model of its own says to one question."""
    opening = () if system is None else (Message("system", system),)
    model = make_model()
    try:
        return (await model.reply((*opening, Message("user", question)))).content
    finally:
        with trio.move_on_after(_CLOSE_SECONDS, shield=True):
            await model.close()


# --- a reward model ------------------------------------------------------------------------------

Score = Callable[[Conversation, Conversation], float]
"""(prompt, what followed it) -> how good that is, on any scale. Deterministic; may block, as it runs in a thread."""

Link = Literal["sign", "sigmoid"]

ONE_AT_A_TIME = Limit("reward model", 1)

_REMEMBERED = 4096


@dataclass(frozen=True)
class RewardModelJudge:
    """The preference that follows from two scores (Bradley & Terry 1952).

    link: "sigmoid" is the probability sigmoid((a - b) / temperature) that the first is better, "sign" the winner, with
    a tie for scores that differ by no more than `margin`. score: called in a worker thread, never in the thread of the
    episodes, so it may run on a device. limit: how many threads may be in it at once; the default is one. An answer is
    scored once, in however many comparisons it is; the last few thousand scores are remembered.
    """

    score: Score
    link: Link = "sigmoid"
    temperature: float = 1.0
    margin: float = 0.0
    limit: Limit = ONE_AT_A_TIME
    _known: dict[tuple[Conversation, Conversation], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.link not in get_args(Link):
            raise ValueError(f"link={self.link!r}: expected one of {', '.join(get_args(Link))}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: expected a positive number")
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin={self.margin}: expected 0 or more")
        if self.link == "sign" and self.temperature != 1.0:
            raise ValueError(
                f"temperature={self.temperature} has no effect with link=sign; set margin, or link=sigmoid"
            )
        if self.link == "sigmoid" and self.margin:
            raise ValueError(f"margin={self.margin} has no effect with link=sigmoid; set temperature, or link=sign")

    async def __call__(self, comparison: Comparison, /) -> Preference:
        """Score both, one after the other."""
        first = await self._scored(comparison.prompt, comparison.first)
        second = await self._scored(comparison.prompt, comparison.second)
        return self._linked(first - second)

    async def _scored(self, prompt: Conversation, completion: Conversation) -> float:
        key = (prompt, completion)
        async with self.limit.places():  # who waited here for the same answer finds it scored
            if key not in self._known:
                said = float(await trio.to_thread.run_sync(partial(self.score, prompt, completion)))
                if not math.isfinite(said):
                    raise JudgeFault(f"the reward model scored an answer {said}: expected a finite number")
                if len(self._known) >= _REMEMBERED:
                    del self._known[next(iter(self._known))]
                self._known[key] = said
            return self._known[key]

    def _linked(self, difference: float) -> Preference:
        if self.link == "sign":
            return Preference(0.5 if abs(difference) <= self.margin else float(difference > 0))
        return Preference(0.5 * (1.0 + math.tanh(0.5 * difference / self.temperature)))  # cannot overflow
