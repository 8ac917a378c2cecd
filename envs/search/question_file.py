"""Questions of one's own, from a file. Knows a file of questions; not where their answers can be found."""

import json
from pathlib import Path
from typing import Any

from envs.search.answers import normal_form
from jaxrl.types import Task


def read_questions(path: str) -> list[Task]:
    """A task for each line of a UTF-8 file: {"question": "...", "answers": ["...", ...]}, all of them accepted.

    Raises FileNotFoundError, and ValueError that names the line that is no question.
    """
    found = []
    with Path(path).expanduser().open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found.append(_task(json.loads(line.decode("utf-8-sig"))))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path} has no questions; expected one a line")
    return found


def _task(line: Any) -> Task:
    question, answers = (line.get("question"), line.get("answers")) if isinstance(line, dict) else (None, None)
    if not (isinstance(question, str) and question.strip() and isinstance(answers, list) and answers):
        raise ValueError('expected {"question": "...", "answers": ["...", ...]}')
    if unusable := [each for each in answers if not (isinstance(each, str) and normal_form(each))]:
        raise ValueError(f"answer {unusable[0]!r} is no text with a letter or a digit")
    return Task(question, target=tuple(answers))
