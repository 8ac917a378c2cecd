"""Groups in an executor: environments run in other threads, processes or machines, sampling stays here.

    async with open_executor(ProcessPoolExecutor(8, get_context("spawn")), engine) as run_group:
        group = await run_group(builder, plan, group=3)

A group travels pickled, is played there by `jaxrl.runtime.rollout.run_group` against an endpoint of this process, and
comes back as the same TrajectoryGroup that it would have been here. Its error comes back as itself. A worker that dies
is an error here at once; a group that is cancelled here stops there, cleans up, and is waited for. Each group is played
at most once, even by executors that repeat what failed.

Knows executors, endpoints and groups. Runs in workers, so it must not import the engine, nor anything of JAX. The
executor belongs to whoever made it: it is not shut down here.
"""

import contextlib
import os
import pickle
import socket
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from jaxrl.env import EnvGroupBuilder
from jaxrl.runtime.asyncio_bridge import open_asyncio
from jaxrl.runtime.endpoint import Endpoint, Tie, open_endpoint
from jaxrl.runtime.remote import RemoteSampler
from jaxrl.runtime.rollout import CLEANUP_SECONDS, PlayGroup, RolloutPlan, run_group
from jaxrl.runtime.sampler import Sampler
from jaxrl.runtime.wire import Address, Connection, ConnectionLost, connect
from jaxrl.types import TrajectoryGroup

STOP_SECONDS = 2 * CLEANUP_SECONDS + 5
"""How long a cancelled group may take to close its envs, clean up and say so, before it is given up."""

_EXECUTOR_SECONDS = 0.5  # what an executor has to say of a worker that has ended or gone, it says within this time


class WorkerLost(RuntimeError):
    """The process that played a group is gone, and its executor has not said so.

    Not every executor does: Dask starts the job again elsewhere, and a ProcessPoolExecutor does not watch a worker that
    it started while it was waiting for another.
    """


class WorkerError(RuntimeError):
    """An error of a worker whose own class does not survive pickling."""


class Unpicklable(TypeError):
    """Something that has to travel and cannot."""


@asynccontextmanager
async def open_executor(
    executor: Executor, sampler: Sampler, *, host: str = "127.0.0.1", advertised: str | None = None
) -> AsyncIterator[PlayGroup]:
    """Let groups run in `executor` for the length of the block, sampling from `sampler` through an endpoint.

    host, advertised: where the endpoint listens and how workers reach it; the defaults serve this machine only.
    """
    refuse_fork(executor)
    async with open_endpoint(sampler, host=host, advertised=advertised) as endpoint:
        yield partial(run_group_in, executor, endpoint)


async def run_group_in(
    executor: Executor, endpoint: Endpoint, builder: EnvGroupBuilder, plan: RolloutPlan, *, group: int
) -> TrajectoryGroup:
    """All episodes of one group, played in a worker of `executor`."""
    try:
        async with endpoint.tie() as tie:
            job = pack_job(endpoint.address, tie.name, builder, plan, group)
            answer = await _answered(executor.submit(play_group, job), tie)
    except Exception as error:
        error.add_note(f"in group {group}, task {builder.describe()!r}, played by {type(executor).__name__}")
        raise
    if answer.failure is not None:
        raise answer.failure.error()
    assert answer.group is not None
    return answer.group


def refuse_fork(executor: Executor) -> None:
    """Raise if `executor` forks this process, whose threads and accelerator no forked copy can use."""
    context = getattr(executor, "_mp_context", None)
    if isinstance(executor, ProcessPoolExecutor) and context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "rollout_executor forks this process, and a fork of a process that runs JAX and threads deadlocks; "
            'give it mp_context=multiprocessing.get_context("spawn")'
        )


async def _answered(future: Future, tie: Tie) -> "Answer":
    """What the worker answers, however it ends; a cancelled worker has ended when this has."""
    ended = trio.Event()
    future.add_done_callback(partial(_wake, trio.lowlevel.current_trio_token(), ended))
    try:
        await _ended_or_lost(ended, tie)
    except BaseException:
        future.cancel()
        await tie.let_go(STOP_SECONDS)
        with trio.move_on_after(_EXECUTOR_SECONDS if tie.followed else 0, shield=True):
            await ended.wait()
        raise
    answer = loads(future.result()) if future.done() else None
    if answer is None or tie.lost:  # who answers although it was lost is the executor's second attempt
        future.cancel()
        raise WorkerLost("the worker has gone without an answer: a crash, a kill or a lost machine")
    return answer


async def _ended_or_lost(ended: trio.Event, tie: Tie) -> None:
    async def watch(scope: trio.CancelScope) -> None:
        await tie.gone.wait()
        if tie.lost:
            await trio.sleep(_EXECUTOR_SECONDS)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, nursery.cancel_scope)
        await ended.wait()
        nursery.cancel_scope.cancel()


def _wake(token: trio.lowlevel.TrioToken, ended: trio.Event, _: Future) -> None:
    with contextlib.suppress(trio.RunFinishedError):  # the run went on without it
        token.run_sync_soon(ended.set)


# --- in the worker -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """An error on its way home: itself if it can be pickled, what it says in any case."""

    pickled: bytes | None
    summary: str
    trace: str

    def error(self) -> Exception:
        """The error to raise here, with the worker's traceback as a note."""
        try:
            error = WorkerError(self.summary) if self.pickled is None else loads(self.pickled)
        except Unpicklable:
            error = WorkerError(self.summary)
        error.add_note(self.trace)
        return error


@dataclass(frozen=True)
class Answer:
    """What comes back of a job."""

    group: TrajectoryGroup | None = None
    failure: Failure | None = None


class _Failed(Exception):
    """Carries a Failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


def play_group(job: bytes) -> bytes:
    """Play a pickled group and return a pickled Answer: the function that an executor runs."""
    try:
        return _played(job)
    except _Failed as failed:
        return pickle.dumps(Answer(failure=failed.failure))


def _played(job: bytes) -> bytes:
    try:
        return dumps(trio.run(_play, *loads(job)))
    except Exception as error:
        raise _Failed(_failure(error)) from error


async def _play(address: Address, tie: str, builder: EnvGroupBuilder, plan: RolloutPlan, group: int) -> Answer:
    """Play a group for as long as the other side wants it."""
    async with connect(address) as connection, open_asyncio():
        await connection.exchange({"follow": tie})
        answer = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_when_told, connection, nursery.cancel_scope)
            answer = await _answer(RemoteSampler(address), builder, plan, group)
            nursery.cancel_scope.cancel()
        if answer is None:
            raise connection.lost("called the group off")
        await connection.send({"finished": True})
    return answer


async def _stop_when_told(connection: Connection, scope: trio.CancelScope) -> None:
    """The endpoint has nothing to say on this connection but its end."""
    with contextlib.suppress(ConnectionLost):
        await connection.receive()
    scope.cancel()


async def _answer(sampler: Sampler, builder: EnvGroupBuilder, plan: RolloutPlan, group: int) -> Answer:
    try:
        return await _tried(sampler, builder, plan, group)
    except _Failed as failed:
        return Answer(failure=failed.failure)


async def _tried(sampler: Sampler, builder: EnvGroupBuilder, plan: RolloutPlan, group: int) -> Answer:
    try:
        return Answer(group=await run_group(sampler, builder, plan, group=group))
    except Exception as error:
        raise _Failed(_failure(error)) from error


def _failure(error: Exception) -> Failure:
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickled = dumps(error)
        loads(pickled)
    except Unpicklable:
        pickled = None
    return Failure(
        pickled, f"{type(error).__name__}: {error}", f"in worker {os.getpid()} on {socket.gethostname()}:\n{trace}"
    )


# --- what travels ------------------------------------------------------------------------------------


def pack_job(address: Address, tie: str, builder: EnvGroupBuilder, plan: RolloutPlan, group: int) -> bytes:
    """What `play_group` takes. A builder that cannot travel is refused with the attribute that keeps it."""
    try:
        return dumps((address, tie, builder, plan, group))
    except Unpicklable as error:
        reason = f"{type(builder).__name__} cannot be sent to the rollout executor: {error}"
        kept = [
            f"{name}={value!r:.80}" for name, value in getattr(builder, "__dict__", {}).items() if not _travels(value)
        ]
        if kept:
            reason += f"; what keeps it here is {' and '.join(kept)}"
        raise Unpicklable(
            f"{reason}. Use classes and functions of a module, no lambda, closure or open handle"
        ) from error


def _travels(value: Any) -> bool:
    try:
        dumps(value)
    except Unpicklable:
        return False
    return True


def dumps(value: Any) -> bytes:
    """Pickle, with one error for the many that pickling raises."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise Unpicklable(f"{type(error).__name__}: {error}") from error


def loads(data: bytes) -> Any:
    """Unpickle what came through the executor, with one error for the many that unpickling raises."""
    try:
        return pickle.loads(data)
    except Exception as error:
        advice = f". {_DEFINE}" if isinstance(error, AttributeError | ImportError) else ""
        raise Unpicklable(f"{type(error).__name__}: {error}{advice}") from error


_DEFINE = (
    "Define it at the top level of a module that workers can import; what a script defines in a function or under "
    '`if __name__ == "__main__":` does not exist there'
)
