"""Tools: schemas from annotations, blame (model, author, infrastructure), and the running of a message's calls."""

import json
import pickle
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.env import EnvironmentFault
from jaxrl.tools import (
    CallReport,
    FunctionTool,
    Tool,
    ToolError,
    ToolFault,
    ToolResult,
    report_calls,
    run_calls,
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
            "mode": {"enum": ["exact", "fuzzy"], "description": "how to compare", "default": "exact"},
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
        (stale_line, r"documents 'limit', which is not a parameter"),
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
        ('{"query": 7}', "argument 'query' must be of type string, got 7"),
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


def test_async_results_and_results_that_are_not_text():
    assert run(wait_and_echo, '{"text": "hi"}').content == "hi"
    assert run(no_parameters, "") == run(no_parameters, "{}") == ToolResult('{"a": 1}')


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
    replies = trio.run(run_calls, [no_parameters, wait_and_echo], message)
    assert [(reply.role, reply.name, reply.content) for reply in replies] == [
        ("tool", "no_parameters", '{"a": 1}'),
        ("tool", "wait_and_echo", "b"),
        ("tool", "no_parameters", '{"a": 1}'),
    ]


def test_unknown_and_malformed_calls_are_answered_and_the_valid_ones_run():
    message = Message(
        "assistant",
        tool_calls=(ToolCall("serch", "{}"), ToolCall("no_parameters", "{}")),
        malformed_calls=(MalformedToolCall("<tool_call>{", "close the brace"),),
    )
    got = report([no_parameters, search], message)
    assert [reply.content for reply in got.messages] == [
        'Error: unknown tool "serch"; known tools: no_parameters, search',
        '{"a": 1}',
        "Error: close the brace",
    ]
    assert got.metrics == {"tool_calls": 2.0, "tool_errors": 1.0, "malformed_calls": 1.0}
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
    got = report([wait_and_echo], calls(("wait_and_echo", '{"text": "\\ud800!"}')))
    assert got.messages[0].content == "?!"


def test_duplicate_names_are_refused():
    with pytest.raises(ValueError, match="two tools are named 'search'"):
        tool_table([search, no_parameters, search])
