"""Reading the content of a tool-call block."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.chat.tool_calls import end_of_json, read_call
from jaxrl.types import MalformedToolCall, ToolCall

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)


@given(st.text(min_size=1), ARGUMENTS, st.booleans(), st.sampled_from([None, 1]))
def test_arguments_are_kept_as_written(name: str, arguments: dict, escaped: bool, indent: int | None) -> None:
    text = json.dumps(arguments, ensure_ascii=escaped, indent=indent)
    block = f'\n {{"name" : {json.dumps(name)},"arguments":  {text} }}\n'
    assert read_call(block) == ToolCall(name, text)
    assert read_call(f'{{"arguments":{text},"name":{json.dumps(name)}}}') == ToolCall(name, text)


@given(st.text())
def test_any_text_is_read_without_an_exception(text: str) -> None:
    assert isinstance(read_call(text), ToolCall | MalformedToolCall)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the block is empty"),
        (" \n", "the block is empty"),
        ("search(1)", "does not hold a JSON object"),
        ("[1]", "does not hold a JSON object"),
        ("{}", '"name" is missing'),
        ('{"arguments": {}}', '"name" is missing'),
        ('{"name": "", "arguments": {}}', '"name" is not a non-empty string'),
        ('{"name": 3, "arguments": {}}', '"name" is not a non-empty string'),
        ('{"name": "f"}', '"arguments" is missing'),
        ('{"name": "f", "arguments": null}', '"arguments" is null'),
        ('{"name": "f", "arguments": "{}"}', '"arguments" is a string'),
        ('{"name": "f", "arguments": [1]}', '"arguments" is an array'),
        ('{"name": "f", "arguments": true}', '"arguments" is a boolean'),
        ('{"name": "f", "arguments": {}', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": }}', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ('{"name": "f" "arguments": {}}', 'expected ","'),
        ('{"name" "f"}', 'expected ":"'),
        ('{1: "f"}', "must be a string"),
        ('{"name": "f", "name": "g", "arguments": {}}', '"name" is given twice'),
        ('{"name": "f", "arguments": {}} extra', "text after the JSON object"),
        ('{"name": "f", "arguments": {}}}', "text after the JSON object"),
        ('{"name": "f", "arguments": {"a": "line\nbreak"}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "Tool call not read"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 200_000 + "}}", "nested too deeply"),
    ],
)
def test_content_problems_are_told_to_the_model(text: str, problem: str) -> None:
    bad = read_call(text)
    assert isinstance(bad, MalformedToolCall)
    assert bad.text == text
    assert problem in bad.error
    assert '{"name": "<tool name>", "arguments": {...}}' in bad.error


def test_a_megabyte_of_arguments() -> None:
    arguments = json.dumps({"a": 'x"\\</tool_call>{}' * 60_000})
    assert len(arguments) > 1_000_000
    assert read_call(f'{{"name": "f", "arguments": {arguments}}}') == ToolCall("f", arguments)


def test_end_of_json() -> None:
    assert end_of_json('ab {"a": "}"}c', 2) == 13
    assert end_of_json("ab c", 2) == 2
    assert end_of_json("[" * 200_000, 0) == 0


def test_deep_nesting_is_told_and_not_carried_on() -> None:
    deep = '{"a": ' + "[" * 300 + "]" * 300 + "}"
    bad = read_call(f'{{"name": "f", "arguments": {deep}}}')
    assert isinstance(bad, MalformedToolCall)
    assert "more than 100 levels" in bad.error
    assert read_call('{"name": "f", "arguments": {"a": ' + "[" * 50 + "]" * 50 + "}}") != bad
