"""Whether two expressions are equal, asked of sympy. Runs in a worker process and nowhere else (worker.py).

It gets nested lists and never text to evaluate: sympy's own parsers run what they read. It must import nothing of this
package.
"""

from typing import Any

import sympy

TEN = sympy.Integer(10)
KNOWN = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo}
CALLS: dict[str, Any] = {
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "ln": sympy.log,
    "log": lambda x, base=TEN: sympy.log(x) / sympy.log(base),
    "abs": sympy.Abs,
    "degrees": lambda x: x * sympy.pi / 180,
    "root": lambda x, n: sympy.real_root(x, n) if x.is_real and n.is_odd else sympy.root(x, n),
    "binom": sympy.binomial,
}
OPERATIONS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "neg": lambda a: -a,
}


def build(tree: list) -> Any:
    """The expression of ["number", "1/2"], ["symbol", name], ["call", name, ...] or [operation, ...]."""
    kind, *rest = tree
    if kind == "number":
        return sympy.Rational(rest[0])
    if kind == "symbol":
        return KNOWN.get(rest[0]) or sympy.Symbol(rest[0])
    if kind == "call":
        name, *args = rest
        return (CALLS.get(name) or getattr(sympy, name))(*map(build, args))
    return OPERATIONS[kind](*map(build, rest))


def proves(left: list, right: list) -> bool:
    """Whether the difference is zero, or simplifies to it."""
    difference = build(left) - build(right)
    return bool(difference == 0 or sympy.expand_log(difference, force=True) == 0 or sympy.simplify(difference) == 0)


def answer(question: dict) -> str:
    """Whether question["left"] is question["right"]."""
    return "equal" if proves(question["left"], question["right"]) else "different"
