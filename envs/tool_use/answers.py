"""Reading the model's final answer. Knows text and numbers only: no task, no conversation.

The caller passes one message, the last; nothing in a prompt or a tool's output can count as an answer.
"""

import re
from fractions import Fraction

_ANSWER_LINE = re.compile(r"\s*[*_`]*answer[*_`]*\s*[:=](.*)", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
_MARKUP = " \t*_`$"
_MAX_LENGTH = 60


def read_answer(text: str) -> Fraction | None:
    """The number on the "Answer:" line, which must be the last line and the only such line; None otherwise.

    Read: 1,234 and 1234, a sign, a decimal part, markdown emphasis, dollar signs, \\boxed{}, a closing . or !.
    Not read: two numbers, words beside the number, units, several answer lines (a shotgun answer is no answer).
    """
    lines = [line for line in text.splitlines() if line.strip()]
    answers = [found for line in lines if (found := _ANSWER_LINE.fullmatch(line))]
    if len(answers) != 1 or answers[0].string != lines[-1]:
        return None
    return _read_number(answers[0][1])


def _read_number(text: str) -> Fraction | None:
    bare = _BOXED.sub(r"\1", text).strip(_MARKUP).rstrip(_MARKUP + ".!").replace("\N{MINUS SIGN}", "-")
    if len(bare) > _MAX_LENGTH or not _NUMBER.fullmatch(bare):
        return None
    return Fraction(bare.replace(",", ""))
