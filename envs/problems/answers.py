r"""Where in a response the answer stands: \boxed{...}, a "#### " line, <answer> tags, or all of it.

Knows text only; it must not know what an answer means, nor any question. The caller passes what the model said, without
prompt and thoughts. The last answer is the answer: what an earlier box or line holds counts for nothing, also when the
last one cannot be read, so that listing every candidate is worth no more than the last of them.

Every function takes time linear in the text, whatever it holds.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Form = Literal["boxed", "hashes", "tags", "plain"]

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_OPENING = re.compile(r"\s*\{")
_SHORT_BOX = re.compile(r" ?([A-Za-z0-9])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text, a backslash before it included
_HASHES = re.compile(r"^[ \t*_]*####(?!#)(.*)$", re.MULTILINE)
_OPEN_TAG, _CLOSE_TAG = "<answer>", "</answer>"


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} (or \fbox{...}) holds; None without one, or when its braces do not balance.

    Without braces it holds the one letter or digit that TeX would put in it.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    place = boxes[-1].end()
    opening = _OPENING.match(text, place)
    if not opening:
        short = _SHORT_BOX.match(text, place)
        return short[1] if short else None
    return balanced(text, opening.end())


def balanced(text: str, start: int) -> str | None:
    """`text` from `start`, which is just behind an opening brace, to the brace that closes it; None if none does."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.start()]
    return None


def last_hashes(text: str) -> str | None:
    """What stands behind the last "####" that opens a line, up to the end of that line."""
    lines = _HASHES.findall(text)
    return lines[-1].strip(" \t*_") if lines else None


def last_tags(text: str) -> str | None:
    """What the last <answer>...</answer> holds; None without one, or when the last one never closes."""
    _, opened, rest = text.rpartition(_OPEN_TAG)
    inside, closed, _ = rest.partition(_CLOSE_TAG)
    return inside.strip() if opened and closed else None


def whole(text: str) -> str | None:
    """All of the response; None when it is blank."""
    return text.strip() or None


@dataclass(frozen=True)
class AnswerForm:
    """How an answer is marked: who reads it, what the model is told, and an answer written that way.

    instruction: spells no marked answer itself, since a model that only repeats it would have the form: SmolLM2 said
    the example of such a one, and nothing else, after ten steps of GRPO.
    """

    read: Callable[[str], str | None]
    instruction: str
    write: Callable[[str], str]


FORMS: Mapping[Form, AnswerForm] = {
    "boxed": AnswerForm(last_boxed, r"Put the final answer in \boxed{}.", lambda answer: rf"\boxed{{{answer}}}"),
    "hashes": AnswerForm(last_hashes, 'End with a line of "####" and the answer.', lambda answer: f"#### {answer}"),
    "tags": AnswerForm(
        last_tags, "Put the final answer in <answer></answer>.", lambda answer: f"<answer>{answer}</answer>"
    ),
    "plain": AnswerForm(whole, "Say the answer and nothing else.", lambda answer: answer),
}


def answer_form(name: str) -> AnswerForm:
    """The form called `name`. ValueError names the known ones."""
    found = {str(known): form for known, form in FORMS.items()}.get(name)
    if found is None:
        raise ValueError(f"form={name!r}: expected one of {', '.join(FORMS)}")
    return found
