"""Which families there are, and which one a tokenizer belongs to.

Knows the registry and how to compare a published template with a family. Must not know how a family writes its turns.
"""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from jinja2 import TemplateError

from jaxrl.chat.chatml import CHATML, QWEN2_5, QWEN3, SMOLLM2
from jaxrl.chat.renderer import Family, Renderer, Style, Thinking, build, spell
from jaxrl.chat.tokenizer import Tokenizer, render_template
from jaxrl.chat.tool_calls import tool_schema
from jaxrl.types import Message, ToolCall, ToolSpec

RENDERERS: dict[str, Family] = {
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN2_5,
    "qwen3": QWEN3,
    "chatml": CHATML,
}


def register_renderer(family: Family) -> None:
    """Add a family of your own. Raises ValueError when the name is taken."""
    if family.name in RENDERERS:
        raise ValueError(f"a renderer named {family.name!r} exists already: choose another name for yours.")
    RENDERERS[family.name] = family


def renderer_for(
    tokenizer: Tokenizer,
    name: str | None = None,
    *,
    thinking: Thinking | None = None,
    enable_thinking: bool | None = None,
    compact_turns: int | None = None,
) -> Renderer:
    """The renderer `name`, or the one whose text equals what the tokenizer's own chat template writes.

    thinking: "keep" (default: every turn extends the last), "strip" (as the published template; history is
    rewritten) or "compact" (all thoughts are dropped every `compact_turns` turns). enable_thinking: only for families
    with that switch, default True. Raises ValueError for an unknown name, a tokenizer without a template, a template
    no family matches, and choices without effect.
    """
    family = find_family(name) if name is not None else recognise(tokenizer)
    return build(family, tokenizer, thinking=thinking, enable_thinking=enable_thinking, compact_turns=compact_turns)


def find_family(name: str) -> Family:
    """The family registered as `name`."""
    if name in RENDERERS:
        return RENDERERS[name]
    near = get_close_matches(name, RENDERERS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown renderer {name!r}. Known: {', '.join(sorted(RENDERERS))}.{hint}")


def recognise(tokenizer: Tokenizer) -> Family:
    """The family that writes a few probe conversations exactly as the tokenizer's template does."""
    advice = f"Pass name= one of {', '.join(sorted(RENDERERS))}, or write a family and register_renderer() it."
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} has no chat template (a base model?), so its family is unknown. {advice}"
        )
    for family in RENDERERS.values():
        if _matches(family, tokenizer):
            return family
    raise ValueError(f"the chat template of tokenizer {tokenizer.name!r} matches no known family. {advice}")


def template_message(message: Message) -> dict[str, Any]:
    """A message as published templates read it. Arguments are parsed, since some templates serialise them."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking is not None:
        shown["reasoning_content"] = message.thinking
    if message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.name is not None:
        shown["name"] = message.name
    if message.call_id is not None:
        shown["tool_call_id"] = message.call_id
    return shown


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    identified = {} if call.id is None else {"id": call.id}
    return {"type": "function", "function": function, **identified}


_TOOL = ToolSpec("look", "Look it up.", {"type": "object", "properties": {"key": {"type": "string"}}})
_CALLS = (ToolCall("look", '{"key": "a"}'), ToolCall("look", '{"key": "b"}'))
_PROBES: tuple[tuple[Message, ...], ...] = (
    (Message("user", " hi\n"),),
    (Message("system", "Be brief."), Message("user", "hi"), Message("assistant", "yes"), Message("user", "ok")),
    (Message("user", "hi"), Message("assistant", "yes", thinking="hm"), Message("user", "ok")),
)
_TOOL_PROBE = (
    Message("user", "hi"),
    Message("assistant", "one moment", thinking="hm", tool_calls=_CALLS),
    Message("tool", "1"),
    Message("tool", "2"),
)


def _matches(family: Family, tokenizer: Tokenizer) -> bool:
    """Whether the template and the family write the same text for every probe that the template does not refuse."""
    cases: list[tuple[Sequence[Message], Sequence[ToolSpec]]] = [(probe, ()) for probe in _PROBES]
    if family.template_has_tools:
        cases += [(_PROBES[0], (_TOOL,)), (_PROBES[1], (_TOOL,)), (_TOOL_PROBE, (_TOOL,))]
    style = Style(thinking=family.thoughts.template if family.thoughts else "keep")
    published = [_published(family, tokenizer, *case) for case in cases]
    return published[0] is not None and all(
        text is None or text == spell(family.opening(*case, style)) for text, case in zip(published, cases, strict=True)
    )


def _published(
    family: Family, tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> str | None:
    """What the tokenizer's template writes, or None where it refuses to."""
    try:
        return render_template(
            tokenizer.chat_template or "",
            [template_message(m) for m in messages],
            [tool_schema(t) for t in tools],
            **{**tokenizer.template_variables, **family.template_variables},
        )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return None  # templates refuse what they cannot write, each in its own way
