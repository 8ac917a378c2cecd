r"""The turns of Gemma 3 (Gemma 2's are the same, without a system prompt).

Knows how this template spells a conversation, as pieces of text and markers. Must not know token ids, vocabularies,
sampling or episodes.

Source: the chat template published with gemma-3-it. There is no system role: its text stands in front of the first
user message. Parity is tested token for token, but for these deliberate differences:

1. Text is text. A special token's spelling inside a message stays ordinary text.
2. The template knows no tools, and Google prescribes no format. The one here is ours: schemas as JSON lines in the
   first user turn, after the system text; a call is a fenced block

       ```tool_call
       {"name": "search", "arguments": {"query": "Paris"}}
       ```

   that starts on a line of its own, and a user turn brings back one ```tool_output block for each result, in order.
   Fences are text, so a result that spells one can look like the end of the result. What the model is read to have
   called is safe: only its own turn is read, and the end of a call is looked for after its JSON.
3. Roles need not alternate. Every message is a turn of its own, and results in a row share one; a later system message
   becomes a user turn, as does the first where no user message follows it. The template refuses all of that, and drops
   a system prompt that stands alone.
4. Calls that could not be read are written back as they were, in their block.
5. Thoughts are not written: these models have none.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any

from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell
from jaxrl.chat.tool_calls import assistant_message, end_of_json, read_call, tool_schema, write_call
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

BOS = Marker("<bos>")
TURN, TURN_END = Marker("<start_of_turn>"), Marker("<end_of_turn>")

CALL, RESULT, FENCE = "```tool_call", "```tool_output", "```"

_ROLES = {"system": "user", "user": "user", "assistant": "model", "tool": "user"}
_CALL = re.compile(rf"^[ \t]*{CALL}\b", re.MULTILINE)


@dataclass(frozen=True)
class Gemma:
    """One Gemma family."""

    name: str
    stops: tuple[str, ...] = (TURN_END.spelling, "<eos>")
    thoughts: Thoughts | None = field(default=None, init=False)  # these models write none
    has_thinking_switch: bool = field(default=False, init=False)
    template_has_tools: bool = field(default=False, init=False)

    @property
    def markers(self) -> Mapping[str, bool]:
        """The frame, all single ids. Fences are text."""
        return MappingProxyType({marker.spelling: True for marker in (BOS, TURN, TURN_END)})

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """None are needed."""
        return {}

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """BOS, system text and tools in front of the first user message, messages, generation prompt."""
        has_system = messages[0].role == "system"
        system = [messages[0].content] if has_system else []
        first, body = _split_first(messages[has_system:])
        lead = [*system, *([_tools_text(tools)] if tools else []), *first]
        pieces: list[Piece] = _turn("user", "\n\n".join(lead)) if lead else []
        return [BOS, *pieces, *_conversation(body), *_PROMPT]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """The end of the sampled turn, messages, generation prompt."""
        return [*([] if end else [TURN_END]), "\n", *_conversation(messages), *_PROMPT]

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn after the generation prompt, with its end marker."""
        return [_assistant(message), TURN_END]

    def is_query(self, message: Message) -> bool:
        """A user's message."""
        return message.role == "user"

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """The text: no marker is ever spelled out in it."""
        return [text]

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message, and whether it holds no marker and every call's block is closed."""
        text = spell(pieces)
        if any(isinstance(piece, Marker) for piece in pieces):
            return Message("assistant", text), False
        results: list[ToolCall | MalformedToolCall] = []
        around: list[str] = []  # text before the first call, and after each
        openings = list(_CALL.finditer(text))
        limits = [*(opening.start() for opening in openings), len(text)]
        at = 0
        for opening, limit in zip(openings, limits[1:], strict=True):
            block = text[opening.end() : limit]  # JSON has no line that starts a block
            close = block.find(FENCE, end_of_json(block, 0))
            if close < 0:
                return _message([*around, text[at:]], results), False
            around.append(text[at : opening.start()])
            results.append(read_call(block[:close]))
            at = opening.end() + close + len(FENCE)
        return _message([*around, text[at:]], results), True


def _message(around: Sequence[str], results: Sequence[ToolCall | MalformedToolCall]) -> Message:
    if not results:
        return Message("assistant", "".join(around))
    parts = [around[0].removesuffix("\n"), *(part.strip() for part in around[1:])]
    return assistant_message("\n".join(part for part in parts if part), results)


def _split_first(body: Sequence[Message]) -> tuple[list[str], Sequence[Message]]:
    """The first user message's text where the conversation starts with one, and the messages after it."""
    if body and body[0].role == "user":
        return [body[0].content.strip()], body[1:]
    return [], body


def _turn(role: str, text: str) -> list[Piece]:
    return [TURN, f"{role}\n{text}", TURN_END, "\n"]


_PROMPT: tuple[Piece, ...] = (TURN, "model\n")


def _tools_text(tools: Sequence[ToolSpec]) -> str:
    """What the model is told about its tools, and how to call them."""
    schemas = "\n".join(json.dumps(tool_schema(tool), ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions, described by JSON schemas:\n{schemas}\n\n"
        "To call one, write a block like this (several blocks for several calls), and end your turn after it:\n"
        f'{CALL}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{FENCE}\n'
        f"You then get what each call returned, in a {RESULT} block."
    )


def _conversation(messages: Sequence[Message]) -> list[Piece]:
    """Messages as turns; tool results in a row share one."""
    pieces: list[Piece] = []
    for role, run in groupby(messages, key=lambda message: message.role):
        if role not in _ROLES:
            raise ValueError(f"a message has role {role!r}: expected one of {', '.join(map(repr, _ROLES))}.")
        texts = [_text(message) for message in run]
        for text in ["\n".join(texts)] if role == "tool" else texts:
            pieces += _turn(_ROLES[role], text)
    return pieces


def _text(message: Message) -> str:
    if message.role == "assistant":
        return _assistant(message)
    return _block(RESULT, f"\n{message.content}\n") if message.role == "tool" else message.content.strip()


def _assistant(message: Message) -> str:
    """The body of an assistant turn."""
    calls = [f"\n{write_call(call)}\n" if isinstance(call, ToolCall) else call.text for call in message.calls]
    text = message.content.strip()
    return "\n".join([*([text] if text else []), *(_block(CALL, call) for call in calls)])


def _block(opening: str, body: str) -> str:
    return f"{opening}{body}{FENCE}"


# --- the families ---------------------------------------------------------------------------------

GEMMA3 = Gemma("gemma3")
