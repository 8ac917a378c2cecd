"""The content of a tool-call block: JSON arguments, or a JSON object with a name and arguments; and a tool's schema.

Knows JSON and the nouns Message, ToolCall, MalformedToolCall and ToolSpec. Must not know markers, tokens or which tools
exist. A block that cannot be read is never an exception: it becomes a MalformedToolCall whose error tells the model
what to write instead. Reading is linear in the length of the text, and keeps the arguments exactly as they were
written.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn

from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_FIRST = set('{["-0123456789tfn')
_LEVELS = 100


def end_of_json(text: str, at: int) -> int:
    """Where the JSON value that starts at `at` (after white space) ends; `at` itself when there is none."""
    start = _skip(text, at)
    if text[start : start + 1] not in _FIRST:
        return at  # told apart here, because an error of the decoder counts the lines of all the text before it
    try:
        _, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return at
    return end


def tool_schema(tool: ToolSpec) -> dict[str, Any]:
    """A tool as published templates list it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def assistant_message(
    content: str, calls: Iterable[ToolCall | MalformedToolCall], thinking: str | None = None
) -> Message:
    """A turn with these calls, in the order in which they stand in it: `Message.calls` gives them back so."""
    readable: list[ToolCall] = []
    malformed: list[MalformedToolCall] = []
    for call in calls:
        if isinstance(call, ToolCall):
            readable.append(call)
        else:
            malformed.append(replace(call, place=len(readable)))
    return Message(
        "assistant", content, thinking=thinking, tool_calls=tuple(readable), malformed_calls=tuple(malformed)
    )


def read_call(text: str, *, arguments: str = "arguments") -> ToolCall | MalformedToolCall:
    """The call asked for by a block that holds one JSON object. The call's arguments are the exact JSON text.

    arguments: the member that holds them. Members other than it and "name" are ignored.
    """
    wanted = f'Write one JSON object: {{"name": "<tool name>", "{arguments}": {{...}}}}.'
    try:
        return ToolCall(*_name_and_arguments(json_members(text), arguments))
    except RecursionError:
        return MalformedToolCall(text, f"Tool call not read: the JSON is nested too deeply. {wanted}")
    except ValueError as error:
        return MalformedToolCall(text, f"Tool call not read: {error}. {wanted}")


def write_call(call: ToolCall, *, arguments: str = "arguments") -> str:
    """The JSON object that `read_call` reads, the call's arguments as their text stands."""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{arguments}": {call.arguments}}}'


def json_value(text: str) -> str:
    """A value that was written without quotes, as JSON text: itself where it is JSON other than a string, else a
    string."""
    bare = text.strip()
    if bare and not bare.startswith('"') and end_of_json(bare, 0) == len(bare):
        return bare
    return json.dumps(text, ensure_ascii=False)


def read_arguments(name: str, text: str, *, block: str, id: str | None = None) -> ToolCall | MalformedToolCall:
    """The call of `name` with `text` as its JSON arguments. block: the whole call as it was written. id: its own."""
    try:
        if not name:
            raise ValueError("the tool's name is missing")
        json_members(text)
    except RecursionError:
        return MalformedToolCall(block, "Tool call not read: the JSON of its arguments is nested too deeply.", id)
    except ValueError as error:
        return MalformedToolCall(block, f"Tool call not read: {error}. Write its arguments as one JSON object.", id)
    return ToolCall(name, text.strip(), id)


def check_arguments(call: ToolCall) -> None:
    """Raise ValueError unless the call has a name and its arguments are a JSON object."""
    if isinstance(bad := read_arguments(call.name, call.arguments, block=call.arguments), MalformedToolCall):
        raise ValueError(f"a call of {call.name!r} has the arguments {call.arguments!r}. {bad.error}")


def json_members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of the JSON object that `text` is, each with its value and the exact text of that value.

    Raises ValueError saying what is wrong (a member given twice included), RecursionError for deep nesting.
    """
    start = _skip(text, 0)
    if not text.startswith("{", start):
        raise ValueError("the block does not hold a JSON object" if text.strip() else "the block is empty")
    found: dict[str, tuple[Any, str]] = {}
    at = _skip(text, start + 1)
    while not text.startswith("}", at):
        if found:
            at = _expect(text, at, ",")
        key, at = _value(text, at)
        if not isinstance(key, str):
            raise ValueError(f"a member's name must be a string, at character {at}")
        begin = _expect(text, _skip(text, at), ":")
        value, at = _value(text, begin)
        if key in found:
            raise ValueError(f'"{key[:40]}" is given twice')
        found[key] = (value, text[begin:at])
        at = _skip(text, at)
    if text[at + 1 :].strip():
        raise ValueError(f"there is text after the JSON object, at character {at + 1}")
    if _is_deep([value for value, _ in found.values()]):
        raise ValueError(f"the JSON is nested more than {_LEVELS} levels deep")
    return found


def _is_deep(values: list[Any]) -> bool:
    """Whether there is a value inside more than _LEVELS others: whoever writes such a thing again would run out of
    stack."""
    for _ in range(_LEVELS):
        inside = [v.values() if isinstance(v, dict) else v for v in values if isinstance(v, dict | list)]
        values = [value for several in inside for value in several]
    return bool(values)


def _name_and_arguments(found: dict[str, tuple[Any, str]], key: str) -> tuple[str, str]:
    name, _ = found.get("name", (None, ""))
    if not isinstance(name, str) or not name:
        raise ValueError('"name" is not a non-empty string' if "name" in found else '"name" is missing')
    if key not in found:
        raise ValueError(f'"{key}" is missing (use {{}} when the tool takes none)')
    arguments, text = found[key]
    if not isinstance(arguments, dict):
        raise ValueError(f'"{key}" is {_kind(arguments)}, not a JSON object')
    json_members(text)  # a member given twice is as wrong in there
    return name, text


def _kind(value: object) -> str:
    kinds = {str: "a string", list: "an array", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _value(text: str, at: int) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON ({error.msg} at character {error.pos})") from None


def _expect(text: str, at: int, char: str) -> int:
    """The next value's position after `char` and white space."""
    if not text.startswith(char, at):
        raise ValueError(f'it is not valid JSON (expected "{char}" at character {at})')
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
