"""Renderers against the published chat templates: token for token, also when an episode is grown turn by turn."""

import re
from dataclasses import replace

import pytest
from chat_conversations import CONVERSATIONS, has_thoughts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official import OFFICIAL, Case, Official

from jaxrl.chat.families import find_family, renderer_for, template_message
from jaxrl.chat.renderer import Renderer
from jaxrl.chat.tokenizer import (
    BYTE_SPECIALS,
    CHATML_TEMPLATE,
    ByteTokenizer,
    HFTokenizer,
    byte_tokenizer,
    render_template,
)
from jaxrl.chat.tool_calls import tool_schema
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import Message

REAL = tuple(row for row in OFFICIAL if row.tokenizer is not None)


def cases(rows=OFFICIAL):
    return [pytest.param(r, c, id=f"{r.name}-{c}") for r in rows for c in r.conversations()]


def bytes_for(row: Official) -> ByteTokenizer:
    """A byte tokenizer with the markers of the row's family."""
    family = find_family(row.renderer)
    return byte_tokenizer([*dict.fromkeys([*family.markers, *family.stops])])


def official_byte_tokens(text: str) -> list[int]:
    """How a tokenizer with special tokens reads a rendered template: split at spellings first."""
    tokenizer = byte_tokenizer()
    parts = re.split("(" + "|".join(map(re.escape, BYTE_SPECIALS)) + ")", text)
    return [i for p in parts for i in ([tokenizer.special(p)] if p in BYTE_SPECIALS else tokenizer.encode(p))]


def grow(renderer: Renderer, case: Case) -> tuple[int, ...] | None:
    """The same conversation as an episode: open, then turns and observations. None when it has no turn to sample."""
    messages, tools = case
    turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
    if not turns or turns[0] == 0:
        return None
    transcript = begin(renderer, messages[: turns[0]], tools)
    for i, end in zip(turns, [*turns[1:], len(messages)], strict=True):
        message = messages[i]
        if message.thinking is not None and not (renderer.family.thoughts and renderer.enable_thinking):
            message = replace(message, thinking=None)
        before = transcript.tokens
        transcript = act(transcript, renderer.turn(message))
        after_action = transcript.tokens
        assert after_action[: len(before)] == before
        transcript, reason = observe(transcript, messages[i + 1 : end])
        assert (reason is None) == (transcript.tokens[: len(after_action)] == after_action)
        assert transcript.tokens == tuple(t for s in transcript.segments for t in s.tokens)
        if renderer.thinking == "keep":
            assert reason is None
    return transcript.tokens


@pytest.mark.parametrize(("row", "name"), cases())
def test_open_writes_the_published_text(row: Official, name: str) -> None:
    r = row.build(bytes_for(row))
    same = r.tokenizer.decode(r.open(*row.case(name))) == row.texts()[name]
    assert same != (name in row.differs), row.differs.get(name, "")


@pytest.mark.parametrize(("row", "name"), cases())
def test_an_episode_grown_turn_by_turn_equals_the_published_text(row: Official, name: str) -> None:
    r = row.build(bytes_for(row))
    if not r.enable_thinking and has_thoughts(name):
        return  # thoughts cannot be sampled when thinking is off, though the template would still print them
    if name not in {**row.differs, **row.grown_differs} and (grown := grow(r, row.case(name))) is not None:
        assert r.tokenizer.decode(grown) == row.texts()[name]


@pytest.mark.parametrize("row", OFFICIAL, ids=lambda row: row.name)
def test_at_least_forty_conversations_are_compared_where_the_template_writes_as_many(row: Official) -> None:
    compared = set(row.conversations()) - set(row.differs)
    assert len(compared) >= min(40, len(row.conversations()) - len(row.differs))
    assert set(row.differs) | set(row.grown_differs) <= set(row.conversations()), "a difference nobody can see"


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_chatml_equals_its_template_token_for_token(name: str) -> None:
    messages, tools = CONVERSATIONS[name]
    text = render_template(
        CHATML_TEMPLATE, [template_message(m) for m in messages], [tool_schema(tool) for tool in tools]
    )
    r = renderer_for(byte_tokenizer())
    assert list(r.open(messages, tools)) == official_byte_tokens(text)
    if (grown := grow(r, (messages, tools))) is not None:
        assert list(grown) == official_byte_tokens(text)


@pytest.mark.parametrize(
    "row", [row for row in OFFICIAL if row.options.get("thinking") == "strip"], ids=lambda r: r.name
)
def test_keeping_thoughts_changes_nothing_where_there_are_none(row: Official) -> None:
    keep = replace(row, options={**row.options, "thinking": "keep"}).build(bytes_for(row))
    for name in row.conversations():
        if not has_thoughts(name) and name not in {**row.differs, **row.keep_differs}:
            assert keep.tokenizer.decode(keep.open(*row.case(name))) == row.texts()[name], name


@pytest.mark.full
@pytest.mark.parametrize("row", OFFICIAL, ids=lambda row: row.name)
def test_the_committed_texts_are_what_the_published_template_writes(row: Official, real_cache, real_tokenizer) -> None:
    special = real_tokenizer(row.tokenizer).template_variables if row.tokenizer else {}
    source = row.source(real_cache)
    for name, text in row.texts().items():
        assert row.render(source, name, special) == text, "the fixture is stale: run make_official.py"


WHITE = st.text(st.sampled_from(" \n\t\r\u00a0\u3000ab.<"), max_size=8)


@pytest.mark.full
@pytest.mark.parametrize("row", OFFICIAL, ids=lambda row: row.name)
@given(one=WHITE, two=WHITE, three=WHITE)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_T09_white_space_is_written_as_the_published_template_does(
    row: Official, one: str, two: str, three: str, real_cache, real_tokenizer
) -> None:
    special = real_tokenizer(row.tokenizer).template_variables if row.tokenizer else {}
    messages = [Message("user", one), Message("assistant", "x" + two), Message("user", three)]
    published = row.render_case(row.source(real_cache), (row.prepare(messages), ()), special)
    r = row.build(bytes_for(row))
    assert r.tokenizer.decode(r.open(row.prepare(messages))) == published


@pytest.mark.full
@pytest.mark.parametrize(("row", "name"), cases(REAL))
def test_open_equals_the_published_tokens(row: Official, name: str, real_tokenizer) -> None:
    if name in row.differs:
        return
    tokenizer = real_tokenizer(row.tokenizer)
    assert list(row.build(tokenizer).open(*row.case(name))) == as_published(tokenizer, row.texts()[name])


@pytest.mark.full
@pytest.mark.parametrize(("row", "name"), cases(REAL))
def test_an_episode_grown_turn_by_turn_equals_the_published_tokens(row: Official, name: str, real_tokenizer) -> None:
    if name in {**row.differs, **row.grown_differs}:
        return
    r = row.build(real_tokenizer(row.tokenizer))
    if not r.enable_thinking and has_thoughts(name):
        return
    if (grown := grow(r, row.case(name))) is None:
        return
    same = list(grown) == as_published(r.tokenizer, row.texts()[name])
    assert same != (name in row.merged), row.merged.get(name, "")
    if name in row.merged:
        assert r.tokenizer.decode(grown) == row.texts()[name]


def as_published(tokenizer: HFTokenizer, text: str) -> list[int]:
    """The ids transformers makes of a rendered template."""
    return tokenizer.full.encode(text, add_special_tokens=False).ids
