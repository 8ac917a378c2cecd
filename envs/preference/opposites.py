"""Questions with one right answer that can be given at many lengths: opposites, for models too small for anything else.

Knows words; must not know judges.
"""

from collections.abc import Mapping

_PAIRS = (
    *(("hot", "cold"), ("big", "small"), ("up", "down"), ("in", "out"), ("old", "new"), ("wet", "dry")),
    *(("day", "night"), ("yes", "no"), ("left", "right"), ("high", "low"), ("fast", "slow"), ("open", "shut")),
)

OPPOSITES: Mapping[str, str] = dict(sorted([*_PAIRS, *((right, left) for left, right in _PAIRS)]))
"""Word -> its opposite."""

ANSWERS = ("{}.", "It is {}.", "I think it is {}.", "I would say that it is {}.", "Well, I say that it must be {}.")
"""Ways to answer, from the shortest."""


def question(word: str) -> str:
    """What is asked."""
    return f"Opposite of {word}?"


def opposite(word: str, length: int = 0) -> str:
    """The right answer, in the `length`-th of the ways to give it."""
    return ANSWERS[length].format(OPPOSITES[word])


def right_word(prompt: str) -> str | None:
    """The word that the answer to a prompt has to end with; None for a prompt that asks for no opposite."""
    return _RIGHT.get(prompt)


_RIGHT = {question(word): right for word, right in OPPOSITES.items()}
