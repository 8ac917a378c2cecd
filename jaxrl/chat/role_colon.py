r"""Plain paragraphs that begin with "User:" and "Assistant:", for base models, which know no chat format.

Knows how to write and read such paragraphs. Must not know token ids, vocabularies, sampling or episodes.

    You are a careful clerk.

    User: What is 2 + 2?

    Assistant: 4

    User:

A first system message is a paragraph without a role; any other role has its own ("System:", "Tool:"). Contents are
trimmed. No template is published for this, so there is nothing to be on a par with. What to know of it:

1. A turn ends where the model begins the user's next paragraph: the stop is the string "\n\nUser:", and the message is
   what stands before it. A `StopCondition` is ids or strings, never both, so an end-of-text token stops nothing here:
   a model that samples one goes on until the string or the budget, and any special token's spelling is in the message.
2. Sampled ids stay as they are, so after a turn that stopped, the context ends with "\n\nUser:" already: a user message
   goes on from there, and anything else leaves that paragraph empty and starts its own. When the token that completed
   the stop spells more than it, the rest (a newline, or the start of a word) stays too, and the next message follows
   it. A turn that was cut is followed by a new paragraph.
3. Text can forge roles: a message that holds "\n\nUser:" looks like two messages to the model, and nothing can be done
   about it without ids for markers. An assistant's turn cannot hold "\n\nUser:" at all; as a demonstration it would
   stop there.
4. There are no tools: base models were trained on no format of calls.
5. No BOS is written unless the row names it: `dataclasses.replace(ROLE_COLON, name=..., bos="<|begin_of_text|>")`
   makes a row (for register_renderer) for base models that expect one, as Llama's and Gemma's do.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from jaxrl.chat.renderer import Marker, Piece, Style, Thoughts, spell
from jaxrl.types import Message, ToolSpec

_LABELS = {"system": "System:", "user": "User:", "assistant": "Assistant:", "tool": "Tool:"}
_GAP = "\n\n"

NEXT_USER = Marker(_GAP + _LABELS["user"])


@dataclass(frozen=True)
class RoleColon:
    """The paragraphs of one base model. bos: the token its contexts start with, if they do."""

    name: str
    bos: str | None = None
    stops: tuple[str, ...] = (NEXT_USER.spelling,)
    thoughts: Thoughts | None = field(default=None, init=False)  # these models write none
    has_thinking_switch: bool = field(default=False, init=False)
    template_has_tools: bool = field(default=False, init=False)

    @property
    def markers(self) -> Mapping[str, bool]:
        """BOS if there is one."""
        return {} if self.bos is None else {self.bos: True}

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """None."""
        return {}

    # --- writing ---

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec], style: Style) -> list[Piece]:
        """System paragraph, messages, "Assistant:". Raises ValueError for tools."""
        if tools:
            raise ValueError(
                f"renderer {self.name!r} got the tools {[tool.name for tool in tools]}: base models know no format of "
                "tool calls. Use an env without tools (it may describe actions in its system message and read them "
                "from the text), or an instruct checkpoint with its chat family."
            )
        has_system = messages[0].role == "system"
        first = [messages[0].content.strip()] if has_system and messages[0].content.strip() else []
        paragraphs = [*first, *map(_paragraph, messages[has_system:]), _LABELS["assistant"]]
        return [*([] if self.bos is None else [Marker(self.bos)]), _GAP.join(paragraphs)]

    def between(self, messages: Sequence[Message], end: Marker | None, style: Style) -> list[Piece]:
        """What follows the sampled turn: the rest of the user's paragraph if it began one, messages, "Assistant:"."""
        goes_on = end is not None and bool(messages) and messages[0].role == "user"
        begun = _paragraph(messages[0]).removeprefix(_LABELS["user"]) if goes_on else ""
        rest = [*map(_paragraph, messages[goes_on:]), _LABELS["assistant"]]
        return [begun, *chain.from_iterable((_GAP, paragraph) for paragraph in rest)]

    def reply(self, message: Message, style: Style) -> list[Piece]:
        """An assistant turn after "Assistant:", up to the user's next paragraph."""
        return [_paragraph(message).removeprefix(_LABELS["assistant"]), NEXT_USER]

    def is_query(self, message: Message) -> bool:
        """A user's message."""
        return message.role == "user"

    # --- reading ---

    def scan(self, text: str, spelled: Set[str]) -> list[Piece]:
        """The text."""
        return [text]

    def read(self, pieces: Sequence[Piece], style: Style) -> tuple[Message, bool]:
        """The text, trimmed. There is no framing that could be broken."""
        return Message("assistant", spell(pieces).strip()), True


def _paragraph(message: Message) -> str:
    if message.role not in _LABELS:
        raise ValueError(f"a message has role {message.role!r}: expected one of {', '.join(map(repr, _LABELS))}.")
    if message.tool_calls or message.malformed_calls:
        raise ValueError("a message has tool calls, for which there is no format here: write them into its content.")
    text = message.content.strip()
    return f"{_LABELS[message.role]} {text}" if text else _LABELS[message.role]


# --- the family -----------------------------------------------------------------------------------

ROLE_COLON = RoleColon("role_colon")
