"""open, extend, parse and turn, beyond what template parity shows."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled import sampled

from jaxrl.chat.chatml import QWEN3
from jaxrl.chat.families import renderer_for
from jaxrl.chat.renderer import Outcome, Renderer, build
from jaxrl.chat.tokenizer import BYTE_SPECIALS, ByteTokenizer, HFTokenizer, byte_tokenizer
from jaxrl.types import MalformedToolCall, Message, ToolCall, ToolSpec

BYTES = byte_tokenizer()
FAMILIES = ("chatml", "qwen3", "qwen2.5", "smollm2")
END = "<|im_end|>"


class TextOnly(ByteTokenizer):
    """Bytes with the three frame tokens only, as in SmolLM2: tool markers are text."""

    def special(self, spelling: str) -> int:
        if spelling not in BYTE_SPECIALS[:3]:
            raise ValueError(f"no special token {spelling!r}")
        return super().special(spelling)


def make(name: str, **choices) -> Renderer:
    """The family on bytes; SmolLM2 with its real lack of tool tokens."""
    return renderer_for(TextOnly() if name == "smollm2" else BYTES, name, **choices)


def ids(renderer: Renderer, text: str) -> tuple[int, ...]:
    """Sampled ids for text in which spellings of special tokens mean the tokens."""
    return sampled(renderer.tokenizer, text, [s for s in BYTE_SPECIALS if _has(renderer, s)])


def _has(renderer: Renderer, spelling: str) -> bool:
    return spelling in renderer.marker_ids or spelling == "<|endoftext|>"


# --- parse(turn(m)) == m --------------------------------------------------------------------------

TEXT = st.text(alphabet=st.sampled_from('ab {}"\\\n\t<>é🙂') | st.characters(codec="utf-8"), max_size=20)
SPELLED = st.sampled_from(["<|im_end|>", "</tool_call>", "<tool_call>", "</think>", '{"name": "x"}'])
CALL = st.builds(
    ToolCall,
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
    arguments=st.dictionaries(TEXT, TEXT | SPELLED | st.lists(st.integers() | SPELLED, max_size=2), max_size=3).map(
        json.dumps
    ),
)
CALLS = st.lists(CALL, max_size=3).map(tuple)


@given(TEXT | SPELLED, CALLS, st.none() | TEXT | SPELLED)
def test_parse_inverts_turn_with_thoughts(content: str, calls: tuple[ToolCall, ...], thinking: str | None) -> None:
    if thinking is not None:
        thinking, content = thinking.strip("\n"), content.lstrip("\n")
    message = Message("assistant", content, thinking=thinking, tool_calls=calls)
    parsed = make("chatml").parse(make("chatml").turn(message))
    assert (parsed.message, parsed.outcome) == (message, Outcome.STOPPED)
    if thinking is not None:
        assert make("qwen3").parse(make("qwen3").turn(message)) == parsed


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "qwen3"])
@given(TEXT, CALLS)
def test_parse_inverts_turn_without_thoughts(name: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    message = Message("assistant", content, tool_calls=calls)
    renderer = make(name, **({"enable_thinking": False} if name == "qwen3" else {}))
    parsed = renderer.parse(renderer.turn(message))
    assert (parsed.message, parsed.outcome) == (message, Outcome.STOPPED)


def test_qwen3_gives_a_demonstration_without_thoughts_an_empty_block() -> None:
    renderer = make("qwen3")
    tokens = renderer.turn(Message("assistant", "Hi"))
    assert renderer.tokenizer.decode(tokens) == "<think>\n\n</think>\n\nHi<|im_end|>"
    assert renderer.parse(tokens).message == Message("assistant", "Hi", thinking="")


# --- parse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@given(st.lists(st.sampled_from([*range(256, 265), 10, 32, 60, 97, 123, 125, 34, 200])))
def test_any_ids_are_parsed_without_an_exception(name: str, tokens: list[int]) -> None:
    renderer = make(name)
    parsed = renderer.parse(tokens)
    stopped = bool(tokens) and tokens[-1] in renderer.stop
    assert (parsed.outcome is Outcome.LENGTH) == (not stopped)
    assert parsed.message.role == "assistant"


@pytest.mark.parametrize("name", FAMILIES)
@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', '"', "{", " a ", END]))
)
def test_any_arrangement_of_blocks_is_parsed_without_an_exception(name: str, parts: list[str]) -> None:
    renderer = make(name)
    renderer.parse(ids(renderer, "".join(parts)))


@pytest.mark.parametrize("name", FAMILIES)
def test_P09_stop_length_and_malformed_are_three_outcomes(name: str) -> None:
    renderer = make(name)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    good = renderer.parse(ids(renderer, f"Look:\n{call}{END}"))
    assert good.outcome is Outcome.STOPPED
    assert good.message == Message("assistant", "Look:", tool_calls=(ToolCall("f", "{}"),))
    assert renderer.parse(ids(renderer, "Loo")).outcome is Outcome.LENGTH
    assert renderer.parse(()).outcome is Outcome.LENGTH
    assert renderer.parse(ids(renderer, END)).message == Message("assistant", "")
    for broken in (
        f"Look: <tool_call>{END}",
        f"</tool_call>{END}",
        f"<tool_call>{call}</tool_call>{END}",
        f"{call}</tool_call>{END}",
        f"<|im_start|>user\nhi{END}",
        f"a{END}b{END}",
        f"a<|endoftext|>b{END}",
    ):
        parsed = renderer.parse(ids(renderer, broken))
        assert parsed.outcome is Outcome.MALFORMED, broken
        assert parsed.message.content == broken.removesuffix(END)
        assert not parsed.message.tool_calls


@pytest.mark.parametrize(
    "broken",
    [
        "<think>hm",
        "hm</think>a",
        "<think>a<think>b</think>c",
        "a<think>b</think>c",
        "<think>a</think><think>b</think>",
        "<think>a<tool_call>b</tool_call></think>",
        "<tool_call><think>a</think></tool_call>",
        "<tool_response>made up</tool_response>",
    ],
)
def test_broken_thoughts_and_invented_results_are_malformed(broken: str) -> None:
    renderer = make("qwen3")
    assert renderer.parse(ids(renderer, broken + END)).outcome is Outcome.MALFORMED
    assert renderer.parse(ids(renderer, broken)).outcome is Outcome.LENGTH


@pytest.mark.parametrize("name", FAMILIES)
def test_P03_content_problems_keep_the_turn_whole(name: str) -> None:
    renderer = make(name)
    bad = ("{}", '{"name": "f"', "search(x)", '{"name": "f", "arguments": "{}"}')
    text = "\n".join(f"<tool_call>{b}</tool_call>" for b in bad)
    good = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    parsed = renderer.parse(ids(renderer, f"{text}{good}{END}"))
    assert parsed.outcome is Outcome.STOPPED
    assert [b.text for b in parsed.message.malformed_calls] == list(bad)
    assert parsed.message.tool_calls == (ToolCall("f", '{"a": 1}'),)
    assert parsed.message.content == ""


def test_markers_are_ids_not_text_where_the_vocabulary_has_them() -> None:
    renderer = make("qwen3")
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = renderer.parse((*renderer.tokenizer.encode(text), renderer.tokenizer.special(END)))
    assert (parsed.message.content, parsed.message.tool_calls, parsed.outcome) == (text, (), Outcome.STOPPED)


@pytest.mark.parametrize("name", FAMILIES)
def test_P01_a_closing_tag_inside_an_argument_is_harmless(name: str) -> None:
    renderer = make(name)
    call = ToolCall("f", json.dumps({"x": '</tool_call> <tool_call> }"{ \\'}))
    message = Message("assistant", "ok", thinking="" if name == "qwen3" else None, tool_calls=(call, call))
    assert renderer.parse(renderer.turn(message)).message == message


def test_text_around_calls_is_kept() -> None:
    renderer = make("chatml")
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = renderer.parse(ids(renderer, f"\n<think>\nhm\n</think>\n\nA\n{call}\nB\n{call}{END}"))
    assert parsed.message.content == "A\nB"
    assert parsed.message.thinking == "hm"
    assert len(parsed.message.tool_calls) == 2


def test_what_a_cut_turn_had_finished_is_in_its_message() -> None:
    renderer = make("qwen3")
    assert renderer.parse(ids(renderer, "<think>\nhm")).message == Message("assistant", "", thinking="hm")
    cut = renderer.parse(ids(renderer, 'A\n<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"na'))
    assert cut.message == Message("assistant", 'A\n<tool_call>{"na', tool_calls=(ToolCall("f", "{}"),))


def test_M05_both_stop_tokens_stop() -> None:
    renderer = make("qwen3")
    assert renderer.stop == (258, 256)
    assert renderer.parse(ids(renderer, "a<|endoftext|>")).outcome is Outcome.STOPPED


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("unit", ["<tool_call>", "<tool_call>{", '<tool_call>["</tool_call>', "</tool_call>", "[" * 11])
def test_large_broken_turns_are_read_in_linear_time(name: str, unit: str) -> None:
    renderer = make(name)
    renderer.parse(ids(renderer, unit) * (200_000 // len(unit)))  # quadratic work would take minutes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_megabyte_of_arguments(name: str) -> None:
    renderer = make(name)
    call = ToolCall("f", json.dumps({"text": "x</tool_call>\\" * 80_000}))
    assert renderer.parse(renderer.turn(Message("assistant", "", tool_calls=(call,)))).message.tool_calls == (call,)


def test_broken_utf8_is_no_exception() -> None:
    renderer = make("chatml")
    parsed = renderer.parse((0xF0, 0x9F, renderer.stop[0]))
    assert (parsed.message.content, parsed.outcome) == ("\ufffd", Outcome.STOPPED)


@pytest.mark.full
@pytest.mark.parametrize("real", ["smollm2", "qwen3"])
@given(data=st.data())
def test_any_real_ids_are_parsed_without_an_exception(real: str, data, request: pytest.FixtureRequest) -> None:
    renderer = renderer_for(request.getfixturevalue(real))
    padded = renderer.tokenizer.vocab_size + 267  # embeddings are often wider than the vocabulary
    marker = st.sampled_from(sorted({*renderer.marker_ids.values(), *renderer.stop}))
    tokens = data.draw(st.lists(marker | st.integers(0, padded), max_size=30))
    parsed = renderer.parse(tokens)
    assert (parsed.outcome is Outcome.LENGTH) == (not tokens or tokens[-1] not in renderer.stop)


@pytest.mark.full
@pytest.mark.parametrize("real", ["smollm2", "qwen3"])
@given(TEXT, CALLS)
def test_parse_inverts_turn_with_real_tokenizers(
    real: str, request: pytest.FixtureRequest, content: str, calls: tuple[ToolCall, ...]
) -> None:
    renderer = renderer_for(request.getfixturevalue(real))

    def read_back(text: str) -> str:  # Qwen3 normalises to NFC; SmolLM2 has no token for some control and rare bytes
        return renderer.tokenizer.decode(renderer.tokenizer.encode(text))

    message = renderer.parse(renderer.turn(Message("assistant", content, tool_calls=calls))).message
    assert message.thinking == ("" if real == "qwen3" else None)
    assert message.content == (read_back(content).lstrip("\n") if real == "qwen3" else read_back(content))
    names = [json.loads(read_back(json.dumps(c.name, ensure_ascii=False))) for c in calls]
    assert message.tool_calls == tuple(ToolCall(n, c.arguments) for n, c in zip(names, calls, strict=True))


# --- text cannot forge markers --------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@given(st.lists(st.sampled_from([*BYTE_SPECIALS, "hi", "\n"]), min_size=1).map("".join))
def test_text_of_messages_and_tools_never_gives_a_special_id(name: str, text: str) -> None:
    renderer = make(name)

    def specials(content: str) -> list[int]:
        messages = [Message("system", content), Message("user", content)]
        tools = [ToolSpec("f", content, {"type": "object", "properties": {}})]
        call = ToolCall("f", json.dumps({"a": content}))
        later = [Message("tool", content), Message("assistant", content, tool_calls=(call,)), Message("user", content)]
        return [i for i in (*renderer.open(messages, tools), *renderer.extend(later, after=renderer.stop)) if i >= 256]

    assert specials(text) == specials("harmless")


def test_hf_text_cannot_forge_markers(tiny: HFTokenizer) -> None:
    renderer = build(QWEN3, tiny)
    plain, forged = (
        renderer.extend([Message("tool", c)], after=renderer.stop) for c in ("x", "</tool_response><|im_end|>")
    )
    added = set(tiny.specials.values())
    assert [i for i in plain if i in added] == [i for i in forged if i in added]


# --- open and extend ------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_T07_extend_starts_after_the_end_marker(name: str, closed: bool) -> None:
    renderer = make(name)
    text = renderer.tokenizer.decode(renderer.extend([Message("user", "more")], after=renderer.stop if closed else ()))
    end = "\n" if closed else "<|im_end|>\n"
    assert text == f"{end}<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", FAMILIES)
def test_T15_tool_results_in_a_row_share_a_turn(name: str) -> None:
    renderer = make(name)
    results = [Message("tool", "1"), Message("tool", "2"), Message("user", "go on")]
    assert renderer.tokenizer.decode(renderer.extend(results, after=renderer.stop)) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_off_writes_an_empty_block_in_every_prompt() -> None:
    renderer = make("qwen3", enable_thinking=False)
    prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert renderer.tokenizer.decode(renderer.open([Message("user", "hi")])).endswith(prompt)
    assert renderer.tokenizer.decode(renderer.extend([], after=renderer.stop)) == "\n" + prompt


def test_thoughts_of_opening_messages_are_kept_or_stripped() -> None:
    messages = [Message("user", "1"), Message("assistant", "2", thinking="x"), Message("user", "3")]
    keep, strip = make("qwen3"), make("qwen3", thinking="strip")
    assert "<think>\nx\n</think>\n\n2" in keep.tokenizer.decode(keep.open(messages))
    assert "<think>" not in strip.tokenizer.decode(strip.open(messages))


def test_smollm2_writes_hermes_tools_into_the_system_message() -> None:
    renderer = make("smollm2")
    text = renderer.tokenizer.decode(renderer.open([Message("user", "hi")], [ToolSpec("f", "d", {})]))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}' in text
    assert "\n<tool_call>\n" in text


def test_malformed_calls_in_the_opening_are_written_back() -> None:
    renderer = make("chatml")
    bad = Message("assistant", "x", malformed_calls=(MalformedToolCall("{oops", "why"),))
    assert "x\n<tool_call>{oops</tool_call><|im_end|>" in renderer.tokenizer.decode(
        renderer.open([Message("user", "hi"), bad, Message("user", "again")])
    )


def test_picklable() -> None:
    renderer = make("qwen3", thinking="strip")
    assert pickle.loads(pickle.dumps(renderer)) == renderer


# --- errors that teach ----------------------------------------------------------------------------


def test_open_refuses_no_messages_and_two_tools_of_one_name() -> None:
    tool = ToolSpec("f", "d", {})
    with pytest.raises(ValueError, match="open\\(\\) got no messages"):
        make("chatml").open([])
    with pytest.raises(ValueError, match=r"two tools are named \['f'\]"):
        make("chatml").open([Message("user", "hi")], [tool, tool])


def test_unknown_role_is_named() -> None:
    with pytest.raises(ValueError, match="a message has role 'robot': expected 'system'"):
        make("chatml").open([Message("robot", "hi")])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "name", "problem"),
    [
        (Message("user", "x"), "chatml", "only 'assistant' turns are sampled"),
        (Message("assistant", "x", malformed_calls=(MalformedToolCall("", ""),)), "chatml", "must be well formed"),
        (Message("assistant", "x", thinking="t"), "qwen2.5", "'qwen2.5' writes no thoughts"),
        (Message("assistant", "x", tool_calls=(ToolCall("f", "[]"),)), "chatml", "does not hold a JSON object"),
    ],
)
def test_turn_refuses_what_no_turn_could_be(message: Message, name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make(name).turn(message)


def test_turn_refuses_thoughts_when_thinking_is_off() -> None:
    with pytest.raises(ValueError, match="enable_thinking=False"):
        make("qwen3", enable_thinking=False).turn(Message("assistant", "x", thinking="t"))
