"""Fixtures of the runtime's tests."""

from conftest_runtime import policy

__all__ = ["policy"]
