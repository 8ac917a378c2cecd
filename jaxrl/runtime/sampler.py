"""What an episode needs of whoever samples for it: a session that is leased, given tokens, and rewound.

The engine is a sampler; so is a client of an engine in another process, and a stub in a test. Episodes, groups and
opponents are written against these two protocols and never see which one they talk to. Knows token ids only.
"""

from collections.abc import Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from jaxrl.types import Sample


class SamplerLost(ConnectionError):
    """Whoever sampled is gone. No fault of an environment, so no strategy retries it."""


class ContextFull(ValueError):
    """A session was given more tokens than its context holds."""


class Session(Protocol):
    """One episode's lease: a context that only grows, or is rewound to a prefix of itself."""

    @property
    def tokens(self) -> Sequence[int]:
        """The context so far: everything given, everything drawn."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens the context can hold."""
        ...

    async def sample(
        self,
        new_tokens: Sequence[int],
        *,
        stop: Sequence[int] | Sequence[str] = (),
        max_tokens: int,
        temperature: float = 1.0,
    ) -> Sample:
        """Append `new_tokens`, then draw until a stop, `max_tokens`, or the end of the context."""
        ...

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        ...


class Sampler(Protocol):
    """Where sessions come from."""

    def session(
        self, *, group: Hashable | None = None, seed: int, policy: str | None = None
    ) -> AbstractAsyncContextManager[Session]:
        """Lease a session for one episode; leaving the block gives it back, also on cancellation.

        group: sessions of the same group may share the work on their common prompt. seed: 64-bit integer; every
        random number of the episode follows from it. policy: a frozen policy's name; None is the one being trained.
        """
        ...
