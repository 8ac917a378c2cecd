"""The warm-up recipe with the tiny model: it leaves a model the RL recipes can start from, or an error and nothing."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxrl.runtime.policy import load_policy, policy_config, policy_tokenizer
from recipes.sft_warmup import SftConfig, main

pytestmark = pytest.mark.slow


def _config(tmp_path: Path, **fields) -> SftConfig:
    small = {"env": "guess_number", "steps": 2, "batch_size": 4, "rows": 4, "out": str(tmp_path / "model")}
    return SftConfig(**(small | fields))


@pytest.mark.parametrize("env", ["guess_number", "tool_use"])
def test_the_model_directory_is_whole_and_can_be_trained_on(env: str, tmp_path: Path) -> None:
    out = main(_config(tmp_path, env=env))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    config, params = load_policy(str(out), dtype=jnp.float32)
    assert config == policy_config("tiny")
    assert params["embed"].shape[0] == config.vocab_size
    assert policy_tokenizer(str(out)) == policy_tokenizer("tiny")
    losses = [json.loads(line)["optim/loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    assert all(loss > 0 for loss in losses)


def test_an_out_directory_that_exists_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError, match=r"out=.*exists already"):
        main(_config(tmp_path, model_name="no such model"))


def test_a_model_that_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        main(_config(tmp_path, model_name=str(tmp_path / "missing.gguf")))
    assert not list(tmp_path.iterdir())
