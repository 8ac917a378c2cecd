"""GGUF files: a llama.cpp model as a ModelConfig, a source of dequantised tensors, and a tokenizer.

Knows the architectures llama, qwen2 and qwen3; `gguf_file.py` knows the container. Metadata keys of the
architecture that are neither honoured nor listed as inert are refused by name.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_SPLIT

from jaxrl.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling, rope_frequencies
from jaxrl.models.gguf_file import GgufFile, open_gguf, read_tensor
from jaxrl.models.weights import Names, Source

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_HONOURED = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
}  # fmt: skip
_INERT = {"vocab_size", "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_used_count"}

_NAMES = Names(
    top={"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"},
    layer="blk.{}.",
    vectors={
        "input_norm": "attn_norm.weight",
        "post_norm": "ffn_norm.weight",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
    },
    projections={
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    },
)
_ROPE_FACTORS = "rope_freqs.weight"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types of the format


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The model a GGUF file describes. Raises ValueError for anything this package would compute differently."""
    meta = file.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"GGUF architecture {arch!r} is not supported; expected one of {', '.join(ARCHITECTURES)}")
    fields = {k.removeprefix(f"{arch}."): v for k, v in meta.items() if k.startswith(f"{arch}.")}
    unknown = {k: v for k, v in fields.items() if k not in _HONOURED | _INERT and v}
    if unknown:
        raise ValueError(f"the GGUF file has {arch} keys this package does not know: {unknown!r}")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    if _NAMES.top["embed"] not in shapes:
        raise ValueError(f"the GGUF file lacks the tensor {_NAMES.top['embed']}; is it a vocabulary-only file?")
    width, heads = _whole(fields, "embedding_length"), _whole(fields, "attention.head_count")
    head_width = _head_width(fields, width // heads)
    config = ModelConfig(
        vocab_size=shapes[_NAMES.top["embed"]][0],
        width=width,
        ff_width=_whole(fields, "feed_forward_length"),
        layers=_whole(fields, "block_count"),
        heads=heads,
        kv_heads=_whole(fields, "attention.head_count_kv", heads),
        head_width=head_width,
        max_positions=_whole(fields, "context_length"),
        rope_theta=float(fields.get("rope.freq_base", 10_000.0)),
        rope_scaling=_scaling(fields),
        norm_eps=_epsilon(fields),
        tie_embeddings=_NAMES.top["lm_head"] not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
    )
    return _with_rope_factors(config, file)


def _whole(fields: dict[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"GGUF key {key}={value!r}: expected a positive whole number, the same for every layer")
    return value


def _head_width(fields: dict[str, Any], default: int) -> int:
    width = _whole(fields, "attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, width) != width:
            raise ValueError(f"GGUF key {key}={fields[key]}: expected the width of a head, {width}")
    return width


def _epsilon(fields: dict[str, Any]) -> float:
    """The file's float32 as the decimal number it was made from (1e-05, not 9.999999747e-06)."""
    if "attention.layer_norm_rms_epsilon" not in fields:
        raise ValueError("the GGUF file lacks attention.layer_norm_rms_epsilon")
    return float(str(np.float32(fields["attention.layer_norm_rms_epsilon"])))


def _scaling(fields: dict[str, Any]) -> RopeScaling:
    kind = fields.get("rope.scaling.type", "linear" if "rope.scale_linear" in fields else "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ValueError(f"GGUF rope.scaling.type={kind!r} is not supported; expected none or linear")
    factor = float(fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 0)))
    return LinearScaling(factor) if factor else None


def _with_rope_factors(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Llama 3's scaling, which the format keeps only as the divisors it results in.

    The divisors of Llama 3.1 to 3.3 differ in `factor` alone, so that one is read off and the whole is verified.
    """
    if _ROPE_FACTORS not in file.tensors:
        return config
    divisors = read_tensor(file, _ROPE_FACTORS)
    if config.rope_scaling is not None or divisors.shape != (config.head_width // 2,):
        raise ValueError(f"{_ROPE_FACTORS} does not fit the model: {divisors.shape}, scaling {config.rope_scaling}")
    guess = replace(config, rope_scaling=Llama3Scaling(float(divisors.max()), 1.0, 4.0, 8192))
    if not np.allclose(rope_frequencies(config) / rope_frequencies(guess), divisors, rtol=1e-4):
        raise ValueError(
            f"{_ROPE_FACTORS} is not the scaling of Llama 3 (low 1, high 4, 8192 original positions): {divisors}; "
            "use the Hugging Face checkpoint of this model"
        )
    return guess


def gguf_names(config: ModelConfig) -> dict[str, Any]:
    """The tree of `spec.param_specs(config)` with the name of each tensor in a GGUF file as leaf."""
    return _NAMES.tree(config)


def gguf_source(file: GgufFile, config: ModelConfig) -> Source:
    """The tensors of a GGUF file, dequantised to float32 when read. Llama's q and k are put in halves order."""
    interleaved = file.metadata["general.architecture"] == "llama"

    def read(name: str) -> np.ndarray:
        array = read_tensor(file, name)
        return _halves(array, config.head_width) if interleaved and _rotated(name) else array

    return Source(str(file.path), {n: t.shape for n, t in file.tensors.items() if n != _ROPE_FACTORS}, read)


def _rotated(name: str) -> bool:
    return ".attn_q." in name or ".attn_k." in name


def _halves(array: np.ndarray, head_width: int) -> np.ndarray:
    """Rows of each head from pair order (x0 y0 x1 y1 …) to halves (x0 x1 … y0 y1 …)."""
    pairs = array.reshape(-1, head_width // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def tokenizer_from_gguf(path: Path | str) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer in a GGUF file, with its special tokens and chat template.

    Raises ValueError for another kind of tokenizer, or a way of splitting text this package does not know.
    """
    metadata = open_gguf(Path(path)).metadata

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.{key}", default)

    kind = get("ggml.model")
    if kind != "gpt2" or get("ggml.merges") is None:
        raise ValueError(
            f"{path}: tokenizer {kind!r} is not byte-level BPE; name the Hugging Face tokenizer of this model instead"
        )
    tokens, types = get("ggml.tokens"), get("ggml.token_type", [])
    backend = _bpe(tokens, types, get("ggml.merges"), str(get("ggml.pre")), str(path))
    special = {
        name: tokens[id_] for name, key in _SPECIAL_KEYS.items() if (id_ := get(f"ggml.{key}_token_id")) is not None
    }
    _add_marked(backend, tokens, types)
    ends = {"bos": get("ggml.add_bos_token", False), "eos": get("ggml.add_eos_token", False)}
    backend.post_processor = _post_processor({n: special[n] for n, on in ends.items() if on and n in special}, backend)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=get("chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )


def _bpe(tokens: list[str], types: list[int], merges: list[str], pre: str, where: str) -> Tokenizer:
    """Vocabulary and merges, with the splitting the merges were learned under."""
    split = pre_tokenizers.Split
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splits = {
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "qwen2": pre_tokenizers.Sequence([split(Regex(QWEN2_SPLIT), "isolated"), byte_level]),
        "llama-bpe": pre_tokenizers.Sequence([split(Regex(_LLAMA3_SPLIT), "isolated"), byte_level]),
    }
    if pre not in splits:
        raise ValueError(
            f"{where}: pre-tokenizer {pre!r} is not known; expected one of {', '.join(splits)}. "
            "Name the Hugging Face tokenizer of this model instead"
        )
    padded = types or [1] * len(tokens)
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, padded, strict=True)) if kind != _UNUSED}
    pairs = [(a, b) for a, b in (m.split(" ") for m in merges)]
    backend = Tokenizer(BPE(vocab, pairs, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = splits[pre]
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _add_marked(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are matched whole: control tokens as special ones, user-defined tokens as plain ones."""
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in marked if k == _CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in marked if k == _USER_DEFINED])


def _post_processor(ends: dict[str, str], backend: Tokenizer) -> Any:
    """Begin and end tokens where the file asks for them."""
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not ends:
        return byte_level
    template = [token for token in (ends.get("bos"), "$A", ends.get("eos")) if token is not None]
    special = [(token, backend.token_to_id(token)) for token in ends.values()]
    template_processing = processors.TemplateProcessing(single=template, special_tokens=special)
    return processors.Sequence([byte_level, template_processing])
