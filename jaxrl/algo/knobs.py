"""Knobs: the keyword-only parameters of a function, set by name from a configuration.

A function says what it can be told by its signature alone: a parameter's default is the knob's default, a `Literal`
annotation its choices, `BOUNDS` the range of a number. Knows nothing about what the functions compute.
"""

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

Value = int | float | str

BOUNDS: Mapping[str, tuple[float, float]] = {
    "clip_low_threshold": (0.0, 1.0),
    "clip_high_threshold": (1.0, math.inf),
}
"""Inclusive ranges; a knob that is not named here is a number of at least 0."""


def knobs_of(*functions: Callable[..., Any]) -> dict[str, Value]:
    """Name -> default, of all keyword-only parameters of the functions."""
    return {
        name: parameter.default
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def choices_of(*functions: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """Name -> the values it may take, of the knobs that are words."""
    hints = {name: hint for function in functions for name, hint in typing.get_type_hints(function).items()}
    return {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is typing.Literal}


def check_knob(owner: str, name: str, value: Value, *functions: Callable[..., Any]) -> Value:
    """The value, as a float or one of the words that the functions take for it. Raises ValueError otherwise.

    owner: what the error says has the knob, such as "loss 'ppo'".
    """
    if name not in (known := knobs_of(*functions)):
        close = difflib.get_close_matches(name, known, cutoff=0.4) or sorted(known)
        has = f"the nearest names are {', '.join(close)}" if known else "it has none"
        raise ValueError(f"{owner} has no knob {name!r}; {has}")
    words = choices_of(*functions).get(name)
    if words is not None:
        if value not in words:
            raise ValueError(f"{name}={value!r} of {owner}: expected one of {', '.join(words)}")
        return value
    low, high = BOUNDS.get(name, (0.0, math.inf))
    try:
        return number(name, value, low, high)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}{_HINTS.get(name, '')}") from None


def number(name: str, value: Value, low: float = 0.0, high: float = math.inf) -> float:
    """The value as a float. Raises ValueError for a word, NaN, or a number outside [low, high]."""
    if isinstance(value, str) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: expected a number from {low:g} to {high:g}")
    return float(value)


_THRESHOLD = (
    ", since thresholds are absolute bounds on the ratio and must enclose 1: write 0.8 and 1.2 for what other code "
    "bases call epsilon 0.2"
)
_HINTS = {"clip_low_threshold": _THRESHOLD, "clip_high_threshold": _THRESHOLD}
