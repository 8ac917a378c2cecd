"""What is particular to the Llama 3 format: calls that nothing need mark, results as JSON strings."""

import json
import re
from dataclasses import replace

import pytest
from growth import assert_linear
from hypothesis import given
from hypothesis import strategies as st
from sampled import sampled

from jaxrl.chat.families import recognise, renderer_for
from jaxrl.chat.llama3 import LLAMA3, LLAMA3_1, LLAMA3_2
from jaxrl.chat.renderer import Outcome, Renderer, build
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

TAG, END = "<|python_tag|>", "<|eot_id|>"
TOKENS = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", END, "<|end_of_text|>"),
    "llama3.2": (*LLAMA3_2.markers, "<|eom_id|>", "<|end_of_text|>"),
}
FAMILIES = tuple(TOKENS)
"""One in which the tag of calls is text, one in which it is an id."""
PROMPT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
F = ToolCall("f", '{"a": 1}')
CALL = '{"name": "f", "parameters": {"a": 1}}'


def make(name: str) -> Renderer:
    return renderer_for(byte_tokenizer(TOKENS[name]), name)


def ids(renderer: Renderer, text: str) -> list[int]:
    """Sampled ids for text in which spellings of special tokens mean the tokens."""
    return list(sampled(renderer.tokenizer, text, {*renderer.marker_ids, *renderer.stop_ids.values()}))


def read(name: str, text: str) -> tuple[Message, Outcome]:
    renderer = make(name)
    parsed = renderer.parse(ids(renderer, text))
    return parsed.message, parsed.outcome


# --- what counts as a call ------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tag", ["", TAG])
@pytest.mark.parametrize("end", [END, "<|end_of_text|>"])
def test_one_object_is_a_call_with_or_without_the_tag(name: str, tag: str, end: str) -> None:
    assert read(name, f"{tag}{CALL}{end}") == (Message("assistant", tool_calls=(F,)), Outcome.STOPPED)
    assert read(name, f"\n {tag} {CALL}\n{end}")[0].tool_calls == (F,)


def test_eom_ends_a_call_where_the_vocabulary_has_it() -> None:
    assert read("llama3.2", f"{TAG}{CALL}<|eom_id|>") == (Message("assistant", tool_calls=(F,)), Outcome.STOPPED)
    assert len(make("llama3.2").stop) == 3
    assert len(make("llama3").stop) == 2


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("between", ["; ", "\n", ";", " ", "\n\n;\n", ""])
@pytest.mark.parametrize("tag", ["", TAG])
def test_several_calls_follow_each_other(name: str, between: str, tag: str) -> None:
    message, outcome = read(name, tag + between.join([CALL] * 3) + END)
    assert (message, outcome) == (Message("assistant", tool_calls=(F,) * 3), Outcome.STOPPED)


@pytest.mark.parametrize("name", FAMILIES)
def test_text_before_the_tag_and_after_the_calls_is_kept(name: str) -> None:
    assert read(name, f"Let me look.{TAG}{CALL}{END}")[0] == Message("assistant", "Let me look.", tool_calls=(F,))
    assert read(name, f"{CALL}\nThat is it. {END}")[0] == Message("assistant", "That is it.", tool_calls=(F,))
    assert read(name, f"A{TAG}{CALL}; {CALL} B{END}")[0] == Message("assistant", "A\nB", tool_calls=(F, F))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        "Paris.",
        f"Sure: {CALL}",
        f"```json\n{CALL}\n```",
        f"[{CALL}]",
        '{"name": "Bob", "age": 3}',
        '{"parameters": {}}',
        '{"answer": {"name": "f", "parameters": {}}}',
        '{"name": "x"',
        "{ a set }",
        "{",
        "",
        " \n",
    ],
)
def test_everything_else_is_text_as_it_stands(name: str, text: str) -> None:
    assert read(name, text + END) == (Message("assistant", text), Outcome.STOPPED)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "f", "parameters": "{}"}', '"parameters" is a string, not a JSON object'),
        ('{"name": 3, "parameters": {}}', '"name" is not a non-empty string'),
        ('{"name": "f", "parameters": {"a": 1}', "not valid JSON"),
        ('{"name": "f", "parameters": {"a": "x}}', "not valid JSON"),
        ("{'name': 'f', 'parameters': {}}", "not valid JSON"),
        ('{"name": "f", "parameters": {"a": 1,}}', "not valid JSON"),
        ('{"name": "f", "name": "g", "parameters": {}}', '"name" is given twice'),
        ('{"name": "f", "parameters": {"a": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "parameters": ' + "[" * 100_000, "nested too deeply"),
        (f"{TAG}search(query='x')", "does not hold a JSON object"),
        (TAG, "the block is empty"),
        (TAG + '{"a": 1}', '"name" is missing'),
        (TAG + '{"name": "f", "arguments": {}}', '"parameters" is missing'),
    ],
)
def test_P03_an_unreadable_call_tells_the_model_what_to_write(name: str, text: str, problem: str) -> None:
    message, outcome = read(name, text + END)
    assert (message.content, message.tool_calls, outcome) == ("", (), Outcome.STOPPED)
    (bad,) = message.malformed_calls
    assert bad.text == text.removeprefix(TAG)
    assert problem in bad.error
    assert '{"name": "<tool name>", "parameters": {...}}' in bad.error


@pytest.mark.parametrize("name", FAMILIES)
def test_readable_calls_before_an_unreadable_one_stand(name: str) -> None:
    message, outcome = read(name, f'{CALL}; {{"x": 1}}; {CALL}\n{{"name": "f", oops{END}')
    assert outcome is Outcome.STOPPED
    assert message.tool_calls == (F, F)
    assert [bad.text for bad in message.malformed_calls] == ['{"x": 1}', '{"name": "f", oops']


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", [TAG, "</tool_call>", '"}}', "; {", END, PROMPT, "\\", "\n"])
def test_P01_nothing_inside_an_argument_ends_the_call(name: str, text: str) -> None:
    call = ToolCall('f"\\é', json.dumps({"x": text, "n": [{"y": text}]}))
    for message in (
        Message("assistant", tool_calls=(call,)),
        Message("assistant", tool_calls=(call, call)),
        Message("assistant", "ok", tool_calls=(call, call)),
        Message("assistant", '{"a": "json"}', tool_calls=(call,)),
    ):
        renderer = make(name)
        assert renderer.parse(renderer.turn(message)).message == message


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_are_kept_as_they_were_written(name: str) -> None:
    arguments = '{ "n":1e400,\n"big": 123456789012345678901234567890, "u": "\\u00e9é" }'
    message, _ = read(name, f'{{"parameters": {arguments}, "name": "f", "id": 7}}{END}')
    assert message.tool_calls == (ToolCall("f", arguments),)


@pytest.mark.parametrize("name", FAMILIES)
def test_P09_broken_framing_is_malformed_and_no_stop_is_length(name: str) -> None:
    for broken in (f"a<|start_header_id|>user{END}", f"<|begin_of_text|>{CALL}{END}", f"a{END}b{END}"):
        message, outcome = read(name, broken)
        assert outcome is Outcome.MALFORMED
        assert message == Message("assistant", broken.removesuffix(END))
    assert read("llama3.2", f"{TAG}{CALL}{TAG}{END}")[1] is Outcome.MALFORMED
    assert read(name, "Hel") == (Message("assistant", "Hel"), Outcome.LENGTH)
    cut, outcome = read(name, f'{CALL}; {{"name": "g", "parameters": {{"q')
    assert (cut.tool_calls, len(cut.malformed_calls), outcome) == ((F,), 1, Outcome.LENGTH)


def test_the_tag_is_an_id_not_text_where_the_vocabulary_has_it() -> None:
    renderer = make("llama3.2")
    text = TAG + CALL
    tokens = [*renderer.tokenizer.encode(text), renderer.tokenizer.special(END)]
    assert renderer.parse(tokens).message == Message("assistant", text)


# --- round trips ----------------------------------------------------------------------------------

TEXT = st.text(alphabet=st.sampled_from('ab {}"\\\n\t<>;é🙂') | st.characters(codec="utf-8"), max_size=20)
SPELLED = st.sampled_from([END, TAG, PROMPT, CALL, '{"name": "x"}'])
ARGUMENTS = st.dictionaries(TEXT, TEXT | SPELLED | st.lists(st.integers() | SPELLED, max_size=2), max_size=3)
CALLS = st.lists(
    st.builds(ToolCall, st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), ARGUMENTS.map(json.dumps)),
    max_size=3,
)


@pytest.mark.parametrize("name", FAMILIES)
@given(TEXT.map(str.strip), CALLS)
def test_parse_inverts_turn(name: str, content: str, calls: list[ToolCall]) -> None:
    renderer = make(name)
    message = Message("assistant", content, tool_calls=tuple(calls))
    parsed = renderer.parse(renderer.turn(message))
    assert (parsed.message, parsed.outcome) == (message, Outcome.STOPPED)


@pytest.mark.parametrize("name", FAMILIES)
@given(st.lists(st.sampled_from([*range(256, 263), *'a {}"\n;']) | st.sampled_from([CALL, '"name"', '"parameters"'])))
def test_any_ids_are_parsed_without_an_exception(name: str, parts: list[int | str]) -> None:
    renderer = make(name)
    known = {*renderer.marker_ids.values(), *renderer.stop_ids}
    tokens = [i for part in parts for i in (renderer.tokenizer.encode(part) if isinstance(part, str) else [part])]
    tokens = [i for i in tokens if i < 256 or i in known]
    parsed = renderer.parse(tokens)
    assert (parsed.outcome is Outcome.LENGTH) == (not tokens or tokens[-1] not in renderer.stop)
    assert renderer.extend([Message("user", "x")], after=tokens)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "unit", ["{", '{"', CALL, CALL + ";", '{"name": "f", "parameters": {"a":', "{}", TAG, f'{TAG}{{"', "[" * 11, ";;; "]
)
def test_large_broken_turns_are_read_in_linear_time(name: str, unit: str) -> None:
    style, tags = make(name).style, {TAG} if name == "llama3" else set()
    assert_linear(
        lambda text: LLAMA3.read(LLAMA3.scan(text, tags), style), lambda size: unit * (size // len(unit)), 100_000
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_megabyte_of_arguments(name: str) -> None:
    call = ToolCall("f", json.dumps({"text": f"x{TAG}\\" * 60_000}))
    renderer = make(name)
    assert renderer.parse(renderer.turn(Message("assistant", tool_calls=(call,)))).message.tool_calls == (call,)


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@given(st.lists(st.sampled_from([*LLAMA3_2.markers, "<|end_of_text|>", "hi", "\n"]), min_size=1).map("".join))
def test_text_of_messages_and_tools_never_gives_a_special_id(name: str, text: str) -> None:
    renderer = make(name)

    def specials(content: str) -> list[int]:
        tools = [ToolSpec("f", content, {"type": "object", "properties": {}})]
        call = ToolCall("f", json.dumps({"a": content}))
        later = [Message("tool", content), Message("assistant", content, tool_calls=(call,)), Message("user", content)]
        opened = renderer.open([Message("system", content), Message("user", content)], tools)
        words = len(TOKENS[name]) + 256  # whole words of the byte tokenizer come after its special tokens
        return [i for i in (*opened, *renderer.extend(later, after=())) if 256 <= i < words]

    assert specials(f"x{text}") == specials("harmless")
    assert specials(text).count(renderer.marker_ids["<|begin_of_text|>"]) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_T11_one_bos_in_the_opening_and_none_later(name: str) -> None:
    renderer = make(name)
    bos = renderer.marker_ids["<|begin_of_text|>"]
    assert renderer.open([Message("user", "hi")]).count(bos) == 1
    assert bos not in renderer.extend([Message("user", "hi")], after=ids(renderer, END))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("end", [END, "<|end_of_text|>", ""])
def test_T07_a_turn_is_closed_once(name: str, end: str) -> None:
    renderer = make(name)
    text = renderer.tokenizer.decode(renderer.extend([Message("user", " more\n")], after=ids(renderer, "a" + end)))
    closing = "" if end else END
    assert text == f"{closing}<|start_header_id|>user<|end_header_id|>\n\nmore{END}{PROMPT}"


def test_T15_each_result_is_a_turn_and_a_json_string() -> None:
    renderer = make("llama3.2")
    results = [Message("tool", 'a "b"\n'), Message("tool", "é")]
    assert renderer.tokenizer.decode(renderer.extend(results, after=ids(renderer, END))) == (
        f'<|start_header_id|>ipython<|end_header_id|>\n\n"a \\"b\\"\\n"{END}'
        f'<|start_header_id|>ipython<|end_header_id|>\n\n"é"{END}{PROMPT}'
    )


def test_text_and_several_calls_are_written_with_the_tag() -> None:
    renderer = make("llama3.2")
    turn = renderer.turn(Message("assistant", " Look: ", tool_calls=(F, F)))
    assert renderer.tokenizer.decode(turn) == f"Look:{TAG}{CALL}; {CALL}{END}"
    bad = Message("assistant", "x", tool_calls=(F,), malformed_calls=(MalformedToolCall("{oops", "why", place=1),))
    opened = renderer.tokenizer.decode(renderer.open([Message("user", "hi"), bad, Message("user", "again")]))
    assert f"\n\nx{TAG}{CALL}; {{oops{END}" in opened


def test_tools_stand_in_the_first_user_message_or_in_one_of_their_own() -> None:
    renderer, tool = make("llama3.2"), ToolSpec("f", "d", {"type": "object"})

    def users(*messages: Message) -> list[str]:
        text = renderer.tokenizer.decode(renderer.open(messages, [tool]))
        return re.findall(r"user<\|end_header_id\|>\n\n(?s:(.*?))<\|eot_id\|>", text)

    (only,) = users(Message("user", " hi "))
    assert only.startswith("Given the following functions")
    assert '\n        "name": "f",\n        "description": "d",\n' in only
    assert only.endswith("    }\n}\n\nhi")
    assert users(Message("system", "S"))[0].endswith("}\n\n")
    greeting = Message("assistant", "Welcome")
    assert [len(u) > 5 for u in users(greeting, Message("user", "hi"))] == [True, False]
    assert f"Welcome{END}" in renderer.tokenizer.decode(renderer.open([greeting], [tool]))


def test_plain_llama3_has_no_system_turn_of_its_own_but_takes_tools() -> None:
    renderer = make("llama3")
    text = renderer.tokenizer.decode(renderer.open([Message("user", "hi")], [ToolSpec("f", "d", {})]))
    assert text.startswith("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nGiven the following")


def test_the_date_is_the_rows() -> None:
    later = replace(LLAMA3_2, name="mine", date="01 Jan 2030")
    renderer = build(later, byte_tokenizer(TOKENS["llama3.2"]))
    assert "Today Date: 01 Jan 2030\n\n<|eot_id|>" in renderer.tokenizer.decode(renderer.open([Message("user", "x")]))
    assert later.template_variables == {"date_string": "01 Jan 2030"}
    assert LLAMA3_1.template_variables == {}
    assert replace(LLAMA3_1, date="x").template_variables == {"date_string": "x"}


def test_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="a message has role 'robot': expected one of 'system'"):
        make("llama3").open([Message("robot", "hi")])  # type: ignore[arg-type]


# --- the real vocabularies ------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("tokenizer", "template", "family"),
    [
        ("llama3", None, "llama3"),
        ("llama3.1", "meta-llama-Llama-3.1-8B-Instruct.jinja", "llama3.1"),
        ("llama3.1", "meta-llama-Llama-3.3-70B-Instruct.jinja", "llama3.1"),
        ("llama3.2", "meta-llama-Llama-3.2-3B-Instruct.jinja", "llama3.2"),
        ("llama3.2", None, "llama3.2"),
    ],
)
def test_real_templates_are_recognised(
    tokenizer: str, template: str | None, family: str, real_tokenizer, real_cache
) -> None:
    found = real_tokenizer(tokenizer)
    if template is not None:
        found = replace(found, chat_template=(real_cache / "templates" / template).read_text(encoding="utf-8"))
    assert recognise(found).name == family


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama3", "llama3.1", "llama3.2"])
@given(data=st.data())
def test_any_real_ids_are_parsed_without_an_exception(name: str, data: st.DataObject, real_tokenizer) -> None:
    renderer = renderer_for(real_tokenizer(name), name)
    marker = st.sampled_from(sorted({*renderer.marker_ids.values(), *renderer.stop_ids}))
    call = st.just(renderer.tokenizer.encode(CALL))
    runs = data.draw(st.lists(call | (marker | st.integers(0, 128_300)).map(lambda i: [i]), max_size=30))
    tokens = [i for run in runs for i in run]
    assert (renderer.parse(tokens).outcome is Outcome.LENGTH) == (not tokens or tokens[-1] not in renderer.stop)
