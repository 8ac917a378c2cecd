"""Reading and judging the final answer. Knows text only: no task, no conversation, no passage.

The caller passes one message, the last; nothing in a prompt or a tool's output can count as an answer. Two answers
are equal when their normal forms are: whole answers are compared, never parts of them.
"""

import re
import unicodedata
from collections.abc import Iterable

_LINE = re.compile(r"\s*[*_`]*answer[*_`]*\s*[:=](.*)", re.IGNORECASE)
_TAGS = re.compile(r"\s*<answer>(.*)</answer>\s*", re.IGNORECASE)
_BOXED = re.compile(r"\\(?:boxed|text|textbf|mathrm)\{([^{}]*)\}")
_MARKUP = " \t*_`$"
_LONGEST = 300
_LONGEST_WRAPPED = 3000  # boxes are taken off one by one, from the inside

_GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_KEPT = re.compile(r"(?<=[0-9])\.(?=[0-9])|(?<![\w])-(?=[0-9])")  # a decimal point, a sign
_DROPPED = "'\"`.\u2018\u2019\u201c\u201d\u00b4\u2032\u02bb\u02bc"
_ARTICLES = frozenset({"a", "an", "the"})


def read_answer(text: str) -> str | None:
    r"""The answer on the last line, which is "Answer: ..." or <answer>...</answer>; None unless it is the only such.

    Markdown emphasis, dollar signs, \boxed{} and \text{} around it are taken off. Several answer lines are no answer,
    even if one of them is right.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    found = [match for line in lines if (match := _TAGS.fullmatch(line) or _LINE.fullmatch(line))]
    if len(found) != 1 or found[0].string != lines[-1]:
        return None
    wrapped = found[0][1].strip()
    answer = _bare(wrapped) if len(wrapped) <= _LONGEST_WRAPPED else ""
    return answer if answer and len(answer) <= _LONGEST else None


def _bare(text: str) -> str:
    tagged = _TAGS.fullmatch(text)
    bare = (tagged[1] if tagged else text).strip(_MARKUP)
    while bare != (inner := _BOXED.sub(r"\1", bare).strip(_MARKUP)):
        bare = inner
    return bare


def normal_form(text: str) -> str:
    """What is compared: small letters without accents, articles, punctuation and extra white space.

    A comma between groups of three digits goes; a decimal point and a sign of a number stay, so 3.5 is not 35. A mark
    between two words parts them, but an apostrophe or a full stop does not: N'Djamena is ndjamena, D.C. is dc.
    """
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    plain = _GROUPED.sub("", plain.replace("\N{MINUS SIGN}", "-"))
    kept = {match.start() for match in _KEPT.finditer(plain)}
    spelled = "".join(_spelled(c, i in kept) for i, c in enumerate(plain))
    words = spelled.split()
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def _spelled(character: str, kept: bool) -> str:
    if kept or character.isalnum():
        return character
    return "" if character in _DROPPED else " "


def is_right(answer: str, accepted: Iterable[str]) -> bool:
    """Whether the answer equals one of the accepted ones. An answer of nothing but punctuation equals none."""
    given = normal_form(answer)
    return bool(given) and given in {normal_form(each) for each in accepted}
