"""Tools a model may call: the protocol, `@tool`, and the running of one message's calls.

Knows messages and tool specs (types.py) and the fault type (env.py). It must not know renderers, engines, trio or
any environment: whatever runs here is plain `async` code that the caller's scheduler drives.

Who is to blame decides what happens:

    the model's arguments are wrong, or the tool author raised `ToolError`  -> content the model reads
    the tool's own code raised anything else                                -> `ToolFault`, never a reward
"""

import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from jaxrl.env import EnvironmentFault
from jaxrl.types import Message, Metrics, ToolCall, ToolSpec

# --- nouns ---------------------------------------------------------------------------------------


class ToolError(Exception):
    """Raised by a tool's author to tell the model something went wrong that the model can act on."""


class ToolFault(EnvironmentFault):
    """A tool's own code failed. The episode is not the policy's to answer for."""


@dataclass(frozen=True)
class ToolResult:
    """What a call gave back. `is_error`: the content explains a refusal; `should_stop`: the episode ends here."""

    content: str
    should_stop: bool = False
    metrics: Metrics = field(default_factory=dict)
    is_error: bool = False


@runtime_checkable
class Tool(Protocol):
    """Anything with a name, a description, a JSON schema of its parameters, and `execute`."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters_schema(self) -> Mapping[str, Any]: ...

    async def execute(self, arguments: str) -> ToolResult:
        """Run on the JSON text of an object. Wrong arguments are content; a raised exception is a fault."""
        ...


def tool_to_spec(tool: Tool) -> ToolSpec:
    """What the model is told about `tool`."""
    return ToolSpec(name=tool.name, description=tool.description, parameters=tool.parameters_schema)


def tool_table(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Tools by name, in order. Two tools of one name are refused: one would silently shadow the other."""
    table: dict[str, Tool] = {}
    for each in tools:
        if each.name in table:
            raise ValueError(f"two tools are named {each.name!r}; tool names must be unique, so rename one of them")
        table[each.name] = each
    return table


# --- annotations: one description of a type serves the schema and the check -----------------------

_SUPPORTED = "str, int, float, bool, list[...], Literal[...], and any of these with | None"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def _without_none(annotation: Any) -> Any | None:
    """The X of `X | None` or `Optional[X]`; None when `annotation` is no such union."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return None
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    return members[0] if len(members) == 1 and len(typing.get_args(annotation)) == 2 else None


def _schema(annotation: Any) -> dict[str, Any]:
    """JSON schema of a supported annotation; TypeError for any other."""
    if isinstance(annotation, type) and annotation in _PLAIN:
        return {"type": _PLAIN[annotation]}
    if typing.get_origin(annotation) is Literal:
        return {"enum": list(typing.get_args(annotation))}
    if typing.get_origin(annotation) is list:
        return {"type": "array", "items": _schema(typing.get_args(annotation)[0])}
    inner = _without_none(annotation)
    if inner is not None:
        return {"anyOf": [_schema(inner), {"type": "null"}]}
    raise TypeError(f"unsupported annotation {annotation!r}; supported: {_SUPPORTED}")


def _convert(value: Any, annotation: Any, where: str) -> Any:
    """`value` as the annotation asks, or a ToolError that names what the model must change."""
    if typing.get_origin(annotation) is Literal:
        return _convert_literal(value, typing.get_args(annotation), where)
    if typing.get_origin(annotation) is list:
        if not isinstance(value, list):
            raise _wrong_type(value, "an array", where)
        item = typing.get_args(annotation)[0]
        return [_convert(each, item, f"{where}[{i}]") for i, each in enumerate(value)]
    inner = _without_none(annotation)
    if inner is not None:
        return None if value is None else _convert(value, inner, where)
    return _convert_plain(value, annotation, where)


def _convert_literal(value: Any, options: tuple[Any, ...], where: str) -> Any:
    for option in options:
        if type(option) is type(value) and option == value:  # True is not 1 here
            return option
    raise _wrong_type(value, "one of " + ", ".join(json.dumps(option) for option in options), where)


def _convert_plain(value: Any, annotation: type, where: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is float and number:
        return _finite(value, where)
    if annotation is int and number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if annotation in (str, bool) and isinstance(value, annotation):
        return value
    raise _wrong_type(value, f"of type {_PLAIN[annotation]}", where)


def _finite(value: float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ToolError(f"argument {where} is too large; give a finite number")
    return number


def _wrong_type(value: Any, expected: str, where: str) -> ToolError:
    return ToolError(f"argument {where} must be {expected}, got {_clip(json.dumps(value))}")


def _clip(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


# --- @tool ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parameter:
    name: str
    annotation: Any
    description: str
    default: Any  # inspect.Parameter.empty when the model must give it

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def schema(self) -> dict[str, Any]:
        schema = {**_schema(self.annotation), "description": self.description}
        return schema if self.required else {**schema, "default": self.default}


@dataclass(frozen=True)
class FunctionTool:
    """A Tool made of a function. Calling it calls the function, so it still reads as one in Python."""

    name: str
    description: str
    parameters_schema: Mapping[str, Any]
    function: Callable[..., Any]
    parameters: tuple[_Parameter, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # The decorator took the function's place in its module, so pickle must find the tool by that name.
        module, name = self.function.__module__, self.function.__qualname__
        if getattr(sys.modules.get(module), name, None) is self:
            return _named_tool, (module, name)
        return tool, (self.function,)

    async def execute(self, arguments: str) -> ToolResult:
        try:
            given = _bind(self, arguments)
        except ToolError as error:
            return ToolResult(f"Error: {error}", is_error=True)
        try:
            value = self.function(**given)
            if inspect.isawaitable(value):
                value = await value
            return _as_result(value)
        except ToolError as error:
            return ToolResult(f"Error: {error}", is_error=True)
        except ToolFault:
            raise
        except Exception as error:
            raise ToolFault(f"tool {self.name!r} failed: {type(error).__name__}: {error}") from error


def _named_tool(module: str, name: str) -> FunctionTool:
    __import__(module)
    return getattr(sys.modules[module], name)


def _as_result(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    return ToolResult(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _bind(tool: FunctionTool, arguments: str) -> dict[str, Any]:
    """Checked keyword arguments of the function, or a ToolError for the model."""
    given = _read_object(arguments)
    known = {parameter.name: parameter for parameter in tool.parameters}
    listing = ", ".join(known) or "none"
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ToolError(f"unknown argument {_clip(json.dumps(unknown[0]))}; {tool.name} takes: {listing}")
    missing = [name for name, parameter in known.items() if parameter.required and name not in given]
    if missing:
        raise ToolError(f"missing argument {missing[0]!r}; {tool.name} takes: {listing}")
    return {key: _convert(value, known[key].annotation, repr(key)) for key, value in given.items()}


def _read_object(arguments: str) -> dict[str, Any]:
    """The JSON object in `arguments`; blank text counts as {} (a call without arguments)."""
    try:
        value = json.loads(arguments if arguments.strip() else "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"arguments are not valid JSON ({_clip(str(error), 100)}); send a JSON object") from None
    if not isinstance(value, dict):
        raise ToolError(f"arguments must be a JSON object, got {_clip(arguments.strip())}")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def tool(function: Callable[..., Any]) -> FunctionTool:
    """Make a Tool of a typed function (sync or async) with a docstring.

    The docstring's first paragraph is the description. Each parameter needs an annotation and a description:
    a `name: text` line under `Args:` in the docstring, or `Annotated[type, "text"]`. A sync function runs in
    place, so one that waits should be async. For a method, wrap the bound one: `tool(obj.method)`.
    """
    name = function.__name__
    doc = inspect.getdoc(function) or ""
    description, documented = _read_docstring(doc)
    if not description:
        raise TypeError(f"tool {name!r} has no docstring; its first paragraph is what the model reads, so write one")
    hints = typing.get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    parameters = tuple(_parameter(name, each, hints, documented) for each in signature.parameters.values())
    stale = [key for key in documented if key not in signature.parameters]
    if stale:
        raise TypeError(f"tool {name!r} documents {stale[0]!r}, which is not a parameter; remove or rename that line")
    schema = {
        "type": "object",
        "properties": {each.name: each.schema() for each in parameters},
        "required": [each.name for each in parameters if each.required],
        "additionalProperties": False,
    }
    return FunctionTool(name, description, schema, function, parameters)


def _parameter(
    tool_name: str, parameter: inspect.Parameter, hints: Mapping[str, Any], documented: Mapping[str, str]
) -> _Parameter:
    where = f"tool {tool_name!r}, parameter {parameter.name!r}"
    if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        raise TypeError(f"{where}: the model names its arguments, so *args, **kwargs and positional-only are refused")
    if parameter.name == "self" and "self" not in hints:
        raise TypeError(f"{where}: `@tool` cannot decorate a method; wrap the bound one: tool(obj.{tool_name})")
    if parameter.name not in hints:
        raise TypeError(f"{where} has no annotation; give it one of: {_SUPPORTED}")
    annotation, description = hints[parameter.name], documented.get(parameter.name, "")
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *notes = typing.get_args(annotation)
        description = description or next((note for note in notes if isinstance(note, str)), "")
    if not description:
        raise TypeError(f"{where} is undocumented; add a line `{parameter.name}: what it is` under `Args:`")
    try:
        _schema(annotation)
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None
    return _Parameter(parameter.name, annotation, description, parameter.default)


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """(first paragraph, description by parameter)."""
    first, _, _ = doc.partition("\n\n")
    head, _, section = doc.partition("Args:\n")
    documented: dict[str, str] = {}
    current, indent = None, None
    for line in section.splitlines():
        if not line.startswith(" "):
            break  # a blank line, or the next section
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        entry = re.match(r"\s+(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
        if entry and depth == indent:
            current = entry[1]
            documented[current] = entry[2].strip()
        elif current:
            documented[current] += " " + line.strip()
    return " ".join(min(first, head, key=len).split()), documented


# --- running the calls of one message -------------------------------------------------------------


@dataclass(frozen=True)
class CallReport:
    """The calls of one message that ran (`calls[i]` gave `results[i]`) and the replies for the model.

    messages: results in call order, then one reply per malformed call.
    metrics: `tool_calls`, `tool_errors`, `malformed_calls`, and the sum of the tools' own metrics.
    """

    messages: tuple[Message, ...]
    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]
    should_stop: bool
    metrics: Metrics


async def report_calls(tools: Mapping[str, Tool] | Sequence[Tool], message: Message) -> CallReport:
    """Run the message's calls one after another. A result with `should_stop` leaves later calls unrun."""
    table = tools if isinstance(tools, Mapping) else tool_table(tools)
    results: list[ToolResult] = []
    for call in message.tool_calls:
        results.append(await _run_call(table, call))
        if results[-1].should_stop:
            break
    calls = message.tool_calls[: len(results)]
    replies = [_reply(call.name, result.content) for call, result in zip(calls, results, strict=True)]
    replies += [_reply(None, f"Error: {malformed.error}") for malformed in message.malformed_calls]
    return CallReport(
        messages=tuple(replies),
        calls=calls,
        results=tuple(results),
        should_stop=any(result.should_stop for result in results),
        metrics=_call_metrics(results, len(message.malformed_calls)),
    )


async def run_calls(tools: Mapping[str, Tool] | Sequence[Tool], message: Message) -> list[Message]:
    """The replies to a message's calls. An env that needs `should_stop` or metrics uses `report_calls`."""
    return list((await report_calls(tools, message)).messages)


async def _run_call(table: Mapping[str, Tool], call: ToolCall) -> ToolResult:
    if call.name not in table:
        known = ", ".join(table) or "none"
        return ToolResult(f"Error: unknown tool {_clip(json.dumps(call.name))}; known tools: {known}", is_error=True)
    return await table[call.name].execute(call.arguments)


def _reply(name: str | None, content: str) -> Message:
    # JSON escapes can smuggle lone surrogates in, which no tokenizer can encode.
    return Message(role="tool", content=content.encode("utf-8", "replace").decode("utf-8"), name=name)


def _call_metrics(results: Sequence[ToolResult], malformed: int) -> dict[str, float]:
    metrics = {
        "tool_calls": float(len(results)),
        "tool_errors": float(sum(result.is_error for result in results)),
        "malformed_calls": float(malformed),
    }
    for result in results:
        for key, value in result.metrics.items():
            metrics[key] = metrics.get(key, 0.0) + value
    return metrics
