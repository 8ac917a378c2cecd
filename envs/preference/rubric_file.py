"""Prompts with rubrics, and prompts alone, from files of JSON lines.

Knows files and rows; no episode. Every error names file and line. A row of rubrics has one of three forms:

    {"prompt": "...", "rubric": ["a criterion", {"text": "...", "weight": 2, "low": 1, "high": 5, "name": "..."}]}
    {"convo": [{"role": "user", "content": "..."}], "rubric_items": [{"rubric_str": "...",
        "extraction_regex": "...", "grader_output_format_instruction": "..."}]}
    {"orig_instruction": "...", "orig_criteria": "...", "orig_score1_description": "...", ... up to 5,
        "orig_reference_answer": "..."}                                     (Prometheus' Feedback-Collection)

"prompt" may be a list of messages instead of a text.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from envs.preference.episode import CONVERSATION, FOLLOW_UPS
from envs.preference.rubric import PATTERN, Criterion, Rubric
from jaxrl.types import Message, Role, Task

Row = Mapping[str, Any]


def read_rubrics(path: str | Path) -> list[Task]:
    """A task for each row, in order, with its rubric as the target. Blank lines are skipped.

    ValueError, with file and line, for what is no such row, and for a file without one.
    """
    return [_read(row, place, _rubric_task) for row, place in _rows(Path(path))]


def read_prompts(path: str | Path) -> list[Task]:
    """A task for each row {"prompt": ...}, in order; its target is the row's "reference" answer, if it has one.

    "follow_ups": the user's further texts, each of which is answered too.
    """
    return [_read(row, place, _prompt_task) for row, place in _rows(Path(path))]


def _rows(path: Path) -> Iterator[tuple[Row, str]]:
    found = False
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place, found = f"{path}:{number}", True
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not a line of JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: expected an object with fields, got {type(row).__name__}")
            yield row, place
    if not found:
        raise ValueError(f"{path} holds no row; expected one JSON object a line")


def _read(row: Row, place: str, make: Callable[[Row], Task]) -> Task:
    try:
        return make(row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _rubric_task(row: Row) -> Task:
    for key, read in _FORMS.items():
        if key in row:
            return read(row)
    raise ValueError(f"expected a field among {', '.join(_FORMS)}; the row has {', '.join(row) or 'none'}")


def _own(row: Row) -> Task:
    items = row["rubric"]
    if not isinstance(items, list) or not items:
        raise ValueError(f"'rubric' is {items!r}: expected a list of criteria")
    return _task(_of(row, "prompt"), tuple(map(_criterion, items)))


def _cookbook(row: Row) -> Task:
    items = row["rubric_items"]
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"'rubric_items' is {items!r}: expected a list of objects")
    return _task(_of(row, "convo"), tuple(map(_cookbook_criterion, items)))


def _cookbook_criterion(item: Row) -> Criterion:
    pattern = _text(item, "extraction_regex", PATTERN)
    return Criterion(
        _text(item, "rubric_str"), pattern=pattern, instruction=_text(item, "grader_output_format_instruction", "")
    )


def _prometheus(row: Row) -> Task:
    scale = "\n".join(f"{score}: {_text(row, f'orig_score{score}_description')}" for score in range(1, 6))
    reference = _text(row, "orig_reference_answer", "")
    example = f"\n\nAn answer that deserves a 5:\n{reference}" if reference else ""
    text = f"{_text(row, 'orig_criteria')}\n\nWhat each score means:\n{scale}{example}"
    return _task(_text(row, "orig_instruction"), (Criterion(text, low=1.0, high=5.0),))


_FORMS: Mapping[str, Callable[[Row], Task]] = {"rubric": _own, "rubric_items": _cookbook, "orig_criteria": _prometheus}


def _criterion(item: Any) -> Criterion:
    if isinstance(item, str):
        return Criterion(item)
    if not isinstance(item, dict):
        raise ValueError(f"a criterion is {item!r}: expected a text or an object")
    unknown = sorted(set(item) - set(_KINDS))
    if unknown:
        raise ValueError(f"a criterion has the unknown fields {', '.join(unknown)}; known are {', '.join(_KINDS)}")
    for name, value in item.items():
        if isinstance(value, bool) or not isinstance(value, _KINDS[name]):
            raise ValueError(f"{name!r} of a criterion is {value!r}: expected {_EXPECTED[_KINDS[name]]}")
    return Criterion(**{"text": "", **item})


_TEXT, _NUMBER = (str,), (int, float)
_EXPECTED = {_TEXT: "a text", _NUMBER: "a number"}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "text": _TEXT,
    "weight": _NUMBER,
    "low": _NUMBER,
    "high": _NUMBER,
    "name": _TEXT,
    "pattern": _TEXT,
    "instruction": _TEXT,
}


def _prompt_task(row: Row) -> Task:
    task = _task(_of(row, "prompt"), _text(row, "reference", "") or None)
    follow_ups = row.get(FOLLOW_UPS, [])
    if not isinstance(follow_ups, list) or not all(isinstance(text, str) and text.strip() for text in follow_ups):
        raise ValueError(f"{FOLLOW_UPS!r} is {follow_ups!r}: expected a list of texts")
    return replace(task, metadata={**task.metadata, FOLLOW_UPS: tuple(follow_ups)}) if follow_ups else task


def _task(prompt: str | tuple[Message, ...], target: Rubric | str | None) -> Task:
    if isinstance(prompt, str):
        return Task(prompt, target=target)
    return Task(prompt[-1].content, target=target, metadata={CONVERSATION: prompt})


def _of(row: Row, name: str) -> str | tuple[Message, ...]:
    """A text, or messages that end with one of the user."""
    if not isinstance(row.get(name), list):
        return _text(row, name)
    messages = tuple(map(_message, row[name]))
    if not messages or messages[-1].role != "user":
        raise ValueError(f"{name!r} has to end with a message of the user, whom the model is to answer")
    return messages


def _message(item: Any) -> Message:
    if not isinstance(item, dict) or item.get("role") not in get_args(Role) or not isinstance(item.get("content"), str):
        raise ValueError(f"a message is {item!r}: expected role ({', '.join(get_args(Role))}) and content, a text")
    return Message(item["role"], item["content"])


def _text(row: Row, name: str, default: str | None = None) -> str:
    value = row.get(name, default)
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise ValueError(f"{name!r} is {value!r}: expected a text")
    return value
