"""Writing models for other programs: Hugging Face checkpoints, and adapters in PEFT's format (read as well).

Tensors leave in the dtype they have in memory. Names come from `hf.py`'s table, so that what is written here is
read back by `load.py` and by transformers alike.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl.models.config import ModelConfig
from jaxrl.models.hf import PROJECTIONS, config_from_hf, config_to_hf, hf_names
from jaxrl.models.lora import Adapter, LoraConfig, lora_specs
from jaxrl.models.spec import Params
from jaxrl.models.weights import Leaf, leaves

_FORMAT = {"format": "pt"}  # transformers refuses a file that does not say which framework it is for

_PEFT_PLAIN = {
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "fan_in_fan_out": (False, None),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
}  # switches of PEFT that change the function, and the values under which they do not


def save_hf(
    path: Path | str,
    config: ModelConfig,
    params: Params,
    *,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json and the weights into a new or empty directory that transformers can load.

    extra: inert keys to add to config.json, such as `eos_token_id`. Weights above `shard_bytes` go to several
    files with an index; the host holds one of them at a time. Raises FileExistsError rather than overwrite.
    """
    raw = config_to_hf(config) | dict(extra or {})
    if config_from_hf(raw) != config:
        raise ValueError(f"extra={dict(extra or {})!r} changes the model; only keys that do not are allowed")
    folder = _new_folder(path)
    wanted, values = leaves(config, hf_names(config)), jax.tree.leaves(params)
    shards = _shards(wanted, values, shard_bytes)
    files = [_shard_name(i, len(shards)) for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file({leaf.name: _stored(leaf, x) for leaf, x in shard}, folder / file, metadata=_FORMAT)
    if len(shards) > 1:
        weight_map = {leaf.name: file for file, shard in zip(files, shards, strict=True) for leaf, _ in shard}
        index = {"metadata": {"total_size": sum(x.nbytes for x in values)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    dtype = str(jnp.result_type(*values))
    (folder / "config.json").write_text(json.dumps(raw | {"dtype": dtype}, indent=2) + "\n")


def _new_folder(path: Path | str) -> Path:
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty directory; choose another path or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _stored(leaf: Leaf, value: jax.Array) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != leaf.spec.shape:
        raise ValueError(f"{leaf.path} is {list(array.shape)}, expected {list(leaf.spec.shape)}")
    return np.ascontiguousarray(array.T if leaf.transposed else array)


def _shards(wanted: list[Leaf], values: list[jax.Array], limit: int) -> list[list[tuple[Leaf, jax.Array]]]:
    shards: list[list[tuple[Leaf, jax.Array]]] = [[]]
    used = 0
    for leaf, value in zip(wanted, values, strict=True):
        if shards[-1] and used + value.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append((leaf, value))
        used += value.nbytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def save_peft(
    path: Path | str, adapter: Adapter, lora: LoraConfig, config: ModelConfig, *, base_model: str | None = None
) -> None:
    """Write an adapter that `peft.PeftModel.from_pretrained` loads on top of the Hugging Face base model.

    base_model: the name PEFT should look the base up by. Raises FileExistsError rather than overwrite.
    """
    _check_adapter(adapter, lora, config)
    folder = _new_folder(path)
    tensors = {
        _peft_name(target, layer, part): np.ascontiguousarray(np.asarray(adapter[target][part][layer]).T)
        for target in lora.targets
        for part in ("a", "b")
        for layer in range(config.layers)
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata=_FORMAT)
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(raw, indent=2) + "\n")


def _peft_name(target: str, layer: int, part: str) -> str:
    return f"base_model.model.model.layers.{layer}.{PROJECTIONS[target]}.lora_{part.upper()}.weight"


def _check_adapter(adapter: Adapter, lora: LoraConfig, config: ModelConfig) -> None:
    wanted = {(t, p): s.shape for t, ab in lora_specs(config, lora).items() for p, s in ab.items()}
    found = {(t, p): x.shape for t, ab in adapter.items() for p, x in ab.items()}
    if wanted != found:
        raise ValueError(f"the adapter does not fit model and LoRA config: it has {found}, expected {wanted}")


def load_peft(path: Path | str, config: ModelConfig) -> tuple[Adapter, LoraConfig]:
    """An adapter in PEFT's format, float32, with its configuration.

    Raises ValueError for variants of LoRA this package does not compute, and for tensors that are missing, not
    used, or of another shape than the model asks for.
    """
    folder = Path(path)
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no adapter_config.json; give a directory PEFT has written")
    lora = _lora_from_peft(json.loads(file.read_text()), file)
    weights = folder / "adapter_model.safetensors"
    try:
        with safe_open(weights, framework="numpy") as tensors:
            shapes = {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}  # noqa: SIM118  not a dict
            _check_peft(shapes, lora, config, weights)
            return _adapter(tensors, lora, config), lora
    except SafetensorError as error:
        raise ValueError(f"{weights} is not a complete safetensors file: {error}; copy it again") from error


def _check_peft(found: dict[str, tuple[int, ...]], lora: LoraConfig, config: ModelConfig, where: Path) -> None:
    wanted = {
        _peft_name(target, layer, part): spec.shape[:0:-1]
        for target, ab in lora_specs(config, lora).items()
        for part, spec in ab.items()
        for layer in range(config.layers)
    }
    missing, surplus = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    wrong = sorted(n for n in set(wanted) & set(found) if wanted[n] != found[n])
    if missing or surplus or wrong:
        raise ValueError(
            f"{where} does not fit the model: missing {missing[:3]}, unexpected {surplus[:3]}, wrong shapes "
            f"{[(n, found[n], wanted[n]) for n in wrong[:3]]}"
        )


def _adapter(tensors: Any, lora: LoraConfig, config: ModelConfig) -> Adapter:
    def stacked(target: str, part: str) -> jax.Array:
        rows = [tensors.get_tensor(_peft_name(target, i, part)).T.astype(np.float32) for i in range(config.layers)]
        return jnp.asarray(np.stack(rows))

    return {t: {part: stacked(t, part) for part in ("a", "b")} for t in lora.targets}


def _lora_from_peft(raw: dict[str, Any], file: Path) -> LoraConfig:
    if raw.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type={raw.get('peft_type')!r}, expected 'LORA'")
    for key, plain in _PEFT_PLAIN.items():
        if key in raw and raw[key] not in plain:
            raise ValueError(f"{file}: {key}={raw[key]!r} is not supported; expected {plain[0]!r}")
    targets = raw.get("target_modules")
    if not isinstance(targets, list):
        raise ValueError(f"{file}: target_modules={targets!r}: expected a list of projections, such as ['q_proj']")
    rank = raw["r"]
    # rank-stabilised LoRA scales by alpha / sqrt(rank)
    alpha = raw["lora_alpha"] * (rank**0.5 if raw.get("use_rslora") else 1.0)
    order = [t for t in PROJECTIONS if t in targets]
    return LoraConfig(rank, alpha, tuple(order + sorted(set(targets) - set(order))))
