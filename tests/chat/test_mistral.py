"""What is particular to Mistral's formats: where system text and tools stand, call ids, what models emit, and the ids
of the makers' own encoder."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_conversations import CONVERSATIONS
from growth import assert_linear
from hypothesis import given
from hypothesis import strategies as st
from official import BY_NAME, mistral_call_id, with_call_ids
from sampled import sampled

from jaxrl.chat.families import find_family, renderer_for
from jaxrl.chat.mistral import MISTRAL_V11, Mistral, call_id
from jaxrl.chat.renderer import Outcome, Renderer, build
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.chat.tool_calls import tool_schema
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

NAMES = ("mistral_v3", "mistral_v11", "devstral", "ministral3_reasoning")
TAGGED = NAMES[1:]
LOOK = ToolSpec("look", 'Say "where".', {"type": "object", "properties": {}})
USER = Message("user", "hi")
MARKERS = (*MISTRAL_V11.markers, "[THINK]", "[/THINK]")
BYTES = byte_tokenizer(MARKERS)
END = (BYTES.special("</s>"),)


def make(name: str, **choices: Any) -> Renderer:
    """The family on bytes and markers, without the system prompt it would insert."""
    return build(without_prompt(name), BYTES, **choices)


def without_prompt(name: str) -> Mistral:
    """The family, but with no system prompt of its own."""
    family = find_family(name)
    assert isinstance(family, Mistral)
    return replace(family, default_system=None)


def ids(r: Renderer, text: str) -> tuple[int, ...]:
    """Ids of text in which spelled markers are the markers."""
    return sampled(r.tokenizer, text, r.marker_ids)


def said(r: Renderer, text: str) -> Message:
    """A stopped turn as read; fails if its framing is broken."""
    parsed = r.parse(ids(r, text + "</s>"))
    assert parsed.outcome is Outcome.STOPPED
    return parsed.message


def text(r: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
    return r.tokenizer.decode(r.open(messages, tools))


# --- writing --------------------------------------------------------------------------------------

TALK = (Message("system", "S"), Message("user", "1"), Message("assistant", "2"), Message("user", "3"))


def test_where_system_text_and_tools_stand() -> None:
    tools = "[AVAILABLE_TOOLS]" + json.dumps([tool_schema(LOOK)]) + "[/AVAILABLE_TOOLS]"
    assert text(make("mistral_v3"), TALK, [LOOK]) == f"<s>[INST]1[/INST]2</s>{tools}[INST]S\n\n3[/INST]"
    system = "[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]"
    assert text(make("mistral_v11"), TALK, [LOOK]) == f"<s>{system}[INST]1[/INST]2</s>{tools}[INST]3[/INST]"
    assert text(make("devstral"), TALK, [LOOK]) == f"<s>{system}{tools}[INST]1[/INST]2</s>[INST]3[/INST]"


def test_they_stay_there_in_an_episode() -> None:
    r = make("mistral_v3")
    more = r.extend([Message("user", "3")], after=r.turn(Message("assistant", "2")))
    assert r.tokenizer.decode(more) == "[INST]3[/INST]"


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_turn_is_closed(name: str) -> None:
    r = make(name)
    assert r.tokenizer.decode(r.extend([USER], after=ids(r, "he"))) == "</s>[INST]hi[/INST]"


@pytest.mark.parametrize("name", NAMES)
def test_user_messages_in_a_row_are_one_turn(name: str) -> None:
    r = make(name)
    extension = r.extend([USER, Message("user", ""), USER], after=END)
    assert r.tokenizer.decode(extension) == "[INST]hi\n\nhi[/INST]"
    assert r.tokenizer.decode(r.extend([Message("user", "")], after=END)) == "[INST][/INST]"


def test_a_system_text_without_a_user_speaks_as_one() -> None:
    r = make("mistral_v3")
    assert text(r, [Message("system", "S")]) == "<s>[INST]S\n\n[/INST]"
    assert r.tokenizer.decode(r.extend([Message("system", "S")], after=END)) == "[INST]S\n\n[/INST]"


def test_the_system_prompt_is_inserted_with_its_date_and_its_markers() -> None:
    r = renderer_for(BYTES, "mistral_v11")
    assert "The current date is 2025-06-20.\n" in text(r, [USER])
    later = replace(MISTRAL_V11, date="2026-01-02")
    assert "date is 2026-01-02" in text(build(later, r.tokenizer), [USER])
    assert later.template_variables == {"today": "2026-01-02"}
    thinking = renderer_for(BYTES, "ministral3_reasoning")
    assert thinking.open([USER]).count(thinking.marker_ids["[THINK]"]) == 1
    assert thinking.marker_ids["[THINK]"] not in thinking.open([Message("system", "[THINK]"), USER])


@pytest.mark.parametrize(
    ("result", "written"),
    [
        ("1", "1"),
        ("1.10", "1.10"),
        (' {"a":1}\n', '{"a":1}'),
        ("null", "null"),
        ("", "{}"),
        (" ", '" "'),
        ("12:00", '"12:00"'),
        ('say "x"\n✓', '"say \\"x\\"\\n✓"'),
        ("1 2", '"1 2"'),
        ("NaN", '"NaN"'),
        ("[" * 100_000, json.dumps("[" * 100_000)),
        ("1" * 5000, json.dumps("1" * 5000)),
        ("}[/TOOL_RESULTS]", '"}[/TOOL_RESULTS]"'),
    ],
)
def test_a_v3_result_is_always_json(result: str, written: str) -> None:
    r = make("mistral_v3")
    shown = r.extend([Message("tool", result, call_id="abcdef123")], after=END)
    want = f'[TOOL_RESULTS]{{"content": {written}, "call_id": "abcdef123"}}[/TOOL_RESULTS]'
    assert r.tokenizer.decode(shown) == want
    assert shown.count(r.marker_ids["[/TOOL_RESULTS]"]) == 1


@pytest.mark.parametrize("name", ["mistral_v3", "mistral_v11"])
def test_T15_ids_of_calls_and_results_agree_given_or_made(name: str) -> None:
    r = make(name)
    calls = (ToolCall("look", "{}"), ToolCall("look", "{}"), ToolCall("look", "{}", "abcdef123"))
    asked = Message("assistant", "", tool_calls=calls)
    answers = (Message("tool", "a"), Message("tool", "b"), Message("tool", "c", call_id="abcdef123"))
    turn = r.turn(asked)
    results = r.extend(answers, after=turn)
    assert (*r.open([USER]), *turn, *results) == r.open([USER, asked, *answers])
    called = [call.id for call in r.parse(turn).message.tool_calls]
    assert called == [call_id(0), call_id(1), "abcdef123"] == ["call00000", "call00001", "abcdef123"]
    shown = r.tokenizer.decode(results)
    assert [shown.count(id) for id in called if id] == [1, 1, 1]
    assert [shown.index(id) for id in called if id] == sorted(shown.index(id) for id in called if id)


def test_thoughts_are_kept_and_can_be_stripped() -> None:
    talk = [USER, Message("assistant", "a", thinking="hm"), USER, Message("assistant", "b", thinking="ha"), USER]
    keep, strip = make("ministral3_reasoning"), make("ministral3_reasoning", thinking="strip")
    assert text(keep, talk).count("[THINK]") == 2
    assert text(strip, talk) == text(keep, [replace(m, thinking=None) for m in talk])


# --- reading --------------------------------------------------------------------------------------

TWO = (ToolCall("f", '{"a": [1, "]"]}', "abcdefghi"), ToolCall("g", "{}"))


def test_v3_reads_an_array_of_calls() -> None:
    r = make("mistral_v3")
    array = '[{"name": "f", "arguments": {"a": [1, "]"]}, "id": "abcdefghi"}, {"arguments": {}, "name": "g"}]'
    assert said(r, f"Look.[TOOL_CALLS]{array}") == Message("assistant", "Look.", tool_calls=TWO)
    assert said(r, f"[TOOL_CALLS] \n{array}\n ").tool_calls == TWO
    assert said(r, f"[TOOL_CALLS]{array}[TOOL_CALLS]{array}").tool_calls == TWO + TWO


@pytest.mark.parametrize("name", TAGGED)
def test_v11_and_v13_read_a_call_a_block(name: str) -> None:
    r = make(name)
    identified = "[CALL_ID]abcdefghi" if "[CALL_ID]" in r.marker_ids else ""
    wanted = TWO if identified else tuple(replace(call, id=None) for call in TWO)
    turn = f'Look.[TOOL_CALLS]f{identified}[ARGS]{{"a": [1, "]"]}}[TOOL_CALLS] g\n[ARGS] {{}}\n'
    assert said(r, turn) == Message("assistant", "Look.", tool_calls=wanted)


def test_a_thought_comes_first_and_once() -> None:
    r = make("ministral3_reasoning")
    assert said(r, " [THINK]\nhm[/THINK]\n\nyes") == Message("assistant", "\n\nyes", thinking="\nhm")
    assert r.parse(ids(r, "[THINK]hm")).message == Message("assistant", "", thinking="hm")
    for broken in ("a[THINK]b[/THINK]", "[THINK]a", "a[/THINK]", "[THINK][THINK]a[/THINK]", "[THINK]a[TOOL_CALLS]f"):
        assert r.parse(ids(r, broken + "</s>")).outcome is Outcome.MALFORMED, broken


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "broken",
    ["[INST]hi[/INST]", "a</s>b", "<s>a", "[TOOL_RESULTS]made up[/TOOL_RESULTS]", "[TOOL_CALLS]f[ARGS]{}[/INST]"],
)
def test_P09_invented_framing_is_malformed(name: str, broken: str) -> None:
    r = make(name)
    parsed = r.parse(ids(r, broken + "</s>"))
    assert parsed.outcome is Outcome.MALFORMED
    assert parsed.message == Message("assistant", broken)


@pytest.mark.parametrize("broken", ["[ARGS]{}", "[TOOL_CALLS]f[ARGS]{}[ARGS]{}", "[TOOL_CALLS]f[ARGS]{}[CALL_ID]a"])
def test_parts_of_a_call_out_of_order_are_malformed(broken: str) -> None:
    r = make("mistral_v11")
    assert r.parse(ids(r, broken + "</s>")).outcome is Outcome.MALFORMED


@pytest.mark.parametrize(
    ("block", "calls", "left", "hint"),
    [
        ("", 0, "", "one JSON array"),
        ("[]", 0, "[]", "one JSON array"),
        ('{"name": "f", "arguments": {}}', 0, '{"name": "f", "arguments": {}}', "one JSON array"),
        ("[{'name': 'f', 'arguments': {}}]", 0, "[{'name': 'f', 'arguments': {}}]", "one JSON array"),
        ('[{"name": "f", "arguments": {}},]', 1, ",]", "one JSON array"),
        ('[{"name": "f", "arguments": {}}', 1, "", "one JSON array"),
        ('[{"name": "f", "arguments": {}}] Done.', 1, "] Done.", "nothing behind it"),
        ('[{"name": "f", "arguments": {}}, {"name": "g"', 1, ', {"name": "g"', "one JSON array"),
        ('[{"name": "f", "arguments": {}}, {"name": "g"}]', 1, '{"name": "g"}', '"arguments" is missing'),
        ('[{"arguments": {}}]', 0, '{"arguments": {}}', '"name" is missing'),
        ('[{"name": "f", "arguments": "{}"}]', 0, '{"name": "f", "arguments": "{}"}', "a string, not a JSON object"),
        ('[{"name": "f", "name": "g", "arguments": {}}]', 0, None, "given twice"),
        ("[3]", 0, "3", "does not hold a JSON object"),
        ("[" * 100_000, 0, "[" * 100_000, "one JSON array"),
    ],
)
def test_P03_what_is_wrong_in_a_v3_block_is_said(block: str, calls: int, left: str | None, hint: str) -> None:
    message = said(make("mistral_v3"), "ok[TOOL_CALLS]" + block)
    assert (message.content, len(message.tool_calls)) == ("ok", calls)
    (bad,) = message.malformed_calls
    assert hint in bad.error
    assert left is None or bad.text == left


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("block", "hint"),
    [
        ("", r"\[ARGS\] is missing"),
        ("f", r"\[ARGS\] is missing"),
        ('f{"a": 1}', r"\[ARGS\] is missing"),
        ("[ARGS]{}", "name is missing"),
        ("f[ARGS]", "the block is empty"),
        ("f[ARGS]{'a': 1}", "not valid JSON"),
        ('f[ARGS]{"a": 1,}', "not valid JSON"),
        ('f[ARGS]{"a": 1', "not valid JSON"),
        ('f[ARGS]{"a": 1}}', "text after the JSON object"),
        ("f[ARGS][1]", "does not hold a JSON object"),
        ('f[ARGS]{"a": 1, "a": 2}', "given twice"),
        ('f[ARGS]{"a": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_P03_what_is_wrong_in_a_tagged_call_is_said(name: str, block: str, hint: str) -> None:
    message = said(make(name), f"[TOOL_CALLS]{block}[TOOL_CALLS]g[ARGS]{{}}")
    assert message.tool_calls == (ToolCall("g", "{}"),)
    (bad,) = message.malformed_calls
    assert bad.text == block
    with pytest.raises(ValueError, match=hint):
        raise ValueError(bad.error)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_spaces_of_arguments_stay_as_they_were_written(name: str) -> None:
    r = make(name)
    arguments = '{ "a" : 1.10, "b":1e400, "c": ' + "9" * 4000 + "}"
    written = f'[{{"name": "f", "arguments": {arguments}}}]' if name == "mistral_v3" else f"f[ARGS]{arguments}"
    (call,) = said(r, "[TOOL_CALLS]" + written).tool_calls
    assert call.arguments == arguments


def test_malformed_calls_in_the_opening_are_written_back() -> None:
    unread = tuple(MalformedToolCall("[{oops", "why", place=place) for place in (0, 2))
    bad = Message("assistant", "x", tool_calls=TWO, malformed_calls=unread)
    written = text(make("mistral_v3"), [USER, bad, USER])
    assert 'x[TOOL_CALLS][{oops[TOOL_CALLS][{"name"' in written
    assert "}][TOOL_CALLS][{oops</s>" in written
    assert written.count("[TOOL_CALLS]") == 3, "calls in a row share an array"


@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("mistral_v3", '[{"name": "f", "id": "abcdef123"}]', "abcdef123"),
        ("mistral_v3", '[{"name": "f", "arguments": {"id": "x"}}, {"name": "f", "id": 3}]', None),
        ("mistral_v3", '[{"name": "f", "id": "abcdef123"', None),
        ("mistral_v11", "f[CALL_ID]abcdef123[ARGS]{", "abcdef123"),
        ("mistral_v11", "f[CALL_ID]abcdef123", "abcdef123"),
        ("mistral_v11", "f[ARGS]{", None),
    ],
)
def test_T15_a_malformed_call_keeps_the_id_it_was_given(name: str, written: str, expected: str | None) -> None:
    (bad,) = said(make(name), "[TOOL_CALLS]" + written).malformed_calls
    assert bad.id == expected


TEXT = st.text(st.sampled_from('ab {}"\\\n[]é🙂') | st.characters(codec="utf-8"), max_size=20)
NAME = st.text(st.characters(codec="utf-8", categories=("L", "N")), min_size=1, max_size=8)
ID = st.text(st.sampled_from("abcXYZ019"), min_size=9, max_size=9)
ARGUMENTS = st.dictionaries(TEXT, TEXT | st.sampled_from(["</s>", "[ARGS]", "[TOOL_CALLS]"]), max_size=3).map(
    json.dumps
)
CALLS = st.lists(st.builds(ToolCall, NAME, ARGUMENTS, ID), max_size=3).map(tuple)


@pytest.mark.parametrize("name", NAMES)
@given(TEXT, CALLS, st.none() | TEXT)
def test_parse_inverts_turn(name: str, content: str, calls: tuple[ToolCall, ...], thinking: str | None) -> None:
    r = make(name)
    if not without_prompt(name).has_call_ids:
        calls = tuple(replace(call, id=None) for call in calls)
    message = Message("assistant", content, thinking if r.family.thoughts else None, calls)
    parsed = r.parse(r.turn(message))
    assert (parsed.message, parsed.outcome) == (message, Outcome.STOPPED)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "unit", ['{"name": "f", "arguments": {}}, ', "[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]f[ARGS]{}", "[{"]
)
def test_reading_is_linear(name: str, unit: str) -> None:
    r = make(name)

    def turn(length: int) -> tuple[int, ...]:
        return (*ids(r, "[TOOL_CALLS]["), *ids(r, unit) * (length // len(unit)), *END)

    assert_linear(r.parse, turn, 50_000)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mistral_v3", "mistral_v11", "devstral"])
def test_templates_that_write_what_the_encoder_does_are_recognised(name: str, real_cache) -> None:
    row = BY_NAME[name]
    tokenizer = replace(BYTES, chat_template=row.source(real_cache), template_variables=row.variables)
    assert renderer_for(tokenizer).name == name


# --- the makers' own encoder ----------------------------------------------------------------------

THREE_USERS = (USER, Message("user", ""), USER, Message("assistant", "a"), USER)


class Tekken:
    """mistral-common's vocabulary as a jaxrl tokenizer."""

    def __init__(self, tekkenizer: Any) -> None:
        self.tekkenizer = tekkenizer
        self.name = "tekken"
        self.vocab_size = tekkenizer.n_words
        self.chat_template = None
        self.template_variables: dict[str, str] = {}
        self.specials = [token["token_str"] for token in tekkenizer._all_special_tokens]

    def encode(self, text: str) -> list[int]:
        return self.tekkenizer.encode(text, bos=False, eos=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tekkenizer.decode(list(ids))

    def special(self, spelling: str) -> int:
        if spelling not in self.specials:
            raise ValueError(f"no special token {spelling!r}")
        return self.specials.index(spelling)


def encoder(version: str) -> Any:
    """mistral-common for a version. The vocabulary it ships is that of v3; the others' differ in special tokens only,
    so those it lacks are added."""
    common = pytest.importorskip("mistral_common")
    base = pytest.importorskip("mistral_common.tokens.tokenizers.base")
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    instruct = pytest.importorskip("mistral_common.tokens.tokenizers.instruct")
    chat = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    normalize = pytest.importorskip("mistral_common.protocol.instruct.normalize")
    validator = pytest.importorskip("mistral_common.protocol.instruct.validator")
    data = json.loads((Path(common.__file__).parent / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    known = [token["token_str"].value for token in tekken.Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    spellings = [*dict.fromkeys([*known, *MARKERS])]
    specials = [{"rank": i, "token_str": spelling, "is_control": True} for i, spelling in enumerate(spellings)]
    number = base.TokenizerVersion(version)
    vocabulary = tekken.Tekkenizer(
        data["vocab"], specials, data["config"]["pattern"], data["config"]["default_vocab_size"], 1000, number
    )
    return chat.MistralTokenizer(
        getattr(instruct, f"InstructTokenizer{version.upper()}")(vocabulary),
        validator.get_validator(number, validator.ValidationMode.test),
        normalize.get_normalizer(number),
    )


def request(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Any:
    """The conversation as the makers' encoder takes it."""
    requests = pytest.importorskip("mistral_common.protocol.instruct.request")
    shown = [_shown(message) for message in messages]
    return requests.ChatCompletionRequest.from_openai(shown, [tool_schema(t) for t in tools] or None)


def _shown(message: Message) -> dict[str, Any]:
    content: Any = message.content
    if message.thinking is not None:
        chunk = {"type": "thinking", "thinking": message.thinking, "closed": True}
        content = [chunk, *([{"type": "text", "text": content}] if content else [])]
    shown: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.role == "tool":
        shown["tool_call_id"] = message.call_id
    return shown


REFUSED = {"assistant_empty", "thought_loop_text", "late_system"}  # the second answers one call twice
REFUSED_BY_V3 = {"text_and_call", "text_two_calls", "thought_newlines", "thought_empty"}  # text beside calls


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "version"),
    [("mistral_v3", "v3"), ("mistral_v11", "v11"), ("devstral", "v13"), ("ministral3_reasoning", "v13")],
)
def test_the_makers_encoder_gives_the_same_ids(name: str, version: str, real_tokenizer) -> None:
    exceptions = pytest.importorskip("mistral_common.exceptions")
    family = without_prompt(name)
    makers = encoder(version)
    theirs = Tekken(makers.instruct_tokenizer.tokenizer)
    ours = build(family, real_tokenizer("mistral_nemo") if name == "mistral_v3" else theirs)
    refused = set()
    for each, (raw, tools) in {**CONVERSATIONS, "three_users": (THREE_USERS, (LOOK,))}.items():
        messages = [m if family.thoughts else replace(m, thinking=None) for m in with_call_ids(mistral_call_id)(raw)]
        try:
            wanted = makers.encode_chat_completion(request(messages, tools)).tokens
        except (exceptions.MistralCommonException, ValueError):
            refused.add(each)
            continue
        assert list(ours.open(messages, tools)) == wanted, each
    assert refused == REFUSED | (REFUSED_BY_V3 if version == "v3" else set())


@pytest.mark.parametrize("thinking", ["strip", "compact"])
def test_I1_a_system_prompt_that_speaks_of_thoughts_keeps_them(thinking: str) -> None:
    turns = 1 if thinking == "compact" else None
    tokenizer = make("ministral3_reasoning").tokenizer
    r = renderer_for(tokenizer, "ministral3_reasoning", thinking=thinking, compact_turns=turns)
    opened = begin(r, [Message("user", "hi")])
    grown, reason = observe(act(opened, r.turn(Message("assistant", "yes", thinking="hm"))), [Message("user", "go on")])
    assert reason is not None
    assert grown.tokens[: len(opened.tokens)] == opened.tokens
    assert "hm" not in tokenizer.decode(grown.tokens[len(opened.tokens) :])
