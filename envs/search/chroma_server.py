"""Search in a collection of a Chroma server, spoken to over its HTTP interface (version 2). Needs no package.

A collection says in its metadata which embedder its vectors are of, and queries of another are refused: they would
find nonsense without an error. One that is filled from a corpus has a fingerprint in its name, so another corpus or
embedder is another collection. Two processes may fill it at once: they write the same rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.search.chroma import COSINE
from envs.search.corpus import Corpus, Passage, encodable, fingerprint, load
from envs.search.embedder import Embedder, WordLlamaEmbedder
from envs.search.exact import BATCH
from envs.search.factbook import Factbook
from envs.search.retriever import Hit, check_k, finite, in_thread, readable
from envs.search.wire import Server
from jaxrl.env import EnvironmentFault

_FORMAT = "1"
_EMBEDDER = "embedder"


@dataclass(frozen=True)
class ChromaServerRetriever:
    """Finds the passages whose vectors are near the query's, in a server's collection.

    corpus: what the collection is filled with, if it is not there yet; its name is then <collection>-<fingerprint>.
    None takes the collection of exactly that name, whose metadata must have {"embedder": <the embedder's name>}; its
    documents are the texts, and a "title" in a row's metadata the title.
    """

    server: Server = field(default_factory=lambda: Server("http://127.0.0.1:8000"))
    corpus: Corpus | None = field(default_factory=Factbook)
    embedder: Embedder = field(default_factory=WordLlamaEmbedder)
    collection: str = "jaxrl-search"
    tenant: str = "default_tenant"
    database: str = "default_database"

    async def prepare(self) -> None:
        """Find the collection, or fill it. Raises EnvironmentFault for a server that fails."""
        await self._id()

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Scores are cosines."""
        check_k(k)
        asked = readable(queries)
        vectors = await in_thread(self.embedder.embed, asked)
        rows = [row for row in range(len(asked)) if vectors[row].any()]
        found: list[list[Hit]] = [[] for _ in queries]
        if rows:
            path = f"{self._collections}/{await self._id()}/query"
            include = ["documents", "metadatas", "distances"]
            body = {"query_embeddings": vectors[rows].tolist(), "n_results": k, "include": include}
            answer = await self.server.ask("POST", path, body)
            for row, hits in zip(rows, self._hits(answer, len(rows)), strict=True):
                found[row] = hits
        return found

    @property
    def _collections(self) -> str:
        return f"/api/v2/tenants/{self.tenant}/databases/{self.database}/collections"

    def _hits(self, answer: Any, queries: int) -> list[list[Hit]]:
        try:
            columns = [answer[name] for name in ("ids", "documents", "metadatas", "distances")]
            if any(len(column) != queries for column in columns):
                raise ValueError(f"expected {queries} rows in each column")
            return [[_hit(*each) for each in zip(*row, strict=True)] for row in zip(*columns, strict=True)]
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise EnvironmentFault(f"{self.server.url}: no answer of a Chroma server ({error})") from None

    async def _id(self) -> str:
        """The id of the collection, once it is whole and of this embedder."""
        if (known := _known.get(self)) is None:
            known = await (self._existing() if self.corpus is None else self._filled(self.corpus))
            _known[self] = known
        return known

    async def _existing(self) -> str:
        found = await self.server.ask("GET", f"{self._collections}/{self.collection}")
        theirs, ours = _metadata(found).get(_EMBEDDER), await in_thread(lambda: self.embedder.name)
        if theirs != ours:
            raise ValueError(
                f"collection {self.collection!r} says it was filled with the embedder {theirs!r}, and queries would be "
                f"embedded with {ours!r}, which finds nonsense: use that embedder, or, where its metadata is what is "
                f'wrong, collection.modify(metadata={{"embedder": {ours!r}}})'
            )
        return self._id_of(found)

    async def _filled(self, corpus: Corpus) -> str:
        passages = await in_thread(load, corpus)
        ours = await in_thread(lambda: self.embedder.name)
        identity = fingerprint("chroma-server", _FORMAT, ours, passages=passages)
        asked = {
            "name": f"{self.collection}-{identity[:16]}",
            "get_or_create": True,
            "configuration": COSINE,
            "metadata": {_EMBEDDER: ours},
        }
        created = self._id_of(await self.server.ask("POST", self._collections, asked))
        collection = f"{self._collections}/{created}"
        if await self.server.ask("GET", f"{collection}/count") != len(passages):
            for start in range(0, len(passages), BATCH):
                await self._put(collection, passages[start : start + BATCH])
            if (count := await self.server.ask("GET", f"{collection}/count")) != len(passages):
                raise EnvironmentFault(f"{self.server.url}: {asked['name']} has {count} of {len(passages)} passages")
        return created

    def _id_of(self, found: Any) -> str:
        if isinstance(found, Mapping) and isinstance(found.get("id"), str):
            return found["id"]
        raise EnvironmentFault(f"{self.server.url}: no answer of a Chroma server: {repr(found)[:300]}")

    async def _put(self, collection: str, passages: Sequence[Passage]) -> None:
        vectors = await in_thread(self.embedder.embed, [passage.searched for passage in passages])
        rows = {
            "ids": [passage.id for passage in passages],
            "embeddings": vectors.tolist(),
            "documents": [passage.text for passage in passages],
            "metadatas": [{"title": passage.title} for passage in passages],
        }
        await self.server.ask("POST", f"{collection}/upsert", rows)


_known: dict[ChromaServerRetriever, str] = {}
"""Ids of collections that were found whole by this process."""


def _metadata(found: Any) -> Mapping[str, Any]:
    return (found.get("metadata") if isinstance(found, Mapping) else None) or {}


def _hit(id: str, document: str | None, metadata: Mapping[str, Any] | None, distance: Any) -> Hit:
    title = str((metadata or {}).get("title", ""))
    return Hit(Passage(id, encodable(title), encodable(document or "")), 1.0 - finite(distance))
