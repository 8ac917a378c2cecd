"""The later Qwens: calls in tags, thoughts that begin in the prompt, and when those are dropped."""

import json
from dataclasses import replace
from typing import Any

import pytest
from growth import assert_linear
from hypothesis import given
from hypothesis import strategies as st
from official import BY_NAME
from sampled import sampled

from jaxrl.chat.families import renderer_for
from jaxrl.chat.qwen_xml import read_call, write_call
from jaxrl.chat.renderer import Outcome, Renderer
from jaxrl.chat.tokenizer import BYTE_SPECIALS, byte_tokenizer
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

BYTES = byte_tokenizer()
XML = ("qwen3.5", "qwen3_coder")
IN_PROMPT = ("qwen3.5", "qwen3_thinking", "qwq")
USER, TOOL = Message("user", "next"), Message("tool", "42")
LOOK = ToolSpec(
    "look",
    " Look it up.\n",
    {
        "type": "object",
        "properties": {"key": {"type": ["string", "null"], "description": " the key ", "enum": ["a"], "minLength": 1}},
        "required": ["key"],
    },
)


def make(name: str, **choices: Any) -> Renderer:
    """The family on bytes."""
    return renderer_for(BYTES, name, **choices)


def ids(text: str) -> tuple[int, ...]:
    """Ids of text in which spelled markers are the markers."""
    return sampled(BYTES, text, BYTE_SPECIALS)


def read(block: str) -> ToolCall:
    call = read_call(block)
    assert isinstance(call, ToolCall), call
    return call


def refused(block: str) -> str:
    bad = read_call(block)
    assert isinstance(bad, MalformedToolCall)
    assert bad.text == block
    return bad.error


# --- calls in tags --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("\nParis\n", "Paris"),
        ("Paris", "Paris"),
        ("\n  two\n\tlines \n\n", "  two\n\tlines \n"),
        ("\n\n", ""),
        ("", ""),
        ("\n3\n", 3),
        ("\n-1.5e3\n", -1500.0),
        ('\n [1, {"a": null}] \n', [1, {"a": None}]),
        ('\n{"a": "</parameter>"}\n', {"a": "</parameter>"}),
        ("\ntrue\n", True),
        ("\nFalse\n", False),
        ("\nNone\n", None),
        ('\n"3"\n', '"3"'),
        ("\n007\n", "007"),
        ("\nNaN\n", "NaN"),
        ("\n{'a': 1}\n", "{'a': 1}"),
        ("\n[1, 2,]\n", "[1, 2,]"),
        ("\n3 apples\n", "3 apples"),
        (
            '\n<b>x</b> & </function> </parameter> </tool_call> é\\n"\n',
            '<b>x</b> & </function> </parameter> </tool_call> é\\n"',
        ),
        ("\n" + "[" * 100_000 + "\n", "[" * 100_000),
        ("\n" + "9" * 5000 + "\n", "9" * 5000),
    ],
)
def test_a_value_is_text_unless_it_is_json_of_another_kind(written: str, value: Any) -> None:
    call = read(f"\n<function=look>\n<parameter=key>{written}</parameter>\n</function>\n")
    assert (call.name, json.loads(call.arguments)) == ("look", {"key": value})


def test_numbers_keep_their_digits() -> None:
    call = read("<function=f><parameter=a>\n1.10\n</parameter><parameter=b>\n1e400\n</parameter></function>")
    assert call.arguments == '{"a": 1.10, "b": 1e400}'


def test_white_space_between_tags_is_free() -> None:
    assert read("<function= f >\n</function>") == ToolCall("f", "{}")
    assert read("\n\n <function=f>\n\n  <parameter=a b>x</parameter>  </function>\n\n") == ToolCall("f", '{"a b": "x"}')


@pytest.mark.parametrize(
    ("block", "hint"),
    [
        ("", "the block is empty"),
        ('{"name": "f", "arguments": {}}', "does not begin with <function=NAME>"),
        ("<function=>\n</function>", "name is missing"),
        ("<function=f>\n", "expected <parameter=KEY> or </function> at character 12"),
        ("<function=f>\n<parameter=a>\n1\n</function>", '"a" is not closed by </parameter>'),
        ("<function=f>\n<parameter=a>\n1", '"a" is not closed'),
        ("<function=f>\n<parameter=a>\n1\n</parameter>", '"a" is not closed'),
        ("<function=f>\n<parameter=a>1</parameter><parameter=a>2</parameter></function>", '"a" is given twice'),
        ("<function=f>\nkey: 1\n</function>", "expected <parameter=KEY>"),
        ("<function=f>\n</function>\nDone.", "text after </function>"),
        ("<function=f>\n</function><function=g>\n</function>", "text after </function>"),
    ],
)
def test_P03_what_is_wrong_is_said_and_what_to_write(block: str, hint: str) -> None:
    assert hint in refused(block)
    assert "<parameter=KEY>" in refused(block).partition(hint)[2]


def test_values_are_written_as_they_are_read() -> None:
    call = ToolCall("f", '{"s": "two\\nlines", "n": 1.10, "b": true, "z": null, "l": [1, "a"], "o": {"k": "é"}}')
    assert write_call(call) == (
        "\n<function=f>\n<parameter=s>\ntwo\nlines\n</parameter>\n<parameter=n>\n1.10\n</parameter>\n"
        "<parameter=b>\ntrue\n</parameter>\n<parameter=z>\nnull\n</parameter>\n"
        '<parameter=l>\n[1, "a"]\n</parameter>\n<parameter=o>\n{"k": "é"}\n</parameter>\n</function>\n'
    )
    assert read(write_call(call)) == call


WORDS = st.text(
    st.sampled_from('ab <>/="{}[]\\\n\té🙂') | st.characters(codec="utf-8", exclude_characters="\r"), max_size=20
)
SPELLED = st.sampled_from(["</parameter>", "</function>", "</tool_call>", "<|im_end|>", "<parameter=a>"])
STRINGS = st.tuples(WORDS, SPELLED | WORDS).map(lambda two: "x" + two[0] + two[1])
OTHERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
VALUES = STRINGS | OTHERS | st.lists(STRINGS | OTHERS, max_size=3)
KEYS = st.text(st.characters(codec="utf-8", exclude_characters=">\n"), min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3)


@given(ARGUMENTS)
def test_reading_inverts_writing_for_strings_that_do_not_look_like_json(arguments: dict[str, Any]) -> None:
    written = write_call(ToolCall("f", json.dumps(arguments, ensure_ascii=False)))
    assert json.loads(read(written).arguments) == arguments


@pytest.mark.parametrize(
    "unit", ["</parameter>", "</parameter> \n", "<parameter=a>\n1\n</parameter>\n", "\n", "<function=f>", "["]
)
def test_reading_is_linear(unit: str) -> None:
    def block(length: int) -> str:
        return "<function=f>\n<parameter=a>\n" + unit * (length // len(unit)) + "\n</parameter>\n</function>"

    assert_linear(read_call, block, 100_000)


@pytest.mark.parametrize("name", XML)
@given(st.lists(st.builds(ToolCall, st.just("look"), ARGUMENTS.map(json.dumps)), max_size=2).map(tuple), WORDS)
def test_parse_inverts_turn(name: str, calls: tuple[ToolCall, ...], content: str) -> None:
    renderer = make(name)
    thinking = "why" if name == "qwen3.5" else None
    parsed = renderer.parse(renderer.turn(Message("assistant", content.strip(), thinking, calls)))
    assert parsed.outcome is Outcome.STOPPED
    assert (parsed.message.content, parsed.message.thinking) == (content.strip(), thinking)
    assert [json.loads(c.arguments) for c in parsed.message.tool_calls] == [json.loads(c.arguments) for c in calls]


@pytest.mark.parametrize("name", XML)
def test_a_sampled_turn_with_calls(name: str) -> None:
    renderer = make(name)
    one = "<tool_call>\n<function=look>\n<parameter=key>\na\n</parameter>\n</function>\n</tool_call>"
    two = "<tool_call>\n<function=look>\n</function>\n</tool_call>"
    thought = "hm\n</think>\n\n" if name == "qwen3.5" else ""
    message = renderer.parse(ids(f"{thought}Let me see.\n\n{one}\n{two}<|im_end|>")).message
    assert message == Message(
        "assistant",
        "Let me see.",
        thinking="hm" if thought else None,
        tool_calls=(ToolCall("look", '{"key": "a"}'), ToolCall("look", "{}")),
    )
    assert renderer.parse(ids(f"{thought}{one[:-12]}<|im_end|>")).outcome is Outcome.MALFORMED


def test_qwen3_5_describes_tools_before_the_system_text_and_qwen3_coder_after_it() -> None:
    messages = [Message("system", " Be brief.\n"), USER]
    first = BYTES.decode(make("qwen3.5").open(messages, [LOOK]))
    assert first.startswith("<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n{")
    assert "</IMPORTANT>\n\nBe brief.<|im_end|>\n" in first
    last = BYTES.decode(make("qwen3_coder").open(messages, [LOOK]))
    assert last.startswith("<|im_start|>system\n Be brief.\n\n\n# Tools\n\n")
    assert (
        "<tools>\n<function>\n<name>look</name>\n<description>Look it up.</description>\n<parameters>\n<parameter>\n"
        '<name>key</name>\n<type>["string", "null"]</type>\n<description>the key</description>\n<enum>["a"]</enum>\n'
        '<minLength>1</minLength>\n</parameter>\n<required>["key"]</required>\n</parameters>\n</function>\n</tools>'
    ) in last


def test_qwen3_5_says_what_its_template_refuses() -> None:
    text = BYTES.decode(make("qwen3.5").open([Message("system", "a"), Message("system", "b")]))
    assert text == "<|im_start|>system\na<|im_end|>\n<|im_start|>system\nb<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_malformed_calls_are_written_back_in_their_blocks() -> None:
    bad = Message("assistant", " x ", malformed_calls=(MalformedToolCall("\n<function=", "why"),))
    assert "x\n\n<tool_call>\n<function=</tool_call><|im_end|>" in BYTES.decode(make("qwen3.5").open([USER, bad, USER]))


# --- thoughts that begin in the prompt ------------------------------------------------------------


def test_the_2507_thinking_edition_writes_what_qwen3_does_but_opens_the_thought() -> None:
    renderer, qwen3 = make("qwen3_thinking", thinking="strip"), BY_NAME["qwen3"]
    for name, text in qwen3.texts().items():
        assert BYTES.decode(renderer.open(*qwen3.case(name))) == text + "<think>\n"


@pytest.mark.parametrize("name", IN_PROMPT)
def test_a_turn_begins_inside_its_thought(name: str) -> None:
    renderer = make(name)
    assert renderer.parse(ids("hm\n</think>\n\nYes<|im_end|>")).message == Message("assistant", "Yes", thinking="hm")
    assert renderer.parse(ids("\n</think>\n\nYes<|im_end|>")).message == Message("assistant", "Yes", thinking="")
    cut = renderer.parse(ids("hm"))
    assert (cut.message, cut.outcome) == (Message("assistant", "", thinking="hm"), Outcome.LENGTH)
    for broken in ("hm", "<think>hm</think>Yes", "hm</think>Yes</think>", "hm</think><think>ha</think>Yes"):
        assert renderer.parse(ids(broken + "<|im_end|>")).outcome is Outcome.MALFORMED, broken


@pytest.mark.parametrize("name", IN_PROMPT)
def test_a_demonstration_continues_the_prompt(name: str) -> None:
    renderer = make(name)
    assert BYTES.decode(renderer.open([USER])).endswith("<|im_start|>assistant\n<think>\n")
    assert BYTES.decode(renderer.turn(Message("assistant", "Yes", thinking="hm"))) == "hm\n</think>\n\nYes<|im_end|>"
    assert BYTES.decode(renderer.turn(Message("assistant", "Yes"))) == "\n</think>\n\nYes<|im_end|>"


def test_qwen3_5_without_thinking_has_the_empty_block_in_its_prompt() -> None:
    renderer = make("qwen3.5", enable_thinking=False)
    assert BYTES.decode(renderer.open([USER])).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert BYTES.decode(renderer.turn(Message("assistant", "Yes"))) == "Yes<|im_end|>"
    assert renderer.parse(ids("Yes<|im_end|>")).message == Message("assistant", "Yes")


@pytest.mark.parametrize("name", ["qwen3_thinking", "qwq"])
def test_I12_these_cannot_be_told_not_to_think(name: str) -> None:
    with pytest.raises(ValueError, match="enable_thinking=False has no effect"):
        make(name, enable_thinking=False)


def frame(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


RESULT = frame("user", "<tool_response>\n42\n</tool_response>")
PROMPT = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("name", "in_loop", "empty_in_loop"),
    [
        ("qwen3_thinking", "<think>\na\n</think>\n\n", ""),
        ("qwen3.5", "<think>\na\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("qwq", "", ""),
    ],
)
def test_T03_three_turns_of_thoughts(name: str, in_loop: str, empty_in_loop: str) -> None:
    renderer = make(name, thinking="strip")
    t = begin(renderer, [Message("user", "q1")])
    t, reason = observe(act(t, ids("a\n</think>\n\ncall<|im_end|>")), [TOOL])
    opening = frame("user", "q1")
    assert BYTES.decode(t.tokens) == opening + frame("assistant", in_loop + "call") + RESULT + PROMPT
    assert (reason is None) == bool(in_loop)
    t, reason = observe(act(t, ids("\n</think>\n\ncall<|im_end|>")), [TOOL])
    loop = frame("assistant", in_loop + "call") + RESULT + frame("assistant", empty_in_loop + "call") + RESULT
    assert BYTES.decode(t.tokens) == opening + loop + PROMPT
    t, reason = observe(act(t, ids("b\n</think>\n\nsay<|im_end|>")), [Message("user", "q2")])
    assert reason == "thinking_stripped"
    said = frame("assistant", "call") + RESULT + frame("assistant", "call") + RESULT + frame("assistant", "say")
    assert BYTES.decode(t.tokens) == opening + said + frame("user", "q2") + PROMPT


@pytest.mark.parametrize("name", IN_PROMPT)
def test_T05_kept_thoughts_stay_where_they_were_sampled(name: str) -> None:
    t = begin(make(name), [USER])
    for turn in ("a\n</think>\n\nx<|im_end|>", "never closed", "\n</think>\n\n<|im_end|>"):
        before = act(t, ids(turn))
        t, reason = observe(before, [TOOL, USER])
        assert reason is None
        assert t.tokens[: len(before.tokens)] == before.tokens


def test_T09_qwen3_5_trims_what_is_said_and_thought() -> None:
    messages = [
        Message("system", "\n S \n"),
        Message("user", " u\n"),
        Message("assistant", "\n a ", thinking=" t\n\n"),
        Message("tool", "\t r\n"),
    ]
    assert BYTES.decode(make("qwen3.5").open(messages)) == (
        frame("system", "S")
        + frame("user", "u")
        + frame("assistant", "<think>\nt\n</think>\n\na")
        + frame("user", "<tool_response>\nr\n</tool_response>")
        + PROMPT
    )


@pytest.mark.full
@pytest.mark.parametrize("row", ["qwen3_instruct", "qwen3_thinking", "qwen3_coder", "qwq", "qwen3.5", "qwen3.6"])
def test_published_templates_are_recognised(row: str, real_cache) -> None:
    tokenizer = replace(BYTES, chat_template=BY_NAME[row].source(real_cache))
    assert renderer_for(tokenizer).name == BY_NAME[row].renderer


@pytest.mark.full
def test_qwen3_5s_vocabulary_is_read_as_its_maker_does(real_tokenizer) -> None:
    """The example that the package with the vocabulary gives."""
    tokenizer = real_tokenizer("qwen3.5")
    assert tokenizer.encode("Hello! 毕老师！1 + 1 = 2 ĠÑĤÐ²ÑĬÑĢ") == [
        *(9419, 0, 220, 97169, 97621, 6115, 16, 478, 220, 16, 283, 220, 17, 9551, 254, 68933, 128, 97, 91914, 28495),
        *(68933, 128, 105, 68933, 128, 95),
    ]
    assert [tokenizer.special(s) for s in ("<|im_start|>", "<think>", "</think>")] == [248045, 248068, 248069]
