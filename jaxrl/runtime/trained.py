"""What a run has trained, in the formats of others: an adapter for PEFT, or a whole model for transformers and jaxrl.

Knows run directories, the two formats and which base a run had. It must not know how anything was trained.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.config import ModelConfig
from jaxrl.models.export import save_peft
from jaxrl.models.lora import LoraConfig, merge
from jaxrl.models.spec import Params, ParamSpec, param_specs
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.policy import TINY, load_policy, policy_config, save_policy
from jaxrl.runtime.run_dir import RunDir, is_run_dir


def export_run(run_dir: str | Path, out: str | Path, *, merged: bool = False, step: int | None = None) -> Path:
    """Write what `run_dir` has trained into the new directory `out`, and return it.

    merged: a whole model in float32 with its tokenizer, which transformers and `model_name=` load; else the adapter
    alone, which PEFT puts on the run's base. step: of that checkpoint; None is the last.
    Errors: FileNotFoundError for what is no run, ValueError for a checkpoint or an adapter that is not there,
    FileExistsError rather than overwrite.
    """
    run = RunDir(Path(run_dir).expanduser())
    if not is_run_dir(run.path):
        raise FileNotFoundError(f"{run.path} is no run: give a log_path, which holds config.json and checkpoints/")
    settings = json.loads(run.config.read_text())
    lora = _lora(settings["lora"])
    base, out = _base(run, settings), Path(out).expanduser()
    if lora is None and not merged:
        raise ValueError(f"{run.path} trained all weights (lora=None), so there is no adapter: say --merged")
    if base == TINY and not merged:
        raise ValueError(f"the base of {run.path} are random weights that nobody else has: say --merged")
    params = _params(run, step)
    if not merged:
        assert lora is not None
        save_peft(out, params, lora, policy_config(base), base_model=base)
        return out
    save_policy(out, *_whole(base, params, lora, seed=settings["seed"]), settings["model_name"])
    return out


def _lora(recorded: dict[str, Any] | None) -> LoraConfig | None:
    return None if recorded is None else LoraConfig(recorded["rank"], recorded["alpha"], tuple(recorded["targets"]))


def _base(run: RunDir, settings: dict[str, Any]) -> str:
    """The model that the adapter is for: what the warm start left, where there was one."""
    warm = run.path / "warm_start" / "model"
    return str(warm) if warm.is_dir() else settings["model_name"]


def _params(run: RunDir, step: int | None) -> Any:
    with Checkpointer(run.checkpoints, read_only=True) as checkpoints:
        steps = checkpoints.steps()
        if not steps or (step is not None and step not in steps):
            which = "checkpoint" if step is None else f"checkpoint {step}"
            raise ValueError(f"{run.path} has no {which}; there are: {steps or 'none'}")
        return checkpoints.read(steps[-1] if step is None else step)["params"]


def _whole(base: str, params: Any, lora: LoraConfig | None, *, seed: int) -> tuple[ModelConfig, Params]:
    """The model with the adapter in it, or as the checkpoint has it."""
    if lora is None:
        config = policy_config(base)
        structure = jax.tree.structure(param_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec))
        return config, jax.tree.unflatten(structure, jax.tree.leaves(params))
    config, weights = load_policy(base, dtype=jnp.float32, seed=seed)
    return config, merge(weights, params, lora)
