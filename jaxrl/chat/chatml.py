r"""ChatML and the families that write it: SmolLM2, Qwen2.5, Qwen3 and its 2507 editions, QwQ, and the byte
tokenizer's own.

Knows how these templates spell a conversation, as pieces of text and markers. Must not know token ids, vocabularies,
sampling or episodes. A family is a row of data (a `ChatML`); what differs between them is its fields. How tools are
described and called is a field too (`CallFormat`): here the Hermes format, in qwen_xml.py that of the later Qwens.

Sources: the chat templates published with SmolLM2-135M-Instruct, Qwen2.5-Instruct, Qwen3, QwQ-32B and
Qwen3-4B-Instruct-2507, and the Hermes format of tool calls that all but the first adopt. Qwen3-4B-Thinking-2507's
differs from Qwen3's in one thing only: its generation prompt opens the thought, and nothing turns that off; it is
compared as Qwen3's text with that prompt. Parity is tested token for token, but for these deliberate differences:

1. Text is text. A special token's spelling inside a message stays ordinary text; templates that are rendered to one
   string and then tokenized let user text and tool results forge markers.
2. Thoughts live in `Message.thinking` only. The templates also look for </think> inside an assistant's content (QwQ's
   nowhere else).
3. thinking="keep" (the default) keeps the thoughts of earlier turns, also in opening messages, also empty blocks. The
   Qwen3 template drops those before the last user message, and empty ones at once, and QwQ's drops every thought as
   soon as a message follows; thinking="strip" does that too.
4. SmolLM2's template knows no tools and would print a "tool" role it was never trained on: here it gets the Hermes
   block in its system message, calls in <tool_call> (as text: its vocabulary has no such tokens) and results in
   <tool_response>, like Qwen. Where a marker is text, text can forge it: a tool's result that spells </tool_response>
   looks like the end of the result. What the model is read to have called is safe: only its own turn is read.
5. Arguments of a call are written as their JSON text stands. Qwen2.5's and QwQ's templates re-serialise them (the same
   for text that json.dumps wrote). A tool's name is JSON-escaped.
6. A sampled turn is closed by one end marker and a newline, whatever the model sampled before it; a template would
   tidy the turn (newlines around thoughts, white space in JSON). That is what token in, token out means.
7. Calls that could not be read are written back as they were, in their block.
8. In a context rewritten by thinking="strip", a token that spells the newlines after </think> together with other
   white space stays, and so keeps those newlines.
9. A token never spans the generation prompt and a sampled turn. SmolLM2's template merges "assistant\n" with the first
   spaces of a turn that starts with some.
   The 2507 thinking edition and QwQ likewise, where newlines that start a thought follow the prompt's own.
10. The byte tokenizer's template has no strip variant; thinking="strip" follows Qwen3's rule there.
11. In circulation is a QwQ template that closes the thought in its prompt unless `enable_thinking` is true. It is read
    with that; the maker's own template has no such switch, and so neither has the row.
12. QwQ's template leaves an empty line where an earlier turn was a thought and a call without text. Here nothing stays.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell, unknown_role
from jaxrl.chat.tool_calls import assistant_message, end_of_json, read_call, tool_schema, write_call
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
class CallFormat:
    """How a family describes tools, and how its calls are written between <tool_call> and </tool_call>.

    tools: the body of the system turn, of the system text (None: there is none) and the tools. write: a call as the
    text of a block. read: the text of a block as a call. gap: what stands between a turn's text and its first call.
    after_results: what stands between the last result and the end of its turn.
    """

    tools: Callable[[str | None, Sequence[ToolSpec]], list[Piece]]
    write: Callable[[ToolCall], str]
    read: Callable[[str], ToolCall | MalformedToolCall]
    gap: str = "\n"
    after_results: str = ""


def as_it_stands(message: Message) -> str:
    """The content."""
    return message.content


def _without_first_newlines(message: Message) -> str:
    """The content; the assistant's without the newlines it starts with."""
    return message.content.lstrip("\n") if message.role == "assistant" else message.content


def _hermes_tools(system: str | None, tools: Sequence[ToolSpec]) -> list[Piece]:
    """The Hermes description of tools: one JSON line each, then how to call them."""
    lines = "".join("\n" + json.dumps(tool_schema(tool), ensure_ascii=False) for tool in tools)
    return [
        system + "\n\n" if system is not None else "",
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


def _hermes_after_any_system(system: str | None, tools: Sequence[ToolSpec]) -> list[Piece]:
    """The same, where a missing system text counts as an empty one."""
    return _hermes_tools(system or "", tools)


def _hermes_call(call: ToolCall) -> str:
    return f"\n{write_call(call)}\n"


HERMES = CallFormat(_hermes_tools, _hermes_call, read_call)


@dataclass(frozen=True)
class ChatML:
    """One ChatML family.

    required: every marker, and whether the vocabulary must have an id for it.
    default_system: the system prompt the template inserts when the first message is not one.
    thoughts: how turns open with a think block, if they may.
    has_thinking_switch: the template has `enable_thinking`.
    template_has_tools: the published template writes tools (else see difference 4).
    calls: how tools are described and called.
    text: a message's content as the template writes it.
    thought_space: what is stripped around a thought (None: all white space).
    empty_blocks: which turns after the last query get an empty block when they have no thoughts.
    forgets_before: what the template drops earlier thoughts before: a query, or any message.
    """

    name: str
    required: tuple[tuple[str, bool], ...]
    default_system: str | None = None
    thoughts: Thoughts | None = None
    has_thinking_switch: bool = False
    template_has_tools: bool = True
    calls: CallFormat = HERMES
    text: Callable[[Message], str] = as_it_stands
    thought_space: str | None = "\n"
    empty_blocks: Literal["never", "last", "always"] = "never"
    forgets_before: Literal["query", "any"] = "query"
    stops: tuple[str, ...] = field(default=(TURN_END.spelling, "<|endoftext|>"))

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every marker's spelling, and whether it must be one id."""
        return MappingProxyType(dict(self.required))

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Some templates think only when they are told to."""
        return {"enable_thinking": True} if self.thoughts else {}

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """System block, messages, generation prompt."""
        has_system = messages[0].role == "system"
        system = self.text(messages[0]) if has_system else self.default_system
        pieces: list[Piece] = []
        if tools:
            pieces = _turn("system", self.calls.tools(system, tools))
        elif system is not None:
            pieces = _turn("system", [system])
        thoughts = self._thoughts(messages, style, self._last_query(messages))
        body = list(zip(messages, thoughts, strict=True))[has_system:]
        return [*pieces, *self._conversation(body), *self._prompt(style)]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """The end of the sampled turn, messages, generation prompt."""
        queries = [i for i, m in enumerate(messages) if self.is_query(m)]
        thoughts = self._thoughts(messages, style, queries[-1] if queries else -1)
        closing: list[Piece] = ["\n"] if end else [TURN_END, "\n"]
        return [*closing, *self._conversation(list(zip(messages, thoughts, strict=True))), *self._prompt(style)]

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn after the generation prompt, with its end marker."""
        thought = message.thinking if self.thoughts and style.enable_thinking else None
        if thought is None and style.enable_thinking and (self._begun(style) or self.empty_blocks != "never"):
            thought = ""  # the template gives a final turn without thoughts an empty block
        written = self._assistant(message, thought)
        return [*written[len(_BEGINNING) if self._begun(style) else 0 :], TURN_END]

    def is_query(self, message: Message) -> bool:
        """A user's message that is not a tool's answer in disguise (the rule of Qwen3's template), or any message."""
        text = self.text(message)
        answer = text.startswith(RESULT.spelling) and text.endswith(RESULT_END.spelling)
        return self.forgets_before == "any" or (message.role == "user" and not answer)

    def _last_query(self, messages: Sequence[Message]) -> int:
        """Index of the last query; the template takes the last message when there is none."""
        return max((i for i, m in enumerate(messages) if self.is_query(m)), default=len(messages) - 1)

    def _thoughts(self, messages: Sequence[Message], style: Style, last_query: int) -> list[str | None]:
        """What each message's think block holds; None where none is written."""
        return [self._thought(m, style, i - last_query, i == len(messages) - 1) for i, m in enumerate(messages)]

    def _thought(self, message: Message, style: Style, after_query: int, last: bool) -> str | None:
        if not self.thoughts or message.role != "assistant":
            return None
        if after_query > 0 and (self.empty_blocks == "always" or (last and self.empty_blocks == "last")):
            return message.thinking or ""
        if style.thinking == "keep":
            return message.thinking
        return message.thinking or None if after_query > 0 else None

    def _begun(self, style: Style) -> bool:
        """Whether the generation prompt opens the thought."""
        return self.thoughts is not None and self.thoughts.in_prompt and style.enable_thinking

    def _prompt(self, style: Style) -> list[Piece]:
        empty = [THINK, "\n\n", THINK_END, "\n\n"] if self.has_thinking_switch and not style.enable_thinking else []
        return [TURN, "assistant\n", *(_BEGINNING if self._begun(style) else empty)]

    def _conversation(self, messages: Sequence[tuple[Message, str | None]]) -> list[Piece]:
        """Messages, each with its thoughts; tool results in a row share one user turn."""
        pieces: list[Piece] = []
        for role, run in groupby(messages, key=lambda pair: pair[0].role):
            if role == "tool":
                pieces += self._results([message for message, _ in run])
            elif role == "assistant":
                for message, thought in run:
                    pieces += _turn(role, self._assistant(message, thought))
            elif role in ("system", "user"):
                for message, _ in run:
                    pieces += _turn(role, [self.text(message)])
            else:
                raise unknown_role(role)
        return pieces

    def _results(self, messages: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = [TURN, "user"]
        for message in messages:
            pieces += ["\n", RESULT, f"\n{self.text(message)}\n", RESULT_END]
        return [*pieces, self.calls.after_results, TURN_END, "\n"]

    def _assistant(self, message: Message, thought: str | None) -> list[Piece]:
        """The body of an assistant turn."""
        content = self.text(message)
        pieces: list[Piece] = [content]
        if thought is not None:
            pieces = [*_BEGINNING, thought.strip(self.thought_space) + "\n", THINK_END, "\n\n" + content.lstrip("\n")]
        blocks = [self.calls.write(call) if isinstance(call, ToolCall) else call.text for call in message.calls]
        for k, block in enumerate(blocks):
            gap = "\n" if k else self.calls.gap if content else ""
            pieces += [gap, CALL, block, CALL_END]
        return pieces

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
        inside: Marker | None = THINK if self._begun(style) else None
        block: list[str] = []
        for piece in pieces:
            if isinstance(piece, str):
                (block if inside else after if results else before).append(piece)
            elif inside and piece == _BLOCKS[inside]:
                if inside == CALL:
                    results.append(self.calls.read("".join(block)))
                else:
                    thinking = "".join(block).strip(self.thought_space)
                inside, block = None, []
            elif piece == CALL and not inside:
                inside = piece
            elif piece == THINK and not inside and thinking is None and not results and not "".join(before).strip():
                inside = piece
                before.clear()
            else:
                return Message("assistant", spell(pieces)), False
        if inside == CALL:
            after.append(CALL.spelling + "".join(block))
        elif inside == THINK:
            thinking = "".join(block).strip(self.thought_space)
        lead = "".join(before)
        lead = lead.lstrip("\n") if thinking is not None else lead
        lead = lead.removesuffix(self.calls.gap) if results else lead
        rest = [text.strip() for text in after if text.strip()]
        message = assistant_message("\n".join([lead, *rest] if lead else rest), results, thinking)
        return replace(message, content=self.text(message)), inside is None


_BEGINNING: tuple[Piece, ...] = (THINK, "\n")
"""How a thought begins, in a turn or in the generation prompt."""


def _turn(role: str, body: Sequence[Piece]) -> list[Piece]:
    return [TURN, role + "\n", *body, TURN_END, "\n"]


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
    empty_blocks="last",
)

QWEN3_INSTRUCT = ChatML("qwen3_instruct", (*_FRAME.items(), *_tool_markers(True, True).items()))

QWEN3_THINKING = replace(
    QWEN3,
    name="qwen3_thinking",
    thoughts=Thoughts((THINK,), (THINK_END,), forgets_empty=True, in_prompt=True),
    has_thinking_switch=False,
)

QWQ = ChatML(
    "qwq",
    QWEN3.required,
    thoughts=Thoughts((THINK,), (THINK_END,), in_prompt=True),
    calls=replace(HERMES, tools=_hermes_after_any_system),
    text=_without_first_newlines,
    forgets_before="any",
)
