"""What is particular to Gemma: no system role, and a tool format of our own in fenced blocks."""

import json

import pytest
from growth import assert_linear
from hypothesis import given
from hypothesis import strategies as st
from sampled import sampled

from jaxrl.chat.families import renderer_for
from jaxrl.chat.gemma import GEMMA3
from jaxrl.chat.renderer import Outcome, Renderer
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

END = "<end_of_turn>"
TOKENS = (*GEMMA3.markers, "<eos>")
PROMPT = "<start_of_turn>model\n"
F = ToolCall("f", '{"a": 1}')
CALL = '```tool_call\n{"name": "f", "arguments": {"a": 1}}\n```'
TOOL = ToolSpec("f", "d", {"type": "object"})


def make() -> Renderer:
    return renderer_for(byte_tokenizer(TOKENS), "gemma3")


def ids(text: str) -> list[int]:
    """Sampled ids for text in which spellings of special tokens mean the tokens."""
    return list(sampled(make().tokenizer, text, TOKENS))


def read(text: str) -> tuple[Message, Outcome]:
    parsed = make().parse(ids(text))
    return parsed.message, parsed.outcome


def opened(messages: list[Message], *tools: ToolSpec) -> str:
    renderer = make()
    return renderer.tokenizer.decode(renderer.open(messages, tools))


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [END, "<eos>"])
def test_calls_are_read_from_their_blocks(end: str) -> None:
    assert read(f"{CALL}{end}") == (Message("assistant", tool_calls=(F,)), Outcome.STOPPED)
    assert read(f"{CALL}\n{CALL}\n{end}")[0] == Message("assistant", tool_calls=(F, F))
    assert read(f"Look:\n{CALL}\nand\n\n{CALL}\nDone. {end}")[0] == Message(
        "assistant", "Look:\nand\nDone.", tool_calls=(F, F)
    )
    assert read(f'```tool_call {{"name": "f", "arguments": {{"a": 1}}}}```{end}')[0].tool_calls == (F,)


@pytest.mark.parametrize(
    "text",
    [
        "Paris.",
        " two\n\nlines \n",
        '{"name": "f", "arguments": {}}',
        '```json\n{"name": "f", "arguments": {}}\n```',
        "```python\nprint(1)\n```",
        "Write a ```tool_call block.",
        "```tool_calls\n{}\n```",
        "```",
        "",
    ],
)
def test_everything_else_is_text_as_it_stands(text: str) -> None:
    assert read(text + END) == (Message("assistant", text), Outcome.STOPPED)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("\n{}\n", '"name" is missing'),
        ("", "the block is empty"),
        ("\nf(a=1)\n", "does not hold a JSON object"),
        ('\n{"name": "f", "arguments": {"a": 1}\n', "not valid JSON"),
        ("\n{'name': 'f', 'arguments': {}}\n", "not valid JSON"),
        ('\n{"name": "f", "arguments": {"a": 1,}}\n', "not valid JSON"),
        ('\n{"name": "f", "arguments": {}, "name": "g"}\n', '"name" is given twice'),
        ('\n{"name": "f", "parameters": {}}\n', '"arguments" is missing'),
        ('\n{"name": "f", "arguments": {}} now\n', "text after the JSON object"),
        ('\n{"name": "f", "arguments": ' + "[" * 100_000 + "\n", "nested too deeply"),
    ],
)
def test_P03_an_unreadable_call_tells_the_model_what_to_write(block: str, problem: str) -> None:
    message, outcome = read(f"A\n```tool_call{block}```\n{CALL}{END}")
    assert (message.content, message.tool_calls, outcome) == ("A", (F,), Outcome.STOPPED)
    (bad,) = message.malformed_calls
    assert bad.text == block
    assert problem in bad.error


@pytest.mark.parametrize("text", ["```", "\n```\n", "```tool_call", CALL, '"}}', END, PROMPT, "\\"])
def test_P01_nothing_inside_an_argument_ends_the_call(text: str) -> None:
    call = ToolCall('f"é', json.dumps({"x": text, "n": [{"y": text}]}))
    message = Message("assistant", "ok", tool_calls=(call, call))
    assert make().parse(make().turn(message)).message == message


def test_P09_broken_framing_is_malformed_and_no_stop_is_length() -> None:
    for broken in (
        "A\n```tool_call\n{",
        '```tool_call\n{"name": "f", "arguments": {}}\n',
        f"```tool_call\n{CALL}",
        f"{CALL}\n```tool_call",
        "<start_of_turn>user\nhi",
        f"<bos>{CALL}",
        f"a{END}b",
    ):
        assert read(broken + END) == (Message("assistant", broken), Outcome.MALFORMED)
        assert read(broken)[1] is Outcome.LENGTH
    cut = 'A\n```tool_call\n{"na'
    assert read(f"{CALL}\n{cut}")[0] == Message("assistant", cut, tool_calls=(F,))


def test_markers_are_ids_not_text() -> None:
    text = f"<start_of_turn>user\n{END}"
    renderer = make()
    tokens = [*renderer.tokenizer.encode(text), renderer.tokenizer.special(END)]
    assert renderer.parse(tokens) == renderer.parse(renderer.turn(Message("assistant", text)))
    assert renderer.parse(tokens).message.content == text


# --- round trips ----------------------------------------------------------------------------------

TEXT = st.text(alphabet=st.sampled_from('ab {}"\\\n\t<>`é🙂') | st.characters(codec="utf-8"), max_size=20)
SPELLED = st.sampled_from([END, CALL, "```", PROMPT, "\n```\n"])
ARGUMENTS = st.dictionaries(TEXT, TEXT | SPELLED | st.lists(st.integers() | SPELLED, max_size=2), max_size=3)
CALLS = st.lists(
    st.builds(ToolCall, st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), ARGUMENTS.map(json.dumps)),
    max_size=3,
)


@given(TEXT.map(str.strip), CALLS)
def test_parse_inverts_turn(content: str, calls: list[ToolCall]) -> None:
    message = Message("assistant", content, tool_calls=tuple(calls))
    parsed = make().parse(make().turn(message))
    assert (parsed.message, parsed.outcome) == (message, Outcome.STOPPED)


@given(st.lists(st.sampled_from([*TOKENS, CALL, "```", "```tool_call", "\n", '{"name": "f"', '"', "{", " a ", "\xff"])))
def test_any_tokens_are_parsed_without_an_exception(parts: list[str]) -> None:
    renderer, tokens = make(), ids("".join(parts))
    assert (renderer.parse(tokens).outcome is Outcome.LENGTH) == (not tokens or tokens[-1] not in renderer.stop)
    assert renderer.extend([Message("user", "x")], after=tokens)


@pytest.mark.parametrize(
    "unit", ["```", "\n```tool_call", "\n```tool_call\n{", '\n```tool_call\n["```', CALL + "\n", " \t", "\n"]
)
def test_large_broken_turns_are_read_in_linear_time(unit: str) -> None:
    style = make().style
    assert_linear(lambda texts: GEMMA3.read(texts, style), lambda size: [unit * (size // len(unit))], 100_000)


def test_a_megabyte_of_arguments() -> None:
    call = ToolCall("f", json.dumps({"text": "x\n```\n\\" * 80_000}))
    assert make().parse(make().turn(Message("assistant", tool_calls=(call,)))).message.tool_calls == (call,)


# --- writing --------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([*TOKENS, "hi", "\n"]), min_size=1).map("".join))
def test_text_of_messages_and_tools_never_gives_a_special_id(text: str) -> None:
    renderer = make()

    def specials(content: str) -> list[int]:
        call = ToolCall("f", json.dumps({"a": content}))
        later = [Message("tool", content), Message("assistant", content, tool_calls=(call,)), Message("user", content)]
        tools = [ToolSpec("f", content, {"type": "object"})]
        first = renderer.open([Message("system", content), Message("user", content)], tools)
        return [i for i in (*first, *renderer.extend(later, after=())) if 256 <= i < 256 + len(TOKENS)]

    assert specials(text) == specials("harmless")
    assert specials(text).count(renderer.marker_ids["<bos>"]) == 1  # T11


def test_tools_stand_between_the_system_text_and_the_first_user_message() -> None:
    text = opened([Message("system", "S"), Message("user", " hi ")], TOOL)
    assert text.startswith("<bos><start_of_turn>user\nS\n\nYou may call these functions")
    assert (
        '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}' in text
    )
    assert text.endswith(f"in a ```tool_output block.\n\nhi{END}\n{PROMPT}")
    assert text.count("<start_of_turn>") == 2


def test_what_the_template_refuses_is_a_turn_of_its_own() -> None:
    user = f"<start_of_turn>user\n{{}}{END}\n".format
    assert opened([Message("system", "S")]) == f"<bos>{user('S')}{PROMPT}"
    greeting = Message("assistant", "Hi")
    assert opened([Message("system", "S"), greeting]) == f"<bos>{user('S')}{PROMPT}Hi{END}\n{PROMPT}"
    assert opened([greeting]) == f"<bos>{PROMPT}Hi{END}\n{PROMPT}"
    assert opened([Message("user", "1"), Message("user", "2"), Message("system", " T\n")]) == (
        f"<bos>{user('1')}{user('2')}{user('T')}{PROMPT}"
    )


@pytest.mark.parametrize("end", [END, "<eos>", ""])
def test_T15_results_in_a_row_share_a_turn_after_one_end_marker(end: str) -> None:
    renderer = make()
    results = [Message("tool", "1"), Message("tool", " 2\n"), Message("user", "go on")]
    assert renderer.tokenizer.decode(renderer.extend(results, after=ids("a" + end))) == (
        f"{'' if end else END}\n<start_of_turn>user\n```tool_output\n1\n```\n```tool_output\n 2\n\n```{END}\n"
        f"<start_of_turn>user\ngo on{END}\n{PROMPT}"
    )


def test_turns_are_written_trimmed_with_their_calls_in_blocks() -> None:
    renderer = make()
    assert (
        renderer.tokenizer.decode(renderer.turn(Message("assistant", " Hm \n", tool_calls=(F,)))) == f"Hm\n{CALL}{END}"
    )
    bad = Message("assistant", "x", tool_calls=(F,), malformed_calls=(MalformedToolCall("\n{oops\n", "why", place=1),))
    assert f"{PROMPT}x\n{CALL}\n```tool_call\n{{oops\n```{END}" in opened([Message("user", "1"), bad])


def test_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="a message has role 'robot': expected one of 'system'"):
        make().open([Message("robot", "hi")])  # type: ignore[arg-type]


# --- the real vocabulary --------------------------------------------------------------------------


@pytest.mark.full
def test_the_real_tokenizer_and_its_template_are_recognised(real_tokenizer) -> None:
    renderer = renderer_for(real_tokenizer("gemma3"))
    assert renderer.name == "gemma3"
    assert renderer.stop == (106, 1)


@pytest.mark.full
@given(TEXT.map(str.strip), CALLS)
def test_parse_inverts_turn_with_the_real_tokenizer(real_tokenizer, content: str, calls: list[ToolCall]) -> None:
    renderer = renderer_for(real_tokenizer("gemma3"))
    message = Message("assistant", content.replace("\u2581", ""), tool_calls=tuple(calls))
    parsed = renderer.parse(renderer.turn(message))
    assert parsed.outcome is Outcome.STOPPED
    assert parsed.message.content == message.content
    assert [c.arguments for c in parsed.message.tool_calls] == [c.arguments for c in calls]


@pytest.mark.full
@given(data=st.data())
def test_any_real_ids_are_parsed_without_an_exception(data: st.DataObject, real_tokenizer) -> None:
    renderer = renderer_for(real_tokenizer("gemma3"))
    marker = st.sampled_from(sorted({*renderer.marker_ids.values(), *renderer.stop_ids}))
    call = st.just(renderer.tokenizer.encode(f"\n{CALL}"))
    runs = data.draw(st.lists(call | (marker | st.integers(0, 262_300)).map(lambda i: [i]), max_size=30))
    tokens = [i for run in runs for i in run]
    assert (renderer.parse(tokens).outcome is Outcome.LENGTH) == (not tokens or tokens[-1] not in renderer.stop)
