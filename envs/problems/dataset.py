r"""Problems of one's own, from files of JSON lines: a question and an answer a line, under any names.

Knows files and rows; no episode. GSM8K's files have the answer behind "####" in a solution, MATH's have it in the
solution's \boxed{...}: `answer_in` says where. Every error names file and line. A question that training and test share
would make the test worthless, so it is refused, or dropped from training when that is asked for.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envs.problems.answers import Form, answer_form
from envs.problems.problem import MathProblem

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """A problem and where it stands."""

    problem: MathProblem
    path: Path
    line: int

    @property
    def place(self) -> str:
        """file:line."""
        return f"{self.path}:{self.line}"

    @property
    def key(self) -> str:
        """The question, up to case and white space."""
        return " ".join(self.problem.question.casefold().split())


@dataclass(frozen=True)
class RowFormat:
    """How a row is read.

    question, answer: the names of its fields. answer_in: how the answer field marks the answer. The rest is
    MathProblem's.
    """

    question: str = "question"
    answer: str = "answer"
    answer_in: Form = "plain"
    form: Form = "boxed"
    symbolic: bool = False


def read_problems(path: str | Path, row_format: RowFormat | None = None) -> list[Row]:
    """The rows of a file, in its order; blank lines are skipped, a question that is there twice is kept once.

    ValueError, with file and line, for what is no row, and for one question with two answers.
    """
    row_format, path = row_format or RowFormat(), Path(path)
    rows: dict[str, Row] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = Row(_problem(line, f"{path}:{number}", row_format), path, number)
                _check_same(rows.setdefault(row.key, row), row)
    if not rows:
        raise ValueError(f"{path} holds no problem; expected one JSON object a line")
    return list(rows.values())


def keep_apart(
    train: Sequence[Row], test: Sequence[Row], overlap: Literal["refuse", "drop"] = "refuse"
) -> tuple[list[Row], list[Row]]:
    """Training and test rows without a question in common.

    overlap: "refuse" raises ValueError with the places of the first few; "drop" takes them out of training, and says in
    the log how many.
    """
    held_out = {row.key: row for row in test}
    shared = [row for row in train if row.key in held_out]
    if shared and overlap == "refuse":
        places = ", ".join(f"{row.place} = {held_out[row.key].place}" for row in shared[:3])
        raise ValueError(
            f"{len(shared)} training questions are test questions too ({places}): remove them, or set overlap=drop"
        )
    if shared:
        _log.warning("%d training questions are test questions too, and are not trained on", len(shared))
    return [row for row in train if row.key not in held_out], list(test)


def _check_same(first: Row, again: Row) -> None:
    answers = first.problem.reference_answer, again.problem.reference_answer
    if answers[0] != answers[1]:
        raise ValueError(
            f"{again.place}: the question of line {first.line} with another answer, {answers[1]!r} (not {answers[0]!r})"
        )


def _problem(line: bytes, place: str, row_format: RowFormat) -> MathProblem:
    row = _object(line, place)
    question = _field(row, row_format.question, place)
    answer = _field(row, row_format.answer, place)
    reference = answer_form(row_format.answer_in).read(answer)
    if reference is None or not reference.strip():
        raise ValueError(
            f"{place}: {row_format.answer!r} marks no answer in the form {row_format.answer_in!r} (answer_in): "
            f"{answer[-80:]!r}"
        )
    return MathProblem(question, reference.strip(), row_format.form, row_format.symbolic)


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_int=str, parse_float=str)  # numbers as they are spelled
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not a line of JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected an object with fields, got {type(row).__name__}")
    return row


def _field(row: dict[str, Any], name: str, place: str) -> str:
    if name not in row:
        raise ValueError(f"{place}: no field {name!r}; the row has {', '.join(map(repr, row)) or 'none'}")
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"{place}: {name!r} is {row[name]!r}; expected text or a number")
    return row[name]
