"""Tokenizers for the chat tests: a tiny one made here, and the real ones once tests/fetch_real.py has been run."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.chat.tokenizer import BYTE_SPECIALS, CHATML_TEMPLATE, HFTokenizer, load_tokenizer, wrap

CACHE = Path(os.environ.get("JAXRL_TEST_CACHE") or Path(__file__).resolve().parents[2] / ".cache")


def _real_dir(name: str) -> str:
    if not (CACHE / name).exists():
        pytest.skip(f"no {name} in {CACHE}: run `python tests/fetch_real.py` (make test-all does)")
    return str(CACHE / name)


@pytest.fixture(scope="session")
def real_cache() -> Path:
    """Where real tokenizers and published templates are; skips where they are not."""
    return Path(_real_dir("templates")).parent


@pytest.fixture(scope="session")
def real_tokenizer() -> Callable[[str], HFTokenizer]:
    """A real tokenizer by its folder in the cache."""
    return functools.cache(lambda name: load_tokenizer(_real_dir(name)))


@pytest.fixture(scope="session")
def smollm2_dir() -> str:
    """Directory with SmolLM2's GGUF and its tokenizer as Hugging Face files."""
    return _real_dir("smollm2")


@pytest.fixture(scope="session")
def qwen3_dir() -> str:
    """Directory with Qwen3's tokenizer files."""
    return _real_dir("qwen3")


@pytest.fixture(scope="session")
def smollm2(real_tokenizer: Callable[[str], HFTokenizer]) -> HFTokenizer:
    """The real SmolLM2 tokenizer."""
    return real_tokenizer("smollm2")


@pytest.fixture(scope="session")
def qwen3(real_tokenizer: Callable[[str], HFTokenizer]) -> HFTokenizer:
    """The real Qwen3 tokenizer."""
    return real_tokenizer("qwen3")


@pytest.fixture(scope="session")
def tiny() -> HFTokenizer:
    """A Hugging Face byte-level BPE made here: a few merges, Qwen3's markers with Qwen3's flags.

    <think> and friends are flagged special=False, and <|im_start|> also stands in the base vocabulary, as in SmolLM2.
    """
    words = ["<|im_start|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("Ċ", "Ċ"), ("Ċ", "ĊĊ")]
    words += ["".join(m) for m in merges]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in BYTE_SPECIALS[:3]])
    backend.add_tokens([AddedToken(w, special=False, normalized=False) for w in BYTE_SPECIALS[3:]])
    return wrap(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML_TEMPLATE), name="tiny")
