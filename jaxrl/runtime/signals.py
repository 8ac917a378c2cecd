"""How what is under way is asked to stop from outside: Ctrl-C and SIGTERM end a trio run in the same way.

Knows signals, and how trio takes them. It must not know what is run, nor what a command says about its end
(`failure.py`).
"""

import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from jaxrl.runtime.failure import Terminated, the_one

T = TypeVar("T")


def run_interruptible(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """`trio.run(function, *args)`, which Ctrl-C or SIGTERM ends at a checkpoint: all is cancelled, closed, waited for.

    A second SIGTERM kills at once. SIGTERM is left alone where it has a handler already, and outside the main thread.

    Errors: never a group, but the error that ended it (`failure.the_one`); KeyboardInterrupt after Ctrl-C, Terminated,
    which is one, after SIGTERM. RuntimeError where something in it called sys.exit, which would end all without a word.
    """
    try:
        return trio.run(_run, function, args, restrict_keyboard_interrupt_to_checkpoints=True)
    except BaseExceptionGroup as group:
        failure = the_one(group)
    if isinstance(failure, SystemExit):
        raise RuntimeError(f"something in the run asked the process to exit: {failure!r}") from failure
    raise failure  # here and not above, where the group would become its context


async def _run(function: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
    async with trio.open_nursery() as nursery:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            await nursery.start(_wait_for_sigterm)
        result = await function(*args)
        nursery.cancel_scope.cancel()
    return result


async def _wait_for_sigterm(task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as received:
        task_status.started()
        async for _ in received:
            raise Terminated
