"""Tools: schemas from annotations, blame (model, author, infrastructure), and the running of a message's calls."""

import asyncio
import functools
import json
import pickle
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Optional

import jsonschema
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.env import EnvironmentFault
from jaxrl.tools import (
    CallReport,
    FunctionTool,
    Tool,
    ToolError,
    ToolFault,
    ToolResult,
    read_arguments,
    report_calls,
    tool,
    tool_table,
    tool_to_spec,
)
from jaxrl.types import MalformedToolCall, Message, ToolCall


@tool
def search(
    query: str,
    limit: int = 3,
    *,
    weights: list[float] | None = None,
    mode: Literal["exact", "fuzzy"] = "exact",
    strict: Annotated[bool, "fail when nothing is found"] = False,
) -> str:
    """Search the archive,
    all of it.

    A second paragraph the model does not need.

    Args:
        query: what to look for,
            in words
        limit (int): how many
        weights: one a word
        mode: how to compare

    Returns:
        text: ignored
    """
    return f"{query}|{limit}|{weights}|{mode}|{strict}"


@tool
async def wait_and_echo(text: str) -> str:
    """Echo, later.

    Args:
        text: to echo
    """
    await trio.lowlevel.checkpoint()
    return text


@tool
def no_parameters() -> dict[str, int]:
    """Give a constant."""
    return {"a": 1}


@tool
def submit(answer: Optional[str]) -> ToolResult:  # noqa: UP045 - the older spelling must work too
    """Hand in.

    Args:
        answer: the answer
    """
    return ToolResult(f"got {answer}", should_stop=True, metrics={"handed_in": 1.0})


@tool
def refuse() -> str:
    """Refuse always."""
    raise ToolError("the shop is closed; try tomorrow")


@tool
def crash() -> str:
    """Crash always."""
    raise KeyError("secret")


def run(each: Tool, arguments: str) -> ToolResult:
    return trio.run(each.execute, arguments)


def report(tools: list[Tool], message: Message) -> CallReport:
    return trio.run(report_calls, tools, message)


def calls(*pairs: tuple[str, str]) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(name, arguments) for name, arguments in pairs))


# --- schema ---------------------------------------------------------------------------------------


def test_schema_is_read_from_annotations_and_docstring():
    spec = tool_to_spec(search)
    assert (spec.name, spec.description) == ("search", "Search the archive, all of it.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for, in words"},
            "limit": {"type": "integer", "description": "how many", "default": 3},
            "weights": {
                "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}],
                "description": "one a word",
                "default": None,
            },
            "mode": {"type": "string", "enum": ["exact", "fuzzy"], "description": "how to compare", "default": "exact"},
            "strict": {"type": "boolean", "description": "fail when nothing is found", "default": False},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    assert json.dumps(spec.parameters)
    assert isinstance(search, Tool)


def undocumented_parameter(query: str) -> str:
    """Search."""
    return query


def no_docstring(query: str) -> str:
    return query


def no_annotation(query) -> str:
    """Search.

    Args:
        query: words
    """
    return query


def unsupported_annotation(query: dict[str, int]) -> str:
    """Search.

    Args:
        query: words
    """
    return str(query)


def variadic(*query: str) -> str:
    """Search.

    Args:
        query: words
    """
    return str(query)


def stale_line(query: str) -> str:
    """Search.

    Args:
        query: words
        limit: gone
    """
    return query


def misnamed_line(query: str, limit: int = 3) -> str:
    """Search.

    Args:
        words: what to look for
        limit: how many
    """
    return query


class Shop:
    def __init__(self) -> None:
        self.sold: list[str] = []

    def sell(self, item: str) -> str:
        """Sell.

        Args:
            item: which
        """
        self.sold.append(item)
        return "sold"


@pytest.mark.parametrize(
    ("function", "teaches"),
    [
        (undocumented_parameter, r"parameter 'query' is undocumented; add a line `query: "),
        (no_docstring, r"'no_docstring' has no docstring"),
        (no_annotation, r"parameter 'query' has no annotation; give it one of: str"),
        (unsupported_annotation, r"parameter 'query': unsupported annotation dict\[str, int\]; supported: str"),
        (variadic, r"refused"),
        (stale_line, r"documents 'limit', which is not a parameter \(they are: 'query'\)"),
        (misnamed_line, r"documents 'words', which is not a parameter \(they are: 'query', 'limit'\); remove"),
        (Shop.sell, r"tool\(obj\.sell\)"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_with_the_remedy(function: Callable[..., Any], teaches: str):
    with pytest.raises(TypeError, match=teaches):
        tool(function)


def test_a_bound_method_is_a_tool_with_its_object():
    shop = Shop()
    assert run(tool(shop.sell), '{"item": "tea"}').content == "sold"
    assert shop.sold == ["tea"]


def test_a_tool_still_reads_as_a_function():
    assert search("a", limit=1) == "a|1|None|exact|False"


@pytest.mark.parametrize("each", [search, tool(Shop().sell)])
def test_tools_pickle(each: FunctionTool):
    assert pickle.loads(pickle.dumps(each)).parameters_schema == each.parameters_schema


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ('{"query": "x"}', "x|3|None|exact|False"),
        ('{"query": "x", "limit": 2.0, "weights": [1, 2.5], "mode": "fuzzy"}', "x|2|[1.0, 2.5]|fuzzy|False"),
        ('{"query": "</tool_call> {\\"}", "weights": null, "strict": true}', '</tool_call> {"}|3|None|exact|True'),
    ],
)
def test_right_arguments_are_converted(arguments: str, content: str):
    assert run(search, arguments) == ToolResult(content)


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        ('{"query": ', "not valid JSON"),
        ("query=x", "not valid JSON"),
        ('["x"]', 'must be a JSON object, got ["x"]'),
        ("null", "must be a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"query": "x", "limit": NaN}', "NaN is not JSON"),
        ('{"query": "x", "limit": ' + "1" * 5000 + "}", "not valid JSON"),
        ("", "missing argument 'query'; search takes: query, limit, weights, mode, strict"),
        ("{}", "missing argument 'query'"),
        ('{"query": "x", "q": 1}', 'unknown argument "q"; search takes: query, limit'),
        ('{"query": [7]}', "argument 'query' must be of type string, got [7]"),
        ('{"query": null}', "argument 'query' must be of type string, got null"),
        ('{"query": "x", "limit": "3"}', "argument 'limit' must be of type integer, got \"3\""),
        ('{"query": "x", "limit": true}', "argument 'limit' must be of type integer, got true"),
        ('{"query": "x", "limit": 1.5}', "argument 'limit' must be of type integer, got 1.5"),
        ('{"query": "x", "limit": 1e999}', "argument 'limit' must be of type integer"),
        ('{"query": "x", "weights": 1}', "argument 'weights' must be an array, got 1"),
        ('{"query": "x", "weights": [1, "a"]}', "argument 'weights'[1] must be of type number, got \"a\""),
        ('{"query": "x", "weights": [1e999]}', "argument 'weights'[0] is too large"),
        ('{"query": "x", "weights": [1' + "0" * 400 + "]}", "argument 'weights'[0] is too large"),
        ('{"query": "x", "mode": "other"}', 'argument \'mode\' must be one of "exact", "fuzzy", got "other"'),
        ('{"query": "x", "strict": 1}', "argument 'strict' must be of type boolean, got 1"),
    ],
)
def test_wrong_arguments_become_content_that_teaches(arguments: str, teaches: str):
    result = run(search, arguments)
    assert result.is_error
    assert not result.should_stop
    assert teaches in result.content
    assert len(result.content) < 250, "a short error costs the model few tokens, whatever it sent"


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_no_argument_text_is_ever_a_fault(arguments: str):
    assert isinstance(run(search, arguments), ToolResult)


@tool
def everything(
    text: str,
    count: int,
    share: float = 0.5,
    flag: bool = False,
    mode: Literal["a", "b"] = "a",
    items: list[int] | None = None,
    nested: Optional[list[list[str]]] = None,  # noqa: UP045 - the older spelling must work too
) -> ToolResult:
    """Take one of each.

    Args:
        text: text
        count: a number
        share: a number
        flag: yes or no
        mode: which
        items: numbers
        nested: texts
    """
    return ToolResult("", metrics={"share": share, "count": count})


SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([1.0, 2.5, -0.0, 1e300, "a", "b", "", "c"])
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.lists(st.lists(st.sampled_from(["a", 1]), max_size=2), max_size=2)
RIGHT = st.fixed_dictionaries(
    {"text": st.text(max_size=2), "count": st.integers()},
    optional={
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "mode": st.sampled_from(["a", "b"]),
        "items": st.none() | st.lists(st.integers()),
        "nested": st.none() | st.lists(st.lists(st.text(max_size=1), max_size=2), max_size=2),
    },
)
NAMES = st.sampled_from(["text", "count", "share", "flag", "mode", "items", "nested", "other"])


@settings(max_examples=300)
@given(RIGHT, st.dictionaries(NAMES, VALUES, max_size=2), st.sets(NAMES, max_size=1))
def test_what_is_accepted_is_what_the_schema_says(right: dict[str, Any], wrong: dict[str, Any], left_out: set[str]):
    """The schema is what the model was told; one step away from right arguments, both judge alike. But a text may be
    given as a number or a boolean: not every family of models can write the difference."""
    given_ = {name: value for name, value in (right | wrong).items() if name not in left_out}
    told = json.dumps(everything.parameters_schema)
    schema = json.loads(told.replace('"type": "string"', '"type": ["string", "number", "boolean"]'))
    valid = jsonschema.Draft202012Validator(schema).is_valid(given_)
    result = run(everything, json.dumps(given_))
    assert result.is_error is not valid, result.content
    if valid:
        assert result.metrics == {"share": given_.get("share", 0.5), "count": given_["count"]}


def test_async_results_and_results_that_are_not_text():
    assert run(wait_and_echo, '{"text": "hi"}').content == "hi"
    assert run(no_parameters, "") == run(no_parameters, "{}") == ToolResult('{"a": 1}')


def test_a_text_may_be_given_as_a_number_because_not_every_family_can_write_the_difference():
    assert run(search, '{"query": 7}').content.startswith("7|")
    assert run(search, '{"query": true}').content.startswith("true|")


# --- blame ----------------------------------------------------------------------------------------


def test_a_tool_error_is_content_for_the_model():
    assert run(refuse, "{}") == ToolResult("Error: the shop is closed; try tomorrow", is_error=True)


def test_i13_an_exception_in_a_tool_is_a_fault_that_names_the_tool():
    with pytest.raises(ToolFault, match="tool 'crash' failed: KeyError: 'secret'") as caught:
        run(crash, "{}")
    assert isinstance(caught.value, EnvironmentFault)
    assert isinstance(caught.value.__cause__, KeyError)


def test_cancellation_passes_through_a_tool():
    @tool
    async def sleep_forever() -> str:
        """Sleep."""
        await trio.sleep_forever()
        return ""

    async def main() -> bool:
        with trio.move_on_after(0) as scope:
            await sleep_forever.execute("{}")
        return scope.cancelled_caught

    assert trio.run(main)


# --- the calls of a message -----------------------------------------------------------------------


def test_replies_come_in_call_order_with_the_tools_names():
    message = calls(("no_parameters", ""), ("wait_and_echo", '{"text": "b"}'), ("no_parameters", "{}"))
    replies = report([no_parameters, wait_and_echo], message).messages
    assert [(reply.role, reply.name, reply.content) for reply in replies] == [
        ("tool", "no_parameters", '{"a": 1}'),
        ("tool", "wait_and_echo", "b"),
        ("tool", "no_parameters", '{"a": 1}'),
    ]


def test_unknown_and_malformed_calls_are_answered_and_the_valid_ones_run():
    message = Message(
        "assistant",
        tool_calls=(ToolCall("serch", "{}"), ToolCall("no_parameters", "{}")),
        malformed_calls=(MalformedToolCall("<tool_call>{", "close the brace", place=2),),
    )
    got = report([no_parameters, search], message)
    assert [reply.content for reply in got.messages] == [
        'Error: unknown tool "serch"; known tools: no_parameters, search',
        '{"a": 1}',
        "Error: close the brace",
    ]
    counts = {name: got.metrics[name] for name in ("tool_calls", "tool_errors", "malformed_calls")}
    assert counts == {"tool_calls": 2.0, "tool_errors": 1.0, "malformed_calls": 1.0}
    assert not [name for name in got.metrics if "serch" in name], "what a model makes up is no metric"
    assert not got.should_stop


def test_should_stop_leaves_later_calls_unrun_and_metrics_are_summed():
    shop = Shop()
    message = calls(("no_parameters", ""), ("submit", '{"answer": "4"}'), ("sell", '{"item": "tea"}'))
    got = report([no_parameters, submit, tool(shop.sell)], message)
    assert got.should_stop
    assert [call.name for call in got.calls] == ["no_parameters", "submit"]
    assert [result.content for result in got.results] == ['{"a": 1}', "got 4"]
    assert got.metrics["handed_in"] == 1.0
    assert shop.sold == []


def test_a_message_without_calls_gets_no_reply():
    assert report([search], Message("assistant", "hello")).messages == ()


def test_replies_can_always_be_encoded():
    said = Message("assistant", tool_calls=(ToolCall("wait_and_echo", '{"text": "\\ud800!"}', "c\ud800"),))
    (reply,) = report([wait_and_echo], said).messages
    assert (reply.content, reply.call_id) == ("?!", "c?")
    (reply,) = report([], calls(("\ud800", ""))).messages
    assert (reply.name, reply.content) == ("?", 'Error: unknown tool "\\ud800"; known tools: none')


def test_duplicate_names_are_refused():
    with pytest.raises(ValueError, match="two tools are named 'search'"):
        tool_table([search, no_parameters, search])


# --- one after another, or side by side -----------------------------------------------------------


@dataclass
class Nap:
    """A tool that is no FunctionTool: it sleeps the seconds it is told, or does what `then` does, and keeps a diary."""

    then: Callable[[str], Awaitable[Any]] | None = None
    name: str = "nap"
    description: str = "Sleep."
    parameters_schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    diary: list[str] = field(default_factory=list)

    async def execute(self, arguments: str) -> ToolResult:
        self.diary.append(f"begin {arguments}")
        try:
            if self.then is not None:
                return await self.then(arguments)
            await trio.sleep(float(arguments))
            self.diary.append(f"end {arguments}")
            return ToolResult(f"slept {arguments}")
        finally:
            self.diary.append(f"clean {arguments}")


def naps(*seconds: float) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall("nap", str(s), f"id{i}") for i, s in enumerate(seconds)))


async def test_calls_one_after_another_take_their_sum(autojump_clock):
    nap, began = Nap(), trio.current_time()
    got = await report_calls([nap], naps(3.0, 1.0, 2.0))
    assert trio.current_time() - began == pytest.approx(6.0)
    assert nap.diary[:3] == ["begin 3.0", "end 3.0", "clean 3.0"]
    assert [m.content for m in got.messages] == ["slept 3.0", "slept 1.0", "slept 2.0"]


async def test_T15_calls_side_by_side_take_the_longest_and_are_answered_in_call_order(autojump_clock):
    nap, began = Nap(), trio.current_time()
    got = await report_calls([nap], naps(3.0, 1.0, 2.0), parallel=True)
    assert trio.current_time() - began == pytest.approx(3.0)
    assert [entry for entry in nap.diary if "end" in entry] == ["end 1.0", "end 2.0", "end 3.0"]
    assert [(m.name, m.call_id, m.content) for m in got.messages] == [
        ("nap", "id0", "slept 3.0"),
        ("nap", "id1", "slept 1.0"),
        ("nap", "id2", "slept 2.0"),
    ]
    assert [call.id for call in got.calls] == ["id0", "id1", "id2"]


def test_replies_to_malformed_calls_stand_where_the_calls_do_and_have_their_ids():
    bad = (("first", 0), ("second", 0), ("third", 1), ("fourth", 2))
    message = Message(
        "assistant",
        tool_calls=(ToolCall("no_parameters", "{}", "a"), ToolCall("serch", "{}", "b")),
        malformed_calls=tuple(MalformedToolCall("{", error, f"bad {error}", place) for error, place in bad),
    )
    got = report([no_parameters], message)
    assert [(reply.call_id, reply.content[:13]) for reply in got.messages] == [
        ("bad first", "Error: first"),
        ("bad second", "Error: second"),
        ("a", '{"a": 1}'),
        ("bad third", "Error: third"),
        ("b", "Error: unknow"),
        ("bad fourth", "Error: fourth"),
    ]
    assert [reply.call_id for reply in got.messages] == [call.id for call in message.calls]
    assert [call.id for call in got.calls] == ["a", "b"]
    assert [result.is_error for result in got.results] == [False, True]
    assert (got.metrics["tool_errors"], got.metrics["malformed_calls"]) == (1.0, 4.0)


@pytest.mark.parametrize("parallel", [False, True])
async def test_after_the_call_that_stops_malformed_ones_are_answered_only_where_all_calls_run(parallel: bool):
    message = Message(
        "assistant",
        tool_calls=(ToolCall("submit", '{"answer": "4"}'), ToolCall("no_parameters", "{}")),
        malformed_calls=(MalformedToolCall("{", "before"), MalformedToolCall("{", "after", place=1)),
    )
    got = await report_calls([submit, no_parameters], message, parallel=parallel)
    everything = ["Error: before", "got 4", "Error: after", '{"a": 1}']
    assert [reply.content for reply in got.messages] == (everything if parallel else everything[:2])
    assert got.should_stop
    assert got.metrics["malformed_calls"] == 2.0, "the model wrote them, answered or not"


PLACES = st.lists(st.integers(0, 5), max_size=3).map(sorted)
ANY_CALL = st.one_of(
    st.floats(0, 9, allow_subnormal=False).map(lambda s: ToolCall("nap", str(s))),
    st.sampled_from([ToolCall("refuse", ""), ToolCall("serch", "{}", "x"), ToolCall("search", "[")]),
)


@given(st.lists(ANY_CALL, max_size=5), PLACES)
def test_P05_the_same_calls_have_the_same_replies_however_they_are_run(asked: list[ToolCall], places: list[int]):
    """Training and evaluation step the same env, whose calls come through here."""
    malformed = tuple(MalformedToolCall("{", "close the brace", f"bad{k}", place) for k, place in enumerate(places))
    message = Message("assistant", tool_calls=tuple(asked), malformed_calls=malformed)
    one, other = (_in_virtual_time(message, parallel=parallel, call_seconds=5.0) for parallel in (False, True))
    assert (one.messages, one.calls, one.results) == (other.messages, other.calls, other.results)
    assert one.metrics == pytest.approx(other.metrics)
    assert [m.call_id for m in one.messages] == [call.id for call in message.calls]
    assert [call for call in message.calls if isinstance(call, ToolCall)] == asked
    assert [call for call in message.calls if isinstance(call, MalformedToolCall)] == [*malformed]


def _in_virtual_time(message: Message, **how: Any) -> CallReport:
    work = functools.partial(report_calls, [Nap(), refuse, search], message, **how)
    return trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_should_stop_side_by_side_stops_nothing_that_runs(autojump_clock):
    nap = Nap()
    message = Message("assistant", tool_calls=(ToolCall("submit", '{"answer": "4"}'), *naps(2.0).tool_calls))
    got = await report_calls([nap, submit], message, parallel=True)
    assert got.should_stop
    assert [m.content for m in got.messages] == ["got 4", "slept 2.0"]


def test_one_call_needs_no_task_of_its_own():
    async def same_task(arguments: str) -> ToolResult:
        return ToolResult(str(trio.lowlevel.current_task() is caller))

    async def main() -> CallReport:
        nonlocal caller
        caller = trio.lowlevel.current_task()
        return await report_calls([Nap(same_task)], naps(1), parallel=True)

    caller: Any = None
    assert trio.run(main).results[0].content == "True"


def test_calls_run_on_asyncio_too():
    """An environment of `asyncio_envs` steps on an asyncio loop."""

    async def wait(arguments: str) -> ToolResult:
        await asyncio.sleep(float(arguments))
        return ToolResult(arguments)

    got = asyncio.run(report_calls([Nap(wait)], naps(0.02, 60.0, 0.01), parallel=True, call_seconds=0.1))  # type: ignore[arg-type]
    assert [m.content for m in got.messages] == [
        "0.02",
        "Error: nap gave no answer within 0.1 s and was stopped",
        "0.01",
    ]


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [False, True])
async def test_a_call_that_takes_too_long_is_cleaned_up_and_told_and_the_others_answer(autojump_clock, parallel: bool):
    nap = Nap()
    got = await report_calls([nap], naps(1.0, 50.0, 2.0), parallel=parallel, call_seconds=10)
    assert [m.content for m in got.messages] == [
        "slept 1.0",
        "Error: nap gave no answer within 10 s and was stopped",
        "slept 2.0",
    ]
    assert [result.is_error for result in got.results] == [False, True, False]
    assert "end 50.0" not in nap.diary
    assert "clean 50.0" in nap.diary


async def test_a_call_has_a_minute_unless_told_otherwise_and_none_is_for_ever(autojump_clock):
    short = await report_calls([Nap()], naps(61.0))
    assert short.results[0].is_error
    long = await report_calls([Nap()], naps(1e6), call_seconds=None)
    assert long.results[0].content == "slept 1000000.0"


async def test_what_cannot_be_cancelled_is_waited_for_and_its_late_result_counts(autojump_clock):
    async def stubborn(arguments: str) -> ToolResult:
        with trio.CancelScope(shield=True):
            await trio.sleep(20)
        return ToolResult("late")

    got = await report_calls([Nap(stubborn)], naps(1.0), call_seconds=5)
    assert got.results == (ToolResult("late"),)
    assert (got.metrics["tool/nap/timeouts"], got.metrics["tool/nap/seconds"]) == (0.0, pytest.approx(20.0))


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
async def test_I12_a_time_that_cannot_be_meant_is_refused(seconds: float):
    with pytest.raises(ValueError, match=r"call_seconds=.*: expected a positive number of seconds, or None"):
        await report_calls([], Message("assistant"), call_seconds=seconds)


@pytest.mark.parametrize("parallel", [False, True])
async def test_the_numbers_of_each_tool_are_sums(autojump_clock, parallel: bool):
    message = Message("assistant", tool_calls=(*naps(1.0, 50.0, 2.0).tool_calls, ToolCall("refuse", "")))
    got = await report_calls([Nap(), refuse, search], message, parallel=parallel, call_seconds=10)
    assert got.metrics == pytest.approx(
        {
            "tool_calls": 4.0,
            "tool_errors": 2.0,
            "malformed_calls": 0.0,
            "tool/nap/calls": 3.0,
            "tool/nap/errors": 1.0,
            "tool/nap/timeouts": 1.0,
            "tool/nap/seconds": 13.0,
            "tool/refuse/calls": 1.0,
            "tool/refuse/errors": 1.0,
            "tool/refuse/timeouts": 0.0,
            "tool/refuse/seconds": 0.0,
        }
    )


# --- blame, of any tool ---------------------------------------------------------------------------


async def lose(arguments: str) -> ToolResult:
    raise ConnectionError("no route")


async def lose_in_a_task(arguments: str) -> ToolResult:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lose, arguments)
    return ToolResult("")


async def say(arguments: str) -> Any:
    return "just text"


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (lose, "tool 'nap' failed: ConnectionError: no route"),
        (lose_in_a_task, "tool 'nap' failed: ConnectionError: no route"),
        (say, "tool 'nap' failed: TypeError: execute returned str; expected a ToolResult"),
    ],
)
@pytest.mark.parametrize("parallel", [False, True])
async def test_I13_what_any_tool_raises_is_a_fault_that_names_it(then: Any, said: str, parallel: bool):
    message = Message("assistant", tool_calls=(ToolCall("no_parameters", ""), *naps(1).tool_calls))
    with pytest.raises(ToolFault) as caught:
        await report_calls([Nap(then), no_parameters], message, parallel=parallel)
    assert str(caught.value) == said
    assert caught.value.__cause__ is not None


async def test_a_tool_error_of_any_tool_is_content():
    async def object_to(arguments: str) -> ToolResult:
        raise ToolError("not on Sundays")

    got = await report_calls([Nap(object_to)], naps(1))
    assert got.results == (ToolResult("Error: not on Sundays", is_error=True),)


async def test_I9_a_fault_cancels_its_siblings_and_their_cleanup_runs(autojump_clock):
    nap, began = Nap(), trio.current_time()
    message = Message("assistant", tool_calls=(*naps(50.0).tool_calls, ToolCall("crash", "")))
    with pytest.raises(ToolFault, match="tool 'crash' failed: KeyError"):
        await report_calls([nap, crash], message, parallel=True)
    assert trio.current_time() - began < 1
    assert "end 50.0" not in nap.diary


async def test_faults_that_happen_together_are_all_told():
    async def fail_both_ways(arguments: str) -> ToolResult:
        try:
            await trio.sleep_forever()
        finally:
            await lose(arguments)
        return ToolResult("")

    message = Message("assistant", tool_calls=(*naps(1).tool_calls, ToolCall("crash", "")))
    with pytest.raises(ExceptionGroup) as caught:
        await report_calls([Nap(fail_both_ways), crash], message, parallel=True)
    assert sorted(str(fault) for fault in caught.value.exceptions) == [
        "tool 'crash' failed: KeyError: 'secret'",
        "tool 'nap' failed: ConnectionError: no route",
    ]


@pytest.mark.parametrize("parallel", [False, True])
async def test_I9_the_callers_cancellation_reaches_every_call_and_is_no_timeout(autojump_clock, parallel: bool):
    nap = Nap()
    with trio.move_on_after(5) as scope:
        await report_calls([nap], naps(50.0, 50.0), parallel=parallel, call_seconds=10)
    assert scope.cancelled_caught
    assert nap.diary == ["begin 50.0"] * (1 + parallel) + ["clean 50.0"] * (1 + parallel)


def test_a_tool_without_schema_reads_its_arguments_like_the_others():
    assert read_arguments(' {"a": [1]} ') == {"a": [1]}
    assert read_arguments("") == {}
    with pytest.raises(ToolError, match="must be a JSON object"):
        read_arguments("[]")


def test_a_default_that_is_no_json_is_refused_where_the_tool_is_made():
    def f(x: int = object()) -> str:  # pyright: ignore[reportArgumentType]
        """Do.

        Args:
            x: a number
        """
        return str(x)

    with pytest.raises(TypeError, match=r"tool 'f', parameter 'x': .*not JSON serializable"):
        tool(f)


async def test_a_tool_may_not_count_its_own_calls():
    @tool
    def count() -> ToolResult:
        """Count."""
        return ToolResult("1", metrics={"tool_calls": 7.0})

    with pytest.raises(ToolFault, match="metric 'tool_calls' has a name that counts the calls themselves"):
        await report_calls([count], Message("assistant", tool_calls=(ToolCall("count", "{}"),)))
