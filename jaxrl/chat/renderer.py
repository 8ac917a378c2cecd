"""Messages to token ids and back: open, extend, parse, turn.

Knows messages and a Tokenizer, and that a conversation is a list of pieces: text, and markers that one id stands for.
What the pieces of a family look like is the family's data (chatml.py); which families exist is families.py. Must not
know models, sampling, episodes or rewards.

The promise (I1): what the model sampled is never decoded and encoded again. `open` makes the ids before the
first sampled turn, `extend` the ids between two sampled turns, `parse` reads sampled ids without changing them.
"""

import enum
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jaxrl.chat.tokenizer import Tokenizer
from jaxrl.chat.tool_calls import check_arguments
from jaxrl.env import StopCondition
from jaxrl.settings import at_least
from jaxrl.types import Message, ToolCall, ToolSpec

Thinking = Literal["keep", "strip", "compact"]
History = Literal["extend", "render"]
"""How a context grows: by what stands between two turns, or by writing the whole conversation again (template.py)."""


@dataclass(frozen=True)
class Marker:
    """A piece of framing, such as <|im_start|>: one id where the vocabulary has it, else its spelling as text."""

    spelling: str


Piece = str | Marker


def unknown_role(role: str) -> ValueError:
    """What a writer raises for a message of no role it can write."""
    return ValueError(f"a message has role {role!r}: expected 'system', 'user', 'assistant' or 'tool'.")


def spell(pieces: Iterable[Piece]) -> str:
    """The pieces as text, markers by their spelling."""
    return "".join(piece if isinstance(piece, str) else piece.spelling for piece in pieces)


class Outcome(enum.Enum):
    """How a sampled turn ended, as far as its structure goes."""

    STOPPED = "stopped"  # a stop token, and every block opened and closed properly
    LENGTH = "length"  # no stop token: the turn was cut by a budget
    MALFORMED = "malformed"  # a stop token, but broken framing


@dataclass(frozen=True)
class Parsed:
    """A sampled turn read as a message.

    With STOPPED the message is complete; what is wrong *inside* a block is in `message.malformed_calls`.
    With MALFORMED its content is the whole turn as text. With LENGTH it holds what was finished, and the unfinished
    block as text (as a malformed call in families where nothing but its JSON closes a call).
    """

    message: Message
    outcome: Outcome


@dataclass(frozen=True)
class Style:
    """The choices a family's writer needs.

    thinking: "keep" leaves the thoughts of earlier turns in the context, so that every turn extends the one before;
    "strip" drops them where the published template does; "compact" drops all of them every few turns.
    enable_thinking: False asks for a turn without thoughts, as the template does (families with that switch).
    """

    thinking: Thinking = "keep"
    enable_thinking: bool = True


@dataclass(frozen=True)
class Thoughts:
    """How a family frames a thought in a context, and how its template forgets one.

    opening, closing: the pieces around it, of which the markers must be single ids. left: what stays in its place.
    newlines: those after `closing` go with it.
    template: what the published template does with the thoughts of earlier turns.
    forgets_empty: the template drops an empty thought as soon as any message follows.
    in_prompt: the generation prompt opens the thought, so that a sampled turn begins inside it.
    """

    opening: tuple[Piece, ...]
    closing: tuple[Piece, ...]
    left: tuple[Piece, ...] = ()
    newlines: bool = True
    template: Thinking = "strip"
    forgets_empty: bool = False
    in_prompt: bool = False


class Family(Protocol):
    """How one family of models writes conversations. Frozen data with pure functions; see chatml.ChatML."""

    @property
    def name(self) -> str:
        """The name it is registered under."""
        ...

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every marker's spelling, and whether the vocabulary must hold it (True) or may spell it as text."""
        ...

    @property
    def stops(self) -> Sequence[str]:
        """What ends a turn: spellings of tokens, of which those absent from the vocabulary are skipped. When none is
        present, sampling stops at the spellings themselves."""
        ...

    @property
    def thoughts(self) -> Thoughts | None:
        """How thoughts are written; None when the family has none."""
        ...

    @property
    def has_thinking_switch(self) -> bool:
        """Whether the template can turn thinking off."""
        ...

    @property
    def template_has_tools(self) -> bool:
        """Whether the published template writes tools; when False the family's own tool format is not compared."""
        ...

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """What the published template must be rendered with to write what this row writes (a date, for example)."""
        ...

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """The opening conversation and the generation prompt."""
        ...

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """From the end of a sampled turn to the next generation prompt. `end`: the stop that was sampled, if any."""
        ...

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """The assistant's turn after the generation prompt, ending with a stop marker."""
        ...

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message a turn spells (without its stop), and whether its framing is intact. Never raises."""
        ...

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """Sampled text as pieces, where the markers `spelled` are written out in it."""
        ...

    def is_query(self, message: Message) -> bool:
        """Whether the template drops the thoughts of all turns before this message."""
        ...


@dataclass(frozen=True)
class Renderer:
    """One family with one tokenizer. Immutable, picklable, shared by all episodes.

    stop_ids: stops that are one id in this vocabulary, by id. marker_ids: markers that are, by spelling.
    compact_turns: with thinking="compact", after how many turns thoughts are dropped.
    history: how the transcripts of its episodes grow.
    Build with `jaxrl.chat.families.renderer_for` or `build`.
    """

    name: str
    tokenizer: Tokenizer
    stop_ids: Mapping[int, str]
    thinking: Thinking
    enable_thinking: bool
    compact_turns: int | None
    family: Family
    marker_ids: Mapping[str, int] = field(repr=False)
    history: History = "extend"

    @property
    def stop(self) -> StopCondition:
        """What ends a sampled turn: token ids, or strings where the vocabulary has none of the family's stops."""
        return tuple(self.stop_ids) or tuple(self.family.stops)

    @property
    def style(self) -> Style:
        """The choices, as the family takes them."""
        return Style(self.thinking, self.enable_thinking)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """Ids of the opening conversation, generation prompt included.

        Equal to the published chat template with add_generation_prompt=True, but for the differences that the
        family's file lists. Raises ValueError without messages and for two tools of one name.
        """
        if not messages:
            raise ValueError("open() got no messages: give at least one (a system or user message).")
        names = [tool.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are named {twice}: the model could not tell them apart. Rename one.")
        return self.encode(self.family.opening(messages, tools, self.style))

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> tuple[int, ...]:
        """Ids from the end of a sampled turn up to the next one: its closing, `messages`, the generation prompt.

        after: the sampled turn. When it was cut by a budget (no stop at its end) the end marker is added first.
        """
        pieces = self.family.between(messages, self._end(after), self.style)
        if not any(pieces):
            raise ValueError(
                f"extend() got {len(messages)} messages, and family {self.name!r} writes nothing between two turns "
                "without any: let the environment answer with a message."
            )
        return self.encode(pieces)

    def turn(self, message: Message) -> tuple[int, ...]:
        """Ids of an assistant turn as a demonstration, stop included: what `parse` would read back.

        Only for supervised data; a sampled turn already has its ids. Raises ValueError for what no sampled turn
        could be (wrong role, malformed calls, arguments that are not JSON, thoughts where there are none).
        """
        if message.role != "assistant":
            raise ValueError(f"turn() got a message of role {message.role!r}: only 'assistant' turns are sampled.")
        if message.malformed_calls:
            raise ValueError("turn() got a message with malformed_calls: a demonstration must be well formed.")
        if message.thinking and not (self.family.thoughts and self.enable_thinking):
            why = "was built with enable_thinking=False" if self.family.thoughts else "writes no thoughts"
            raise ValueError(f"turn() got a message with thinking, but renderer {self.name!r} {why}. Remove it.")
        for call in message.tool_calls:
            check_arguments(call)
        tokens = self.encode(self.family.reply(message, self.style))
        self._check_turn(tokens, message)
        return tokens

    def _check_turn(self, tokens: tuple[int, ...], message: Message) -> None:
        """Raise ValueError for a turn that says something else when it is read, such as text that looks like a call."""
        parsed = self.parse(tokens)
        calls, read = ([self._signature(call) for call in m.tool_calls] for m in (message, parsed.message))
        early = any(stop in spell(self._pieces(tokens[:-1])) for stop in self.family.stops if not self.stop_ids)
        if parsed.outcome is not Outcome.STOPPED or early or calls != read or parsed.message.malformed_calls:
            wanted, found = ([name for name, *_ in named] for named in (calls, read))
            raise ValueError(
                f"turn() got a message that renderer {self.name!r} would read as {parsed.outcome.value}, with the "
                f"calls {found} instead of {wanted}: {self.tokenizer.decode(tokens)[:200]!r}. Change what it says: a "
                "name, or text that looks like the family's framing."
            )

    def _signature(self, call: ToolCall) -> tuple[str, ...]:
        """The call's name and the names of its arguments, as far as this vocabulary can spell them."""
        names = (call.name, *json.loads(call.arguments))
        return tuple(self.tokenizer.decode(self.tokenizer.encode(name)) for name in names)

    def parse(self, tokens: Sequence[int]) -> Parsed:
        """Read a sampled turn. Never raises on ids of the vocabulary; linear in the number of tokens."""
        end = self._end(tokens)
        body = self._body(tokens, end)
        message, intact = self.family.read(body, self.style)
        if end is None:
            return Parsed(message, Outcome.LENGTH)
        if intact and not any(t in self.stop_ids for t in tokens[:-1]):
            return Parsed(message, Outcome.STOPPED)
        return Parsed(Message("assistant", spell(body)), Outcome.MALFORMED)

    def forget(self, tokens: tuple[int, ...], *, only_empty: bool = False) -> list[tuple[int, int]]:
        """Where finished thoughts lie in `tokens`: (start, end) of each, in order, newlines after it included if they
        go with it. A thought that never closes stays, as does a token that spells newlines and something else.

        only_empty: just those that hold nothing but newlines.
        """
        thoughts = self.family.thoughts
        if thoughts is None:
            return []
        opening, closing = self.encode(thoughts.opening), self.encode(thoughts.closing)
        spans: list[tuple[int, int]] = []
        at = 0
        while (first := _find(tokens, opening, at)) >= 0:
            body = first + len(opening)
            if (last := _find(tokens, closing, body)) < 0:
                break
            at = last + len(closing)
            while thoughts.newlines and at < len(tokens) and self._is_newlines(tokens[at]):
                at += 1
            if not (only_empty and self.tokenizer.decode(tokens[body:last]).strip("\n")):
                spans.append((first, at))
        return spans

    def left(self) -> tuple[int, ...]:
        """The ids that stay where a thought is dropped."""
        return self.encode(self.family.thoughts.left) if self.family.thoughts else ()

    def _is_newlines(self, token: int) -> bool:
        return set(self.tokenizer.decode([token])) == {"\n"}

    def _end(self, tokens: Sequence[int]) -> Marker | None:
        """The stop that ended a sampled turn; None for one that was cut."""
        if self.stop_ids:
            spelling = self.stop_ids.get(tokens[-1]) if len(tokens) else None
            return None if spelling is None else Marker(spelling)
        text = self.tokenizer.decode(tokens)
        found = [(at, stop) for stop in self.family.stops if (at := text.find(stop)) >= 0]
        return Marker(min(found)[1]) if found else None

    def _body(self, tokens: Sequence[int], end: Marker | None) -> list[Piece]:
        """A sampled turn as pieces, without the stop that ended it."""
        if end is None or self.stop_ids:
            return self._pieces(tokens if end is None else tokens[:-1])
        before, _, _ = self.tokenizer.decode(tokens).partition(end.spelling)
        return self.family.scan(before, self.family.markers.keys())

    def encode(self, pieces: Iterable[Piece]) -> tuple[int, ...]:
        """Ids of pieces. Neighbouring texts are joined first: a tokenizer may merge across them."""
        ids: list[int] = []
        run: list[str] = []
        for piece in pieces:
            i = self.marker_ids.get(piece.spelling) if isinstance(piece, Marker) else None
            if i is None:
                run.append(piece.spelling if isinstance(piece, Marker) else piece)
                continue
            ids += self.tokenizer.encode("".join(run)) if run else ()
            run.clear()
            ids.append(i)
        ids += self.tokenizer.encode("".join(run)) if run else ()
        return tuple(ids)

    def _pieces(self, tokens: Sequence[int]) -> list[Piece]:
        """Sampled ids as pieces: markers by id; text is searched only for markers this vocabulary has no id for."""
        by_id = {i: spelling for spelling, i in self.marker_ids.items()}
        spelled = self.family.markers.keys() - self.marker_ids.keys()
        pieces: list[Piece] = []
        start = 0
        for end in [*(k for k, t in enumerate(tokens) if t in by_id), len(tokens)]:
            if end > start:
                pieces += self.family.scan(self.tokenizer.decode(tokens[start:end]), spelled)
            if end < len(tokens):
                pieces.append(Marker(by_id[tokens[end]]))
            start = end + 1
        return pieces


def _find(tokens: tuple[int, ...], run: tuple[int, ...], start: int) -> int:
    """Index of the first `run` at or after `start`, or -1."""
    while True:
        try:
            start = tokens.index(run[0], start)
        except ValueError:
            return -1
        if tokens[start : start + len(run)] == run:
            return start
        start += 1


def build(
    family: Family,
    tokenizer: Tokenizer,
    *,
    thinking: Thinking | None = None,
    enable_thinking: bool | None = None,
    compact_turns: int | None = None,
) -> Renderer:
    """A renderer of `family` for `tokenizer`. None means the default: thoughts kept, thinking on.

    Raises ValueError when the vocabulary lacks a marker that must be one id, and for a choice that the family could
    not honour.
    """
    if thinking not in (None, "keep", "strip", "compact"):
        raise ValueError(f"thinking={thinking!r} is unknown: expected 'keep', 'strip' or 'compact'.")
    if thinking in ("strip", "compact") and family.thoughts is None:
        raise ValueError(
            f"thinking={thinking!r} has no effect: family {family.name!r} writes no thoughts. Leave it out."
        )
    if enable_thinking is not None and not family.has_thinking_switch:
        raise ValueError(
            f"enable_thinking={enable_thinking} has no effect: the template of family {family.name!r} has no such "
            "switch. Leave it out, or use a family that has one (qwen3)."
        )
    if (thinking == "compact") != (compact_turns is not None):
        raise ValueError(
            f"thinking={thinking!r} with compact_turns={compact_turns}: give both thinking='compact' and the number of "
            "turns after which thoughts are dropped, or neither."
        )
    if compact_turns is not None:
        at_least("compact_turns", compact_turns, 1)
    known = _known(tokenizer, [*family.markers, *family.stops])
    for spelling, required in family.markers.items():
        if required and spelling not in known:
            tokenizer.special(spelling)  # raises, naming the token and the tokenizer
    return Renderer(
        name=family.name,
        tokenizer=tokenizer,
        stop_ids={known[s]: s for s in family.stops if s in known},
        thinking=thinking or "keep",
        enable_thinking=enable_thinking is not False,
        compact_turns=compact_turns,
        family=family,
        marker_ids={spelling: known[spelling] for spelling in family.markers if spelling in known},
    )


def _known(tokenizer: Tokenizer, spellings: Iterable[str]) -> dict[str, int]:
    """The ids of those spellings that are special tokens."""
    known = {}
    for spelling in spellings:
        try:
            known[spelling] = tokenizer.special(spelling)
        except ValueError:
            continue
    return known
