"""What is written for other programs is read back the same, by us and by them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import NAMES, expected, folder, our_logits, random_adapter, random_params
from safetensors.numpy import load_file

from jaxrl.models.config import ModelConfig
from jaxrl.models.export import load_peft, save_hf, save_peft
from jaxrl.models.hf import hf_names
from jaxrl.models.load import load_model
from jaxrl.models.lora import LoraConfig, merge
from jaxrl.models.weights import leaves

LORA = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"))
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft (and torch) is not installed")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["llama_scaled", "qwen2_types"])
def test_a_checkpoint_comes_back(name: str, dtype: Any, tmp_path: Path) -> None:
    model = load_model(folder(name), dtype=dtype)
    save_hf(tmp_path / "out", model.config, model.params, extra={"eos_token_id": 7})
    back = load_model(tmp_path / "out", dtype=dtype)
    assert back.config == model.config
    jax.tree.map(np.testing.assert_array_equal, back.params, model.params)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["eos_token_id"], raw["dtype"]) == (7, jnp.dtype(dtype).name)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_written_once(name: str, tmp_path: Path) -> None:
    """Also for tied models: no output matrix, whether missing or twice (prime-rl#1765)."""
    model = load_model(folder(name), dtype=jnp.float32)
    save_hf(tmp_path / "out", model.config, model.params, shard_bytes=20_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    names = [n for f in files for n in load_file(f)]
    assert sorted(names) == sorted(leaf.name for leaf in leaves(model.config, hf_names(model.config)))
    assert ("lm_head.weight" in names) != model.config.tie_embeddings
    back = load_model(tmp_path / "out", dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, back.params, model.params)


def test_merged_adapter_comes_back(tmp_path: Path) -> None:
    model, want = load_model(folder("qwen3_biased"), dtype=jnp.float32), expected("qwen3_biased")
    adapter = random_adapter(model.config, LORA)
    save_hf(tmp_path / "out", model.config, merge(model.params, adapter, LORA))
    merged = load_model(tmp_path / "out", dtype=jnp.float32)
    unmerged = our_logits(model.config, model.params, want["tokens"], adapter=adapter, lora_scale=LORA.scale)
    np.testing.assert_allclose(our_logits(merged.config, merged.params, want["tokens"]), unmerged, atol=5e-5)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    model = load_model(folder("qwen3_plain"), dtype=jnp.float32)
    (tmp_path / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="is not an empty directory; choose another path"):
        save_hf(tmp_path, model.config, model.params)
    with pytest.raises(FileExistsError, match="not an empty directory"):
        save_peft(tmp_path, random_adapter(model.config, LORA), LORA, model.config)


def test_extra_keys_may_not_change_the_model(tmp_path: Path) -> None:
    model = load_model(folder("qwen3_plain"), dtype=jnp.float32)
    with pytest.raises(ValueError, match="changes the model"):
        save_hf(tmp_path / "out", model.config, model.params, extra={"rms_norm_eps": 1.0})


def test_adapter_comes_back(tmp_path: Path) -> None:
    config = load_model(folder("qwen3_plain"), dtype=jnp.float32).config
    adapter = random_adapter(config, LORA)
    save_peft(tmp_path / "a", adapter, LORA, config, base_model="org/model")
    back, lora = load_peft(tmp_path / "a", config)
    assert lora == LORA
    jax.tree.map(np.testing.assert_array_equal, back, adapter)


def test_adapter_has_the_names_and_shapes_of_peft(tmp_path: Path) -> None:
    """Under any other prefix PEFT loads an adapter as a no-op (prime-rl#2242)."""
    config = load_model(folder("qwen3_plain"), dtype=jnp.float32).config
    save_peft(tmp_path / "a", random_adapter(config, LORA), LORA, config)
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(tensors) == 3 * 2 * config.layers
    down = "base_model.model.model.layers.2.mlp.down_proj"
    assert tensors[f"{down}.lora_A.weight"].shape == (4, config.ff_width)
    assert tensors[f"{down}.lora_B.weight"].shape == (config.width, 4)
    assert all(n.startswith("base_model.model.model.layers.") for n in tensors)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3', expected 'LORA'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all' is not supported; expected 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"target_modules": "all-linear"}, "target_modules='all-linear': expected a list"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lora targets.*lm_head"),
        ({"target_modules": ["q_proj", "o_proj"]}, "unexpected .*down_proj.lora_A"),
        ({"target_modules": ["q_proj", "o_proj", "down_proj", "k_proj"]}, "missing .*k_proj.lora_A"),
        ({"r": 8}, "wrong shapes"),
    ],
)
def test_adapters_we_would_compute_differently_are_refused(changes: Any, match: str, tmp_path: Path) -> None:
    config = load_model(folder("qwen3_plain"), dtype=jnp.float32).config
    save_peft(tmp_path / "a", random_adapter(config, LORA), LORA, config)
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=match):
        load_peft(tmp_path / "a", config)


def test_rank_stabilised_scale_is_kept(tmp_path: Path) -> None:
    config = load_model(folder("qwen3_plain"), dtype=jnp.float32).config
    save_peft(tmp_path / "a", random_adapter(config, LORA), LORA, config)
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    assert load_peft(tmp_path / "a", config)[1].scale == pytest.approx(6.0 / 4**0.5)


def test_no_adapter_here(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config.json"):
        load_peft(tmp_path, ModelConfig(61, 32, 40, 2, 4, 2, 8, 64))


@pytest.mark.parametrize("name", ["qwen3_biased", "llama_biased"])
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own use of transformers
@needs_peft
def test_peft_computes_our_logits(name: str, tmp_path: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model, want = load_model(folder(name), dtype=jnp.float32), expected(name)
    lora = LoraConfig(rank=4, alpha=6.0)
    adapter = random_adapter(model.config, lora)
    save_peft(tmp_path / "a", adapter, lora, model.config)
    base = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "a"))
    with torch.no_grad():
        got = theirs(torch.as_tensor(want["tokens"].astype(np.int64))).logits.numpy()
    ours = our_logits(model.config, model.params, want["tokens"], adapter=adapter, lora_scale=lora.scale)
    assert np.abs(ours - want["logits"]).max() > 0.1
    np.testing.assert_allclose(got, ours, atol=2e-4)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own use of transformers
@needs_peft
def test_what_peft_saves_is_read(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder("qwen3_plain"))
    targets = ["gate_proj", "v_proj"]
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets))
    theirs.save_pretrained(str(tmp_path / "a"))
    config = load_model(folder("qwen3_plain"), dtype=jnp.float32).config
    adapter, lora = load_peft(tmp_path / "a", config)
    assert lora == LoraConfig(2, 8.0, ("v_proj", "gate_proj"))
    assert np.abs(np.asarray(adapter["v_proj"]["a"])).max() > 0


def test_a_tree_of_another_model_is_not_written(tmp_path: Path) -> None:
    config = ModelConfig(61, 32, 40, 2, 4, 2, 8, 64)
    other = random_params(ModelConfig(61, 32, 48, 2, 4, 2, 8, 64))
    with pytest.raises(ValueError, match=r"layers/0/down_proj is \[48, 32\], expected \[40, 32\]"):
        save_hf(tmp_path / "out", config, other)
