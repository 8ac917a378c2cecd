"""Models by name, with their tokenizers; what is saved is read back as what it was."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from episodes import BYTES, TALKER, talker

from jaxrl.models.config import tiny
from jaxrl.models.spec import count, param_specs
from jaxrl.runtime.policy import check_policy, load_policy, policy_config, policy_tokenizer, save_policy


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_tiny_is_a_few_million_parameters_over_bytes() -> None:
    config = policy_config("tiny")
    assert config == tiny(BYTES.vocab_size)
    assert policy_tokenizer("tiny") == BYTES
    assert 1e6 < count(param_specs(config)) < 5e6
    check_policy("tiny")


def test_the_seed_makes_the_weights_of_tiny() -> None:
    (_, a), (_, b), (_, c) = (load_policy("tiny", dtype=jnp.bfloat16, seed=seed) for seed in (1, 1, 2))
    assert same(a, b)
    assert not same(a, c)
    assert {x.dtype for x in jax.tree.leaves(a)} == {jnp.dtype(jnp.bfloat16)}


def test_a_saved_policy_is_read_back_with_its_byte_tokenizer(tmp_path: Path) -> None:
    save_policy(tmp_path / "model", TALKER, talker().params, "tiny")
    config, params = load_policy(str(tmp_path / "model"), dtype=jnp.float32)
    assert config == policy_config(str(tmp_path / "model")) == TALKER
    assert same(params, talker().params)
    assert policy_tokenizer(str(tmp_path / "model")) == BYTES
    check_policy(str(tmp_path / "model"))


def test_another_class_of_tokenizer_is_not_taken_for_bytes(tmp_path: Path) -> None:
    save_policy(tmp_path / "model", TALKER, talker().params, "tiny")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Other"}))
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        policy_tokenizer(str(tmp_path / "model"))


def test_damage_is_found_without_reading_a_weight(tmp_path: Path) -> None:
    save_policy(tmp_path / "model", TALKER, talker().params, "tiny")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors \(\d+ bytes\) is not a complete safetensors file"):
        check_policy(str(tmp_path / "model"))
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or directory"):
        check_policy(str(tmp_path / "nowhere"))
