"""What an endpoint and its clients say to each other: frames of JSON on a stream, and errors as frames.

A frame is four bytes of length, then that many bytes of UTF-8, one JSON object. Nothing that comes from the network is
unpickled. A frame is received whole or not at all: a stream that ends inside one, or carries anything else, is
`ConnectionLost`. Knows streams, frames and which errors keep their class; knows no session and no group.
"""

import json
import socket
import struct
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from jaxrl.runtime.sampler import ContextFull, SamplerLost

MAX_FRAME = 64 * 2**20
"""Bytes of the largest frame: several million tokens."""

CONNECT_SECONDS = 10.0
"""How long connecting, and being let in, may take."""

_HEAD = struct.Struct(">I")
_KEY_DEPTH = 8  # tuples in tuples that a group key may have

_KNOWN = {
    c.__name__: c for c in (ContextFull, ValueError, TypeError, LookupError, AssertionError, TimeoutError, RuntimeError)
}
"""Errors that have the same class on both sides; a subclass of one arrives as it, with its own name in the text."""


class ConnectionLost(SamplerLost):
    """The other side is gone, or says what no frame is. What was being asked has no answer."""


@dataclass(frozen=True)
class Address:
    """Where an endpoint listens, and the secret that it wants to hear first."""

    host: str
    port: int
    token: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Connection:
    """Frames over a stream. `peer` is what errors call the other side."""

    def __init__(self, stream: trio.SocketStream, peer: str) -> None:
        self._stream = stream
        self._peer = peer
        self._buffer = bytearray()
        _notice_silence(stream)

    async def send(self, frame: Mapping[str, Any]) -> None:
        """Send one frame whole."""
        data = pack(frame)
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self.lost("is gone") from error

    async def receive(self, *, limit: int = MAX_FRAME) -> dict[str, Any] | None:
        """The next frame, or None when the other side has finished."""
        head = await self._exactly(_HEAD.size)
        if head is None:
            return None
        (length,) = _HEAD.unpack(head)
        if length > limit:
            raise self.lost(f"announced a frame of {length} bytes, more than the {limit} that are allowed")
        body = await self._exactly(length)
        if body is None:
            raise self.lost("left in the middle of a frame")
        return self._object(body)

    async def exchange(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        """Send a frame and receive its answer."""
        await self.send(frame)
        answer = await self.receive()
        if answer is None:
            raise self.lost("closed the connection instead of answering")
        if "refused" in answer:
            raise self.lost(f"refused: {answer['refused']}")
        return answer

    async def ask(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        """The same, with an answer that is an error raised as what it was."""
        answer = await self.exchange(frame)
        if "error" in answer:
            raise self.error(answer)
        return answer

    async def finish(self) -> None:
        """Say that nothing more will be sent; the other side reads on to the end of it."""
        try:
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise self.lost("is gone") from error

    async def close(self) -> None:
        """Close at once, also when the task is being cancelled."""
        with trio.CancelScope(shield=True):  # closing a socket waits for nobody
            await self._stream.aclose()

    def lost(self, what: str) -> ConnectionLost:
        """The error that says what `peer` did."""
        return ConnectionLost(f"{self._peer} {what}")

    def error(self, answer: Mapping[str, Any]) -> Exception:
        """The error that an answer carries."""
        try:
            return unpack_error(answer["error"])
        except (KeyError, TypeError, IndexError) as error:
            raise self.lost(f"sent an error that cannot be read: {answer!r:.80}") from error

    async def _exactly(self, count: int) -> bytes | None:
        """`count` bytes; None when the stream ends before the first of them."""
        while len(self._buffer) < count:
            try:
                data = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise self.lost("is gone") from error
            if not data and self._buffer:
                raise self.lost("left in the middle of a frame")
            if not data:
                return None
            self._buffer += data
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _object(self, body: bytes) -> dict[str, Any]:
        try:
            frame = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise self.lost(f"sent something that is not JSON: {body[:40]!r}") from error
        if not isinstance(frame, dict):
            raise self.lost(f"sent something that is not an object: {body[:40]!r}")
        return frame


@asynccontextmanager
async def connect(address: Address) -> AsyncIterator[Connection]:
    """A connection to an endpoint, let in by the token; closed when the block is left."""
    where = f"the sampling endpoint at {address}"
    with trio.move_on_after(CONNECT_SECONDS) as scope:
        try:
            stream = await trio.open_tcp_stream(address.host, address.port)
        except OSError as error:
            raise ConnectionLost(f"{where} cannot be reached: {error}") from error
    if scope.cancelled_caught:
        raise ConnectionLost(f"{where} cannot be reached: no answer in {CONNECT_SECONDS:g} s")
    connection = Connection(stream, where)
    try:
        with trio.move_on_after(CONNECT_SECONDS) as scope:
            await connection.exchange({"token": address.token})
        if scope.cancelled_caught:
            raise connection.lost(f"did not answer in {CONNECT_SECONDS:g} s")
        yield connection
    finally:
        await connection.close()


def pack(frame: Mapping[str, Any]) -> bytes:
    """A frame as bytes."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes is above the limit of {MAX_FRAME}; give fewer tokens at a time")
    return _HEAD.pack(len(body)) + body


def pack_error(error: Exception) -> dict[str, Any]:
    """An error for a frame: the names of its classes, nearest first, its text, its notes."""
    names = [c.__name__ for c in type(error).__mro__]
    return {"types": names, "text": str(error), "notes": list(getattr(error, "__notes__", ()))}


def unpack_error(sent: Mapping[str, Any]) -> Exception:
    """The error as the nearest of its classes that both sides know, or as a RuntimeError."""
    nearest = next((name for name in sent["types"] if name in _KNOWN), "RuntimeError")
    exact = nearest == sent["types"][0]
    error = _KNOWN[nearest](sent["text"] if exact else f"{sent['types'][0]}: {sent['text']}")
    for note in sent["notes"]:
        error.add_note(note)
    return error


def pack_key(key: Hashable) -> Any:
    """A group key for a frame: tuples become lists."""
    if isinstance(key, tuple):
        return [pack_key(part) for part in key]
    if key is None or isinstance(key, str | int | float):
        return key
    raise TypeError(f"group={key!r}: expected None, a string, a number or a tuple of these; it has to travel as JSON")


def unpack_key(sent: Any, depth: int = _KEY_DEPTH) -> Hashable:
    """The group key again: lists become tuples."""
    if isinstance(sent, list) and depth:
        return tuple(unpack_key(part, depth - 1) for part in sent)
    if sent is None or isinstance(sent, str | int | float):
        return sent
    raise TypeError(f"{sent!r:.80} is no group key")


def _notice_silence(stream: trio.SocketStream) -> None:
    """Have the kernel ask whether a silent peer still exists: a machine that loses power says no goodbye."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        option = getattr(socket, name, None)  # not every system lets them be set
        if option is not None:
            stream.setsockopt(socket.IPPROTO_TCP, option, value)
