r"""Exact values of expressions: ratios of rational polynomials in symbols, \pi, i and square roots of primes.

Knows trees (expression.py) and arithmetic; it must not know notation. Square roots of distinct primes, products of them
and i are linearly independent over the rationals, so two values made of these alone are equal exactly if their normal
forms are. What has no such form (sines, logarithms, nested roots, e^x) stands as a symbol of its own, named after its
normal form: equality of two such forms is certain, a difference is not.

`Work` bounds the time of everything: when it is used up, the question is `Undecided`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from envs.problems.expression import Node

MAX_BITS, MAX_EXPONENT, MAX_NAME, MAX_FACTORIAL = 8192, 4096, 2000, 200

Monomial = tuple[tuple[str, int], ...]
"""Symbols with their exponents, sorted by name."""

Polynomial = Mapping[Monomial, Fraction]
"""Coefficients, none of them zero."""

_ONE: Polynomial = {(): Fraction(1)}
_PRIMES = [n for n in range(2, 1000) if all(n % d for d in range(2, math.isqrt(n) + 1))]
_SURELY_PRIME = 10**6  # what has no prime factor below 1000 and is smaller than this
_IMAGINARY, _RADICAL = "i", "√"


class Undecided(ArithmeticError):
    """No exact value: over a limit, division by zero, or out of what this file knows."""


@dataclass
class Work:
    """How many products of terms may still be formed (about a microsecond or two each)."""

    left: int = 2000

    def spend(self, amount: int) -> None:
        """Take `amount`; Undecided when that is more than is left."""
        self.left -= amount
        if self.left < 0:
            raise Undecided("the expression takes too much work")


@dataclass(frozen=True)
class Value:
    """A ratio of two polynomials, the second not zero."""

    over: Polynomial
    under: Polynomial

    @property
    def certain(self) -> bool:
        """Whether another certain value that looks different is different."""
        return not any("(" in name for poly in (self.over, self.under) for term in poly for name, _ in term)

    @property
    def rational(self) -> Fraction | None:
        """The value if it is a rational number."""
        if self.under != _ONE or not set(self.over) <= {()}:
            return None
        return self.over.get((), Fraction(0))


def evaluate(node: Node, work: Work) -> Value:
    """The normal form of `node`. Undecided when it has none within the limits."""
    work.spend(1)
    return _EVALUATE[node.op](node, work)


def same(left: Value, right: Value, work: Work) -> bool:
    """Whether two normal forms are of one value. False is certain only if both are `certain`."""
    if left.under == right.under:
        return left.over == right.over
    return _times(left.over, right.under, work) == _times(right.over, left.under, work)


# --- polynomials ----------------------------------------------------------------------------------


def _constant(value: Fraction | int) -> Polynomial:
    return {(): Fraction(value)} if value else {}


def _named(name: str) -> Value:
    if len(name) > MAX_NAME:
        raise Undecided("the expression has too large a part")
    return Value({((name, 1),): Fraction(1)}, _ONE)


def _plus(left: Polynomial, right: Polynomial, work: Work) -> Polynomial:
    work.spend(1 + (len(left) + len(right)) // 4)
    total = dict(left)
    for term, factor in right.items():
        total[term] = total.get(term, Fraction(0)) + factor
    return {term: factor for term, factor in total.items() if factor}


def _times(left: Polynomial, right: Polynomial, work: Work) -> Polynomial:
    bits = _bits(left) + _bits(right)
    if bits > MAX_BITS:
        raise Undecided("the numbers are too large")
    work.spend(1 + len(left) * len(right) * (1 + bits // 256))
    total: dict[Monomial, Fraction] = {}
    for a, x in left.items():
        for b, y in right.items():
            factor, term = _merge(a, b)
            total[term] = total.get(term, Fraction(0)) + x * y * factor
    return {term: factor for term, factor in total.items() if factor}


def _bits(poly: Polynomial) -> int:
    return max((f.numerator.bit_length() + f.denominator.bit_length() for f in poly.values()), default=0)


def _merge(left: Monomial, right: Monomial) -> tuple[int, Monomial]:
    """The product of two monomials, as a factor and a monomial: i*i is -1, a root squared is its radicand."""
    if not left or not right:
        return 1, left or right
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    factor = 1
    for name in [name for name, exponent in exponents.items() if exponent > 1 and name[0] in _IMAGINARY + _RADICAL]:
        square = {_IMAGINARY: -1}.get(name) or (int(name[1:]) if name[0] == _RADICAL else None)
        if square is not None:
            pairs, exponents[name] = divmod(exponents[name], 2)
            factor *= square**pairs
    return factor, tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent))


# --- ratios ---------------------------------------------------------------------------------------


def _ratio(over: Polynomial, under: Polynomial) -> Value:
    """Over a number, the number is divided out: so that rational numbers have one form."""
    if not under:
        raise Undecided("division by zero")
    if set(under) != {()} or under == _ONE:
        return Value(over, under)
    return Value({term: factor / under[()] for term, factor in over.items()}, _ONE)


def _add(left: Value, right: Value, work: Work) -> Value:
    if left.under == right.under:
        return _ratio(_plus(left.over, right.over, work), left.under)
    crossed = _plus(_times(left.over, right.under, work), _times(right.over, left.under, work), work)
    return _ratio(crossed, _times(left.under, right.under, work))


def _multiply(left: Value, right: Value, work: Work) -> Value:
    return _ratio(_times(left.over, right.over, work), _times(left.under, right.under, work))


def _divide(left: Value, right: Value, work: Work) -> Value:
    return _ratio(_times(left.over, right.under, work), _times(left.under, right.over, work))


def _whole_power(value: Value, exponent: int, work: Work) -> Value:
    if abs(exponent) > MAX_EXPONENT or max(_bits(value.over), _bits(value.under)) * abs(exponent) > MAX_BITS * 4:
        raise Undecided("the exponent is too large")
    base = value if exponent >= 0 else _divide(Value(_ONE, _ONE), value, work)
    result = Value(_ONE, _ONE)
    for bit in bin(abs(exponent))[2:]:
        result = _multiply(result, result, work)
        result = _multiply(result, base, work) if bit == "1" else result
    return result


# --- roots ----------------------------------------------------------------------------------------


def _square_root(value: Fraction, work: Work) -> Value:
    """Of a rational number: a rational times square roots of primes, times i if it is negative."""
    radicand = abs(value.numerator * value.denominator)
    if radicand.bit_length() > MAX_BITS:
        raise Undecided("the radicand is too large")
    work.spend(20 + radicand.bit_length() // 4)
    outside, inside = 1, []
    for prime in _PRIMES:
        power = 0
        while radicand and radicand % prime == 0:
            radicand, power = radicand // prime, power + 1
        outside *= prime ** (power // 2)
        inside += [prime] * (power % 2)
    root = math.isqrt(radicand)
    if root * root == radicand:
        outside, radicand = outside * root, 1
    if radicand >= _SURELY_PRIME:
        raise Undecided("the radicand has large factors")
    inside += [radicand] if radicand > 1 else []
    names = [f"{_RADICAL}{prime}" for prime in inside] + ([_IMAGINARY] if value < 0 else [])
    factor = Fraction(outside, value.denominator)
    return Value({tuple(sorted((name, 1) for name in names)): factor} if factor else {}, _ONE)


def _whole_root(value: int, index: int) -> int | None:
    """The whole number whose power `index` is `value` >= 0, if there is one."""
    low, high = 0, 1 << (value.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= value else (low, middle - 1)
    return low if low**index == value else None


def _root(value: Value, index: int, work: Work) -> Value:
    """The real root where it is exact, else a symbol named after it."""
    known = value.rational
    if known is not None and index == 2:
        return _square_root(known, work)
    if known is not None and _bits(value.over) <= MAX_BITS // 8 and index <= 64 and (known >= 0 or index % 2):
        work.spend(50 + _bits(value.over))
        over, under = _whole_root(abs(known.numerator), index), _whole_root(known.denominator, index)
        if over is not None and under is not None:
            return Value(_constant(Fraction(over if known > 0 else -over, under)), _ONE)
    return _opaque("root", (value, Value(_constant(index), _ONE)), work)


# --- operations -----------------------------------------------------------------------------------


def _opaque(name: str, args: tuple[Value, ...], work: Work) -> Value:
    written = f"{name}({';'.join(f'{_written(a.over, work)}/{_written(a.under, work)}' for a in args)})"
    return _named(written)


def _written(poly: Polynomial, work: Work) -> str:
    size = sum(len(name) for term in poly for name, _ in term)
    if size > MAX_NAME or _bits(poly) > MAX_BITS // 4:
        raise Undecided("the expression has too large a part")
    work.spend(1 + size // 16 + _bits(poly) // 64)
    return "+".join(f"{factor:}*{term}" for term, factor in sorted(poly.items()))


def _power(node: Node, work: Work) -> Value:
    base, exponent = (evaluate(arg, work) for arg in node.args)
    known = exponent.rational
    if known is None:
        return _opaque("power", (base, exponent), work)
    if not base.over and known <= 0:
        raise Undecided("zero to a power that is not positive")
    if known.denominator == 1:
        return _whole_power(base, known.numerator, work)
    number = base.rational
    if known.denominator > 64 or (number is not None and number < 0 and known.denominator > 2):
        return _opaque("power", (base, exponent), work)
    return _whole_power(_root(base, known.denominator, work), known.numerator, work)


def _call(node: Node, work: Work) -> Value:
    args = tuple(evaluate(arg, work) for arg in node.args)
    exact = _CALLS.get(str(node.value))
    found = exact(args, work) if exact else None
    return found or _opaque(str(node.value), args, work)


def _called_root(args: tuple[Value, ...], work: Work) -> Value | None:
    index = args[1].rational
    if index is None or index.denominator != 1 or index < 2:
        return None
    return _root(args[0], int(index), work)


def _called_absolute(args: tuple[Value, ...], work: Work) -> Value | None:
    known = args[0].rational
    return None if known is None else Value(_constant(abs(known)), _ONE)


def _called_factorial(args: tuple[Value, ...], work: Work) -> Value | None:
    known = args[0].rational
    if known is None or known.denominator != 1 or not 0 <= known <= MAX_FACTORIAL:
        return None
    work.spend(int(known))
    return Value(_constant(math.factorial(int(known))), _ONE)


def _called_binomial(args: tuple[Value, ...], work: Work) -> Value | None:
    above, below = (arg.rational for arg in args)
    if above is None or below is None or above.denominator != 1 or below.denominator != 1:
        return None
    if not (0 <= above <= MAX_FACTORIAL and 0 <= below <= MAX_FACTORIAL):
        return None
    work.spend(int(above))
    return Value(_constant(math.comb(int(above), int(below))), _ONE)


def _called_degrees(args: tuple[Value, ...], work: Work) -> Value:
    return _multiply(args[0], Value({(("pi", 1),): Fraction(1, 180)}, _ONE), work)


_CALLS: Mapping[str, Callable[[tuple[Value, ...], Work], Value | None]] = {
    "root": _called_root,
    "abs": _called_absolute,
    "factorial": _called_factorial,
    "binom": _called_binomial,
    "degrees": _called_degrees,
}


def _number(node: Node, work: Work) -> Value:
    assert isinstance(node.value, Fraction)
    return Value(_constant(node.value), _ONE)


def _binary(combine: Callable[[Value, Value, Work], Value]) -> Callable[[Node, Work], Value]:
    return lambda node, work: combine(evaluate(node.args[0], work), evaluate(node.args[1], work), work)


def _negate(node: Node, work: Work) -> Value:
    value = evaluate(node.args[0], work)
    return Value({term: -factor for term, factor in value.over.items()}, value.under)


_EVALUATE: Mapping[str, Callable[[Node, Work], Value]] = {
    "number": _number,
    "symbol": lambda node, work: _named(str(node.value)),
    "add": _binary(_add),
    "mixed": _binary(_add),
    "mul": _binary(_multiply),
    "div": _binary(_divide),
    "neg": _negate,
    "pow": _power,
    "call": _call,
}
