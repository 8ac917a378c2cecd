"""DeepSeek's families: V3, R1 (and its distills), V3.1.

Knows how they spell a conversation, as pieces of text and markers. Must not know token ids, vocabularies, sampling or
episodes. A family is a row of data (a `DeepSeek`); how it describes tools and writes calls is a `Calls`.

Sources: the chat templates published with DeepSeek-V3, V3-0324, R1, R1-Distill and V3.1; the model card of V3.1, which
gives its prompts and its description of tools; the card of V2.5, which gives the description of tools, calls and
results for the format that V3 and R1 kept. Where a collected copy of a template was edited (V3.1's writes
<think></think> for </think>, R1's ends users' turns), the makers' own text counts.

<think> and </think> are single ids in the vocabularies of R1, its distills and V3.1, and placeholders in V3's. The
distills have Llama's and Qwen's vocabularies, with DeepSeek's frame and thoughts but without its tool markers: these
are ids where the vocabulary has them, else text.

Deliberate differences from the templates:

1. Text is text: a special token's spelling inside a message stays ordinary text.
2. No template describes tools. Here the system prompt ends with the cards' description: V3.1's as it stands; for V3
   and R1 V2.5's, and after it how to write a call, which no card of theirs says.
3. V3's and R1's first template has bugs, which V3-0324's mended: it closes a turn's calls after the second of several
   and never if there is one, drops calls beside text, and opens the calls and results of the first turn only. Here
   every turn is framed as V3-0324 does it, and results are closed also where a user's message follows.
4. There is no <｜Assistant｜> after results: the makers agree on that in all their templates. R1's and V3.1's open no
   thought there either, so a turn might begin inside a thought or not; R1 should always begin inside one, says its
   card, and V3.2 does. So here results are followed by <think> where a user's message would be.
5. A prompt ends with <｜Assistant｜> also when no user has spoken yet. V3.1's template forgets it.
6. Every system message of an opening stands at its beginning, as in the templates of V3 and V3.1 (R1's keeps the last
   alone). One that comes later in an episode is written where it comes, as bare as the first.
7. Thoughts live in `Message.thinking` only, and thinking="keep" (the default) keeps them. The templates never write
   any: they drop what an assistant's content has up to </think>. thinking="strip" does so as soon as anything
   follows, and drops the newlines after R1's </think> too.
8. A demonstration without thoughts closes the thought that its prompt opened at once.
9. Arguments of a call are written as their JSON text stands; calls that could not be read are written back as they
   were.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

from jaxrl.chat.call_section import Frame, malformed_block, read_turn
from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell, unknown_role
from jaxrl.chat.tool_calls import end_of_json, read_arguments
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

BEGIN, END = Marker("<｜begin▁of▁sentence｜>"), Marker("<｜end▁of▁sentence｜>")
USER, ASSISTANT = Marker("<｜User｜>"), Marker("<｜Assistant｜>")
THINK, THINK_END = Marker("<think>"), Marker("</think>")
CALLS, CALLS_END = Marker("<｜tool▁calls▁begin｜>"), Marker("<｜tool▁calls▁end｜>")
CALL, SEP, CALL_END = Marker("<｜tool▁call▁begin｜>"), Marker("<｜tool▁sep｜>"), Marker("<｜tool▁call▁end｜>")
OUTPUTS, OUTPUTS_END = Marker("<｜tool▁outputs▁begin｜>"), Marker("<｜tool▁outputs▁end｜>")
OUTPUT, OUTPUT_END = Marker("<｜tool▁output▁begin｜>"), Marker("<｜tool▁output▁end｜>")

_FRAME = Frame(CALLS, CALL, SEP, CALL_END, CALLS_END)
_THINKING_FRAME = Frame(CALLS, CALL, SEP, CALL_END, CALLS_END, THINK, THINK_END)
_TOOL_MARKERS = (CALLS, CALLS_END, CALL, SEP, CALL_END, OUTPUT, OUTPUT_END)
_BATCH_MARKERS = (OUTPUTS, OUTPUTS_END)
_SPELLED = re.compile("|".join(re.escape(marker.spelling) for marker in (*_TOOL_MARKERS, *_BATCH_MARKERS)))
_FENCE, _FENCE_END = "```json", "```"
_NAME = re.compile(rf"[^\n<]*\n{_FENCE}")


@dataclass(frozen=True)
class Calls:
    """How tools are described, and how calls and results are written.

    write: the inside of a call. read: a call of its head, arguments and whole block. between: what separates calls,
    and results. opening, closing: what stands around the results of one turn.
    """

    describe: Callable[[Sequence[ToolSpec]], list[Piece]]
    write: Callable[[ToolCall], list[Piece]]
    read: Callable[[str, str, str], ToolCall | MalformedToolCall]
    between: tuple[Piece, ...] = ()
    opening: tuple[Piece, ...] = ()
    closing: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class DeepSeek:
    """One family of DeepSeek's.

    required: every marker, and whether the vocabulary must have an id for it. lines: thoughts stand on lines of their
    own. unthought: what stands before an answer without a thought.
    """

    name: str
    required: tuple[tuple[str, bool], ...]
    calls: Calls
    thoughts: Thoughts | None = None
    lines: bool = False
    unthought: tuple[Piece, ...] = ()
    has_thinking_switch: bool = False

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every marker's spelling, and whether it must be one id."""
        return MappingProxyType(dict(self.required))

    @property
    def stops(self) -> Sequence[str]:
        """The end of a turn."""
        return (END.spelling,)

    @property
    def template_has_tools(self) -> bool:
        """No template describes tools (difference 2)."""
        return False

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """V3.1's template thinks only when it is told to."""
        return {"thinking": True} if self.has_thinking_switch else {}

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """System messages, tools, the other messages, generation prompt."""
        system = "\n\n".join(m.content for m in messages if m.role == "system")
        described: list[Piece] = []
        if tools:
            described = [*(["\n\n"] if system else []), *self.calls.describe(tools)]
        rest = [m for m in messages if m.role != "system"]
        return [BEGIN, system, *described, *self._conversation(rest, style)]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """The end of the sampled turn if it is missing, messages, generation prompt."""
        return [*([] if end else [END]), *self._conversation(messages, style)]

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn after the generation prompt, with its end marker."""
        thinks = self._thinks(style)
        thought = self._thought(message.thinking or "") if thinks else []
        return [*thought, *self._body(message, thinks), END]

    def is_query(self, message: Message) -> bool:
        """Any message: the templates never write a thought again."""
        return True

    def _conversation(self, messages: Sequence[Message], style: Style) -> list[Piece]:
        """Messages and the generation prompt; results in a row share one frame."""
        pieces: list[Piece] = []
        after_results = False
        for are_results, run in groupby(messages, key=lambda m: m.role == "tool"):
            if are_results:
                pieces += self._results(list(run))
            else:
                for message in run:
                    pieces += self._turn(message, after_results, style)
                    after_results = False
            after_results = are_results
        return [*pieces, *self._prompt(after_results, style)]

    def _turn(self, message: Message, after_results: bool, style: Style) -> list[Piece]:
        if message.role == "system":
            return [message.content]
        if message.role == "user":
            return [USER, message.content]
        if message.role != "assistant":
            raise unknown_role(message.role)
        if message.thinking is not None and self.thoughts and style.thinking == "keep":
            thought = [*_mark(after_results), *self._open_thought(), *self._thought(message.thinking)]
            return [*thought, *self._body(message, True), END]
        return [*self._without_thought(after_results, style), *self._body(message, False), END]

    def _prompt(self, after_results: bool, style: Style) -> list[Piece]:
        if self._thinks(style):
            return [*_mark(after_results), *self._open_thought()]
        return self._without_thought(after_results, style)

    def _without_thought(self, after_results: bool, style: Style) -> list[Piece]:
        """What stands before an answer without a thought; after results, only where a thought could (difference 4)."""
        told = not after_results or self._thinks(style)
        return [*_mark(after_results), *(self.unthought if told else ())]

    def _open_thought(self) -> list[Piece]:
        return [THINK, "\n"] if self.lines else [THINK]

    def _thought(self, thought: str) -> list[Piece]:
        """What a turn says of a thought that its prompt opened."""
        return [thought.strip("\n") + "\n", THINK_END, "\n\n"] if self.lines else [thought, THINK_END]

    def _body(self, message: Message, thought: bool) -> list[Piece]:
        """Text and calls."""
        blocks = [self._block(call) for call in message.calls]
        pieces: list[Piece] = [message.content.lstrip("\n") if thought and self.lines else message.content]
        for k, block in enumerate(blocks):
            pieces += [*(self.calls.between if k else [CALLS]), *block]
        return [*pieces, CALLS_END] if blocks else pieces

    def _block(self, call: ToolCall | MalformedToolCall) -> list[Piece]:
        if isinstance(call, MalformedToolCall):
            return malformed_block(_FRAME, call.text)
        return [CALL, *self.calls.write(call), CALL_END]

    def _results(self, messages: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = [*self.calls.opening]
        for k, message in enumerate(messages):
            pieces += [*(self.calls.between if k else ()), OUTPUT, message.content, OUTPUT_END]
        return [*pieces, *self.calls.closing]

    def _thinks(self, style: Style) -> bool:
        """Whether prompts open a thought."""
        return self.thoughts is not None and style.enable_thinking

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """Text as pieces. Where the markers of calls have no ids they are read from the text, past the JSON of
        arguments, so that a marker inside a JSON string is harmless."""
        return _scan_calls(text) if SEP.spelling in spelled else [text]

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message, and whether its blocks are opened and closed properly: a thought, text, then calls."""
        frame = _THINKING_FRAME if self.thoughts else _FRAME
        turn = read_turn(pieces, frame, self.calls.read, in_thought=self._thinks(style))
        if turn is None:
            return Message("assistant", spell(pieces)), False
        thinking, text = turn.thinking, turn.text
        if thinking is not None and self.lines:
            thinking, text = thinking.strip("\n"), text.lstrip("\n")
        return turn.message(thinking, text), turn.finished


def _mark(after_results: bool) -> list[Piece]:
    return [] if after_results else [ASSISTANT]


def _scan_calls(text: str) -> list[Piece]:
    """Split text at the spelled markers of calls, skipping those inside the JSON of a call's arguments."""
    pieces: list[Piece] = []
    at = begin = 0
    while mark := _SPELLED.search(text, at):
        pieces += [text[begin : mark.start()], Marker(mark.group())]
        at = begin = mark.end()
        if mark.group() == SEP.spelling and (name := _NAME.match(text, begin)):
            at = end_of_json(text, name.end())
    return [*pieces, text[begin:]]


# --- calls of V3 and R1: a name and fenced JSON ---


def _describe_fenced(tools: Sequence[ToolSpec]) -> list[Piece]:
    listed = [
        f"- `{tool.name}`:\n```json\n"
        + json.dumps(
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            indent=4,
            ensure_ascii=False,
        )
        + "\n```\n\n"
        for tool in tools
    ]
    return [
        "## Tools\n\n### Function\n\nYou have the following functions available:\n\n" + "".join(listed),
        "To call functions, end your answer with all the calls, written like this:\n\n",
        CALLS,
        CALL,
        "function",
        SEP,
        'function_name\n```json\n{"argument": "value"}\n```',
        CALL_END,
        CALLS_END,
    ]


def _write_fenced(call: ToolCall) -> list[Piece]:
    return ["function", SEP, f"{call.name}\n{_FENCE}\n{call.arguments}\n{_FENCE_END}"]


def _read_fenced(head: str, arguments: str, block: str) -> ToolCall | MalformedToolCall:
    name, _, rest = arguments.partition("\n")
    rest = rest.strip()
    if not (rest.startswith(_FENCE) and rest.endswith(_FENCE_END) and len(rest) > len(_FENCE + _FENCE_END)):
        wanted = f"Write the name, and on the next lines {_FENCE}, the arguments as one JSON object, and {_FENCE_END}."
        return MalformedToolCall(block, f"Tool call not read: its arguments are not fenced. {wanted}")
    return read_arguments(name.strip(), rest[len(_FENCE) : -len(_FENCE_END)], block=block)


FENCED = Calls(_describe_fenced, _write_fenced, _read_fenced, ("\n",), (OUTPUTS,), (OUTPUTS_END,))


# --- calls of V3.1: a name and JSON ---


def _describe_bare(tools: Sequence[ToolSpec]) -> list[Piece]:
    listed = [
        f"### {tool.name}\nDescription: {tool.description}\n\nParameters: {json.dumps(dict(tool.parameters))}\n\n"
        for tool in tools
    ]
    return [
        "## Tools\nYou have access to the following tools:\n\n" + "".join(listed),
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n",
        CALLS,
        CALL,
        "tool_call_name",
        SEP,
        "tool_call_arguments",
        CALL_END,
        "{{additional_tool_calls}}",
        CALLS_END,
        "\n\nWhere:\n- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces",
    ]


def _write_bare(call: ToolCall) -> list[Piece]:
    return [call.name, SEP, call.arguments]


def _read_bare(head: str, arguments: str, block: str) -> ToolCall | MalformedToolCall:
    return read_arguments(head.strip(), arguments, block=block)


BARE = Calls(_describe_bare, _write_bare, _read_bare)


# --- the families ---------------------------------------------------------------------------------


def _required(*always: Marker, tools: bool, batched: bool) -> tuple[tuple[str, bool], ...]:
    """Every marker. always: those of thoughts. tools: whether tool markers must be ids. batched: results are framed."""
    needed = {marker.spelling: True for marker in (BEGIN, END, USER, ASSISTANT, *always)}
    others = (*_TOOL_MARKERS, *(_BATCH_MARKERS if batched else ()))
    return tuple((needed | {marker.spelling: tools for marker in others}).items())


DEEPSEEK_V3 = DeepSeek("deepseek_v3", _required(tools=True, batched=True), FENCED)

DEEPSEEK_R1 = DeepSeek(
    "deepseek_r1",
    _required(THINK, THINK_END, tools=False, batched=True),
    FENCED,
    thoughts=Thoughts((THINK,), (THINK_END,), in_prompt=True),
    lines=True,
)

DEEPSEEK_V3_1 = DeepSeek(
    "deepseek_v3.1",
    _required(THINK, THINK_END, tools=True, batched=False),
    BARE,
    thoughts=Thoughts((THINK,), (THINK_END,), left=(THINK_END,), newlines=False, in_prompt=True),
    unthought=(THINK_END,),
    has_thinking_switch=True,
)
