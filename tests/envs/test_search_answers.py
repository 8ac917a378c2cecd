"""Reading and judging answers of the search environment: whole answers in normal form, one answer line, no more."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.search import is_right, normal_form, read_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: Paris", "Paris"),
        ("It is so.\nANSWER = Paris\n\n", "Paris"),
        ("**Answer:** Paris", "Paris"),
        ("**Answer: Paris**", "Paris"),
        ("<answer>Paris</answer>", "Paris"),
        ("Found it.\n<answer> Paris </answer>", "Paris"),
        ("Answer: <answer>Paris</answer>", "Paris"),
        (r"Answer: \boxed{42}", "42"),
        (r"<answer>\boxed{42}</answer>", "42"),
        (r"Answer: $\boxed{\text{Port Moresby}}$", "Port Moresby"),
        ("Answer: .fr", ".fr"),
        ("Answer: a: b", "a: b"),
    ],
)
def test_N17_the_answer_is_taken_out_of_its_wrapping(text: str, answer: str) -> None:
    assert read_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris",
        "The capital is Paris",
        "The answer is Paris",
        "Answer:",
        "Answer: **",
        "Answer: Lyon\nAnswer: Paris",
        "Answer: Paris\nAnswer: Paris",
        "Answer: Paris\nor Lyon",
        "<answer>Lyon</answer>\nAnswer: Paris",
        "Answer: " + "Paris " * 100,
    ],
)
def test_N19_without_exactly_one_answer_line_at_the_end_there_is_no_answer(text: str) -> None:
    assert read_answer(text) is None


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ("paris", "Paris"),
        ("  The   Paris. ", "Paris"),
        ("Brasilia", "Bras\u00edlia"),
        ("Brasi\u0301lia", "Bras\u00edlia"),
        ("ndjamena", "N'Djamena"),
        ("N\u2019Djamena", "N'Djamena"),
        ("Washington DC", "Washington, D.C."),
        ("Guinea-Bissau", "Guinea Bissau"),
        ("4853 km", "4,853 km"),
        ("3.5", "3.5"),
        ("-5", "\N{MINUS SIGN}5"),
        ("fr", ".fr"),
        ('"Kassaman"', "Kassaman"),
        ("STRASSE", "stra\u00dfe"),
        ("The The", "the the"),
        ("\u6771\u4eac", "\u6771\u4eac"),
    ],
)
def test_answers_that_are_equal_in_normal_form(given: str, accepted: str) -> None:
    assert is_right(given, ["something else", accepted])
    assert is_right(accepted, [given])


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ("pineapple", "apple"),
        ("apple", "pineapple"),
        ("apple pie", "apple"),
        ("Paris or Lyon", "Paris"),
        ("Paris, Lyon, Nice", "Paris"),
        ("not Paris", "Paris"),
        ("maybe 7, or 8", "8"),
        ("35", "3.5"),
        ("5", "-5"),
        ("4,85", "485"),
        ("1 234", "1234"),
        ("", "Paris"),
        ("...", "!!!"),
        ("?", ""),
    ],
)
def test_N07_N19_parts_and_lists_are_not_equal(given: str, accepted: str) -> None:
    assert not is_right(given, [accepted])


NESTED = r"\boxed{" * 10_000 + "a" + "}" * 10_000


@pytest.mark.parametrize(
    ("text", "answer"),
    [(f"Answer: {NESTED}", None), (f"<answer>{NESTED}</answer>", None), (f"Answer: a{' ' * 80_000}", "a")],
    ids=["line", "tags", "blanks"],
)
def test_a_long_line_is_read_in_no_time(text: str, answer: str | None) -> None:
    began = time.monotonic()
    assert read_answer(text) == answer
    assert time.monotonic() - began < 0.2


@given(st.text())
def test_a_normal_form_is_its_own_and_no_text_breaks_it(text: str) -> None:
    form = normal_form(text)
    assert form == " ".join(form.split())
    assert is_right(text, [text]) == bool(form)
    read_answer(text)
    read_answer(f"Answer: {text}")


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 .,'-]{0,40}", fullmatch=True))
def test_what_is_said_on_an_answer_line_is_read_back(text: str) -> None:
    read = read_answer(f"So it is.\nAnswer: {text}")
    assert read is not None
    assert is_right(read, [text])
