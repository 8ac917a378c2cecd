r"""ChatML and the families that write it: SmolLM2, Qwen2.5, Qwen3, and the byte tokenizer's own.

Knows how these templates spell a conversation, as pieces of text and markers. Must not know token ids, vocabularies,
sampling or episodes. A family is a row of data (a `ChatML`); what differs between them is its fields.

Sources: the chat templates published with SmolLM2-135M-Instruct, Qwen2.5-Instruct and Qwen3, and the Hermes format of
tool calls that the last two adopt. Parity is tested token for token, but for these deliberate differences:

1. Text is text. A special token's spelling inside a message stays ordinary text; templates that are rendered to one
   string and then tokenized let user text and tool results forge markers.
2. Thoughts live in `Message.thinking` only. Qwen3's template also looks for </think> inside an assistant's content.
3. thinking="keep" (the default) keeps the thoughts of earlier turns, also in opening messages, also empty blocks. The
   Qwen3 template drops those before the last user message, and empty ones at once; thinking="strip" does that too.
4. SmolLM2's template knows no tools and would print a "tool" role it was never trained on: here it gets the Hermes
   block in its system message, calls in <tool_call> (as text: its vocabulary has no such tokens) and results in
   <tool_response>, like Qwen. Where a marker is text, text can forge it: a tool's result that spells </tool_response>
   looks like the end of the result. What the model is read to have called is safe: only its own turn is read.
5. Arguments of a call are written as their JSON text stands. Qwen2.5's template re-serialises them (the same for text
   that json.dumps wrote). A tool's name is JSON-escaped.
6. A sampled turn is closed by one end marker and a newline, whatever the model sampled before it; a template would
   tidy the turn (newlines around thoughts, white space in JSON). That is what token in, token out means.
7. Calls that could not be read are written back as they were, in their block, after those that could.
8. In a context rewritten by thinking="strip", a token that spells the newlines after </think> together with other
   white space stays, and so keeps those newlines.
9. A token never spans the generation prompt and a sampled turn. SmolLM2's template merges "assistant\n" with the first
   spaces of a turn that starts with some.
10. The byte tokenizer's template has no strip variant; thinking="strip" follows Qwen3's rule there.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any

from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell
from jaxrl.chat.tool_calls import end_of_json, read_call, tool_schema
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

TURN, TURN_END = Marker("<|im_start|>"), Marker("<|im_end|>")
THINK, THINK_END = Marker("<think>"), Marker("</think>")
CALL, CALL_END = Marker("<tool_call>"), Marker("</tool_call>")
RESULT, RESULT_END = Marker("<tool_response>"), Marker("</tool_response>")

_SPELLED_CALL = re.compile(f"{CALL.spelling}|{CALL_END.spelling}")
_BLOCKS = {THINK: THINK_END, CALL: CALL_END}
_FRAME = {TURN.spelling: True, TURN_END.spelling: True}
_THOUGHTS = {THINK.spelling: True, THINK_END.spelling: True}


def _tool_markers(calls: bool, results: bool) -> dict[str, bool]:
    """The tool markers, and whether each pair must be single ids."""
    return {CALL.spelling: calls, CALL_END.spelling: calls, RESULT.spelling: results, RESULT_END.spelling: results}


@dataclass(frozen=True)
class ChatML:
    """One ChatML family.

    required: every marker, and whether the vocabulary must have an id for it.
    default_system: the system prompt the template inserts when the first message is not one.
    thoughts: how turns open with a think block, if they may.
    has_thinking_switch: the template has `enable_thinking`, and gives a final turn without thoughts an empty block.
    template_has_tools: the published template writes tools (else see difference 4).
    """

    name: str
    required: tuple[tuple[str, bool], ...]
    default_system: str | None = None
    thoughts: Thoughts | None = None
    has_thinking_switch: bool = False
    template_has_tools: bool = True
    stops: tuple[str, ...] = field(default=(TURN_END.spelling, "<|endoftext|>"))

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every marker's spelling, and whether it must be one id."""
        return MappingProxyType(dict(self.required))

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """None are needed."""
        return {}

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """System block, messages, generation prompt."""
        has_system = messages[0].role == "system"
        system = messages[0].content if has_system else self.default_system
        pieces: list[Piece] = []
        if tools:
            pieces = _turn("system", [*([system + "\n\n"] if system is not None else []), *_tools_block(tools)])
        elif system is not None:
            pieces = _turn("system", [system])
        thoughts = self._thoughts(messages, style, self._last_query(messages))
        body = list(zip(messages, thoughts, strict=True))[has_system:]
        return [*pieces, *_conversation(body), *self._prompt(style)]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """The end of the sampled turn, messages, generation prompt."""
        queries = [i for i, m in enumerate(messages) if self.is_query(m)]
        thoughts = self._thoughts(messages, style, queries[-1] if queries else -1)
        closing: list[Piece] = ["\n"] if end else [TURN_END, "\n"]
        return [*closing, *_conversation(list(zip(messages, thoughts, strict=True))), *self._prompt(style)]

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn after the generation prompt, with its end marker."""
        thought = message.thinking if self.thoughts and style.enable_thinking else None
        if thought is None and self.has_thinking_switch and style.enable_thinking:
            thought = ""  # the template gives a final turn without thoughts an empty block
        return [*_assistant(message, thought), TURN_END]

    def is_query(self, message: Message) -> bool:
        """A user's message that is not a tool's answer in disguise (the rule of Qwen3's template)."""
        answer = message.content.startswith(RESULT.spelling) and message.content.endswith(RESULT_END.spelling)
        return message.role == "user" and not answer

    def _last_query(self, messages: Sequence[Message]) -> int:
        """Index of the last query; the template takes the last message when there is none."""
        return max((i for i, m in enumerate(messages) if self.is_query(m)), default=len(messages) - 1)

    def _thoughts(self, messages: Sequence[Message], style: Style, last_query: int) -> list[str | None]:
        """What each message's think block holds; None where none is written."""
        return [self._thought(m, style, i - last_query, i == len(messages) - 1) for i, m in enumerate(messages)]

    def _thought(self, message: Message, style: Style, after_query: int, last: bool) -> str | None:
        if not self.thoughts or message.role != "assistant":
            return None
        if last and after_query > 0 and self.has_thinking_switch:
            return message.thinking or ""
        if style.thinking == "keep":
            return message.thinking
        return message.thinking or None if after_query > 0 else None

    def _prompt(self, style: Style) -> list[Piece]:
        empty = [THINK, "\n\n", THINK_END, "\n\n"] if self.has_thinking_switch and not style.enable_thinking else []
        return [TURN, "assistant\n", *empty]

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """Text as pieces. Where tool-call markers have no ids they are read from the text, past the JSON between them,
        so that a marker inside a JSON string is harmless."""
        return _scan_calls(text) if CALL.spelling in spelled else [text]

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message, and whether blocks are opened and closed properly: thoughts first, then text, then calls."""
        before: list[str] = []  # text before the first call
        after: list[str] = []
        results: list[ToolCall | MalformedToolCall] = []
        thinking: str | None = None
        inside: Marker | None = None
        block = ""
        for piece in pieces:
            if isinstance(piece, str):
                if inside:
                    block += piece
                else:
                    (after if results else before).append(piece)
            elif inside and piece == _BLOCKS[inside]:
                if inside == CALL:
                    results.append(read_call(block))
                else:
                    thinking = block.strip("\n")
                inside, block = None, ""
            elif piece == CALL and not inside:
                inside = piece
            elif piece == THINK and not inside and thinking is None and not results and not "".join(before).strip():
                inside = piece
                before.clear()
            else:
                return Message("assistant", spell(pieces)), False
        if inside == CALL:
            after.append(CALL.spelling + block)
        elif inside == THINK:
            thinking = block.strip("\n")
        lead = "".join(before)
        lead = lead.lstrip("\n") if thinking is not None else lead
        lead = lead.removesuffix("\n") if results else lead
        rest = [text.strip() for text in after if text.strip()]
        message = Message(
            "assistant",
            "\n".join([lead, *rest] if lead else rest),
            thinking=thinking,
            tool_calls=tuple(r for r in results if isinstance(r, ToolCall)),
            malformed_calls=tuple(r for r in results if isinstance(r, MalformedToolCall)),
        )
        return message, inside is None


def _turn(role: str, body: Sequence[Piece]) -> list[Piece]:
    return [TURN, role + "\n", *body, TURN_END, "\n"]


def _tools_block(tools: Sequence[ToolSpec]) -> list[Piece]:
    """The Hermes description of tools: one JSON line each, then how to call them."""
    lines = "".join("\n" + json.dumps(tool_schema(tool), ensure_ascii=False) for tool in tools)
    return [
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{lines}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within ",
        CALL,
        CALL_END,
        " XML tags:\n",
        CALL,
        '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
        CALL_END,
    ]


def _conversation(messages: Sequence[tuple[Message, str | None]]) -> list[Piece]:
    """Messages, each with its thoughts; tool results in a row share one user turn."""
    pieces: list[Piece] = []
    for role, run in groupby(messages, key=lambda pair: pair[0].role):
        if role == "tool":
            pieces += _results([message for message, _ in run])
        elif role == "assistant":
            for message, thought in run:
                pieces += _turn(role, _assistant(message, thought))
        elif role in ("system", "user"):
            for message, _ in run:
                pieces += _turn(role, [message.content])
        else:
            raise ValueError(f"a message has role {role!r}: expected 'system', 'user', 'assistant' or 'tool'.")
    return pieces


def _results(messages: Sequence[Message]) -> list[Piece]:
    pieces: list[Piece] = [TURN, "user"]
    for message in messages:
        pieces += ["\n", RESULT, f"\n{message.content}\n", RESULT_END]
    return [*pieces, TURN_END, "\n"]


def _assistant(message: Message, thought: str | None) -> list[Piece]:
    """The body of an assistant turn."""
    pieces: list[Piece] = [message.content]
    if thought is not None:
        text = thought.strip("\n")
        pieces = [THINK, f"\n{text}\n", THINK_END, "\n\n" + message.content.lstrip("\n")]
    blocks = [f"\n{_call_text(call)}\n" for call in message.tool_calls] + [bad.text for bad in message.malformed_calls]
    for k, block in enumerate(blocks):
        pieces += [*(["\n"] if message.content or k else []), CALL, block, CALL_END]
    return pieces


def _call_text(call: ToolCall) -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}'


def _scan_calls(text: str) -> list[Piece]:
    """Split text at spelled tool-call markers, skipping those inside the JSON of a block."""
    pieces: list[Piece] = []
    at = 0
    while (start := text.find(CALL.spelling, at)) >= 0:
        pieces += [*_split_ends(text[at:start]), CALL]
        body = start + len(CALL.spelling)
        mark = _SPELLED_CALL.search(text, end_of_json(text, body))
        if mark is None:
            return [*pieces, text[body:]]
        pieces.append(text[body : mark.start()])
        at = mark.end()
        if mark.group() == CALL.spelling:  # a block inside a block: broken, whatever follows
            return [*pieces, CALL, text[at:]]
        pieces.append(CALL_END)
    return [*pieces, *_split_ends(text[at:])]


def _split_ends(text: str) -> list[Piece]:
    """Text outside any block: closing markers in it have no partner."""
    first, *rest = text.split(CALL_END.spelling)
    pieces: list[Piece] = [first]
    for part in rest:
        pieces += [CALL_END, part]
    return pieces


# --- the families ---------------------------------------------------------------------------------

CHATML = ChatML(
    "chatml",
    (*_FRAME.items(), *_THOUGHTS.items(), *_tool_markers(True, True).items()),
    thoughts=Thoughts((THINK,), (THINK_END,), template="keep", forgets_empty=True),
)

SMOLLM2 = ChatML(
    "smollm2",
    (*_FRAME.items(), *_tool_markers(False, False).items()),
    default_system="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    template_has_tools=False,
)

QWEN2_5 = ChatML(
    "qwen2.5",
    (*_FRAME.items(), *_tool_markers(True, False).items()),
    default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
)

QWEN3 = ChatML(
    "qwen3",
    (*_FRAME.items(), *_THOUGHTS.items(), *_tool_markers(True, True).items()),
    thoughts=Thoughts((THINK,), (THINK_END,), forgets_empty=True),
    has_thinking_switch=True,
)
