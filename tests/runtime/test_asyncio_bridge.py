"""Coroutines of asyncio under trio: results, errors, cancellation that arrives, and no thread left behind."""

import asyncio
import contextvars
import gc
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
import trio
from chaos import threads

from jaxrl.env import EnvironmentFault, MessageEnv, MessageStepResult
from jaxrl.runtime.asyncio_bridge import AsyncioMessageEnv, Bridge, asyncio_envs, current_bridge, open_asyncio
from jaxrl.types import Message, Task

TASK = Task("count")


def started_since(before: set[threading.Thread]) -> list[str]:
    """Names of newer threads."""
    return [t.name for t in threads() - before]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threads()
    yield
    # asyncio before Python 3.12 reaps each child in a thread, which ends when the child has
    for thread in [t for t in threads() - before if t.name.startswith("asyncio-waitpid")]:
        thread.join(5)
    assert started_since(before) == []
    gc.collect()  # tasks that resisted complain when they are collected: here, not in the middle of a later test


async def add(a: int, b: int) -> int:
    await asyncio.sleep(0.001)
    return a + b


async def fail_deep() -> None:
    async def inner_of_the_library() -> None:
        await asyncio.sleep(0)
        raise LookupError("no such page")

    await inner_of_the_library()


# --- calls ---------------------------------------------------------------------------------------


async def test_a_result_comes_back() -> None:
    async with open_asyncio() as bridge:
        assert await bridge.run(add, 20, 22) == 42
        assert await bridge.run(add, 1, 1) == 2


async def test_the_thread_starts_at_the_first_call_and_ends_with_the_block() -> None:
    before = threads()
    async with open_asyncio() as bridge:
        await trio.lowlevel.checkpoint()
        assert not bridge.started
        assert started_since(before) == []
        await bridge.run(add, 1, 2)
        assert bridge.started
        assert started_since(before) == ["asyncio bridge"]
    assert started_since(before) == []


async def test_all_calls_share_one_loop_in_one_thread() -> None:
    async def where() -> tuple[int, int]:
        await asyncio.sleep(0.001)
        return threading.get_ident(), id(asyncio.get_running_loop())

    places = []

    async def ask() -> None:
        places.append(await bridge.run(where))

    async with open_asyncio() as bridge, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
    assert len(places) == 5
    assert len(set(places)) == 1
    assert places[0][0] != threading.get_ident()


async def test_an_error_keeps_its_type_and_the_traceback_of_where_it_was_raised() -> None:
    async with open_asyncio() as bridge:
        with pytest.raises(LookupError, match="no such page") as caught:
            await bridge.run(fail_deep)
        assert "inner_of_the_library" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert await bridge.run(add, 1, 2) == 3, "the loop goes on"


async def test_a_hundred_awaits_at_once_take_the_time_of_one() -> None:
    async def nap(i: int) -> int:
        await asyncio.sleep(0.2)
        return i

    results: list[int] = []

    async def one(i: int) -> None:
        results.append(await bridge.run(nap, i))

    began = time.perf_counter()
    async with open_asyncio() as bridge, trio.open_nursery() as nursery:
        for i in range(100):
            nursery.start_soon(one, i)
    assert sorted(results) == list(range(100))
    assert time.perf_counter() - began < 10, "one after the other they would take 20 s"


async def test_two_calls_talk_through_an_asyncio_queue() -> None:
    async def make() -> asyncio.Queue[int]:
        return asyncio.Queue(maxsize=1)

    async def produce(queue: asyncio.Queue[int]) -> None:
        for i in range(5):
            await queue.put(i)

    async def consume(queue: asyncio.Queue[int]) -> None:
        got.extend([await queue.get() for _ in range(5)])

    got: list[int] = []
    async with open_asyncio() as bridge:
        queue = await bridge.run(make)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bridge.run, consume, queue)
            nursery.start_soon(bridge.run, produce, queue)
    assert got == [0, 1, 2, 3, 4]


async def test_an_asyncio_subprocess_works() -> None:
    async def child() -> tuple[bytes, int | None]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print(6 * 7)", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        return out, process.returncode

    async with open_asyncio() as bridge:
        assert await bridge.run(child) == (b"42\n", 0)


async def test_context_variables_of_the_caller_are_seen() -> None:
    variable = contextvars.ContextVar("variable", default="none")

    async def read() -> str:
        return variable.get()

    async with open_asyncio() as bridge:
        variable.set("the caller's")
        assert await bridge.run(read) == "the caller's"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_a_coroutine_that_ends_the_process_ends_only_its_call(error: BaseException) -> None:
    async def leave() -> None:
        raise error

    async with open_asyncio() as bridge:
        with pytest.raises(EnvironmentFault, match=r"leave raised .*must not end the process"):
            await bridge.run(leave)
        assert await bridge.run(add, 1, 2) == 3


async def test_a_function_that_is_not_async_is_named() -> None:
    def plain() -> int:
        return 3

    async with open_asyncio() as bridge:
        with pytest.raises(TypeError, match=r'plain is not async: write "async def"'):
            await bridge.run(plain)  # pyright: ignore[reportArgumentType]


async def test_a_background_task_that_ends_the_process_hangs_nobody() -> None:
    async def background() -> None:
        raise SystemExit(3)

    async def start() -> None:
        await asyncio.wait([asyncio.create_task(background())])

    async def block() -> None:
        async with open_asyncio() as bridge:
            await bridge.run(start)
            assert await bridge.run(add, 1, 2) == 3

    with pytest.raises(EnvironmentFault, match=r"background asyncio task raised SystemExit\(3\)"):
        await block()


async def test_a_call_after_the_block_says_so() -> None:
    async with open_asyncio() as bridge:
        await bridge.run(add, 1, 2)
    with pytest.raises(RuntimeError, match="bridge is closed"):
        await bridge.run(add, 1, 2)


def test_a_useless_bound_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="cleanup_seconds=0: expected a positive"):
            async with open_asyncio(cleanup_seconds=0):
                pass

    trio.run(main)


# --- cancellation --------------------------------------------------------------------------------


async def test_cancellation_reaches_the_coroutine_and_waits_for_its_cleanup() -> None:
    happened: list[str] = []

    async def patient() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            happened.append("cancelled")
            await asyncio.sleep(0.05)
            happened.append("cleaned up")
            raise

    async with open_asyncio() as bridge:
        with trio.move_on_after(0.05) as scope:
            await bridge.run(patient)
        assert scope.cancelled_caught
        assert happened == ["cancelled", "cleaned up"]
        assert await bridge.run(add, 1, 2) == 3


async def test_a_cancelled_caller_starts_nothing() -> None:
    started = []

    async def start() -> None:
        started.append(1)

    async with open_asyncio() as bridge:
        with trio.CancelScope() as scope:
            scope.cancel()
            await bridge.run(start)
        assert scope.cancelled_caught
        assert not bridge.started
    assert started == []


async def test_an_error_of_the_cleanup_is_what_the_caller_sees() -> None:
    async def clumsy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("could not say goodbye")

    async with open_asyncio() as bridge:
        with pytest.raises(OSError, match="say goodbye") as caught, trio.move_on_after(0.05):
            await bridge.run(clumsy)
        assert isinstance(caught.value.__context__, trio.Cancelled | asyncio.CancelledError)


async def resist() -> None:
    """Give up at the third cancellation only (with two, one of the call and one of the block's end, it stays)."""
    for _ in range(3):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


async def test_a_coroutine_that_resists_is_given_up_and_named_at_the_end() -> None:
    async def block() -> None:
        async with open_asyncio(cleanup_seconds=0.1) as bridge:
            with trio.move_on_after(0.05) as scope:
                await bridge.run(resist)
            assert scope.cancelled_caught
            assert await bridge.run(add, 1, 2) == 3

    began = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"\['resist'\] did not end within 0\.1"):
        await block()
    assert time.perf_counter() - began < 5


async def test_a_coroutine_that_swallows_its_cancellation_still_leaves_its_caller_cancelled() -> None:
    async def stubborn() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "done anyway"

    returned = []
    async with open_asyncio() as bridge:
        with trio.move_on_after(0.05) as scope:
            returned.append(await bridge.run(stubborn))
        assert scope.cancelled_caught
    assert returned == []


async def test_a_coroutine_that_blocks_the_thread_is_reported() -> None:
    release = threading.Event()

    async def hog() -> None:
        release.wait(20)

    async def block() -> None:
        async with open_asyncio(cleanup_seconds=0.1) as bridge:
            with trio.move_on_after(0.05) as scope:
                await bridge.run(hog)
            assert scope.cancelled_caught

    try:
        with pytest.raises(TimeoutError, match=r"asyncio thread did not end within 0\.3 s: something blocks it"):
            await block()
        (thread,) = [t for t in threading.enumerate() if t.name == "asyncio bridge"]
        assert thread.daemon, "it must not keep the process from ending"
    finally:
        release.set()
    thread.join(5)


async def test_leaving_the_block_cancels_what_is_left() -> None:
    happened: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            happened.append("background ended")

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        return task

    async with open_asyncio() as bridge:
        task = await bridge.run(start)
        assert not task.done()
    assert task.cancelled()
    assert happened == ["background ended"]


async def test_leaving_the_block_reports_a_background_task_that_fails_at_it() -> None:
    async def background() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("disk full")

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        return task

    async def block(error: Exception | None) -> None:
        async with open_asyncio() as bridge:
            _task = await bridge.run(start)
            if error:
                raise error

    with pytest.raises(OSError, match="disk full"):
        await block(None)
    with pytest.raises(ValueError, match="the block's own") as caught:
        await block(ValueError("the block's own"))
    assert "disk full" in "".join(caught.value.__notes__)


async def test_who_still_waits_when_the_block_is_left_is_woken_with_an_error() -> None:
    async def wait(bridge: Bridge) -> None:
        with pytest.raises(EnvironmentFault, match="sleep was cancelled on the asyncio loop"):
            await bridge.run(asyncio.sleep, 60)

    async with trio.open_nursery() as nursery, open_asyncio() as bridge:
        nursery.start_soon(wait, bridge)
        await trio.sleep(0.05)


async def test_who_waits_for_a_coroutine_that_resists_is_woken_too() -> None:
    async def wait(bridge: Bridge) -> None:
        with pytest.raises(EnvironmentFault, match="resist was cancelled on the asyncio loop"):
            await bridge.run(resist)

    async def block(nursery: trio.Nursery) -> None:
        async with open_asyncio(cleanup_seconds=0.1) as bridge:
            nursery.start_soon(wait, bridge)
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        with pytest.raises(TimeoutError, match="resist"):
            await block(nursery)


async def test_threads_of_the_default_executor_end_with_the_block() -> None:
    async def in_thread() -> int:
        return await asyncio.to_thread(threading.get_ident)

    before = threads()
    async with open_asyncio() as bridge:
        assert await bridge.run(in_thread) != threading.get_ident()
    assert started_since(before) == []


# --- environments --------------------------------------------------------------------------------


class Counter(MessageEnv):
    """Replies through a worker task and a queue of its own loop, which is why it cannot run without asyncio."""

    def __init__(self, task: Task) -> None:
        self.loop = asyncio.get_running_loop()
        self.questions: asyncio.Queue[str] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self.worker = asyncio.create_task(self._work())
        self.closed = 0
        self._messages: list[Message] = [Message("user", task.prompt)]

    async def _work(self) -> None:
        while True:
            await self.answers.put(f"{len(await self.questions.get())} letters")

    async def reset(self, task: Task) -> Sequence[Message]:
        assert asyncio.get_running_loop() is self.loop
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        if message.content == "boom":
            raise LookupError("the library's own error")
        await self.questions.put(message.content)
        reply = Message("user", await self.answers.get())
        self._messages += [message, reply]
        return MessageStepResult(messages=[reply], reward=1.0)

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    async def close(self) -> None:
        self.closed += 1
        self.worker.cancel()
        await asyncio.wait([self.worker])


async def make_counter(task: Task) -> MessageEnv:
    await asyncio.sleep(0)
    return Counter(task)


@pytest.mark.parametrize("factory", [Counter, make_counter])
async def test_an_asyncio_env_plays_under_trio(factory) -> None:
    envs = pickle.loads(pickle.dumps(asyncio_envs(factory)))
    async with open_asyncio():
        env = await envs(TASK)
        assert isinstance(env, AsyncioMessageEnv)
        assert await env.reset(TASK) == (Message("user", "count"),)
        result = await env.step(Message("assistant", "three"))
        assert (result.reward, result.messages) == (1.0, [Message("user", "5 letters")])
        assert env.messages[-1] == Message("user", "5 letters")
        assert env.tool_specs == ()
        with pytest.raises(LookupError, match="library's own"):
            await env.step(Message("assistant", "boom"))
        await env.close()
        assert isinstance(env.env, Counter)
        assert env.env.closed == 1
        assert env.env.worker.cancelled()


async def test_the_bridge_is_found_by_tasks_started_inside_the_block() -> None:
    answers = []

    async def episode(word: str) -> None:
        env = await asyncio_envs(Counter)(TASK)
        answers.append((await env.step(Message("assistant", word))).messages[0].content)
        await env.close()

    async with open_asyncio(), trio.open_nursery() as nursery:
        for word in ("a", "bb", "ccc"):
            nursery.start_soon(episode, word)
    assert sorted(answers) == ["1 letters", "2 letters", "3 letters"]


async def test_without_a_bridge_the_error_says_what_to_open() -> None:
    with pytest.raises(RuntimeError, match=r"inside `async with open_asyncio\(\):`"):
        await asyncio_envs(Counter)(TASK)
    async with open_asyncio() as outer:
        async with open_asyncio() as inner:
            assert current_bridge() is inner
        assert current_bridge() is outer
    with pytest.raises(RuntimeError, match="no asyncio loop is open"):
        current_bridge()


async def test_an_env_made_for_a_cancelled_caller_is_closed() -> None:
    made = []

    async def slow(task: Task) -> MessageEnv:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            made.append(Counter(task))
        return made[0]

    async with open_asyncio():
        with trio.move_on_after(0.05) as scope:
            await asyncio_envs(slow)(TASK)
        assert scope.cancelled_caught
        assert [env.closed for env in made] == [1]


async def test_the_error_of_a_factory_is_the_callers() -> None:
    async def broken(task: Task) -> MessageEnv:
        raise LookupError(f"no environment for {task.prompt!r}")

    async with open_asyncio():
        with pytest.raises(LookupError, match="no environment for 'count'"):
            await asyncio_envs(broken)(TASK)
