"""Moonshot's Kimi K2 families: K2 Instruct and K2 Thinking.

Knows how they spell a conversation, as pieces of text and markers. Must not know token ids, vocabularies, sampling or
episodes. A family is a row of data (a `Kimi`).

Sources: the chat templates published with Kimi-K2-Instruct-0905 and Kimi-K2-Thinking, and the guide to tool calls
that comes with them. Collected copies were edited for engines that lack some of Jinja: there ids come from a counter
and not from the messages, tools are not compact JSON, and the search for the last answer finds the first. The makers'
own lines count. Special tokens of the vocabulary: [BOS], [EOS], <|im_end|>, <|im_user|>, <|im_assistant|>,
<|im_system|>, <|im_middle|>, [EOT], <|start_header_id|>, <|end_header_id|>, <|tool_calls_section_begin|>,
<|tool_calls_section_end|>, <|tool_call_begin|>, <|tool_call_argument_begin|>, <|tool_call_end|>, and <think>, </think>
in K2 Thinking's.

A call is named by its id, "functions.NAME:INDEX"; the index counts the calls of the whole conversation from 0, and the
model writes it. A result is headed by the id of its call. `read` sets `id` to what was written, also where no more of a
call could be read.

Deliberate differences from the templates:

1. Text is text: a special token's spelling inside a message stays ordinary text.
2. A call without an id gets the one the model would have written; a template would write none. In an opening the index
   counts the conversation's calls, and a result without an id answers the turn's first call not answered yet. A
   demonstration (`reply`) knows no conversation, and counts its own calls.
3. Between sampled turns no call is known: a result without an id is headed by its tool's name, or "unknown".
4. Thoughts live in `Message.thinking` only, and thinking="keep" (the default) keeps them. K2 Thinking's template
   empties those up to the last answer (an assistant's message without calls); thinking="strip" does so in an opening,
   and in an episode as soon as anything but a tool's result follows.
5. Arguments of a call are written as their JSON text stands; calls that could not be read are written back as they
   were, and count as calls.
6. K2's first release had the default system prompt "You are a helpful assistant": give it as a message.
"""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from jaxrl.chat.call_section import Frame, malformed_block, read_turn
from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell
from jaxrl.chat.tool_calls import read_arguments, tool_schema
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

SYSTEM, USER, ASSISTANT = Marker("<|im_system|>"), Marker("<|im_user|>"), Marker("<|im_assistant|>")
MIDDLE, END = Marker("<|im_middle|>"), Marker("<|im_end|>")
SECTION, SECTION_END = Marker("<|tool_calls_section_begin|>"), Marker("<|tool_calls_section_end|>")
CALL, CALL_END = Marker("<|tool_call_begin|>"), Marker("<|tool_call_end|>")
ARGUMENTS = Marker("<|tool_call_argument_begin|>")
THINK, THINK_END = Marker("<think>"), Marker("</think>")

_FRAME = Frame(SECTION, CALL, ARGUMENTS, CALL_END, SECTION_END)
_THINKING_FRAME = Frame(SECTION, CALL, ARGUMENTS, CALL_END, SECTION_END, THINK, THINK_END)
_MARKERS = (SYSTEM, USER, ASSISTANT, MIDDLE, END, SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": SYSTEM}
_ID = re.compile(r"(?:functions\.)?(?P<name>.*):\d+", re.DOTALL)


@dataclass(frozen=True)
class Kimi:
    """One Kimi family.

    default_system: the system prompt the template inserts when the first message is not one. after_default: what the
    template writes between that prompt and the first message.
    """

    name: str
    default_system: str
    after_default: str = ""
    thoughts: Thoughts | None = None

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every marker's spelling; all must be ids."""
        thinking = (THINK, THINK_END) if self.thoughts else ()
        return MappingProxyType({marker.spelling: True for marker in (*_MARKERS, *thinking)})

    @property
    def stops(self) -> Sequence[str]:
        """The end of a turn, or of the text."""
        return (END.spelling, "[EOS]")

    @property
    def has_thinking_switch(self) -> bool:
        """K2 Thinking always thinks."""
        return False

    @property
    def template_has_tools(self) -> bool:
        """It has."""
        return True

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """None are needed."""
        return {}

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """Tools, default system prompt, messages, generation prompt."""
        pieces: list[Piece] = []
        if tools:
            listed = json.dumps([tool_schema(tool) for tool in tools], ensure_ascii=False, separators=(",", ":"))
            pieces += [SYSTEM, "tool_declare", MIDDLE, listed, END]
        if messages[0].role != "system":
            pieces += [SYSTEM, "system", MIDDLE, self.default_system, END, self.after_default]
        answers = [i for i, m in enumerate(messages) if m.role == "assistant" and not m.calls]
        last = answers[-1] if answers else -1
        for i, message in enumerate(_identified(messages)):
            forgotten = i <= last and style.thinking != "keep"
            pieces += self._turn(replace(message, thinking=None) if forgotten else message)
        return [*pieces, *_prompt()]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """The end of the sampled turn if it is missing, messages, generation prompt."""
        pieces: list[Piece] = [] if end else [END]
        for message in messages:
            pieces += self._turn(message)
        return [*pieces, *_prompt()]

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn after the generation prompt, with its end marker."""
        (identified,) = _identified([message])
        return [*self._assistant(identified), END]

    def is_query(self, message: Message) -> bool:
        """Anything but a tool's result follows an answer, before which the template keeps no thoughts."""
        return message.role != "tool"

    def _turn(self, message: Message) -> list[Piece]:
        if message.role not in _ROLES:
            raise ValueError(f"a message has role {message.role!r}: expected one of {', '.join(sorted(_ROLES))}.")
        body = self._assistant(message) if message.role == "assistant" else [message.content]
        if message.role == "tool":
            body = [f"## Return of {message.call_id or message.name or 'unknown'}\n", *body]
        return [_ROLES[message.role], message.name or message.role, MIDDLE, *body, END]

    def _assistant(self, message: Message) -> list[Piece]:
        """The body of an assistant turn, whose calls have ids."""
        pieces: list[Piece] = [THINK, message.thinking or "", THINK_END] if self.thoughts else []
        pieces.append(message.content)
        if message.calls:
            pieces += [SECTION, *(piece for call in message.calls for piece in _block(call)), SECTION_END]
        return pieces

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """The text: every marker is an id."""
        return [text]

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message, and whether its blocks are opened and closed properly: a thought, text, then calls."""
        turn = read_turn(pieces, _THINKING_FRAME if self.thoughts else _FRAME, _read_call)
        if turn is None:
            return Message("assistant", spell(pieces)), False
        results = tuple(_with_id(r) if isinstance(r, MalformedToolCall) else r for r in turn.results)
        return replace(turn, results=results).message(turn.thinking, turn.text), turn.finished


def call_id(name: str, index: int) -> str:
    """The id of the call of `name` that is the conversation's `index`-th."""
    return f"functions.{name}:{index}"


def _identified(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with the ids that calls and results lack (difference 2)."""
    count = 0
    open_calls: deque[str] = deque()
    for message in messages:
        calls: list[ToolCall | MalformedToolCall] = []
        for call in message.calls:
            made = call_id(call.name, count) if isinstance(call, ToolCall) else None
            calls.append(replace(call, id=call.id or made))
            count += 1
        if message.role == "assistant":
            open_calls = deque(call.id or "" for call in calls)
        answered = message.call_id
        if message.role == "tool" and open_calls:
            answered = answered or open_calls[0]
            if answered in open_calls:
                open_calls.remove(answered)
        yield replace(message, tool_calls=tuple(c for c in calls if isinstance(c, ToolCall)), call_id=answered)


def _block(call: ToolCall | MalformedToolCall) -> list[Piece]:
    if isinstance(call, MalformedToolCall):
        return malformed_block(_FRAME, call.text)
    return [CALL, call.id or "", ARGUMENTS, call.arguments, CALL_END]


def _prompt() -> list[Piece]:
    return [ASSISTANT, "assistant", MIDDLE]


def _read_call(head: str, arguments: str, block: str) -> ToolCall | MalformedToolCall:
    identifier = head.strip()
    if (match := _ID.fullmatch(identifier)) is None:
        wanted = f"Write functions.<tool name>:<index> before {ARGUMENTS.spelling}."
        return MalformedToolCall(block, f"Tool call not read: {identifier[:40]!r} is no id of a call. {wanted}")
    return read_arguments(match["name"], arguments, block=block, id=identifier)


def _with_id(call: MalformedToolCall) -> MalformedToolCall:
    """The call with the id that stands at its head, if one does."""
    head = call.text.partition(ARGUMENTS.spelling)[0].strip()
    return replace(call, id=head if _ID.fullmatch(head) else None)


# --- the families ---------------------------------------------------------------------------------

_DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."

KIMI_K2 = Kimi("kimi_k2", _DEFAULT_SYSTEM, after_default="\n")

KIMI_K2_THINKING = Kimi(
    "kimi_k2_thinking",
    _DEFAULT_SYSTEM,
    thoughts=Thoughts((THINK,), (THINK_END,), left=(THINK, THINK_END), newlines=False),
)
