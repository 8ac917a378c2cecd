"""Hugging Face checkpoints: their `config.json` read as a ModelConfig, and their tensor names beside our tree.

Knows the families llama, qwen2 and qwen3 (dense) as transformers 5 defines them. Every key of a config is either
honoured, refused by name, or listed below as inert; a key nobody listed is refused as well, unless it is null or
false, because silently dropping one computes a different model. Knows nothing of files: `load.py` reads them,
`export.py` writes them.
"""

from collections.abc import Mapping
from typing import Any, Literal

from jaxrl.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling
from jaxrl.models.weights import Names

FAMILIES = ("llama", "qwen2", "qwen3")

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SHARED = {
    *_SIZES, "model_type", "architectures", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings",
    "rms_norm_eps", "tie_word_embeddings", "attention_dropout", "is_encoder_decoder", "quantization_config",
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
}  # fmt: skip
_WINDOWED = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}

HONOURED = {
    "llama": _SHARED | {"attention_bias", "mlp_bias"},
    "qwen2": _SHARED | _WINDOWED,
    "qwen3": _SHARED | _WINDOWED | {"attention_bias"},
}
"""By family, the keys `config_from_hf` reads: to honour them, or to refuse values it cannot honour."""

INERT = {
    # who wrote the file, and with what
    "_name_or_path", "name_or_path", "transformers_version", "auto_map", "transformers.js_config", "unsloth_fixed",
    "unsloth_version", "is_llama_config", "model_name", "_commit_hash", "_attn_implementation",
    # precision and memory: the caller chooses the dtype and the cache
    "dtype", "torch_dtype", "use_cache", "_attn_implementation_autoset", "chunk_size_feed_forward",
    "pretraining_tp",  # the same sums in another order; transformers 5 no longer reads it
    # training and initialisation
    "initializer_range",
    # tokens by name: the tokenizer's and the renderer's business
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "pad_token", "bos_token",
    "eos_token", "decoder_start_token_id",
    # what the transformers classes return, and classification heads that a causal model does not have
    "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "task_specific_params",
    # old generation defaults
    "temperature", "top_p", "top_k", "do_sample", "max_length", "min_length", "max_new_tokens", "num_beams",
    "repetition_penalty", "num_return_sequences", "num_beam_groups", "diversity_penalty", "length_penalty",
    "typical_p", "encoder_no_repeat_ngram_size",
}  # fmt: skip
"""Keys that cannot change the numbers a forward pass computes."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}  # what transformers assumes where the file is silent, where families differ

_Activation = Literal["silu", "gelu", "gelu_tanh"]

ACTIVATIONS: dict[str, _Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}

_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}  # besides rope_type (or type), rope_theta and partial_rotary_factor

PROJECTIONS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
"""Our name of a projection and the module of a decoder layer that holds it."""


_NAMES = Names(
    top={"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"},
    layer="model.layers.{}.",
    vectors={
        "input_norm": "input_layernorm.weight",
        "post_norm": "post_attention_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
    },
    projections=PROJECTIONS,
)


def hf_names(config: ModelConfig) -> dict[str, Any]:
    """The tree of `spec.param_specs(config)` with the name of each tensor in a Hugging Face checkpoint as leaf."""
    return _NAMES.tree(config)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """The model a `config.json` describes.

    Raises ValueError, naming key and value, for anything this package would compute differently.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r} is not supported; expected one of {', '.join(FAMILIES)}")
    _refuse_unknown(raw, family)
    _refuse_unsupported(raw)
    absent = [k for k in _SIZES if raw.get(k) is None]
    if absent:
        raise ValueError(f"the {family} config lacks {', '.join(absent)}; a complete config.json states them")
    fields = _DEFAULTS[family] | dict(raw)
    heads = _count(fields, "num_attention_heads")
    width = _count(fields, "hidden_size")
    max_positions = _count(fields, "max_position_embeddings")
    theta, scaling = _rope(fields, max_positions)
    attention_bias = bool(fields.get("attention_bias"))
    return ModelConfig(
        vocab_size=_count(fields, "vocab_size"),
        width=width,
        ff_width=_count(fields, "intermediate_size"),
        layers=_count(fields, "num_hidden_layers"),
        heads=heads,
        kv_heads=_count(fields, "num_key_value_heads", heads),
        head_width=_count(fields, "head_dim", width // heads),
        max_positions=max_positions,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(fields, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(fields.get("tie_word_embeddings")),
        activation=_activation(fields.get("hidden_act") or "silu"),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias")),
        qk_norm=family == "qwen3",
        windows=_windows(fields) if family != "llama" else (),
    )


def _refuse_unknown(raw: Mapping[str, Any], family: str) -> None:
    known = HONOURED[family] | INERT
    unknown = [k for k, v in raw.items() if k not in known and v is not None and v is not False]
    if unknown:
        shown = ", ".join(f"{k}={raw[k]!r}" for k in sorted(unknown))
        raise ValueError(
            f"the {family} config has keys this package does not know: {shown}. If they do not change what the model "
            "computes, remove them from config.json; if they do, the model is not supported"
        )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"quantization_config={raw['quantization_config']!r}: quantised Hugging Face checkpoints are not read; "
            "give the unquantised checkpoint, or a .gguf file"
        )
    if raw.get("attention_dropout"):
        raise ValueError(
            f"attention_dropout={raw['attention_dropout']!r}: expected 0, dropout would make the trainer's log-probs "
            "differ from the sampler's; set it to 0.0 in config.json to use the model without dropout"
        )
    if raw.get("is_encoder_decoder"):
        raise ValueError("is_encoder_decoder=True: expected a decoder-only model")
    for name in raw.get("architectures") or ():
        if not name.endswith("ForCausalLM"):
            raise ValueError(f"architectures={raw['architectures']!r}: expected a causal language model (…ForCausalLM)")


def _count(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = fields.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}={value!r}: expected a positive whole number")
    return value


def _number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = fields.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{key}={value!r}: expected a positive number")
    return float(value)


def _activation(name: str) -> _Activation:
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act={name!r} is not supported; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rope(fields: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling")
    if new and old and new != old:
        raise ValueError(f"rope_parameters={new!r} and rope_scaling={old!r} disagree; keep one of them")
    rope = dict(new or old or {})
    kind = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    if kind not in _ROPE_KEYS:
        raise ValueError(f"rope_type={kind!r} is not supported; expected one of {', '.join(_ROPE_KEYS)}")
    theta = _agreed(fields, rope, "rope_theta", 10_000.0)
    partial = _agreed(fields, rope, "partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor={partial!r}: expected 1.0, rotation of only a part is not supported")
    extra = {k: v for k, v in rope.items() if k not in _ROPE_KEYS[kind] and v is not None}
    if extra:
        raise ValueError(f"rope_type={kind!r} has keys this package does not know: {extra!r}")
    if kind == "linear":
        return theta, LinearScaling(_number(rope, "factor"))
    if kind == "llama3":
        original = _count(rope, "original_max_position_embeddings", max_positions)
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        return theta, Llama3Scaling(_number(rope, "factor"), low, high, original)
    return theta, None


def _agreed(fields: Mapping[str, Any], rope: dict[str, Any], key: str, default: float) -> float:
    """A number that may stand in the config, in its rope dict, or in both with the same value."""
    outer, inner = fields.get(key), rope.pop(key, None)
    if outer is not None and inner is not None and outer != inner:
        raise ValueError(f"{key}={outer!r} in the config and {inner!r} among its rope parameters disagree; keep one")
    return _number({key: outer if inner is None else inner}, key, default)


def _windows(fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    """One window a layer, or () when every layer sees everything."""
    layers = _count(fields, "num_hidden_layers")
    window = _count(fields, "sliding_window", 4096) if fields.get("use_sliding_window") else None
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for num_hidden_layers={layers}; give one per layer")
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise ValueError(f"layer_types has {', '.join(strange)}; expected full_attention or sliding_attention")
    if "sliding_attention" in kinds and window is None:
        raise ValueError(
            "layer_types has sliding_attention but use_sliding_window is false; set use_sliding_window=true and "
            "sliding_window, or make every layer full_attention"
        )
    return tuple(window if k == "sliding_attention" else None for k in kinds) if "sliding_attention" in kinds else ()


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` that `config_from_hf` and transformers both read as this model.

    Raises ValueError for a combination that none of the three families has.
    """
    family = _family(config)
    raw: dict[str, Any] = {
        "model_type": family,
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ff_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[config.activation],
        "rope_parameters": {"rope_theta": config.rope_theta} | _rope_to_hf(config.rope_scaling),
        # Transformers fills in token ids of its own where these are missing, which would be another tokenizer's.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "llama":
        return raw | {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if family == "qwen3":
        raw["attention_bias"] = config.qkv_bias
    window = next((w for w in config.windows if w), None)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in config.layer_windows]
    return raw | {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}


def _family(config: ModelConfig) -> str:
    uniform = len({w for w in config.windows if w is not None}) <= 1
    attention = config.qkv_bias == config.out_bias
    if config.qk_norm and attention and not config.mlp_bias and uniform:
        return "qwen3"
    if not config.qk_norm and attention and not config.windows:
        return "llama"
    if not config.qk_norm and config.qkv_bias and not config.out_bias and not config.mlp_bias and uniform:
        return "qwen2"
    raise ValueError(
        f"none of {', '.join(FAMILIES)} has this combination: qkv_bias={config.qkv_bias}, out_bias={config.out_bias}, "
        f"mlp_bias={config.mlp_bias}, qk_norm={config.qk_norm}, windows={config.windows}; it cannot be exported"
    )


def _rope_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    match scaling:
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return {"rope_type": "default"}
