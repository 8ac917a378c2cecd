"""A retrieval server of the usual contract: POST /retrieve with queries, topk and return_scores.

    {"queries": ["..."], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 0.9}, ...], ...]}

A list of hits for each query, in order. Servers that leave scores out answer with bare documents; those are ranked by
their place. A document without an id is identified by its content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.search.corpus import fingerprint, read_document
from envs.search.retriever import Hit, check_k, finite, readable
from envs.search.wire import Server
from jaxrl.env import EnvironmentFault

_PATH = "/retrieve"


@dataclass(frozen=True)
class HttpRetriever:
    """Asks a server, which has the corpus and the index."""

    server: Server = field(default_factory=lambda: Server("http://127.0.0.1:8000"))

    async def prepare(self) -> None:
        """See the server answer a query. Raises EnvironmentFault when it does not."""
        await self.search(["test"], 1)

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """What the server finds; of more than `k` hits the first `k`."""
        check_k(k)
        if not queries:
            return []
        body = {"queries": readable(queries), "topk": k, "return_scores": True}
        path = "" if self.server.url.rstrip("/").endswith(_PATH) else _PATH
        answer = await self.server.ask("POST", path, body)
        try:
            return _hits(answer, len(queries), k)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            shown = repr(answer)[:300]
            raise EnvironmentFault(
                f"{self.server.url}: no answer of the retrieval contract ({error}): {shown}"
            ) from None


def _hits(answer: Any, queries: int, k: int) -> list[list[Hit]]:
    rows = answer["result"]
    if not isinstance(rows, list) or len(rows) != queries:
        raise ValueError(f'expected a list of {queries} lists under "result"')
    return [[_hit(hit, place) for place, hit in enumerate(row[:k])] for row in rows]


def _hit(hit: Any, place: int) -> Hit:
    document, score = (hit["document"], finite(hit["score"])) if "document" in hit else (hit, 1.0 / (1 + place))
    if isinstance(document, Mapping) and "id" not in document:
        said = (str(document.get(key, "")) for key in ("title", "text", "contents"))
        document = {**document, "id": fingerprint(*said)[:16]}
    return Hit(read_document(document), score)
