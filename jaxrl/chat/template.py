r"""Conversations as a tokenizer's own chat template writes them: the renderer for models that no family is written for.

Knows how a published Jinja template is asked, and how to find in what it writes where a turn ends. Must not know any
family's format, token ids, sampling or episodes.

What this costs, next to a family (chatml.py and others). A template writes whole conversations only, so every
observation renders all messages so far, three times: the time spent on text grows with the square of an episode.
Tokens do not: where the template writes what it wrote before and only adds to it, what it adds is all that is
tokenized, and sampled ids stay as they were sampled (transcript.py checks this at every observation). Where it writes
earlier messages otherwise (thoughts dropped, tools or system text moved), the context is rewritten and the episode
splits: a last turn alone is tokenized alone, anything before it makes all of it be tokenized anew.

How its text becomes pieces: a special token's spelling inside a message, a tool or a call is replaced by a private-use
character before the template sees it, and spelled back afterwards as plain text. So whatever is spelled in the result
was written by the template, and is a marker.

What is known of a turn is found by asking the template about small conversations, once, when the renderer is built:

- Turns end at the marker after an assistant's text, or at the tokenizer's eos_token.
- A turn with a marker that frames turns inside it is broken. Markers that frame nothing are text.
- Thoughts are read between <think> and </think>; calls are Hermes JSON between <tool_call> and </tool_call> where the
  template has these words. In every other format a call is text.

Deliberate differences from rendering and tokenizing by hand:

1. Text is text: also where a template would look into it, for </think> or <tool_response>.
2. Calls that could not be read are shown as the text of the turn, after its content.
3. The date is always the same (`render_template`); a clock would write another context every day.
4. White space beside a marker stays, where some vocabularies (Phi-3's) swallow it.
5. What is rewritten is tokenized anew, sampled turns included, as the template spells them.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, takewhile
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from jaxrl.chat.chatml import CALL, CALL_END, CHATML, THINK, THINK_END
from jaxrl.chat.renderer import Marker, Outcome, Piece, Renderer, Style, Thinking, Thoughts, build, spell
from jaxrl.chat.tokenizer import Tokenizer, render_template
from jaxrl.chat.tool_calls import tool_schema
from jaxrl.types import Message, ToolCall, ToolSpec

TEMPLATE = "template"
"""The name of this renderer."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What templates raise where they refuse a conversation, each in its own way."""

_FIRST, _LAST, _ESCAPE = 0xF0000, 0xFFFFD, "\U0010fffd"
_PRIVATE = f"[{chr(_FIRST)}-{chr(_LAST)}{_ESCAPE}]"
_STAND_IN = re.compile(f"{_ESCAPE}(.)|([{chr(_FIRST)}-{chr(_LAST)}])")

_TEXT, _ARGUMENT, _THOUGHT = "spoken-words", "given-value", "inner-voice"
"""Words to look for in what a template writes. They come before any text of a caller's, so the first one is ours."""
_SYSTEM, _USER, _ASKED = Message("system", "."), Message("user", "."), Message("user", _ARGUMENT)
_SPOKEN = Message("assistant", _TEXT)


def template_message(message: Message) -> dict[str, Any]:
    """A message as published templates read it. Arguments are parsed, since some templates serialise them."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking is not None:
        shown["reasoning_content"] = message.thinking
    if message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.name is not None:
        shown["name"] = message.name
    if message.call_id is not None:
        shown["tool_call_id"] = message.call_id
    return shown


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    identified = {} if call.id is None else {"id": call.id}
    return {"type": "function", "function": function, **identified}


@dataclass(frozen=True)
class TemplateFamily:
    """A published template as a family of one tokenizer. Made by `template_family`.

    source, variables, specials: the template, what it is rendered with, and the spellings that are markers.
    owner: the tokenizer's name, for errors.
    stops: what ends a sampled turn. ends: what ends a turn or begins what follows it, in the template's writing.
    frame: markers that no turn may hold. has_calls: the template writes Hermes calls.
    opens_thought: the generation prompt opens a thought, so that a turn begins inside it.
    takes_text: the template wants the arguments of a call as text; most want them parsed.
    """

    source: str = field(repr=False)
    variables: Mapping[str, str] = field(repr=False)
    specials: tuple[str, ...] = field(repr=False)
    owner: str
    stops: tuple[str, ...] = ()
    ends: frozenset[str] = frozenset()
    frame: frozenset[str] = frozenset()
    thoughts: Thoughts | None = None
    has_calls: bool = False
    has_thinking_switch: bool = False
    template_has_tools: bool = False
    opens_thought: bool = False
    takes_text: bool = False
    name: str = TEMPLATE

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every special token, and the tags that turns are read by; none need be an id."""
        return MappingProxyType(dict.fromkeys([*self.specials, *(marker.spelling for marker in self._tags)], False))

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """None are needed."""
        return {}

    @property
    def _tags(self) -> tuple[Marker, ...]:
        return (THINK, THINK_END, CALL, CALL_END) if self.has_calls else (THINK, THINK_END)

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """What the template writes. Raises ValueError where it refuses."""
        return self.pieces(self.write(messages, tools, style=style))

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """What the template writes from the end of a turn on, in a small conversation with these messages.

        The marker that ends the turn is left out if one was sampled, unless it belongs to what follows.
        """
        alone = self.write([_USER, turn := _turn_before(messages)], generation_prompt=False, style=style)
        whole = self.write([_USER, turn, *messages], style=style)
        words = _ARGUMENT if _ARGUMENT in alone else _TEXT
        alone, rest = self.after(words, alone), self.after(words, whole)
        own = _shared(alone, rest)  # what of `rest` is still the turn's own ending
        at, mark = min(((i, e) for e in self.ends if 0 <= (i := rest.find(e)) <= own), default=(-1, ""))
        if at < 0:
            return self.pieces(rest[len(rest[:own].rstrip()) :])
        closed = end is not None and (at < own or end.spelling == mark)
        return self.pieces(rest[at + len(mark) if closed else at :])

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """What the template writes after its generation prompt, up to a stop."""
        prompt = self.write([_USER], style=style)
        turn = self.write([_USER, message], generation_prompt=False, style=style)
        if not turn.startswith(prompt):
            raise ValueError(
                f"the chat template of tokenizer {self.owner!r} does not write this turn after its generation prompt: "
                f"the prompt ends with {prompt[-40:]!r}, and the turn is written as {turn[-80:]!r}. Give the message "
                "the thoughts that the prompt begins, or use a family's renderer"
            )
        body = turn[len(prompt) :]
        if message.thinking and self._hidden(message.thinking.strip()) not in body:
            raise ValueError(
                f"the chat template of tokenizer {self.owner!r} leaves the thoughts of this turn out, so nothing would "
                "teach them. Give the message none, or use a family's renderer"
            )
        end = max((body.rfind(stop) + len(stop) for stop in self.stops if stop in body), default=-1)
        return self.pieces(body[:end]) if end >= 0 else [*self.pieces(body), Marker(self.stops[0])]

    def is_query(self, message: Message) -> bool:
        """A user's message; the template itself decides what it drops."""
        return message.role == "user"

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        generation_prompt: bool = True,
        style: Style | None = None,
    ) -> str:
        """What the template writes, in which texts stand with stand-ins. Raises ValueError where it refuses."""
        switch = {"enable_thinking": style.enable_thinking} if style and self.has_thinking_switch else {}
        try:
            return render_template(
                self.source,
                [self._hidden(self._shown(_readable(message))) for message in messages],
                [self._hidden(tool_schema(tool)) for tool in tools],
                add_generation_prompt=generation_prompt,
                **{**self.variables, **switch},
            )
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message.role for message in messages)
            raise ValueError(
                f"the chat template of tokenizer {self.owner!r} refuses a conversation of {roles}: {error}. Send "
                "messages that it takes, or use a renderer of a family instead of 'template'"
            ) from error

    def pieces(self, text: str) -> list[Piece]:
        """What `write` wrote, as text and markers."""
        parts = self._spelled.split(text) if self.specials else [text]
        return [Marker(part) if k % 2 else _STAND_IN.sub(self._original, part) for k, part in enumerate(parts) if part]

    def attempt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation_prompt: bool = True
    ) -> str:
        """What `write` gives, or nothing where the template refuses."""
        try:
            return self.write(messages, tools, generation_prompt=generation_prompt)
        except ValueError:
            return ""

    def marks(self, text: str) -> set[str]:
        """The markers in what `write` wrote."""
        return set(self._spelled.findall(text)) if self.specials else set()

    def first_marker(self, text: str) -> str | None:
        """The first of them."""
        found = self._spelled.search(text) if self.specials else None
        return found[0] if found else None

    def last_marker(self, text: str) -> str | None:
        """The last of them."""
        found = self._spelled.findall(text) if self.specials else []
        return found[-1] if found else None

    def after(self, words: str, text: str) -> str:
        """What stands behind the first `words`. Raises ValueError when the template left them out."""
        before, found, rest = text.partition(words)
        if not found:
            raise ValueError(
                f"the chat template of tokenizer {self.owner!r} does not write what an assistant says: "
                f"{words!r} is missing in {before[-200:]!r}. Use the renderer of a family"
            )
        return rest

    def _shown(self, message: Message) -> dict[str, Any]:
        shown = template_message(message)
        for told, call in zip(shown.get("tool_calls", ()), message.tool_calls, strict=True):
            told["function"]["arguments"] = call.arguments if self.takes_text else told["function"]["arguments"]
        return shown

    def _hidden(self, value: Any) -> Any:
        """A value of JSON whose texts spell no marker."""
        if isinstance(value, str):
            return self._forged.sub(self._stand_in, value)
        if isinstance(value, Mapping):
            return {self._hidden(key): self._hidden(item) for key, item in value.items()}
        return [self._hidden(item) for item in value] if isinstance(value, list | tuple) else value

    def _stand_in(self, found: re.Match[str]) -> str:
        i = self._index.get(found[0])
        return _ESCAPE + found[0] if i is None else chr(_FIRST + i)

    def _original(self, found: re.Match[str]) -> str:
        return found[1] or self.specials[ord(found[2]) - _FIRST]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {spelling: i for i, spelling in enumerate(self.specials)}

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return re.compile(f"({_any_of(self.specials)})")

    @cached_property
    def _forged(self) -> re.Pattern[str]:
        return re.compile("|".join([_PRIVATE, *filter(None, [_any_of(self.specials)])]))

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """Text as pieces, where the vocabulary has no ids for the tags: a thought it begins with, and calls."""
        thought: list[Piece] = []
        if THINK.spelling in spelled:
            thought, text = self._scan_thought(text)
        return [*thought, *CHATML.scan(text, spelled)]

    def _scan_thought(self, text: str) -> tuple[list[Piece], str]:
        body = text.lstrip().removeprefix(THINK.spelling)
        opened = len(body) < len(text.lstrip())
        inside, closed, rest = body.partition(THINK_END.spelling)
        if not (opened or (closed and self.opens_thought)):
            return [], text
        return [*([THINK] if opened else []), inside, *([THINK_END] if closed else [])], rest

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message, and whether its tags and markers are where they may be."""
        if any(isinstance(piece, Marker) and piece.spelling in self.frame for piece in pieces):
            return Message("assistant", spell(pieces)), False
        reader = _INSIDE_THOUGHT if self.opens_thought else CHATML
        return reader.read([spell([p]) if p not in self._tags else p for p in pieces], style)


assert CHATML.thoughts is not None
_INSIDE_THOUGHT = replace(CHATML, thoughts=replace(CHATML.thoughts, in_prompt=True))


def _readable(message: Message) -> Message:
    """A message as a template can show it: calls that could not be read are text."""
    if not message.malformed_calls:
        return message
    blocks = (f"{CALL.spelling}{bad.text}{CALL_END.spelling}" for bad in message.malformed_calls)
    content = "\n".join(part for part in (message.content, *blocks) if part)
    return replace(message, content=content, malformed_calls=())


def _turn_before(messages: Sequence[Message]) -> Message:
    """A turn that these messages could follow: with a call for every result they begin with."""
    results = list(takewhile(lambda message: message.role == "tool", messages))
    arguments = ["{}"] * (len(results) - 1) + [json.dumps({"value": _ARGUMENT})]
    calls = (ToolCall(m.name or "tool", text, m.call_id) for m, text in zip(results, arguments, strict=False))
    return replace(_SPOKEN, tool_calls=tuple(calls))


def _any_of(words: Collection[str]) -> str:
    """A pattern for the longest of these words that fits. It looks at each character once, however many words begin
    with it: some vocabularies have thousands of special tokens."""
    tails = {
        first: [word[1:] for word in group] for first, group in groupby(sorted(filter(None, words)), itemgetter(0))
    }
    branches = [re.escape(first) + _any_of(rest) for first, rest in tails.items()]
    body = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
    return f"(?:{body})?" if body and "" in words else body


def _shared(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


_CALLED = _turn_before([Message("tool", ".")])


# --- learning a template --------------------------------------------------------------------------


def template_renderer(
    tokenizer: Tokenizer,
    *,
    thinking: Thinking | None = None,
    enable_thinking: bool | None = None,
    compact_turns: int | None = None,
) -> Renderer:
    """The renderer that asks the tokenizer's own template. What becomes of earlier thoughts, the template decides.

    Raises ValueError without a template, for one that refuses a user's message, and for choices without effect.
    """
    if thinking is not None or compact_turns is not None:
        raise ValueError(
            f"thinking={thinking!r}, compact_turns={compact_turns} have no effect on the renderer {TEMPLATE!r}: the "
            "template decides what becomes of earlier thoughts. Leave them out, or use the renderer of a family"
        )
    renderer = replace(build(template_family(tokenizer), tokenizer, enable_thinking=enable_thinking), history="render")
    _check_readable(renderer, tokenizer.name)
    return renderer


def _check_readable(renderer: Renderer, owner: str) -> None:
    """Raise ValueError when a plain answer, as the template writes it after its own prompt, cannot be read."""
    family = renderer.family
    spoken = replace(_SPOKEN, thinking="" if family.thoughts and renderer.enable_thinking else None)
    prompt, turn = (
        family.opening([_USER], (), renderer.style),
        family.opening([_USER, spoken, _ASKED], (), renderer.style),
    )
    if not spell(turn).startswith(spell(prompt)):
        return  # the prompt begins a thought, which the template drops later: nothing to compare
    read = renderer.parse(renderer.encode(family.reply(spoken, renderer.style)))
    if read.outcome is not Outcome.STOPPED or _TEXT not in read.message.content:
        raise ValueError(
            f"the chat template of tokenizer {owner!r} frames turns in a way that renderer {TEMPLATE!r} cannot read: "
            f"a plain answer reads as {read.outcome.value}. Use the renderer of a family"
        )


def template_family(tokenizer: Tokenizer) -> TemplateFamily:
    """The tokenizer's template as a family, after asking it about a few small conversations."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} has no chat template, so the renderer {TEMPLATE!r} has nothing to ask: "
            "name a family's renderer, such as 'role_colon' for a base model"
        )
    variables = dict(tokenizer.template_variables)
    plain = TemplateFamily(tokenizer.chat_template, variables, tuple(tokenizer.specials), tokenizer.name)
    switched = replace(plain, has_thinking_switch=True)
    thinks, not_thinks = (switched.write([_USER], style=Style(enable_thinking=on)) for on in (True, False))
    asked = switched if thinks != not_thinks else plain
    with_text = replace(asked, takes_text=True)
    asked = with_text if with_text.attempt([_USER, _CALLED]) and not asked.attempt([_USER, _CALLED]) else asked
    opens_thought = thinks.rstrip().endswith(THINK.spelling)
    ended = asked.first_marker(asked.after(_TEXT, asked.write([_USER, _SPOKEN], generation_prompt=False)))
    followed = asked.first_marker(asked.after(_TEXT, asked.write([_USER, _SPOKEN, _ASKED])).partition(_ARGUMENT)[0])
    heard = (ended or followed, _end_of_call(asked), variables.get("eos_token"))
    stops = tuple(dict.fromkeys(mark for mark in heard if mark))
    if not stops:
        raise ValueError(
            f"nothing ends a turn of the chat template of tokenizer {tokenizer.name!r}: no marker follows an "
            "assistant's text, and there is no eos_token. Use the renderer of a family"
        )
    told = (asked.attempt([_USER, replace(t, thinking=_THOUGHT)], generation_prompt=False) for t in (_SPOKEN, _CALLED))
    writes_thoughts = any(THINK.spelling in text[: text.find(_THOUGHT)] for text in told if _THOUGHT in text)
    learned = replace(
        asked,
        stops=stops,
        ends=frozenset(filter(None, (*stops, followed))),
        thoughts=Thoughts((THINK,), (THINK_END,), in_prompt=opens_thought) if writes_thoughts else None,
        has_calls=CALL.spelling in asked.source,
        opens_thought=opens_thought,
    )
    return replace(learned, frame=_frame(learned))


def _end_of_call(family: TemplateFamily) -> str | None:
    """The marker that ends a turn which ends with a call: its last, or the next one where that closes the call."""
    turn = family.attempt([_USER, _CALLED], generation_prompt=False)
    whole = family.attempt([_USER, _CALLED, Message("tool", ".")])
    if _ARGUMENT not in turn or not whole.startswith(turn):
        return None  # it writes no calls
    last = family.last_marker(family.after(_ARGUMENT, turn))
    return family.first_marker(whole[len(turn) :]) if last in (None, CALL_END.spelling) else last


def _frame(family: TemplateFamily) -> frozenset[str]:
    """Markers that stand outside the turns of an assistant."""
    whole, turn = family.attempt([_USER, _CALLED, Message("tool", ".")]), family.attempt([_USER, _CALLED])
    with_system = family.attempt([_SYSTEM, _USER, _SPOKEN, _USER])
    plain = with_system or family.attempt([_USER, _SPOKEN, _USER])
    tags = {marker.spelling for marker in (THINK, THINK_END, CALL, CALL_END)}
    return frozenset(family.marks(plain) | (family.marks(whole) - family.marks(turn))) - tags
