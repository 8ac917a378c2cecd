"""How hard XLA tries in tests: fixtures for files that compile much and compute little."""

from collections.abc import Iterator
from functools import partial

import jax
import pytest

_jit = jax.jit
_quick_jit = partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": False})
"""LLVM takes long over what the emitters of fusions write, and gains nothing on small arrays."""


def _compile_quickly(quickly: bool) -> None:
    jax.config.update("jax_disable_most_optimizations", quickly)
    jax.jit = _quick_jit if quickly else _jit


@pytest.fixture(scope="module")
def quick_to_compile() -> Iterator[None]:
    """A quarter of the time to compile. Not for tests of the compiled text, nor of what users get to the last bit."""
    _compile_quickly(True)
    yield
    _compile_quickly(False)


@pytest.fixture
def fully_optimized() -> Iterator[None]:
    """The compiler as users have it, for one test of such a file."""
    _compile_quickly(False)
    yield
    _compile_quickly(True)
