"""Expressions in floating point, at a point chosen by the names of their symbols: a cheap no to most equalities.

Knows trees and complex numbers. Agreement here proves nothing: 0.3333333333333333 agrees with 1/3.
"""

import cmath
import math
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction

from envs.problems.expression import Node

POINTS, TOLERANCE = 3, 1e-9

_KNOWN = {"pi": math.pi, "e": math.e, "i": 1j}


def may_be_equal(left: Node, right: Node) -> bool:
    """Whether two expressions have the same finite values at a few points. False if one has none."""
    return all(_agree(left, right, point) for point in range(POINTS))


def _agree(left: Node, right: Node, point: int) -> bool:
    try:
        a, b = _value(left, point), _value(right, point)
        return abs(a - b) <= TOLERANCE * max(1.0, abs(a), abs(b))
    except (ArithmeticError, ValueError, TypeError):
        return False


def _value(node: Node, point: int) -> complex:
    if isinstance(node.value, Fraction):
        return complex(float(node.value))
    if node.op == "symbol":
        return _place(str(node.value), point)
    args = [_value(arg, point) for arg in node.args]
    value = complex(_OPERATIONS[str(node.value) if node.op == "call" else node.op](*args))
    if not cmath.isfinite(value):
        raise OverflowError
    return value + 0.0  # no negative zero, which is on the other side of the cut of roots and logarithms


def _place(name: str, point: int) -> complex:
    """The value of a symbol: between 0.5 and 2.5, and nothing round."""
    if name == "infty":
        raise OverflowError
    return _KNOWN.get(name) or 0.5 + zlib.crc32(f"{name} {point}".encode()) / 2**31


def _root(radicand: complex, index: complex) -> complex:
    if radicand.imag == 0 and radicand.real < 0 and index.real % 2 == 1:
        return -((-radicand) ** (1 / index))
    return radicand ** (1 / index)


def _factorial(x: complex) -> complex:
    if x.imag:
        raise ValueError
    return math.gamma(x.real + 1)


def _binomial(n: complex, k: complex) -> complex:
    return _factorial(n) / (_factorial(k) * _factorial(n - k))


_OPERATIONS: Mapping[str, Callable[..., complex]] = {
    "add": lambda a, b: a + b,
    "mixed": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "scaled": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "neg": lambda a: -a,
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "exp": cmath.exp,
    "ln": cmath.log,
    "log": lambda x, base=complex(10): cmath.log(x) / cmath.log(base),
    "abs": lambda x: abs(x),
    "degrees": lambda x: x * math.pi / 180,
    "root": _root,
    "factorial": _factorial,
    "binom": _binomial,
}
