"""What numbers a setting may be. Knows names and numbers; must not know what any of them is for."""

import math
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any


def at_least(name: str, value: Any, least: int) -> None:
    """Raise ValueError, which names the setting, for what is no whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")
    if value < least:
        raise ValueError(f"{name}={value}: expected at least {least}")


def ascending(name: str, sizes: Sequence[Any]) -> None:
    """Raise ValueError, which names the setting, unless these are whole numbers from 1 on, each above the last."""
    for size in sizes:
        at_least(f"{name}={sizes}, of which", size, 1)
    if any(a >= b for a, b in pairwise(sizes)):
        raise ValueError(f"{name}={sizes}: expected ascending sizes")


def above_zero(name: str, value: Any) -> None:
    """Raise ValueError, which names the setting, for what is no finite number above 0."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r}: expected a finite number above 0")
