r"""The later Qwens: ChatML whose tools are called in tags, <function=NAME> with a <parameter=KEY> for each argument.

Knows how Qwen3.5 (and 3.6) and Qwen3-Coder describe tools, and how a call is written and read. Must not know turns,
thoughts or token ids: those are ChatML's (chatml.py), of which the families at the end are rows.

Sources: the chat templates published with Qwen3.5-4B, Qwen3.6 and Qwen3-Coder. The generation prompt of Qwen3.5 opens
the thought; small models of that series are published with `enable_thinking` off. Contents are trimmed, and each turn
after the last query has a think block, though it be empty. Deliberate differences, besides those of chatml.py (1, 2, 3,
6, 7, 9):

1. What Qwen3.5's template refuses is written as elsewhere in ChatML: a system message later on, no user message at all.
2. true, false and null are written as JSON, as Qwen3.6's template does; those of Qwen3.5 and Qwen3-Coder write Python's
   True, False and None. Numbers, arrays and objects are written as their JSON text stands.

How values are read. A value is a string as it stands, without the newline at its start and the one at its end, unless
it is JSON of another kind: 3, [1, 2], {"a": 1}, true, null. Python's True, False and None count as well. So the tags
cannot tell the string 3 from the number 3, and such a string is read as a number; a string in quotes keeps them. A
value ends at the first </parameter> that another parameter or the end of the function follows.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxrl.chat.chatml import CALL, CALL_END, QWEN3, QWEN3_INSTRUCT, THINK, THINK_END, CallFormat, as_it_stands
from jaxrl.chat.renderer import Piece, Thoughts
from jaxrl.chat.tool_calls import json_members, json_value, tool_schema
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION_END = re.compile(r"\s*</function>\s*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_WANTED = (
    "Write <function=NAME> and a newline, then for each argument <parameter=KEY>, a newline, its value, a newline and "
    "</parameter>, and at the end </function>."
)


def trimmed(message: Message) -> str:
    """The content without white space around it."""
    return message.content.strip()


def trimmed_before_calls(message: Message) -> str:
    """The content, trimmed where calls follow it."""
    return message.content.strip() if message.tool_calls else as_it_stands(message)


# --- calls ----------------------------------------------------------------------------------------


def write_call(call: ToolCall) -> str:
    """A call as the text of its block."""
    values = (f"<parameter={key}>\n{_written(*value)}\n</parameter>\n" for key, value in _members(call).items())
    return f"\n<function={call.name}>\n{''.join(values)}</function>\n"


def _members(call: ToolCall) -> Mapping[str, tuple[Any, str]]:
    return json_members(call.arguments)


def _written(value: Any, text: str) -> str:
    return value if isinstance(value, str) else text


def read_call(block: str) -> ToolCall | MalformedToolCall:
    """The call that a block spells, its arguments as the text of a JSON object."""
    try:
        return _read(block)
    except ValueError as error:
        return MalformedToolCall(block, f"Tool call not read: {error}. {_WANTED}")


def _read(block: str) -> ToolCall:
    function = _FUNCTION.match(block)
    if function is None:
        raise ValueError("it does not begin with <function=NAME>" if block.strip() else "the block is empty")
    if not (name := function.group(1).strip()):
        raise ValueError("the tool's name is missing")
    values: dict[str, str] = {}
    at = function.end()
    while parameter := _PARAMETER.match(block, at):
        key = parameter.group(1)
        end = _VALUE_END.search(block, parameter.end())
        if end is None:
            raise ValueError(f'the value of "{key[:40]}" is not closed by </parameter>')
        if key in values:
            raise ValueError(f'"{key[:40]}" is given twice')
        values[key] = _value(block[parameter.end() : end.start()])
        at = end.end()
    if (last := _FUNCTION_END.match(block, at)) is None:
        raise ValueError(f"expected <parameter=KEY> or </function> at character {at}")
    if last.end() != len(block):
        raise ValueError(f"there is text after </function>, at character {last.end()}")
    members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
    return ToolCall(name, "{" + ", ".join(members) + "}")


def _value(written: str) -> str:
    """The JSON text of a value (see the module's docstring)."""
    text = written.removeprefix("\n")
    return _PYTHON.get(text.strip()) or json_value(text)


# --- descriptions of tools ------------------------------------------------------------------------

_EXAMPLE = (
    "\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\n{second}\n</parameter>\n</function>\n"
)
_REMINDER = (
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT "
    "after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not "
    "tell the user about function calls\n</IMPORTANT>"
)


def _json_tools(system: str | None, tools: Sequence[ToolSpec]) -> list[Piece]:
    """Qwen3.5: one JSON line each, how to call them, then the system text."""
    lines = "".join("\n" + json.dumps(tool_schema(tool), ensure_ascii=False) for tool in tools)
    second = "This is the value for the second parameter\nthat can span\nmultiple lines"
    return [
        f"# Tools\n\nYou have access to the following functions:\n\n<tools>{lines}\n</tools>\n\n"
        "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n",
        CALL,
        _EXAMPLE.format(second=second),
        CALL_END,
        "\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner "
        "<function=...></function> block must be nested within ",
        CALL,
        CALL_END,
        " XML tags\n" + _REMINDER,
        f"\n\n{system}" if system else "",
    ]


_CODER = "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks."


def _tagged_tools(system: str | None, tools: Sequence[ToolSpec]) -> list[Piece]:
    """Qwen3-Coder: the system text, tools in tags, how to call them."""
    listed = "".join(_tagged_tool(tool) for tool in tools)
    return [
        f"{_CODER if system is None else system}\n\n# Tools\n\nYou have access to the following tools:\n\n"
        f"<tools>{listed}\n</tools>\n\n"
        "If you choose to call a tool ONLY reply in the following format with NO suffix:\n\n",
        CALL,
        _EXAMPLE.format(second="value_2"),
        CALL_END,
        "\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: the tool calling block MUST "
        "begin with an opening ",
        CALL,
        " tag and end with a closing ",
        CALL_END,
        " tag.\n" + _REMINDER,
    ]


def _tagged_tool(tool: ToolSpec) -> str:
    properties = tool.parameters.get("properties", {})
    return (
        f"\n<function>\n<name>{tool.name}</name>\n<description>{tool.description.strip()}</description>\n<parameters>"
        f"{''.join(_tagged_parameter(name, schema) for name, schema in properties.items())}"
        f"{_tags(tool.parameters, without=('type', 'properties'))}\n</parameters>\n</function>"
    )


def _tagged_parameter(name: str, schema: Mapping[str, Any]) -> str:
    kind = f"\n<type>{_tagged(schema['type'])}</type>" if "type" in schema else ""
    said = f"\n<description>{schema['description'].strip()}</description>" if "description" in schema else ""
    rest = _tags(schema, without=("name", "type", "description"))
    return f"\n<parameter>\n<name>{name}</name>{kind}{said}{rest}\n</parameter>"


def _tags(schema: Mapping[str, Any], *, without: Sequence[str]) -> str:
    return "".join(f"\n<{key}>{_tagged(value)}</{key}>" for key, value in schema.items() if key not in without)


def _tagged(value: Any) -> str:
    """Arrays and objects as JSON, anything else as Python prints it: so does the template."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list | tuple) else str(value)


# --- the families ---------------------------------------------------------------------------------

QWEN3_5 = replace(
    QWEN3,
    name="qwen3.5",
    thoughts=Thoughts((THINK,), (THINK_END,), in_prompt=True),
    calls=CallFormat(_json_tools, write_call, read_call, gap="\n\n"),
    text=trimmed,
    thought_space=None,
    empty_blocks="always",
)

QWEN3_CODER = replace(
    QWEN3_INSTRUCT,
    name="qwen3_coder",
    calls=CallFormat(_tagged_tools, write_call, read_call, gap="\n\n", after_results="\n"),
    text=trimmed_before_calls,
)
