"""From a question in words to a property, and from there to an answer: by the words that ask for each property.

Knows the knowledge and no game. A question that asks for no property, for several at once, or with a "not" in it is
answered with unknown: the rules are simple, and say so rather than guess.
"""

import re

from envs.twenty_questions.knowledge import KNOWLEDGE, PROPERTIES, Answer

_WORD = re.compile(r"[a-z-]+")
_GUESS = re.compile(r"\bguess(?: is)?[\s:]+([^.,;!?\n]+)", re.IGNORECASE)
_IS_IT = re.compile(r"\bis (?:it|this|the thing)\s+([^.,;!?\n]+)", re.IGNORECASE)
_NEGATIONS = frozenset({"not", "isn", "isn't", "no", "never", "without", "or"})
_ARTICLES = frozenset({"a", "an", "the", "it", "it's", "is"})


def words(text: str) -> tuple[str, ...]:
    """The words of a text, small, without punctuation."""
    return tuple(_WORD.findall(text.lower()))


_ASKED_BY = {words(phrase): name for name, phrases in PROPERTIES.items() for phrase in phrases}
_LONGEST = max(map(len, _ASKED_BY))


def property_asked(question: str) -> str | None:
    """The one property that a question asks for; None when there is none, or more than one, or a negation."""
    said = words(question)
    if _NEGATIONS & set(said):
        return None
    spans = (said[i : i + n] for i in range(len(said)) for n in range(1, _LONGEST + 1))
    asked = {_ASKED_BY[span] for span in spans if span in _ASKED_BY}
    return asked.pop() if len(asked) == 1 else None


def thing_guessed(text: str, *, known: frozenset[str] = frozenset(KNOWLEDGE)) -> str | None:
    """The thing that a message guesses: "Guess: dog", or "Is it a dog?" when dog is one of the `known`; else None."""
    explicit = _GUESS.search(text)
    if explicit:
        return _named(explicit[1])
    asked = _IS_IT.search(text)
    named = _named(asked[1]) if asked else None
    return named if named in known else None


def answer_about(thing: str, question: str) -> Answer:
    """Whether the thing has what the question asks for. Raises ValueError for a thing that is not known."""
    if thing not in KNOWLEDGE:
        raise ValueError(f"nothing is known of {thing!r}: the scripted answerer knows {', '.join(KNOWLEDGE)}")
    name = property_asked(question)
    return Answer.UNKNOWN if name is None else KNOWLEDGE[thing][name]


def _named(text: str) -> str:
    return " ".join(word for word in words(text) if word not in _ARTICLES)
