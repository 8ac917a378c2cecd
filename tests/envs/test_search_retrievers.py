"""Corpora, embedders, indexes and the retrievers of this machine: what is found, and what is built how often."""

import json
import math
import multiprocessing
import pickle
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from envs.search import (
    Bm25Retriever,
    ExactRetriever,
    Factbook,
    HashedEmbedder,
    JsonLines,
    Passage,
    Retriever,
    WordLlamaEmbedder,
)
from envs.search.bm25 import words
from envs.search.corpus import encodable, fingerprint, load
from envs.search.index import MANIFEST, index_folder, opened_once, owned_copy
from envs.search.packages import WANTED_FOR, optional
from envs.search.retriever import best

ANIMALS = (
    Passage("1", "Dog", "A dog barks at the cat."),
    Passage("2", "Cat", "A cat says meow, meow."),
    Passage("3", "Cow", "The cow is brown."),
)


@dataclass(frozen=True)
class Animals:
    """A corpus in memory."""

    passages: tuple[Passage, ...] = ANIMALS

    def read(self) -> Sequence[Passage]:
        return self.passages


def kinds(cache: Path, corpus: Animals | JsonLines = Animals()) -> dict[str, Retriever]:
    return {
        "bm25": Bm25Retriever(corpus, str(cache)),
        "exact": ExactRetriever(corpus, HashedEmbedder(64), str(cache)),
    }


KINDS = ("bm25", "exact")


async def ids(retriever: Retriever, *queries: str, k: int = 3) -> list[list[str]]:
    return [[hit.passage.id for hit in hits] for hits in await retriever.search(queries, k)]


# --- what every retriever does --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_best_passages_come_first_for_each_query(kind: str, tmp_path: Path) -> None:
    retriever = kinds(tmp_path)[kind]
    found = await retriever.search(["meow cat", "brown cow"], 2)
    assert [hits[0].passage for hits in found] == [ANIMALS[1], ANIMALS[2]]
    for hits in found:
        assert len(hits) <= 2
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert await retriever.search(["meow cat", "brown cow"], 2) == found
    assert await retriever.search([], 2) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_k_larger_than_the_corpus_gives_what_there_is(kind: str, tmp_path: Path) -> None:
    (found,) = await ids(kinds(tmp_path)[kind], "cat", k=1000)
    assert found[0] == "2"
    assert len(found) == len(set(found)) <= len(ANIMALS)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_query_that_matches_nothing_has_an_empty_result(kind: str, tmp_path: Path) -> None:
    assert await ids(kinds(tmp_path)[kind], "", "?!", "\n") == [[], [], []]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_query_of_100_kilobytes_is_answered(kind: str, tmp_path: Path) -> None:
    (found,) = await ids(kinds(tmp_path)[kind], "meow cat " * 11_112, k=1)
    assert found == ["2"]


@pytest.mark.parametrize("kind", KINDS)
async def test_half_a_surrogate_pair_in_a_query_is_a_question_mark(kind: str, tmp_path: Path) -> None:
    assert await ids(kinds(tmp_path)[kind], "cow \ud800 brown", k=1) == [["3"]]


@pytest.mark.parametrize("kind", KINDS)
async def test_less_than_one_passage_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="k=0: expected at least 1"):
        await kinds(tmp_path)[kind].search(["cat"], 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_retrievers_are_small_picklable_values(kind: str, tmp_path: Path) -> None:
    retriever = kinds(tmp_path)[kind]
    await retriever.prepare()
    copy = pickle.loads(pickle.dumps(retriever))
    assert copy == retriever
    assert len(pickle.dumps(retriever)) < 1000
    assert await ids(copy, "meow", k=1) == [["2"]]


async def test_I9_a_cancelled_search_leaves_no_thread_at_work(tmp_path: Path) -> None:
    retriever = kinds(tmp_path)["bm25"]
    with trio.move_on_after(0):
        await retriever.search(["cat"], 1)
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(retriever.search, ["cat"], 1)
    assert await ids(retriever, "meow", k=1) == [["2"]]


# --- BM25 -----------------------------------------------------------------------------------------


def bm25_by_the_book(passages: Sequence[Passage], query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    counts = [Counter(words(p.searched)) for p in passages]
    mean = sum(c.total() for c in counts) / len(counts)
    scores = [0.0] * len(passages)
    for word in words(query):
        n = sum(word in c for c in counts)
        idf = math.log(1 + (len(passages) - n + 0.5) / (n + 0.5))
        for i, c in enumerate(counts):
            scores[i] += idf * c[word] / (c[word] + k1 * (1 - b + b * c.total() / mean)) if c[word] else 0.0
    return scores


@given(
    texts=st.lists(
        st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=8).map(" ".join), min_size=1, max_size=6
    ),
    query=st.lists(st.sampled_from(["a", "b", "c", "d", "e", "f"]), max_size=4).map(" ".join),
)
async def test_bm25_scores_are_those_of_the_formula(tmp_path_factory: pytest.TempPathFactory, texts, query) -> None:
    passages = tuple(Passage(str(i), "", text) for i, text in enumerate(texts))
    retriever = Bm25Retriever(Animals(passages), str(tmp_path_factory.mktemp("bm25")))
    (found,) = await retriever.search([query], 10)
    expected = bm25_by_the_book(passages, query)
    assert {hit.passage.id for hit in found} == {str(i) for i, score in enumerate(expected) if score > 0}
    for hit in found:
        assert hit.score == pytest.approx(expected[int(hit.passage.id)], rel=1e-5)


def test_words_ignore_case_accents_and_marks() -> None:
    assert words("N'Djamena, BRAS\u00cdLIA: .td (3.5)") == ["n", "djamena", "brasilia", "td", "3", "5"]


@pytest.mark.parametrize("setting", [{"k1": -1.0}, {"b": 1.5}, {"b": float("nan")}])
def test_bm25_settings_that_make_no_sense_are_refused(setting, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected k1 >= 0 and 0 <= b <= 1"):
        Bm25Retriever(Animals(), str(tmp_path), **setting)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0, 2.0]), min_size=1, max_size=12), st.integers(1, 15))
def test_the_best_are_the_highest_above_zero_and_ties_keep_their_order(scores: list[float], k: int) -> None:
    expected = sorted((i for i, s in enumerate(scores) if s > 0), key=lambda i: (-scores[i], i))[:k]
    assert best(np.array(scores, np.float32), k) == expected


# --- embedders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [HashedEmbedder, WordLlamaEmbedder])
def test_vectors_have_length_1_and_depend_on_the_text_alone(make) -> None:
    if make is WordLlamaEmbedder:
        pytest.importorskip("wordllama", reason="the default embedder is in the extra `search`")
    embedder = make()
    texts = ["the capital of France", "", "brown cow", "x" * 100_000, "  "]
    vectors = embedder.embed(texts)
    assert (vectors.shape, vectors.dtype) == ((5, embedder.width), np.float32)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 0, 1, 1, 0], abs=1e-5)
    assert np.allclose(embedder.embed(texts[2:3]), vectors[2:3], atol=1e-5)
    assert embedder.embed([]).shape == (0, embedder.width)
    assert str(embedder.width) in embedder.name


def test_the_default_embedder_knows_what_is_meant_and_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wordllama", reason="the default embedder is in the extra `search`")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it used the network"))
    dog, puppy, tax = WordLlamaEmbedder().embed(["dog", "puppy", "income tax law"])
    assert dog @ puppy > dog @ tax
    with pytest.raises(ValueError, match="width=7: the package wordllama has no such weights"):
        WordLlamaEmbedder(7).embed(["x"])


@pytest.mark.parametrize(("module", "extra"), [(m, extra) for m, (extra, _) in WANTED_FOR.items()])
def test_a_missing_package_says_how_to_get_it(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'jaxrl\[{extra}\]'") as caught:
        optional(module)
    assert module.replace("_", "-") in str(caught.value)


# --- corpora --------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_both_shapes_of_documents_are_read(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    lines = [
        {"id": "0", "contents": '"Evan Morris"\nA lobbyist.'},
        {"id": 1, "contents": "No title at all."},
        {"id": "2", "title": "T", "text": "two\nlines"},
        {"id": "3", "title": "\u00e9", "contents": "\ud800"},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding=encoding)
    assert load(JsonLines(str(file))) == (
        Passage("0", "Evan Morris", "A lobbyist."),
        Passage("1", "", "No title at all."),
        Passage("2", "T", "two\nlines"),
        Passage("3", "\u00e9", "?"),
    )


@pytest.mark.parametrize(
    ("content", "teaches"),
    [
        (b'{"id": "1", "text": "caf\xe9"}', r"line 1: byte 25 is not UTF-8; save the file as UTF-8"),
        (b'{"id": "1", "text": "x"}\nnot json', "line 2: "),
        (b'{"text": "x"}', 'line 1: expected an object with "id"'),
        (b'{"id": "1", "text": 3}', '"text" and "contents" texts'),
        (b"[" * 100_000, "line 1: "),
        (b"", "has no passages"),
        (b'{"id": "1", "text": "x"}\n{"id": "1", "text": "y"}', "two passages with the id '1'"),
    ],
)
def test_a_file_that_is_no_corpus_says_which_line(content: bytes, teaches: str, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=teaches):
        load(JsonLines(str(file)))


def test_a_fingerprint_changes_with_every_part() -> None:
    one, two = Passage("1", "a", "b"), Passage("1", "ab", "")
    prints = {
        fingerprint(),
        fingerprint("x"),
        fingerprint("x", "y"),
        fingerprint("xy"),
        fingerprint("x", passages=[one]),
        fingerprint("x", passages=[two]),
        fingerprint("x", passages=[one, two]),
        fingerprint("x", passages=[two, one]),
    }
    assert len(prints) == 8
    assert encodable("a\ud800b") == "a?b"


# --- index folders --------------------------------------------------------------------------------


def folders(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.is_dir())


@dataclass(frozen=True)
class Counting:
    """An embedder that writes down what it embeds."""

    log: str
    version: int = 1
    width: int = 16

    @property
    def name(self) -> str:
        return f"counting-{self.version}"

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        with open(self.log, "a") as log:
            log.writelines(f"{len(texts)}\n" for _ in texts)
        return HashedEmbedder(self.width).embed(texts)


async def test_N15_another_embedder_or_corpus_is_another_index(tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    log.touch()

    async def embedded(retriever: ExactRetriever) -> int:
        before = len(log.read_text().splitlines())
        await retriever.prepare()
        return len(log.read_text().splitlines()) - before

    fewer = Animals(ANIMALS[:2])
    assert await embedded(ExactRetriever(Animals(), Counting(str(log)), str(cache))) == 3
    assert await embedded(ExactRetriever(Animals(), Counting(str(log)), str(cache))) == 0
    assert await embedded(ExactRetriever(Animals(), Counting(str(log), 2), str(cache))) == 3
    assert await embedded(ExactRetriever(fewer, Counting(str(log)), str(cache))) == 2
    assert len(folders(cache)) == 3


@pytest.mark.slow
async def test_another_process_finds_the_index_and_does_not_build_it_again(tmp_path: Path) -> None:
    cache, written = str(tmp_path / "cache"), tmp_path / "log"
    log = str(written)
    await ExactRetriever(Animals(), Counting(log), cache).prepare()
    queue = multiprocessing.get_context("spawn").Queue()
    child = multiprocessing.get_context("spawn").Process(target=search_and_tell, args=(cache, log, queue))
    child.start()
    found = queue.get(timeout=120)
    child.join(60)
    assert found == [["2"]]
    assert written.read_text().splitlines().count("3") == 3, "the passages were embedded once"


def search_and_tell(cache: str, log: str, queue) -> None:
    queue.put(trio.run(ids, ExactRetriever(Animals(), Counting(log), cache), "meow"))


def build_slowly(cache: str, log: str, start, queue) -> None:
    def build(folder: Path) -> None:
        with open(log, "a") as written:
            written.write("built\n")
        for number in range(20):
            (folder / str(number)).write_text("x")
            time.sleep(0.02)

    start.wait(60)
    folder = index_folder(cache, "slow", "f" * 64, build)
    queue.put(len(list(folder.iterdir())))


@pytest.mark.slow
def test_two_processes_that_build_at_once_build_once_and_both_see_the_whole(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    queue, start = spawn.Queue(), spawn.Barrier(2)
    cache, log = str(tmp_path / "cache"), tmp_path / "log"
    children = [spawn.Process(target=build_slowly, args=(cache, str(log), start, queue)) for _ in range(2)]
    for child in children:
        child.start()
    assert [queue.get(timeout=120) for _ in children] == [21, 21]
    for child in children:
        child.join(60)
    assert log.read_text() == "built\n"


def test_a_build_that_fails_leaves_nothing_that_looks_whole_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError, match="out of disk"):
        index_folder(tmp_path, "kind", "a" * 64, fail)
    assert not (tmp_path / f"kind-{'a' * 16}").exists()
    folder = index_folder(tmp_path, "kind", "a" * 64, lambda folder: None)
    assert [p.name for p in folder.iterdir()] == [MANIFEST]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"fingerprint": "another"}'])
def test_a_folder_whose_manifest_does_not_agree_is_built_again(damage: str, tmp_path: Path) -> None:
    folder = index_folder(tmp_path, "kind", "a" * 64, lambda folder: None)
    (folder / MANIFEST).write_text(damage)

    def build(folder: Path) -> None:
        (folder / "new").write_text("x")

    again = index_folder(tmp_path, "kind", "a" * 64, build)
    assert (again, (folder / "new").read_text()) == (folder, "x")


@pytest.mark.parametrize(("kind", "name"), [("exact", "vectors.npy"), ("bm25", "weights.npz"), ("bm25", "terms.json")])
@pytest.mark.parametrize("damage", ["absent", "empty", "garbage", "cut", "another"])
async def test_a_damaged_index_says_which_folder_to_delete(kind: str, name: str, damage: str, tmp_path: Path) -> None:
    await kinds(tmp_path, Animals(ANIMALS[:2]))[kind].prepare()
    (other,) = folders(tmp_path)
    await kinds(tmp_path)[kind].prepare()
    (folder,) = {*folders(tmp_path)} - {other}
    file, damaged = tmp_path / folder / name, tmp_path / other / name
    whole = file.read_bytes()
    wrong = {"empty": b"", "garbage": b"PK\x03\x04 garbage", "cut": whole[:-9], "another": damaged.read_bytes()}
    file.unlink()
    if damage in wrong:
        file.write_bytes(wrong[damage])
    again = kinds(tmp_path / ".." / tmp_path.name)[kind]  # which this process has not opened
    with pytest.raises(OSError, match=f"{folder} is damaged: delete that folder"):
        await again.prepare()
    shutil.rmtree(tmp_path / folder)
    assert await ids(again, "meow") == [["2"]]


def test_waiting_for_another_builder_can_be_stopped(tmp_path: Path) -> None:
    building, stop = threading.Event(), threading.Event()

    def slowly(folder: Path) -> None:
        building.set()
        stop.wait(30)

    thread = threading.Thread(target=index_folder, args=(tmp_path, "kind", "a" * 64, slowly))
    thread.start()
    building.wait(30)

    def enough() -> None:
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            index_folder(tmp_path, "kind", "a" * 64, slowly, enough)
    finally:
        stop.set()
        thread.join(30)


def test_N13_a_copy_belongs_to_one_owner_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "data").write_text("x")

    folder = index_folder(tmp_path, "kind", "a" * 64, build)
    one, two = owned_copy(folder), owned_copy(folder)
    assert len({folder, one, two}) == 3
    (one / "data").write_text("changed")
    assert [(each / "data").read_text() for each in (folder, two)] == ["x", "x"]
    ended = multiprocessing.get_context("spawn").Process(target=owned_copy, args=(folder,))
    ended.start()
    ended.join(120)
    third = folder.with_name(folder.name + ".copy2")
    assert (third / "data").read_text() == "x"
    (third / MANIFEST).unlink()
    (third / "data").write_text("half")
    assert owned_copy(folder) == third
    assert (third / "data").read_text() == "x"


def test_threads_that_ask_at_once_open_an_index_once() -> None:
    made: list[int] = []
    gate, key = threading.Barrier(4), object()

    def make() -> int:
        made.append(1)
        return len(made)

    def ask(answers: list[int]) -> None:
        gate.wait(30)
        answers.append(opened_once(key, make))

    answers: list[int] = []
    threads = [threading.Thread(target=ask, args=(answers,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (answers, made) == ([1] * 4, [1])


def test_opening_that_fails_is_tried_again() -> None:
    key = object()
    with pytest.raises(ZeroDivisionError):
        opened_once(key, lambda: 1 // 0)
    assert opened_once(key, lambda: "open") == "open"


def test_the_default_corpus_is_the_factbook() -> None:
    assert Bm25Retriever().corpus == ExactRetriever().corpus == Factbook()
    assert ExactRetriever().embedder == WordLlamaEmbedder()
