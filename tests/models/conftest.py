"""Fixtures of the models' tests."""

from compiling import fully_optimized, quick_to_compile

__all__ = ["fully_optimized", "quick_to_compile"]
