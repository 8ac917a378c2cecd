"""A calculator that walks Python's syntax tree. Knows arithmetic and its bounds; it never evaluates code.

Every refusal is a ToolError: the expression came from the model, so the model is told. The bounds keep any
expression cheap: its length, the size of each intermediate value, and the exponent.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

from jaxrl.tools import ToolError

Number = int | float

MAX_LENGTH = 200
MAX_EXPONENT = 64
MAX_VALUE = 10**30

_OPERATORS = "+ - * / // % ** ( )"
_CHARACTERS = re.compile(r"[0-9eE.+\-*/%() \t]*")  # also keeps the parser from warning about odd literals


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, as text."""
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed")
    try:
        return _as_text(_value(_parse(expression).body))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise _too_large() from None


def _parse(expression: str) -> ast.Expression:
    if not _CHARACTERS.fullmatch(expression):
        raise ToolError(f"only numbers and {_OPERATORS} are allowed (1234, not 1,234; ** for powers)")
    try:
        return ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r} is not an arithmetic expression") from None


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    raise ToolError(f"only numbers and {_OPERATORS} are allowed")


def _bounded(value: object) -> Number:
    if not isinstance(value, int | float):
        raise ToolError("the result is not a real number")
    if not abs(value) <= MAX_VALUE:  # written so that nan fails too
        raise _too_large()
    return value


def _too_large() -> ToolError:
    return ToolError("the result is too large; values up to 10**30 are allowed")


def _power(left: Number, right: Number) -> object:
    if abs(right) > MAX_EXPONENT:
        raise ToolError(f"exponent {right} is out of bounds; use -{MAX_EXPONENT} to {MAX_EXPONENT}")
    return left**right


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right  # whole quotients stay exact
    return left / right


_UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _as_text(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    if value == math.floor(value) and abs(value) < 1e15:
        return str(int(value))
    return format(value, ".12g")
