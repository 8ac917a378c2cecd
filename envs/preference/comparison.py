"""Two answers to one prompt, which of them is better, and who says so.

Knows messages. It must not know groups, rewards, nor any particular judge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Protocol, get_args

from jaxrl.env import EnvironmentFault
from jaxrl.types import Message, Role

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


_HEADINGS = tuple(f"[{role}" for role in get_args(Role))


def spoken(conversation: Sequence[Message]) -> str:
    """A conversation as text for a judge to read: lines such as [user], and under each, indented, what was said.

    So nothing that was said can pass for another turn. A single message is its content alone, unless it tries to.
    """
    alone = conversation[0] if len(conversation) == 1 and not conversation[0].calls else None
    if alone and not any(line.lstrip().lower().startswith(_HEADINGS) for line in alone.content.splitlines()):
        return alone.content
    return "\n\n".join(f"[{who}]\n{indent(text, '    ')}" for m in conversation for who, text in _parts(m))


def _parts(message: Message) -> list[tuple[str, str]]:
    """Who speaks, or does what, and the text of it."""
    tool = f"{message.role} {message.name}" if message.role == "tool" and message.name else message.role
    calls = [(f"{message.role} calls {call.name}", call.arguments) for call in message.tool_calls]
    unread = [(f"{message.role} calls what could not be read", call.text) for call in message.malformed_calls]
    said = [(tool, message.content)] if message.content or not message.calls else []
    return [(" ".join(who.split()), text) for who, text in (*said, *calls, *unread)]
