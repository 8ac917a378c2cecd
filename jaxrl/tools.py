"""Tools a model may call: the protocol, `@tool`, and the running of one message's calls.

Knows messages and tool specs (types.py) and the fault type (env.py). It must not know renderers, engines, trio or
any environment: whatever runs here is `async` code that the caller's scheduler drives, trio or the asyncio loop of an
`asyncio_envs` environment. anyio is the name that both have for deadlines and for tasks side by side.

Who is to blame decides what happens:

    the model's arguments are wrong, or the tool author raised `ToolError`  -> content the model reads
    the call gave no answer in time                                         -> content the model reads, and counted
    the tool's own code raised anything else                                -> `ToolFault`, never a reward

How long a call takes is mostly what the model asked for, such as a program that never ends, and so it must be able to
learn from it; where the tool itself hangs, `tool/<name>/timeouts` says so.
"""

import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import anyio

from jaxrl.env import EnvironmentFault
from jaxrl.types import MalformedToolCall, Message, Metrics, ToolCall, ToolSpec

_Result = TypeVar("_Result")

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
        """Run on the JSON text of an object (`read_arguments`).

        Wrong arguments and a raised ToolError are content; any other exception is a fault. May be cancelled, when it
        takes too long: what must be cleaned up belongs into a `finally`.
        """
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
        options = list(typing.get_args(annotation))
        kinds = {_PLAIN.get(type(option)) for option in options}
        return {**({"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}), "enum": options}
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
    if annotation is str and isinstance(value, int | float):
        return json.dumps(value)  # families whose calls are not JSON cannot write the text 3: it reads as a number
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
    try:
        given = json.dumps(value)
    except RecursionError:
        given = "a value that is nested too deeply"
    return ToolError(f"argument {where} must be {expected}, got {_clip(given)}")


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
        return await _blamed(self.name, partial(self._call, arguments))

    async def _call(self, arguments: str) -> ToolResult:
        value = self.function(**_bind(self, arguments))
        return _as_result(await value if inspect.isawaitable(value) else value)


def _named_tool(module: str, name: str) -> FunctionTool:
    __import__(module)
    return getattr(sys.modules[module], name)


def _as_result(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    return ToolResult(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _bind(tool: FunctionTool, arguments: str) -> dict[str, Any]:
    """Checked keyword arguments of the function, or a ToolError for the model."""
    given = read_arguments(arguments)
    known = {parameter.name: parameter for parameter in tool.parameters}
    listing = ", ".join(known) or "none"
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ToolError(f"unknown argument {_clip(json.dumps(unknown[0]))}; {tool.name} takes: {listing}")
    missing = [name for name, parameter in known.items() if parameter.required and name not in given]
    if missing:
        raise ToolError(f"missing argument {missing[0]!r}; {tool.name} takes: {listing}")
    return {key: _convert(value, known[key].annotation, repr(key)) for key, value in given.items()}


def read_arguments(arguments: str) -> dict[str, Any]:
    """The JSON object in a call's `arguments`; blank text counts as {}. Raises ToolError for anything else."""
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
    stale = [key for key in documented if key not in signature.parameters]
    if stale:
        listing = ", ".join(map(repr, signature.parameters)) or "none"
        raise TypeError(
            f"tool {name!r} documents {stale[0]!r}, which is not a parameter (they are: {listing}); remove or rename "
            "that line"
        )
    parameters = tuple(_parameter(name, each, hints, documented) for each in signature.parameters.values())
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
    found = _Parameter(parameter.name, annotation, description, parameter.default)
    try:
        json.dumps(found.schema())
    except TypeError as error:
        raise TypeError(f"{where}: {error}; the model reads annotation and default as JSON") from None
    return found


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

_COUNTED = ("tool_calls", "tool_errors", "malformed_calls")

CALL_SECONDS = 60.0
"""How long a call may take unless its environment says otherwise."""


@dataclass(frozen=True)
class CallReport:
    """The calls of one message that ran (`calls[i]` gave `results[i]`) and the replies for the model.

    messages: a reply to every call in the order of the turn, each with the id of its call; a malformed call is answered
    with its error. Where calls were left unrun, the calls after the one that stopped have no reply, malformed or not.
    metrics: `tool_calls`, `tool_errors`, `malformed_calls` (all of the turn's, answered or not); of every tool that was
    called `tool/<name>/calls`, `/errors`, `/timeouts` (errors too) and `/seconds`; the tools' own metrics. All are
    sums, which stay true when they are added up over turns and episodes; a rate is a quotient of two of them.
    """

    messages: tuple[Message, ...]
    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]
    should_stop: bool
    metrics: Metrics


async def report_calls(
    tools: Mapping[str, Tool] | Sequence[Tool],
    message: Message,
    *,
    parallel: bool = False,
    call_seconds: float | None = CALL_SECONDS,
) -> CallReport:
    """Run a message's calls and report on them in the order of the turn, in which malformed ones are answered too.

    parallel: False runs one call after another, and a result with `should_stop` leaves those after it unrun. True
    starts all of them at once, in no order, and waits for all: `should_stop` then stops nothing that runs, so that
    what a turn does depends on no race. Only for tools that do not mind each other's effects.
    call_seconds: a call that takes longer is cancelled, which runs its cleanup, and the model is told; None lets it
    take for ever. What cannot be cancelled (a sync function, a thread that is waited for) is waited for, and its late
    result counts; so a tool that waits in a thread should let go of it (`trio.to_thread.run_sync(...,
    abandon_on_cancel=True)`).

    Errors: ToolFault, naming the tool, when a tool's own code fails; its siblings are cancelled first. An exception
    group where several fail together.
    """
    if call_seconds is not None and not call_seconds > 0:
        raise ValueError(f"call_seconds={call_seconds}: expected a positive number of seconds, or None for no limit")
    table = tools if isinstance(tools, Mapping) else tool_table(tools)
    run = _side_by_side if parallel and len(message.tool_calls) > 1 else _one_by_one
    answered = await run([partial(_answer, table, call, call_seconds) for call in message.calls])
    ran = [each for each in answered if isinstance(each, _Ran)]
    return CallReport(
        messages=tuple(_reply(each) for each in answered),
        calls=tuple(each.call for each in ran),
        results=tuple(each.result for each in ran),
        should_stop=any(each.result.should_stop for each in ran),
        metrics=_call_metrics(ran, len(message.malformed_calls)),
    )


@dataclass(frozen=True)
class _Ran:
    """A call and what became of it. `seconds` is None for a call of no tool, which took none."""

    call: ToolCall
    result: ToolResult
    seconds: float | None = None
    timed_out: bool = False


_Answer = _Ran | MalformedToolCall
"""What a call came to: one that could not be read stays what it is, and carries its own answer."""

_Job = Callable[[], Awaitable[_Answer]]


async def _one_by_one(jobs: Sequence[_Job]) -> list[_Answer]:
    """What the jobs up to the first that asks to stop came to."""
    answers: list[_Answer] = []
    for job in jobs:
        answers.append(answer := await job())
        if isinstance(answer, _Ran) and answer.result.should_stop:
            break
    return answers


async def _side_by_side(jobs: Sequence[_Job]) -> list[_Answer]:
    """What the jobs came to, in their order, whatever order they end in."""
    answers: dict[int, _Answer] = {}

    async def one(index: int) -> None:
        answers[index] = await jobs[index]()

    try:
        async with anyio.create_task_group() as group:
            for index in range(len(jobs)):
                group.start_soon(one, index)
    except BaseExceptionGroup as failed:
        fault, *others = failed.exceptions
        if others:
            raise
        raise fault from fault.__cause__  # alone it is what it would have been without the others
    return [answers[index] for index in range(len(jobs))]


async def _answer(table: Mapping[str, Tool], call: ToolCall | MalformedToolCall, seconds: float | None) -> _Answer:
    return await _run_call(table, call, seconds) if isinstance(call, ToolCall) else call


async def _run_call(table: Mapping[str, Tool], call: ToolCall, seconds: float | None) -> _Ran:
    if call.name not in table:
        known = ", ".join(table) or "none"
        return _Ran(call, _refusal(f"unknown tool {_clip(json.dumps(call.name))}; known tools: {known}"))
    began = anyio.current_time()
    result = await _blamed(call.name, partial(_in_time, table[call.name], call.arguments, seconds))
    took = anyio.current_time() - began
    if result is None:
        late = _refusal(f"{call.name} gave no answer within {seconds:g} s and was stopped")
        return _Ran(call, late, took, timed_out=True)
    return _Ran(call, result, took)


async def _in_time(tool: Tool, arguments: str, seconds: float | None) -> ToolResult | None:
    """The tool's result, or None when it took longer."""
    with anyio.move_on_after(seconds):
        result = await tool.execute(arguments)
        if not isinstance(result, ToolResult):
            raise TypeError(f"execute returned {type(result).__name__}; expected a ToolResult")
        if taken := [key for key in result.metrics if key in _COUNTED or key.startswith("tool/")]:
            raise ValueError(f"its metric {taken[0]!r} has a name that counts the calls themselves; rename it")
        return result
    return None


async def _blamed(name: str, run: Callable[[], Awaitable[_Result]]) -> _Result | ToolResult:
    """What `run` gives: the author's ToolError as content, any other exception as a ToolFault of this tool."""
    try:
        return await run()
    except ToolError as error:
        return _refusal(str(error))
    except ToolFault:
        raise
    except Exception as error:
        cause = first_error(error)  # the tool's own tasks wrap what failed in them
        raise ToolFault(f"tool {name!r} failed: {type(cause).__name__}: {cause}") from error


def first_error(error: BaseException) -> BaseException:
    """The first error inside the groups that task groups wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _refusal(why: str) -> ToolResult:
    return ToolResult(f"Error: {why}", is_error=True)


def _reply(answer: _Answer) -> Message:
    if isinstance(answer, MalformedToolCall):
        content, name, id = f"Error: {answer.error}", None, answer.id
    else:
        content, name, id = answer.result.content, answer.call.name, answer.call.id
    return Message("tool", _encodable(content), name=name and _encodable(name), call_id=id and _encodable(id))


def _encodable(text: str) -> str:
    """JSON escapes can smuggle lone surrogates in, which no tokenizer can encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _call_metrics(ran: Sequence[_Ran], malformed: int) -> dict[str, float]:
    metrics = {
        "tool_calls": float(len(ran)),
        "tool_errors": float(sum(each.result.is_error for each in ran)),
        "malformed_calls": float(malformed),
    }
    for each in ran:
        for key, value in [*_measured(each), *each.result.metrics.items()]:
            metrics[key] = metrics.get(key, 0.0) + value
    return metrics


def _measured(ran: _Ran) -> list[tuple[str, float]]:
    """A call's own numbers. A name the model made up has none: there would be no end of such metrics."""
    if ran.seconds is None:
        return []
    tool = f"tool/{ran.call.name}"
    return [
        (f"{tool}/calls", 1.0),
        (f"{tool}/errors", float(ran.result.is_error)),
        (f"{tool}/timeouts", float(ran.timed_out)),
        (f"{tool}/seconds", ran.seconds),
    ]
