"""Which families there are, and which one a tokenizer belongs to.

Knows the registry and how to compare a published template with a family. Must not know how a family writes its turns.
"""

from collections.abc import Sequence
from difflib import get_close_matches

from jaxrl.chat.chatml import CHATML, QWEN2_5, QWEN3, QWEN3_INSTRUCT, QWEN3_THINKING, QWQ, SMOLLM2
from jaxrl.chat.deepseek import DEEPSEEK_R1, DEEPSEEK_V3, DEEPSEEK_V3_1
from jaxrl.chat.gemma import GEMMA3
from jaxrl.chat.glm import GLM4_5, GLM4_7
from jaxrl.chat.harmony import GPT_OSS, GPT_OSS_HIGH, GPT_OSS_LOW
from jaxrl.chat.kimi import KIMI_K2, KIMI_K2_THINKING
from jaxrl.chat.llama3 import LLAMA3, LLAMA3_1, LLAMA3_2
from jaxrl.chat.mistral import DEVSTRAL, MINISTRAL_3_THINKING, MISTRAL_V3, MISTRAL_V11
from jaxrl.chat.model_info import BASE_MODEL, known_renderer
from jaxrl.chat.qwen_xml import QWEN3_5, QWEN3_CODER
from jaxrl.chat.renderer import Family, Renderer, Style, Thinking, build, spell
from jaxrl.chat.role_colon import ROLE_COLON
from jaxrl.chat.template import TEMPLATE, TEMPLATE_ERRORS, template_message, template_renderer
from jaxrl.chat.tokenizer import Tokenizer, render_template
from jaxrl.chat.tool_calls import tool_schema
from jaxrl.types import Message, ToolCall, ToolSpec

RENDERERS: dict[str, Family] = {
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN2_5,
    "qwen3": QWEN3,
    "qwen3_instruct": QWEN3_INSTRUCT,
    "qwen3_thinking": QWEN3_THINKING,
    "qwen3_coder": QWEN3_CODER,
    "qwen3.5": QWEN3_5,
    "qwq": QWQ,
    "chatml": CHATML,
    "llama3": LLAMA3,
    "llama3.1": LLAMA3_1,
    "llama3.2": LLAMA3_2,
    "gemma3": GEMMA3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_r1": DEEPSEEK_R1,
    "deepseek_v3.1": DEEPSEEK_V3_1,
    "kimi_k2": KIMI_K2,
    "kimi_k2_thinking": KIMI_K2_THINKING,
    "gpt_oss": GPT_OSS,
    "gpt_oss_low": GPT_OSS_LOW,
    "gpt_oss_high": GPT_OSS_HIGH,
    "glm4.5": GLM4_5,
    "glm4.7": GLM4_7,
    "mistral_v3": MISTRAL_V3,
    "mistral_v11": MISTRAL_V11,
    "devstral": DEVSTRAL,
    "ministral3_reasoning": MINISTRAL_3_THINKING,
    "role_colon": ROLE_COLON,
}


def register_renderer(family: Family) -> None:
    """Add a family of your own. Raises ValueError when the name is taken."""
    if family.name in (*RENDERERS, TEMPLATE):
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
    """The renderer `name`, or the one whose text equals what the tokenizer's own chat template writes, or the one that
    the tokenizer's name recommends (`recognise`). "template" asks that template itself, whatever it is (template.py).

    thinking: "keep" (default: every turn extends the last), "strip" (as the published template; history is
    rewritten) or "compact" (all thoughts are dropped every `compact_turns` turns). enable_thinking: only for families
    with that switch, default True. Raises ValueError for an unknown name, a tokenizer of which neither template nor
    name says anything, and choices without effect.
    """
    if name == TEMPLATE:
        return template_renderer(
            tokenizer, thinking=thinking, enable_thinking=enable_thinking, compact_turns=compact_turns
        )
    family = find_family(name) if name is not None else recognise(tokenizer)
    return build(family, tokenizer, thinking=thinking, enable_thinking=enable_thinking, compact_turns=compact_turns)


def find_family(name: str) -> Family:
    """The family registered as `name`."""
    if name in RENDERERS:
        return RENDERERS[name]
    known = sorted([*RENDERERS, TEMPLATE])
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown renderer {name!r}. Known: {', '.join(known)}.{hint}")


def recognise(tokenizer: Tokenizer) -> Family:
    """The family of a tokenizer, by its template and its name.

    The one that writes a few probe conversations exactly as the template does; the name (model_info.py) chooses among
    several. Where none does, the name decides alone if there is no template, or one that differs only in how it writes
    tools (published ones have bugs there). A name of a base model says nothing against a template. Raises ValueError
    when template and name contradict each other, and when neither says anything.
    """
    named = RENDERERS.get(known_renderer(tokenizer.name) or "")
    written = named if named and _matches(named, tokenizer) else _first_match(tokenizer)
    if written is None and named and tokenizer.chat_template and not _matches(named, tokenizer, with_tools=False):
        named = None  # the name of what it was trained from, and a template of its own
    if named and written and named != written and named.name != BASE_MODEL:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} is named like a model of renderer {named.name!r}, but has the chat template "
            f"of {written.name!r}. Pass name={written.name!r} to write what the template does, or name={named.name!r}."
        )
    found = written or named
    if found is None:
        raise ValueError(_unknown(tokenizer))
    return found


def _first_match(tokenizer: Tokenizer) -> Family | None:
    if tokenizer.chat_template is None:
        return None
    return next((family for family in RENDERERS.values() if _matches(family, tokenizer)), None)


def _unknown(tokenizer: Tokenizer) -> str:
    advice = f"Pass name= one of {', '.join(sorted(RENDERERS))}, or write a family and register_renderer() it"
    if tokenizer.chat_template is None:
        return f"tokenizer {tokenizer.name!r} has no chat template (a base model?), so its family is unknown. {advice}."
    return (
        f"the chat template of tokenizer {tokenizer.name!r} matches no known family. {advice}. For any template there "
        f"is name={TEMPLATE!r}: it renders the whole conversation again at every turn, and wherever the template "
        "changes what it wrote before, the episode splits and its beginning is computed once more."
    )


_TOOL = ToolSpec("look", "Look it up.", {"type": "object", "properties": {"key": {"type": "string"}}})
_CALL = ToolCall("look", '{"key": "a"}', "look0call")
_PROBES: tuple[tuple[Message, ...], ...] = (
    (Message("user", " hi\n"),),
    (Message("system", "Be brief."), Message("user", "hi"), Message("assistant", "yes"), Message("user", "ok")),
    (Message("user", "hi"), Message("assistant", "yes", thinking="hm"), Message("user", "ok")),
)
_TOOL_PROBE = (
    Message("user", "hi"),
    # One call and no text beside it: in more than that published templates have bugs that nobody trained on.
    Message("assistant", "", thinking="hm", tool_calls=(_CALL,)),
    Message("tool", "1", call_id="look0call"),
)


def _matches(family: Family, tokenizer: Tokenizer, *, with_tools: bool = True) -> bool:
    """Whether the template and the family write the same text for every probe that the template does not refuse."""
    cases: list[tuple[Sequence[Message], Sequence[ToolSpec]]] = [(probe, ()) for probe in _PROBES]
    if family.template_has_tools and with_tools:
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
    except TEMPLATE_ERRORS:
        return None
