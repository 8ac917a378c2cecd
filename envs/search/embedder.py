"""Texts to vectors of length 1, offline. Knows text and numpy; no passage, no index.

An embedder is a small, hashable, picklable value with a `name` that changes whenever its vectors do: indexes are
found by it, so an index is never searched with another embedder than the one that filled it.
"""

import functools
import importlib.metadata
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from envs.search.packages import optional

LONGEST = 4000
"""Characters of a text that are embedded; an average over more tells nothing apart."""

_WORD = re.compile(r"\w+")


class Embedder(Protocol):
    """Makes vectors of texts."""

    @property
    def name(self) -> str:
        """Kind, version and width: everything the vectors depend on."""
        ...

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Float32 [len(texts), width], each row of length 1, or 0 for a text that has nothing to embed. Blocks."""
        ...


@dataclass(frozen=True)
class WordLlamaEmbedder:
    """Averages of token vectors distilled from language models; the weights come with the package wordllama."""

    width: int = 256

    @property
    def name(self) -> str:
        """Raises ImportError without the package."""
        optional("wordllama")
        return f"wordllama-{importlib.metadata.version('wordllama')}-{self.width}"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Raises ImportError without the package, ValueError for a width whose weights the package lacks."""
        clipped = [text[:LONGEST] for text in texts]
        found = np.zeros((len(clipped), self.width), np.float32)
        some = [i for i, text in enumerate(clipped) if text.strip()]
        if some:
            found[some] = _wordllama(self.width).embed([clipped[i] for i in some])
        return unit(found)


@functools.cache
def _wordllama(width: int) -> Any:
    package = optional("wordllama")
    folder = Path(str(package.__file__)).parent
    try:  # its default looks at the network before it looks at its own files
        return package.WordLlama.load(cache_dir=folder, dim=width, disable_download=True)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"width={width}: the package wordllama has no such weights ({error}); use 256") from error


@dataclass(frozen=True)
class HashedEmbedder:
    """Counts of words, each word in a place and with a sign that its spelling decides. Needs no package."""

    width: int = 512

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width={self.width}: expected at least 1")

    @property
    def name(self) -> str:
        """Kind and width."""
        return f"hashed-1-{self.width}"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Words in small letters; a word that occurs four times counts twice as much as one that occurs once."""
        found = np.zeros((len(texts), self.width), np.float32)
        for row, text in enumerate(texts):
            hashes = np.array([zlib.crc32(w.encode()) for w in _WORD.findall(text[:LONGEST].lower())], np.int64)
            np.add.at(found[row], hashes % self.width, 1.0 - 2.0 * (hashes >> 31))
        return unit(np.sign(found) * np.sqrt(np.abs(found)))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Each row divided by its length; rows of zeros, and rows that are no numbers, become zeros."""
    vectors = np.nan_to_num(vectors.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
