"""Equality that needs symbols (sines, logarithms, nested roots), asked of sympy where it can be killed.

Knows trees; it must not know notation, nor what an answer is. sympy is the extra `symbolic`. It may take forever, and
all memory, over one short expression, so it never runs in this process (isolated.py). Few questions get that far: exact
arithmetic decides most, and floating point most of the rest.

Time, memory and every failure of sympy are outcomes, not errors: `Proof(False, why)`. That sympy is not installed is an
error, of whoever asked for it.
"""

import importlib.util
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from envs.problems.expression import Node
from envs.problems.isolated import DEFAULT_LIMITS, WorkerLimits, ask
from envs.problems.numeric import may_be_equal

_WORKER = Path(__file__).with_name("sympy_worker.py")
_TREE_OPERATIONS = {"mixed": "add", "scaled": "mul"}


@dataclass(frozen=True)
class Proof:
    """Whether two expressions were shown to be equal, and if not, why not."""

    equal: bool
    reason: str


def require_sympy() -> None:
    """ModuleNotFoundError, naming the extra, unless sympy is installed."""
    if importlib.util.find_spec("sympy") is None:
        raise ModuleNotFoundError(
            "symbolic equality needs the extra `symbolic`, and 'sympy' is not installed: pip install 'jaxrl[symbolic]'",
            name="sympy",
        )


async def prove(left: Node, right: Node, limits: WorkerLimits = DEFAULT_LIMITS) -> Proof:
    """Ask whether two expressions are equal: floating point first, sympy only where that agrees."""
    if not may_be_equal(left, right):
        return Proof(False, "other values, or none, in floating point")
    return await ask_sympy(left, right, limits)


async def ask_sympy(left: Node, right: Node, limits: WorkerLimits) -> Proof:
    """Ask sympy, whatever floating point says."""
    require_sympy()
    said = await ask(_WORKER, {"left": _tree(left), "right": _tree(right)}, limits)
    if said.answer == "equal":
        return Proof(True, "proven")
    return Proof(False, said.reason or "not shown to be equal")


def _tree(node: Node) -> list:
    if isinstance(node.value, Fraction):
        return ["number", str(node.value)]
    if node.value is not None:
        return [node.op, node.value, *map(_tree, node.args)]
    return [_TREE_OPERATIONS.get(node.op, node.op), *map(_tree, node.args)]
