"""Numbers of settings: what is refused is named, with what was expected."""

import math
from typing import Any

import numpy as np
import pytest

from jaxrl.settings import above_zero, ascending, at_least


@pytest.mark.parametrize("value", [3, 4, np.int64(3)])
def test_a_whole_number_that_is_large_enough(value: Any) -> None:
    at_least("steps", value, 3)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2, "steps=2: expected at least 3"),
        *((v, f"steps={v!r}: expected a whole number of at least 3") for v in (3.0, 4.5, math.nan, "4", None, True)),
    ],
)
def test_what_is_no_such_number_is_named(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        at_least("steps", value, 3)


@pytest.mark.parametrize("value", [1e-9, 1, np.float32(2.0)])
def test_a_number_above_zero(value: Any) -> None:
    above_zero("rate", value)


@pytest.mark.parametrize("value", [0, 0.0, -1, math.inf, math.nan, "1", None, True])
def test_what_is_not_above_zero_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^rate={value!r}: expected a finite number above 0$"):
        above_zero("rate", value)


def test_sizes_ascend() -> None:
    for good in ((), (1,), (8, 32, 512)):
        ascending("sizes", good)
    for bad, said in (((8, 8), "expected ascending sizes"), ((9, 8), "ascending"), ((0, 8), "expected at least 1")):
        with pytest.raises(ValueError, match=rf"^sizes=\({bad[0]}, {bad[1]}\).*{said}"):
            ascending("sizes", bad)
