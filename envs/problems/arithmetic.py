"""Sums, differences, products and quotients of whole numbers, by seed. Knows numbers; no model, no episode.

Whether a problem is held out is a property of the problem (of a sum and a product, in either order), and not of the
seed: about one in ten is a test problem, so that no seed of one split ever meets the other split.
"""

import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from envs.problems.answers import Form
from envs.problems.problem import MathProblem

Split = Literal["train", "test"]

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,  # of multiples of the divisor
}
MAX_DIGITS = 9
_COMMUTE = frozenset("+*")
_TEST_EVERY = 10
_TRIES = 1000


def arithmetic(
    split: Split,
    count: int,
    *,
    seed: int = 0,
    operations: Sequence[str] = ("+",),
    digits: Sequence[int] = (1, 2),
    form: Form = "boxed",
) -> list[MathProblem]:
    """`count` problems such as "12+7=?"; a longer list starts with the shorter one.

    operations: of "+", "-", "*", "/", in equal shares. digits: how many an operand may have (of a quotient, the divisor
    and the result); each operand draws its own. Problems may repeat. ValueError if the split holds no such problem.
    """
    _check(split, count, operations, digits)
    rng = np.random.default_rng([seed, get_args(Split).index(split)])
    return [_draw(split, rng, operations, digits, form) for _ in range(count)]


def is_held_out(left: int, operation: str, right: int) -> bool:
    """Whether the problem belongs to the test split."""
    operands = sorted((left, right)) if operation in _COMMUTE else (left, right)
    return zlib.crc32(f"{operands[0]}{operation}{operands[1]}".encode()) % _TEST_EVERY == 0


def _check(split: str, count: int, operations: Sequence[str], digits: Sequence[int]) -> None:
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    if count < 0:
        raise ValueError(f"count is {count}; expected at least 0")
    if not operations or set(operations) - set(OPERATIONS):
        raise ValueError(f"operations={tuple(operations)}: expected one or more of {' '.join(OPERATIONS)}")
    if not digits or not all(1 <= n <= MAX_DIGITS for n in digits):
        raise ValueError(f"digits={tuple(digits)}: expected one or more numbers from 1 to {MAX_DIGITS}")


def _draw(
    split: str, rng: np.random.Generator, operations: Sequence[str], digits: Sequence[int], form: Form
) -> MathProblem:
    for _ in range(_TRIES):
        operation = operations[int(rng.integers(len(operations)))]
        left, right = _operand(rng, digits), _operand(rng, digits)
        if operation == "/":
            right = max(right, 1)
            left *= right
        if is_held_out(left, operation, right) == (split == "test"):
            return MathProblem(f"{left}{operation}{right}=?", str(OPERATIONS[operation](left, right)), form)
    raise ValueError(f"no {split} problem with operations={tuple(operations)}, digits={tuple(digits)}: allow more")


def _operand(rng: np.random.Generator, digits: Sequence[int]) -> int:
    length = digits[int(rng.integers(len(digits)))]
    return int(rng.integers(10 ** (length - 1) if length > 1 else 0, 10**length))
