"""Small random models of each family, and the logits transformers computes for them.

`python tests/models/make_fixtures.py` rewrites tests/models/fixtures (needs torch). Each case is a checkpoint
directory as transformers saves it, with `expected.npz`: tokens [2, 24] and float32 logits [2, 24, V]. Weights are
stored in bfloat16, and the logits are computed from the stored values in float32. Every field that changes the
function is moved off its default in some case, and every parameter is random (transformers starts biases at 0 and
norms at 1, which would hide them).
"""

import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"
TOKENS = (2, 24)

_SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "rms_norm_eps": 1e-3}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_biased": (
        "llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.5},
            "max_position_embeddings": 96,
        },
    ),
    "llama_scaled": (
        "llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 48,
            },
            "max_position_embeddings": 192,
        },
    ),
    "qwen2_window": (
        "qwen2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "qwen2_types": (
        "qwen2",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "hidden_act": "gelu",
        },
    ),
    "qwen3_biased": (
        "qwen3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 20,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        },
    ),
    "qwen3_plain": ("qwen3", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}),
}


def reference(name: str, *, seed: int, dtype: str) -> Any:
    """The transformers model of a case, all parameters random and representable in `dtype`, held in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, fields = CASES[name]
    config = AutoConfig.for_model(family, **_SMALL | fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            value = 1 + 0.3 * noise if p.ndim == 1 and "bias" not in key else noise * (1.5 * p.shape[-1] ** -0.5)
            p.copy_(value.to(getattr(torch, dtype)).float())
    return model


def logits(model: Any, tokens: Any) -> Any:
    """Float32 logits of transformers, as numpy."""
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(tokens)).logits.numpy()


def main() -> None:
    import numpy as np
    import torch

    for seed, name in enumerate(CASES):
        folder = FIXTURES / name
        model = reference(name, seed=seed, dtype="bfloat16")
        tokens = np.random.default_rng(seed).integers(0, _SMALL["vocab_size"], TOKENS, np.int32)
        expected = logits(model, tokens.astype(np.int64))
        inv_freq = model.model.rotary_emb.inv_freq.numpy()
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=expected, inv_freq=inv_freq)
        if name == "llama_scaled":  # as configurations looked before transformers 5
            _legacy(folder / "config.json")
        print(name, sum(f.stat().st_size for f in folder.iterdir()) // 1000, "kB")


def _legacy(file: Path) -> None:
    raw = json.loads(file.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope | {"type": rope["rope_type"]}
    raw["torch_dtype"] = raw.pop("dtype")
    file.write_text(json.dumps(raw, indent=2) + "\n")


if __name__ == "__main__":
    main()
