"""A session: one episode's context, what of it is cached, and the turn it waits for.

`Session` is what an episode holds; `Lane` is the same episode as the engine's loop sees it. Both are bookkeeping on
the trio thread, in numbers of tokens. Knows nothing of devices, of other sessions, or of when a turn is served.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import trio

from jaxrl.runtime.sampler import ContextFull
from jaxrl.runtime.schedule import MAX_STOP_IDS, Row
from jaxrl.runtime.weights import Policy
from jaxrl.settings import at_least
from jaxrl.types import Sample

DecodeText = Callable[[Sequence[int]], str]


@dataclass
class Request:
    """One `sample` call under way. Errors: ValueError for arguments that make no sense."""

    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    max_tokens: int
    temperature: float
    since: int = 0  # the tick it was made in
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: Literal["stop", "length"] = "length"
    done: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(self.stop_ids)} stop ids: the engine takes at most {MAX_STOP_IDS}")
        if "" in self.stop_strings:
            raise ValueError("stop contains an empty string, which would stop every turn at once")
        at_least("max_tokens", self.max_tokens, 1)
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: expected 0 (greedy) or more")

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.tokens)


@dataclass(eq=False)
class Prompt:
    """A group's prompt in the prompt store, written by the weights of one policy."""

    row: int
    tokens: list[int]
    ready: int = 0  # positions prefilled
    users: set["Lane"] = field(default_factory=set)


@dataclass(eq=False)
class Lane:
    """An episode in the engine. policy: what it is pinned to; None follows what is published."""

    group: Hashable | None
    seed: int
    policy: Policy | None = None
    tokens: list[int] = field(default_factory=list)
    given: list[bool] = field(default_factory=list)  # beside tokens: True for prompt and observations, not for draws
    position: int = 0  # index of the next token; never falls below what was shown, also when history is rewound
    cached: int = 0  # positions whose keys and values exist, the prompt's included
    spans: list[tuple[int, int]] = field(default_factory=list)  # (version, end) of what wrote them
    slot: int | None = None
    prompt: Prompt | None = None
    prompt_length: int = 0
    request: Request | None = None

    @property
    def pending(self) -> int:
        """Tokens without keys and values yet; the last of them is the input of the next draw."""
        return len(self.tokens) - self.cached

    @property
    def row(self) -> Row:
        """Where the episode lies in the stores."""
        assert self.slot is not None
        prompt = self.prompt.row if self.prompt else 0
        return Row(self.slot, self.cached - self.prompt_length, prompt, self.prompt_length)

    def holds(self, request: Request) -> bool:
        """Whether the episode still waits for this very request (it may have left while the device worked)."""
        return self.request is request and self.slot is not None

    def append(self, tokens: Sequence[int], *, given: bool) -> None:
        """Let the context grow."""
        self.tokens += [int(t) for t in tokens]
        self.given += [given] * len(tokens)
        self.position += len(tokens)

    def truncate(self, length: int) -> None:
        """Forget the tokens after the first `length`."""
        del self.tokens[length:], self.given[length:]
        self.keep(length)

    def keep(self, cached: int) -> None:
        """Forget the keys and values after the first `cached` positions."""
        self.cached = min(self.cached, cached)
        self.prompt_length = min(self.prompt_length, self.cached)
        self.spans = [(v, min(end, self.cached)) for v, end in self.spans]
        self.spans = [s for i, s in enumerate(self.spans) if s[1] > (self.spans[i - 1][1] if i else 0)]

    def advance(self, count: int, version: int) -> int:
        """Note that `count` more positions are cached; return how many of them held given tokens."""
        given = sum(self.given[self.cached : self.cached + count])
        self.cached += count
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.cached)
        else:
            self.spans.append((version, self.cached))
        return given

    def receive(
        self, request: Request, tokens: list[int], logprobs: list[float], version: int, decode_text: DecodeText | None
    ) -> None:
        """Take what was drawn for the request, and finish it when it has reached a stop or its budget."""
        before = len(request.tokens)
        request.tokens += tokens
        request.logprobs += logprobs
        request.versions += [version] * len(tokens)
        self.append(tokens, given=False)
        end = None if decode_text is None else _string_end(request, before, decode_text)
        if end is not None:
            surplus = len(request.tokens) - end
            for kept in (request.tokens, request.logprobs, request.versions):
                del kept[end:]
            self.truncate(len(self.tokens) - surplus)
            self.position -= surplus  # nobody saw these draws, and how many there are depends on the chunk
            self.keep(len(self.tokens) - 1)
        if end is not None or (request.tokens and request.tokens[-1] in request.stop_ids):
            request.stop = "stop"
            request.done.set()
        elif request.remaining <= 0:
            request.done.set()


class Desk(Protocol):
    """What a session asks of the engine it was leased from."""

    @property
    def capacity(self) -> int:
        """Positions a context holds."""
        ...

    def check(self, request: Request, new_tokens: Sequence[int]) -> None:
        """Raise ValueError for a request, or tokens given with it, that this engine cannot serve."""
        ...

    def submit(self, lane: Lane, request: Request) -> None:
        """Serve the request from the next tick on."""
        ...


class Session:
    """An episode's lease on the engine. Made by `Engine.session`; not to be used after its block is left."""

    def __init__(self, desk: Desk, lane: Lane) -> None:
        self._desk = desk
        self._lane = lane

    @property
    def tokens(self) -> list[int]:
        """The context so far: everything given, everything drawn."""
        return self._lane.tokens

    @property
    def capacity(self) -> int:
        """Positions the context holds."""
        return self._desk.capacity

    @property
    def room(self) -> int:
        """Positions left in the context."""
        return self.capacity - len(self.tokens)

    @property
    def policy(self) -> Policy | None:
        """What the session is pinned to; None when it follows what is published."""
        return self._lane.policy

    @property
    def kv_versions(self) -> tuple[tuple[int, int], ...]:
        """(version, end) spans: keys and values up to position `end` were written by weights `version`."""
        return tuple(self._lane.spans)

    async def sample(
        self,
        new_tokens: Sequence[int],
        *,
        stop: Sequence[int] | Sequence[str] = (),
        max_tokens: int,
        temperature: float = 1.0,
    ) -> Sample:
        """Append `new_tokens` to the context, then draw until a stop, `max_tokens`, or the end of the context.

        stop: token ids (kept as the turn's last token) or strings (the turn ends with the token that completes
        one). Errors: ContextFull when the new tokens leave no position to draw in; ValueError for bad arguments.
        """
        ids = tuple(s for s in stop if not isinstance(s, str))
        strings = tuple(s for s in stop if isinstance(s, str))
        request, lane = Request(ids, strings, max_tokens, temperature), self._lane
        self._desk.check(request, new_tokens)
        if lane.request is not None:
            raise RuntimeError("this session is sampling already; a session draws one turn at a time")
        if not self.tokens and not new_tokens:
            raise ValueError("new_tokens is empty in a new session: a model needs at least one token to start from")
        if len(new_tokens) >= self.room:
            raise ContextFull(
                f"{len(new_tokens)} new tokens after {len(self.tokens)} leave no room to draw in engine.context="
                f"{self.capacity}; raise engine.context or shorten the prompt"
            )
        lane.append(new_tokens, given=True)
        lane.keep(len(lane.tokens) - 1)  # the last token is the next program's input
        request.max_tokens = min(request.max_tokens, self.room)
        self._desk.submit(lane, request)
        try:
            await request.done.wait()
        finally:
            lane.request = None
        return Sample(tuple(request.tokens), tuple(request.logprobs), tuple(request.versions), request.stop)

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens, keeping their keys and values."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"rewind length={length}: expected 0 to {len(self.tokens)}, the tokens this session holds")
        self._lane.truncate(length)


def _string_end(request: Request, before: int, decode_text: DecodeText) -> int | None:
    """How many of the turn's tokens it takes to complete a stop string; None when there is none yet."""
    if not request.stop_strings or not any(s in decode_text(request.tokens) for s in request.stop_strings):
        return None
    for end in range(before + 1, len(request.tokens) + 1):
        text = decode_text(request.tokens[:end])
        if any(s in text for s in request.stop_strings):
            return end
    return len(request.tokens)
