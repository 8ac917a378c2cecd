"""Vector search that compares a query with every passage: exact, and a few milliseconds for 30,000 passages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import trio

from envs.search.corpus import Corpus, Passage, fingerprint, load
from envs.search.embedder import Embedder, WordLlamaEmbedder
from envs.search.factbook import Factbook
from envs.search.index import Checkpoint, default_root, index_folder, opened_once, reading
from envs.search.retriever import Hit, best, check_k, in_thread, readable

_FORMAT = "1"
_VECTORS = "vectors.npy"
BATCH = 512
"""Passages that are embedded at once."""


@dataclass(frozen=True)
class ExactRetriever:
    """Finds the passages whose vectors have the highest cosine with the query's. cache: folder of the index."""

    corpus: Corpus = field(default_factory=Factbook)
    embedder: Embedder = field(default_factory=WordLlamaEmbedder)
    cache: str = field(default_factory=default_root)

    async def prepare(self) -> None:
        """Build or open the index."""
        await in_thread(self._open, trio.from_thread.check_cancelled)

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Scores are cosines; passages that have none above 0 are not found."""
        check_k(k)
        return await in_thread(self._search, readable(queries), k)

    def _search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        passages, vectors = self._open(trio.from_thread.check_cancelled)
        scores = (vectors @ self.embedder.embed(queries).T).T if queries else ()
        return [[Hit(passages[i], float(row[i])) for i in best(row, k)] for row in scores]

    def _open(self, checkpoint: Checkpoint) -> tuple[Sequence[Passage], np.ndarray]:
        return opened_once(self, partial(_make, self, checkpoint))


def _make(config: ExactRetriever, checkpoint: Checkpoint) -> tuple[Sequence[Passage], np.ndarray]:
    passages = load(config.corpus)
    identity = fingerprint("exact", _FORMAT, config.embedder.name, passages=passages)
    build = partial(_build, passages, config.embedder, checkpoint)
    folder = index_folder(config.cache, "exact", identity, build, checkpoint)
    with reading(folder), (folder / _VECTORS).open("rb") as file:  # numpy leaves one open that it cannot read
        vectors = np.load(file)
        if len(vectors) != len(passages):
            raise ValueError(f"{len(vectors)} vectors of {len(passages)} passages")
    return passages, vectors


def _build(passages: Sequence[Passage], embedder: Embedder, checkpoint: Checkpoint, folder: Path) -> None:
    np.save(folder / _VECTORS, np.concatenate([v for _, v in embedded(passages, embedder, checkpoint)]))


def embedded(
    passages: Sequence[Passage], embedder: Embedder, checkpoint: Checkpoint
) -> Iterator[tuple[Sequence[Passage], np.ndarray]]:
    """Passages with their vectors, so many at a time."""
    for start in range(0, len(passages), BATCH):
        checkpoint()
        some = passages[start : start + BATCH]
        yield some, embedder.embed([passage.searched for passage in some])
