"""Configurations of Hugging Face checkpoints: every key honoured, refused by name, or known to be inert."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from model_cases import NAMES, expected, folder
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from jaxrl.models.config import LinearScaling, Llama3Scaling, ModelConfig, rope_frequencies
from jaxrl.models.hf import HONOURED, INERT, config_from_hf, config_to_hf, hf_names
from jaxrl.models.spec import param_specs
from jaxrl.models.weights import leaves

CLASSES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def raw(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A complete config of a family, changed; a change to None removes the key."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    full = CLASSES[family](**sizes, num_attention_heads=4, num_key_value_heads=2).to_dict() | changes
    return {k: v for k, v in full.items() if not (k in changes and v is None)}


@pytest.mark.parametrize("family", CLASSES)
def test_every_field_transformers_has_is_classified(family: str) -> None:
    cls = CLASSES[family]
    fields = {f.name for f in dataclasses.fields(cls)} | set(cls().to_dict())
    assert not fields - HONOURED[family] - INERT, "new in transformers: honour, refuse or list as inert"
    assert not HONOURED[family] & INERT


@pytest.mark.parametrize("family", CLASSES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    full = CLASSES[family]()
    config = config_from_hf(full.to_dict())
    assert config == config_from_hf({k: v for k, v in full.to_dict().items() if v is not None})
    assert (config.vocab_size, config.width, config.ff_width) == (
        full.vocab_size,
        full.hidden_size,
        full.intermediate_size,
    )
    sizes = {k: getattr(full, k) for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    bare = {"model_type": family, "num_attention_heads": full.num_attention_heads} | sizes
    assert config_from_hf(bare) == config


@pytest.mark.parametrize("name", NAMES)
def test_rope_frequencies_equal_transformers(name: str) -> None:
    config = config_from_hf(json.loads((folder(name) / "config.json").read_text()))
    np.testing.assert_allclose(rope_frequencies(config), expected(name)["inv_freq"], rtol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_config_goes_out_and_comes_back(name: str) -> None:
    config = config_from_hf(json.loads((folder(name) / "config.json").read_text()))
    out = config_to_hf(config)
    assert config_from_hf(out) == config
    assert config_from_hf(CLASSES[out["model_type"]](**out).to_dict()) == config  # as transformers understood it


def test_names_cover_the_tree_once() -> None:
    config = config_from_hf(raw("qwen3", attention_bias=True))
    names = [leaf.name for leaf in leaves(config, hf_names(config))]
    assert len(set(names)) == len(names)
    assert set(hf_names(config)) == set(param_specs(config))
    assert "model.layers.2.self_attn.q_proj.bias" in names


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 7.0, "rope_scaling": None, "rope_parameters": None}, 7.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 4}, "rope_parameters": None}, 1e4, LinearScaling(4.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}}, 9.0, LinearScaling(2.0)),
        (
            {
                "rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
                "rope_theta": 5e5,
                "max_position_embeddings": 512,
            },
            5e5,
            Llama3Scaling(8.0, 1.0, 4.0, 512),
        ),
        ({"rope_parameters": {"rope_theta": 3.0, "partial_rotary_factor": 1.0}}, 3.0, None),
    ],
)
def test_both_styles_of_rope(rope: dict[str, Any], theta: float, scaling: Any) -> None:
    config = config_from_hf(raw("llama", **rope))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_windows() -> None:
    on: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "layer_types": None}
    assert config_from_hf(raw("qwen2", **on, max_window_layers=2)).windows == (None, None, 6)
    assert config_from_hf(raw("qwen2", **on, max_window_layers=0)).windows == (6, 6, 6)
    assert config_from_hf(raw("qwen2", **on, max_window_layers=3)).windows == ()
    assert config_from_hf(raw("qwen2", **on | {"use_sliding_window": False}, max_window_layers=0)).windows == ()


def test_keys_of_well_known_checkpoints_are_inert() -> None:
    smollm2 = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
    assert config_from_hf(raw("llama", **smollm2, torch_dtype="bfloat16", pretraining_tp=2)) == config_from_hf(raw())


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("llama", {"model_type": "mamba"}, "model_type='mamba' is not supported; expected one of llama, qwen2, qwen3"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu' is not supported; expected one of silu"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1: expected 0"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*awq.*unquantised"),
        ("llama", {"rope_interleaved": True}, "does not know: rope_interleaved=True"),
        ("llama", {"sliding_window": 4096}, "does not know: sliding_window=4096"),
        ("llama", {"num_experts": 8}, "num_experts=8"),
        ("qwen2", {"attention_bias": True}, "the qwen2 config has keys .*attention_bias=True"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "expected a causal language model"),
        ("llama", {"is_encoder_decoder": True}, "decoder-only"),
        ("llama", {"vocab_size": None}, "lacks vocab_size"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0: expected a positive whole number"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5': expected a positive number"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not supported"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "rope_type='dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "does not know: {'factor': 2.0}"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor=None: expected a positive number"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: expected 1.0"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: expected 1.0"),
        ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta=5.0 .* 6.0 .* disagree"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is false"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types has linear_attention"),
        ("llama", {"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_refusals_name_key_and_value(family: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        config_from_hf(raw(family, **changes))


def test_a_combination_no_family_has_is_not_exported() -> None:
    config = ModelConfig(61, 32, 40, 2, 4, 2, 8, 64, qkv_bias=True, mlp_bias=True)
    with pytest.raises(ValueError, match=r"qkv_bias=True, out_bias=False, mlp_bias=True.*cannot be exported"):
        config_to_hf(config)
