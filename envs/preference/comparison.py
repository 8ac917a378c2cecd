"""Two answers to one prompt, which of them is better, and who says so.

Knows messages. It must not know groups, rewards, nor any particular judge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jaxrl.env import EnvironmentFault
from jaxrl.types import Message

Conversation = tuple[Message, ...]
"""A prompt, or what followed it."""


class JudgeFault(EnvironmentFault):
    """Whoever compares or grades gave no verdict. It says nothing about the answers, so it is never a reward."""


@dataclass(frozen=True)
class Preference:
    """How much of the win goes to the answer shown first: 1 all of it, 0.5 a tie, 0 none of it.

    In between it is the probability that the first is better. Raises ValueError for anything else.
    """

    first: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.first <= 1.0:
            raise ValueError(f"first={self.first}: expected a share of the win, 0 <= first <= 1")

    def swapped(self) -> "Preference":
        """The same verdict on the answers in the other order."""
        return Preference(1.0 - self.first)


FIRST, TIE, SECOND = Preference(1.0), Preference(0.5), Preference(0.0)


@dataclass(frozen=True)
class Comparison:
    """What a judge is shown.

    prompt: the conversation that both episodes began with. first, second: what followed in each, from the first
    response on; one message in single-turn episodes.
    """

    prompt: Conversation
    first: Conversation
    second: Conversation

    def swapped(self) -> "Comparison":
        """The answers in the other order."""
        return Comparison(self.prompt, self.second, self.first)


class Judge(Protocol):
    """Says which of two answers is better. Picklable. Raises JudgeFault (or another EnvironmentFault) for no verdict.

    Any other error is taken for a mistake in the judge: it is not tried again, and fails the whole grading.
    """

    async def __call__(self, comparison: Comparison, /) -> Preference:
        """The preference between the two."""
        ...


def visible(messages: Sequence[Message]) -> Conversation:
    """The messages without what was thought: a judge is shown what was said."""
    return tuple(replace(message, thinking=None) for message in messages)


def answer(completion: Sequence[Message]) -> str:
    """The text of the last response; "" when there is none."""
    return next((m.content for m in reversed(completion) if m.role == "assistant"), "")


def spoken(conversation: Sequence[Message]) -> str:
    """A conversation as text for a judge to read. A single message is its content alone."""
    if len(conversation) == 1 and not conversation[0].calls:
        return conversation[0].content
    return "\n\n".join(f"[{_speaker(m)}]\n{_said(m)}" for m in conversation)


def _speaker(message: Message) -> str:
    return f"tool {message.name}" if message.role == "tool" and message.name else message.role


def _said(message: Message) -> str:
    calls = [f"(calls {call.name} with {call.arguments})" for call in message.tool_calls]
    unread = [f"(a call that could not be read: {call.text})" for call in message.malformed_calls]
    return "\n".join(part for part in (message.content, *calls, *unread) if part)
