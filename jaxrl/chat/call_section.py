"""Sampled turns of the shape: a thought, text, and a section of calls, each a head and its arguments.

Knows pieces, and the order in which markers may stand (DeepSeek's and Kimi's families share it). Must not know how a
family spells its markers, what the head of a call says, or how arguments are written.

    THINK thought THINK_END text SECTION (CALL head ARGUMENTS arguments CALL_END)* SECTION_END text
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrl.chat.renderer import Marker, Piece, spell
from jaxrl.chat.tool_calls import assistant_message
from jaxrl.types import MalformedToolCall, Message, ToolCall


@dataclass(frozen=True)
class Frame:
    """The markers of a family. think, think_end: None in a family without thoughts."""

    section: Marker
    call: Marker
    arguments: Marker
    call_end: Marker
    section_end: Marker
    think: Marker | None = None
    think_end: Marker | None = None


class Place(enum.Enum):
    """Where in a turn a stretch of text stands."""

    START = "start"  # nothing but white space so far
    TEXT = "text"
    THOUGHT = "thought"
    SECTION = "section"  # among the calls, in none of them
    HEAD = "head"
    ARGUMENTS = "arguments"


@dataclass(frozen=True)
class Turn:
    """A turn whose markers stand in order.

    thinking: the thought as it was written, None where there is none. text: before the first call. results: calls.
    later: texts after the first section, and what an unfinished call holds. finished: every block is closed.
    """

    thinking: str | None
    text: str
    results: tuple[ToolCall | MalformedToolCall, ...]
    later: tuple[str, ...]
    finished: bool

    def message(self, thinking: str | None, text: str) -> Message:
        """As a message, with the thought and the text as the family trims them."""
        rest = [later.strip() for later in self.later if later.strip()]
        return assistant_message("\n".join([text, *rest] if text else rest), self.results, thinking)


def read_turn(
    pieces: Sequence[Piece],
    frame: Frame,
    read_call: Callable[[str, str, str], ToolCall | MalformedToolCall],
    *,
    in_thought: bool = False,
) -> Turn | None:
    """The turn, or None when a marker stands where it must not.

    read_call: makes a call of a head, arguments and the whole block. in_thought: the prompt opened a thought.
    """
    spans = _spans(pieces, frame, Place.THOUGHT if in_thought else Place.START)
    if spans is None:
        return None
    thoughts = [text for place, text in spans if place is Place.THOUGHT]
    first = next((i for i, (place, _) in enumerate(spans) if place is Place.SECTION), len(spans))
    finished = spans[-1][0] in (Place.START, Place.TEXT)
    results, unfinished = _results(spans[first:], frame, read_call)
    return Turn(
        thoughts[0] if thoughts else None,
        "".join(text for place, text in spans[:first] if place in (Place.START, Place.TEXT)),
        tuple(results),
        (*(text for place, text in spans[first:] if place is Place.TEXT), unfinished),
        finished,
    )


def malformed_block(frame: Frame, text: str) -> list[Piece]:
    """A call that could not be read, as it was."""
    head, separator, arguments = text.partition(frame.arguments.spelling)
    return [frame.call, head, *([frame.arguments, arguments] if separator else []), frame.call_end]


def _steps(frame: Frame) -> dict[tuple[Place, Marker | None], Place]:
    return {
        (Place.START, frame.think): Place.THOUGHT,
        (Place.THOUGHT, frame.think_end): Place.TEXT,
        (Place.START, frame.section): Place.SECTION,
        (Place.TEXT, frame.section): Place.SECTION,
        (Place.SECTION, frame.call): Place.HEAD,
        (Place.HEAD, frame.arguments): Place.ARGUMENTS,
        (Place.HEAD, frame.call_end): Place.SECTION,
        (Place.ARGUMENTS, frame.call_end): Place.SECTION,
        (Place.SECTION, frame.section_end): Place.TEXT,
    }


def _spans(pieces: Sequence[Piece], frame: Frame, place: Place) -> list[tuple[Place, str]] | None:
    """The stretches between markers, or None for a marker in a wrong place. White space before a thought is dropped."""
    steps = _steps(frame)
    spans: list[tuple[Place, str]] = []
    run: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            run.append(piece)
            place = Place.TEXT if place is Place.START and piece.strip() else place
            continue
        if (following := steps.get((place, piece))) is None:
            return None
        if following is not Place.THOUGHT:
            spans.append((place, "".join(run)))
        place, run = following, []
    return [*spans, (place, "".join(run))]


def _results(
    spans: Sequence[tuple[Place, str]], frame: Frame, read_call: Callable[[str, str, str], ToolCall | MalformedToolCall]
) -> tuple[list[ToolCall | MalformedToolCall], str]:
    """The calls of a turn, and the text of one that never ends."""
    results: list[ToolCall | MalformedToolCall] = []
    head: str | None = None
    for i, (place, text) in enumerate(spans):
        last = i == len(spans) - 1
        if place is Place.SECTION and text.strip():
            results.append(_stray(frame, text))
        elif place is Place.HEAD and last:
            return results, frame.call.spelling + text
        elif place is Place.HEAD and spans[i + 1][0] is Place.ARGUMENTS:
            head = text
        elif place is Place.HEAD:
            results.append(_without_arguments(frame, text))
        elif place is Place.ARGUMENTS:
            block = spell([head or "", frame.arguments, text])
            if last:
                return results, frame.call.spelling + block
            results.append(read_call(head or "", text, block))
    return results, ""


def _stray(frame: Frame, text: str) -> MalformedToolCall:
    wanted = f"Write every call between {frame.call.spelling} and {frame.call_end.spelling}."
    return MalformedToolCall(text.strip(), f"Tool call not read: there is text outside a call. {wanted}")


def _without_arguments(frame: Frame, text: str) -> MalformedToolCall:
    wanted = f"Write {frame.arguments.spelling} between a call's name and its arguments."
    return MalformedToolCall(text, f"Tool call not read: it has no arguments. {wanted}")
