"""Keyword search: BM25 as Lucene has it (Robertson and Zaragoza 2009, idf with 1 + inside the logarithm).

weight(term, passage) = ln(1 + (N - n + 0.5) / (n + 0.5)) * f / (f + k1 * (1 - b + b * length / mean length))

with N passages, n of them with the term, f its count in this one. The weights are worked out once, into a sparse
matrix of terms by passages; a query adds up the rows of its words. Needs no package beyond the core. (bm25s does the
same, but importing it runs a computation on JAX's default device, which in a worker process takes an accelerator's
memory.) Nothing here is random, and equal scores are ordered by the corpus.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import trio
from scipy import sparse

from envs.search.corpus import Corpus, Passage, fingerprint, load
from envs.search.factbook import Factbook
from envs.search.index import Checkpoint, default_root, index_folder, opened_once, reading
from envs.search.retriever import Hit, best, check_k, in_thread, readable

_FORMAT = "1"
_WORD = re.compile(r"\w+")
_WEIGHTS, _TERMS = "weights.npz", "terms.json"
_CHECK_EVERY = 1000


def words(text: str) -> list[str]:
    """Small letters without accents, split at everything that is neither letter nor digit."""
    plain = unicodedata.normalize("NFKD", text.lower())
    return _WORD.findall("".join(c for c in plain if not unicodedata.combining(c)))


@dataclass(frozen=True)
class Bm25Retriever:
    """Finds passages that have the words of the query, the rarer the better. A query of unknown words finds nothing.

    cache: folder of the index. k1: how fast repeating a word stops counting. b: how far long passages are held back.
    """

    corpus: Corpus = field(default_factory=Factbook)
    cache: str = field(default_factory=default_root)
    k1: float = 1.5
    b: float = 0.75

    def __post_init__(self) -> None:
        if not (self.k1 >= 0 and 0 <= self.b <= 1):
            raise ValueError(f"k1={self.k1}, b={self.b}: expected k1 >= 0 and 0 <= b <= 1")

    async def prepare(self) -> None:
        """Build or open the index."""
        await in_thread(self._open, trio.from_thread.check_cancelled)

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The passages with the highest sums of weights."""
        check_k(k)
        return await in_thread(self._search, readable(queries), k)

    def _search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        index = self._open(trio.from_thread.check_cancelled)
        return [index.find(query, k) for query in queries]

    def _open(self, checkpoint: Checkpoint) -> "_Index":
        return opened_once(self, partial(_make, self, checkpoint))


@dataclass(frozen=True)
class _Index:
    """Weights by term and passage, opened."""

    passages: Sequence[Passage]
    terms: dict[str, int]
    weights: sparse.csr_matrix

    def find(self, query: str, k: int) -> list[Hit]:
        scores = np.zeros(len(self.passages), np.float32)
        starts, columns, data = self.weights.indptr, self.weights.indices, self.weights.data
        for word, count in Counter(words(query)).items():
            row = self.terms.get(word)
            if row is not None:
                span = slice(starts[row], starts[row + 1])
                scores[columns[span]] += count * data[span]
        return [Hit(self.passages[i], float(scores[i])) for i in best(scores, k)]


def _make(config: Bm25Retriever, checkpoint: Checkpoint) -> _Index:
    passages = load(config.corpus)
    identity = fingerprint("bm25", _FORMAT, repr((config.k1, config.b)), passages=passages)
    build = partial(_build, passages, config.k1, config.b, checkpoint)
    folder = index_folder(config.cache, "bm25", identity, build, checkpoint)
    with reading(folder):
        terms = json.loads((folder / _TERMS).read_text(encoding="utf-8"))
        with (folder / _WEIGHTS).open("rb") as file:  # numpy leaves one open that it cannot read
            weights = sparse.load_npz(file)
        if weights.shape != (len(terms), len(passages)):
            raise ValueError(f"weights {weights.shape} of {len(terms)} terms and {len(passages)} passages")
    return _Index(passages, {term: row for row, term in enumerate(terms)}, weights)


def _build(passages: Sequence[Passage], k1: float, b: float, checkpoint: Checkpoint, folder: Path) -> None:
    terms: dict[str, int] = {}
    rows, columns, counts, lengths = [], [], [], np.zeros(len(passages))
    for column, passage in enumerate(passages):
        if column % _CHECK_EVERY == 0:
            checkpoint()
        found = Counter(words(passage.searched))
        lengths[column] = found.total()
        rows += [terms.setdefault(word, len(terms)) for word in found]
        columns += [column] * len(found)
        counts += found.values()
    row, column, count = np.array(rows, np.int64), np.array(columns, np.int64), np.array(counts, np.float64)
    held = np.bincount(row, minlength=len(terms))
    idf = np.log1p((len(passages) - held + 0.5) / (held + 0.5))
    normal = k1 * (1 - b + b * lengths / (lengths.mean() or 1.0))
    weights = (idf[row] * count / (count + normal[column])).astype(np.float32)
    matrix = sparse.csr_matrix((weights, (row, column)), shape=(len(terms), len(passages)))
    sparse.save_npz(folder / _WEIGHTS, matrix, compressed=False)
    (folder / _TERMS).write_text(json.dumps(list(terms)), encoding="utf-8")
