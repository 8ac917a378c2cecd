"""What a run has trained leaves it: as an adapter, or as a model that is what was trained."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from episodes import TALKER

from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.step import init_state
from jaxrl.cli import main
from jaxrl.models import spec
from jaxrl.models.config import ModelConfig
from jaxrl.models.export import load_peft
from jaxrl.models.lora import LoraConfig, lora_specs, merge
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.policy import load_policy, policy_tokenizer, save_policy
from jaxrl.runtime.run_dir import open_run_dir
from jaxrl.runtime.trained import export_run

LORA = LoraConfig(rank=2, alpha=5.0, targets=("q_proj", "down_proj"))
DEEP = replace(TALKER, layers=11)
"""Names of layers that sort as texts would be in another order."""


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def weights(model: ModelConfig, seed: int) -> Any:
    return spec.init(spec.param_specs(model), jnp.float32, seed=seed)


def adapters() -> list[Any]:
    """Of two checkpoints. Noise everywhere: a new adapter changes nothing."""
    drawn = [spec.init(lora_specs(DEEP, LORA), jnp.float32, seed=seed) for seed in (1, 2)]
    return [jax.tree.map(lambda x, i=i: x + 0.01 * (i + 1), each) for i, each in enumerate(drawn)]


def run(folder: Path, model_name: str, trained: list[Any], lora: LoraConfig | None) -> Path:
    """A run directory as a run leaves it, with the checkpoints 1, 2, ..."""
    settings = {"model_name": model_name, "lora": None if lora is None else asdict(lora), "seed": 3}
    opened = open_run_dir(folder, config=settings)
    with Checkpointer(opened.checkpoints) as checkpoints:
        for i, params in enumerate(trained):
            checkpoints.save(i + 1, init_state(OptimizerConfig(), params))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> str:
    save_policy(tmp_path / "base", DEEP, weights(DEEP, 0), "tiny")
    return str(tmp_path / "base")


def test_an_adapter_is_written_for_the_base_of_the_run(base: str, tmp_path: Path) -> None:
    first, last = adapters()
    folder = run(tmp_path / "run", base, [first, last], LORA)
    for step, want in ((None, last), (1, first)):
        back, lora = load_peft(export_run(folder, tmp_path / f"out{step}", step=step), DEEP)
        assert same(back, want)
        assert lora == LORA


def test_a_merged_model_is_the_base_with_the_adapter_in_it(base: str, tmp_path: Path) -> None:
    _, last = adapters()
    folder = run(tmp_path / "run", base, [last], LORA)
    assert main(["export", str(folder), str(tmp_path / "out"), "--merged"]) == 0
    config, params = load_policy(str(tmp_path / "out"), dtype=jnp.float32)
    assert config == DEEP
    assert same(params, merge(weights(DEEP, 0), last, LORA))
    assert policy_tokenizer(str(tmp_path / "out")) == policy_tokenizer("tiny")
    save_policy(folder / "warm_start" / "model", DEEP, weights(DEEP, 9), "tiny")  # what the adapter was trained on
    _, params = load_policy(str(export_run(folder, tmp_path / "warm", merged=True)), dtype=jnp.float32)
    assert same(params, merge(weights(DEEP, 9), last, LORA))


def test_the_random_base_of_tiny_is_that_of_the_seed(tmp_path: Path) -> None:
    config, params = load_policy("tiny", dtype=jnp.float32, seed=3)
    adapter = jax.tree.map(lambda x: x + 0.1, spec.init(lora_specs(config, LORA), jnp.float32, seed=0))
    folder = run(tmp_path / "run", "tiny", [adapter], LORA)
    _, back = load_policy(str(export_run(folder, tmp_path / "out", merged=True)), dtype=jnp.float32)
    assert same(back, merge(params, adapter, LORA))


def test_all_weights_are_written_as_the_checkpoint_has_them(base: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", base, [weights(DEEP, 5)], None)
    _, params = load_policy(str(export_run(folder, tmp_path / "out", merged=True)), dtype=jnp.float32)
    assert same(params, weights(DEEP, 5))


def test_what_cannot_be_written_is_said(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = adapters()[0]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    runs = {
        "lora": run(tmp_path / "lora", base, [adapter], LORA),
        "full": run(tmp_path / "full", base, [weights(DEEP, 5)], None),
        "tiny": run(tmp_path / "tiny", "tiny", [adapter], LORA),
        "young": run(tmp_path / "young", base, [], LORA),
        "nowhere": tmp_path / "nowhere",
    }
    for name, arguments, said in (
        ("nowhere", (), "nowhere is no run: give a log_path"),
        ("young", (), "has no checkpoint; there are: none"),
        ("lora", ("--step", "7"), "has no checkpoint 7; there are: [1]"),
        ("full", (), "trained all weights (lora=None), so there is no adapter: say --merged"),
        ("tiny", (), "random weights that nobody else has: say --merged"),
    ):
        assert main(["export", str(runs[name]), str(tmp_path / "out"), *arguments]) == 1
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    for merged in ((), ("--merged",)):
        assert main(["export", str(runs["lora"]), str(tmp_path / "taken"), *merged]) == 1
        assert "is not an empty directory" in capsys.readouterr().err


def test_reading_disturbs_no_save_that_is_under_way(base: str, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", base, [adapters()[0]], LORA)
    unfinished = folder / "checkpoints" / "2.orbax-checkpoint-tmp" / "half"
    unfinished.mkdir(parents=True)
    export_run(folder, tmp_path / "out")
    assert unfinished.is_dir()
