"""From a question in words to a property, and from there to an answer: by the words that ask for each property.

Knows the knowledge and no game. A question that asks for no property, for several at once, or with a "not" in it is
answered with unknown: the rules are simple, and say so rather than guess.
"""

import re

from envs.twenty_questions.knowledge import KNOWLEDGE, PROPERTIES, Answer

_WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*")
_GUESS = re.compile(r"\bguess(?:\s+is\b|[\s*_]*:|\s*[-–—]\s)[\s:*_-]*([^.,;!?\n]+)", re.IGNORECASE)
_ASKED = re.compile(r"\b(?:guess|is (?:it|this|the thing))\s+([^.,:;!?\n]+)", re.IGNORECASE)
_NEGATING = (
    "not cannot no non never none neither nor nothing without lack lacks lacking unable incapable impossible false or "
    "but other different except excluding besides unlike instead rather hardly"
)
_NEGATIONS = frozenset(_NEGATING.split())
_NEGATED = re.compile(r"(?:is|are|was|were|do|does|did|ca|could|wo|would|should|has|have|had|ai)n'?t|\w*less")
_ARTICLES = frozenset({"a", "an", "the", "it", "it's", "is", "that"})


def words(text: str) -> tuple[str, ...]:
    """The words of a text, small, without punctuation but for what joins two parts of one: can't, man-made."""
    return tuple(_WORD.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")))


_ASKED_BY = {words(phrase): name for name, phrases in PROPERTIES.items() for phrase in phrases}
_LONGEST = max(map(len, _ASKED_BY))


def property_asked(question: str) -> str | None:
    """The one property that a question asks for; None when there is none, or more than one, or a negation."""
    said = words(question)
    if _NEGATIONS & set(said) or any(map(_NEGATED.fullmatch, said)):
        return None
    spans = (said[i : i + n] for i in range(len(said)) for n in range(1, _LONGEST + 1))
    asked = {_ASKED_BY[span] for span in spans if span in _ASKED_BY}
    return asked.pop() if len(asked) == 1 else None


def thing_guessed(text: str, *, known: frozenset[str] = frozenset(KNOWLEDGE)) -> str | None:
    """The thing that a message guesses: "Guess: dog", "My guess is a dog"; else one of the `known` that it names.

    So "Is it a dog?" and "I guess a dog" are guesses when dog is known, and "Is it an animal?" is a question.
    """
    explicit = _GUESS.search(text)
    if explicit and (named := _named(explicit[1])):
        return named
    return next((named for asked in _ASKED.findall(text) if (named := _named(asked)) in known), None)


def answer_about(thing: str, question: str) -> Answer:
    """Whether the thing has what the question asks for. Raises ValueError for a thing that is not known."""
    if thing not in KNOWLEDGE:
        raise ValueError(f"nothing is known of {thing!r}: the scripted answerer knows {', '.join(KNOWLEDGE)}")
    name = property_asked(question)
    return Answer.UNKNOWN if name is None else KNOWLEDGE[thing][name]


def _named(text: str) -> str:
    return " ".join(word for word in words(text) if word not in _ARTICLES)
