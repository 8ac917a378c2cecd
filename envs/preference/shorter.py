"""The judge that prefers the shorter of two well-formed answers. A function of the two texts.

Knows comparisons and opposites; must not know groups.
"""

import math
from dataclasses import dataclass, field

from envs.preference.comparison import FIRST, SECOND, TIE, Comparison, Conversation, Preference, answer
from envs.preference.opposites import right_word


@dataclass(frozen=True)
class WellFormed:
    """Whether an answer ends a sentence; and, where the right word is known, with that word."""

    word: str | None = None

    def __call__(self, text: str) -> bool:
        """The check of an answer's text."""
        said = text.rstrip()
        if self.word is None:
            return len(said) > 1 and said[-1] in ".!?"
        return said.lower() == f"{self.word}." or said.lower().endswith(f" {self.word}.")


def well_formed(prompt: str) -> WellFormed:
    """The check of answers to a prompt: of an opposite its word too, of anything else the form."""
    return WellFormed(right_word(prompt))


@dataclass(frozen=True)
class Shorter:
    """Prefers a well-formed answer to another, and of two well-formed ones the shorter, in all its turns together."""

    formed: WellFormed = field(default_factory=WellFormed)

    def __call__(self, comparison: Comparison) -> Preference:
        """The preference, from the answers alone."""
        one, other = self._cost(comparison.first), self._cost(comparison.second)
        return TIE if one == other else FIRST if one < other else SECOND

    def _cost(self, completion: Conversation) -> float:
        if not self.formed(answer(completion)):
            return math.inf
        return sum(len(m.content) for m in completion if m.role == "assistant")
