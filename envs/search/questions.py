"""Questions with exact answers, generated from the Factbook. Knows its fields and wording; no rule of the game.

    1 hop   What is the capital of Chad?
    2 hops  What is the capital of the country or territory whose internet country code is .td?

An entity belongs to one split, and so do its questions: a question names only its entity, or a value that no other
entity has. A held-out question whose answer some training question has too (God Save the King) is left out, so no
answer can have been learned by heart. The passages of all entities are in one corpus, as they are in the world.
"""

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from envs.search.answers import normal_form
from envs.search.factbook import NAMELESS, Entity, entities, passage_with
from jaxrl.types import Task

Split = Literal["train", "test"]
HOPS = (1, 2)
_HELD_OUT = 0.25
_LONGEST_ANSWER = 60
_LONGEST_NAME = 32

Read = Callable[[str], tuple[str, ...]]
"""What a field says -> the answer and its aliases; () when it has no exact one."""


@dataclass(frozen=True)
class Field:
    """A field that can be asked for. asked: "the capital". of: "whose capital is" identifies a country, or ""."""

    asked: str
    of: str
    section: str
    title: str
    inner: tuple[str, ...]
    read: Read


_ALSO = re.compile(r"[A-Z][^ ]*(?: [^ ]+){0,2}")  # a name in parentheses, rather than a remark
_CAPITAL = re.compile(r"([A-Z][^;()]*?)(?: \(([^()]*)\))?")
_PEAK = re.compile(r"([A-Z][^;,()0-9]*?)(?: \(([^()]*)\))? ([0-9][0-9,]*)(?: m)?(?: \([^()]*\))?")
_CODE = re.compile(r"\.[a-z]{2}")
_ANTHEM = re.compile('["\u201c]([^"\u201c\u201d]+)["\u201d] ?(?:\\(([^()]+)\\))?')
_LENGTH = re.compile(r"([0-9][0-9,.]*) km")


def _named(match: re.Match[str] | None) -> tuple[str, ...]:
    """A name, and other names of it that stand behind it in parentheses."""
    if match is None or "unnamed" in match[1]:
        return ()
    others = [other.strip() for other in re.split("[,/;]", match[2] or "")]
    return (match[1].strip(), *(other for other in others if _ALSO.fullmatch(other)))


def read_capital(text: str) -> tuple[str, ...]:
    """One city. "Washington, D.C." is Washington too; several capitals, and remarks instead of one, are no answer."""
    names = _named(_CAPITAL.fullmatch(text))
    if not names or " in " in names[0]:
        return ()
    city, _, rest = names[0].partition(", ")
    if rest and not re.fullmatch(r"(?:[A-Z]\.)+", rest):
        return ()
    return (*names, city) if rest else names


def read_peak(text: str) -> tuple[str, ...]:
    """The name of a mountain, without its height."""
    return _named(_PEAK.fullmatch(text))


def read_code(text: str) -> tuple[str, ...]:
    """A country code, with and without its dot."""
    return (text, text[1:]) if _CODE.fullmatch(text) else ()


def read_anthem(text: str) -> tuple[str, ...]:
    """A title, and its translation."""
    match = _ANTHEM.fullmatch(text)
    return tuple(title.strip(" ,") for title in match.groups() if title) if match else ()


def read_length(text: str) -> tuple[str, ...]:
    """Kilometres, with and without the unit; 0 is no question."""
    match = _LENGTH.fullmatch(text)
    if match is None or float(match[1].replace(",", "")) == 0:
        return ()
    return (text, match[1], f"{match[1]} kilometers", f"{match[1]} kilometres")


FIELDS: Mapping[str, Field] = {
    "capital": Field("the capital", "whose capital is", "Government", "Capital", ("name",), read_capital),
    "code": Field(
        "the internet country code",
        "whose internet country code is",
        "Communications",
        "Internet country code",
        (),
        read_code,
    ),
    "peak": Field(
        "the highest point", "whose highest point is", "Geography", "Elevation", ("highest point",), read_peak
    ),
    "anthem": Field(
        "the title of the national anthem",
        "whose national anthem is",
        "Government",
        "National anthem(s)",
        ("title",),
        read_anthem,
    ),
    "coastline": Field("the length of the coastline", "", "Geography", "Coastline", (), read_length),
}


def split_of(code: str) -> Split:
    """The split of an entity: fixed, whatever the seed."""
    share = int.from_bytes(hashlib.sha256(f"split of {code}".encode()).digest()[:4], "big") / 2**32
    return "test" if share < _HELD_OUT else "train"


@functools.cache
def pool(split: Split, hops: int, field: str) -> tuple[Task, ...]:
    """Every question of a split with so many hops whose answer is such a field, in a fixed order.

    Raises ImportError without the Factbook's package, ValueError for a name that does not exist.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    if hops not in HOPS:
        raise ValueError(f"hops is {hops!r}; expected one of {HOPS}")
    if field not in FIELDS:
        raise ValueError(f"field is {field!r}; expected one of {', '.join(FIELDS)}")
    return tuple(
        task
        for entity in entities()
        if split_of(entity.code) == split and (answers := _answers(entity, field))
        if split == "train" or not _learned(field) & {normal_form(each) for each in answers}
        for task in (_one_hop(entity, field) if hops == 1 else _two_hops(entity, field))
    )


def tasks(
    split: Split, count: int, *, hops: Sequence[int] = HOPS, fields: Sequence[str] = tuple(FIELDS), seed: int = 0
) -> list[Task]:
    """`count` questions, kinds in turn; a longer list starts with the shorter one.

    A kind is a number of hops and a field. Its pool is shuffled and dealt without repeats until it is used up, then
    shuffled again.
    """
    if count < 0 or not hops or not fields:
        raise ValueError(
            f"count={count}, hops={hops!r}, fields={fields!r}: expected count >= 0 and one of each at least"
        )
    kinds = [(h, f) for f in fields for h in hops]
    decks = [_deck(pool(split, *kind), [seed, split == "test", kind[0], list(FIELDS).index(kind[1])]) for kind in kinds]
    return [next(decks[i % len(decks)]) for i in range(count)]


def _deck(cards: Sequence[Task], seed: Sequence[int]) -> Iterator[Task]:
    rng = np.random.default_rng(list(seed))
    while True:
        yield from (cards[i] for i in rng.permutation(len(cards)))


def _answers(entity: Entity, name: str) -> tuple[str, ...]:
    """The accepted answers, the best spelling first; none of what is no single place, or has too long a name."""
    field = FIELDS[name]
    if entity.code in NAMELESS or len(entity.name) > _LONGEST_NAME:
        return ()
    found = [each for each in field.read(entity.text(field.section, field.title, *field.inner)) if normal_form(each)]
    return tuple(dict.fromkeys(found)) if found and len(found[0]) <= _LONGEST_ANSWER else ()


@functools.cache
def _learned(name: str) -> frozenset[str]:
    """Normal forms of every answer of training entities to such a question."""
    return frozenset(normal_form(each) for e in entities() if split_of(e.code) == "train" for each in _answers(e, name))


@functools.cache
def _holders(name: str) -> Counter[str]:
    """How many entities have a value, by its normal form."""
    return Counter(form for e in entities() for form in {normal_form(each) for each in _answers(e, name)})


def _one_hop(entity: Entity, name: str) -> list[Task]:
    return [_task(entity, name, f"What is {FIELDS[name].asked} of {entity.name}?", (name,))]


def _two_hops(entity: Entity, name: str) -> list[Task]:
    """Questions that name the entity by another of its fields, where no other has that value."""
    return [
        _task(
            entity,
            name,
            f"What is {FIELDS[name].asked} of the country or territory {FIELDS[by].of} {values[0]}?",
            (by, name),
        )
        for by in FIELDS
        if by != name and FIELDS[by].of and (values := _answers(entity, by))
        if all(_holders(by)[normal_form(value)] == 1 for value in values)
    ]


def _task(entity: Entity, name: str, prompt: str, path: tuple[str, ...]) -> Task:
    fields = [FIELDS[each] for each in path]
    evidence = tuple(passage_with(entity, each.section, each.title, *each.inner[:1]) for each in fields)
    metadata = {
        "split": split_of(entity.code),
        "hops": len(path),
        "entity": entity.name,
        "path": path,
        "values": tuple(_answers(entity, each)[0] for each in path),
        "evidence": evidence,
    }
    return Task(prompt=prompt, target=_answers(entity, name), metadata=metadata)
