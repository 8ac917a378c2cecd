"""Renderers against the published chat templates: token for token, also when an episode is grown turn by turn."""

from dataclasses import replace

import pytest
from chat_conversations import CONVERSATIONS, has_thoughts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official import OFFICIAL, Case, Official
from sampled import sampled

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


every_row = pytest.mark.parametrize("row", OFFICIAL, ids=lambda row: row.name)
every_real_row = pytest.mark.parametrize("row", REAL, ids=lambda row: row.name)


def bytes_for(row: Official) -> ByteTokenizer:
    """A byte tokenizer with the markers of the row's family."""
    family = find_family(row.renderer)
    return byte_tokenizer([*dict.fromkeys([*family.markers, *family.stops])])


def official_byte_tokens(text: str) -> list[int]:
    """How a tokenizer with special tokens reads a rendered template: split at spellings first."""
    return list(sampled(byte_tokenizer(), text, BYTE_SPECIALS))


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


def grown(row: Official, renderer: Renderer) -> dict[str, tuple[int, ...]]:
    """Every conversation that has a turn to sample, as an episode. Thoughts cannot be sampled when thinking is off,
    though the template would still print them."""
    names = [name for name in row.conversations() if renderer.enable_thinking or not has_thoughts(name)]
    found = {name: grow(renderer, row.case(name)) for name in names if name not in row.differs}
    return {name: tokens for name, tokens in found.items() if tokens is not None}


@every_row
def test_open_writes_the_published_texts(row: Official) -> None:
    r = row.build(bytes_for(row))
    written = {name: r.tokenizer.decode(r.open(*row.case(name))) for name in row.conversations()}
    assert {name for name, text in row.texts().items() if written[name] != text} == set(row.differs)


@every_row
def test_episodes_grown_turn_by_turn_equal_the_published_texts(row: Official) -> None:
    r = row.build(bytes_for(row))
    written = {name: r.tokenizer.decode(tokens) for name, tokens in grown(row, r).items()}
    assert {name for name, text in written.items() if text != row.texts()[name]} == set(row.grown_differs)


@pytest.mark.parametrize("renderer", sorted({row.renderer for row in OFFICIAL}))
def test_at_least_forty_conversations_are_compared_where_templates_write_as_many(renderer: str) -> None:
    rows = [row for row in OFFICIAL if row.renderer == renderer]
    written = {name for row in rows for name in row.conversations()}
    compared = {name for row in rows for name in row.conversations() if name not in row.differs}
    assert len(compared) >= min(40, len(written) - 2)


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
@every_row
def test_the_committed_texts_are_what_the_published_template_writes(row: Official, real_cache, real_tokenizer) -> None:
    special = real_tokenizer(row.tokenizer).template_variables if row.tokenizer else {}
    source = row.source(real_cache)
    for name, text in row.texts().items():
        assert row.render(source, name, special) == text, "the fixture is stale: run make_official.py"


WHITE = st.text(st.sampled_from(" \n\t\r\u00a0\u3000ab.<"), max_size=8)


@pytest.mark.full
@every_row
@given(one=WHITE, two=WHITE, three=WHITE)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_T09_white_space_is_written_as_the_published_template_does(
    row: Official, one: str, two: str, three: str, real_cache, real_tokenizer
) -> None:
    special = real_tokenizer(row.tokenizer).template_variables if row.tokenizer else {}
    messages = [Message("user", one), Message("assistant", "x" + two), Message("user", three)]
    published = row.render_case(row.source(real_cache), (row.prepare(messages), ()), special)
    r = row.build(bytes_for(row))
    assert r.tokenizer.decode(r.open(row.prepare(messages))) == published


@pytest.mark.full
@every_real_row
def test_open_equals_the_published_tokens(row: Official, real_tokenizer) -> None:
    r = row.build(real_tokenizer(row.tokenizer))
    for name in set(row.conversations()) - set(row.differs):
        assert list(r.open(*row.case(name))) == as_published(r.tokenizer, row.texts()[name]), name


@pytest.mark.full
@every_real_row
def test_episodes_grown_turn_by_turn_equal_the_published_tokens(row: Official, real_tokenizer) -> None:
    r = row.build(real_tokenizer(row.tokenizer))
    same_text = {name: tokens for name, tokens in grown(row, r).items() if name not in row.grown_differs}
    texts = row.texts()
    assert {n for n, tokens in same_text.items() if list(tokens) != as_published(r.tokenizer, texts[n])} == set(
        row.merged
    )
    for name in row.merged:
        assert r.tokenizer.decode(same_text[name]) == texts[name]


def as_published(tokenizer: HFTokenizer, text: str) -> list[int]:
    """The ids transformers makes of a rendered template."""
    return tokenizer.full.encode(text, add_special_tokens=False).ids
