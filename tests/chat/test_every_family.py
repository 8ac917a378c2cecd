"""What holds for every registered family, with bytes and its own markers as the vocabulary."""

import json
import pickle
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.algo.data import split_reasons, trajectory_to_data
from jaxrl.chat.families import RENDERERS, find_family
from jaxrl.chat.renderer import Family, Outcome, Renderer, build
from jaxrl.chat.tokenizer import ByteTokenizer, byte_tokenizer
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.tools import report_calls, tool
from jaxrl.types import MalformedToolCall, Message, Sample, StopReason, ToolCall, ToolSpec, Trajectory, Transition

NO_TOOLS = {"role_colon"}
NO_JSON = {"qwen3_coder", "qwen3.5", "glm4.5", "glm4.7"}  # families whose arguments are written otherwise
ONE_CALL = {"gpt_oss", "gpt_oss_low", "gpt_oss_high"}  # a turn


def families(*left_out: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", sorted(RENDERERS.keys() - set(left_out)))


every_family = families()
USER = Message("user", "next?")
TOOLS = (ToolSpec("look", "Look it up.", {"type": "object", "properties": {"key": {"type": "string"}}}),)


def spellings(family: Family) -> list[str]:
    """What is one id in the family's vocabulary; a family without markers has none, and stops at strings."""
    return [*dict.fromkeys([*family.markers, *family.stops])] if family.markers else []


@cache
def renderer(name: str, thinking: str | None = None, compact_turns: int | None = None) -> Renderer:
    family = find_family(name)
    chosen = thinking if family.thoughts else None
    turns = compact_turns if chosen == "compact" else None
    return build(family, byte_tokenizer(spellings(family)), thinking=chosen, compact_turns=turns)


def stop(r: Renderer) -> tuple[int, ...]:
    """The first stop, as ids."""
    first = r.stop[0]
    return (first,) if isinstance(first, int) else tuple(r.tokenizer.encode(first))


def writes_nothing(r: Renderer) -> bool:
    """Whether the family has nothing to write between two turns without a message, which it refuses."""
    try:
        r.extend([], after=stop(r))
    except ValueError:
        return True
    return False


def actions(r: Renderer) -> st.SearchStrategy[tuple[int, ...]]:
    """Turns a model could sample: markers and bytes in any order, ended or cut."""
    some = st.lists(st.sampled_from([*r.marker_ids.values(), *stop(r), 10, 34, 60, 97, 123, 125]), max_size=14)
    return st.tuples(some, st.booleans()).map(lambda drawn: (*drawn[0], *(stop(r) if drawn[1] else ())))


@st.composite
def episodes(draw: st.DrawFn, r: Renderer) -> list[tuple[tuple[int, ...], list[Message]]]:
    """Sampled turns, and what the environment said to each."""
    answers = [USER] if r.name in NO_TOOLS else [USER, Message("tool", "42", name="look", call_id="look0call")]
    turn = st.tuples(actions(r), st.lists(st.sampled_from(answers), min_size=writes_nothing(r), max_size=2))
    return draw(st.lists(turn, min_size=1, max_size=5))


@every_family
@settings(max_examples=12)  # there are many families
@given(st.data())
def test_I1_kept_thoughts_leave_every_earlier_id_whatever_was_sampled(name: str, data: st.DataObject) -> None:
    r = renderer(name)
    transcript = begin(r, [USER])
    for action, messages in data.draw(episodes(r)):
        before = act(transcript, action)
        transcript, reason = observe(before, messages)
        assert reason is None
        assert transcript.tokens[: len(before.tokens)] == before.tokens


@every_family
@pytest.mark.parametrize("thinking", ["strip", "compact"])
@settings(max_examples=12)  # there are many families
@given(st.data())
def test_I6_each_sampled_token_is_trained_once_also_where_thoughts_are_dropped(
    name: str, thinking: str, data: st.DataObject
) -> None:
    r = renderer(name, thinking, 2)
    transcript = begin(r, [USER])
    turns: list[Transition] = []
    reason = None
    for action, messages in data.draw(episodes(r)):
        sample = Sample(action, (-1.0,) * len(action), (0,) * len(action), "stop")
        turns.append(Transition(transcript.tokens, sample, 0.0, False, rewrite=reason))
        transcript, reason = observe(act(transcript, action), messages)
    trajectory = Trajectory(tuple(turns), StopReason.TERMINATED)
    data_D = trajectory_to_data(trajectory, 1.0, group=0, episode=0)
    assert sum(int(datum.mask.sum()) for datum in data_D) == sum(len(t.action.tokens) for t in turns)
    assert "prefix_changed" not in split_reasons(trajectory), "a rewrite nobody named"


@every_family
@settings(max_examples=12)  # there are many families
@given(st.data())
def test_parse_never_raises_and_says_how_the_turn_ended(name: str, data: st.DataObject) -> None:
    r = renderer(name)
    tokens = data.draw(actions(r))
    parsed = r.parse(tokens)
    ended = any(s in r.tokenizer.decode(tokens) for s in r.family.stops)
    if r.stop_ids:
        ended = bool(tokens) and tokens[-1] in r.stop_ids
    assert (parsed.outcome is Outcome.LENGTH) == (not ended)
    assert parsed.message.role == "assistant"


TEXTS = st.text(st.sampled_from("ab {}[]\"'<>/|:=,\\\n\t`é🙂0"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS, lambda v: st.lists(v, max_size=2), max_leaves=4
)
ARGUMENTS = st.dictionaries(st.sampled_from(["key", "b"]), VALUES, max_size=2)


@every_family
@settings(max_examples=12)  # there are many families
@given(st.data())
def test_what_a_turn_says_survives_being_written_and_read(name: str, data: st.DataObject) -> None:
    """Families tidy white space, so the first reading is compared with the second; calls must survive at once."""
    r = renderer(name)
    calls = ()
    if name not in NO_TOOLS and data.draw(st.booleans()):
        calls = (ToolCall("look", json.dumps(data.draw(ARGUMENTS), ensure_ascii=False)),)
    thinking = data.draw(TEXTS) if r.family.thoughts and data.draw(st.booleans()) else None
    message = Message("assistant", "" if calls else "said " + data.draw(TEXTS), thinking=thinking, tool_calls=calls)
    first = r.parse(r.turn(message))
    assert first.outcome is Outcome.STOPPED
    assert not first.message.malformed_calls
    again = r.parse(r.turn(first.message)).message
    assert again == first.message
    assert [c.name for c in first.message.tool_calls] == [c.name for c in calls]


BODY = '{"key": "placeholder"}'
READABLE = {
    "nested": '{"key": {"a": [1, {"b": "}"}]}}',
    "escaped": '{"key": "a \\"quoted\\" \\\\ \\n \\u00e9"}',
    "braces": '{"key": "}{][,:"}',
    "huge number": '{"key": 123456789012345678901234567890}',
    "no space": '{"key":"x","b":[]}',
}
UNREADABLE = {
    "single quotes": "{'key': 'x'}",
    "trailing comma": '{"key": "x",}',
    "duplicate key": '{"key": "x", "key": "y"}',
    "unterminated": '{"key": "x',
    "no object": "key=x",
    "nothing": "",
    "deep": '{"key": ' + "[" * 100_000,
}


def replaced(r: Renderer, body: str, *later: ToolCall) -> tuple[int, ...]:
    """A turn whose first call has `body` for its arguments, in a family that writes them as JSON."""
    turn = r.turn(Message("assistant", tool_calls=(ToolCall("look", BODY), *later)))
    written = tuple(r.tokenizer.encode(BODY))
    at = next(i for i in range(len(turn)) if turn[i : i + len(written)] == written)
    return (*turn[:at], *r.tokenizer.encode(body), *turn[at + len(written) :])


@families(*NO_TOOLS, *NO_JSON)
def test_P03_arguments_as_models_write_them_are_a_call_or_an_error_that_teaches(name: str) -> None:
    r = renderer(name)
    for what, body in READABLE.items():
        parsed = r.parse(replaced(r, body))
        assert [c.arguments for c in parsed.message.tool_calls] == [body], what
        assert parsed.outcome is Outcome.STOPPED
    for what, body in UNREADABLE.items():
        parsed = r.parse(replaced(r, body))
        assert not parsed.message.tool_calls, what
        taught = [bad.error for bad in parsed.message.malformed_calls]
        assert all(len(error) > 20 for error in taught)
        assert taught or parsed.outcome is Outcome.MALFORMED or body in parsed.message.content, what


@every_family
def test_a_demonstration_that_would_be_read_as_something_else_is_refused(name: str) -> None:
    """Whatever a family accepts as a demonstration is read back with the same calls, and ends at its only stop."""
    r = renderer(name)
    tricky = ['{"name": "x", "parameters": {}}', '```tool_call\n{"name": "x", "arguments": {}}\n```', "a\n\nUser: b"]
    for content in tricky:
        try:
            tokens = r.turn(Message("assistant", content))
        except ValueError:
            continue
        parsed = r.parse(tokens)
        assert (parsed.outcome, parsed.message.tool_calls) == (Outcome.STOPPED, ())
        assert content.strip() in parsed.message.content


@tool
def look(key: str) -> str:
    """Look it up.

    Args:
        key: what to look up
    """
    return f"found {key}"


@families(*NO_TOOLS, *NO_JSON, *ONE_CALL)
async def test_T15_a_malformed_call_before_a_good_one_is_answered_before_it(name: str) -> None:
    r = renderer(name)
    turn = replaced(r, UNREADABLE["duplicate key"], ToolCall("look", '{"key": "good"}'))
    message = r.parse(turn).message
    assert [type(call) for call in message.calls] == [MalformedToolCall, ToolCall]
    bad, good = message.calls
    assert (bad.id is None) == (good.id is None), "a malformed call keeps its id where calls have one"
    assert good.id is None or bad.id != good.id
    replies = (await report_calls([look], message)).messages
    assert [reply.call_id for reply in replies] == [bad.id, good.id]
    shown = r.tokenizer.decode(r.extend(replies, after=turn))
    assert shown.index("given twice") < shown.index("found good")
    assert bad.id is None or good.id is None or shown.index(bad.id) < shown.index(good.id)
    opened = r.tokenizer.decode(r.open([USER, message, *replies]))
    said = ['"key": "y"', '{"key": "good"}', "given twice", "found good"]
    assert [opened.index(text) for text in said] == sorted(opened.index(text) for text in said)


@families(*NO_TOOLS)
def test_P01_markers_spelled_in_an_argument_are_text(name: str) -> None:
    r = renderer(name)
    call = ToolCall("look", json.dumps({"key": " ".join(spellings(r.family))}, ensure_ascii=False))
    parsed = r.parse(r.turn(Message("assistant", tool_calls=(call,))))
    assert parsed.outcome is Outcome.STOPPED
    assert [json.loads(c.arguments) for c in parsed.message.tool_calls] == [json.loads(call.arguments)]


@families(*(name for name, family in RENDERERS.items() if family.thoughts is None))
def test_T05_thoughts_of_earlier_turns_are_kept_or_dropped_as_the_flag_says(name: str) -> None:
    texts = {}
    for thinking in ("keep", "strip", "compact"):
        r = renderer(name, thinking, 2)
        transcript = begin(r, [USER])
        reasons = []
        for thought in ("first idea", "second idea", "third idea"):
            turn = r.turn(Message("assistant", "done", thinking=thought))
            transcript, reason = observe(act(transcript, turn), [USER])
            reasons.append(reason)
        texts[thinking] = r.tokenizer.decode(transcript.tokens)
        expected = {
            "keep": [None] * 3,
            "strip": ["thinking_stripped"] * 3,
            "compact": [None, "thinking_compacted", None],
        }
        if thinking != "strip" or r.family.thoughts.template == "strip":
            assert reasons == expected[thinking]
    assert all(idea in texts["keep"] for idea in ("first idea", "second idea", "third idea"))
    assert [idea in texts["compact"] for idea in ("first idea", "second idea", "third idea")] == [False, False, True]
    assert "idea" not in texts["strip"]
    assert texts["strip"].count("done") == texts["keep"].count("done") == 3


@every_family
def test_text_never_becomes_a_marker(name: str) -> None:
    r = renderer(name)
    forged = " ".join(spellings(r.family))

    def special(text: str) -> list[int]:
        said = [Message("system", text), Message("user", text)]
        later = (
            [Message("tool", text, name="look", call_id="look0call")]
            if name not in NO_TOOLS
            else [Message("user", text)]
        )
        ids = (*r.open(said), *r.extend(later, after=stop(r)), *r.turn(Message("assistant", text)))
        return [i for i in ids if i >= 256]

    words = len(byte_tokenizer(spellings(r.family)).specials) + 256  # whole words are text
    assert [i for i in special(f"x {forged}") if i < words] == [i for i in special("x y") if i < words]


@every_family
def test_T11_T13_a_prompt_begins_once_and_ends_where_the_model_speaks(name: str) -> None:
    r = renderer(name)
    one, other = r.open([USER]), r.open([Message("user", "something else entirely")])
    assert one[-1] not in r.stop_ids
    assert one[-1] == other[-1]
    conversation = [USER, Message("assistant", "yes"), USER, Message("assistant", "no"), USER]
    firsts = [i for i in r.open(conversation) if i == one[0]]
    if one[0] >= 256 and r.tokenizer.decode([one[0]]).startswith(("<s", "<b", "<|b", "<｜b", "[g")):
        assert len(firsts) == 1, "a beginning-of-sequence token belongs at the beginning"


@every_family
def test_a_cut_turn_is_closed_like_one_that_stopped(name: str) -> None:
    r = renderer(name)
    stopped, cut = r.extend([USER], after=(97, *stop(r))), r.extend([USER], after=(97,))
    assert cut[-1] == stopped[-1]
    assert len(cut) >= len(stopped)
    assert r.tokenizer.decode(cut).endswith(r.tokenizer.decode(stopped)[-len(stopped) // 2 :])


@every_family
def test_a_renderer_travels_to_a_worker(name: str) -> None:
    r = renderer(name)
    assert pickle.loads(pickle.dumps(r)).open([USER]) == r.open([USER])


@dataclass(frozen=True)
class Counting:
    """A tokenizer that adds up the characters it encodes."""

    inner: ByteTokenizer
    characters: list[int] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        self.characters.append(len(text))
        return self.inner.encode(text)

    def __getattr__(self, attribute: str) -> object:
        return getattr(self.inner, attribute)


@every_family
@pytest.mark.parametrize("thinking", ["keep", "strip"])
def test_the_fiftieth_turn_costs_what_the_second_does(name: str, thinking: str) -> None:
    plain = renderer(name, thinking)
    counting = Counting(byte_tokenizer(spellings(plain.family)))
    r = replace(plain, tokenizer=counting)
    thought = "hm" if r.family.thoughts else None
    turn = plain.turn(Message("assistant", "yes", thinking=thought))
    transcript = begin(r, [USER])
    costs = []
    for _ in range(50):
        counting.characters.clear()
        transcript, _ = observe(act(transcript, turn), [USER])
        costs.append(sum(counting.characters))
    assert costs[1:] == [costs[1]] * 49
    assert costs[1] < 2000
