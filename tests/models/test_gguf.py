"""GGUF files written here the way llama.cpp's converter writes them, and the real SmolLM2."""

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import expected, folder, our_logits

from jaxrl.models.config import Llama3Scaling, rope_frequencies
from jaxrl.models.gguf import gguf_names, tokenizer_from_gguf
from jaxrl.models.hf import hf_names
from jaxrl.models.load import inspect_model, load_model, load_tokenizer, safetensors_source
from jaxrl.models.weights import leaves

gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")


def write(
    path: Path, name: str, *, kind: str = "F32", extra: Any = None, tensors: Any = None, theta: float = 0.0
) -> None:
    """Write a committed checkpoint as GGUF, its matrices quantised as `kind`."""
    model = load_model(folder(name), dtype=jnp.float32)
    config = model.config
    arch = json.loads((folder(name) / "config.json").read_text())["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ff_width)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(theta or config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for key, value in (extra or {}).items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
            bool: writer.add_bool,
        }
        add[type(value)](key.replace("ARCH", arch), value)
    source = safetensors_source(folder(name))
    pairs = zip(leaves(config, hf_names(config)), leaves(config, gguf_names(config)), strict=True)
    for theirs, ours in pairs:
        array = source.read(theirs.name).astype(np.float32)
        if arch == "llama" and ours.path.split("/")[-1].startswith(("q_proj", "k_proj")):
            array = interleaved(array, config.head_width)
        add_tensor(writer, ours.name, array, kind)
    for tensor, array in (tensors or {}).items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(array: np.ndarray, head_width: int) -> np.ndarray:
    """Rows of each head from halves order to pair order, which llama.cpp rotates."""
    order = np.arange(head_width).reshape(2, -1).T.reshape(-1)
    heads = array.reshape(-1, head_width, *array.shape[1:])
    return np.ascontiguousarray(heads[:, order].reshape(array.shape))


def add_tensor(writer: Any, name: str, array: np.ndarray, kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    if array.ndim == 2 and kind != "F32" and array.shape[-1] % 32 == 0:
        writer.add_tensor(name, gguf.quantize(array, quantised), raw_dtype=quantised)
    else:
        writer.add_tensor(name, array)


SCALED = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 2.5}


@pytest.mark.parametrize(
    ("name", "extra"), [("llama_biased", SCALED), ("qwen3_plain", {}), ("qwen3_biased", {}), ("qwen2_types", {})]
)
def test_a_gguf_is_the_same_model_as_the_checkpoint(name: str, extra: dict[str, Any], tmp_path: Path) -> None:
    """Except for what the format cannot say: windows and the activation."""
    write(tmp_path / "m.gguf", name, extra=extra)
    theirs, ours = load_model(folder(name), dtype=jnp.float32), load_model(tmp_path / "m.gguf", dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    same = {k: v for k, v in vars(theirs.config).items() if k not in ("windows", "activation")}
    assert {k: v for k, v in vars(ours.config).items() if k not in ("windows", "activation")} == same
    assert inspect_model(tmp_path / "m.gguf") == ours.config


def test_gguf_logits_equal_transformers(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3_plain")
    model, want = load_model(tmp_path / "m.gguf", dtype=jnp.float32), expected("qwen3_plain")
    np.testing.assert_allclose(our_logits(model.config, model.params, want["tokens"]), want["logits"], atol=1e-4)


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 2e-3), ("BF16", 0.0), ("Q8_0", 0.02), ("Q4_1", 0.3)])
def test_quantised_weights_are_near(kind: str, tolerance: float, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3_plain", kind=kind)
    theirs = load_model(folder("qwen3_plain"), dtype=jnp.float32).params
    ours = load_model(tmp_path / "m.gguf", dtype=jnp.float32).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), ours, theirs)


def test_llama3_scaling_is_read_off_its_divisors(tmp_path: Path) -> None:
    config = load_model(folder("llama_scaled"), dtype=jnp.bfloat16).config
    scaled = replace(config, rope_theta=5e5, rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192))
    divisors = rope_frequencies(replace(scaled, rope_scaling=None)) / rope_frequencies(scaled)
    assert ((divisors > 1.01) & (divisors < 31)).any(), "a channel lies between"
    write(tmp_path / "m.gguf", "llama_scaled", theta=5e5, tensors={"rope_freqs.weight": divisors})
    assert load_model(tmp_path / "m.gguf", dtype=jnp.float32).config == scaled
    write(tmp_path / "n.gguf", "llama_scaled", theta=5e5, tensors={"rope_freqs.weight": divisors**0.9})
    with pytest.raises(ValueError, match=r"rope_freqs.weight is not the scaling of Llama 3"):
        inspect_model(tmp_path / "n.gguf")


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"ARCH.expert_count": 8}, "keys this package does not know: {'expert_count': 8}"),
        ({"ARCH.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn' is not supported"),
        ({"ARCH.attention.sliding_window": 128}, "sliding_window"),
    ],
)
def test_keys_that_change_the_function_are_refused(extra: dict[str, Any], match: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3_plain", extra=extra)
    with pytest.raises(ValueError, match=match):
        inspect_model(tmp_path / "m.gguf")


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'gemma' is not supported; expected one of llama, qwen2, qwen3"):
        inspect_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("part", [0, 3, 30, 300, 1000, -1])
def test_truncated_files_are_refused_before_anything_is_read(part: int, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3_plain")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[:part])
    with pytest.raises(ValueError, match=r"m\.gguf.*(truncated|is not a GGUF file)"):
        load_model(tmp_path / "m.gguf", dtype=jnp.float32)


# The tokenizer


def tokenizer_keys(pre: str = "smollm") -> dict[str, Any]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["ĠĠ", "he", "ll", "hell", "hello", "12", "Ġ1"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *merged, "<think>", "[PAD]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(alphabet) + len(merged)) + [4, 5],
        "tokenizer.ggml.merges": ["Ġ Ġ", "h e", "l l", "he ll", "hell o", "1 2", "Ġ 1"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def test_tokenizer_of_a_file(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3_plain", extra=tokenizer_keys())
    tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
    text = "<|im_start|>hello  12<think>é<|im_end|>"
    ids = tokenizer(text).input_ids
    words = ["<|im_start|>", "hello", "ĠĠ", "1", "2", "<think>", "Ã", "©", "<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(ids) == words
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello  12<think>é"
    assert "[PAD]" not in tokenizer.get_vocab()
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>hello<|im_end|>"


def test_digits_split_as_the_pre_tokenizer_says(tmp_path: Path) -> None:
    split = {}
    for pre in ("smollm", "gpt-2", "llama-bpe", "qwen2"):
        write(tmp_path / f"{pre}.gguf", "qwen3_plain", extra=tokenizer_keys(pre))
        tokenizer = tokenizer_from_gguf(tmp_path / f"{pre}.gguf")
        split[pre] = tokenizer.tokenize("hello 12")
    assert split == {
        "smollm": ["hello", "Ġ", "1", "2"],
        "gpt-2": ["hello", "Ġ", "12"],
        "llama-bpe": ["hello", "Ġ", "12"],
        "qwen2": ["hello", "Ġ", "1", "2"],
    }


def test_begin_token_where_the_file_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, "qwen3_plain", extra=tokenizer_keys("llama-bpe") | {"tokenizer.ggml.add_bos_token": True})
    tokenizer = tokenizer_from_gguf(path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello").input_ids) == ["<|im_start|>", "hello"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello", add_special_tokens=False).input_ids) == ["hello"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not known; expected one of gpt-2, smollm"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not byte-level BPE"),
    ],
)
def test_unknown_tokenizers_are_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3_plain", extra=tokenizer_keys() | changes)
    with pytest.raises(ValueError, match=match):
        tokenizer_from_gguf(tmp_path / "m.gguf")


# The real one


@pytest.fixture(scope="module")
def smollm2() -> Path:
    root = os.environ.get("JAXRL_TEST_CACHE") or Path(__file__).resolve().parents[2] / ".cache"
    files = sorted((Path(root) / "smollm2").glob("*.gguf"))
    if not files:
        pytest.skip(f"no SmolLM2 in {root}: run `python tests/fetch_real.py` (make test-all does)")
    return files[0]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_smollm2_equals_transformers(smollm2: Path, fully_optimized: None) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_model(smollm2, dtype=jnp.float32), load_tokenizer(smollm2)
    chat = [{"role": "user", "content": "Why is the sky blue? Explain in 3 sentences, please."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    theirs = AutoModelForCausalLM.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name, dtype=torch.float32)
    with torch.no_grad():
        exact = theirs.double()(torch.tensor([ids])).logits.numpy()  # in float32 it is as far from this as we are
    got = our_logits(model.config, model.params, np.array([ids]))
    np.testing.assert_allclose(got, exact, atol=2e-4, rtol=1e-5)  # logits reach 38
    assert np.abs(got - exact).mean() < 2e-5
    assert tokenizer.decode(got[0, -1].argmax()).strip() == "The"


@pytest.mark.full
def test_smollm2_tokenizer(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.pad_token_id) == (49152, "<|im_end|>", 2)
    for text in ("x  1", "Hello 123, it's ½ or ٣\n\n 45\t7", "<|im_start|>user\nhi<|im_end|>", "日本語 🙂"):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
    words = tokenizer.convert_ids_to_tokens(tokenizer("x  12").input_ids)
    assert words == ["x", "ĠĠ", "1", "2"]
