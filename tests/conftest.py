"""How the tests run: on 8 pretended CPU devices, with strict dtypes and shapes, on a virtual clock if they ask.

Everything here must happen before `jaxrl` is imported, which pytest does when it collects the test files.
"""

import functools
import gc
import inspect
import os
from pathlib import Path
from typing import Any

import hypothesis
import jax
import pytest
import trio
import trio.testing
from jaxtyping import install_import_hook
from xdist.scheduler import LoadFileScheduling

pytest_plugins = ["compiling"]  # imported after this file

CACHE = Path(__file__).parent.parent / ".cache"

# Set in the environment too, so that processes started by a test behave like the test.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")  # smaller ones cost more to look up
os.environ.setdefault("MPLBACKEND", "Agg")
for _name in ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
    _value = os.environ[_name]
    jax.config.update(_name.lower(), float(_value) if _name.endswith("SECS") else _value)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

install_import_hook(["jaxrl.models", "jaxrl.algo"], "beartype.beartype")

hypothesis.settings.register_profile("usual", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500)
hypothesis.settings.load_profile("usual")  # pytest --hypothesis-profile=thorough takes the other


class ByFile(LoadFileScheduling):
    """A worker takes a file at a time; tests/chat as if it were one, since its files share ten real tokenizers."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "tests/chat" if file.startswith("tests/chat/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What is imported stays: Python need not look through it again and again, which took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    """A virtual clock: whenever every task sleeps, it jumps to the next deadline."""
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Run `async def test_*` under trio, on the test's clock when it asked for one; also under hypothesis."""
    test = pyfuncitem.obj
    drawn = getattr(test, "hypothesis", None)
    if drawn is not None and inspect.iscoroutinefunction(drawn.inner_test):
        drawn.inner_test = _under_trio(drawn.inner_test, pyfuncitem.funcargs)
    elif inspect.iscoroutinefunction(test):
        pyfuncitem.obj = _under_trio(test, pyfuncitem.funcargs)


def _under_trio(test: Any, fixtures: dict[str, Any]) -> Any:
    clocks = [f for f in fixtures.values() if isinstance(f, trio.abc.Clock)]

    @functools.wraps(test)
    def run(**kwargs: Any) -> None:
        trio.run(functools.partial(test, **kwargs), clock=clocks[0] if clocks else None, strict_exception_groups=True)

    return run
