"""Where the chat tests get tokenizers: bytes always, the real ones when tests/fetch_real.py has been run."""

import os
from pathlib import Path

import pytest

from jaxrl.chat.tokenizer import ByteTokenizer, HFTokenizer, byte_tokenizer, load_tokenizer


def _real_dir(name: str) -> str:
    root = os.environ.get("JAXRL_TEST_CACHE") or Path(__file__).resolve().parents[2] / ".cache"
    path = Path(root) / name
    if not (path / "tokenizer.json").exists():
        pytest.skip(f"no real {name} tokenizer in {path}: run `python tests/fetch_real.py` (make test-all does)")
    return str(path)


@pytest.fixture(scope="session")
def smollm2_dir() -> str:
    """Directory with SmolLM2's GGUF and its tokenizer as Hugging Face files."""
    return _real_dir("smollm2")


@pytest.fixture(scope="session")
def qwen3_dir() -> str:
    """Directory with Qwen3's tokenizer files."""
    return _real_dir("qwen3")


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: str) -> HFTokenizer:
    """The real SmolLM2 tokenizer."""
    return load_tokenizer(smollm2_dir)


@pytest.fixture(scope="session")
def qwen3(qwen3_dir: str) -> HFTokenizer:
    """The real Qwen3 tokenizer."""
    return load_tokenizer(qwen3_dir)


@pytest.fixture(scope="session")
def bytes_() -> ByteTokenizer:
    """The byte tokenizer."""
    return byte_tokenizer()
