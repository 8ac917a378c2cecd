"""The harmony format, beyond what the template shows and what holds for every family."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from growth import assert_linear
from hypothesis import given, settings
from hypothesis import strategies as st
from official import BY_NAME
from sampled import sampled

from jaxrl.chat.families import recognise
from jaxrl.chat.harmony import GPT_OSS, GPT_OSS_HIGH, GPT_OSS_LOW, Harmony, tool_namespace, type_of
from jaxrl.chat.renderer import Outcome, Renderer, Style, build, spell
from jaxrl.chat.tokenizer import byte_tokenizer, render_template
from jaxrl.chat.tool_calls import tool_schema
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

SPECIALS = tuple(dict.fromkeys([*GPT_OSS.markers, *GPT_OSS.stops]))
BYTES = byte_tokenizer(SPECIALS)
USER = Message("user", "hi")
NEXT = "<|end|><|start|>assistant"
THINK = f"<|channel|>analysis<|message|>hm{NEXT}"
CALL = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
F = ToolCall("f", '{"a": 1}')


def make(family: Harmony = GPT_OSS, **choices) -> Renderer:
    return build(family, BYTES, **choices)


def ids(text: str) -> tuple[int, ...]:
    """Sampled ids for text in which spellings of special tokens mean the tokens."""
    return sampled(BYTES, text, SPECIALS)


def read(text: str) -> tuple[Message, Outcome]:
    parsed = make().parse(ids(text))
    return parsed.message, parsed.outcome


def opened(*messages: Message, family: Harmony = GPT_OSS, **choices) -> str:
    return BYTES.decode(make(family, **choices).open(messages))


def extended(*messages: Message, after: str = "<|return|>") -> str:
    return BYTES.decode(make().extend(messages, after=ids(after)))


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<|channel|>final<|message|>A<|return|>", Message("assistant", "A")),
        (f"{THINK}<|channel|>final<|message|>A\n<|return|>", Message("assistant", "A\n", thinking="hm")),
        (f"{THINK}<|channel|>final<|message|><|endoftext|>", Message("assistant", "", thinking="hm")),
        (f"{CALL}<|call|>", Message("assistant", tool_calls=(F,))),
        (f"{THINK}{CALL}<|call|>", Message("assistant", thinking="hm", tool_calls=(F,))),
        (
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
            Message("assistant", tool_calls=(F,)),
        ),
        (
            ' to=functions.f<|channel|>analysis<|constrain|>json<|message|>\n{"a": 1}\n<|call|>',
            Message("assistant", tool_calls=(F,)),
        ),
        (
            f"<|channel|>commentary<|message|>Wait.{NEXT}{THINK}{CALL}<|call|>",
            Message("assistant", "Wait.", thinking="hm", tool_calls=(F,)),
        ),
        (
            f"{THINK}<|channel|>analysis<|message|>more{NEXT}<|channel|>commentary<|message|>B<|return|>",
            Message("assistant", "B", thinking="hm\nmore"),
        ),
        (
            f"<|channel|>commentary<|message|>A{NEXT}<|channel|>final<|message|>B<|return|>",
            Message("assistant", "A\nB"),
        ),
        (
            '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
            Message("assistant", tool_calls=(ToolCall("browser.search", '{"query": "x"}'),)),
        ),
    ],
)
def test_what_the_model_writes_is_read(text: str, message: Message) -> None:
    assert read(text) == (message, Outcome.STOPPED)


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "Hello",
        "<|message|>Hello",
        "<|channel|>final",
        "<|channel|><|message|>A",
        "<|channel|>musings<|message|>A",
        "<|channel|>final<|channel|>final<|message|>A",
        "<|channel|>final<|message|>A<|message|>B",
        "<|channel|>final<|message|>A<|channel|>B",
        "<|channel|>final<|message|>A<|constrain|>",
        "<|channel|>final<|message|>A<|end|>",
        "<|channel|>analysis<|message|>hm",
        f"<|channel|>analysis<|message|>hm{NEXT}",
        f"<|channel|>final<|message|>A{NEXT}<|channel|>final<|message|>B",
        f"{CALL}{NEXT}<|channel|>final<|message|>B",
        "<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>A",
        "<|channel|>commentary<|message|>A<|end|>B",
        "<|channel|>commentary<|message|>A<|end|><|start|>user<|message|>B",
        '<|channel|>commentary<|message|>A<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>"B"',
        "s<|channel|>final<|message|>A",
        "<|constrain|><|channel|>final<|message|>A",
        "<|channel|>final<|message|>A<|call|>B",
    ],
)
def test_broken_framing_is_malformed_and_kept_as_text(broken: str) -> None:
    assert read(broken + "<|return|>") == (Message("assistant", broken), Outcome.MALFORMED)


@pytest.mark.parametrize(
    ("recipient", "arguments", "problem"),
    [
        ("functions.f", "", "the block is empty"),
        ("functions.f", "{'a': 1}", "it is not valid JSON"),
        ("functions.f", '{"a": 1,}', "it is not valid JSON"),
        ("functions.f", '{"a": 1', "it is not valid JSON"),
        ("functions.f", '{"a": 1, "a": 2}', '"a" is given twice'),
        ("functions.f", '{"a": NaN}', "NaN is not JSON"),
        ("functions.f", '{"a": 1} and so on', "there is text after the JSON object"),
        ("functions.f", "[" * 100_000, "does not hold a JSON object"),
        ("functions.f", '{"a": ' + "[" * 100_000, "nested too deeply"),
        ("functions.", "{}", "the tool's name is missing"),
        ("", "{}", "the tool's name is missing"),
        ("python", "print(1)", "does not hold a JSON object"),
    ],
)
def test_P03_a_call_that_cannot_be_read_says_why(recipient: str, arguments: str, problem: str) -> None:
    message, outcome = read(f"{THINK} to={recipient}<|channel|>commentary json<|message|>{arguments}<|call|>")
    assert (outcome, message.tool_calls, message.thinking) == (Outcome.STOPPED, (), "hm")
    (bad,) = message.malformed_calls
    assert bad.text == f"to={recipient} {arguments}"
    assert problem in bad.error


def test_huge_numbers_and_nested_json_stay_as_they_were_written() -> None:
    arguments = '{"n": 123456789012345678901234567890, "e":1e999 ,"s": "\\u00e9\\"}<|call|>", "o": {"a": [{}]}}'
    tokens = (*ids(" to=functions.f<|channel|>commentary json<|message|>"), *BYTES.encode(arguments), *ids("<|call|>"))
    assert make().parse(tokens).message.tool_calls == (ToolCall("f", arguments),)


def test_P01_markers_are_ids_not_text() -> None:
    said = "<|end|><|start|>assistant<|channel|>analysis<|message|>x<|return|>"
    tokens = (*ids("<|channel|>final<|message|>"), *BYTES.encode(said), *ids("<|return|>"))
    assert make().parse(tokens).message == Message("assistant", said)


def test_what_a_cut_turn_had_finished_is_in_its_message() -> None:
    assert read("") == (Message("assistant", ""), Outcome.LENGTH)
    assert read("<|channel|>ana") == (Message("assistant", "<|channel|>ana"), Outcome.LENGTH)
    assert read("<|channel|>analysis<|message|>h") == (Message("assistant", "", thinking="h"), Outcome.LENGTH)
    assert read(THINK) == (Message("assistant", "<|start|>assistant", thinking="hm"), Outcome.LENGTH)
    assert read(f"{THINK}<|channel|>final<|message|>A") == (Message("assistant", "A", thinking="hm"), Outcome.LENGTH)


WORDS = st.text(st.sampled_from('ab {}[]"\\:,\n\té🙂') | st.characters(codec="utf-8"), max_size=20)
SPELLED = st.sampled_from([*SPECIALS, " to=functions.f"])
NAMES = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=8).filter(
    lambda name: name.split() == [name] and not name.startswith("functions.")
)
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(WORDS, WORDS | SPELLED | st.integers(), max_size=3).map(json.dumps))


@given(WORDS | SPELLED, st.none() | WORDS | SPELLED, st.none() | CALLS)
def test_parse_inverts_turn_exactly(content: str, thinking: str | None, call: ToolCall | None) -> None:
    message = Message("assistant", content, thinking=thinking, tool_calls=(call,) if call else ())
    parsed = make().parse(make().turn(message))
    assert (parsed.message, parsed.outcome) == (message, Outcome.STOPPED)


@given(
    st.lists(st.sampled_from([*SPECIALS, "assistant", "analysis", "final", "commentary json", " to=functions.f", "{}"]))
)
def test_any_arrangement_of_framing_is_parsed_without_an_exception(parts: list[str]) -> None:
    tokens = ids("".join(parts))
    parsed = make().parse(tokens)
    assert (parsed.outcome is Outcome.LENGTH) == (not tokens or tokens[-1] not in make().stop_ids)


@pytest.mark.parametrize(
    "unit",
    [
        "<|start|>assistant",
        "<|start|>",
        "<|end|>",
        "<|channel|>",
        "<|message|>",
        f"<|channel|>analysis<|message|>x{NEXT}",
        'a to=functions.f<|channel|>commentary<|message|>{"a":',
    ],
)
def test_large_turns_are_read_in_linear_time(unit: str) -> None:
    assert_linear(make().parse, lambda size: ids(unit) * (size // len(ids(unit))), 20_000)


def test_a_megabyte_of_arguments() -> None:
    call = ToolCall("f", json.dumps({"text": 'x<|call|>\\"' * 100_000}))
    assert make().parse(make().turn(Message("assistant", tool_calls=(call,)))).message.tool_calls == (call,)


# --- writing --------------------------------------------------------------------------------------


def test_the_rows_differ_in_effort_and_fields_say_the_rest() -> None:
    texts = {row.name: opened(USER, family=row) for row in (GPT_OSS, GPT_OSS_LOW, GPT_OSS_HIGH)}
    low = texts["gpt_oss"].replace("Reasoning: medium", "Reasoning: low")
    high = texts["gpt_oss"].replace("Reasoning: medium", "Reasoning: high")
    assert (texts["gpt_oss_low"], texts["gpt_oss_high"]) == (low, high)
    mine = replace(GPT_OSS, model_identity="You are kind.", knowledge_cutoff="2020-01", date="2026-02-03")
    assert opened(USER, family=mine) == (
        "<|start|>system<|message|>You are kind.\nKnowledge cutoff: 2020-01\nCurrent date: 2026-02-03\n\n"
        "Reasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be included for every "
        "message.<|end|><|start|>user<|message|>hi<|end|><|start|>assistant"
    )


def test_M05_a_turn_stops_where_it_is_handed_over_and_not_between_its_messages() -> None:
    assert [BYTES.decode([i]) for i in make().stop_ids] == ["<|return|>", "<|call|>", "<|endoftext|>"]


@pytest.mark.parametrize("end", ["<|return|>", "<|call|>", "<|endoftext|>"])
def test_T07_extend_starts_after_what_was_sampled(end: str) -> None:
    more = "<|start|>user<|message|>more<|end|><|start|>assistant"
    assert extended(Message("user", "more"), after=f"a{end}") == more
    assert extended(Message("user", "more"), after="a") == f"<|end|>{more}"


def test_T15_results_in_a_row_are_messages_of_their_tools() -> None:
    results = (Message("tool", "1", name="f"), Message("tool", 'a "b"\n<|end|>é', name="g"))
    assert extended(*results) == (
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"1"<|end|>'
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"a \\"b\\"\\n<|end|>é"<|end|>'
        "<|start|>assistant"
    )


def test_a_result_is_named_after_its_call() -> None:
    def sources(*results: Message, calls: tuple[ToolCall, ...]) -> list[str]:
        said = opened(USER, Message("assistant", tool_calls=calls), *results)
        return re.findall(r"<\|start\|>([^ <]+) to=assistant", said)

    f, g = ToolCall("f", "{}", "1"), ToolCall("g", "{}", "2")
    nameless = (Message("tool", "x"), Message("tool", "y"), Message("tool", "z"))
    assert sources(*nameless, calls=(f, g)) == ["functions.f", "functions.g", "functions.g"]
    assert sources(Message("tool", "x", call_id="2"), Message("tool", "y", call_id="1"), calls=(f, g)) == [
        "functions.g",
        "functions.f",
    ]
    assert sources(Message("tool", "x", name="h", call_id="2"), calls=(f, g)) == ["functions.h"]
    assert sources(Message("tool", "x"), calls=()) == ["functions"]
    assert extended(Message("tool", "no")).startswith("<|start|>functions to=assistant<|channel|>")


def test_text_beside_a_call_is_commentary_and_every_call_is_written() -> None:
    turn = Message("assistant", "Both:", thinking="hm", tool_calls=(F, ToolCall("g", "{}")))
    assert opened(USER, turn).endswith(
        f"<|start|>assistant<|channel|>analysis<|message|>hm{NEXT}<|channel|>commentary<|message|>Both:{NEXT}"
        f"{CALL}<|call|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{{}}<|call|>"
        "<|start|>assistant"
    )


def test_a_later_system_message_is_a_developer_message() -> None:
    said = "<|start|>developer<|message|># Instructions\n\nBe formal.\n\n<|end|>"
    assert extended(Message("system", "Be formal.")) == f"{said}<|start|>assistant"
    assert opened(USER, Message("system", "Be formal.")).endswith(f"{said}<|start|>assistant")
    assert extended(Message("system", "")) == "<|start|>assistant"


def test_a_call_that_could_not_be_read_is_written_back() -> None:
    bad = read(" to=functions.f<|channel|>commentary json<|message|> {oops <|call|>")[0]
    assert opened(USER, bad).endswith(
        " to=functions.f<|channel|>commentary json<|message|> {oops <|call|><|start|>assistant"
    )
    other = Message("assistant", malformed_calls=(MalformedToolCall("{oops", "why"),))
    assert " to=functions<|channel|>commentary json<|message|>{oops<|call|>" in opened(USER, other)


def test_a_demonstration_holds_one_call_of_a_one_word_tool() -> None:
    with pytest.raises(ValueError, match=r"'gpt_oss' holds one call at most, got calls of \['f', 'f'\]: give each"):
        make().turn(Message("assistant", tool_calls=(F, F)))
    with pytest.raises(ValueError, match="is one word in family 'gpt_oss', got 'a b'"):
        make().turn(Message("assistant", tool_calls=(ToolCall("a b", "{}"),)))


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="a message has role 'robot': expected 'system'"):
        make().extend([Message("robot", "hi")], after=())  # type: ignore[arg-type]


def test_T09_white_space_is_what_it_was() -> None:
    assert "<|message|> \n a\n\n<|end|>" in opened(Message("user", " \n a\n\n"))
    assert "<|message|>\n a \n<|end|>" in opened(USER, Message("assistant", "\n a \n"), USER)


# --- thoughts -------------------------------------------------------------------------------------


def test_T03_T05_thoughts_go_when_the_user_speaks_and_stay_during_a_tool_loop() -> None:
    renderer = make(thinking="strip")
    turns = [
        (f"{THINK.replace('hm', 'one')}<|channel|>final<|message|>A<|return|>", USER),
        (f"{THINK.replace('hm', 'two')}{CALL}<|call|>", Message("tool", "1", name="f")),
        (f"{THINK.replace('hm', 'three')}{CALL}<|call|>", Message("tool", "2", name="f")),
        (f"{THINK.replace('hm', '')}{CALL}<|call|>", Message("tool", "3", name="f")),
    ]
    transcript, reasons = begin(renderer, [USER]), []
    for text, answer in turns:
        transcript, reason = observe(act(transcript, ids(text)), [answer])
        reasons.append(reason)
    text = BYTES.decode(transcript.tokens)
    assert reasons == ["thinking_stripped", None, None, "thinking_stripped"]
    assert "<|start|>assistant<|channel|>final<|message|>A<|return|><|start|>user" in text
    assert re.findall(r"analysis<\|message\|>(\w*)", text) == ["two", "three"]
    transcript, _ = observe(act(transcript, ids("<|channel|>final<|message|>B<|return|>")), [USER])
    after = BYTES.decode(transcript.tokens)
    assert "analysis<|message|>" not in after
    assert after.count(f"<|start|>assistant{CALL}<|call|>") == 3


def test_opening_messages_lose_their_thoughts_once_a_final_answer_follows() -> None:
    call = Message("assistant", thinking="x", tool_calls=(F,))
    result, final = Message("tool", "1"), Message("assistant", "A", thinking="y")
    assert "analysis<|message|>x" in opened(USER, call, result, thinking="strip")
    assert "analysis<|message|>" not in opened(USER, call, result, final, USER, thinking="strip")
    assert "analysis<|message|>x" in opened(USER, final, USER, call, result, USER, thinking="strip")
    kept = opened(USER, call, result, final, USER)
    assert "analysis<|message|>x" in kept
    assert "analysis<|message|>y" in kept


# --- tools ----------------------------------------------------------------------------------------

TAB = " " * 16


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({}, "any"),
        (True, "any"),
        ({"type": "string"}, "string"),
        ({"type": "string", "nullable": True}, "string | null"),
        ({"type": "string", "enum": ["a", "b"]}, '"a" | "b"'),
        ({"type": "string", "enum": ["a"], "nullable": True}, '"a"'),
        ({"type": "string", "enum": []}, "string"),
        ({"type": "integer"}, "number"),
        ({"type": "number", "nullable": True}, "number"),
        ({"type": "boolean"}, "boolean"),
        ({"type": "null"}, "any"),
        ({"enum": ["a"]}, "any"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "any"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"type": ["integer"]}, "integer"),
        ({"type": [], "oneOf": [{"type": "string"}]}, "string"),
        ({"type": "array"}, "any[]"),
        ({"type": "array", "items": {}}, "any[]"),
        ({"type": "array", "items": True}, "any[]"),
        ({"type": "array", "nullable": True}, "any[] | null"),
        ({"type": "array", "items": {"type": "string", "enum": ["a"]}}, "string[]"),
        ({"type": "array", "items": {"type": "integer"}, "nullable": True}, "number[] | null"),
        ({"type": "array", "items": {"type": "boolean"}}, "boolean[]"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "number"}}}, "number[][]"),
        ({"type": "array", "items": {"type": ["object", "object"]}}, "any[]"),
        ({"type": "array", "items": {"type": ["object", "array"]}}, "object | array[]"),
        ({"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "integer"}]}}, "string | \nnumber[]"),
        ({"type": "array", "items": {"type": "object"}}, "object[]"),
        (
            {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
            f"{{\na?: \n{TAB}string}}[]",
        ),
        (
            {"type": "array", "items": {"type": "object", "properties": {"a" * 25: {"type": "string"}}}},
            "any[]",
        ),
        ({"type": "object"}, "object"),
        ({"type": "object", "properties": {}}, "object"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "object", "properties": {"b": {}}}, "items": {"type": "string"}},
                "required": ["items"],
            },
            f"{{\na?: \n{TAB}{{\nb?: \n{TAB}any}}, items: \n{TAB}string}}",
        ),
        (
            {"oneOf": [{"type": "string", "description": "S"}, {"type": "object"}, {"type": "number", "default": 1}]},
            f"string// S | \nobject | \nnumber{' ' * 20}// default: 1",
        ),
    ],
)
def test_types_are_written_as_the_template_does(schema: object, text: str) -> None:
    assert type_of(schema) == text


def test_parameters_have_descriptions_and_defaults() -> None:
    properties = {
        "a": {"type": "string", "description": "First.\nMore."},
        "b": {"type": "string", "default": 'x"é'},
        "c": {"type": "string", "enum": ["x", "y"], "default": "x"},
        "d": {"oneOf": [{"type": "string"}], "default": "x"},
        "e": {"type": "string", "enum": ["x"], "default": 1},
        "f": {"type": "number", "default": None},
    }
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    assert tool_namespace([ToolSpec("t", "Do\nit.", schema), ToolSpec("u", "", {})]) == (
        "## functions\n\nnamespace functions {\n\n// Do\nit.\ntype t = (_: {\n// First.\nMore.\na: string,\n"
        'b?: string, // default: "x\\"é",\nc?: "x" | "y", // default: x,\nd?: string// default: x,\n'
        'e?: "x", // default: 1,\nf?: number, // default: null,\n}) => any;\n\n'
        "// \ntype u = () => any;\n\n} // namespace functions"
    )


PLAIN = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "number", "integer", "boolean", "null", "array", "object"])},
    optional={"enum": st.lists(st.sampled_from(["a", "é"]), max_size=2)},
)
LISTED = st.builds(lambda kinds: {"type": kinds}, st.lists(st.sampled_from(["object", "null", "string"]), max_size=2))
ABOUT = st.fixed_dictionaries(
    {}, optional={"nullable": st.booleans(), "description": st.sampled_from(["", "D\nd"]), "default": st.just("x")}
)


def nested(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    members = st.dictionaries(st.sampled_from(["a", "items", "long" * 6]), inner, max_size=3)
    objects = st.builds(lambda p: {"type": "object", "properties": p, "required": ["a"]}, members)
    arrays = st.builds(lambda items: {"type": "array", "items": items}, inner)
    either = st.builds(lambda options: {"oneOf": options}, st.lists(inner, max_size=3))
    return st.builds(lambda a, b: a | b, objects | arrays | either, ABOUT)


SCHEMAS = st.recursive(st.builds(lambda a, b: a | b, PLAIN | LISTED, ABOUT), nested, max_leaves=6)


@pytest.fixture(scope="module")
def published(real_cache: Path) -> str:
    """The template, on a day that stays."""
    return BY_NAME["gpt_oss"].source(real_cache)


@pytest.mark.full
@settings(max_examples=300)
@given(schemas=st.dictionaries(st.sampled_from(["p", "q", "r"]), SCHEMAS, max_size=3))
def test_any_tool_is_written_as_the_template_does(published: str, schemas: dict) -> None:
    tool = ToolSpec("t", "D", {"type": "object", "properties": schemas, "required": ["p"]})
    text = render_template(published, [{"role": "user", "content": "hi"}], [tool_schema(tool)], today=GPT_OSS.date)
    assert spell(GPT_OSS.opening([USER], [tool], Style())) == text


@pytest.mark.full
def test_the_published_template_is_recognised_whatever_its_tokenizer_is_called(published: str) -> None:
    for name in ("bytes", "openai/gpt-oss-20b"):
        assert recognise(replace(BYTES, name=name, chat_template=published)).name == "gpt_oss"


@pytest.mark.full
def test_the_real_vocabulary_has_every_marker_and_forgets_thoughts_by_them(real_tokenizer) -> None:
    tokenizer = real_tokenizer("gpt_oss")
    renderer = build(GPT_OSS, tokenizer, thinking="strip")
    turn = renderer.turn(Message("assistant", "A", thinking="analysis <|end|><|start|>assistant"))
    transcript, reason = observe(act(begin(renderer, [USER]), turn), [USER])
    assert reason == "thinking_stripped"
    assert tokenizer.decode(transcript.tokens).endswith(
        "<|start|>assistant<|channel|>final<|message|>A<|return|><|start|>user<|message|>hi<|end|><|start|>assistant"
    )
