"""Checkpoint directories: what is refused and when, how much memory loading takes, and where weights end up."""

import json
import re
import shutil
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from model_cases import folder, random_params
from safetensors.numpy import load_file, save_file

from jaxrl.models import load, weights
from jaxrl.models.config import ModelConfig
from jaxrl.models.export import save_hf
from jaxrl.models.hf import hf_names
from jaxrl.models.load import inspect_model, load_model, load_tokenizer, safetensors_source
from jaxrl.models.sharding import make_mesh, shardings
from jaxrl.models.spec import abstract, logical_axes, param_specs


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy that a test may damage; tied, so it has no lm_head."""
    return Path(shutil.copytree(folder("qwen3_biased"), tmp_path / "checkpoint"))


def change(checkpoint: Path, **tensors: Any) -> None:
    """Rewrite the weights: None removes a tensor, an array adds or replaces it. `__` stands for a dot."""
    file = checkpoint / "model.safetensors"
    new = load_file(file) | {k.replace("__", "."): v for k, v in tensors.items()}
    save_file({k: v for k, v in new.items() if v is not None}, file)


def refused(checkpoint: Path, match: str, error: type[Exception] = ValueError) -> None:
    """Loading raises before a single tensor is converted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "assemble", lambda *_, **__: pytest.fail("weights were read"))
        with pytest.raises(error, match=match):
            load_model(checkpoint, dtype=jnp.float32)


def test_a_name_that_leads_nowhere(tmp_path: Path) -> None:
    for name in ("./nothing/here", str(tmp_path / "nothing"), "missing.gguf", "one-word"):
        with pytest.raises(FileNotFoundError, match=re.escape(name) + ".*no such file.*config.json.*gguf.*hub id"):
            inspect_model(name)


def test_a_file_that_is_no_model(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a directory nor a \.gguf file"):
        inspect_model(checkpoint / "config.json")


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"org/model: .*the hub cannot be reached.*give the directory"):
        load_model("org/model", dtype=jnp.float32)


def test_the_hub_is_asked_only_for_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folder("qwen3_plain"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    inspect_model("org/model")
    load_model("org/model", dtype=jnp.float32)
    assert asked[0] == ("org/model", ["config.json"])
    assert "*.bin" not in asked[1][1]
    assert "model.safetensors" in asked[1][1]


def test_directory_without_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    refused(checkpoint, "checkpoint has no config.json", FileNotFoundError)


def test_broken_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    refused(checkpoint, r"config.json is not valid JSON")
    (checkpoint / "config.json").write_text("[]")
    refused(checkpoint, r"config.json: expected a JSON object, got list")


def test_unsupported_config_names_the_file(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "mamba"}')
    refused(checkpoint, r"config.json: model_type='mamba' is not supported")


def test_directory_without_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    refused(checkpoint, "neither model.safetensors nor.*pytorch_model.bin: convert", FileNotFoundError)


@pytest.mark.parametrize("part", [0, 5, 200, 5000, -1])
def test_truncated_weights(checkpoint: Path, part: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:part])
    refused(checkpoint, r"model.safetensors \(\d+ bytes\) is not a complete safetensors file.*download it again")


def test_missing_tensor(checkpoint: Path) -> None:
    change(checkpoint, model__layers__1__mlp__up_proj__weight=None)
    refused(checkpoint, r"missing tensors: model.layers.1.mlp.up_proj.weight\. Hint")


def test_unexpected_tensor(checkpoint: Path) -> None:
    change(checkpoint, model__layers__1__mlp__up_proj__bias=np.zeros(40, np.float32))
    refused(checkpoint, r"unexpected tensors: model.layers.1.mlp.up_proj.bias")


def test_wrong_shape(checkpoint: Path) -> None:
    change(checkpoint, model__norm__weight=np.zeros(7, np.float32))
    refused(checkpoint, r"wrong shapes: model.norm.weight is \[7\], expected \[32\]")


def test_quantised_tensor(checkpoint: Path) -> None:
    change(checkpoint, model__norm__weight=np.zeros(32, np.int8))
    refused(checkpoint, r"model.norm.weight \(I8\) is not one of F64, F32, F16, BF16")


def test_untied_model_without_head_gets_a_hint(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {"tie_word_embeddings": False}
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused(checkpoint, r"missing tensors: lm_head.weight. Hint: .*set tie_word_embeddings=true")


def test_a_tied_head_that_repeats_the_embedding_is_accepted(checkpoint: Path) -> None:
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    change(checkpoint, lm_head__weight=embedding)
    assert "lm_head" not in load_model(checkpoint, dtype=jnp.float32).params
    change(checkpoint, lm_head__weight=embedding * 2)
    refused(checkpoint, "tie_word_embeddings is true, but lm_head.weight differs")


def test_rotary_buffers_of_old_checkpoints_are_ignored(checkpoint: Path) -> None:
    change(checkpoint, model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(10, np.float32))
    load_model(checkpoint, dtype=jnp.float32)


def sharded(checkpoint: Path) -> dict[str, str]:
    """Split the weights over two files with an index; returns the index's map."""
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {name: files[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, checkpoint / file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def test_shards_hold_the_same_model(checkpoint: Path) -> None:
    whole = load_model(checkpoint, dtype=jnp.float32).params
    sharded(checkpoint)
    jax.tree.map(np.testing.assert_array_equal, load_model(checkpoint, dtype=jnp.float32).params, whole)


def test_shard_missing(checkpoint: Path) -> None:
    sharded(checkpoint)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    refused(checkpoint, "00002-of-00002.safetensors is missing, model.safetensors.index.json lists", FileNotFoundError)


def test_tensor_in_two_shards(checkpoint: Path) -> None:
    where = sharded(checkpoint)
    name = next(n for n, f in where.items() if "00001" in f)
    second = checkpoint / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {name: np.zeros(3, np.float32)}, second)
    refused(checkpoint, f"tensor {re.escape(name)} is in both")


def test_index_that_promises_too_much(checkpoint: Path) -> None:
    where = sharded(checkpoint) | {"model.more.weight": "model-00001-of-00002.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    refused(checkpoint, "00001-of-00002.safetensors lacks model.more.weight, which the index says it holds")


def test_no_tokenizer(checkpoint: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer \(tokenizer.json"):
        load_tokenizer(str(checkpoint))


def test_placed_by_shardings() -> None:
    mesh = make_mesh(fsdp=2, tensor=2)
    source = folder("qwen2_window")
    config = inspect_model(source)
    rules = {"embed": ("fsdp",), "heads": ("tensor",), "kv_heads": ("tensor",), "mlp": ("tensor",), "vocab": ()}
    specs = param_specs(config)
    tree = shardings(mesh, logical_axes(specs), abstract(specs, jnp.float32), rules)
    plain = load_model(source, dtype=jnp.float32).params
    placed = load_model(source, dtype=jnp.float32, shardings=tree).params
    jax.tree.map(np.testing.assert_array_equal, placed, plain)
    assert jax.tree.map(lambda x: x.sharding, placed) == tree
    q = placed["layers"][0]["q_proj"]
    assert {s.data.shape for s in q.addressable_shards} == {(q.shape[0] // 2, q.shape[1] // 2)}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 MB in float32, the largest tensor 1 MB."""
    config = ModelConfig(2000, 128, 512, 12, 4, 4, 32, 64)
    path = tmp_path_factory.mktemp("larger") / "checkpoint"
    save_hf(path, config, random_params(config))
    return path


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loading_holds_the_model_once(larger: Path, dtype: Any) -> None:
    """Host memory while loading: what the CPU device holds, and a few copies of one tensor."""
    load_model(larger, dtype=dtype)  # what is compiled or cached once
    tracemalloc.start()
    params = load_model(larger, dtype=dtype).params
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    leaves = jax.tree.leaves(params)
    largest = 4 * max(x.size for x in leaves)
    assert peak < sum(x.nbytes for x in leaves) + 3 * largest + 1_000_000


def test_tensors_are_read_one_at_a_time(larger: Path) -> None:
    config, source = inspect_model(larger), safetensors_source(larger)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    count, most = 0, 0

    class Counted(np.ndarray):  # plain arrays take no part in sets
        __hash__ = object.__hash__

    def read(name: str) -> np.ndarray:
        nonlocal count, most
        count, most = count + 1, max(most, len(alive))
        array = source.read(name).view(Counted)
        alive.add(array)
        return array

    counted = weights.Source(source.where, source.shapes, read)
    weights.assemble(config, hf_names(config), counted, dtype=jnp.bfloat16)
    assert count == len(source.shapes)
    assert most <= 1
