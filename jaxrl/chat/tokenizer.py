"""Text to token ids and back, with special tokens kept apart from text.

Knows byte-level text, and (this file only) the transformers and tokenizers packages. Must not know what a message
is, which markers a model family uses, or any model.

The rule that everything above relies on: `encode` reads *text only*. A special token's spelling inside a user's
message or a tool's answer is spelled out with ordinary tokens; the only way to get the special id is `special`.
"""

import datetime
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import tokenizers
import transformers
from transformers.utils.chat_template_utils import render_jinja_template


@runtime_checkable
class Tokenizer(Protocol):
    """What renderers need of a tokenizer."""

    @property
    def name(self) -> str:
        """What error messages call it."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id it can name. The model's embedding may be padded beyond it."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The Jinja source the checkpoint was published with, if any."""
        ...

    @property
    def template_variables(self) -> Mapping[str, str]:
        """The special tokens that templates ask for by role: bos_token, eos_token and so on."""
        ...

    @property
    def specials(self) -> Collection[str]:
        """The spelling of every special token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text` read as plain text: nothing is added, no special id ever results."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens by their spelling. Never raises on ids that spell broken UTF-8."""
        ...

    def special(self, spelling: str) -> int:
        """The id of a special token. Raises ValueError when the vocabulary has no such token."""
        ...


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    *,
    today: str = "2024-07-26",
    **variables: Any,
) -> str:
    """The text a published Jinja chat template gives. Needs the jinja2 package.

    Messages and tools are the dictionaries templates expect. Families do not use this to make prompts: it serves to
    recognise one and to compare with it, and where there is none (template.py). No template sees a clock: today is
    `today`, YYYY-MM-DD, for all of them (the default is the day that Llama 3's fall back to).
    """
    rendered, _ = render_jinja_template(
        conversations=[[dict(m) for m in messages]],
        tools=[dict(t) for t in tools] or None,
        chat_template=_stopped_clock(today) + template,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    return rendered[0]


def _stopped_clock(today: str) -> str:
    """A macro in the place of the function that templates ask for the date. transformers lets no function through."""
    date = datetime.date.fromisoformat(today)
    codes = ("%Y", "%m", "%d", "%b", "%B", "%a", "%A")
    written = "".join(f" | replace({code!r}, {date.strftime(code)!r})" for code in codes)
    return f"{{%- macro strftime_now(format) -%}}{{{{- format{written} -}}}}{{%- endmacro %}}\n"


def _valid_unicode(text: str) -> str:
    """`text` with lone surrogates (which JSON escapes can make, and UTF-8 cannot hold) replaced by "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _no_special(spelling: str, name: str, known: Sequence[str]) -> ValueError:
    shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return ValueError(
        f"tokenizer {name!r} has no special token {spelling!r}. It has: {shown or 'none'}. "
        "Use a renderer whose markers this vocabulary holds (renderer_for picks one), or another checkpoint."
    )


# --- bytes ----------------------------------------------------------------------------------------

BYTE_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

BYTE_WORDS = ("system\n", "user\n", "assistant\n")
"""Texts that are one token, as a trained vocabulary would have them: spelled in bytes, the role lines of ChatML
would make up half of a short turn."""

BYTE_VOCAB_SIZE = 320
"""256 bytes, then BYTE_SPECIALS in order from id 256, then BYTE_WORDS, then unused ids up to a multiple of 64 (a
friendly matmul width). `encode` and `special` never give an unused id; `decode` shows one as <|unused_ID|>."""

_FIRST_SPECIAL = 256
_WORD = re.compile("(" + "|".join(map(re.escape, BYTE_WORDS)) + ")")

CHATML_TEMPLATE = """\
{%- set has_system = messages[0].role == 'system' %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if has_system %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
{{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif has_system %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- set thought = message.reasoning_content is defined and message.reasoning_content is not none %}
{%- if thought %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
{%- else %}
{{- message.content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML with the Hermes tools block and thoughts written wherever a message has them."""


@dataclass(frozen=True)
class ByteTokenizer:
    """One id a byte, special tokens, and a few whole words: a real tokenizer without any file."""

    name: str = "bytes"
    specials: tuple[str, ...] = BYTE_SPECIALS
    chat_template: str | None = field(default=CHATML_TEMPLATE, repr=False)
    template_variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def vocab_size(self) -> int:
        """A multiple of 64; BYTE_VOCAB_SIZE with the usual specials."""
        return -(-(self._first_word + len(BYTE_WORDS)) // 64) * 64

    @property
    def _first_word(self) -> int:
        return _FIRST_SPECIAL + len(self.specials)

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`, its BYTE_WORDS as one id each."""
        ids: list[int] = []
        for piece in _WORD.split(text):
            if piece in BYTE_WORDS:
                ids.append(self._first_word + BYTE_WORDS.index(piece))
            else:
                ids += piece.encode("utf-8", "replace")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; broken UTF-8 becomes U+FFFD. Raises ValueError for an id outside the vocabulary."""
        parts, run = [], bytearray()
        for i in ids:
            if 0 <= i < _FIRST_SPECIAL:
                run.append(i)
            elif 0 <= i - self._first_word < len(BYTE_WORDS):
                run += BYTE_WORDS[i - self._first_word].encode()
            else:
                parts += [run.decode("utf-8", "replace"), self._spelling(i)]
                run.clear()
        return "".join([*parts, run.decode("utf-8", "replace")])

    def special(self, spelling: str) -> int:
        """Id of one of the specials, else ValueError."""
        if spelling not in self.specials:
            raise _no_special(spelling, self.name, self.specials)
        return _FIRST_SPECIAL + self.specials.index(spelling)

    def _spelling(self, i: int) -> str:
        if not 0 <= i < self.vocab_size:
            raise ValueError(
                f"token id {i} is outside the byte vocabulary (0 to {self.vocab_size - 1}). "
                "Build the model with vocab_size=byte_tokenizer().vocab_size."
            )
        return self.specials[i - _FIRST_SPECIAL] if i < self._first_word else f"<|unused_{i}|>"


def byte_tokenizer(specials: Sequence[str] = BYTE_SPECIALS, *, chat_template: str | None = None) -> ByteTokenizer:
    """The hermetic tokenizer: 256 bytes and nine special tokens, vocabulary padded to 320.

    specials, chat_template: another family's markers and published template, to see what it writes without its files.
    """
    if tuple(specials) == BYTE_SPECIALS:
        return ByteTokenizer(chat_template=chat_template or CHATML_TEMPLATE)
    return ByteTokenizer(specials=tuple(specials), chat_template=chat_template)


# --- Hugging Face ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HFTokenizer:
    """A Hugging Face fast tokenizer, split in two: one that names every id, one that has never heard of specials.

    An added token that is ordinary text (a run of white space or an HTML tag, which Gemma keeps so) is known to both.

    `split_special_tokens=True` of transformers is not enough: it leaves added tokens that are flagged special=False
    (Qwen3's <think> and <tool_call>) active in text (measured with transformers 5.24). So text is encoded by a copy of
    the backend without its added vocabulary, which has no way to spell those ids.
    """

    name: str
    vocab_size: int
    chat_template: str | None = field(repr=False)
    template_variables: Mapping[str, str] = field(repr=False)
    specials: Mapping[str, int] = field(repr=False)
    full: tokenizers.Tokenizer = field(repr=False)
    text: tokenizers.Tokenizer = field(repr=False)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no BOS, no truncation, no special ids."""
        return self.text.encode(_valid_unicode(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` with special tokens spelled out. Ids of a padded embedding's tail decode to nothing."""
        return self.full.decode(list(ids), skip_special_tokens=False)

    def special(self, spelling: str) -> int:
        """Id of an added token, else ValueError."""
        if spelling not in self.specials:
            raise _no_special(spelling, self.name, tuple(self.specials))
        return self.specials[spelling]


def load_tokenizer(path: str) -> HFTokenizer:
    """The tokenizer in a Hugging Face directory (tokenizer.json and friends), or of a hub name."""
    try:
        pretrained = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer could be loaded from {path!r}: {error}. Expected a directory with tokenizer.json and "
            "tokenizer_config.json, or a name on the Hugging Face hub. For tests, byte_tokenizer() needs no files."
        ) from error
    return wrap(pretrained, name=str(path))


def wrap(pretrained: Any, name: str | None = None) -> HFTokenizer:
    """Wrap a transformers fast tokenizer that is already built (for example from GGUF metadata).

    Raises ValueError for a slow tokenizer, and when its added tokens cannot be kept out of plain text.
    """
    name = str(name or pretrained.name_or_path or type(pretrained).__name__)
    full = getattr(pretrained, "backend_tokenizer", None)
    if not isinstance(full, tokenizers.Tokenizer):
        raise ValueError(
            f"tokenizer {name!r} is a {type(pretrained).__name__} without a fast backend. "
            "Convert it to tokenizer.json (AutoTokenizer(..., use_fast=True).save_pretrained) and load that."
        )
    source = json.loads(full.to_str())
    added = [token for token in source["added_tokens"] if not _is_text(token)]
    wrapped = HFTokenizer(
        name=name,
        vocab_size=1 + max(full.get_vocab(with_added_tokens=True).values()),
        chat_template=_default_template(pretrained.chat_template),
        template_variables={k: str(v) for k, v in pretrained.special_tokens_map.items() if isinstance(v, str)},
        specials={token["content"]: token["id"] for token in added},
        full=full,
        text=_text_only(source, {token["content"] for token in added}),
    )
    for spelling, i in wrapped.specials.items():
        if i in wrapped.encode(spelling):
            raise ValueError(
                f"tokenizer {name!r} turns the plain text {spelling!r} into the special id {i}, so text from a tool "
                "could forge it. This kind of vocabulary is not supported; use a byte-level BPE checkpoint."
            )
    return wrapped


_SPACE = re.compile("[\\s\u2581]+")  # U+2581 stands for a space
_HTML = re.compile(
    "</?(a|b|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|s|span|strong|sub|sup|table|tbody|"
    "td|tfoot|th|thead|tr|u|ul)>"
)


def _is_text(token: Mapping[str, Any]) -> bool:
    """Whether an added token is ordinary text that some vocabularies keep so: white space, or an HTML tag that is not
    flagged as special (<s> is, where it starts a sequence)."""
    html = not token["special"] and _HTML.fullmatch(token["content"])
    return bool(html or _SPACE.fullmatch(token["content"]))


def _default_template(template: str | Mapping[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, Mapping) else template


def _text_only(source: dict[str, Any], specials: set[str]) -> tokenizers.Tokenizer:
    """A copy of a backend (as its JSON) that knows no added token, adds nothing and truncates nothing."""
    model = dict(source["model"])
    if isinstance(model.get("vocab"), dict):  # some vocabularies list the specials as words too
        keep_unknown = model.get("unk_token")
        model["vocab"] = {w: i for w, i in model["vocab"].items() if w not in specials or w == keep_unknown}
    added = [token for token in source["added_tokens"] if token["content"] not in specials]
    plain = source | {
        "model": model,
        "added_tokens": added,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return tokenizers.Tokenizer.from_str(json.dumps(plain))
