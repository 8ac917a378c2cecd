"""Published chat templates, where each comes from, and which renderer must write what it writes.

A row is compared three ways: its committed texts with a byte tokenizer (hermetic), a live rendering of the template
with the committed texts, and the ids of the real tokenizer where one can be had. `differs` lists conversations on which
renderer and template part on purpose, each with its reason; a test holds that they do part.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chat_conversations import CONVERSATIONS, uses_tools

from jaxrl.chat.families import find_family, template_message
from jaxrl.chat.renderer import Renderer, build
from jaxrl.chat.tokenizer import Tokenizer, render_template
from jaxrl.chat.tool_calls import tool_schema
from jaxrl.types import Message, ToolSpec

FIXTURES = Path(__file__).resolve().parent / "fixtures"
Case = tuple[Sequence[Message], Sequence[ToolSpec]]


def as_they_are(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages."""
    return messages


@dataclass(frozen=True)
class Official:
    """One published template.

    name: of its fixture. renderer, options: what writes the same. tokenizer: the folder of the real one, in the test
    cache (None: none can be had, so only texts are compared). template: a file of the cache's templates/ (None: the
    tokenizer's own). variables: what it is rendered with. prepare: fills in what the family needs in a conversation,
    such as ids of calls. shown: a message as this template reads it. tools: whether it writes tools.
    differs: conversation -> why the renderer writes something else. grown_differs: why an episode grown turn by turn
    does. keep_differs: why it does where thoughts are kept, though none are there. merged: why the ids of a grown
    episode differ, though its text is the same.
    """

    name: str
    renderer: str
    tokenizer: str | None
    template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Sequence[Message]], Sequence[Message]] = as_they_are
    shown: Callable[[Message], dict[str, Any]] = template_message
    tools: bool = True
    differs: Mapping[str, str] = field(default_factory=dict)
    grown_differs: Mapping[str, str] = field(default_factory=dict)
    keep_differs: Mapping[str, str] = field(default_factory=dict)
    merged: Mapping[str, str] = field(default_factory=dict)

    def case(self, conversation: str) -> Case:
        """Messages and tools."""
        messages, tools = CONVERSATIONS[conversation]
        return self.prepare(messages), tools

    def build(self, tokenizer: Tokenizer) -> Renderer:
        """The renderer that is compared."""
        return build(find_family(self.renderer), tokenizer, **self.options)

    def source(self, cache: Path) -> str:
        """The template's Jinja source."""
        if self.template is not None:
            return (cache / "templates" / self.template).read_text(encoding="utf-8")
        assert self.tokenizer is not None, f"{self.name} names neither a template nor a tokenizer"
        return json.loads((cache / self.tokenizer / "tokenizer_config.json").read_text())["chat_template"]

    def render(self, source: str, conversation: str, special_tokens: Mapping[str, str]) -> str:
        """What the template writes. Raises what the template raises where it refuses the conversation."""
        return self.render_case(source, self.case(conversation), special_tokens)

    def render_case(self, source: str, case: Case, special_tokens: Mapping[str, str]) -> str:
        """What the template writes for any messages and tools."""
        messages, tools = case
        shown = [self.shown(m) for m in messages]
        return render_template(source, shown, [tool_schema(t) for t in tools], **{**special_tokens, **self.variables})

    def conversations(self) -> list[str]:
        """Those whose text is committed: all that the template writes without refusing."""
        return list(self.texts())

    def texts(self) -> dict[str, str]:
        """The committed texts."""
        return json.loads((FIXTURES / f"{self.name}.json").read_text(encoding="utf-8"))

    def wanted(self) -> list[str]:
        """Conversations to render: those with tools only where the template knows tools."""
        return [name for name in CONVERSATIONS if self.tools or not uses_tools(name)]


OFFICIAL: tuple[Official, ...] = (
    Official(
        "smollm2",
        "smollm2",
        "smollm2",
        tools=False,
        merged={"assistant_spaces": "the template lets 'assistant\\n' and spaces that start a turn share a token"},
    ),
    Official(
        "qwen2.5",
        "qwen2.5",
        "qwen2.5",
        merged={"thought_newlines": "the template lets 'assistant\\n' and newlines that start a turn share a token"},
    ),
    Official("qwen3", "qwen3", "qwen3", options={"thinking": "strip"}),
    Official(
        "qwen3_nothink",
        "qwen3",
        "qwen3",
        options={"thinking": "strip", "enable_thinking": False},
        variables={"enable_thinking": False},
    ),
)
BY_NAME = {row.name: row for row in OFFICIAL}
