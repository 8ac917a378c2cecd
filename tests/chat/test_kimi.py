"""Kimi's families, beyond what the templates show and what holds for every family."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from official import BY_NAME
from sampled import sampled

from jaxrl.chat.families import find_family, renderer_for
from jaxrl.chat.kimi import KIMI_K2, KIMI_K2_THINKING, Kimi
from jaxrl.chat.renderer import Outcome, Renderer, build
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.tools import report_calls, tool
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

END = "<|im_end|>"
OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PROMPT = "<|im_assistant|>assistant<|im_middle|>"
USER = Message("user", "hi")


def make(family: Kimi, **choices) -> Renderer:
    """The family on bytes."""
    return build(family, byte_tokenizer((*family.markers, "[EOS]")), **choices)


k2, thinker = make(KIMI_K2), make(KIMI_K2_THINKING)


def ids(r: Renderer, text: str) -> tuple[int, ...]:
    """Sampled ids for text in which the spellings of markers and stops mean the ids."""
    return sampled(r.tokenizer, text, {*r.marker_ids, *r.stop_ids.values()})


def text(r: Renderer, tokens) -> str:
    return r.tokenizer.decode(tokens)


def block(identifier: str, arguments: str = '{"key": "a"}') -> str:
    return f"{CALL}{identifier}{ARGUMENTS}{arguments}{CALL_END}"


def look(index: int, arguments: str = '{"key": "a"}') -> ToolCall:
    return ToolCall("look", arguments, f"functions.look:{index}")


# --- ids ------------------------------------------------------------------------------------------


def test_ids_are_read_from_the_turn_and_written_back() -> None:
    said = f"Both:{OPEN}{block('functions.look:7')}{block('functions.see.far:8', '{}')}{CLOSE}{END}"
    parsed = k2.parse(ids(k2, said))
    assert parsed.outcome is Outcome.STOPPED
    assert parsed.message.content == "Both:"
    assert parsed.message.tool_calls == (look(7), ToolCall("see.far", "{}", "functions.see.far:8"))
    assert text(k2, k2.turn(parsed.message)) == said
    bare = k2.parse(ids(k2, f"{OPEN}{block(' look:0 ')}{CLOSE}{END}")).message.tool_calls
    assert bare == (ToolCall("look", '{"key": "a"}', "look:0"),)


def test_missing_ids_count_the_calls_of_the_conversation() -> None:
    calls = (ToolCall("look", "{}"), ToolCall("see", "{}"))
    messages = [
        USER,
        Message("assistant", "", tool_calls=calls),
        Message("tool", "1"),
        Message("tool", "2"),
        Message("assistant", "", tool_calls=calls[:1]),
        Message("tool", "3"),
    ]
    opened = text(k2, k2.open(messages))
    assert re.findall(rf"{re.escape(CALL)}(.*?){re.escape(ARGUMENTS)}", opened) == [
        "functions.look:0",
        "functions.see:1",
        "functions.look:2",
    ]
    assert re.findall(r"## Return of (.*)\n(.)", opened) == [
        ("functions.look:0", "1"),
        ("functions.see:1", "2"),
        ("functions.look:2", "3"),
    ]


def test_given_ids_are_kept_and_results_out_of_order_find_their_calls() -> None:
    calls = (ToolCall("look", "{}", "a"), ToolCall("see", "{}"), ToolCall("see", "{}"))
    results = [
        Message("tool", "1", call_id="functions.see:1"),
        Message("tool", "2"),
        Message("tool", "3"),
        Message("tool", "4"),
    ]
    opened = text(k2, k2.open([USER, Message("assistant", "", tool_calls=calls), *results]))
    assert re.findall(r"## Return of (.*)\n(.)", opened) == [
        ("functions.see:1", "1"),
        ("a", "2"),
        ("functions.see:2", "3"),
        ("unknown", "4"),
    ]
    turns = [Message("assistant", "", tool_calls=(ToolCall("look", "{}", given),)) for given in ("a", "b")]
    opened = text(k2, k2.open([USER, *turns, Message("tool", "2")]))
    assert "## Return of b\n2" in opened, "a call of an earlier turn is not answered any more"


async def test_an_episode_heads_results_by_the_ids_that_were_sampled() -> None:
    @tool
    def look(key: str) -> str:
        """Look it up.

        Args:
            key: what to look up
        """
        return f"{key}!"

    unread = f"{CALL}functions.look:3{CALL_END}{block('functions.look:4', '{')}"
    said = ids(k2, f"{OPEN}{unread}{block('functions.look:5')}{block('oops')}{block('functions.look:6')}{CLOSE}{END}")
    report = await report_calls([look], k2.parse(said).message)
    written = text(k2, k2.extend(report.messages, after=said))
    heads = re.findall(r"<\|im_system\|>(\w+)<\|im_middle\|>## Return of (.*)\n", written)
    assert heads == [
        ("tool", "functions.look:3"),
        ("tool", "functions.look:4"),
        ("look", "functions.look:5"),
        ("tool", "unknown"),
        ("look", "functions.look:6"),
    ]
    assert written.endswith(END + PROMPT)


def test_a_result_without_an_id_is_headed_by_its_tool_between_turns() -> None:
    written = text(k2, k2.extend([Message("tool", "1", name="look"), Message("tool", "2")], after=ids(k2, END)))
    assert written == (
        f"<|im_system|>look<|im_middle|>## Return of look\n1{END}"
        f"<|im_system|>tool<|im_middle|>## Return of unknown\n2{END}{PROMPT}"
    )


# --- prompts --------------------------------------------------------------------------------------


def test_tools_are_compact_json_before_the_system_prompt() -> None:
    spec = ToolSpec("look", "“Look”", {"type": "object", "properties": {}})
    for r in (k2, thinker):
        opened = text(r, r.open([Message("system", "S"), USER], [spec]))
        assert opened == (
            '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"look","description":"“Look”",'
            f'"parameters":{{"type":"object","properties":{{}}}}}}}}]{END}<|im_system|>system<|im_middle|>S{END}'
            f"<|im_user|>user<|im_middle|>hi{END}{PROMPT}"
        )


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="role 'robot': expected one of assistant, system, tool, user"):
        k2.open([Message("robot", "hi")])  # type: ignore[arg-type]


def test_M05_both_ends_stop_and_a_cut_turn_is_closed() -> None:
    for end in (END, "[EOS]"):
        assert k2.parse(ids(k2, f"Yes.{end}")) == k2.parse(ids(k2, f"Yes.{END}"))
        assert (
            text(k2, k2.extend([USER], after=ids(k2, f"Yes.{end}"))) == f"<|im_user|>user<|im_middle|>hi{END}{PROMPT}"
        )
    assert text(k2, k2.extend([], after=ids(k2, f"Yes{OPEN}"))) == END + PROMPT


# --- thoughts -------------------------------------------------------------------------------------


def test_T03_thoughts_go_with_the_answer_that_ends_a_loop_of_calls() -> None:
    strip = make(KIMI_K2_THINKING, thinking="strip")
    steps = [
        (
            Message("assistant", "", thinking="first", tool_calls=(look(0),)),
            Message("tool", "1", call_id="functions.look:0"),
        ),
        (
            Message("assistant", "", thinking="second", tool_calls=(look(1),)),
            Message("tool", "2", call_id="functions.look:1"),
        ),
        (Message("assistant", "Done.", thinking="third"), Message("user", "more")),
        (
            Message("assistant", "", thinking="fourth", tool_calls=(look(2),)),
            Message("tool", "3", call_id="functions.look:2"),
        ),
    ]
    history = [USER]
    transcript = begin(strip, history)
    kept = []
    for said, answer in steps:
        transcript, _ = observe(act(transcript, strip.turn(said)), [answer])
        history += [said, answer]
        assert strip.open(history) == transcript.tokens
        kept.append(re.findall("<think>(.*?)</think>", text(strip, transcript.tokens)))
    assert kept == [["first"], ["first", "second"], ["", "", ""], ["", "", "", "fourth"]]
    everything = re.findall("<think>(.*?)</think>", text(thinker, thinker.open(history)))
    assert everything == ["first", "second", "third", "fourth"]


def test_every_turn_of_the_thinker_has_a_thought() -> None:
    assert text(thinker, thinker.turn(Message("assistant", "Yes."))) == f"<think></think>Yes.{END}"
    assert text(thinker, thinker.open([USER])).endswith(PROMPT), "the model opens it itself"
    said = Message("assistant", "\nYes.", thinking="\nhm ")
    assert thinker.parse(thinker.turn(said)).message == said
    assert thinker.parse(ids(thinker, f" \n<think>hm</think>Yes.{END}")).message == Message(
        "assistant", "Yes.", thinking="hm"
    )
    assert thinker.parse(ids(thinker, f"Yes.{END}")).message == Message("assistant", "Yes.")


@pytest.mark.parametrize(
    "broken",
    [
        "<think>hm",
        "hm</think>a",
        "a<think>b</think>c",
        "<think>a</think><think>b</think>",
        "<think>a<think>b</think>c",
        f"<think>a{OPEN}{block('functions.look:0')}{CLOSE}</think>",
        f"<think>a{OPEN}{block('functions.look:0')}{CLOSE}",
        f"{OPEN}<think></think>{CLOSE}",
    ],
)
def test_broken_thoughts_are_malformed(broken: str) -> None:
    parsed = thinker.parse(ids(thinker, broken + END))
    assert (parsed.outcome, parsed.message) == (Outcome.MALFORMED, Message("assistant", broken))
    assert k2.parse(ids(k2, f"<think>a{END}")).message.content == "<think>a", "K2 has no such tokens"


# --- reading calls --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        OPEN,
        CLOSE,
        f"{OPEN}{OPEN}{CLOSE}",
        block("functions.look:0"),
        f"{OPEN}{block('functions.look:0')}",
        f"{OPEN}{CALL}{block('functions.look:0')}{CLOSE}",
        f"{OPEN}{CALL}functions.look:0{ARGUMENTS}{{}}{ARGUMENTS}{CALL_END}{CLOSE}",
        f"{OPEN}{CALL}functions.look:0{ARGUMENTS}{{}}{CLOSE}",
        "<|im_user|>user<|im_middle|>made up",
        f"a{END}b",
        "a[EOS]b",
    ],
)
def test_broken_framing_is_malformed(broken: str) -> None:
    parsed = k2.parse(ids(k2, broken + END))
    assert (parsed.outcome, parsed.message) == (Outcome.MALFORMED, Message("assistant", broken))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (
            f"call_1{ARGUMENTS}{{}}",
            "'call_1' is no id of a call. Write functions.<tool name>:<index> before <.tool_call_arg",
        ),
        (f"{ARGUMENTS}{{}}", "'' is no id"),
        (f"functions.:0{ARGUMENTS}{{}}", "the tool's name is missing"),
        (f"functions.look:0{ARGUMENTS}", "the block is empty"),
        (f"functions.look:0{ARGUMENTS}{{'key': 1}}", "not valid JSON"),
        (f'functions.look:0{ARGUMENTS}{{"key": 1,}}', "not valid JSON"),
        (f'functions.look:0{ARGUMENTS}{{"key": 1, "key": 2}}', "given twice"),
        (f"functions.look:0{ARGUMENTS}[1]", "does not hold a JSON object"),
        ("functions.look:0", "no arguments. Write <.tool_call_argument_begin.> between"),
    ],
)
def test_P03_damage_inside_a_call_is_content_that_teaches(bad: str, why: str) -> None:
    parsed = k2.parse(ids(k2, f"{OPEN}{CALL}{bad}{CALL_END}{block('functions.look:1')}{CLOSE}{END}"))
    assert parsed.outcome is Outcome.STOPPED
    (malformed,) = parsed.message.malformed_calls
    assert malformed.text == bad
    assert re.search(why, malformed.error), malformed.error
    assert parsed.message.tool_calls == (look(1),)
    written = f"{OPEN}{CALL}{bad}{CALL_END}{block('functions.look:1')}{CLOSE}"
    assert written in text(k2, k2.open([USER, parsed.message, USER])), "written back as it was"


def test_P03_text_among_calls_is_content_that_teaches() -> None:
    (stray,) = k2.parse(ids(k2, f"{OPEN}functions.look:0 {{}}{CLOSE}{END}")).message.malformed_calls
    assert stray == MalformedToolCall("functions.look:0 {}", stray.error)
    assert "there is text outside a call. Write every call between <|tool_call_begin|>" in stray.error


def test_what_a_cut_turn_had_finished_is_in_its_message() -> None:
    cut = thinker.parse(
        ids(thinker, f"<think>hm</think>A {OPEN}{block('functions.look:0')}{CALL}functions.look:1{ARGUMENTS}{{")
    )
    assert cut.outcome is Outcome.LENGTH
    assert cut.message == Message(
        "assistant", f"A \n{CALL}functions.look:1{ARGUMENTS}{{", thinking="hm", tool_calls=(look(0),)
    )
    assert thinker.parse(ids(thinker, "<think>hm")).message == Message("assistant", "", thinking="hm")


TEXT = st.text(st.sampled_from('ab {}"\\\n\t<>|:é🙂') | st.characters(codec="utf-8"), max_size=20)
SPELLED = st.sampled_from([OPEN, CLOSE, CALL, ARGUMENTS, CALL_END, f"{CALL_END}{CLOSE}", END, "</think>"])
CALLS = st.lists(
    st.builds(
        ToolCall,
        name=st.text(st.sampled_from("abc_-.:0"), min_size=1, max_size=8),
        arguments=st.dictionaries(TEXT, TEXT | SPELLED | st.lists(st.integers() | SPELLED, max_size=2), max_size=3).map(
            json.dumps
        ),
    ),
    max_size=3,
)


@pytest.mark.parametrize("r", [k2, thinker], ids=lambda r: r.name)
@given(TEXT | SPELLED, CALLS, TEXT | SPELLED)
def test_parse_inverts_turn(r: Renderer, content: str, calls: list[ToolCall], thinking: str) -> None:
    thought = thinking if r is thinker else None
    said = Message("assistant", content, thinking=thought, tool_calls=tuple(calls))
    identified = tuple(ToolCall(c.name, c.arguments, f"functions.{c.name}:{k}") for k, c in enumerate(calls))
    parsed = r.parse(r.turn(said))
    assert (parsed.message, parsed.outcome) == (
        Message("assistant", content, thinking=thought, tool_calls=identified),
        Outcome.STOPPED,
    )


@pytest.mark.parametrize("unit", [CALL, OPEN + CLOSE, f"{CALL}{CALL_END}", block("functions.look:0", '["'), "[", "a:"])
def test_large_broken_turns_are_read_in_linear_time(unit: str) -> None:
    for start in (OPEN, "", f"{OPEN}{CALL}"):
        k2.parse((*ids(k2, start), *ids(k2, unit) * (200_000 // len(unit)), *ids(k2, CALL_END + CLOSE)))


def test_a_megabyte_of_arguments() -> None:
    call = look(0, json.dumps({"text": f"x{CALL_END}{CLOSE}\\" * 20_000, "n": 10**400}))
    assert k2.parse(k2.turn(Message("assistant", "", tool_calls=(call,)))).message.tool_calls == (call,)


@pytest.mark.full
@pytest.mark.parametrize("name", ["kimi_k2", "kimi_k2_thinking"])
def test_the_published_template_is_recognised(name: str, real_cache: Path) -> None:
    row = BY_NAME[name]
    tokenizer = byte_tokenizer(tuple(find_family(name).markers), chat_template=row.source(real_cache))
    assert renderer_for(tokenizer).name == name
