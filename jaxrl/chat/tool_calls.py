"""The content of a tool-call block: a JSON object with a name and arguments.

Knows JSON and the two nouns ToolCall and MalformedToolCall. Must not know markers, tokens or which tools exist.
A block that cannot be read is never an exception: it becomes a MalformedToolCall whose error tells the model what to
write instead. Reading is linear in the length of the text, and keeps the arguments exactly as they were written.
"""

import json
import re
from typing import NoReturn

from jaxrl.types import MalformedToolCall, ToolCall

_SPACE = re.compile(r"[ \t\n\r]*")
_WANTED = 'Write one JSON object: {"name": "<tool name>", "arguments": {...}}.'


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def end_of_json(text: str, at: int) -> int:
    """Where the JSON value that starts at `at` (after white space) ends; `at` itself when there is none."""
    try:
        _, end = _DECODER.raw_decode(text, _skip(text, at))
    except (ValueError, RecursionError):
        return at
    return end


def read_call(text: str) -> ToolCall | MalformedToolCall:
    """The call a block's text asks for. `arguments` is the exact JSON text of the object in the block."""
    try:
        name, arguments = _members(text)
    except RecursionError:
        return MalformedToolCall(text, f"Tool call not read: the JSON is nested too deeply. {_WANTED}")
    except ValueError as error:
        return MalformedToolCall(text, f"Tool call not read: {error}. {_WANTED}")
    return ToolCall(name, arguments)


def _members(text: str) -> tuple[str, str]:
    """Name and arguments text of the object; raises ValueError saying what is wrong."""
    start = _skip(text, 0)
    if not text.startswith("{", start):
        raise ValueError("the block does not hold a JSON object" if text.strip() else "the block is empty")
    found: dict[str, tuple[object, str]] = {}
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
    return _checked(found)


def _checked(found: dict[str, tuple[object, str]]) -> tuple[str, str]:
    name, _ = found.get("name", (None, ""))
    if not isinstance(name, str) or not name:
        raise ValueError('"name" is not a non-empty string' if "name" in found else '"name" is missing')
    if "arguments" not in found:
        raise ValueError('"arguments" is missing (use {} when the tool takes none)')
    arguments, text = found["arguments"]
    if not isinstance(arguments, dict):
        raise ValueError(f'"arguments" is {_kind(arguments)}, not a JSON object')
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
