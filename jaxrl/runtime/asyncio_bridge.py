"""Runs coroutines of asyncio-only libraries for trio tasks: one asyncio loop, in one thread, for as long as a block.

    async with open_asyncio() as bridge:
        answer = await bridge.run(client.fetch, "a question")

The thread starts at the first call and ends with the block. A cancelled call cancels its coroutine and waits for its
cleanup, but not for ever. `asyncio_envs` turns a factory of environments written for asyncio into an ordinary
EnvFactory; such environments find the bridge of the block they are in. Knows MessageEnv and nothing of rollouts.
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio

from jaxrl.env import EnvFactory, EnvironmentFault, MessageEnv, MessageStepResult
from jaxrl.types import Conclusion, Message, StopReason, Task, ToolSpec

Result = TypeVar("Result")

CLEANUP_SECONDS = 10.0
"""How long a cancelled coroutine may take to end: less than a rollout gives the close of an env, which awaits one."""

NO_BRIDGE = (
    "this environment was made by asyncio_envs, and no asyncio loop is open to run it: put the code that makes and "
    "steps it inside `async with open_asyncio():` (jaxrl.runtime.asyncio_bridge)"
)

_current: contextvars.ContextVar["Bridge"] = contextvars.ContextVar("asyncio_bridge")


# --- the bridge ----------------------------------------------------------------------------------


@asynccontextmanager
async def open_asyncio(*, cleanup_seconds: float = CLEANUP_SECONDS) -> AsyncIterator["Bridge"]:
    """A bridge for the tasks of this block, and for the tasks they start.

    Resources: one thread, from the first call to the end of the block. Leaving the block cancels every asyncio task
    that is left, those that libraries started too.
    Errors: TimeoutError when something resisted its cancellation, or blocks the thread; the error of a background task
    that failed while it was being cancelled. When the block itself failed, they are notes of its error.
    """
    bridge = Bridge(cleanup_seconds)
    token = _current.set(bridge)
    try:
        try:
            yield bridge
        except BaseException as error:
            for problem in await bridge._close():
                error.add_note(f"closing the asyncio bridge: {problem!r}")
            raise
        if problems := await bridge._close():
            for other in problems[1:]:
                problems[0].add_note(f"and also: {other!r}")
            raise problems[0]
    finally:
        _current.reset(token)


def current_bridge() -> "Bridge":
    """The bridge of the innermost `open_asyncio` block around this task. Raises RuntimeError where there is none."""
    bridge = _current.get(None)
    if bridge is None:
        raise RuntimeError(NO_BRIDGE)
    return bridge


@dataclass(eq=False)
class _Call:
    """One coroutine that a trio task waits for. `task` is written on the asyncio thread, before `done`."""

    function: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    done: trio.Event = field(default_factory=trio.Event)
    task: asyncio.Task[Any] | None = None

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


class Bridge:
    """Owns the asyncio loop and its thread. Made by `open_asyncio`."""

    def __init__(self, cleanup_seconds: float) -> None:
        if not cleanup_seconds > 0:
            raise ValueError(f"cleanup_seconds={cleanup_seconds}: expected a positive number of seconds")
        self._cleanup_seconds = cleanup_seconds
        self._trio = trio.lowlevel.current_trio_token()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._calls: set[_Call] = set()
        self._problems: list[Exception] = []
        self._closed = False
        self._ended = trio.Event()

    async def run(self, function: Callable[..., Awaitable[Result]], *args: Any) -> Result:
        """Await `function(*args)` on the asyncio loop; its result, or its error with the traceback from there.

        A cancelled caller cancels the coroutine once and waits for its end, for at most `cleanup_seconds`; an error
        that the coroutine raises meanwhile is raised. A coroutine that was cancelled by anyone else than its caller
        is an EnvironmentFault, since trio knows no such error.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        call = _Call(function, args)
        self._post(self._begin, call, contextvars.copy_context())
        self._calls.add(call)
        try:
            await call.done.wait()
        except BaseException:  # Cancelled, or Ctrl-C
            await self._withdraw(call)
            raise
        return _result(call)

    @property
    def started(self) -> bool:
        """Whether the thread was needed so far."""
        return self._thread is not None

    # --- on the trio thread ----------------------------------------------------------------------

    def _post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the asyncio thread, starting it if this is the first time."""
        if self._closed:
            raise RuntimeError("the asyncio bridge is closed: its `async with open_asyncio()` block has been left")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A daemon, so that a coroutine that blocks the thread cannot keep the process from ending.
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="asyncio bridge", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(function, *args)

    async def _withdraw(self, call: _Call) -> None:
        """Cancel a call and wait for its end, within bounds. Raises the error it ended with, if it has one."""
        if not self._closed:  # else it has been cancelled with all the others
            self._post(_cancel, call)
        with trio.move_on_after(self._cleanup_seconds, shield=True):
            await call.done.wait()
        if call.task is not None and call.task.done() and not call.task.cancelled() and call.task.exception():
            call.task.result()  # raises

    async def _close(self) -> Sequence[Exception]:
        """End every task and the thread; return what went wrong, first the worst."""
        if self._loop is None or self._thread is None:
            self._closed = True
            return ()
        self._post(self._wind_down)
        self._closed = True
        # Tasks get cleanup_seconds, asynchronous generators as much again, threads of the default executor the rest.
        with trio.move_on_after(3 * self._cleanup_seconds, shield=True) as scope:
            await self._ended.wait()
        for call in self._calls:  # their tasks resisted, and nobody is left to run them
            call.done.set()
        if scope.cancelled_caught:
            problem = TimeoutError(
                f"the asyncio thread did not end within {3 * self._cleanup_seconds:g} s: something blocks it. A "
                "coroutine must not call what blocks (time.sleep, requests): use asyncio.to_thread with a timeout"
            )
            return (problem, *self._problems)
        self._thread.join()  # it has nothing left to do
        return self._problems

    # --- on the asyncio thread -------------------------------------------------------------------

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while not self._ending(loop):
            pass
        loop.close()
        with suppress(trio.RunFinishedError):  # it was given up long ago
            self._trio.run_sync_soon(self._ended.set)

    def _ending(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Serve until the loop is stopped. A background task that wants to end the process does not end the loop."""
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            self._problems.append(EnvironmentFault(f"a background asyncio task raised {error!r}"))
            return False
        return True

    def _begin(self, call: _Call, context: contextvars.Context) -> None:
        assert self._loop is not None
        call.task = self._loop.create_task(_whole(call), name=call.name, context=context)
        call.task.add_done_callback(lambda _: self._finished(call))

    def _finished(self, call: _Call) -> None:
        def tell() -> None:
            self._calls.discard(call)
            call.done.set()

        with suppress(trio.RunFinishedError):
            self._trio.run_sync_soon(tell)

    def _wind_down(self) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._end_all(self._loop), name="asyncio bridge")
        task.add_done_callback(lambda _: asyncio.get_running_loop().stop())

    async def _end_all(self, loop: asyncio.AbstractEventLoop) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        awaited = {call.task for call in tuple(self._calls)}
        for task in tasks:
            task.cancel()
        if tasks:
            ended, _ = await asyncio.wait(tasks, timeout=self._cleanup_seconds)
            self._problems += _failures(ended - awaited)
        if resisting := sorted(t.get_name() for t in asyncio.all_tasks() - {asyncio.current_task()}):
            self._problems.insert(
                0,
                TimeoutError(
                    f"{resisting} did not end within {self._cleanup_seconds:g} s of being cancelled and "
                    "were abandoned: a coroutine may catch CancelledError to clean up, but must then raise it"
                ),
            )
        with suppress(TimeoutError):
            await asyncio.wait_for(loop.shutdown_asyncgens(), self._cleanup_seconds)
        await loop.shutdown_default_executor()


async def _whole(call: _Call) -> Any:
    """The call, starting on the loop, as a coroutine that asyncio can carry to its end whatever it raises."""
    try:
        said = call.function(*call.args)
        if not inspect.isawaitable(said):
            raise TypeError(f'{call.name} is not async: write "async def", or await asyncio.to_thread for what blocks')
        return await said
    except (SystemExit, KeyboardInterrupt) as error:  # asyncio would end the loop, and everybody's calls with it
        raise EnvironmentFault(f"{call.name} raised {error!r}: an environment must not end the process") from error


def _cancel(call: _Call) -> None:
    assert call.task is not None, "posted after _begin"
    call.task.cancel()


def _result(call: _Call) -> Any:
    if call.task is None or not call.task.done() or call.task.cancelled():
        raise EnvironmentFault(
            f"{call.name} was cancelled on the asyncio loop, not by who awaited it: it cancelled itself, or the "
            "`open_asyncio` block was left under it"
        )
    return call.task.result()


def _failures(tasks: set[asyncio.Task[Any]]) -> list[Exception]:
    """The errors of tasks nobody awaits."""
    errors = [task.exception() for task in tasks if not task.cancelled()]
    return [error for error in errors if isinstance(error, Exception)]


# --- environments --------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsyncioEnvs:
    """An EnvFactory over a factory of asyncio environments; the factory, async or not, runs on the loop."""

    factory: EnvFactory

    async def __call__(self, task: Task) -> "AsyncioMessageEnv":
        """A new environment, made on the current bridge. One that was made although nobody wants it is closed."""
        bridge = current_bridge()
        made: list[MessageEnv] = []
        try:
            await bridge.run(_make, self.factory, task, made)
        except BaseException:
            for env in made:
                with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                    await bridge.run(env.close)
            raise
        return AsyncioMessageEnv(made[0], bridge)


def asyncio_envs(factory: EnvFactory) -> AsyncioEnvs:
    """Environments whose methods await asyncio, made by `factory`, as environments that trio tasks can play.

    Picklable when `factory` is. Making one needs an `open_asyncio` block around it.
    """
    return AsyncioEnvs(factory)


class AsyncioMessageEnv(MessageEnv):
    """A MessageEnv whose coroutines run on a bridge. Its properties are read here, between two calls."""

    def __init__(self, env: MessageEnv, bridge: Bridge) -> None:
        self.env = env
        self._bridge = bridge

    async def reset(self, task: Task) -> Sequence[Message]:
        """The env's reset, on the loop."""
        return await self._bridge.run(self.env.reset, task)

    async def step(self, message: Message) -> MessageStepResult:
        """The env's step, on the loop."""
        return await self._bridge.run(self.env.step, message)

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """The env's last word, on the loop."""
        return await self._bridge.run(self.env.conclude, reason)

    @property
    def tool_specs(self) -> Sequence[ToolSpec]:
        """The env's tools."""
        return self.env.tool_specs

    @property
    def messages(self) -> Sequence[Message]:
        """The env's conversation."""
        return self.env.messages

    async def close(self) -> None:
        """The env's close, on the loop."""
        await self._bridge.run(self.env.close)


async def _make(factory: EnvFactory, task: Task, made: list[MessageEnv]) -> None:
    env = factory(task)
    made.append(await env if inspect.isawaitable(env) else env)
