r"""Harmony, the format of gpt-oss: a turn is one or more messages, each with a channel.

Knows how the published template spells a conversation, as pieces of text and markers. Must not know token ids,
vocabularies, sampling or episodes. The rows differ in the effort of reasoning that the system message asks for; model
identity, date and knowledge cutoff are fields too, because a template takes the date from a clock and we have none.

The prompt ends with <|start|>assistant. What is sampled after it, with thoughts and a call:

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>commentary<|message|>TEXT<|end|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>

or, after the thoughts, <|start|>assistant<|channel|>final<|message|>TEXT<|return|>. The recipient may also follow the
channel, and <|constrain|> may stand before the content type: both are read, as is a call on the analysis channel.

Sources: the chat template published with gpt-oss-120b and its generation config (what stops: <|return|>, <|call|> and
<|endoftext|>, but not <|end|>, after which a turn goes on). Parity is tested token for token, but for the deliberate
differences below. The makers' own library (openai-harmony 0.0.8) gives the same ids for thoughts, calls, results, text
beside calls and simple tools. Where it parts from the template, the template is followed: instructions without tools
end with an empty line, and nested types of tools are broken into lines in the template's own way.

1. Text is text. A special token's spelling inside a message stays ordinary text.
2. A sampled turn is closed by what was sampled: token in, token out. The template turns the <|return|> of an earlier
   final answer into <|end|>; here only answers that were never sampled (opening messages) end with <|end|>.
3. Text beside a call is a commentary message without a recipient, as the model writes it. The template puts it on the
   analysis channel as if it were a thought, drops it once a final answer follows, and refuses text beside thoughts.
4. Every call of an opening message is written, in its own message, and each result names the tool it answers. The
   template writes the first call only. A turn has one call, since <|call|> stops it: `reply` refuses more.
5. A system message after the first is a developer message like the first. The template drops it.
6. A result whose tool nobody named (the answer to a call that could not be read) comes from plain "functions".
7. thinking="keep" (the default) keeps the thoughts of earlier turns. thinking="strip" drops them before a user's
   message; the template drops them once a final answer stands later, which is the same unless the user speaks before
   a call was answered with a final message.
8. Arguments of a call are written as their JSON text stands. Calls that could not be read are written back as they
   were.
9. A default that the template cannot join to its text (an enum of numbers) is written as JSON.
10. Tools of the system message (browser, python) are not offered. What the model sends to them is read as a call of a
    tool of that name.

A tool's result is JSON text, a string in quotes, as the template writes it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell, unknown_role
from jaxrl.chat.tool_calls import assistant_message, read_arguments
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

START, END = Marker("<|start|>"), Marker("<|end|>")
CHANNEL, CONSTRAIN, MESSAGE = Marker("<|channel|>"), Marker("<|constrain|>"), Marker("<|message|>")
CALL, RETURN = Marker("<|call|>"), Marker("<|return|>")

_PROMPT: tuple[Piece, ...] = (START, "assistant")
_NAMESPACE = "functions"
_CHANNELS = ("analysis", "commentary", "final")


@dataclass(frozen=True)
class Harmony:
    """One row of the harmony format.

    reasoning_effort: "low", "medium" or "high". date: YYYY-MM-DD, what the system message calls the current date.
    """

    name: str
    reasoning_effort: str = "medium"
    model_identity: str = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str = "2024-06"
    date: str = "2025-08-05"
    thoughts: Thoughts = field(
        default=Thoughts((CHANNEL, "analysis", MESSAGE), (END, START, "assistant"), newlines=False, forgets_empty=True)
    )
    stops: tuple[str, ...] = field(default=(RETURN.spelling, CALL.spelling, "<|endoftext|>"))
    has_thinking_switch: bool = field(default=False, init=False)
    template_has_tools: bool = field(default=True, init=False)

    @property
    def markers(self) -> Mapping[str, bool]:
        """Every marker's spelling; all must be single ids."""
        return MappingProxyType({m.spelling: True for m in (START, END, CHANNEL, CONSTRAIN, MESSAGE, CALL, RETURN)})

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Identity, effort, and the date the template is told."""
        return {
            "model_identity": self.model_identity,
            "reasoning_effort": self.reasoning_effort,
            "today": self.date,
        }

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """System message, developer message (instructions and tools), messages, generation prompt."""
        instructed = messages[0].role == "system"
        instructions = messages[0].content if instructed else ""
        return [
            *_message(["system"], self._system(bool(tools))),
            *_developer(instructions, tools),
            *_conversation(messages[instructed:], style),
            *_PROMPT,
        ]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """The end of a turn that was cut, messages, generation prompt."""
        return [*([] if end else [END]), *_conversation(messages, style), *_PROMPT]

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn after the generation prompt: thoughts, then text and a call, or a final answer.

        Raises ValueError for several calls, and for a tool's name that a header cannot hold.
        """
        if len(message.tool_calls) > 1:
            names = [call.name for call in message.tool_calls]
            raise ValueError(
                f"a turn of family {self.name!r} holds one call at most, got calls of {names}: "
                "give each its own assistant message, with the tool's result between them."
            )
        for call in message.tool_calls:
            if not call.name or call.name.split() != [call.name]:
                raise ValueError(f"a tool's name is one word in family {self.name!r}, got {call.name!r}: rename it.")
        return _assistant(message, message.thinking, RETURN)[len(_PROMPT) :]

    def is_query(self, message: Message) -> bool:
        """A user's message: it follows a final answer, which is when the template drops thoughts."""
        return message.role == "user"

    def _system(self, has_tools: bool) -> str:
        calls = f"\nCalls to these tools must go to the commentary channel: '{_NAMESPACE}'." if has_tools else ""
        return (
            f"{self.model_identity}\nKnowledge cutoff: {self.knowledge_cutoff}\nCurrent date: {self.date}\n\n"
            f"Reasoning: {self.reasoning_effort}\n\n"
            f"# Valid channels: {', '.join(_CHANNELS)}. Channel must be included for every message.{calls}"
        )

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """Text as pieces: every marker is an id, so text has none."""
        return [text]

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The message, and whether it is a run of well-formed messages of which only the last is an answer or a call.

        A turn that ends on the analysis channel, or whose last message was closed by <|end|>, is not intact.
        """
        parts = _split(pieces, START)
        thoughts: list[str] = []
        texts: list[str] = []
        calls: list[ToolCall | MalformedToolCall] = []
        intact = True
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            if MESSAGE not in part and last:
                texts += [spell([START, *part] if i else part)] if i or part else []
                intact = False
                break
            found = _read_message(part if i else ["assistant", *part])
            if found is None or not (last or found.passes_on):
                return Message("assistant", spell(pieces)), False
            intact = not last or not (found.closed or found.is_thought)
            if found.recipient is not None:
                calls.append(_read_call(found.recipient, found.text))
            else:
                (thoughts if found.is_thought else texts).append(found.text)
        return assistant_message("\n".join(texts), calls, "\n".join(thoughts) if thoughts else None), intact


# --- messages -------------------------------------------------------------------------------------


def _message(header: Sequence[Piece], text: str, end: Marker = END) -> list[Piece]:
    return [START, *header, MESSAGE, text, end]


def _developer(instructions: str, tools: Sequence[ToolSpec] = ()) -> list[Piece]:
    """Instructions and tools; nothing where there are neither."""
    if not (instructions or tools):
        return []
    said = f"# Instructions\n\n{instructions}\n\n" if instructions else ""
    return _message(["developer"], said + (f"# Tools\n\n{tool_namespace(tools)}" if tools else ""))


def _conversation(messages: Sequence[Message], style: Style) -> list[Piece]:
    pieces: list[Piece] = []
    for message, thought, tool in zip(messages, _thoughts(messages, style), _answered(messages), strict=True):
        if message.role == "assistant":
            pieces += _assistant(message, thought, END)
        elif message.role == "tool":
            source = f"{_NAMESPACE}.{tool}" if tool else _NAMESPACE
            text = json.dumps(message.content, ensure_ascii=False)
            pieces += _message([f"{source} to=assistant", CHANNEL, "commentary"], text)
        elif message.role == "user":
            pieces += _message(["user"], message.content)
        elif message.role == "system":
            pieces += _developer(message.content)
        else:
            raise unknown_role(message.role)
    return pieces


def _assistant(message: Message, thought: str | None, end: Marker) -> list[Piece]:
    """A whole turn. end: what closes a final answer."""
    pieces: list[Piece] = [] if thought is None else _message(["assistant", CHANNEL, "analysis"], thought)
    calls = [
        (f"{_NAMESPACE}.{call.name}", call.arguments) if isinstance(call, ToolCall) else _unread_call(call.text)
        for call in message.calls
    ]
    if not calls:
        return [*pieces, *_message(["assistant", CHANNEL, "final"], message.content, end)]
    if message.content:
        pieces += _message(["assistant", CHANNEL, "commentary"], message.content)
    for recipient, text in calls:
        pieces += _message(["assistant", f" to={recipient}", CHANNEL, "commentary json"], text, CALL)
    return pieces


def _thoughts(messages: Sequence[Message], style: Style) -> list[str | None]:
    """The analysis before each message; None where none is written."""
    if style.thinking == "keep":
        return [message.thinking for message in messages]
    finals = [i for i, m in enumerate(messages) if m.role == "assistant" and not m.calls]
    last = finals[-1] if finals else -1
    return [(message.thinking or None) if i > last else None for i, message in enumerate(messages)]


def _answered(messages: Sequence[Message]) -> list[str]:
    """The name of the tool that each message of role "tool" answers for; "" where nothing tells.

    By its own name, by the id of its call, or by its place among the results.
    """
    names: list[str] = []
    by_id: dict[str, str] = {}
    waiting: list[str] = []
    for message in messages:
        if message.role == "assistant":
            waiting = [call.name if isinstance(call, ToolCall) else "" for call in message.calls]
            by_id |= {call.id: call.name for call in message.tool_calls if call.id is not None}
        here = ""
        if message.role == "tool":
            here = message.name or by_id.get(message.call_id or "") or "".join(waiting[:1])
            waiting = waiting[1:] or waiting
        names.append(here)
    return names


# --- reading one message --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """One message of a turn. closed: <|end|> stands behind it."""

    channel: str
    recipient: str | None
    text: str
    closed: bool

    @property
    def is_thought(self) -> bool:
        return self.channel == "analysis" and self.recipient is None

    @property
    def passes_on(self) -> bool:
        """Whether another message may follow in the same turn."""
        return self.closed and self.recipient is None and self.channel != "final"


def _split(pieces: Iterable[Piece], at: Marker) -> list[list[Piece]]:
    parts: list[list[Piece]] = [[]]
    for piece in pieces:
        if piece == at:
            parts.append([])
        else:
            parts[-1].append(piece)
    return parts


def _read_message(pieces: Sequence[Piece]) -> _Read | None:
    """Role, channel, text; None where the framing is broken."""
    if MESSAGE not in pieces:
        return None
    at = pieces.index(MESSAGE)
    closed = pieces[-1] == END
    body = pieces[at + 1 : len(pieces) - closed]
    head = _split(pieces[:at], CHANNEL)
    if len(head) != 2 or any(isinstance(p, Marker) for p in (*head[0], *body)):
        return None
    if any(isinstance(p, Marker) and p != CONSTRAIN for p in head[1]):
        return None
    role = spell(head[0]).split()
    about = "".join(p if isinstance(p, str) else " " for p in head[1]).split()
    recipients = [word.removeprefix("to=") for word in (*role, *about) if word.startswith("to=")]
    if role[:1] != ["assistant"] or not about or about[0] not in _CHANNELS:
        return None
    return _Read(about[0], recipients[-1] if recipients else None, spell(body), closed)


def _read_call(recipient: str, text: str) -> ToolCall | MalformedToolCall:
    return read_arguments(recipient.removeprefix(f"{_NAMESPACE}."), text, block=f"to={recipient} {text}")


def _unread_call(block: str) -> tuple[str, str]:
    """Recipient and text of a call that could not be read, from the block that `_read_call` made of it."""
    recipient, space, text = block.partition(" ")
    if space and recipient.startswith("to="):
        return recipient.removeprefix("to="), text
    return _NAMESPACE, block


# --- tools, in the manner of TypeScript -----------------------------------------------------------

_PLAIN = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
_LONGEST_ITEM = 50  # characters; an array of anything longer is any[]


def tool_namespace(tools: Sequence[ToolSpec]) -> str:
    """The tools as one namespace of function types, as the published template writes it."""
    types = "".join(f"// {tool.description}\ntype {tool.name} = {_signature(tool.parameters)};\n\n" for tool in tools)
    return f"## {_NAMESPACE}\n\nnamespace {_NAMESPACE} {{\n\n{types}}} // namespace {_NAMESPACE}"


def _signature(parameters: Mapping[str, Any]) -> str:
    properties = parameters.get("properties")
    if not properties:
        return "() => any"
    required = parameters.get("required") or ()
    lines = "".join(_parameter(name, spec, name in required) for name, spec in properties.items())
    return f"(_: {{\n{lines}}}) => any"


def _parameter(name: str, spec: Any, required: bool) -> str:
    spec = _schema(spec)
    comment = f"// {spec['description']}\n" if spec.get("description") else ""
    return f"{comment}{name}{'' if required else '?'}: {type_of(spec)}{_default(spec)},\n"


def _default(spec: Mapping[str, Any]) -> str:
    if "default" not in spec:
        return ""
    value = spec["default"]
    bare = isinstance(value, str) and (spec.get("enum") or spec.get("oneOf"))
    comma = "" if spec.get("oneOf") and not spec.get("enum") else ", "
    return f"{comma}// default: {value if bare else _json(value)}"


def type_of(schema: Any) -> str:
    """A JSON schema as the published template's idea of a TypeScript type.

    Where it is silent, so is this: anyOf, an enum without a type and null are "any".
    """
    spec = _schema(schema)
    kind = spec.get("type")
    if kind == "array":
        return _array(spec)
    if isinstance(kind, list | tuple) and kind:
        return " | ".join(map(str, kind))
    if spec.get("oneOf"):
        return " | \n".join(_variant(variant) for variant in spec["oneOf"])
    if kind == "string" and spec.get("enum"):
        return " | ".join(f'"{value}"' for value in spec["enum"])
    if kind == "object":
        return _object(spec)
    plain = _PLAIN.get(kind, "any") if isinstance(kind, str) else "any"
    return plain + _or_null(spec, kind == "string")


def _array(spec: Mapping[str, Any]) -> str:
    items = spec.get("items")
    kind = _schema(items).get("type")
    item = _PLAIN[kind] if isinstance(kind, str) and kind in _PLAIN else type_of(items) if items else "any"
    # Nothing but a list of types gives "object | object", and the template has no use for it.
    too_much = item == "object | object" or len(item) > _LONGEST_ITEM
    return f"{'any' if too_much else item}[]" + _or_null(spec, True)


def _object(spec: Mapping[str, Any]) -> str:
    properties = spec.get("properties")
    if not properties:
        return "object"
    required = spec.get("required") or ()
    # The line break and the indentation before a nested type are the template's own.
    members = (
        f"{name}{'' if name in required else '?'}: \n{' ' * 16}{type_of(member)}" for name, member in properties.items()
    )
    return "{\n" + ", ".join(members) + "}"


def _variant(schema: Any) -> str:
    spec = _schema(schema)
    comment = f"// {spec['description']}" if spec.get("description") else ""
    default = f"{' ' * 20}// default: {_json(spec['default'])}" if "default" in spec else ""
    return type_of(spec) + comment + default


def _or_null(spec: Mapping[str, Any], allowed: bool) -> str:
    return " | null" if allowed and spec.get("nullable") else ""


def _schema(schema: Any) -> Mapping[str, Any]:
    """JSON schemas may also be true or false, which say nothing about a type."""
    return schema if isinstance(schema, Mapping) else {}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- the rows -------------------------------------------------------------------------------------

GPT_OSS = Harmony("gpt_oss")
GPT_OSS_LOW = Harmony("gpt_oss_low", reasoning_effort="low")
GPT_OSS_HIGH = Harmony("gpt_oss_high", reasoning_effort="high")
