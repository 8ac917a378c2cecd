"""Fixtures of the runtime's tests."""

from compiling import fully_optimized, quick_to_compile
from conftest_runtime import policy

__all__ = ["fully_optimized", "policy", "quick_to_compile"]
