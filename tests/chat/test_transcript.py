"""An episode's context: extended verbatim, rewritten only where thoughts are stripped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.chat.chatml import QWEN3, QWEN3_THINKING
from jaxrl.chat.families import renderer_for
from jaxrl.chat.renderer import Thinking, build
from jaxrl.chat.tokenizer import HFTokenizer, byte_tokenizer
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import Message, common_prefix

BYTES = byte_tokenizer()
USER, TOOL = Message("user", "next"), Message("tool", "42")
ACTIONS = st.lists(st.sampled_from([*range(256, 265), 10, 60, 97, 98]), max_size=12).map(tuple)
EPISODE = st.lists(st.tuples(ACTIONS, st.lists(st.sampled_from([USER, TOOL]), max_size=2)), max_size=5)


def spelled(text: str) -> tuple[int, ...]:
    """Ids of text in which the think markers and the end marker are tokens."""
    out: tuple[int, ...] = ()
    for part in text.replace("<think>", "\0<think>\0").replace("</think>", "\0</think>\0").split("\0"):
        out += (BYTES.special(part),) if part in ("<think>", "</think>") else tuple(BYTES.encode(part))
    return (*out, BYTES.special("<|im_end|>"))


@pytest.mark.parametrize("name", ["chatml", "qwen3", "qwen2.5", "smollm2"])
@given(EPISODE)
def test_I1_kept_thoughts_always_extend_whatever_was_sampled(name: str, episode: list) -> None:
    transcript = begin(renderer_for(BYTES, name), [USER])
    for action, messages in episode:
        context = transcript.tokens
        transcript = act(transcript, action)
        assert transcript.tokens == context + action
        transcript, reason = observe(transcript, messages)
        assert reason is None
        assert transcript.tokens[: len(context) + len(action)] == context + action
    assert [s.tokens for s in transcript.segments if s.kind == "action"] == [action for action, _ in episode]


@given(EPISODE)
def test_I1_stripping_says_so_and_removes_only(episode: list) -> None:
    transcript = begin(renderer_for(BYTES, "qwen3", thinking="strip"), [USER])
    for action, messages in episode:
        former = act(transcript, action)
        transcript, reason = observe(former, messages)
        assert transcript.tokens == tuple(t for s in transcript.segments for t in s.tokens)
        assert (reason is None) == (common_prefix(former.tokens, transcript.tokens) == len(former.tokens))
        kept = sum(len(s.tokens) for s in transcript.segments[:-1])
        rest = iter(former.tokens)
        assert all(t in rest for t in transcript.tokens[:kept]), "what is left is a subsequence of what was there"


def test_T03_three_turns_of_thoughts_stripped_at_the_next_query() -> None:
    renderer = renderer_for(BYTES, "qwen3", thinking="strip")
    t = begin(renderer, [Message("user", "q1")])
    t, reason = observe(act(t, spelled("<think>\na\n</think>\n\ncall")), [TOOL])
    assert reason is None, "within a tool loop thoughts stay"
    t, reason = observe(act(t, spelled("<think>\nb\n</think>\n\nsay")), [Message("user", "q2")])
    assert reason == "thinking_stripped"
    assert BYTES.decode(t.tokens) == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\ncall<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\nsay<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n"
    )
    t, reason = observe(act(t, spelled("plain")), [USER])
    assert reason is None, "nothing was left to strip"


def test_an_empty_block_is_dropped_at_once_as_the_template_does() -> None:
    renderer = renderer_for(BYTES, "qwen3", thinking="strip", enable_thinking=False)
    t, reason = observe(act(begin(renderer, [USER]), spelled("call")), [TOOL])
    assert reason == "thinking_stripped"
    assert BYTES.decode(t.tokens).count("<think>") == 1, "only the one in the current generation prompt"


@pytest.mark.parametrize(("thinking", "turns"), [("strip", None), ("compact", 2)])
def test_a_turn_does_not_close_what_an_earlier_one_left_open(thinking: Thinking, turns: int | None) -> None:
    renderer = renderer_for(BYTES, "qwen3", thinking=thinking, compact_turns=turns)
    t, _ = observe(act(begin(renderer, [USER]), spelled("<think>\nhm")), [Message("tool", "close it")])
    t, _ = observe(act(t, spelled("<think>\nso\n</think>\n\nb")), [USER])
    text = BYTES.decode(t.tokens)
    assert "assistant\n<think>\nhm<|im_end|>\n" in text
    assert "close it" in text
    assert text.count("assistant\nb<|im_end|>") == 1


def test_thinking_off_and_kept_extends() -> None:
    renderer = renderer_for(BYTES, "qwen3", enable_thinking=False)
    before = act(begin(renderer, [USER]), spelled("call"))
    after, reason = observe(before, [USER])
    assert reason is None
    assert after.tokens[: len(before.tokens)] == before.tokens


THOUGHT = spelled("<think>\nhm\n</think>\n\na")


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_I1_compaction_drops_all_thoughts_every_so_many_turns(turns: int) -> None:
    renderer = renderer_for(BYTES, "qwen3", thinking="compact", compact_turns=turns)
    t, reasons = begin(renderer, [USER]), []
    for _ in range(10):
        before = act(t, THOUGHT)
        t, reason = observe(before, [USER])
        reasons.append(reason)
        assert (reason is None) == (t.tokens[: len(before.tokens)] == before.tokens)
        assert BYTES.decode(t.tokens).count("<think>") == len(reasons) % turns, "as many as turns since the last one"
    assert [i for i, reason in enumerate(reasons, 1) if reason == "thinking_compacted"] == [*range(turns, 11, turns)]
    assert set(reasons) <= {None, "thinking_compacted"}
    assert sum(segment.kind == "action" for segment in t.segments) == 10


@pytest.mark.parametrize("name", ["qwen3", "chatml"])
@given(EPISODE, st.integers(1, 3))
def test_I1_compaction_says_so_and_removes_only(name: str, episode: list, turns: int) -> None:
    transcript = begin(renderer_for(BYTES, name, thinking="compact", compact_turns=turns), [USER])
    for number, (action, messages) in enumerate(episode, 1):
        former = act(transcript, action)
        transcript, reason = observe(former, messages)
        assert reason in (None, "thinking_compacted")
        assert reason is None or number % turns == 0
        assert transcript.tokens == tuple(t for s in transcript.segments for t in s.tokens)
        assert (reason is None) == (common_prefix(former.tokens, transcript.tokens) == len(former.tokens))
        kept = sum(len(s.tokens) for s in transcript.segments[:-1])
        rest = iter(former.tokens)
        assert all(t in rest for t in transcript.tokens[:kept]), "what is left is a subsequence of what was there"
        for context, turn in zip(transcript.segments[::2], transcript.segments[1::2], strict=False):
            left = transcript.renderer.forget((*context.tokens, *turn.tokens))
            assert not left or number % turns, "no finished thought is left"


def test_compaction_drops_thoughts_that_a_prompt_opened() -> None:
    renderer = build(QWEN3_THINKING, BYTES, thinking="compact", compact_turns=2)
    t, reason = observe(act(begin(renderer, [USER]), spelled("hm\n</think>\n\na")), [TOOL])
    assert reason is None
    t, reason = observe(act(t, spelled("so\n</think>\n\nb")), [USER])
    assert reason == "thinking_compacted"
    assert BYTES.decode(t.tokens) == (
        "<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_turns_without_thoughts_are_never_compacted() -> None:
    t = begin(renderer_for(BYTES, "qwen3", thinking="compact", compact_turns=1), [USER])
    for _ in range(3):
        t, reason = observe(act(t, spelled("a")), [USER])
        assert reason is None


def test_I12_compaction_needs_its_number_of_turns() -> None:
    for thinking, turns in (("compact", None), (None, 2), ("strip", 2)):
        with pytest.raises(ValueError, match=f"compact_turns={turns}: give both thinking='compact' and the number"):
            renderer_for(BYTES, "qwen3", thinking=thinking, compact_turns=turns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compact_turns=0: expected at least 1"):
        renderer_for(BYTES, "qwen3", thinking="compact", compact_turns=0)
    with pytest.raises(ValueError, match="thinking='compact' has no effect: family 'smollm2' writes no thoughts"):
        renderer_for(BYTES, "smollm2", thinking="compact", compact_turns=2)


def test_unfinished_thoughts_stay() -> None:
    renderer = renderer_for(BYTES, "qwen3", thinking="strip")
    action = spelled("<think>\nhm")[:-1]
    t, reason = observe(act(begin(renderer, [USER]), action), [USER])
    assert reason is None
    assert t.segments[1].tokens == action


def test_T01_non_canonical_splits_are_kept_verbatim(tiny: HFTokenizer) -> None:
    he, llo, hello = (tiny.encode(w)[0] for w in ("he", "llo", "hello"))
    assert tiny.encode("hello") == [hello]
    think, done, end = (tiny.special(s) for s in ("<think>", "</think>", "<|im_end|>"))
    newlines = tiny.encode("\n\n\n")
    action = (think, he, llo, done, *newlines, he, llo, end)
    expectations: list[tuple[Thinking, tuple[int, ...]]] = [("keep", action), ("strip", (he, llo, end))]
    for thinking, expected in expectations:
        renderer = build(QWEN3, tiny, thinking=thinking)
        t, _ = observe(act(begin(renderer, [USER]), action), [USER])
        assert t.segments[1].tokens == expected


@pytest.mark.full
def test_a_padded_id_after_thoughts_is_not_taken_for_a_newline(qwen3: HFTokenizer) -> None:
    renderer = renderer_for(qwen3, thinking="strip")
    think, done, end = (qwen3.special(s) for s in ("<think>", "</think>", "<|im_end|>"))
    tokens = (think, 1, done, *qwen3.encode("\n\n"), 151_800, end)
    assert renderer.forget(tokens) == [(0, len(tokens) - 2)]


def test_verbs_out_of_order_are_named() -> None:
    t = begin(renderer_for(BYTES), [USER])
    with pytest.raises(ValueError, match="observe\\(\\) was called without a sampled turn"):
        observe(t, [USER])
    with pytest.raises(ValueError, match="act\\(\\) was called twice"):
        act(act(t, (1,)), (2,))


def test_nothing_is_tokenized_twice() -> None:
    """The text handed to the tokenizer over an episode grows with the episode, not with its square."""
    seen = 0

    class Counting(type(BYTES)):
        def encode(self, text: str) -> list[int]:
            nonlocal seen
            seen += len(text)
            return super().encode(text)

    t = begin(renderer_for(Counting(), "qwen3", thinking="strip"), [Message("user", "x" * 1000)])
    opening = seen
    for _ in range(50):
        t, _ = observe(act(t, spelled("<think>\na\n</think>\n\nb")), [USER])
    assert seen - opening == 50 * len("\nuser\nnext\nassistant\n")
