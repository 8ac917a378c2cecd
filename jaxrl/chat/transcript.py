"""One episode's context as it grows: what was shown to the model and what it sampled, id for id.

Knows renderers and token ids. Must not know environments, engines or rewards. Pure: every verb returns a new
Transcript. The work of an observation is that of its new messages (plus copying ids); nothing is tokenized twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxrl.chat.renderer import Renderer
from jaxrl.types import Message, ToolSpec

THINKING_STRIPPED = "thinking_stripped"


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


def observe(
    transcript: Transcript, messages: Sequence[Message], *, closed: bool
) -> tuple[Transcript, Literal["thinking_stripped"] | None]:
    """Append the environment's messages and the next generation prompt.

    closed: the last action ended with a stop token. The second value says why earlier ids were rewritten, or is None
    when the new context extends the old context and action. It is always None with thinking="keep".
    """
    if transcript.segments[-1].kind == "context":
        raise ValueError("observe() was called without a sampled turn before it: call act() first.")
    renderer = transcript.renderer
    extension = Segment("context", renderer.extend(messages, closed=closed))
    if renderer.thinking == "keep":
        return _append(transcript, extension), None
    stripped = _strip(transcript, any(renderer.family.is_query(m) for m in messages))
    reason = THINKING_STRIPPED if stripped.tokens != transcript.tokens else None
    return _append(stripped, extension), reason


def _append(transcript: Transcript, segment: Segment) -> Transcript:
    return replace(transcript, segments=(*transcript.segments, segment), tokens=(*transcript.tokens, *segment.tokens))


def _strip(transcript: Transcript, query: bool) -> Transcript:
    """Drop thoughts as the template does: all of them before a query; else only an empty block of the last turn."""
    start = transcript.settled if query else len(transcript.segments) - 2
    old = transcript.segments[start:]
    new = tuple(replace(s, tokens=transcript.renderer.without_thoughts(s.tokens, only_empty=not query)) for s in old)
    kept = transcript.tokens[: len(transcript.tokens) - sum(len(s.tokens) for s in old)]
    segments = (*transcript.segments[:start], *new)
    tokens = (*kept, *(t for s in new for t in s.tokens))
    return replace(transcript, segments=segments, tokens=tokens, settled=len(segments) if query else transcript.settled)
