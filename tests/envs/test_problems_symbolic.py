"""Workers that can be killed: what hangs, eats memory or dies is an outcome, and no process outlives its question."""

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from envs.problems import MathProblem, WorkerLimits, prove
from envs.problems.expression import read_expression
from envs.problems.isolated import Said, ask
from envs.problems.numeric import may_be_equal
from envs.problems.symbolic import ask_sympy, require_sympy

needs_sympy = pytest.mark.skipif(
    importlib.util.find_spec("sympy") is None, reason="the extra `symbolic` is not installed"
)


def worker(tmp_path: Path, body: str) -> Path:
    """A worker file whose `answer` has this body, and which leaves its process id behind."""
    path = tmp_path / "asked.py"
    lines = ["import os, time", f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"]
    lines += ["def answer(question):", f"    {body}"]
    path.write_text("\n".join(lines) + "\n")
    return path


def is_gone(tmp_path: Path) -> bool:
    try:
        os.kill(int((tmp_path / "pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


SHORT = WorkerLimits(seconds=0.5, memory_bytes=2**29)

OUTCOMES = {
    "answers": ("return str(question['n'] + 1)", Said("42")),
    "hangs": ("time.sleep(600)", Said(None, "no answer within 0.5 s")),
    "computes": ("while True: pass", Said(None, "no answer within 0.5 s")),
    "computes in C": ("return str(9**9**9)", Said(None, "no answer within 0.5 s")),
    "eats memory": ("return str(len(b'x' * 2**32))", Said(None, "the worker ended with code 1: MemoryError:")),
    "raises": ("raise ValueError('no')", Said(None, "the worker ended with code 1: ValueError: no")),
    "exits": ("os._exit(7)", Said(None, "the worker ended with code 7: it said nothing")),
    "is killed": ("os.kill(os.getpid(), 9)", Said(None, "the worker ended with code -9: it said nothing")),
}


@pytest.mark.parametrize("what", OUTCOMES)
async def test_I9_whatever_the_worker_does_is_an_outcome_and_its_process_is_gone(what: str, tmp_path: Path) -> None:
    body, said = OUTCOMES[what]
    assert await ask(worker(tmp_path, body), {"n": 41}, SHORT) == said
    assert is_gone(tmp_path)


async def test_I9_cancelling_the_question_kills_its_worker(tmp_path: Path) -> None:
    asked = worker(tmp_path, "time.sleep(600)")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, asked, {}, WorkerLimits(seconds=600))
        for _ in range(6000):
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
                break
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert is_gone(tmp_path)


async def test_a_worker_that_cannot_start_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "asked.py").write_text("import no_such_module\n")
    with pytest.raises(RuntimeError, match=r"asked\.py did not start: .*No module named 'no_such_module'"):
        await ask(tmp_path / "asked.py", {}, SHORT)


async def test_no_more_workers_run_at_once_than_the_limits_say(tmp_path: Path) -> None:
    asked = worker(tmp_path, "time.sleep(0.2); return 'x'")
    start = time.monotonic()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask, asked, {}, WorkerLimits(seconds=30, processes=1))
    assert time.monotonic() - start >= 0.6


@pytest.mark.parametrize("name", ["seconds", "memory_bytes", "processes"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0: expected more than 0"):
        WorkerLimits(**{name: 0})


@pytest.mark.parametrize(
    ("left", "right", "agree"),
    [
        (r"\sin 30^\circ", "1/2", True),
        ("e^{x+y}", "e^x e^y", True),
        (r"\sin 2x", r"2\sin x \cos x", True),
        (r"\sqrt[3]{-8}", "-2", True),
        (r"\binom{5}{2}", "10", True),
        (r"\ln 2", r"\ln 3", False),
        ("x", "y", False),
        ("9^{9^{9^{9}}}", "9^{9^{9^{9}}}", False),
        ("1/0", "1/0", False),
        (r"\ln 0", "1", False),
        (r"\infty", r"\infty", False),
        ("(10^9)!", "1", False),
    ],
)
def test_floating_point_rules_out_most_and_never_raises(left: str, right: str, agree: bool) -> None:
    assert may_be_equal(read_expression(left), read_expression(right)) == agree


async def test_what_floating_point_rules_out_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*args: Any) -> None:
        raise AssertionError("a worker was asked")

    monkeypatch.setattr("envs.problems.symbolic.ask", refuse)
    proof = await prove(read_expression(r"\ln 2"), read_expression("0.7"))
    assert not proof.equal
    assert "floating point" in proof.reason


def test_without_sympy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxrl\[symbolic\]'"):
        require_sympy()
    with pytest.raises(ModuleNotFoundError, match="extra `symbolic`"):
        MathProblem("q", "1", symbolic=True)


# --- sympy itself ---------------------------------------------------------------------------------


@pytest.mark.slow
@needs_sympy
@pytest.mark.parametrize(
    ("given", "reference", "right"),
    [
        (r"\frac{\sqrt{3}}{2}x", r"x\cos 30^\circ", True),
        (r"2\log_2 3", r"\log_2 9", True),
        (r"1+\sqrt{2}", r"\sqrt{3+2\sqrt{2}}", True),
        (r"\{e^x e^y, 2\}", r"\{2, e^{x+y}\}", True),
        (r"\{e^x e^y, 3\}", r"\{2, e^{x+y}\}", False),
        (r"\sqrt{x^2}", "x", False),
    ],
)
async def test_symbols_are_proven_equal(given: str, reference: str, right: bool) -> None:
    said = MathProblem("q", reference, symbolic=True, limits=WorkerLimits(seconds=60)).check_answer(
        rf"\boxed{{{given}}}"
    )
    assert (said if isinstance(said, bool) else await said) == right


@pytest.mark.slow
@needs_sympy
@pytest.mark.parametrize("text", ["9^{9^{9^{9}}}", "(10^9)!", "(x+y+z)^{4000} - (x+y)^{4000}"])
async def test_F15_what_sympy_cannot_do_in_time_is_not_equal(text: str) -> None:
    proof = await ask_sympy(read_expression(text), read_expression("1"), WorkerLimits(seconds=1))
    assert not proof.equal
    assert proof.reason == "no answer within 1 s" or proof.reason.startswith(("the worker ended", "not shown"))
