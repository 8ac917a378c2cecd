r"""Mistral: [INST] turns, and calls behind [TOOL_CALLS].

Knows how the formats v3, v11 and v13 (their makers' numbers) spell a conversation, as pieces of text and markers. Must
not know token ids, vocabularies, sampling or episodes. A family is a row of data (a `Mistral`); what differs between
them is its fields:

    v3   [INST]system\n\nuser[/INST]       [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": "..."}]
         [TOOL_RESULTS]{"content": ..., "call_id": "..."}[/TOOL_RESULTS]
    v11  [SYSTEM_PROMPT] of its own        [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}
         [TOOL_RESULTS]id[TOOL_CONTENT]text[/TOOL_RESULTS]
    v13  [SYSTEM_PROMPT] of its own        [TOOL_CALLS]name[ARGS]{...}
         [TOOL_RESULTS]text[/TOOL_RESULTS]

Tools stand in front of the last user message, in v13 of the first. v3 puts the system text into the last user message.
In an episode both stay where they were when its context was opened, since what was shown to the model is not rewritten.

Sources: the chat templates published with Mistral-Nemo-Instruct-2407 (v3), Mistral-Small-3.2-24B-Instruct-2506 (v11),
Devstral-Small-2507 and Ministral-3-14B-Reasoning-2512 (v13), and mistral-common, the encoder that the makers train and
serve with. Where the two part the encoder is followed, and its ids are compared. Deliberate differences:

1. Text is text: a marker's spelling inside a message stays ordinary text, as in the encoder and unlike in a template.
2. Nemo's template drops the system text unless a user speaks last, writes results without quotes and tools without
   escapes, so that neither is JSON. v3's and v11's templates drop the text of a turn with calls. The encoder does not.
3. An empty system message is left out in v3, and user messages in a row are joined by an empty line, as the encoder
   does; the templates refuse those, or write two turns. A system message later on, which only Devstral's template
   takes, goes in v3 into the last user message shown with it.
4. A v3 result that is JSON stands as it was written, any other as a JSON string, and none as {}. The encoder serialises
   JSON again, so that 1.10 becomes 1.1.
5. Arguments are written as their JSON text stands (the same for text that json.dumps wrote). A trailing space of an
   assistant's text stays; the encoder drops it.
6. A call or result without an id gets one made of its place among those of its turn: call00000, call00001, and so on
   (nine letters and digits, as the templates demand). A sampled id is kept as it is, whatever its form.
7. v13 has no ids, so results must come in the order of the calls. The encoder sorts them.
8. Thoughts are `Message.thinking`; Ministral's template takes them as chunks of the content. It keeps those of earlier
   turns; thinking="strip" drops those before the last user message.
9. Calls that could not be read are written back as they were, each behind a [TOOL_CALLS] of its own, in v3 too.
10. The date in the system prompt of Mistral Small 3.2 is the row's `date`: a template asks a clock, and we have none.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from jaxrl.chat.mistral_prompts import DEVSTRAL_2507, MINISTRAL_3_REASONING, MISTRAL_SMALL_3_2
from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell, unknown_role
from jaxrl.chat.tool_calls import assistant_message, end_of_json, json_members, read_arguments, read_call, tool_schema
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

BOS, EOS = Marker("<s>"), Marker("</s>")
USER, USER_END = Marker("[INST]"), Marker("[/INST]")
SYSTEM, SYSTEM_END = Marker("[SYSTEM_PROMPT]"), Marker("[/SYSTEM_PROMPT]")
TOOLS, TOOLS_END = Marker("[AVAILABLE_TOOLS]"), Marker("[/AVAILABLE_TOOLS]")
CALL, CALL_ID, ARGUMENTS = Marker("[TOOL_CALLS]"), Marker("[CALL_ID]"), Marker("[ARGS]")
RESULT, CONTENT, RESULT_END = Marker("[TOOL_RESULTS]"), Marker("[TOOL_CONTENT]"), Marker("[/TOOL_RESULTS]")
THINK, THINK_END = Marker("[THINK]"), Marker("[/THINK]")

_V3 = (BOS, EOS, USER, USER_END, TOOLS, TOOLS_END, CALL, RESULT, RESULT_END)
_V13 = (*_V3, SYSTEM, SYSTEM_END, ARGUMENTS)
_V11 = (*_V13, CALL_ID, CONTENT)


@dataclass(frozen=True)
class Mistral:
    """One Mistral family.

    required: its markers, all of which the vocabulary must have.
    default_system: the system prompt the template inserts when the first message is not one; {date} in it is `date`.
    calls_are_json: calls are one JSON array, and results JSON objects. has_call_ids: both carry ids.
    tools_come_first: tools stand in front of the first user message, not the last.
    """

    name: str
    required: tuple[Marker, ...]
    default_system: tuple[Piece, ...] | None = None
    date: str | None = None
    calls_are_json: bool = False
    has_call_ids: bool = True
    tools_come_first: bool = False
    thoughts: Thoughts | None = None
    has_thinking_switch: bool = False
    template_has_tools: bool = True
    stops: tuple[str, ...] = (EOS.spelling,)

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every marker's spelling: each must be one id."""
        return MappingProxyType({marker.spelling: True for marker in self.required})

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """The date the template is told, where it asks for one."""
        return {} if self.date is None else {"today": self.date}

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """The system prompt and the messages. There is no generation prompt."""
        pieces: list[Piece] = [BOS]
        if self.default_system is not None and messages[0].role != "system":
            prompt = [p if isinstance(p, Marker) else p.replace("{date}", self.date or "") for p in self.default_system]
            pieces += [SYSTEM, *prompt, SYSTEM_END]
        return [*pieces, *self._conversation(messages, tools, style)]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """The end of the sampled turn where it has none, and the messages."""
        return [*([] if end else [EOS]), *self._conversation(messages, (), style)]

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn, with its end marker."""
        thought = [] if message.thinking is None or not self.thoughts else [THINK, message.thinking, THINK_END]
        calls = [replace(call, id=call.id or call_id(k)) for k, call in enumerate(message.calls)]
        return [*thought, message.content, *self._calls(calls), EOS]

    def is_query(self, message: Message) -> bool:
        """A user's message."""
        return message.role == "user"

    def _conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        if self.calls_are_json:
            messages = _with_system_in_the_last_user(messages)
        queries = [i for i, m in enumerate(messages) if self.is_query(m)]
        messages = [_without_thoughts(m) if self._drops(i, queries, style) else m for i, m in enumerate(messages)]
        turns = [list(run) for _, run in groupby(messages, key=lambda message: message.role)]
        users = [i for i, turn in enumerate(turns) if turn[0].role == "user"] or [len(turns)]
        written = [self._turn(turn[0].role, turn, style) for turn in turns]
        if tools:
            described = json.dumps([tool_schema(tool) for tool in tools], ensure_ascii=False)
            written.insert(users[0 if self.tools_come_first else -1], [TOOLS, described, TOOLS_END])
        return [piece for pieces in written for piece in pieces]

    def _drops(self, i: int, queries: Sequence[int], style: Style) -> bool:
        return style.thinking != "keep" and bool(queries) and i < queries[-1]

    def _turn(self, role: str, turn: Sequence[Message], style: Style) -> list[Piece]:
        """Messages of one role in a row."""
        if role == "user":
            return [USER, "\n\n".join(m.content for m in turn if m.content), USER_END]
        if role == "system":
            return [piece for m in turn for piece in (SYSTEM, m.content, SYSTEM_END)]
        if role == "assistant":
            return [piece for m in turn for piece in self.reply(m, style)]
        if role == "tool":
            return [piece for k, m in enumerate(turn) for piece in self._result(m.content, m.call_id or call_id(k))]
        raise unknown_role(role)

    def _result(self, content: str, id: str) -> list[Piece]:
        if self.calls_are_json:
            json_text = content.strip() if _is_json(content) else _quoted(content) if content else "{}"
            return [RESULT, f'{{"content": {json_text}, "call_id": {_quoted(id)}}}', RESULT_END]
        return [RESULT, *([id, CONTENT] if self.has_call_ids else []), content, RESULT_END]

    def _calls(self, calls: Sequence[ToolCall | MalformedToolCall]) -> list[Piece]:
        pieces: list[Piece] = []
        for _, run in groupby(calls, key=type):
            together = [*run]
            readable = [call for call in together if isinstance(call, ToolCall)]
            if readable and self.calls_are_json:
                pieces += [CALL, f"[{', '.join(map(_json_call, readable))}]"]
            for call in readable if not self.calls_are_json else ():
                ids = [CALL_ID, call.id or ""] if self.has_call_ids else []
                pieces += [CALL, call.name, *ids, ARGUMENTS, call.arguments]
            pieces += [piece for bad in together if isinstance(bad, MalformedToolCall) for piece in (CALL, bad.text)]
        return pieces

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """Text as it is: every marker is an id."""
        return [text]

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message, and whether its framing is intact: a thought first, then text, then calls."""
        before: list[str] = []
        thinking: str | None = None
        thought: list[str] | None = None  # the open one
        blocks: list[list[Piece]] = []
        for piece in pieces:
            if isinstance(piece, str):
                (blocks[-1] if blocks else before if thought is None else thought).append(piece)
            elif thought is not None and piece == THINK_END:
                thinking, thought = "".join(thought), None
            elif piece == THINK and thought is None and thinking is None and not blocks and not "".join(before).strip():
                thought, before = [], []
            elif piece == CALL and thought is None:
                blocks.append([])
            elif blocks and piece in (CALL_ID, ARGUMENTS) and _may_follow(piece, blocks[-1]):
                blocks[-1].append(piece)
            else:
                return Message("assistant", spell(pieces)), False
        read = _read_array if self.calls_are_json else _read_tagged
        results = [result for block in blocks for result in read(block)]
        thinking = thinking if thought is None else "".join(thought)
        return assistant_message("".join(before), results, thinking), thought is None


def call_id(k: int) -> str:
    """The id of the call, or of its result, that is number `k` of its turn: nine letters and digits."""
    return f"call{k:05d}"


def _with_system_in_the_last_user(messages: Sequence[Message]) -> list[Message]:
    """System texts in front of the last user message's; of an empty one where nobody speaks as a user."""
    system = "\n\n".join(m.content for m in messages if m.role == "system" and m.content)
    if not system:
        return [m for m in messages if m.role != "system"]
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=None)
    if last is None:
        return [*(m for m in messages if m.role != "system"), Message("user", f"{system}\n\n")]
    said = replace(messages[last], content=f"{system}\n\n{messages[last].content}")
    return [said if i == last else m for i, m in enumerate(messages) if m.role != "system"]


def _without_thoughts(message: Message) -> Message:
    return replace(message, thinking=None)


def _json_call(call: ToolCall) -> str:
    return f'{{"name": {_quoted(call.name)}, "arguments": {call.arguments}, "id": {_quoted(call.id or "")}}}'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """Whether the text is one JSON value."""
    end = end_of_json(text, 0)
    return bool(text.strip()) and end > 0 and not text[end:].strip()


def _may_follow(piece: Marker, block: Sequence[Piece]) -> bool:
    """Whether a call's [CALL_ID] or [ARGS] is in its place: the first at most once, the second at the end."""
    return ARGUMENTS not in block and piece not in block


_PUNCTUATION = re.compile(r"\s*([\[\],])")
_ARRAY = '[{"name": "<tool name>", "arguments": {...}, "id": "<nine letters or digits>"}]'


def _read_array(block: Sequence[Piece]) -> Iterable[ToolCall | MalformedToolCall]:
    """The calls of one JSON array. What follows the last that could be told from the rest is one malformed call."""
    text = spell(block)
    read = 0  # how much of it
    at = _after(text, 0, "[")
    while at is not None and (end := end_of_json(text, at)) > at:
        element = text[at:end].strip()
        yield _identified(read_call(element), element)
        read = end
        if (last := _after(text, end, "]")) is not None and not text[last:].strip():
            return
        at = _after(text, end, ",")
    error = f"Tool calls not read: they are not one JSON array. Write {_ARRAY}, and nothing behind it."
    yield MalformedToolCall(text[read:], error)


def _after(text: str, at: int, char: str) -> int | None:
    """The position after `char`, if it comes next after white space."""
    found = _PUNCTUATION.match(text, at)
    return found.end() if found and found.group(1) == char else None


def _identified(call: ToolCall | MalformedToolCall, text: str) -> ToolCall | MalformedToolCall:
    """The call with the id it was given."""
    try:
        id, _ = json_members(text).get("id", (None, ""))
    except (ValueError, RecursionError):
        return call
    return replace(call, id=id) if isinstance(id, str) and id else call


def _read_tagged(block: Sequence[Piece]) -> Iterable[ToolCall | MalformedToolCall]:
    """The one call of a block: name, id if there is one, arguments."""
    parts: dict[Marker, str] = {}
    key = CALL
    for piece in block:
        if isinstance(piece, Marker):
            key = piece
            parts[key] = ""
        else:
            parts[key] = parts.get(key, "") + piece
    name, id = parts.get(CALL, "").strip(), parts.get(CALL_ID, "").strip() or None
    if ARGUMENTS not in parts:
        said = f"Tool call not read: {ARGUMENTS.spelling} is missing after the tool's name. "
        yield MalformedToolCall(spell(block), f"{said}Write its arguments behind it, as one JSON object.", id)
    else:
        yield read_arguments(name, parts[ARGUMENTS], block=spell(block), id=id)


# --- the families ---------------------------------------------------------------------------------

MISTRAL_V3 = Mistral("mistral_v3", _V3, calls_are_json=True)

MISTRAL_V11 = Mistral("mistral_v11", _V11, default_system=(MISTRAL_SMALL_3_2,), date="2025-06-20")

DEVSTRAL = Mistral("devstral", _V13, default_system=(DEVSTRAL_2507,), has_call_ids=False, tools_come_first=True)


def _with_thought_markers(text: str) -> tuple[Piece, ...]:
    before, rest = text.split(THINK.spelling)
    inside, after = rest.split(THINK_END.spelling)
    return (before, THINK, inside, THINK_END, after)


MINISTRAL_3_THINKING = replace(
    DEVSTRAL,
    name="ministral3_reasoning",
    required=(*_V13, THINK, THINK_END),
    default_system=_with_thought_markers(MINISTRAL_3_REASONING),
    thoughts=Thoughts((THINK,), (THINK_END,), newlines=False, template="keep"),
)
