r"""The header format of Llama 3: plain Llama 3, 3.1 (3.3 writes the same) and 3.2.

Knows how these templates spell a conversation, as pieces of text and markers. Must not know token ids, vocabularies,
sampling or episodes. A family is a row of data (a `Llama3`); what differs between them is its fields.

Sources: the chat templates published with Meta-Llama-3-8B-Instruct, Llama-3.1-8B-Instruct, Llama-3.3-70B-Instruct and
Llama-3.2-3B-Instruct, without their built-in tools. Tools stand as JSON in the first user message, a call is
{"name": ..., "parameters": {...}}, and a result is a JSON string in a turn of role "ipython".

What counts as a call. Nothing need mark one, so a sampled turn is read by these rules:

- What follows <|python_tag|> is calls; what precedes it is text.
- Without the tag, a turn is calls when it begins (after white space) with a JSON object that has both "name" and
  "parameters", or with "{" and something unreadable in which both words stand in quotes.
- Calls follow each other, with white space or ";" between them. After them, what does not begin with "{" is text.
- Every other turn is text: also one that has a call after words without the tag, or a JSON answer without those two
  members. A JSON answer that has both is read as a call, whatever tools there are.
- An object that never closes is a malformed call like any unreadable one, also in a turn that was cut.

Parity is tested token for token, but for these deliberate differences:

1. Text is text. A special token's spelling inside a message stays ordinary text.
2. A turn with text and calls is written as text, <|python_tag|>, calls. The template drops the text.
3. Several calls in a turn are written with "; " between them. The template refuses them.
4. Arguments are written as their JSON text stands (the template re-serialises them), and a tool's name is JSON-escaped.
5. Tools go into the first message after the system prompt when that is the user's, else into a user turn of their own.
   The template puts any message there, as if the user had said it, and refuses when there is none.
6. Plain Llama 3's template ignores tools: here that row writes them as Llama 3.1 does. Its vocabulary has no
   <|python_tag|>, nor have the first ones published with Llama 3.1: there the tag is text, and text can forge it in
   what the model reads. What the model is read to have called is safe: only its own turn is read.
7. The date of Llama 3.2's template is today's; here it is the row's `date`, the one the template falls back to where
   it has no clock. `dataclasses.replace(LLAMA3_2, name=..., date=...)` makes a row with another.
8. Thoughts are not written: these models have none.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell
from jaxrl.chat.tool_calls import assistant_message, end_of_json, json_members, read_call, tool_schema, write_call
from jaxrl.types import Message, ToolCall, ToolSpec

BOS = Marker("<|begin_of_text|>")
HEADER, HEADER_END = Marker("<|start_header_id|>"), Marker("<|end_header_id|>")
TURN_END = Marker("<|eot_id|>")
CALLS = Marker("<|python_tag|>")

_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "ipython"}
_GAP = re.compile(r"[\s;]*")
_MEMBERS = {"name", "parameters"}


@dataclass(frozen=True)
class Llama3:
    """One family of the Llama 3 format.

    has_call_tag: the vocabulary must have <|python_tag|> (else see difference 6).
    date: as the system turn gives it, "26 Jul 2024"; None for a family without such a turn.
    template_date: the date that the template writes unless it is told another; None where that is today's.
    template_has_tools: the published template writes tools.
    """

    name: str
    has_call_tag: bool = False
    date: str | None = None
    template_date: str | None = None
    template_has_tools: bool = True
    stops: tuple[str, ...] = (TURN_END.spelling, "<|eom_id|>", "<|end_of_text|>")
    thoughts: Thoughts | None = field(default=None, init=False)  # these models write none
    has_thinking_switch: bool = field(default=False, init=False)

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every marker's spelling, and whether it must be one id."""
        frame = {marker.spelling: True for marker in (BOS, HEADER, HEADER_END, TURN_END)}
        return MappingProxyType({**frame, CALLS.spelling: self.has_call_tag})

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """The date, where the template would write another."""
        return {} if self.date == self.template_date else {"date_string": self.date}

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """BOS, system turn, tools in the first user turn, messages, generation prompt."""
        system = messages[0].content.strip() if messages[0].role == "system" else None
        body = messages if system is None else messages[1:]
        pieces: list[Piece] = [BOS]
        if self.date is not None:
            environment = "Environment: ipython\n" if tools else ""
            dates = f"Cutting Knowledge Date: December 2023\nToday Date: {self.date}\n\n"
            pieces += _turn("system", [environment + dates + (system or "")])
        elif system is not None:
            pieces += _turn("system", [system])
        if tools:
            first, body = (body[0].content, body[1:]) if body and body[0].role == "user" else ("", body)
            pieces += _turn("user", [_tools_text(tools) + first.strip()])
        return [*pieces, *_conversation(body), *_header("assistant")]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """The end of the sampled turn, messages, generation prompt."""
        return [*([] if end else [TURN_END]), *_conversation(messages), *_header("assistant")]

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn after the generation prompt, with its end marker."""
        return [*_assistant(message), TURN_END]

    def is_query(self, message: Message) -> bool:
        """A user's message."""
        return message.role == "user"

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """Text as pieces. Where the tag of calls has no id, it is read from the text, past JSON objects that start
        it, so that a tag inside a JSON string is harmless."""
        if CALLS.spelling not in spelled or CALLS.spelling not in text:
            return [text]
        at = text.find(CALLS.spelling, max((end for _, end in _objects(text)), default=0))
        return [text] if at < 0 else [text[:at], CALLS, text[at + len(CALLS.spelling) :]]

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message, and whether it holds no marker but one tag of calls."""
        markers = [k for k, piece in enumerate(pieces) if isinstance(piece, Marker)]
        if markers and [pieces[k] for k in markers] != [CALLS]:
            return Message("assistant", spell(pieces)), False
        if markers:
            return _message(spell(pieces[: markers[0]]), spell(pieces[markers[0] + 1 :])), True
        text = spell(pieces)
        return (_message("", text) if _is_call(text) else Message("assistant", text)), True


def _header(role: str) -> list[Piece]:
    return [HEADER, role, HEADER_END, "\n\n"]


def _turn(role: str, body: Sequence[Piece]) -> list[Piece]:
    return [*_header(role), *body, TURN_END]


def _tools_text(tools: Sequence[ToolSpec]) -> str:
    """What the first user message begins with."""
    schemas = "".join(json.dumps(tool_schema(tool), ensure_ascii=False, indent=4) + "\n\n" for tool in tools)
    return (
        "Given the following functions, please respond with a JSON for a function call with its proper arguments that "
        "best answers the given prompt.\n\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
        f"Do not use variables.\n\n{schemas}"
    )


def _conversation(messages: Sequence[Message]) -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        if message.role not in _ROLES:
            known = ", ".join(map(repr, _ROLES))
            raise ValueError(f"a message has role {message.role!r}: expected one of {known}.")
        pieces += _turn(_ROLES[message.role], _body(message))
    return pieces


def _body(message: Message) -> list[Piece]:
    if message.role == "assistant":
        return _assistant(message)
    if message.role == "tool":
        return [json.dumps(message.content, ensure_ascii=False)]
    return [message.content.strip()]


def _assistant(message: Message) -> list[Piece]:
    """The body of an assistant turn."""
    text = message.content.strip()
    calls = [
        write_call(call, arguments="parameters") if isinstance(call, ToolCall) else call.text for call in message.calls
    ]
    return [*([text] if text else []), *([CALLS] if text and calls else []), "; ".join(calls)]


def _is_call(text: str) -> bool:
    """Whether a turn without a tag is one or more calls."""
    start = _skip(text, 0)
    if not text.startswith("{", start):
        return False
    _, end = next(_objects(text), (start, len(text)))
    try:
        return json_members(text[start:end]).keys() >= _MEMBERS
    except (ValueError, RecursionError):
        return all(re.search(f"[\"']{member}[\"']", text[start:end]) for member in _MEMBERS)


def _message(before: str, text: str) -> Message:
    """A message of the text before its calls, and the calls that `text` begins with."""
    spans = list(_objects(text))
    after = _skip(text, spans[-1][1] if spans else 0)
    if text.startswith("{", after) or not spans:
        spans, after = [*spans, (after, len(text))], len(text)
    results = [read_call(text[start:end], arguments="parameters") for start, end in spans]
    return assistant_message("\n".join(part for part in (before, text[after:].strip()) if part), results)


def _objects(text: str) -> Iterator[tuple[int, int]]:
    """Where the JSON objects that `text` begins with lie, up to the first thing that cannot be read as one."""
    start = _skip(text, 0)
    while text.startswith("{", start) and (end := end_of_json(text, start)) > start:
        yield start, end
        start = _skip(text, end)


def _skip(text: str, at: int) -> int:
    match = _GAP.match(text, at)
    return match.end() if match else at


# --- the families ---------------------------------------------------------------------------------

LLAMA3 = Llama3("llama3", template_has_tools=False)

LLAMA3_1 = Llama3("llama3.1", date="26 Jul 2024", template_date="26 Jul 2024")

LLAMA3_2 = Llama3("llama3.2", has_call_tag=True, date="26 Jul 2024")
