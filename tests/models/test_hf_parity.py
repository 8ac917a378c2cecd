"""Our logits against those transformers computes: committed ones always, live ones where torch is installed."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_fixtures import logits as torch_logits
from make_fixtures import reference
from model_cases import NAMES, expected, folder, our_logits

from jaxrl.models.export import save_hf
from jaxrl.models.load import load_model

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str) -> None:
    model, want = load_model(folder(name), dtype=jnp.float32), expected(name)
    assert np.abs(want["logits"]).max() > 1
    np.testing.assert_allclose(our_logits(model.config, model.params, want["tokens"]), want["logits"], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_packed_logits_equal_transformers(name: str) -> None:
    """Two sequences and padding in one row: 9 tokens of the first, 13 of the second, 2 of nothing."""
    model, want = load_model(folder(name), dtype=jnp.float32), expected(name)
    a, b = want["tokens"]
    row = np.concatenate([a[:9], b[:13], [0, 0]])[None]
    positions = np.concatenate([np.arange(9), np.arange(13), [0, 0]])[None]
    segments = np.array([[1] * 9 + [2] * 13 + [0, 0]])
    got = our_logits(model.config, model.params, row, positions, segments)[0]
    np.testing.assert_allclose(got[:9], want["logits"][0, :9], atol=1e-4)
    np.testing.assert_allclose(got[9:22], want["logits"][1, :13], atol=1e-4)


@pytest.mark.full
@needs_torch
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("name", NAMES)
def test_live_logits_equal_transformers(name: str, seed: int, tmp_path) -> None:
    theirs = reference(name, seed=seed, dtype="float32")
    theirs.save_pretrained(tmp_path, max_shard_size="20kB")  # several shards and an index
    model = load_model(tmp_path, dtype=jnp.float32)
    tokens = np.random.default_rng(seed).integers(0, 61, (3, 80))
    np.testing.assert_allclose(
        our_logits(model.config, model.params, tokens), torch_logits(theirs, tokens), atol=1e-4, rtol=1e-5
    )


@pytest.mark.full
@needs_torch
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_we_save(name: str, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model, want = load_model(folder(name), dtype=jnp.float32), expected(name)
    save_hf(tmp_path / "out", model.config, model.params, shard_bytes=30_000)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    np.testing.assert_allclose(torch_logits(theirs.float(), want["tokens"].astype(np.int64)), want["logits"], atol=1e-4)


def test_bf16_stays_near_float32() -> None:
    model, want = load_model(folder("qwen3_biased"), dtype=jnp.bfloat16), expected("qwen3_biased")
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}
    error = np.abs(our_logits(model.config, model.params, want["tokens"]) - want["logits"])
    assert error.mean() < 0.05
