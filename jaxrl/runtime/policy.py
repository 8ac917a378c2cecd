"""What is trained, by name: a model's configuration, weights and tokenizer.

A name is a Hugging Face directory, a hub id, a .gguf file, or "tiny": a small Llama with random weights over bytes,
built in place. A directory that `save_policy` wrote from a byte-level model says so in its tokenizer_config.json.
"""

import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.algo.step import base_shardings
from jaxrl.chat.tokenizer import Tokenizer, byte_tokenizer, wrap
from jaxrl.models import spec
from jaxrl.models.config import ModelConfig, tiny
from jaxrl.models.export import save_hf
from jaxrl.models.load import check_model, inspect_model, load_model, load_tokenizer
from jaxrl.models.spec import Params, param_specs

TINY = "tiny"
_TOKENIZER_FILE = "tokenizer_config.json"
_BYTE_CLASS = "jaxrl.ByteTokenizer"


def policy_config(name: str) -> ModelConfig:
    """The model's configuration, without reading a weight. Errors: those of `models.load.inspect_model`."""
    return tiny(byte_tokenizer().vocab_size) if name == TINY else inspect_model(name)


def check_policy(name: str) -> None:
    """Raise what `load_policy` would raise before it reads the first weight: damaged files, missing tensors."""
    if name != TINY:
        check_model(name)


def policy_tokenizer(name: str) -> Tokenizer:
    """The model's tokenizer. Errors: those of `models.load.load_tokenizer`."""
    if name == TINY or _is_bytes(name):
        return byte_tokenizer()
    return wrap(load_tokenizer(name))


def load_policy(name: str, *, dtype: Any, seed: int = 0, mesh: Mesh | None = None) -> tuple[ModelConfig, Params]:
    """Configuration and weights in `dtype`, spread over `mesh`. `seed` makes the weights of "tiny"."""
    config = policy_config(name)
    where = None if mesh is None else base_shardings(config, mesh)
    if name != TINY:
        return config, load_model(name, dtype=dtype, shardings=where).params
    params = spec.init(param_specs(config), dtype, seed=seed)
    return config, params if where is None else jax.device_put(params, where)


def save_policy(path: str | Path, config: ModelConfig, params: Params, tokenizer_of: str) -> None:
    """Write a directory that `load_policy` and transformers read, with the tokenizer of the model `tokenizer_of`.

    That of bytes, which transformers does not know, is a note.
    """
    save_hf(path, config, params)
    if tokenizer_of == TINY or _is_bytes(tokenizer_of):
        text = json.dumps({"tokenizer_class": _BYTE_CLASS}, indent=2) + "\n"
        (Path(path) / _TOKENIZER_FILE).write_text(text)
    else:
        load_tokenizer(tokenizer_of).save_pretrained(str(path))


def _is_bytes(name: str) -> bool:
    file = Path(name).expanduser() / _TOKENIZER_FILE
    return file.is_file() and json.loads(file.read_text()).get("tokenizer_class") == _BYTE_CLASS
