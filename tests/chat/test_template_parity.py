"""Renderers against the published chat templates: token for token, also when an episode is grown turn by turn."""

import json
import re
from pathlib import Path

import pytest
from chat_conversations import CONVERSATIONS, has_thoughts, uses_tools

from jaxrl.chat.chatml import tool_schema
from jaxrl.chat.families import renderer_for, template_message
from jaxrl.chat.renderer import Renderer
from jaxrl.chat.tokenizer import BYTE_SPECIALS, CHATML_TEMPLATE, byte_tokenizer, render_template
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import Message

FIXTURES = Path(__file__).resolve().parent / "fixtures"
OFFICIAL = {
    name: json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("smollm2", "qwen2.5", "qwen3", "qwen3_nothink")
}


def renderer(official: str, tokenizer) -> Renderer:
    """The renderer that should write what fixture `official` holds."""
    if official == "qwen3":
        return renderer_for(tokenizer, "qwen3", thinking="strip")
    if official == "qwen3_nothink":
        return renderer_for(tokenizer, "qwen3", thinking="strip", enable_thinking=False)
    return renderer_for(tokenizer, official)


def cases(*names: str):
    return [pytest.param(f, c, id=f"{f}-{c}") for f in names for c in OFFICIAL[f]]


def official_byte_tokens(text: str) -> list[int]:
    """How a tokenizer with special tokens reads a rendered template: split at spellings first."""
    tokenizer = byte_tokenizer()
    parts = re.split("(" + "|".join(map(re.escape, BYTE_SPECIALS)) + ")", text)
    return [i for p in parts for i in ([tokenizer.special(p)] if p in BYTE_SPECIALS else tokenizer.encode(p))]


def grow(renderer: Renderer, name: str) -> tuple[int, ...] | None:
    """The same conversation as an episode: open, then turns and observations. None when it has no turn to sample."""
    messages, tools = CONVERSATIONS[name]
    turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
    if not turns or turns[0] == 0:
        return None
    transcript = begin(renderer, messages[: turns[0]], tools)
    for i, end in zip(turns, [*turns[1:], len(messages)], strict=True):
        message = messages[i]
        if message.thinking is not None and not (renderer.family.thought_markers and renderer.enable_thinking):
            message = Message("assistant", message.content, tool_calls=message.tool_calls)
        before = transcript.tokens
        transcript = act(transcript, renderer.turn(message))
        after_action = transcript.tokens
        assert after_action[: len(before)] == before
        transcript, reason = observe(transcript, messages[i + 1 : end], closed=True)
        assert (reason is None) == (transcript.tokens[: len(after_action)] == after_action)
        assert transcript.tokens == tuple(t for s in transcript.segments for t in s.tokens)
        if renderer.thinking == "keep":
            assert reason is None
    return transcript.tokens


@pytest.mark.parametrize(("official", "name"), cases(*OFFICIAL))
def test_open_writes_the_published_text(official: str, name: str) -> None:
    r = renderer(official, byte_tokenizer())
    assert r.tokenizer.decode(r.open(*CONVERSATIONS[name])) == OFFICIAL[official][name]["text"]


@pytest.mark.parametrize(("official", "name"), cases(*OFFICIAL))
def test_an_episode_grown_turn_by_turn_equals_the_published_text(official: str, name: str) -> None:
    r = renderer(official, byte_tokenizer())
    if official == "qwen3_nothink" and has_thoughts(name):
        return  # thoughts cannot be sampled when thinking is off, though the template would still print them
    if (grown := grow(r, name)) is not None:
        assert r.tokenizer.decode(grown) == OFFICIAL[official][name]["text"]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_chatml_equals_its_template_token_for_token(name: str) -> None:
    messages, tools = CONVERSATIONS[name]
    text = render_template(
        CHATML_TEMPLATE, [template_message(m) for m in messages], [tool_schema(tool) for tool in tools]
    )
    r = renderer_for(byte_tokenizer())
    assert list(r.open(messages, tools)) == official_byte_tokens(text)
    if (grown := grow(r, name)) is not None:
        assert list(grown) == official_byte_tokens(text)


@pytest.mark.parametrize("name", [n for n in CONVERSATIONS if not has_thoughts(n)])
def test_keeping_thoughts_changes_nothing_where_there_are_none(name: str) -> None:
    keep = renderer_for(byte_tokenizer(), "qwen3", thinking="keep")
    assert keep.tokenizer.decode(keep.open(*CONVERSATIONS[name])) == OFFICIAL["qwen3"][name]["text"]


@pytest.mark.full
@pytest.mark.parametrize(("official", "name"), cases("smollm2", "qwen3", "qwen3_nothink"))
def test_open_equals_the_published_tokens(official: str, name: str, request: pytest.FixtureRequest) -> None:
    r = renderer(official, request.getfixturevalue(official.split("_")[0]))
    messages, tools = CONVERSATIONS[name]
    live = render_template(
        r.tokenizer.chat_template or "",
        [template_message(m) for m in messages],
        [tool_schema(tool) for tool in tools],
        **({"enable_thinking": False} if official == "qwen3_nothink" else {}),
    )
    assert live == OFFICIAL[official][name]["text"], "the fixture is stale: run make_official.py"
    assert list(r.open(messages, tools)) == OFFICIAL[official][name]["tokens"]
    if not uses_tools(name) or official != "smollm2":
        assert r.tokenizer.full.encode(live, add_special_tokens=False).ids == OFFICIAL[official][name]["tokens"]


@pytest.mark.full
@pytest.mark.parametrize(("official", "name"), cases("smollm2", "qwen3"))
def test_an_episode_grown_turn_by_turn_equals_the_published_tokens(
    official: str, name: str, request: pytest.FixtureRequest
) -> None:
    r = renderer(official, request.getfixturevalue(official))
    if (grown := grow(r, name)) is None:
        return
    if (official, name) == ("smollm2", "assistant_spaces"):
        # The template lets "assistant\n" and a turn that starts with spaces share a token. A sampled turn cannot.
        assert list(grown) != OFFICIAL[official][name]["tokens"]
        assert r.tokenizer.decode(grown) == OFFICIAL[official][name]["text"]
        return
    assert list(grown) == OFFICIAL[official][name]["tokens"]
