r"""GLM-4.5 and later: turns that end with the marker of whoever speaks next.

Knows how the published templates spell a conversation, as pieces of text and markers. Must not know token ids,
vocabularies, sampling or episodes. The rows: glm4.5 (also GLM-4.5-Air and GLM-4.6, whose templates write the same) and
glm4.7 (also GLM-4.7-Flash: no newlines, and the prompt opens the thought).

A role's marker opens its message and nothing closes it. A sampled turn therefore ends by sampling <|user|>, or
<|observation|> when it has called tools; those are its stops, together with <|endoftext|>. With glm4.5:

    <|assistant|>                                        the prompt
    <think>THOUGHTS</think>                              what is sampled, from the newline after <|assistant|> on
    TEXT
    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call><|observation|>

No tokenizer of the family was at hand, so parity is tested on text. Its vocabulary has each of these as one id, and all
of them must be: [gMASK], <sop>, <|system|>, <|user|>, <|assistant|>, <|observation|>, <think>, </think>, <tool_call>,
</tool_call>, <tool_response>, </tool_response>, <arg_key>, </arg_key>, <arg_value>, </arg_value>, and for glm4.5
/nothink. <|endoftext|> is one too.

Values of arguments are not JSON: a string stands as it is, everything else as JSON. Reading them back takes a rule:
what parses as JSON and is not a string is JSON, the rest is a string. So a string such as 12, true or [1] comes back as
a number, a boolean or an array. Nothing in the format tells them apart; tools check the types of their arguments.

Sources: the chat templates published with GLM-4.5, GLM-4.6 and GLM-4.7-Flash; the stops are those of their generation
configs. Deliberate differences:

1. Text is text. A special token's spelling inside a message stays ordinary text. With thinking off, a user's message
   that ends with the text /nothink has it replaced by the marker, which spells the same.
2. Thoughts live in `Message.thinking` only. The templates also look for </think> inside an assistant's content.
3. thinking="keep" (the default) keeps the thoughts of earlier turns, also empty ones where that shows (glm4.7);
   thinking="strip" drops those before the last user message, as the templates do.
4. When the environment answers in another role than the stop announced (a user's message after <|observation|>, a
   system message after <|user|>), the sampled marker stays as an empty message and the answer's own marker follows.
5. The thoughts and text of opening messages are trimmed as the templates do; a sampled turn stays as it was sampled.
6. Arguments that are not strings are written as their JSON text stands. Arguments that are no JSON object are refused.
7. Calls that could not be read are written back as they were, in their block, but the markers of their arguments become
   text.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any

from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell, unknown_role
from jaxrl.chat.tool_calls import assistant_message, check_arguments, json_members, json_value, tool_schema
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

MASK, BEGIN = Marker("[gMASK]"), Marker("<sop>")
SYSTEM, USER = Marker("<|system|>"), Marker("<|user|>")
ASSISTANT, OBSERVATION = Marker("<|assistant|>"), Marker("<|observation|>")
THINK, THINK_END, NOTHINK = Marker("<think>"), Marker("</think>"), Marker("/nothink")
CALL, CALL_END = Marker("<tool_call>"), Marker("</tool_call>")
RESULT, RESULT_END = Marker("<tool_response>"), Marker("</tool_response>")
KEY, KEY_END = Marker("<arg_key>"), Marker("</arg_key>")
VALUE, VALUE_END = Marker("<arg_value>"), Marker("</arg_value>")

_ARGUMENT = (KEY, KEY_END, VALUE, VALUE_END)
_ROLES = {"system": SYSTEM, "user": USER}
_CLOSES = {THINK: THINK_END, CALL: CALL_END}
_MAY_HOLD = {THINK: frozenset(), CALL: frozenset(_ARGUMENT)}
_COMMON = (
    *(MASK, BEGIN, SYSTEM, USER, ASSISTANT, OBSERVATION),
    *(THINK, THINK_END, CALL, CALL_END, RESULT, RESULT_END, *_ARGUMENT),
)
_NAME = re.compile(r"[^\s(){}<>\"]+")
_HOW = "Write <tool_call>NAME, <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument, then </tool_call>."


@dataclass(frozen=True)
class GLM:
    """One row of the family.

    newline: what stands after a role's marker and between the parts of a turn. nothink: whether thinking is also
    turned off by a marker at the end of each user message.
    """

    name: str
    newline: str
    thoughts: Thoughts
    nothink: bool = False
    has_thinking_switch: bool = field(default=True, init=False)
    template_has_tools: bool = field(default=True, init=False)
    stops: tuple[str, ...] = field(default=(USER.spelling, OBSERVATION.spelling, "<|endoftext|>"))

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every marker's spelling; all must be single ids."""
        return MappingProxyType({m.spelling: True for m in (*_COMMON, *([NOTHINK] if self.nothink else []))})

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """None are needed."""
        return {}

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """Two markers, a system block for tools, messages, generation prompt."""
        block = self._tools_block(tools) if tools else []
        return [MASK, BEGIN, *block, *self._conversation(messages, style), *self._prompt(style)]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """Messages and generation prompt, without the first role's marker where the turn ended by sampling it."""
        pieces = [*self._conversation(messages, style), *self._prompt(style)]
        return pieces[1:] if pieces[0] == end else pieces

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn after the generation prompt, with the marker of who speaks next."""
        thought: list[Piece] = []
        if style.enable_thinking:
            opened = self.thoughts.in_prompt
            thought = [*([] if opened else [self.newline, THINK]), (message.thinking or "").strip(), THINK_END]
        return [*thought, *self._body(message), OBSERVATION if message.tool_calls else USER]

    def is_query(self, message: Message) -> bool:
        """A user's message."""
        return message.role == "user"

    def _prompt(self, style: Style) -> list[Piece]:
        if not style.enable_thinking:
            return [ASSISTANT, self.newline, *self.thoughts.left]
        return [ASSISTANT, *([THINK] if self.thoughts.in_prompt else [])]

    def _conversation(self, messages: Sequence[Message], style: Style) -> list[Piece]:
        """Messages; tool results in a row share one observation."""
        last_query = max((i for i, m in enumerate(messages) if self.is_query(m)), default=-1)
        pieces: list[Piece] = []
        for role, run in groupby(enumerate(messages), key=lambda pair: pair[1].role):
            if role == "tool":
                pieces += [OBSERVATION, *(p for _, message in run for p in self._result(message))]
            elif role == "assistant":
                for i, message in run:
                    thought = self._thought(message, style, i > last_query)
                    pieces += [ASSISTANT, self.newline, *thought, *self._body(message)]
            elif role in _ROLES:
                for _, message in run:
                    pieces += [_ROLES[role], self.newline, *self._said(message, style)]
            else:
                raise unknown_role(role)
        return pieces

    def _said(self, message: Message, style: Style) -> list[Piece]:
        """What a user or system message says."""
        if message.role == "user" and self.nothink and not style.enable_thinking:
            return [message.content.removesuffix(NOTHINK.spelling), NOTHINK]
        return [message.content]

    def _thought(self, message: Message, style: Style, after_query: bool) -> list[Piece]:
        kept = message.thinking is not None if style.thinking == "keep" else message.thinking and after_query
        return [THINK, (message.thinking or "").strip(), THINK_END] if kept else [*self.thoughts.left]

    def _body(self, message: Message) -> list[Piece]:
        """Text and calls of an assistant turn."""
        text = message.content.strip()
        pieces: list[Piece] = [self.newline + text] if text else []
        for call in message.calls:
            body = self._call(call) if isinstance(call, ToolCall) else [call.text]
            pieces += [self.newline, CALL, *body, CALL_END]
        return pieces

    def _call(self, call: ToolCall) -> list[Piece]:
        pieces: list[Piece] = [call.name + self.newline]
        for key, value in _arguments(call):
            pieces += [KEY, key, KEY_END, self.newline, VALUE, value, VALUE_END, self.newline]
        return pieces

    def _result(self, message: Message) -> list[Piece]:
        return [self.newline, RESULT, f"{self.newline}{message.content}{self.newline}", RESULT_END]

    def _tools_block(self, tools: Sequence[ToolSpec]) -> list[Piece]:
        """One JSON line for each tool, then how to call them."""
        lines = "".join(json.dumps(tool_schema(tool), ensure_ascii=False) + "\n" for tool in tools)
        example: list[Piece] = [CALL, "{function-name}" + self.newline]
        for k in (1, 2):
            example += [KEY, f"{{arg-key-{k}}}", KEY_END, self.newline]
            example += [VALUE, f"{{arg-value-{k}}}", VALUE_END, self.newline]
        return [
            SYSTEM,
            "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{lines}</tools>\n\n"
            "For each function call, output the function name and arguments within the following XML format:\n",
            *example,
            f"...{self.newline}",
            CALL_END,
        ]

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """Text as pieces: every marker is an id, so text has none."""
        return [text]

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message, and whether blocks are opened and closed properly: thoughts first, then text, then calls.

        What is wrong between the markers of a call's arguments concerns that call only.
        """
        begun = self.thoughts.in_prompt and style.enable_thinking
        turn: list[Piece] = [THINK, *pieces] if begun else [*pieces]
        before: list[str] = []  # text before the first call
        after: list[str] = []
        results: list[ToolCall | MalformedToolCall] = []
        thinking: str | None = None
        at, intact = 0, True
        while at < len(turn):
            piece = turn[at]
            if isinstance(piece, str):
                (after if results else before).append(piece)
                at += 1
                continue
            first = thinking is None and not results and not "".join(before).strip()
            end = _end_of_block(turn, at) if piece == CALL or (piece == THINK and first) else at
            intact = end < len(turn)
            if intact and turn[end] != _CLOSES.get(piece):
                return Message("assistant", spell(pieces)), False
            body = turn[at + 1 : end]
            if piece == THINK:
                thinking = spell(body).strip()
                before.clear()
            elif intact:
                results.append(_read_call(body))
            else:
                after.append(spell([CALL, *body]))
            at = end + 1
        texts = ["".join(before).strip(), *(text.strip() for text in after)]
        return assistant_message("\n".join(text for text in texts if text), results, thinking), intact


def _end_of_block(pieces: Sequence[Piece], start: int) -> int:
    """Index of the first marker that cannot stand inside the block opened at `start`; the length when there is none."""
    opening = pieces[start]
    assert isinstance(opening, Marker)
    at = start + 1
    while at < len(pieces) and (isinstance(pieces[at], str) or pieces[at] in _MAY_HOLD[opening]):
        at += 1
    return at


def _arguments(call: ToolCall) -> Iterable[tuple[str, str]]:
    """Name and text of each argument. Raises ValueError unless they are a JSON object."""
    check_arguments(call)
    for key, (value, text) in json_members(call.arguments).items():
        yield key, value if isinstance(value, str) else text


def _read_call(body: Sequence[Piece]) -> ToolCall | MalformedToolCall:
    """The call in a block: a name, then keys and values."""
    parts = [""]  # the texts before the first marker and after each one
    for piece in body:
        if isinstance(piece, str):
            parts[-1] += piece
            continue
        expected = _ARGUMENT[(len(parts) - 1) % 4]
        if piece != expected:
            return _unread(body, f"{piece.spelling} stands where {expected.spelling} must")
        parts.append("")
    name, keys = parts[0].strip(), [key.strip() for key in parts[1::4]]
    if len(parts) % 4 != 1:
        return _unread(body, f"{_ARGUMENT[(len(parts) - 1) % 4].spelling} is missing at its end")
    if any(text.strip() for text in (*parts[2::4], *parts[4::4])):
        return _unread(body, "there is text between its arguments")
    if not _NAME.fullmatch(name):
        return _unread(body, f"{name[:40]!r} is no tool's name" if name else "the tool's name is missing")
    if twice := [key for key, times in Counter(keys).items() if times > 1]:
        return _unread(body, f"the argument {twice[0][:40]!r} is given twice")
    members = (f"{_json(key)}: {json_value(value)}" for key, value in zip(keys, parts[3::4], strict=True))
    return ToolCall(name, "{" + ", ".join(members) + "}")


def _unread(body: Sequence[Piece], problem: str) -> MalformedToolCall:
    return MalformedToolCall(spell(body), f"Tool call not read: {problem}. {_HOW}")


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- the rows -------------------------------------------------------------------------------------

GLM4_5 = GLM("glm4.5", "\n", Thoughts((THINK,), (THINK_END,), left=(THINK, THINK_END), newlines=False), nothink=True)

GLM4_7 = GLM(
    "glm4.7",
    "",
    Thoughts((THINK,), (THINK_END,), left=(THINK_END,), newlines=False, forgets_empty=True, in_prompt=True),
)
