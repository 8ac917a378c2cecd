"""Passages and where they come from. Knows files of passages and what identifies them; no index, no question."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Passage:
    """A piece of text that can be found. `title` may be empty."""

    id: str
    title: str
    text: str

    @property
    def searched(self) -> str:
        """What a query is compared with."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Corpus(Protocol):
    """Where passages come from: a small, hashable, picklable value. `load` reads them."""

    def read(self) -> Sequence[Passage]:
        """Every passage, always in the same order. Blocks."""
        ...


@dataclass(frozen=True)
class JsonLines:
    """A UTF-8 file with a passage a line: {"id", "contents": "<title>\\n<text>"} or {"id", "title", "text"}.

    The first form is what retrieval servers of the field index; a title may be in double quotes there.
    """

    path: str

    def read(self) -> Sequence[Passage]:
        """Raises FileNotFoundError, and ValueError that names the line that is no passage or no UTF-8."""
        with Path(self.path).expanduser().open("rb") as lines:
            return [self._passage(number, line) for number, line in enumerate(lines, 1) if line.strip()]

    def _passage(self, number: int, line: bytes) -> Passage:
        where = f"{self.path}, line {number}"
        try:
            return read_document(json.loads(line.decode("utf-8-sig")))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8 (iconv -f latin1 -t utf8)"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from None


def read_document(document: Any) -> Passage:
    """A passage from one of the two published shapes (see `JsonLines`). Raises ValueError for anything else."""
    if not isinstance(document, Mapping) or "id" not in document:
        raise ValueError('expected an object with "id", and "contents" or "title" and "text"')
    title, text = document.get("title", ""), document.get("text", document.get("contents"))
    if "text" not in document and isinstance(text, str) and not title:
        title, _, text = text.partition("\n")
        title, text = (title.strip('"'), text) if text else ("", title)
    if not (isinstance(title, str) and isinstance(text, str) and isinstance(document["id"], str | int)):
        raise ValueError('"id" must be a text or a whole number, and "title", "text" and "contents" texts')
    return Passage(str(document["id"]), encodable(title).strip(), encodable(text).strip())


@functools.lru_cache(maxsize=8)
def load(corpus: Corpus) -> tuple[Passage, ...]:
    """The passages, read once a process. Raises ValueError for none, and for two of one id."""
    passages = tuple(corpus.read())
    if not passages:
        raise ValueError(f"{corpus} has no passages; there would be nothing to find")
    if len({passage.id for passage in passages}) < len(passages):
        seen: set[str] = set()
        twice = next(p.id for p in passages if p.id in seen or seen.add(p.id))
        raise ValueError(f"{corpus} has two passages with the id {twice!r}; ids must be unique")
    return passages


def fingerprint(*parts: str, passages: Sequence[Passage] = ()) -> str:
    """64 hexadecimal digits that change when any part or passage does."""
    digest = hashlib.sha256()
    for each in (*parts, *(text for p in passages for text in (p.id, p.title, p.text))):
        raw = each.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def encodable(text: str) -> str:
    """`text` with lone surrogates (JSON escapes can make them, UTF-8 cannot hold them) replaced by "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")
