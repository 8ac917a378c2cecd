"""One episode's context as it grows: what was shown to the model and what it sampled, id for id.

Knows renderers and token ids. Must not know environments, engines or rewards. Pure: every verb returns a new
Transcript. The work of an observation is that of its new messages (plus copying ids); nothing is tokenized twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from jaxrl.chat.renderer import Renderer
from jaxrl.types import Message, ToolSpec

THINKING_STRIPPED = "thinking_stripped"
THINKING_COMPACTED = "thinking_compacted"


@dataclass(frozen=True)
class Segment:
    """A run of ids: shown to the model ("context") or sampled by it ("action")."""

    kind: Literal["context", "action"]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Transcript:
    """An episode's segments in order, contexts and actions alternating.

    tokens: all of them in one sequence, the whole context of the next turn (or the finished episode).
    settled: how many leading segments already lost their thoughts and need no second look.
    """

    renderer: Renderer
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]
    settled: int = 0


def begin(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Transcript:
    """The transcript before the first turn."""
    tokens = renderer.open(messages, tools)
    return Transcript(renderer, (Segment("context", tokens),), tokens)


def act(transcript: Transcript, action_tokens: Sequence[int]) -> Transcript:
    """Append a sampled turn, verbatim (stop token included when there is one)."""
    if transcript.segments[-1].kind == "action":
        raise ValueError("act() was called twice in a row: call observe() between two sampled turns.")
    return _append(transcript, Segment("action", tuple(action_tokens)))


def observe(transcript: Transcript, messages: Sequence[Message]) -> tuple[Transcript, str | None]:
    """Append the environment's messages and the next generation prompt.

    The second value says why earlier ids were rewritten, or is None when the new context extends the old context and
    action. It is always None with thinking="keep".
    """
    if transcript.segments[-1].kind == "context":
        raise ValueError("observe() was called without a sampled turn before it: call act() first.")
    renderer = transcript.renderer
    extension = Segment("context", renderer.extend(messages, after=transcript.segments[-1].tokens))
    forgotten, reason = _FORGET[renderer.thinking](transcript, messages)
    return _append(forgotten, extension), reason if forgotten.tokens != transcript.tokens else None


def _append(transcript: Transcript, segment: Segment) -> Transcript:
    return replace(transcript, segments=(*transcript.segments, segment), tokens=(*transcript.tokens, *segment.tokens))


def _keep(transcript: Transcript, messages: Sequence[Message]) -> tuple[Transcript, str]:
    return transcript, ""


def _strip(transcript: Transcript, messages: Sequence[Message]) -> tuple[Transcript, str]:
    """As the template does: all thoughts go before a query; else only an empty one of the last turn may."""
    family = transcript.renderer.family
    if any(family.is_query(m) for m in messages):
        return _forget(transcript, transcript.settled), THINKING_STRIPPED
    if family.thoughts is None or not family.thoughts.forgets_empty:
        return transcript, THINKING_STRIPPED
    cut = _forget(transcript, len(transcript.segments) - 2, only_empty=True)
    return replace(cut, settled=transcript.settled), THINKING_STRIPPED


def _compact(transcript: Transcript, messages: Sequence[Message]) -> tuple[Transcript, str]:
    """All thoughts go once `compact_turns` turns have been sampled since the last time."""
    turns = sum(segment.kind == "action" for segment in transcript.segments[transcript.settled :])
    due = turns >= (transcript.renderer.compact_turns or 1)
    return (_forget(transcript, transcript.settled) if due else transcript), THINKING_COMPACTED


_FORGET = {"keep": _keep, "strip": _strip, "compact": _compact}


def _forget(transcript: Transcript, start: int, *, only_empty: bool = False) -> Transcript:
    """Drop the finished thoughts from segment `start` on; one may begin in a prompt and end in the turn after it."""
    renderer, old = transcript.renderer, transcript.segments[start:]
    tokens = tuple(t for segment in old for t in segment.tokens)
    spans = renderer.forget(tokens, only_empty=only_empty)
    ends = tuple(accumulate(len(segment.tokens) for segment in old))
    new = [
        replace(segment, tokens=_outside(tokens, spans, renderer.left(), end - len(segment.tokens), end))
        for segment, end in zip(old, ends, strict=True)
    ]
    before = transcript.tokens[: len(transcript.tokens) - len(tokens)]
    segments = (*transcript.segments[:start], *new)
    whole = (*before, *(t for segment in new for t in segment.tokens))
    return replace(transcript, segments=segments, tokens=whole, settled=len(segments))


def _outside(
    tokens: tuple[int, ...], spans: Sequence[tuple[int, int]], left: tuple[int, ...], start: int, end: int
) -> tuple[int, ...]:
    """tokens[start:end] without the spans; `left` stands where a span starts."""
    kept: list[int] = []
    for first, last in spans:
        if first < end and last > start:
            kept += tokens[start:first]
            kept += left if first >= start else ()
            start = min(last, end)
    return (*kept, *tokens[start:end])
