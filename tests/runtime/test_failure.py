"""How a run ends badly: one error is what is seen, and the others are not lost."""

import asyncio
import dataclasses
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from episodes import CountingBuilder, ScriptedEngine

from jaxrl.runtime.episode import Limits
from jaxrl.runtime.failure import Terminated, exit_code, one_line_errors, the_one
from jaxrl.runtime.rollout import RolloutPlan, run_batch, run_group
from jaxrl.tools import ToolFault


async def raised_by(builders: list[CountingBuilder]) -> BaseExceptionGroup:
    engine: Any = ScriptedEngine(lambda seed, turn, context: (40, 41))
    plan = RolloutPlan((0, "train", 0), Limits(6))
    try:
        await run_batch(partial(run_group, engine), builders, plan)
    except BaseExceptionGroup as group:
        return group
    pytest.fail("nothing was raised")


async def test_I9_of_two_members_that_fail_at_once_one_is_seen_and_the_other_noted_with_its_place() -> None:
    down = trio.Event()

    async def act(where: str, member: int) -> None:
        if where != "step":
            return
        if member == 2:
            await trio.testing.wait_all_tasks_blocked()
            down.set()
        await down.wait()  # members 0 and 1 wake in one pass of the scheduler: neither cancels the other in time
        if member < 2:
            raise ConnectionError(f"no answer to {member}")

    group = await raised_by([CountingBuilder([], act=act, name="the task")])
    seen = the_one(group)
    assert isinstance(seen, ConnectionError)
    member = int(str(seen)[-1])
    assert f"in turn 1 of Counting, member {member}" in seen.__notes__
    (other,) = [note for note in seen.__notes__ if note.startswith("at the same time: ")]
    assert f"ConnectionError('no answer to {1 - member}')" in other
    assert f"in turn 1 of Counting, member {1 - member}; in group 0, task 'the task'" in other


async def test_I9_the_first_that_ended_is_seen_and_what_it_cancelled_is_a_consequence(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def late() -> None:
        try:
            await trio.sleep(9)
        finally:
            raise OSError("does not close")

    async def after(seconds: float, error: Exception) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(seconds)
        raise error

    async def together() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late)
            nursery.start_soon(after, 2, ValueError("second"))
            nursery.start_soon(after, 1, ValueError("first"))

    with pytest.raises(BaseExceptionGroup) as caught:
        await together()
    seen = the_one(caught.value)
    assert str(seen) == "first"
    assert seen.__notes__ == [
        "afterwards, while everything was closed: OSError('does not close')",
        "at the same time: ValueError('second')",
    ]


@dataclasses.dataclass
class Unhashable(Exception):
    """Compares by value, as dataclasses do."""

    number: int


def test_an_error_that_several_waited_for_is_one_and_many_are_counted() -> None:
    shared = Unhashable(0)
    assert the_one(BaseExceptionGroup("", [shared, BaseExceptionGroup("", [shared])])) is shared
    assert not hasattr(shared, "__notes__")
    the_one(BaseExceptionGroup("", [shared, *(Unhashable(n) for n in (0, *range(10)))]))
    assert shared.__notes__[0] == "at the same time: Unhashable(number=0), 2 times"
    assert shared.__notes__[-1] == "and 2 more errors"
    assert len(shared.__notes__) == 9


def placed(error: Exception, *notes: str) -> Exception:
    for note in notes:
        error.add_note(note)
    return error


def test_errors_that_say_the_same_are_one_line_with_their_number() -> None:
    group = BaseExceptionGroup("", [placed(TypeError("x"), f"member {m}", f"group {m}\nhere") for m in range(9)])
    seen = the_one(BaseExceptionGroup("", [group, OSError("y"), placed(OSError("z"), "member 9")]))
    assert seen.__notes__ == [
        "member 0",
        "group 0\nhere",
        "at the same time: TypeError('x'), 8 times (first member 1; group 1)",
        "at the same time: OSError('y')",
        "at the same time: OSError('z') (member 9)",
    ]


def test_many_that_say_the_same_do_not_hide_the_others() -> None:
    errors = [ValueError(n % 10) for n in range(50)]
    seen = the_one(BaseExceptionGroup("", errors))
    assert seen.__notes__[0] == "at the same time: ValueError(1), 5 times"
    assert seen.__notes__[-1] == "and 9 more errors"
    assert len(seen.__notes__) == 9


@pytest.mark.parametrize("wrap", ["step", "tool"])
async def test_what_awaits_asyncio_under_trio_is_told_what_to_do(wrap: str) -> None:
    async def sleeping() -> None:
        try:
            await asyncio.sleep(1)
        except RuntimeError as error:
            raise ToolFault(f"tool 'wait' failed: {error}") if wrap == "tool" else error from None

    def act(where: str, member: int) -> Any:
        return sleeping() if where == "step" and member == 1 else None

    seen = the_one(await raised_by([CountingBuilder([], act=act)]))
    assert "no running event loop" in str(seen)
    assert "asyncio_envs(factory)" in seen.__notes__[-1]
    assert "in turn 1 of Counting, member 1" in seen.__notes__


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt(), 130), (Terminated(), 143)])
def test_I9_an_interrupt_is_one_line_and_the_code_of_its_signal(
    interrupt: KeyboardInterrupt, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert the_one(BaseExceptionGroup("", [ValueError("afterwards"), interrupt])) is interrupt
    for words, said in (({}, "interrupted\n"), ({"interrupted": lambda: "it can go on"}, "it can go on\n")):
        with pytest.raises(SystemExit) as exit, one_line_errors(**words):
            raise interrupt
        assert exit.value.code == exit_code(interrupt) == code
        assert capsys.readouterr().err == said
