"""Search in a Chroma collection that this process opens itself, from a folder.

Several processes must not share a Chroma folder: queries go stale and the index may break, and a process writes to its
folder when it only reads. So each owns a copy of the one that was built (see index.py), and hands it on when it ends.
Chroma is told nothing of embedding functions, whose default fetches a model: it gets vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import trio

from envs.search.corpus import Corpus, Passage, fingerprint, load
from envs.search.embedder import Embedder, WordLlamaEmbedder
from envs.search.exact import BATCH, embedded
from envs.search.factbook import Factbook
from envs.search.index import Checkpoint, default_root, index_folder, opened_once, owned_copy
from envs.search.packages import optional
from envs.search.retriever import Hit, check_k, in_thread, readable

_FORMAT = "1"
_NAME = "passages"
COSINE = {"hnsw": {"space": "cosine", "ef_search": 200, "ef_construction": 200}}
"""How a collection compares; its approximate search then finds nearly what an exact one does."""


@dataclass(frozen=True)
class ChromaRetriever:
    """Finds the passages whose vectors are near the query's, approximately. cache: folder of the collection."""

    corpus: Corpus = field(default_factory=Factbook)
    embedder: Embedder = field(default_factory=WordLlamaEmbedder)
    cache: str = field(default_factory=default_root)

    async def prepare(self) -> None:
        """Build or open the collection. Raises ImportError without the package."""
        await in_thread(self._open, trio.from_thread.check_cancelled)

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Scores are cosines."""
        check_k(k)
        return await in_thread(self._search, readable(queries), k)

    def _search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        by_id, collection = self._open(trio.from_thread.check_cancelled)
        vectors = self.embedder.embed(queries)
        asked = [row for row in range(len(queries)) if vectors[row].any()]  # a text of no words is near to nothing
        found: list[list[Hit]] = [[] for _ in queries]
        if asked:
            answer = collection.query(
                query_embeddings=vectors[asked], n_results=min(k, len(by_id)), include=["distances"]
            )
            for row, ids, distances in zip(asked, answer["ids"], answer["distances"], strict=True):
                found[row] = [Hit(by_id[i], 1.0 - float(d)) for i, d in zip(ids, distances, strict=True)]
        return found

    def _open(self, checkpoint: Checkpoint) -> tuple[dict[str, Passage], Any]:
        return opened_once(self, partial(_make, self, checkpoint))


def _make(config: ChromaRetriever, checkpoint: Checkpoint) -> tuple[dict[str, Passage], Any]:
    chromadb = optional("chromadb")
    passages = load(config.corpus)
    identity = fingerprint("chroma", _FORMAT, chromadb.__version__, config.embedder.name, passages=passages)
    build = partial(_build, passages, config.embedder, checkpoint)
    folder = index_folder(config.cache, "chroma", identity, build, checkpoint)
    collection = _client(owned_copy(folder)).get_collection(_NAME, embedding_function=None)
    return {passage.id: passage for passage in passages}, collection


def _build(passages: Sequence[Passage], embedder: Embedder, checkpoint: Checkpoint, folder: Path) -> None:
    client = _client(folder)
    try:
        collection = client.create_collection(_NAME, configuration=COSINE, embedding_function=None)
        most = min(BATCH, client.get_max_batch_size())
        for some, vectors in embedded(passages, embedder, checkpoint):
            for start in range(0, len(some), most):
                part = slice(start, start + most)
                collection.add(ids=[p.id for p in some[part]], embeddings=vectors[part])
        if (count := collection.count()) != len(passages):
            raise RuntimeError(f"Chroma kept {count} of {len(passages)} passages in {folder}; try again")
    finally:
        client.close()  # the folder is about to get another name


def _client(folder: Path) -> Any:
    chromadb = optional("chromadb")
    return chromadb.PersistentClient(folder, settings=chromadb.Settings(anonymized_telemetry=False))
