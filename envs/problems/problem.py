"""A question with a reference answer, and the two checks of a response to it.

Knows where answers stand and when they are equal; it must not know episodes, nor where questions come from. It is what
`jaxrl.runtime.problem` takes for a problem: immutable, picklable.
"""

import logging
from collections.abc import Awaitable
from dataclasses import dataclass

from envs.problems.answers import Form, answer_form
from envs.problems.grading import Pair, judge
from envs.problems.isolated import DEFAULT_LIMITS, WorkerLimits
from envs.problems.symbolic import prove, require_sympy

MAX_PROOFS = 4
"""Proofs tried for one response; more pairs than that are a list of guesses."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MathProblem:
    r"""A question whose answer is mathematics: numbers, expressions, tuples, intervals, sets, or a word.

    form: how the response marks its answer (answers.py); the last mark counts. symbolic: ask sympy where exact
    arithmetic cannot decide (the extra `symbolic`), within `limits`; without it such an answer is wrong. What could not
    be decided goes to the log of this module.
    """

    question: str
    reference_answer: str
    form: Form = "boxed"
    symbolic: bool = False
    limits: WorkerLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        answer_form(self.form)
        if not self.reference_answer.strip():
            raise ValueError(f"reference_answer is blank, for the question {self.question[:80]!r}")
        if self.symbolic:
            require_sympy()

    def check_answer(self, text: str, /) -> bool | Awaitable[bool]:
        """Whether the last marked answer is right. Awaitable only with `symbolic`, and only for a proof."""
        given = answer_form(self.form).read(text)
        if given is None:
            return False
        verdict = judge(given, self.reference_answer)
        if not verdict.undecided:
            return verdict.equal
        if not self.symbolic:
            _log.info("answer %.80r to %.80r is wrong: %s", given, self.question, verdict.reason)
            return False
        return self._prove(given, verdict.undecided)

    def check_format(self, text: str, /) -> bool:
        """Whether an answer is marked, and is not blank."""
        given = answer_form(self.form).read(text)
        return given is not None and bool(given.strip())

    async def _prove(self, given: str, undecided: tuple[Pair, ...]) -> bool:
        proven: set[Pair] = set()
        for pair in undecided[:MAX_PROOFS]:
            proof = await prove(*pair, self.limits)
            if proof.equal:
                proven.add(pair)
            else:
                _log.info("answer %.80r to %.80r: %s", given, self.question, proof.reason)
        return judge(given, self.reference_answer, frozenset(proven)).equal
