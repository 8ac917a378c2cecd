"""Chroma itself, embedded and as a server: skipped where the package is not installed."""

import hashlib
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import trio

from envs.search import (
    ChromaRetriever,
    ChromaServerRetriever,
    ExactRetriever,
    HashedEmbedder,
    Passage,
    Retriever,
    Server,
)

pytest.importorskip("chromadb", reason="Chroma is in the extra `chroma`: pip install 'jaxrl[chroma]'")
pytestmark = pytest.mark.slow

WORDS = ("red", "green", "blue", "dog", "cat", "cow", "sun", "moon", "tree", "river")


@dataclass(frozen=True)
class Random:
    """Passages of random words, each with a number of its own."""

    count: int = 1500

    def read(self) -> Sequence[Passage]:
        rng = np.random.default_rng(0)
        return [Passage(str(i), f"n{i}", " ".join(rng.choice(WORDS, 6))) for i in range(self.count)]


def embedded(cache: Path, **settings) -> ChromaRetriever:
    return ChromaRetriever(**{"corpus": Random(), "embedder": HashedEmbedder(256), "cache": str(cache), **settings})


async def test_it_finds_what_an_exact_search_finds(tmp_path: Path) -> None:
    queries = [*QUERIES, "river"]
    exact = ExactRetriever(Random(), HashedEmbedder(256), str(tmp_path))
    chroma, expected = await embedded(tmp_path).search(queries, 5), await exact.search(queries, 5)
    for mine, theirs in zip(chroma[:2], expected[:2], strict=True):
        assert mine[0].passage == theirs[0].passage
        assert [hit.score for hit in mine] == pytest.approx([hit.score for hit in theirs], abs=1e-3)


async def test_k_larger_than_the_corpus_an_empty_result_100_kilobytes_and_half_a_surrogate(tmp_path: Path) -> None:
    retriever = embedded(tmp_path, corpus=Random(3))
    assert len((await retriever.search(["red"], 50))[0]) == 3
    assert await retriever.search(["", "?"], 2) == [[], []]
    assert len((await retriever.search(["red " * 25_000], 1))[0]) == 1
    assert len((await retriever.search(["\ud800 n1"], 1))[0]) == 1
    assert await retriever.search([], 1) == []


async def test_N15_another_embedder_or_corpus_is_another_folder(tmp_path: Path) -> None:
    for settings in ({}, {"embedder": HashedEmbedder(32)}, {"corpus": Random(10)}):
        await embedded(tmp_path, **settings).prepare()
    assert len([folder for folder in folders(tmp_path) if ".copy" not in folder.name]) == 3


def folders(cache: Path) -> list[Path]:
    return sorted(p for p in cache.iterdir() if p.is_dir())


def state(folder: Path) -> dict[str, str]:
    """What the files of an index hold."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


QUERIES = [Random().read()[i].searched for i in (7, 200)]


async def found(retriever: Retriever) -> list[str]:
    return [hits[0].passage.id for hits in await retriever.search(QUERIES, 1)]


def ask(cache: str, start, queue) -> None:
    start.wait(60)
    queue.put(trio.run(found, embedded(Path(cache))))


def test_N13_processes_that_start_at_once_own_a_copy_each_of_one_index(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    queue, start = spawn.Queue(), spawn.Barrier(2)

    expected = trio.run(found, ExactRetriever(Random(), HashedEmbedder(256), str(tmp_path / "exact")))

    def together() -> list[list[str]]:
        children = [spawn.Process(target=ask, args=(str(tmp_path / "chroma"), start, queue)) for _ in range(2)]
        for child in children:
            child.start()
        answers = [queue.get(timeout=200) for _ in children]
        for child in children:
            child.join(60)
        return answers

    assert together() == [expected] * 2
    built, *copies = folders(tmp_path / "chroma")
    assert len(copies) == 2
    before = state(built)
    assert together() == [expected] * 2
    assert folders(tmp_path / "chroma") == [built, *copies], "a copy whose owner has ended is used again"
    assert state(built) == before


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A Chroma server on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "from chromadb.cli.cli import app; app()"
    command = [
        sys.executable,
        "-c",
        program,
        "run",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--path",
        str(tmp_path / "served"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and child.poll() is None:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/api/v2/heartbeat")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            child.kill()


async def test_N13_what_one_client_wrote_to_a_server_another_finds(server: str, tmp_path: Path) -> None:
    corpus, embedder = Random(300), HashedEmbedder(256)
    writer = ChromaServerRetriever(Server(server), corpus, embedder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.prepare)
        nursery.start_soon(ChromaServerRetriever(Server(server, retries=3), corpus, embedder).prepare)
    exact = ExactRetriever(corpus, embedder, str(tmp_path))
    for reader in (writer, ChromaServerRetriever(Server(server, retries=5), corpus, embedder)):
        assert await found(reader) == await found(exact)
        assert await reader.search(["?"], 1) == [[]]
        assert len((await reader.search(["red"], 1000))[0]) == 300
    name = await collection_name(server)
    with pytest.raises(ValueError, match="which finds nonsense"):
        await ChromaServerRetriever(Server(server), None, HashedEmbedder(32), collection=name).prepare()


async def collection_name(server: str) -> str:
    path = "/api/v2/tenants/default_tenant/databases/default_database/collections"
    (found,) = await Server(server).ask("GET", path)
    return found["name"]
