"""One episode's context as it grows: what was shown to the model and what it sampled, id for id.

Knows renderers and token ids. Must not know environments, engines or rewards. Pure: every verb returns a new
Transcript. The work of an observation is that of its new messages (plus copying ids); nothing is tokenized twice. But
where the renderer asks a template (template.py), each observation writes the whole conversation again, as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxrl.chat.renderer import Marker, Piece, Renderer
from jaxrl.types import Message, ToolSpec

THINKING_STRIPPED = "thinking_stripped"
THINKING_COMPACTED = "thinking_compacted"
TEMPLATE_REWROTE = "template_rewrote"


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
    messages, tools: what is written again where the renderer asks a template: the opening conversation, then each turn
    as it was parsed and what followed it. Other renderers need, and keep, the opening only.
    """

    renderer: Renderer
    segments: tuple[Segment, ...]
    tokens: tuple[int, ...]
    settled: int = 0
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()


def begin(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Transcript:
    """The transcript before the first turn."""
    tokens = renderer.open(messages, tools)
    return Transcript(renderer, (Segment("context", tokens),), tokens, messages=tuple(messages), tools=tuple(tools))


def act(transcript: Transcript, action_tokens: Sequence[int]) -> Transcript:
    """Append a sampled turn, verbatim (stop token included when there is one)."""
    if transcript.segments[-1].kind == "action":
        raise ValueError("act() was called twice in a row: call observe() between two sampled turns.")
    return _append(transcript, Segment("action", tuple(action_tokens)))


def observe(transcript: Transcript, messages: Sequence[Message]) -> tuple[Transcript, str | None]:
    """Append the environment's messages and the next generation prompt.

    The second value says why earlier ids were rewritten, or is None when the new context extends the old context and
    action. It is always None with thinking="keep", unless the renderer asks a template.
    """
    if transcript.segments[-1].kind == "context":
        raise ValueError("observe() was called without a sampled turn before it: call act() first.")
    return _GROW[transcript.renderer.history](transcript, messages)


def _append(transcript: Transcript, segment: Segment) -> Transcript:
    return replace(transcript, segments=(*transcript.segments, segment), tokens=(*transcript.tokens, *segment.tokens))


def _extend(transcript: Transcript, messages: Sequence[Message]) -> tuple[Transcript, str | None]:
    """Add what stands between two turns, after dropping the thoughts that are to go."""
    renderer = transcript.renderer
    extension = Segment("context", renderer.extend(messages, after=transcript.segments[-1].tokens))
    forgotten, reason = _FORGET[renderer.thinking](transcript, messages)
    return _append(forgotten, extension), reason if forgotten.tokens != transcript.tokens else None


def _render(transcript: Transcript, messages: Sequence[Message]) -> tuple[Transcript, str | None]:
    """Write the whole conversation again. What follows a turn is added where it leaves all before it as it was written;
    the turn itself may be spelled otherwise than it was sampled, so long as what follows does not change that. Else the
    turn is tokenized as it is written now, and all before it too where that was written otherwise."""
    renderer, action = transcript.renderer, transcript.segments[-1].tokens
    until_now = (*transcript.messages, renderer.parse(action).message)
    grown = replace(transcript, messages=(*until_now, *messages))
    before, turn, whole = (_written(renderer, transcript, m) for m in (transcript.messages, until_now, grown.messages))
    prompt, added = (_atoms(renderer.family.between(m, None, renderer.style)) for m in ((), messages))
    told = turn[: len(turn) - len(prompt)]
    if told[: len(before)] == before and (*told, *added) == whole:
        return _append(grown, Segment("context", renderer.extend(messages, after=action))), None
    unchanged = whole[: len(before)] == before
    kept = transcript.segments[:-1] if unchanged else ()
    context = kept[-1].tokens if kept else ()
    anew = renderer.encode(whole[len(before) :] if unchanged else whole)
    segments = (*kept[:-1], Segment("context", (*context, *anew)))
    tokens, old = tuple(t for segment in segments for t in segment.tokens), transcript.tokens
    if tokens[: len(old)] == old:
        return _append(grown, Segment("context", tokens[len(old) :])), None
    return replace(grown, segments=segments, tokens=tokens), TEMPLATE_REWROTE


def _written(renderer: Renderer, transcript: Transcript, messages: Sequence[Message]) -> tuple[str | Marker, ...]:
    return _atoms(renderer.family.opening(messages, transcript.tools, renderer.style))


_GROW = {"extend": _extend, "render": _render}


def _atoms(pieces: Sequence[Piece]) -> tuple[str | Marker, ...]:
    """Markers and single characters."""
    return tuple(atom for piece in pieces for atom in (piece if isinstance(piece, str) else (piece,)))


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
    """Drop the finished thoughts of turns from segment `start`, a context, on.

    One may stand in the prompt, or begin there and end in the turn after it, but no turn closes what an earlier one
    left open. What else a context holds stays: the thoughts of opening messages were kept or not when it was opened,
    and a system prompt may speak of thoughts.
    """
    renderer, old = transcript.renderer, transcript.segments[start:]
    left = renderer.left()
    new: list[Segment] = []
    for context, action in zip(old[::2], old[1::2], strict=True):
        tokens, turn = (*context.tokens, *action.tokens), len(context.tokens)
        spans = [span for span in renderer.forget(tokens, only_empty=only_empty) if span[1] >= turn]
        new.append(replace(context, tokens=_outside(tokens, spans, left, 0, turn)))
        new.append(replace(action, tokens=_outside(tokens, spans, left, turn, len(tokens))))
    segments = (*transcript.segments[:start], *new)
    before = transcript.tokens[: len(transcript.tokens) - sum(len(segment.tokens) for segment in old)]
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
