"""Search over HTTP, against servers on this machine: the contract, and everything that a server can do wrong."""

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import trio

from envs.search import ChromaServerRetriever, HashedEmbedder, HttpRetriever, Passage, Rules, Server, make_env
from jaxrl.env import EnvironmentFault
from jaxrl.tools import ToolFault
from jaxrl.types import Message, Task, ToolCall

PASSAGES = (Passage("td", "Chad", "N'Djamena"), Passage("ml", "Mali", "Bamako"), Passage("pe", "Peru", "Lima"))

Answer = Callable[[str, str, Any], tuple[int, Any]]
"""(method, path, body) -> status, and JSON or bytes."""


@dataclass
class Asked:
    """What a server was asked, and where it is."""

    url: str = ""
    requests: list[tuple[str, str, Any]] = field(default_factory=list)


@contextmanager
def serving(answer: Answer) -> Iterator[Asked]:
    """A server on a free port, which answers each request with what `answer` says."""
    asked = Asked()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = (self.command, self.path, json.loads(body) if body else None)
            asked.requests.append(request)
            status, said = answer(*request)
            content = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = respond

        def log_message(self, format: str, *args: object) -> None:
            return

    class Quiet(ThreadingHTTPServer):
        request_queue_size = 64
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            return  # a client that gave up

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    asked.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def retrieve(method: str, path: str, body: Any) -> tuple[int, Any]:
    """A server of the contract, which finds passages that share a word with the query."""
    assert (method, path) == ("POST", "/retrieve")
    assert sorted(body) == ["queries", "return_scores", "topk"]
    hits = [
        [
            {"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": 0.5}
            for p in PASSAGES
            if p.title in query
        ][: body["topk"]]
        for query in body["queries"]
    ]
    return 200, {"result": hits}


def impatient(url: str, **settings: Any) -> HttpRetriever:
    return HttpRetriever(Server(url, **{"timeout": 5.0, "retries": 1, "backoff": 0.01, **settings}))


async def titles(retriever: Any, queries: Sequence[str], k: int = 3) -> list[list[str]]:
    return [[hit.passage.title for hit in hits] for hits in await retriever.search(queries, k)]


async def test_queries_are_posted_and_passages_come_back_in_order() -> None:
    with serving(retrieve) as asked:
        retriever = impatient(asked.url)
        await retriever.prepare()
        found = await retriever.search(["Mali or Chad", "Peru", "Atlantis"], 2)
    assert [[hit.passage for hit in hits] for hits in found] == [[PASSAGES[0], PASSAGES[1]], [PASSAGES[2]], []]
    assert found[0][0].score == 0.5
    body = {"queries": ["Mali or Chad", "Peru", "Atlantis"], "topk": 2, "return_scores": True}
    assert asked.requests[-1] == ("POST", "/retrieve", body)


async def test_an_address_may_name_the_path_and_no_query_asks_nobody() -> None:
    with serving(retrieve) as asked:
        assert await titles(impatient(f"{asked.url}/retrieve"), ["Peru"]) == [["Peru"]]
        assert await titles(impatient(f"{asked.url}/"), ["Peru"]) == [["Peru"]]
        assert await impatient(asked.url).search([], 3) == []
    assert len(asked.requests) == 2


async def test_a_server_that_gives_more_than_k_or_no_scores_is_understood() -> None:
    documents = [{"id": p.id, "contents": f"{p.title}\n{p.text}"} for p in PASSAGES]
    with serving(lambda *_: (200, {"result": [documents]})) as asked:
        (hits,) = await impatient(asked.url).search(["x"], 2)
    assert [hit.passage for hit in hits] == list(PASSAGES[:2])
    assert hits[0].score > hits[1].score


async def test_documents_without_an_id_are_told_apart_by_content() -> None:
    documents = [{"contents": "A\na"}, {"contents": "B\nb"}, {"contents": "A\na"}]
    with serving(lambda *_: (200, {"result": [documents]})) as asked:
        (hits,) = await impatient(asked.url).search(["x"], 3)
    assert [hit.passage.title for hit in hits] == ["A", "B", "A"]
    assert hits[0].passage.id == hits[2].passage.id != hits[1].passage.id


async def test_100_kilobytes_and_half_surrogates_reach_the_server() -> None:
    with serving(retrieve) as asked:
        assert await titles(impatient(asked.url), ["Peru " * 20_000, "\ud800 Mali"]) == [["Peru"], ["Mali"]]
    assert asked.requests[-1][2]["queries"][1] == "? Mali"


async def test_what_may_pass_is_tried_again() -> None:
    statuses = iter([503, 429, 200])

    def flaky(*request: Any) -> tuple[int, Any]:
        status = next(statuses)
        return (200, retrieve(*request)[1]) if status == 200 else (status, {"detail": "busy"})

    with serving(flaky) as asked:
        assert await titles(impatient(asked.url, retries=2), ["Peru"]) == [["Peru"]]
    assert len(asked.requests) == 3


async def test_I13_a_dead_server_is_a_fault_that_names_it() -> None:
    with serving(retrieve) as asked:
        pass
    with pytest.raises(EnvironmentFault, match=r"no answer after 2 failed attempts.*Is the server running") as caught:
        await impatient(asked.url).prepare()
    assert asked.url in str(caught.value)
    env = make_env(Task("?", target=["x"]), retriever=impatient(asked.url), rules=Rules())
    await env.reset(Task("?", target=["x"]))
    with pytest.raises(ToolFault, match="Is the server running"):
        await env.step(Message("assistant", tool_calls=(ToolCall("search", '{"query_list": ["x"]}'),)))


async def test_a_server_that_hangs_is_given_up_and_a_search_can_be_cancelled() -> None:
    release = threading.Event()

    def hang(*_: Any) -> tuple[int, Any]:
        release.wait(30)
        return 200, {}

    with serving(hang) as asked:
        try:
            with pytest.raises(EnvironmentFault, match=r"no whole response within 0\.1 s"):
                await impatient(asked.url, timeout=0.1).search(["x"], 1)
            with pytest.raises(EnvironmentFault, match="not even one ended in time"):
                await impatient(asked.url, patience=0.1).search(["x"], 1)
            began = time.monotonic()
            with trio.move_on_after(0.1) as scope:
                await impatient(asked.url).search(["x"], 1)
            assert scope.cancelled_caught
            assert time.monotonic() - began < 3
        finally:
            release.set()


@pytest.mark.parametrize(
    ("status", "said", "teaches"),
    [
        (404, {"detail": "Not Found"}, r"status 404.*Not Found.*not tried again"),
        (422, b"topk missing", "status 422: topk missing"),
        (500, b"boom", "the last: status 500: boom"),
        (200, b"<html>", "the answer is not JSON"),
        (200, b'{"result": "caf\xe9"}', "byte 16 of the answer is not UTF-8"),
        (200, b"[" * 100_000, "the answer is not JSON"),
        (200, {}, "no answer of the retrieval contract"),
        (200, [], "no answer of the retrieval contract"),
        (200, {"result": []}, "expected a list of 1 lists"),
        (200, {"result": [[{"document": {"id": "1"}, "score": 1}]]}, "no answer of the retrieval contract"),
        (200, {"result": [[{"document": "text", "score": 1}]]}, "no answer of the retrieval contract"),
        (200, {"result": [["text"]]}, "no answer of the retrieval contract"),
        (200, {"result": [[{"document": {"id": "1", "contents": "x"}, "score": None}]]}, "no answer of the"),
        (200, b'{"result": [[{"document": {"id": "1", "contents": "x"}, "score": NaN}]]}', "a score is nan"),
        (200, {"result": [[{"document": {"id": "1", "contents": "x"}, "score": 10**400}]]}, "a score is inf"),
    ],
)
async def test_an_answer_that_is_none_is_a_fault(status: int, said: Any, teaches: str) -> None:
    with serving(lambda *_: (status, said)) as asked, pytest.raises(EnvironmentFault, match=teaches) as caught:
        await impatient(asked.url).search(["x"], 1)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://a:b@host", "http://h/?key=1"])
def test_what_is_no_address_is_refused_and_secrets_are_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="url") as caught:
        Server(url)
    assert "a:b" not in str(caught.value)
    assert "key=1" not in str(caught.value)


@pytest.mark.parametrize("setting", [{"timeout": 0}, {"patience": float("inf")}, {"backoff": -1}, {"retries": -1}])
def test_wrong_patience_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        Server("http://127.0.0.1:1", **setting)


def test_retrievers_over_http_are_picklable_values() -> None:
    for retriever in (impatient("http://127.0.0.1:1"), ChromaServerRetriever(Server("http://127.0.0.1:1"))):
        assert pickle.loads(pickle.dumps(retriever)) == retriever


# --- a Chroma server ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Countries:
    """A corpus in memory."""

    passages: tuple[Passage, ...] = PASSAGES

    def read(self) -> Sequence[Passage]:
        return self.passages


class Collections:
    """What a Chroma server answers to the few requests that are made, with exact search."""

    def __init__(self) -> None:
        self.named: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[str, tuple[list[float], str, dict[str, Any]]]] = {}
        self.loses = 0

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        tail = path.removeprefix("/api/v2/tenants/default_tenant/databases/default_database/collections")
        assert tail != path, path
        match tail.strip("/").split("/"):
            case [""]:
                found = self.named.setdefault(
                    body["name"], {"id": f"id-{len(self.named)}", "metadata": body["metadata"]}
                )
                self.rows.setdefault(found["id"], {})
                return 200, found
            case [name]:
                return (200, self.named[name]) if name in self.named else (404, {"error": "NotFoundError"})
            case [id, "count"]:
                return 200, len(self.rows[id]) - self.loses
            case [id, "upsert"]:
                columns = (body[c] for c in ("ids", "embeddings", "documents", "metadatas"))
                self.rows[id] |= {i: (e, d, m) for i, e, d, m in zip(*columns, strict=True)}
                return 201, {}
            case [id, "query"]:
                ranked = [self._ranked(self.rows[id], q)[: body["n_results"]] for q in body["query_embeddings"]]
                names = ("distances", "ids", "documents", "metadatas")
                return 200, {name: [[hit[i] for hit in hits] for hits in ranked] for i, name in enumerate(names)}
        return 404, {}

    @staticmethod
    def _ranked(rows: Any, query: Sequence[float]) -> list[tuple[float, str, str, Any]]:
        scored = [(1 - sum(a * b for a, b in zip(e, query, strict=True)), i, d, m) for i, (e, d, m) in rows.items()]
        return sorted(scored, key=lambda hit: hit[0])


def chroma(url: str, width: int = 64, **settings: Any) -> ChromaServerRetriever:
    server = Server(url, timeout=5.0, retries=0, backoff=0.01)
    return ChromaServerRetriever(server, **{"corpus": Countries(), "embedder": HashedEmbedder(width), **settings})


async def test_a_collection_is_filled_once_and_searched() -> None:
    with serving(Collections()) as asked:
        retriever = chroma(asked.url)
        await retriever.prepare()
        found = await retriever.search(["Chad", "Peru Lima", "?"], 2)
        assert [hits[0].passage for hits in found[:2]] == [PASSAGES[0], PASSAGES[2]]
        assert found[2] == []
        assert 0 < found[0][0].score <= 1.0001
        assert len((await retriever.search(["Mali"], 100))[0]) == 3
        await chroma(asked.url, collection="jaxrl-search").prepare()
    assert [path.rsplit("/", 1)[1] for _, path, _ in asked.requests].count("upsert") == 1


async def test_N15_another_embedder_or_corpus_is_another_collection() -> None:
    collections = Collections()
    with serving(collections) as asked:
        await chroma(asked.url).prepare()
        await chroma(asked.url, width=32).prepare()
        await chroma(asked.url, corpus=Countries(PASSAGES[:2])).prepare()
    assert len(collections.named) == 3
    assert sorted(len(rows) for rows in collections.rows.values()) == [2, 3, 3]


async def test_N13_two_clients_may_fill_a_collection_at_once() -> None:
    collections = Collections()
    with serving(collections) as asked:
        one, two = chroma(asked.url), chroma(asked.url, tenant="default_tenant", collection="jaxrl-search")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.prepare)
            nursery.start_soon(two.prepare)
        assert await titles(two, ["Peru"], 1) == [["Peru"]]
    assert [len(rows) for rows in collections.rows.values()] == [3]


@pytest.mark.parametrize("metadata", [{"embedder": "hashed-1-32"}, {}, None])
async def test_N15_a_collection_of_another_embedder_is_refused(metadata: Any) -> None:
    collections = Collections()
    collections.named["wiki"] = {"id": "id-w", "metadata": metadata}
    with serving(collections) as asked, pytest.raises(ValueError, match=r"hashed-1-64.*which finds nonsense"):
        await chroma(asked.url, corpus=None, collection="wiki").prepare()


async def test_a_collection_that_is_there_already_is_searched_as_it_is() -> None:
    collections = Collections()
    collections.named["wiki"] = {"id": "id-w", "metadata": {"embedder": "hashed-1-64"}}
    (vector,) = HashedEmbedder(64).embed(["Oslo"]).tolist()
    collections.rows["id-w"] = {"n": (vector, "Oslo", None)}  # pyright: ignore[reportArgumentType]
    with serving(collections) as asked:
        (hits,) = await chroma(asked.url, corpus=None, collection="wiki").search(["Oslo"], 1)
        with pytest.raises(EnvironmentFault, match="status 404"):
            await chroma(asked.url, corpus=None, collection="absent").prepare()
    assert [hit.passage for hit in hits] == [Passage("n", "", "Oslo")]


@pytest.mark.parametrize(
    "wrong", [{"distances": [[10**400]]}, {"distances": [[float("nan")]]}, {"documents": [[7]]}, {"metadatas": [["x"]]}]
)
async def test_a_hit_of_a_chroma_server_that_is_none_is_a_fault(wrong: dict[str, Any]) -> None:
    said = {"ids": [["1"]], "documents": [["x"]], "metadatas": [[None]], "distances": [[0.5]], **wrong}
    found = {"id": "id-w", "metadata": {"embedder": "hashed-1-64"}}
    with (
        serving(lambda _, path, *rest: (200, said if path.endswith("/query") else found)) as asked,
        pytest.raises(EnvironmentFault, match="no answer of a Chroma server"),
    ):
        await chroma(asked.url, corpus=None, collection="wiki").search(["x"], 1)


async def test_a_server_that_loses_passages_or_answers_something_else_is_a_fault() -> None:
    collections = Collections()
    collections.loses = 1
    with serving(collections) as asked, pytest.raises(EnvironmentFault, match="has 2 of 3 passages"):
        await chroma(asked.url).prepare()
    with (
        serving(lambda *_: (200, {"what": 1})) as asked,
        pytest.raises(EnvironmentFault, match="no answer of a Chroma"),
    ):
        await chroma(asked.url).prepare()
