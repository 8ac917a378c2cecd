"""How the time of a pure function grows with its input."""

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
QUADRUPLE = 4  # a quadratic function takes 16 times as long, a linear one 4 times
LIMIT = 12
ATTEMPTS = 3  # a stall of the machine is not met three times


def assert_linear(work: Callable[[T], object], make: Callable[[int], T], size: int) -> None:
    """`work` on inputs of `size` and of four times `size`: processor time of this thread alone, without the garbage
    collector, whose pauses grow with everything else that the test process holds."""

    def seconds(given: T) -> float:
        start = time.thread_time()
        work(given)
        return time.thread_time() - start

    few, many = make(size), make(QUADRUPLE * size)
    gc.disable()
    try:
        fast = slow = float("inf")
        for _ in range(ATTEMPTS):
            fast, slow = min(fast, seconds(few)), min(slow, seconds(many))
            if slow < LIMIT * fast + 0.05:
                return
    finally:
        gc.enable()
    raise AssertionError(f"{QUADRUPLE} times the input took {slow:.3f} s, where {fast:.3f} s were taken")
