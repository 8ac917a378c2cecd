"""Which renderer suits a model, by its name.

Knows how published models are named, and names of renderers (families.py). Must not know templates, tokenizers or how a
family writes its turns. What a checkpoint's own chat template says counts for more than its name: see
`families.recognise`.
"""

import re
from collections.abc import Iterable

BASE_MODEL = "role_colon"
"""The renderer of models that were never taught a chat format."""

_SIZE = r"-(?:[ae]?\d+(?:\.\d+)?[bm]-?)+"
_QUANTIZED = r"(?:[-_.](?:gguf|awq|gptq|fp8|int4|int8|4bit|8bit|bnb|mlx|unsloth|dynamic|q\d\w*|bf16|f16|f32))*"

_ROWS: tuple[tuple[str, str], ...] = (
    # Sizes without "instruct", "it" or "chat" are base models, where the chat model's name has that word.
    (r"[-_](?:base|pt)(?![a-z]|[-_]br)", BASE_MODEL),
    (rf"^(?:qwen2\.5|smollm2|(?:meta-)?llama-?3(?:\.\d)?)(?:-coder)?{_SIZE}{_QUANTIZED}$", BASE_MODEL),
    (rf"^(?:gemma-?3-270m|mistral-7b-v0\.3){_QUANTIZED}$", BASE_MODEL),
    # Before the models it was distilled into.
    (r"deepseek[-_]?r1(?!-zero)", "deepseek_r1"),
    (r"deepseek[-_]?v3\.1", "deepseek_v3.1"),
    (r"deepseek[-_]?v3(?![.\d])", "deepseek_v3"),
    (r"qwq(?!-32b-preview)", "qwq"),
    (r"qwen3-coder(?!-next)", "qwen3_coder"),
    (r"qwen3-(?!vl|omni|embedding|reranker)[a-z0-9.-]*thinking", "qwen3_thinking"),
    (r"qwen3-(?!vl|omni|embedding|reranker|coder)[a-z0-9.-]*instruct", "qwen3_instruct"),
    (r"qwen3\.[56](?!\d)", "qwen3.5"),
    (r"qwen3(?![.\d]|-?(?:vl|omni|embedding|reranker|coder|guard))", "qwen3"),
    (r"qwen2\.5(?!-?(?:vl|omni|math))", "qwen2.5"),
    (r"llama-?3[._]?2(?!\d|[a-z0-9.-]*vision)", "llama3.2"),
    (r"llama-?3[._]?[13](?!\d)", "llama3.1"),
    (r"llama-?3(?![.\d])", "llama3"),
    (r"gemma-?3(?![\dn])", "gemma3"),
    (r"gpt[-_]oss(?!-safeguard)", "gpt_oss"),
    (r"kimi[-_]k2[-_]thinking", "kimi_k2_thinking"),
    (r"kimi[-_]k2(?![.\d])", "kimi_k2"),
    (r"glm-?4\.7", "glm4.7"),
    (r"glm-?4\.[56](?![\dv])", "glm4.5"),
    (r"mistral[-_]nemo", "mistral_v3"),
    (r"mistral-small-3\.2|mistral-small[a-z0-9.-]*2506", "mistral_v11"),
    (r"devstral-small-(?:2507|1\.1)", "devstral"),
    (r"ministral-3-[a-z0-9.-]*reasoning", "ministral3_reasoning"),
    (r"smollm2", "smollm2"),
)
"""Patterns of a name in lower case, and the renderer of those it is found in; the first that fits counts."""


def recommended_renderer(model_name: str) -> str:
    """The renderer for a model, by a hub id or a path: "Qwen/Qwen3-8B" gives "qwen3".

    Of a path, the last part that says anything counts. Raises ValueError when nothing is known of such a name.
    """
    found = known_renderer(model_name)
    if found is None:
        raise ValueError(
            f"nothing is known of a model named {model_name!r}, so no renderer can be recommended. Name one: the "
            "family it was trained from (such as 'qwen3'), 'template' for what its own chat template writes, or "
            f"{BASE_MODEL!r} for a base model without a chat format"
        )
    return found


def known_renderer(model_name: str) -> str | None:
    """The same, or None when nothing is known."""
    parts = [part for part in re.split(r"[/\\]+", model_name.lower()) if part]
    return next((renderer for part in reversed(parts) for renderer in _fitting(part)), None)


def recommended_names() -> frozenset[str]:
    """Every renderer that the table can recommend."""
    return frozenset(renderer for _, renderer in _ROWS)


def _fitting(part: str) -> Iterable[str]:
    return (renderer for pattern, renderer in _ROWS if re.search(pattern, part))
