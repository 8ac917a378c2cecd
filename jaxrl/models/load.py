"""Models by name: a Hugging Face directory, a .gguf file, or the id of a repository on the hub.

The one place in `models/` that reaches the network; `gguf_file.py` and `export.py` touch files too. What can be checked
from configuration and headers is checked before a weight is read; then tensors come one at a time (`weights.assemble`).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jaxrl.models.config import ModelConfig
from jaxrl.models.gguf import config_from_gguf, gguf_names, gguf_source, tokenizer_from_gguf
from jaxrl.models.gguf_file import open_gguf
from jaxrl.models.hf import config_from_hf, hf_names
from jaxrl.models.spec import Params
from jaxrl.models.weights import Source, assemble, check, leaves

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FLOATS = ("F64", "F32", "F16", "BF16")
_WEIGHT_FILES = ["config.json", "model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_TOKENIZER_FILES = ["config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "chat_template*"]


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, and the name `load_tokenizer` knows its tokenizer by."""

    config: ModelConfig
    params: Params
    tokenizer_source: str


def inspect_model(name: str | Path) -> ModelConfig:
    """The configuration of a model, read from metadata only.

    Raises FileNotFoundError for a name that leads nowhere, ValueError for a model that is not supported.
    """
    path = _local(name, ["config.json"])
    return config_from_gguf(open_gguf(path)) if _is_gguf(path) else _directory_config(path)


def load_model(name: str | Path, *, dtype: Any, shardings: Any = None) -> LoadedModel:
    """The model called `name`, its weights in `dtype`, placed by `shardings` (a tree like the parameters, or None).

    Raises what `inspect_model` raises, and ValueError for files that are damaged or hold other tensors than the
    configuration asks for; in every case before the first weight is read.
    """
    config, names, source = _opened(name)
    params = assemble(config, names, source, dtype=dtype, shardings=shardings)
    return LoadedModel(config, params, str(name))


def check_model(name: str | Path) -> None:
    """Fetch the model if it is on the hub, and raise what `load_model` raises before it reads the first weight."""
    _opened(name)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model, with its chat template.

    Raises FileNotFoundError for a name that leads nowhere or a directory without tokenizer files.
    """
    path = _local(name, _TOKENIZER_FILES)
    if _is_gguf(path):
        return tokenizer_from_gguf(path)
    if not any((path / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise FileNotFoundError(
            f"{path} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json); copy the files of the model it "
            "was trained from, or name another tokenizer"
        )
    return AutoTokenizer.from_pretrained(str(path))


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"


def _local(name: str | Path, files: list[str]) -> Path:
    """Where the model lies on this machine; `files` (patterns) are fetched when it is a hub id."""
    path = Path(name).expanduser()
    if path.exists():
        if path.is_dir() or _is_gguf(path):
            return path
        raise ValueError(f"{path} is neither a directory nor a .gguf file; give the directory that has config.json")
    if isinstance(name, Path) or _is_gguf(path) or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise FileNotFoundError(
            f"{name}: no such file or directory; expected a directory with config.json, a .gguf file, or a hub id "
            "such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{name}: not a directory here, not in the local hub cache, and the hub cannot be reached. Check the "
            "name and the network, or download it elsewhere and give the directory"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(
            f"{name}: not a directory here, and the hub does not give it: {error}. Check the name; for a gated "
            "model, accept its licence and log in with `hf auth login`"
        ) from error


def _opened(name: str | Path) -> tuple[ModelConfig, Any, Source]:
    """Configuration, tensor names and checked source of a model."""
    path = _local(name, _WEIGHT_FILES)
    config, names, source = _gguf(path) if _is_gguf(path) else _directory(path)
    check(leaves(config, names), source)
    return config, names, source


def _gguf(path: Path) -> tuple[ModelConfig, Any, Source]:
    file = open_gguf(path)
    config = config_from_gguf(file)
    return config, gguf_names(config), gguf_source(file, config)


def _directory(path: Path) -> tuple[ModelConfig, Any, Source]:
    config = _directory_config(path)
    source = safetensors_source(path)
    return config, hf_names(config), _without_tied_head(config, source)


def _directory_config(path: Path) -> ModelConfig:
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no config.json; give the directory of a Hugging Face checkpoint")
    try:
        return config_from_hf(_json(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def safetensors_source(path: Path) -> Source:
    """The tensors of a checkpoint directory: one `model.safetensors`, or the shards of its index."""
    files = _tensor_files(path)
    shapes: dict[str, tuple[int, ...]] = {}
    home: dict[str, Path] = {}
    for file, listed in files.items():
        found = _header(file)
        absent = sorted(listed - set(found)) if listed is not None else []
        if absent:
            raise ValueError(f"{file} lacks {absent[0]}, which the index says it holds; download the checkpoint again")
        twice = sorted(set(found) & set(home))
        if twice:
            raise ValueError(f"tensor {twice[0]} is in both {home[twice[0]]} and {file}; remove one of the two")
        # Old Llama checkpoints carry the rotary frequencies, which follow from the configuration.
        kept = {n: s for n, s in found.items() if not n.endswith("rotary_emb.inv_freq")}
        shapes |= kept
        home |= dict.fromkeys(kept, file)

    def read(name: str) -> np.ndarray:
        with safe_open(home[name], framework="numpy") as tensors:
            return tensors.get_tensor(name)

    return Source(str(path), shapes, read)


def _tensor_files(path: Path) -> dict[Path, set[str] | None]:
    """Files to open, each with the tensors an index promises (None without an index)."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return {single: None}
    if not index.is_file():
        others = sorted(f.name for f in path.glob("*.bin"))
        hint = f" It has {others[0]}: convert it with transformers' save_pretrained." if others else ""
        raise FileNotFoundError(f"{path} has neither model.safetensors nor model.safetensors.index.json.{hint}")
    files: dict[Path, set[str] | None] = {}
    for name, file in _json(index).get("weight_map", {}).items():
        listed = files.setdefault(path / file, set())
        assert listed is not None
        listed.add(name)
    if not files:
        raise ValueError(f"{index} has no weight_map; download the checkpoint again")
    absent = [f for f in files if not f.is_file()]
    if absent:
        raise FileNotFoundError(f"{absent[0]} is missing, {index.name} lists it; download the checkpoint again")
    return files


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in one safetensors file. The library verifies that the file is as long as they say."""
    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  not a dict
            found = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        size = file.stat().st_size
        raise ValueError(
            f"{file} ({size} bytes) is not a complete safetensors file: {error}; download it again"
        ) from error
    strange = [f"{name} ({dtype})" for name, (_, dtype) in found.items() if dtype not in _FLOATS]
    if strange:
        raise ValueError(f"{file}: {strange[0]} is not one of {', '.join(_FLOATS)}; give the unquantised checkpoint")
    return {name: shape for name, (shape, _) in found.items()}


def _without_tied_head(config: ModelConfig, source: Source) -> Source:
    """A tied model whose file repeats the embedding as output matrix is accepted when the two are equal."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    if not config.tie_embeddings or head not in source.shapes or embed not in source.shapes:
        return source
    if not np.array_equal(source.read(embed), source.read(head)):
        raise ValueError(
            f"{source.where}: tie_word_embeddings is true, but {head} differs from {embed}; set it to false in "
            "config.json to use both"
        )
    return Source(source.where, {n: s for n, s in source.shapes.items() if n != head}, source.read)
