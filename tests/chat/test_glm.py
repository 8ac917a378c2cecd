"""GLM's families, beyond what the templates show and what holds for every family."""

import json
import re
from dataclasses import replace

import pytest
from chat_conversations import CONVERSATIONS
from growth import assert_linear
from hypothesis import given
from hypothesis import strategies as st
from official import BY_NAME
from sampled import sampled

from jaxrl.chat.families import recognise
from jaxrl.chat.glm import GLM, GLM4_5, GLM4_7
from jaxrl.chat.renderer import Outcome, Renderer, build
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import MalformedToolCall, Message, ToolCall

SPECIALS = tuple(dict.fromkeys([*GLM4_5.markers, *GLM4_5.stops]))
BYTES = byte_tokenizer(SPECIALS)
ROWS = {"glm4.5": GLM4_5, "glm4.7": GLM4_7}
both = pytest.mark.parametrize("name", ROWS)
USER = Message("user", "hi")
RESULT = Message("tool", "1", name="f")
CALL = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
F = ToolCall("f", '{"a": 1}')


def make(family: GLM | str = GLM4_5, **choices) -> Renderer:
    return build(ROWS[family] if isinstance(family, str) else family, BYTES, **choices)


def ids(text: str) -> tuple[int, ...]:
    """Sampled ids for text in which spellings of special tokens mean the tokens."""
    return sampled(BYTES, text, SPECIALS)


def read(text: str, family: GLM | str = GLM4_5, **choices) -> tuple[Message, Outcome]:
    parsed = make(family, **choices).parse(ids(text))
    return parsed.message, parsed.outcome


def opened(*messages: Message, family: GLM | str = GLM4_5, **choices) -> str:
    return BYTES.decode(make(family, **choices).open(messages))


def extended(*messages: Message, after: str, family: GLM | str = GLM4_5, **choices) -> str:
    return BYTES.decode(make(family, **choices).extend(messages, after=ids(after)))


# --- who speaks next ------------------------------------------------------------------------------


def test_M05_a_turn_stops_at_the_marker_of_whoever_speaks_next() -> None:
    assert [BYTES.decode([i]) for i in make().stop_ids] == ["<|user|>", "<|observation|>", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("after", "messages", "text"),
    [
        ("a<|user|>", [USER], "\nhi<|assistant|>"),
        ("a<|observation|>", [RESULT], "\n<tool_response>\n1\n</tool_response><|assistant|>"),
        ("a<|endoftext|>", [USER], "<|user|>\nhi<|assistant|>"),
        ("a", [USER], "<|user|>\nhi<|assistant|>"),
        ("", [RESULT], "<|observation|>\n<tool_response>\n1\n</tool_response><|assistant|>"),
        ("a<|user|>", [RESULT], "<|observation|>\n<tool_response>\n1\n</tool_response><|assistant|>"),
        ("a<|observation|>", [USER], "<|user|>\nhi<|assistant|>"),
        ("a<|user|>", [Message("system", "s"), USER], "<|system|>\ns<|user|>\nhi<|assistant|>"),
        ("a<|user|>", [USER, USER], "\nhi<|user|>\nhi<|assistant|>"),
        ("a<|user|>", [], "<|assistant|>"),
    ],
)
def test_T07_a_role_that_was_sampled_is_not_written_again(after: str, messages: list[Message], text: str) -> None:
    assert extended(*messages, after=after) == text


def test_a_demonstration_ends_with_who_speaks_next() -> None:
    turn = make().turn
    assert BYTES.decode(turn(Message("assistant", "A", thinking="hm"))) == "\n<think>hm</think>\nA<|user|>"
    assert BYTES.decode(turn(Message("assistant", "", tool_calls=(F,)))) == (
        f"\n<think></think>\n{CALL}<|observation|>"
    )


@both
def test_T15_results_in_a_row_share_an_observation(name: str) -> None:
    text = extended(RESULT, Message("tool", "2\n"), USER, RESULT, after="<|observation|>", family=name)
    assert text.replace("\n", "") == (
        "<tool_response>1</tool_response><tool_response>2</tool_response>"
        "<|user|>hi<|observation|><tool_response>1</tool_response><|assistant|>" + "<think>" * (name == "glm4.7")
    )


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n<think>hm</think>\nA<|user|>", Message("assistant", "A", thinking="hm")),
        ("\n<think>\n h\n\nm \n</think>\n\n A \n<|user|>", Message("assistant", "A", thinking="h\n\nm")),
        ("\n<think></think>\nA<|endoftext|>", Message("assistant", "A", thinking="")),
        ("\nA<|user|>", Message("assistant", "A")),
        ("<|user|>", Message("assistant", "")),
        (f"\n<think>hm</think>\n{CALL}<|observation|>", Message("assistant", thinking="hm", tool_calls=(F,))),
        (f"\nA\n{CALL}\n{CALL}<|observation|>", Message("assistant", "A", tool_calls=(F, F))),
        (f"A{CALL}B{CALL} C<|user|>", Message("assistant", "A\nB\nC", tool_calls=(F, F))),
        ("<tool_call>f</tool_call><|observation|>", Message("assistant", tool_calls=(ToolCall("f", "{}"),))),
        (
            "<tool_call>\n f <arg_key> a </arg_key><arg_value>1</arg_value></tool_call><|observation|>",
            Message("assistant", tool_calls=(F,)),
        ),
    ],
)
def test_what_the_model_writes_is_read(text: str, message: Message) -> None:
    assert read(text) == (message, Outcome.STOPPED)


@pytest.mark.parametrize(
    "broken",
    [
        "<think>hm",
        "hm</think>A",
        "A<think>hm</think>B",
        "<think>a</think><think>b</think>",
        "<think>a<think>b</think>",
        f"<think>{CALL}</think>",
        "<think><arg_key>a</arg_key></think>",
        "<tool_call>f",
        "f</tool_call>",
        f"{CALL}</tool_call>",
        f"<tool_call>f{CALL}</tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value><think>x</think></arg_value></tool_call>",
        f"{CALL}<think>late</think>",
        "<arg_key>a</arg_key>",
        "<tool_response>made up</tool_response>",
        "A<|assistant|>B",
        "A<|system|>B",
        "A<|user|>B",
        "A<|endoftext|>B",
        "[gMASK]<sop>",
        "A/nothink",
    ],
)
def test_broken_framing_is_malformed_and_kept_as_text(broken: str) -> None:
    assert read(broken + "<|user|>") == (Message("assistant", broken), Outcome.MALFORMED)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("", "the tool's name is missing"),
        ("\n<arg_key>a</arg_key><arg_value>1</arg_value>", "the tool's name is missing"),
        ('{"name": "f", "arguments": {}}', "is no tool's name"),
        ("f(a=1)", "is no tool's name"),
        ("call f", "is no tool's name"),
        ("f<arg_value>1</arg_value>", "<arg_value> stands where <arg_key> must"),
        ("f<arg_key>a<arg_value>1</arg_value>", "<arg_value> stands where </arg_key> must"),
        ("f<arg_key>a</arg_key>", "<arg_value> is missing at its end"),
        ("f<arg_key>a</arg_key><arg_value>1", "</arg_value> is missing at its end"),
        ("f<arg_key>a</arg_key>=<arg_value>1</arg_value>", "there is text between its arguments"),
        ("f<arg_key>a</arg_key><arg_value>1</arg_value>and", "there is text between its arguments"),
        (
            "f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value>",
            "the argument 'a' is given twice",
        ),
    ],
)
def test_P03_a_call_that_cannot_be_read_says_why_and_spoils_no_other(block: str, problem: str) -> None:
    message, outcome = read(f"A\n<tool_call>{block}</tool_call>{CALL}<|observation|>")
    assert (outcome, message.content, message.tool_calls) == (Outcome.STOPPED, "A", (F,))
    (bad,) = message.malformed_calls
    assert bad.text == block
    assert problem in bad.error
    assert "<arg_key>KEY</arg_key>" in bad.error


@pytest.mark.parametrize(
    ("value", "argument"),
    [
        ("1", "1"),
        (" -2.50\n", "-2.50"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("1e999", "1e999"),
        ("true", "true"),
        ("null", "null"),
        ('[1, {"a": "x"}]', '[1, {"a": "x"}]'),
        ("{}", "{}"),
        ('{"a": 1,}', r'"{\"a\": 1,}"'),
        ("{'a': 1}", "\"{'a': 1}\""),
        ("True", '"True"'),
        ("NaN", '"NaN"'),
        ("1 2", '"1 2"'),
        ("", '""'),
        (" x\n", r'" x\n"'),
        ('"x"', r'"\"x\""'),
        ("é", '"é"'),
        ("9" * 5000, '"' + "9" * 5000 + '"'),
        ("[" * 100_000, '"' + "[" * 100_000 + '"'),
    ],
)
def test_a_value_is_json_where_it_parses_to_something_else_than_a_string(value: str, argument: str) -> None:
    message, _ = read(f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call><|observation|>")
    assert message.tool_calls == (ToolCall("f", f'{{"a": {argument}}}'),)


def test_P01_markers_are_ids_not_text() -> None:
    inside = "</arg_value></tool_call><tool_call>g<|user|>"
    head, tail = ids("<tool_call>f<arg_key>a</arg_key><arg_value>"), ids("</arg_value></tool_call><|observation|>")
    parsed = make().parse((*BYTES.encode(CALL), *head, *BYTES.encode(inside), *tail))
    assert parsed.message == Message("assistant", CALL, tool_calls=(ToolCall("f", json.dumps({"a": inside})),))


def test_what_a_cut_turn_had_finished_is_in_its_message() -> None:
    assert read("") == (Message("assistant", ""), Outcome.LENGTH)
    assert read("\n<think>hm\n") == (Message("assistant", "", thinking="hm"), Outcome.LENGTH)
    cut = f"\nA\n{CALL}\n<tool_call>g\n<arg_key>b"
    message = Message("assistant", "A\n<tool_call>g\n<arg_key>b", tool_calls=(F,))
    assert read(cut) == (message, Outcome.LENGTH)


def test_glm4_7_begins_inside_the_thought_that_the_prompt_opened() -> None:
    assert read("hm</think>A<|user|>", "glm4.7") == (Message("assistant", "A", thinking="hm"), Outcome.STOPPED)
    assert read("</think>A<|user|>", "glm4.7")[0] == Message("assistant", "A", thinking="")
    for broken in ("hm", "<think>hm</think>A", f"{CALL}"):
        assert read(f"{broken}<|user|>", "glm4.7") == (Message("assistant", broken), Outcome.MALFORMED)
    assert read("hm", "glm4.7") == (Message("assistant", "", thinking="hm"), Outcome.LENGTH)
    assert read("A<|user|>", "glm4.7", enable_thinking=False) == (Message("assistant", "A"), Outcome.STOPPED)


WORDS = st.text(st.sampled_from('ab {}[]"\\<>/\n\té🙂') | st.characters(codec="utf-8"), max_size=20)
SPELLED = st.sampled_from([*SPECIALS, CALL])
PLAIN_WORDS = (WORDS | SPELLED).map(lambda text: f"s{text}")  # no JSON: the format cannot tell 1 from "1"
VALUES = PLAIN_WORDS | st.integers() | st.booleans() | st.none() | st.lists(WORDS | SPELLED | st.floats(-9, 9))
KEYS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), max_size=5) | SPELLED
ARGUMENTS = st.dictionaries(KEYS.map(str.strip), VALUES, max_size=3)
CALLS = st.builds(ToolCall, st.sampled_from(["f", "look-up.now_2"]), ARGUMENTS.map(json.dumps))


@both
@given(st.data())
def test_parse_inverts_turn(name: str, data: st.DataObject) -> None:
    draw = data.draw
    content, thinking = draw(WORDS | SPELLED).strip(), draw(WORDS | SPELLED).strip()
    calls = tuple(draw(st.lists(CALLS, max_size=2)))
    message = Message("assistant", content, thinking=thinking, tool_calls=calls)
    parsed = make(name).parse(make(name).turn(message))
    assert parsed.outcome is Outcome.STOPPED
    assert replace(parsed.message, tool_calls=()) == replace(message, tool_calls=())
    found = [(call.name, json.loads(call.arguments)) for call in parsed.message.tool_calls]
    assert found == [(call.name, json.loads(call.arguments)) for call in calls]


@both
@given(st.lists(st.sampled_from([*SPECIALS, "f", "a", "\n", "1", "{"])))
def test_any_arrangement_of_markers_is_parsed_without_an_exception(name: str, parts: list[str]) -> None:
    tokens = ids("".join(parts))
    parsed = make(name).parse(tokens)
    assert (parsed.outcome is Outcome.LENGTH) == (not tokens or tokens[-1] not in make(name).stop_ids)


@both
@pytest.mark.parametrize(
    "unit",
    [
        "<think>",
        "<tool_call>",
        "<arg_key>",
        "</arg_value>",
        "<tool_call>f</tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>[</arg_value></tool_call>",
        "x<tool_call>f<arg_key>",
    ],
)
def test_large_turns_are_read_in_linear_time(name: str, unit: str) -> None:
    assert_linear(make(name).parse, lambda size: ids(unit) * (size // len(ids(unit))), 20_000)


@both
def test_many_and_large_arguments_are_read_in_linear_time(name: str) -> None:
    big = ToolCall("f", json.dumps({"text": 's</arg_value>\\"' * 70_000}))
    many = ToolCall("f", json.dumps({f"k{i}": i for i in range(5_000)}))
    message = Message("assistant", thinking="", tool_calls=(big, many))
    assert make(name).parse(make(name).turn(message)).message == message


# --- writing --------------------------------------------------------------------------------------


def test_T11_a_conversation_begins_with_two_markers() -> None:
    assert opened(USER) == "[gMASK]<sop><|user|>\nhi<|assistant|>"
    assert opened(USER, family="glm4.7") == "[gMASK]<sop><|user|>hi<|assistant|><think>"


def test_thinking_off_is_said_by_a_marker_after_each_user_message() -> None:
    renderer = make(enable_thinking=False)
    nothink = BYTES.special("/nothink")
    for said in ("hi", "hi/nothink"):
        tokens = renderer.open([Message("system", said), Message("user", said)])
        assert BYTES.decode(tokens).endswith("hi/nothink<|assistant|>\n<think></think>")
        assert tokens.count(nothink) == 1
    assert nothink not in make().open([Message("user", "hi/nothink")])
    assert extended(USER, after="a<|user|>", enable_thinking=False) == "\nhi/nothink<|assistant|>\n<think></think>"
    assert opened(USER, family="glm4.7", enable_thinking=False) == "[gMASK]<sop><|user|>hi<|assistant|></think>"


@both
def test_T09_what_opening_messages_say_is_trimmed_where_the_template_trims(name: str) -> None:
    said = Message("assistant", " \n A ", thinking="\n hm\n", tool_calls=(ToolCall("f", '{"a": " x\\n"}'),))
    text = opened(Message("user", " u\n"), said, Message("tool", " r\n"), family=name)
    assert "<think>hm</think>" in text
    assert "<arg_value> x\n</arg_value>" in text
    assert " u\n<|assistant|>" in text
    assert " r\n" in text
    assert " A " not in text


@both
def test_arguments_stand_as_they_were_written_but_strings_without_quotes(name: str) -> None:
    call = ToolCall("f", '{"a": "x\\ny", "b": [1.50,  "é\\u00e9"], "c": 1e2, "d": null, "e": ""}')
    text = opened(USER, Message("assistant", tool_calls=(call,)), family=name)
    assert re.findall(r"<arg_value>(.*?)</arg_value>", text, re.DOTALL) == [
        "x\ny",
        '[1.50,  "é\\u00e9"]',
        "1e2",
        "null",
        "",
    ]


@pytest.mark.parametrize("arguments", ["", "[]", "{", '{"a": 1, "a": 2}'])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    message = Message("assistant", tool_calls=(ToolCall("f", arguments),))
    with pytest.raises(ValueError, match="a call of 'f' has the arguments"):
        make().open([USER, message])


def test_a_call_that_could_not_be_read_is_written_back_with_its_markers_as_text() -> None:
    bad = Message("assistant", "A", malformed_calls=(MalformedToolCall("f<arg_key>", "why"),))
    tokens = make().open([USER, bad])
    assert BYTES.decode(tokens).endswith("A\n<tool_call>f<arg_key></tool_call><|assistant|>")
    assert BYTES.special("<arg_key>") not in tokens


def test_T15_calls_that_could_and_could_not_be_read_keep_their_order() -> None:
    said = f"\n<tool_call>g<h</tool_call>\n{CALL}\n<tool_call></tool_call>"
    message, outcome = read(said + "<|observation|>")
    assert outcome is Outcome.STOPPED
    assert [call.text if isinstance(call, MalformedToolCall) else call for call in message.calls] == ["g<h", F, ""]
    assert said in opened(USER, message)


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="a message has role 'robot': expected 'system'"):
        make().open([Message("robot", "hi")])  # type: ignore[arg-type]


# --- thoughts -------------------------------------------------------------------------------------


@both
def test_T03_T05_thoughts_go_when_the_user_speaks_and_stay_during_a_tool_loop(name: str) -> None:
    renderer = make(name, thinking="strip")
    turns = [("one", USER), ("two", RESULT), ("three", RESULT)]
    transcript, reasons, spoken = begin(renderer, [USER]), [], [USER]
    for thought, answer in turns:
        message = Message("assistant", "A", thinking=thought, tool_calls=(F,) if answer is RESULT else ())
        transcript, reason = observe(act(transcript, renderer.turn(message)), [answer])
        spoken += [message, answer]
        reasons.append(reason)
        assert transcript.tokens == renderer.open(spoken)
    assert reasons == ["thinking_stripped", None, None]
    text = BYTES.decode(transcript.tokens)
    assert [thought in text for thought, _ in turns] == [False, True, True]
    transcript, _ = observe(act(transcript, renderer.turn(Message("assistant", "B"))), [USER])
    assert transcript.tokens == renderer.open([*spoken, Message("assistant", "B"), USER])
    assert BYTES.decode(transcript.tokens).count("</think>") == 4


def test_an_empty_thought_of_glm4_7_goes_as_soon_as_anything_follows() -> None:
    renderer = make("glm4.7", thinking="strip")
    message = Message("assistant", "A", thinking="", tool_calls=(F,))
    transcript, reason = observe(act(begin(renderer, [USER]), renderer.turn(message)), [RESULT])
    assert reason == "thinking_stripped"
    assert transcript.tokens == renderer.open([USER, message, RESULT])
    kept = make("glm4.7")
    transcript, reason = observe(act(begin(kept, [USER]), kept.turn(message)), [RESULT])
    assert reason is None
    assert transcript.tokens == kept.open([USER, message, RESULT])


# --- what was published ---------------------------------------------------------------------------


@pytest.mark.full
def test_the_templates_of_glm_4_5_and_4_6_write_the_same(real_cache) -> None:
    older, newer = BY_NAME["glm4.5"].source(real_cache), BY_NAME["glm4.5_nothink"].source(real_cache)
    assert older != newer
    for conversation in CONVERSATIONS:
        assert BY_NAME["glm4.5"].render(older, conversation, {}) == BY_NAME["glm4.5"].render(newer, conversation, {})


@pytest.mark.full
@pytest.mark.parametrize(("row", "name"), [("glm4.5", "glm4.5"), ("glm4.5_nothink", "glm4.5"), ("glm4.7", "glm4.7")])
def test_the_published_templates_are_recognised(row: str, name: str, real_cache) -> None:
    assert recognise(replace(BYTES, chat_template=BY_NAME[row].source(real_cache))).name == name
