"""A sampler that other processes can reach: a listening socket for as long as a block, one session a connection.

    async with open_endpoint(engine) as endpoint:
        ...  # `jaxrl.runtime.remote.RemoteSampler(endpoint.address)`, in any process, is a Sampler

A connection first shows the token, then asks for one thing: to lease a session, or to follow a tie. A session lives as
long as its connection: a client that leaves, dies, or says something it should not frees it at that moment. Traffic is
not encrypted; across machines use a network you trust, or a tunnel.

A tie joins a job in another process to a scope in this one, both ways: leaving the scope tells the job to stop, and
the death of the job's process is seen here, whatever carried the job there and whether or not it notices.

Knows the sampler's protocol and frames. Knows no env, no group and no executor.
"""

import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from jaxrl.runtime.sampler import Sampler, Session
from jaxrl.runtime.wire import CONNECT_SECONDS, Address, Connection, ConnectionLost, pack_error, unpack_key

_HELLO_BYTES = 1024  # of a stranger no more is read


@dataclass(eq=False)
class Tie:
    """One job's tie; `name` is what its process presents. Made by `Endpoint.tie`."""

    name: str
    followed: bool = False
    lost: bool = False  # the job's end of the connection closed before it said that it had finished
    gone: trio.Event = field(default_factory=trio.Event)  # the connection has ended, whoever ended it
    stop: trio.Event = field(default_factory=trio.Event)

    async def let_go(self, seconds: float) -> None:
        """Tell the job to stop and wait until it has, although the task is being cancelled, but not for ever."""
        self.stop.set()
        if not self.followed:
            return  # whoever comes now is refused
        with trio.move_on_after(seconds, shield=True) as scope:
            await self.gone.wait()
        if scope.cancelled_caught:
            raise TimeoutError(f"the job did not stop within {seconds:g} s and was given up")


class Endpoint:
    """What listens. Open one with `open_endpoint`."""

    def __init__(self, sampler: Sampler, address: Address) -> None:
        self.address = address
        self._sampler = sampler
        self._ties: dict[str, Tie] = {}

    @asynccontextmanager
    async def tie(self) -> AsyncIterator[Tie]:
        """A tie that one job may follow, once; leaving the block tells it to stop."""
        tie = Tie(secrets.token_hex(16))
        self._ties[tie.name] = tie
        try:
            yield tie
        finally:
            del self._ties[tie.name]
            tie.stop.set()

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection from its first byte to its last. A client's fault ends it and nothing else."""
        connection = Connection(stream, "a client")
        try:
            if await self._let_in(connection):
                await self._answer(connection)
        except* ConnectionLost:
            pass  # nobody is left to tell
        finally:
            await connection.close()

    async def _let_in(self, connection: Connection) -> bool:
        with trio.move_on_after(CONNECT_SECONDS):
            hello = await connection.receive(limit=_HELLO_BYTES)
            if hello is None:
                return False
            right = hmac.compare_digest(str(hello.get("token")).encode(errors="replace"), self.address.token.encode())
            await connection.send({"welcome": True} if right else {"refused": "the token is not this endpoint's"})
            return right
        return False

    async def _answer(self, connection: Connection) -> None:
        request = await connection.receive()
        if request is None:
            return
        if "lease" in request:
            await self._lease(connection, request["lease"])
        elif "follow" in request:
            await self._follow(connection, request["follow"])
        else:
            raise connection.lost(f"asked for {list(request)!r:.80}")

    # --- sessions --------------------------------------------------------------------------------

    async def _lease(self, connection: Connection, lease: Any) -> None:
        options = _well_formed(connection, _lease_options, lease)
        deliver, requests = trio.open_memory_channel[dict[str, Any]](1)
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            nursery.start_soon(_listen, connection, deliver, nursery.cancel_scope)
            try:
                session = await _reported(lambda: stack.enter_async_context(self._sampler.session(**options)))
            except _Refused as refused:
                await connection.send({"error": refused.error})
                nursery.cancel_scope.cancel()
                return
            await connection.send({"capacity": session.capacity})
            async for request in requests:
                turn = _well_formed(connection, _sample_options, request)
                await connection.send(await _sampled(session, request.get("rewind"), turn))

    # --- ties ------------------------------------------------------------------------------------

    async def _follow(self, connection: Connection, name: Any) -> None:
        tie = self._ties.get(name) if isinstance(name, str) else None
        if tie is None or tie.followed:
            await connection.send({"refused": "it has been cancelled, or is being run a second time"})
            return
        tie.followed = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_watch, connection, tie, nursery.cancel_scope)
                await connection.send({"following": True})
                await tie.stop.wait()
                await connection.finish()
                await trio.sleep_forever()  # until the job has ended, which `_watch` sees
        finally:
            tie.gone.set()


def check_listening(host: str, advertised: str | None) -> None:
    """Raise ValueError where clients could not be told how to reach `host`."""
    if host in ("", "0.0.0.0", "::") and advertised is None:
        raise ValueError(f"host={host!r} listens on every interface and names none: say how clients reach this machine")


@asynccontextmanager
async def open_endpoint(
    sampler: Sampler, *, host: str = "127.0.0.1", advertised: str | None = None
) -> AsyncIterator[Endpoint]:
    """Listen on a free port of `host` for the length of the block.

    advertised: the name under which clients reach this machine, where that is not `host`.
    """
    check_listening(host, advertised)
    listener, *others = await trio.open_tcp_listeners(0, host=host)
    for other in others:  # a name may stand for several addresses; clients are told of one
        await other.aclose()
    port = listener.socket.getsockname()[1]
    endpoint = Endpoint(sampler, Address(advertised or host, port, secrets.token_hex(32)))
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, endpoint.serve, [listener])
        yield endpoint
        nursery.cancel_scope.cancel()


async def _listen(
    connection: Connection, deliver: trio.MemorySendChannel[dict[str, Any]], scope: trio.CancelScope
) -> None:
    """Pass requests on; end the session when its client leaves, breaks off, or asks before it has been answered."""
    try:
        while (request := await connection.receive()) is not None:
            deliver.send_nowait(request)
    except (ConnectionLost, trio.WouldBlock):
        pass
    scope.cancel()


async def _watch(connection: Connection, tie: Tie, scope: trio.CancelScope) -> None:
    """Note whether a job says that it has finished before its connection ends."""
    finished = False
    try:
        while (said := await connection.receive()) is not None:
            finished = finished or "finished" in said
    except ConnectionLost:
        pass
    tie.lost = not finished
    scope.cancel()


# --- what a client asks for, checked ------------------------------------------------------------------


def _well_formed(connection: Connection, read: Callable[[Any], dict[str, Any]], sent: Any) -> dict[str, Any]:
    try:
        return read(sent)
    except (KeyError, TypeError, AttributeError) as error:
        raise connection.lost(f"sent a request that cannot be read: {error!r}") from error


def _lease_options(sent: Mapping[str, Any]) -> dict[str, Any]:
    policy = {"policy": _typed(sent["policy"], str)} if "policy" in sent else {}
    return {"group": unpack_key(sent["group"]), "seed": _typed(sent["seed"], int), **policy}


def _sample_options(sent: Mapping[str, Any]) -> dict[str, Any]:
    _typed(sent.get("rewind", 0), int)
    stop = sent["stop"]
    kind = str if stop and isinstance(stop[0], str) else int
    return {
        "new_tokens": [_typed(t, int) for t in sent["new"]],
        "stop": tuple(_typed(s, kind) for s in stop),
        "max_tokens": _typed(sent["max_tokens"], int),
        "temperature": float(_typed(sent["temperature"], (int, float))),
    }


def _typed(value: Any, kind: type | tuple[type, ...]) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{value!r:.80} is no {kind}")
    return value


# --- what the sampler answers ------------------------------------------------------------------------


class _Refused(Exception):
    """The sampler raised an error; `error` is how it travels."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error)
        self.error = error


async def _sampled(session: Session, rewind: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """The frame that answers a request, a turn or an error. `held`: tokens in the context now."""
    try:
        answer = await _reported(lambda: _turn(session, rewind, **options))
    except _Refused as refused:
        answer = {"error": refused.error}
    return {**answer, "held": len(session.tokens)}


async def _turn(session: Session, rewind: int | None, new_tokens: list[int], **options: Any) -> dict[str, Any]:
    if rewind is not None:
        session.rewind(rewind)
    sample = await session.sample(new_tokens, **options)
    return {
        "tokens": [int(t) for t in sample.tokens],
        "logprobs": [float(x) for x in sample.logprobs],
        "versions": [int(v) for v in sample.versions],
        "stop": sample.stop,
    }


async def _reported(call: Callable[[], Awaitable[Any]]) -> Any:
    """Whatever error a sampler raises is its client's to see."""
    try:
        return await call()
    except Exception as error:
        raise _Refused(pack_error(error)) from error
