"""How hard XLA tries in tests: fixtures for files that compile much and compute little."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxrl.runtime import learner, programs

_JIT = jax.jit
_OPTIONS = {"xla_cpu_use_fusion_emitters": False}
"""LLVM takes long over what the emitters of fusions write, and gains nothing on small arrays."""


@functools.cache
def _known_options() -> dict[str, Any]:
    """The options, if this version of XLA has them."""
    try:
        _JIT(lambda: 0, compiler_options=_OPTIONS).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return {}
    return _OPTIONS


def forget_programs() -> None:
    """Whoever is made from now on compiles its own."""
    shared = (learner._train_step, learner._streamed_step, learner._eval_logprobs, learner._turn_features)
    for made in (*shared, learner._critic_fit, programs._program):
        made.cache_clear()


def _compile_quickly(quickly: bool) -> None:
    forget_programs()
    jax.config.update("jax_disable_most_optimizations", quickly)
    jax.jit = functools.partial(_JIT, compiler_options=_known_options()) if quickly else _JIT


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
