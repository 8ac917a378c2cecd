"""How hard XLA tries in tests, which compile much and compute little: hardly, except where a test asks for more."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxrl.runtime import learner, programs

_JIT = jax.jit
_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
"""LLVM takes long over what the emitters of fusions write, and over many modules instead of one."""


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


def compile_quickly(quickly: bool = True) -> None:
    """From now on compile in a quarter of the time; or, if not quickly, as users do."""
    forget_programs()
    jax.config.update("jax_disable_most_optimizations", quickly)
    jax.jit = functools.partial(_JIT, compiler_options=_known_options()) if quickly else _JIT


@pytest.fixture(scope="session", autouse=True)
def _quick_to_compile() -> None:
    compile_quickly()


@pytest.fixture
def fully_optimized() -> Iterator[None]:
    """The compiler as users have it, for tests of the compiled text and of what users get to the last bit."""
    compile_quickly(False)
    yield
    compile_quickly()
