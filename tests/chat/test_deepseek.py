"""DeepSeek's families, beyond what the templates show and what holds for every family."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from official import BY_NAME, DEEPSEEK_BOS
from sampled import sampled
from transformers import PreTrainedTokenizerFast

from jaxrl.chat.deepseek import BEGIN, DEEPSEEK_R1, DEEPSEEK_V3, DEEPSEEK_V3_1, DeepSeek
from jaxrl.chat.families import find_family, renderer_for
from jaxrl.chat.renderer import Outcome, Renderer, build
from jaxrl.chat.tokenizer import HFTokenizer, byte_tokenizer, wrap
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

END = "<｜end▁of▁sentence｜>"
OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCED = f'{CALL}function{SEP}look\n```json\n{{"key": "a"}}\n```{CALL_END}'
BARE = f'{CALL}look{SEP}{{"key": "a"}}{CALL_END}'
LOOK = ToolCall("look", '{"key": "a"}')
TOOL = ToolSpec("look", "Look it up: “now”.", {"type": "object", "properties": {"key": {"type": "string"}}})
DISTILLED = (BEGIN.spelling, END, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")


def make(family: DeepSeek, specials: tuple[str, ...] = (), **choices) -> Renderer:
    """The family on bytes; `specials` when not all of its markers are ids."""
    return build(family, byte_tokenizer(specials or tuple(family.markers)), **choices)


v3, r1, v3_1 = make(DEEPSEEK_V3), make(DEEPSEEK_R1), make(DEEPSEEK_V3_1)
quick = make(DEEPSEEK_V3_1, enable_thinking=False)
distill = make(DEEPSEEK_R1, DISTILLED)


def ids(r: Renderer, text: str) -> tuple[int, ...]:
    """Sampled ids for text in which the spellings of markers that are ids mean the ids."""
    return sampled(r.tokenizer, text, r.marker_ids)


def text(r: Renderer, tokens) -> str:
    return r.tokenizer.decode(tokens)


# --- what the makers' cards say -------------------------------------------------------------------

TALK = [
    Message("system", "You are a helpful assistant"),
    Message("user", "Who are you?"),
    Message("assistant", "I am DeepSeek", thinking="Hmm"),
    Message("user", "1+1=?"),
]
CARD = (
    "<｜begin▁of▁sentence｜>You are a helpful assistant<｜User｜>Who are you?<｜Assistant｜></think>I am DeepSeek"
    "<｜end▁of▁sentence｜><｜User｜>1+1=?<｜Assistant｜>"
)


def test_v3_1_writes_the_prompts_of_its_card() -> None:
    assert text(v3_1, make(DEEPSEEK_V3_1, thinking="strip").open(TALK)) == CARD + "<think>"
    stripped = make(DEEPSEEK_V3_1, thinking="strip", enable_thinking=False)
    assert text(stripped, stripped.open(TALK)) == CARD + "</think>"
    assert text(v3_1, v3_1.open(TALK)) == CARD.replace("</think>", "<think>Hmm</think>") + "<think>"


def test_v3_1_describes_tools_as_its_card_does() -> None:
    opened = text(
        quick, quick.open([Message("system", "Be brief."), Message("user", "hi")], [TOOL, replace(TOOL, name="see")])
    )
    described, _, instruction = opened.partition("IMPORTANT: ")
    assert described == (
        "<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\nYou have access to the following tools:\n\n"
        "### look\nDescription: Look it up: “now”.\n\n"
        'Parameters: {"type": "object", "properties": {"key": {"type": "string"}}}\n\n'
        "### see\nDescription: Look it up: “now”.\n\n"
        'Parameters: {"type": "object", "properties": {"key": {"type": "string"}}}\n\n'
    )
    assert instruction.startswith(
        "ALWAYS adhere to this exact format for tool use:\n" + OPEN + CALL + "tool_call_name" + SEP
    )
    assert instruction.endswith("chain them directly without separators or spaces<｜User｜>hi<｜Assistant｜></think>")
    assert opened.count("## Tools") == 1
    assert text(quick, quick.open([Message("user", "hi")], [TOOL])).startswith("<｜begin▁of▁sentence｜>## Tools\n")


@pytest.mark.parametrize("r", [v3, r1, quick], ids=lambda r: r.name)
def test_the_way_to_call_a_tool_is_shown_with_the_markers_themselves(r: Renderer) -> None:
    opened = r.open([Message("user", "hi")], [TOOL])
    assert [opened.count(r.marker_ids[marker]) for marker in (OPEN, CALL, SEP, CALL_END, CLOSE)] == [1] * 5


def test_v3_reads_the_calls_and_writes_the_results_of_the_v2_5_card() -> None:
    other = FENCED.replace('"a"', '"b"')
    said = f"{OPEN}{FENCED}\n{other}{CLOSE}{END}"
    parsed = v3.parse(ids(v3, said))
    assert parsed.outcome is Outcome.STOPPED
    assert parsed.message == Message("assistant", "", tool_calls=(LOOK, ToolCall("look", '{"key": "b"}')))
    assert text(v3, v3.turn(parsed.message)) == said
    assert text(v3, v3.extend([Message("tool", "1"), Message("tool", "2")], after=ids(v3, said))) == (
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>1<｜tool▁output▁end｜>\n"
        "<｜tool▁output▁begin｜>2<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )


# --- thoughts that the prompt opens ---------------------------------------------------------------


def test_a_turn_begins_inside_the_thought_of_its_prompt() -> None:
    assert r1.parse(ids(r1, f"hm\n</think>\n\nYes.{END}")).message == Message("assistant", "Yes.", thinking="hm")
    assert v3_1.parse(ids(v3_1, f"\nhm\n</think>\nYes.{END}")).message == Message(
        "assistant", "\nYes.", thinking="\nhm\n"
    )
    assert quick.parse(ids(quick, f"Yes.{END}")).message == Message("assistant", "Yes.")
    for r in (r1, v3_1):
        never_closed = r.parse(ids(r, f"hm{END}"))
        assert (never_closed.outcome, never_closed.message.content) == (Outcome.MALFORMED, "hm")
        assert r.parse(ids(r, "hm")).message == Message("assistant", "", thinking="hm")


def test_a_demonstration_without_thoughts_closes_the_one_its_prompt_opened() -> None:
    assert text(r1, r1.turn(Message("assistant", "Yes."))) == f"\n</think>\n\nYes.{END}"
    assert text(v3_1, v3_1.turn(Message("assistant", "Yes."))) == f"</think>Yes.{END}"
    assert text(quick, quick.turn(Message("assistant", "Yes."))) == f"Yes.{END}"
    assert text(v3, v3.turn(Message("assistant", "Yes."))) == f"Yes.{END}"


def test_results_are_followed_by_a_thought_where_the_model_thinks_and_by_nothing_else() -> None:
    result = [Message("tool", "1")]
    output = "<｜tool▁output▁begin｜>1<｜tool▁output▁end｜>"
    batch = f"<｜tool▁outputs▁begin｜>{output}<｜tool▁outputs▁end｜>"
    expected = [(v3, batch, ""), (r1, batch, "<think>\n"), (v3_1, output, "<think>"), (quick, output, "")]
    for r, written, thought in expected:
        assert text(r, r.extend(result, after=ids(r, END))) == written + thought
        later = text(r, r.extend([*result, Message("user", "go on")], after=ids(r, END)))
        assert later.startswith(f"{written}<｜User｜>go on<｜Assistant｜>{thought}")


@pytest.mark.parametrize(
    ("r", "left", "lead"),
    [(make(DEEPSEEK_R1, thinking="strip"), "", ""), (make(DEEPSEEK_V3_1, thinking="strip"), "</think>", "\n")],
    ids=["deepseek_r1", "deepseek_v3.1"],
)
def test_T03_stripped_thoughts_leave_what_the_template_writes(r: Renderer, left: str, lead: str) -> None:
    history = [Message("user", "0")]
    transcript = begin(r, history)
    for i in (1, 2, 3):
        said = Message("assistant", f"{lead}{i}", thinking=f"thought {i}", tool_calls=(LOOK,) if i == 2 else ())
        answer = Message("tool" if i == 2 else "user", f"u{i}")
        transcript, _ = observe(act(transcript, r.turn(said)), [answer])
        history += [said, answer]
        assert f"thought {i}" not in text(r, transcript.tokens), "it goes as soon as anything follows"
    written = text(r, transcript.tokens)
    assert written.startswith(
        f"{BEGIN.spelling}<｜User｜>0<｜Assistant｜>{left}{lead}1{END}<｜User｜>u1<｜Assistant｜>{left}{lead}2{OPEN}"
    )
    assert (
        f"<｜tool▁output▁end｜>{'<｜tool▁outputs▁end｜>' if not left else ''}{left}{lead}3{END}<｜User｜>u3" in written
    )
    assert r.open(history) == transcript.tokens


def test_a_later_system_message_is_written_where_it_comes() -> None:
    written = text(v3, v3.extend([Message("system", "Be formal."), Message("user", "Bye")], after=ids(v3, END)))
    assert written == "Be formal.<｜User｜>Bye<｜Assistant｜>"
    with pytest.raises(ValueError, match="role 'robot': expected 'system', 'user'"):
        v3.open([Message("robot", "hi")])  # type: ignore[arg-type]


# --- reading calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [v3, quick, distill], ids=["ids", "v3.1", "text"])
def test_text_around_calls_is_kept(r: Renderer) -> None:
    call, thought = (BARE if r is quick else FENCED), ("hm\n</think>\n\n" if r is distill else "")
    parsed = r.parse(ids(r, f"{thought}Both:\n{OPEN}{call}{call}{CLOSE}\nDone.{END}"))
    assert parsed.outcome is Outcome.STOPPED
    assert parsed.message.content == "Both:\n\nDone."
    assert parsed.message.tool_calls == (LOOK, LOOK)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (f"function{SEP}look\n{{}}", "not fenced.*Write the name, and on the next lines ```json"),
        (f"function{SEP}look", "not fenced"),
        (f"function{SEP}look\n```json\n```", "the block is empty"),
        (f"function{SEP}look\n```json", "not fenced"),
        (f"function{SEP}look\n```json\n{{'key': 1}}\n```", "not valid JSON"),
        (f'function{SEP}look\n```json\n{{"key": 1,}}\n```', "not valid JSON"),
        (f'function{SEP}look\n```json\n{{"key": 1, "key": 2}}\n```', "given twice"),
        (f"function{SEP}look\n```json\n[1]\n```", "does not hold a JSON object"),
        (f"function{SEP}\n```json\n{{}}\n```", "the tool's name is missing"),
        ("look", "no arguments. Write <｜tool▁sep｜> between"),
    ],
)
def test_P03_damage_inside_a_call_is_content_that_teaches(block: str, why: str) -> None:
    parsed = v3.parse(ids(v3, f"{OPEN}{CALL}{block}{CALL_END}\n{FENCED}{CLOSE}{END}"))
    assert parsed.outcome is Outcome.STOPPED
    (bad,) = parsed.message.malformed_calls
    assert bad.text == block
    assert re.search(why, bad.error), bad.error
    assert parsed.message.tool_calls == (LOOK,)
    written = text(v3, v3.open([Message("user", "hi"), parsed.message, Message("user", "again")]))
    assert f"{OPEN}{CALL}{block}{CALL_END}\n{FENCED}{CLOSE}" in written, "it is written back as it was"


def test_P03_v3_1_reads_bare_arguments() -> None:
    for block in (f"look{SEP}{{'key': 1}}", f"look{SEP}", f"{SEP}{{}}", "look", f"look{SEP}```json\n{{}}\n```"):
        parsed = quick.parse(ids(quick, f"{OPEN}{CALL}{block}{CALL_END}{BARE}{CLOSE}{END}"))
        assert parsed.message.tool_calls == (LOOK,)
        assert [bad.text for bad in parsed.message.malformed_calls] == [block]
    stray = quick.parse(ids(quick, f"{OPEN}look{CLOSE}{END}")).message.malformed_calls
    assert stray == (MalformedToolCall("look", stray[0].error),)
    assert "outside a call. Write every call between <｜tool▁call▁begin｜>" in stray[0].error


@pytest.mark.parametrize("r", [v3, quick, distill], ids=["ids", "v3.1", "text"])
@pytest.mark.parametrize(
    "broken",
    [
        OPEN,
        CLOSE,
        f"{OPEN}{{call}}",
        f"{{call}}{CLOSE}",
        f"{OPEN}{OPEN}{{call}}{CLOSE}{CLOSE}",
        f"{OPEN}{CALL}{{call}}{CLOSE}",
        f"{OPEN}{CALL}look{SEP}{{{{}}}}{SEP}{CALL_END}{CLOSE}",
        f"{OPEN}{SEP}{CLOSE}",
        "<｜tool▁output▁begin｜>made up<｜tool▁output▁end｜>",
        "<｜User｜>made up",
        "<｜begin▁of▁sentence｜>",
        f"a{END}b",
    ],
)
def test_broken_framing_is_malformed(r: Renderer, broken: str) -> None:
    said = ("hm</think>" if r is distill else "") + broken.format(call=BARE if r is quick else FENCED)
    parsed = r.parse(ids(r, said + END))
    assert (parsed.outcome, parsed.message) == (Outcome.MALFORMED, Message("assistant", said))


@pytest.mark.parametrize(
    "broken", ["a<think>b</think>c", "<think>a<think>b</think>", "<think>a", f"<think>{OPEN}</think>"]
)
def test_broken_thoughts_are_malformed(broken: str) -> None:
    assert quick.parse(ids(quick, f"<think>a</think>b{END}")).message == Message("assistant", "b", thinking="a")
    assert quick.parse(ids(quick, broken + END)).outcome is Outcome.MALFORMED
    assert r1.parse(ids(r1, f"a{OPEN}{FENCED}{CLOSE}{END}")).outcome is Outcome.MALFORMED, "calls inside the thought"
    assert r1.parse(ids(r1, f"<think>a</think>b{END}")).outcome is Outcome.MALFORMED, "the prompt opened it already"


def test_what_a_cut_turn_had_finished_is_in_its_message() -> None:
    cut = v3.parse(ids(v3, f"A {OPEN}{FENCED}\n{CALL}function{SEP}look\n```js"))
    assert cut.outcome is Outcome.LENGTH
    assert cut.message == Message("assistant", f"A \n{CALL}function{SEP}look\n```js", tool_calls=(LOOK,))
    assert v3.parse(ids(v3, f"{OPEN}{CALL}fun")).message.content == f"{CALL}fun"
    assert v3.parse(ids(v3, OPEN)).message == Message("assistant", "")


TEXT = st.text(st.sampled_from('ab {}"\\\n\t`<>é🙂') | st.characters(codec="utf-8"), max_size=20)
SPELLED = st.sampled_from([OPEN, CLOSE, CALL, SEP, CALL_END, f"{CALL_END}{CLOSE}", "</think>", "```", "\n```\n"])
CALLS = st.lists(
    st.builds(
        ToolCall,
        name=st.text(st.sampled_from("abc_-."), min_size=1, max_size=8),
        arguments=st.dictionaries(TEXT, TEXT | SPELLED | st.lists(st.integers() | SPELLED, max_size=2), max_size=3).map(
            lambda given: json.dumps(given, ensure_ascii=False)
        ),
    ),
    max_size=3,
).map(tuple)


@pytest.mark.parametrize("r", [v3, r1, v3_1, quick, distill], ids=["v3", "r1", "v3.1", "v3.1 quick", "distill"])
@given(TEXT, CALLS, TEXT)
def test_parse_inverts_turn(r: Renderer, content: str, calls: tuple[ToolCall, ...], thinking: str) -> None:
    if r.family is DEEPSEEK_R1:
        content, thinking = content.lstrip("\n"), thinking.strip("\n")
    thinks = r.family.thoughts is not None and r.enable_thinking
    message = Message("assistant", content, thinking=thinking if thinks else None, tool_calls=calls)
    parsed = r.parse(r.turn(message))
    assert (parsed.message, parsed.outcome) == (message, Outcome.STOPPED)


@pytest.mark.parametrize("r", [v3, distill], ids=["ids", "text"])
@given(
    st.lists(st.sampled_from([OPEN, CLOSE, CALL, SEP, CALL_END, FENCED, END, "look\n```json\n", "{}", "\n```", '"']))
)
def test_any_arrangement_of_markers_is_parsed_without_an_exception(r: Renderer, parts: list[str]) -> None:
    r.parse(ids(r, "".join(parts)))


@pytest.mark.parametrize("r", [v3, distill], ids=["ids", "text"])
@pytest.mark.parametrize(
    "unit", [SEP, OPEN + CALL, f"{SEP}f\n```json\n[", f'{SEP}f\n```json\n["', f"{CALL}{CALL_END}", "<"]
)
def test_large_broken_turns_are_read_in_linear_time(r: Renderer, unit: str) -> None:
    r.parse(ids(r, unit) * (200_000 // len(unit)))  # quadratic work would take minutes


@pytest.mark.parametrize("r", [v3, quick, distill], ids=["ids", "v3.1", "text"])
def test_a_megabyte_of_arguments(r: Renderer) -> None:
    call = ToolCall("f", json.dumps({"text": f"x{SEP}{CALL_END}\\" * 30_000, "n": 10**400}, ensure_ascii=False))
    message = Message("assistant", "", thinking="" if r is distill else None, tool_calls=(call,))
    assert r.parse(r.turn(message)).message == message


def test_a_cut_turn_is_closed_before_the_next() -> None:
    assert text(v3, v3.extend([Message("user", "more")], after=ids(v3, f"A{OPEN}"))) == (
        f"{END}<｜User｜>more<｜Assistant｜>"
    )


# --- vocabularies ---------------------------------------------------------------------------------


def test_the_distills_need_no_tool_tokens_but_their_thoughts() -> None:
    with pytest.raises(ValueError, match="no special token '<think>'"):
        make(DEEPSEEK_R1, DISTILLED[:4])
    with pytest.raises(ValueError, match="no special token '<｜tool▁calls▁begin｜>'"):
        make(DEEPSEEK_V3, DISTILLED[:4])
    assert distill.stop == (257,)


@pytest.mark.full
def test_real_vocabularies_and_templates_are_recognised(real_tokenizer, real_cache: Path) -> None:
    real = real_tokenizer("deepseek_v3")
    assert renderer_for(real).name == "deepseek_v3"
    for name in ("deepseek_v3_mended", "deepseek_r1", "deepseek_v3.1_think"):
        row = BY_NAME[name]
        markers = tuple(find_family(row.renderer).markers)
        bytes_only = byte_tokenizer(markers, chat_template=row.source(real_cache))
        assert renderer_for(replace(bytes_only, template_variables=DEEPSEEK_BOS)).name == row.renderer


@pytest.fixture(scope="module")
def r1_vocabulary(real_cache: Path) -> HFTokenizer:
    """That of R1 and V3.1: V3's, with two of its placeholders named <think> and </think>."""
    if not (path := real_cache / "deepseek_v3" / "tokenizer.json").exists():
        pytest.skip(f"no {path}: run `python tests/fetch_real.py`")
    source = json.loads(path.read_text(encoding="utf-8"))
    for token in source["added_tokens"]:
        if spelling := {128798: "<think>", 128799: "</think>"}.get(token["id"]):
            token |= {"content": spelling, "special": False}
    backend = tokenizers.Tokenizer.from_str(json.dumps(source))
    return wrap(PreTrainedTokenizerFast(tokenizer_object=backend), name="deepseek_r1")


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek_r1", "deepseek_v3.1", "deepseek_v3.1_think"])
def test_the_vocabulary_of_r1_and_v3_1_gives_the_published_tokens(name: str, r1_vocabulary: HFTokenizer) -> None:
    row = BY_NAME[name]
    r = row.build(r1_vocabulary)
    assert r.marker_ids["<think>"] == 128798
    for conversation in row.conversations():
        if conversation not in row.differs:
            published = r1_vocabulary.full.encode(row.texts()[conversation], add_special_tokens=False).ids
            assert list(r.open(*row.case(conversation))) == published, conversation
