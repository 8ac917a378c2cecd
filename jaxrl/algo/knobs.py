"""Knobs: the keyword-only parameters of a function, set by name from a configuration.

A function says what it can be told by its signature alone: a parameter's default is the knob's default, a `Literal`
annotation its choices, `RANGES` what makes sense of a number. Knows nothing about what the functions compute.
"""

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Value = int | float | str


@dataclass(frozen=True)
class Range:
    """Numbers from low to high. above: low itself is left out. Infinity is in the range only where it is `high`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    infinite: bool = False

    def __contains__(self, value: float) -> bool:
        inside = self.low < value <= self.high if self.above else self.low <= value <= self.high
        return inside and (self.infinite or math.isfinite(value))

    def __str__(self) -> str:
        if self == Range():
            return "a finite number"
        low = f"{'above' if self.above else 'of at least'} {self.low:g}"
        high = "" if self.high == math.inf else f" and at most {self.high:g}"
        return f"a number {low}{high}" + (", or inf" if self.infinite else "")


_SIZE, _POSITIVE = Range(0.0), Range(0.0, above=True)
_CAP = Range(0.0, above=True, infinite=True)

RANGES: Mapping[str, Range] = {
    "clip_low_threshold": Range(0.0, 1.0),
    "clip_high_threshold": Range(1.0, infinite=True),
    "dual_clip_ratio": Range(1.0, infinite=True),
    "ratio_min": _SIZE,
    "ratio_max": _CAP,
    "divergence_low": _SIZE,
    "divergence_high": _SIZE,
    "divergence_max": _SIZE,
    "advantage_tau": _POSITIVE,
    "sampler_kl_tau": _SIZE,
    "tau_positive": _POSITIVE,
    "tau_negative": _POSITIVE,
    "dro_beta": _POSITIVE,
    "drpo_epsilon": _POSITIVE,
    "negative_min": _SIZE,
    "negative_max": _CAP,
    "clip_log_low": _SIZE,
    "clip_log_high": _SIZE,
    "k_positive": _SIZE,
    "k_negative": _SIZE,
    "lambda_positive": _SIZE,
    "lambda_negative": _SIZE,
    "kimi_tau": _POSITIVE,
    "opsm_delta": _SIZE,
    "second_moment_max": _POSITIVE,
    "covariance_share": Range(0.0, 1.0, above=True),
    "covariance_coef": _POSITIVE,
    "dpo_beta": _POSITIVE,
    "kl_coef": _POSITIVE,
    "kl_discount": Range(0.0, 1.0),
    "weight_min": _SIZE,
    "weight_max": _CAP,
    "geometric_min": Range(0.0, 1.0),
    "geometric_max": Range(1.0, infinite=True),
    "entropy_coef": _SIZE,
    "entropy_target": _POSITIVE,
    "entropy_rate": _POSITIVE,
    "entropy_coef_max": _POSITIVE,
    "observation_coef": _SIZE,
    "aggregation_constant": _POSITIVE,
}
"""What makes sense; a knob that is not named here, such as one of a user's own form, is any finite number."""

ORDERED = (
    ("ratio_min", "ratio_max"),
    ("negative_min", "negative_max"),
    ("covariance_low", "covariance_high"),
    ("weight_min", "weight_max"),
    ("entropy_coef", "entropy_coef_max"),
)
"""Pairs of one owner of which the first is at most the second."""


def knobs_of(*functions: Callable[..., Any]) -> dict[str, Any]:
    """Name -> default, of all keyword-only parameters of the functions (`Parameter.empty` for none)."""
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


def check_knobs(owner: str, given: Mapping[str, Value], *functions: Callable[..., Any]) -> dict[str, Value]:
    """The given knobs as floats and words. Raises ValueError for one that is unknown or makes no sense.

    owner: what the error says has the knob, such as "loss 'ppo'".
    """
    checked = {name: _checked(owner, name, value, *functions) for name, value in given.items()}
    whole = knobs_of(*functions) | checked
    for low, high in ORDERED:
        if low in whole and high in whole and whole[low] > whole[high]:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(f"{owner}: {low}={whole[low]} is above {high}={whole[high]}, so that nothing lies between")
    return checked


def _checked(owner: str, name: str, value: Value, *functions: Callable[..., Any]) -> Value:
    if name not in (known := knobs_of(*functions)):
        close = difflib.get_close_matches(name, known, cutoff=0.4) or sorted(known)
        has = f"the nearest names are {', '.join(close)}" if known else "it has none"
        raise ValueError(f"{owner} has no knob {name!r}; {has}")
    words = choices_of(*functions).get(name)
    if words is None:
        return number(name, value, owner)
    if value not in words:
        raise ValueError(f"{owner}: {name}={value!r}: expected one of {', '.join(words)}")
    return value


def number(name: str, value: Value, owner: str = "loss_fn_config") -> float:
    """The value as a float. Raises ValueError for a word, NaN, or a number that `RANGES` leaves out."""
    allowed = RANGES.get(name, Range())
    if isinstance(value, str | bool) or float(value) not in allowed:
        raise ValueError(f"{owner}: {name}={value!r}: expected {allowed}{_HINTS.get(name, '')}")
    return float(value)


_THRESHOLD = (
    ", since thresholds are absolute bounds on the ratio and must enclose 1: write 0.8 and 1.2 for what other code "
    "bases call epsilon 0.2"
)
_HINTS = {"clip_low_threshold": _THRESHOLD, "clip_high_threshold": _THRESHOLD}
