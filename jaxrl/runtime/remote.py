"""The client of an endpoint: a Sampler whose sessions live in another process.

A session is one connection. It mirrors its context, so that `tokens` and `rewind` cost no round trip; what was
forgotten is told to the endpoint with the next turn. A turn comes whole, or as the sampler's own error, or as
`ConnectionLost`: never short. A turn that is cancelled closes the connection, which cancels it at the endpoint too and
ends the session.

Knows frames and the sampler's protocol. Runs in workers, so it must not import the engine, nor anything of JAX.
"""

from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from jaxrl.runtime.wire import Address, Connection, connect, pack_key
from jaxrl.types import Sample

_LEAVE_SECONDS = 5.0  # how long the endpoint has to confirm that a session is free again


class RemoteSession:
    """An episode's lease on the other side of a connection. Made by `RemoteSampler.session`."""

    def __init__(self, connection: Connection, capacity: int) -> None:
        self._connection = connection
        self._capacity = capacity
        self._tokens: list[int] = []
        self._rewind: int | None = None  # what the endpoint has not been told yet
        self._sampling = False
        self._over = False

    @property
    def tokens(self) -> Sequence[int]:
        """The context so far: everything given, everything drawn."""
        return self._tokens

    @property
    def capacity(self) -> int:
        """Tokens the context can hold."""
        return self._capacity

    async def sample(
        self,
        new_tokens: Sequence[int],
        *,
        stop: Sequence[int] | Sequence[str] = (),
        max_tokens: int,
        temperature: float = 1.0,
    ) -> Sample:
        """Append `new_tokens`, then draw, over there. The sampler's own errors are raised here."""
        if self._sampling:
            raise RuntimeError("this session is sampling already; a session draws one turn at a time")
        if self._over:
            raise self._connection.lost("has no such session any more: a turn of it was cancelled or cut off")
        request = {
            "new": [int(t) for t in new_tokens],
            "stop": [s if isinstance(s, str) else int(s) for s in stop],
            "max_tokens": int(max_tokens),
            "temperature": float(temperature),
            **({} if self._rewind is None else {"rewind": self._rewind}),
        }
        self._sampling = self._over = True  # over, unless an answer comes that agrees with this side
        try:
            answer = await self._connection.exchange(request)
            return self._received(request["new"], answer)
        finally:
            self._sampling = False
            if self._over:
                await self._connection.close()

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(
                f"rewind length={length}: expected 0 to {len(self._tokens)}, the tokens this session holds"
            )
        if length < len(self._tokens):
            del self._tokens[length:]
            self._rewind = length

    async def leave(self) -> None:
        """Wait until the endpoint has taken the lease back."""
        if self._over:
            return
        await self._connection.finish()
        with trio.move_on_after(_LEAVE_SECONDS):
            await self._connection.receive()

    def _received(self, new: list[int], answer: dict[str, Any]) -> Sample:
        """The turn of an answer, with the context brought up to date, or its error."""
        self._rewind = None
        if "error" in answer:
            self._over = answer.get("held") != len(self._tokens)  # it may have kept what it was given
            raise self._connection.error(answer)
        try:
            drawn, logprobs, versions = (tuple(answer[name]) for name in ("tokens", "logprobs", "versions"))
            sample = Sample(drawn, logprobs, versions, answer["stop"])
        except (KeyError, TypeError, AssertionError) as error:
            raise self._connection.lost(f"sent an answer that is no turn: {answer!r:.80}") from error
        self._tokens += [*new, *drawn]
        if answer.get("held") != len(self._tokens):
            raise self._connection.lost(
                f"holds {answer.get('held')} tokens of a session that holds {len(self._tokens)} here"
            )
        self._over = False
        return sample


class RemoteSampler:
    """The sampler behind an endpoint. Holds nothing; each session is a connection of its own."""

    def __init__(self, address: Address) -> None:
        self._address = address

    @asynccontextmanager
    async def session(
        self, *, group: Hashable | None = None, seed: int, policy: str | None = None
    ) -> AsyncIterator[RemoteSession]:
        """Lease a session for one episode; leaving the block gives it back, also on cancellation."""
        lease = {"group": pack_key(group), "seed": int(seed), **({} if policy is None else {"policy": policy})}
        async with connect(self._address) as connection:
            opened = await connection.ask({"lease": lease})
            session = RemoteSession(connection, opened["capacity"])
            yield session
            await session.leave()
