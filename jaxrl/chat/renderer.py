"""Messages to token ids and back: open, extend, parse, turn.

Knows messages and a Tokenizer, and that a conversation is a list of pieces: text, and markers that one id stands for.
What the pieces of a family look like is the family's data (chatml.py); which families exist is families.py. Must not
know models, sampling, episodes or rewards.

The promise (DESIGN I1): what the model sampled is never decoded and encoded again. `open` makes the ids before the
first sampled turn, `extend` the ids between two sampled turns, `parse` reads sampled ids without changing them.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jaxrl.chat.tokenizer import Tokenizer
from jaxrl.types import Message, ToolSpec

Thinking = Literal["keep", "strip"]


@dataclass(frozen=True)
class Marker:
    """A piece of framing, such as <|im_start|>: one id where the vocabulary has it, else its spelling as text."""

    spelling: str


Piece = str | Marker


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
    block as text.
    """

    message: Message
    outcome: Outcome


@dataclass(frozen=True)
class Style:
    """The choices a family's writer needs.

    thinking: "keep" leaves the thoughts of earlier turns in the context, so that every turn extends the one before;
    "strip" drops them where the published template does.
    enable_thinking: False writes an empty think block into the generation prompt (families with that switch).
    """

    thinking: Thinking = "keep"
    enable_thinking: bool = True


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
        """Spellings of the tokens that end a turn; those absent from the vocabulary are skipped."""
        ...

    @property
    def thought_markers(self) -> tuple[str, str] | None:
        """The opening and closing marker of thoughts; None when the family has none."""
        ...

    @property
    def has_thinking_switch(self) -> bool:
        """Whether the template can turn thinking off."""
        ...

    @property
    def template_thinking(self) -> Thinking:
        """What the published template does with the thoughts of earlier turns."""
        ...

    @property
    def template_has_tools(self) -> bool:
        """Whether the published template writes tools; when False the family's own tool format is not compared."""
        ...

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """The opening conversation and the generation prompt."""
        ...

    def between(self, messages: Sequence[Message], closed: bool, style: Style) -> list[Piece]:
        """From the end of a sampled turn to the next generation prompt."""
        ...

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """The assistant's turn after the generation prompt, ending with the first stop marker."""
        ...

    def read(self, pieces: Sequence[Piece]) -> tuple[Message, bool]:
        """The message a turn spells (without its stop token), and whether its framing is intact."""
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

    stop_tokens: ids that end a sampled turn. marker_ids: the markers that are one id in this vocabulary.
    Build with `jaxrl.chat.families.renderer_for` or `build`.
    """

    name: str
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    thinking: Thinking
    enable_thinking: bool
    family: Family
    marker_ids: Mapping[str, int] = field(repr=False)

    @property
    def style(self) -> Style:
        """The choices, as the family takes them."""
        return Style(self.thinking, self.enable_thinking)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """Ids of the opening conversation, generation prompt included.

        Equal to the published chat template with add_generation_prompt=True, but for the differences listed in
        chatml.py. Raises ValueError without messages and for two tools of one name.
        """
        if not messages:
            raise ValueError("open() got no messages: give at least one (a system or user message).")
        names = [tool.name for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are named {twice}: the model could not tell them apart. Rename one.")
        return self._encode(self.family.opening(messages, tools, self.style))

    def extend(self, messages: Sequence[Message], *, closed: bool) -> tuple[int, ...]:
        """Ids from the end of a sampled turn up to the next one: its closing, `messages`, the generation prompt.

        closed: the sampled turn ended with one of the stop tokens; when False (cut by a budget) the end marker is
        added first.
        """
        return self._encode(self.family.between(messages, closed, self.style))

    def turn(self, message: Message) -> tuple[int, ...]:
        """Ids of an assistant turn as a demonstration, stop token included: what `parse` would read back.

        Only for supervised data; a sampled turn already has its ids. Raises ValueError for what no sampled turn
        could be (wrong role, malformed calls, thoughts in a family without them).
        """
        if message.role != "assistant":
            raise ValueError(f"turn() got a message of role {message.role!r}: only 'assistant' turns are sampled.")
        return self._encode(self.family.reply(message, self.style))

    def parse(self, tokens: Sequence[int]) -> Parsed:
        """Read a sampled turn. Never raises on ids of the vocabulary; linear in the number of tokens."""
        stopped = len(tokens) > 0 and tokens[-1] in self.stop_tokens
        body = tokens[:-1] if stopped else tokens
        message, intact = self.family.read(self._pieces(body))
        if not stopped:
            return Parsed(message, Outcome.LENGTH)
        if intact and not any(t in self.stop_tokens for t in body):
            return Parsed(message, Outcome.STOPPED)
        return Parsed(Message("assistant", self.tokenizer.decode(body)), Outcome.MALFORMED)

    def without_thoughts(self, tokens: tuple[int, ...], *, only_empty: bool = False) -> tuple[int, ...]:
        """`tokens` with each finished think block, and the newlines after it, cut out by id.

        only_empty: cut only blocks that hold nothing but newlines. What is left is kept id for id. A block that never
        closes stays, as does a token that spells newlines and something else.
        """
        if self.family.thought_markers is None:
            return tokens
        opening, closing = (self.marker_ids[m] for m in self.family.thought_markers)
        kept: list[int] = []
        start = 0
        while (first := _find(tokens, opening, start)) >= 0 and (last := _find(tokens, closing, first)) >= 0:
            kept += tokens[start:first]
            start = last + 1
            while start < len(tokens) and set(self.tokenizer.decode(tokens[start : start + 1])) == {"\n"}:
                start += 1
            if only_empty and self.tokenizer.decode(tokens[first + 1 : last]).strip("\n"):
                kept += tokens[first:start]
        return (*kept, *tokens[start:])

    def _encode(self, pieces: Iterable[Piece]) -> tuple[int, ...]:
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


def _find(tokens: tuple[int, ...], token: int, start: int) -> int:
    """Index of the first `token` at or after `start`, or -1."""
    try:
        return tokens.index(token, start)
    except ValueError:
        return -1


def build(
    family: Family, tokenizer: Tokenizer, *, thinking: Thinking | None = None, enable_thinking: bool | None = None
) -> Renderer:
    """A renderer of `family` for `tokenizer`. None means the default: thoughts kept, thinking on.

    Raises ValueError when the vocabulary lacks a marker that must be one id, and for a choice that the family could
    not honour.
    """
    if thinking not in (None, "keep", "strip"):
        raise ValueError(f"thinking={thinking!r} is unknown: expected 'keep' or 'strip'.")
    if thinking == "strip" and family.thought_markers is None:
        raise ValueError(f"thinking='strip' has no effect: family {family.name!r} writes no thoughts. Leave it out.")
    if enable_thinking is not None and not family.has_thinking_switch:
        raise ValueError(
            f"enable_thinking={enable_thinking} has no effect: the template of family {family.name!r} has no such "
            "switch. Leave it out, or use a family that has one (qwen3)."
        )
    known = _known(tokenizer, [*family.markers, *family.stops])
    for spelling, required in family.markers.items():
        if required and spelling not in known:
            tokenizer.special(spelling)  # raises, naming the token and the tokenizer
    return Renderer(
        name=family.name,
        tokenizer=tokenizer,
        stop_tokens=tuple(known[s] for s in family.stops if s in known),
        thinking=thinking or "keep",
        enable_thinking=enable_thinking is not False,
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
