"""Arithmetic by seed, problems as `ProblemEnv` grades them, and files of one's own."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from envs.problems import (
    FORMS,
    OPERATIONS,
    Form,
    MathProblem,
    RowFormat,
    Split,
    arithmetic,
    is_held_out,
    keep_apart,
    read_problems,
)
from jaxrl.runtime.problem import ProblemEnv
from jaxrl.types import Message, Task

# --- arithmetic -----------------------------------------------------------------------------------

KINDS = [("+",), ("-",), ("*",), ("/",), ("+", "-", "*", "/")]


@pytest.mark.parametrize("operations", KINDS)
@pytest.mark.parametrize("digits", [(1,), (1, 2), (3,), (9,)])
def test_every_answer_is_right_and_operands_have_the_digits(operations: Sequence[str], digits: Sequence[int]) -> None:
    for problem in arithmetic("train", 60, seed=3, operations=operations, digits=digits):
        expression = problem.question.removesuffix("=?")
        sign = next(c for c in expression[1:] if c in OPERATIONS)
        left, right = map(int, expression.split(sign))
        assert {"+": left + right, "-": left - right, "*": left * right, "/": left / max(right, 1)}[sign] == int(
            problem.reference_answer
        )
        assert len(str(right)) in digits
        assert sign == "/" or len(str(left)) in digits
        assert problem.check_answer(FORMS["boxed"].write(problem.reference_answer))
        assert not problem.check_answer(FORMS["boxed"].write(str(int(problem.reference_answer) + 1)))
        assert not problem.check_answer(FORMS["boxed"].write(expression)), "the question is no answer"


@pytest.mark.parametrize("form", ["boxed", "hashes", "tags"])
def test_who_repeats_the_instruction_or_its_example_has_no_form(form: Form) -> None:
    (problem,) = arithmetic("train", 1, form=form)
    instruction = FORMS[form].instruction
    for said in (instruction, *instruction.split(), instruction.rpartition(" in ")[2], f"\n{instruction}"):
        assert not problem.check_format(said), said
    assert problem.check_format(FORMS[form].write("7"))


@pytest.mark.parametrize("operations", KINDS)
def test_no_seed_of_training_ever_meets_a_test_problem(operations: Sequence[str]) -> None:
    def asked(split: Split) -> set[str]:
        return {p.question for s in range(30) for p in arithmetic(split, 100, seed=s, operations=operations)}

    train, test = asked("train"), asked("test")
    assert len(test) > 20
    assert not train & test


def test_both_orders_of_a_sum_are_in_one_split_and_a_tenth_is_held_out() -> None:
    pairs = [(a, b) for a in range(100) for b in range(100)]
    assert all(is_held_out(a, "+", b) == is_held_out(b, "+", a) for a, b in pairs)
    assert any(is_held_out(a, "-", b) != is_held_out(b, "-", a) for a, b in pairs)
    assert 0.08 < sum(is_held_out(a, "+", b) for a, b in pairs) / len(pairs) < 0.12


def test_problems_are_a_function_of_the_seed_and_a_longer_list_starts_with_the_shorter() -> None:
    dealt = arithmetic("train", 50, seed=1)
    assert dealt == arithmetic("train", 50, seed=1)
    assert dealt[:9] == arithmetic("train", 9, seed=1)
    assert dealt != arithmetic("train", 50, seed=2)
    assert arithmetic("test", 0) == []


@pytest.mark.parametrize(
    ("wrong", "teaches"),
    [
        ({"split": "val"}, "split is 'val'; expected"),
        ({"count": -1}, "count is -1; expected at least 0"),
        ({"operations": ("^",)}, r"operations=\('\^',\): expected one or more of \+ - \* /"),
        ({"operations": ()}, "expected one or more of"),
        ({"digits": (0,)}, r"digits=\(0,\): expected one or more numbers from 1 to 9"),
        ({"digits": ()}, "expected one or more numbers"),
    ],
)
def test_what_cannot_be_generated_is_named(wrong: dict[str, Any], teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        arithmetic(**{"split": "train", "count": 1, **wrong})


# --- a problem in its env -------------------------------------------------------------------------

HALF = MathProblem("What is 2/4 in lowest terms?", r"\frac{1}{2}")


async def graded(problem: MathProblem, message: Message) -> tuple[float, float, float]:
    env = ProblemEnv(problem)
    await env.reset(Task(problem.question))
    result = await env.step(message)
    return result.reward, result.metrics["format"], result.metrics["correct"]


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        (r"It is \boxed{1/2}.", 1.0),
        (r"\boxed{0.5}", 1.0),
        (r"\boxed{1/2}, or \boxed{1/3}", 0.0),
        (r"\boxed{1/3}, or \boxed{1/2}", 1.0),
        (r"\boxed{1/2, 1/3}", 0.0),
        (r"\boxed{1/2} or \boxed{", -0.1),
        ("1/2", -0.1),
        (r"\boxed{}", -0.1),
        ("", -0.1),
    ],
)
async def test_the_last_answer_earns_the_reward_and_a_missing_mark_costs_the_coefficient(content, reward) -> None:
    assert (await graded(HALF, Message("assistant", content)))[0] == pytest.approx(reward)


async def test_an_answer_in_the_thoughts_does_not_count() -> None:
    said = Message("assistant", "I do not know.", thinking=r"\boxed{1/2}")
    assert await graded(HALF, said) == (-0.1, 0.0, 0.0)


async def test_N19_numbers_outside_of_the_mark_are_not_looked_at() -> None:
    problem = MathProblem("?", "8")
    assert (await graded(problem, Message("assistant", "maybe 7, or 8")))[2] == 0.0
    assert (await graded(problem, Message("assistant", r"8, so \boxed{7}")))[2] == 0.0


def test_a_problem_is_checked_when_it_is_made_and_pickles() -> None:
    assert pickle.loads(pickle.dumps(HALF)) == HALF
    with pytest.raises(ValueError, match="reference_answer is blank, for the question 'q'"):
        MathProblem("q", " ")
    with pytest.raises(ValueError, match="form='box': expected one of boxed, hashes, tags, plain"):
        MathProblem("q", "1", cast(Any, "box"))


def test_without_symbols_an_undecided_answer_is_wrong_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="envs.problems"):
        assert MathProblem("sine?", r"\frac{\sqrt{3}}{2}x").check_answer(r"\boxed{x\sin 60^\circ}") is False
    assert "beyond exact arithmetic" in caplog.text


# --- files ----------------------------------------------------------------------------------------


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_gsm8k_and_math_rows_are_read_with_their_answers(tmp_path: Path) -> None:
    gsm = written(tmp_path / "g.jsonl", {"question": "How many?", "answer": "7 * 6 = 42\n#### 1,042"}, "", "  ")
    (row,) = read_problems(gsm, RowFormat(answer_in="hashes"))
    assert (row.problem.question, row.problem.reference_answer, row.line) == ("How many?", "1,042", 1)
    assert row.problem.check_answer(r"\boxed{1042}")
    math = written(tmp_path / "m.jsonl", {"problem": "p", "solution": r"so \boxed{\frac{1}{2}}", "level": 3})
    (row,) = read_problems(math, RowFormat("problem", "solution", "boxed", form="hashes"))
    assert row.problem.reference_answer == r"\frac{1}{2}"
    assert row.problem.check_answer("#### 0.5")


def test_numbers_in_json_keep_their_spelling(tmp_path: Path) -> None:
    big = "1" + "0" * 5000
    rows = read_problems(
        written(tmp_path / "n.jsonl", '{"question": "a", "answer": 0.10}', f'{{"question": "b", "answer": {big}}}')
    )
    assert [row.problem.reference_answer for row in rows] == ["0.10", big]


GOOD = {"question": "q", "answer": "1"}


@pytest.mark.parametrize(
    ("bad", "teaches"),
    [
        ('{"question": ', "not a line of JSON"),
        ("[" * 100_000, "not a line of JSON"),
        ("[1]", "expected an object with fields, got list"),
        ({"prompt": "p", "answer": "1"}, "no field 'question'; the row has 'prompt', 'answer'"),
        ({}, "no field 'question'; the row has none"),
        ({"question": "p", "answer": None}, "'answer' is None; expected text or a number"),
        ({"question": "p", "answer": True}, "'answer' is True; expected text or a number"),
        ({"question": "p", "answer": ["1"]}, "expected text or a number"),
        ({"question": "  ", "answer": "1"}, "'question' is '  '; expected text or a number"),
        ({"question": " Q ", "answer": "2"}, r"the question of line 1 with another answer, '2' \(not '1'\)"),
    ],
)
def test_an_error_names_file_and_line(bad: Any, teaches: str, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", GOOD, "", bad)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: .*{teaches}"):
        read_problems(path)


def test_a_row_whose_answer_is_not_marked_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(
        ValueError, match=r"rows\.jsonl:1: 'answer' marks no answer in the form 'boxed' \(answer_in\): '1'"
    ):
        read_problems(path, RowFormat(answer_in="boxed"))


def test_bytes_that_are_no_text_and_files_without_rows_are_errors(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"question": "\xff", "answer": 1}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl:1: not a line of JSON"):
        read_problems(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match=r"e\.jsonl holds no problem"):
        read_problems(written(tmp_path / "e.jsonl", ""))


def test_a_question_that_is_there_twice_is_kept_once(tmp_path: Path) -> None:
    rows = read_problems(
        written(tmp_path / "r.jsonl", GOOD, {"question": " Q", "answer": 1}, {"question": "r", "answer": 2})
    )
    assert [(row.problem.question, row.line) for row in rows] == [("q", 1), ("r", 3)]


def test_training_and_test_may_not_share_a_question(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = read_problems(written(tmp_path / "a.jsonl", {"question": "only here", "answer": 1}, GOOD))
    test = read_problems(written(tmp_path / "b.jsonl", {"question": "Q ", "answer": "1"}))
    with pytest.raises(ValueError, match=r"1 training questions are .*a\.jsonl:2 = .*b\.jsonl:1.*overlap=drop"):
        keep_apart(train, test)
    kept, held_out = keep_apart(train, test, "drop")
    assert [row.problem.question for row in kept] == ["only here"]
    assert held_out == test
    assert "1 training questions" in caplog.text
    assert keep_apart(kept, test) == (kept, test)
