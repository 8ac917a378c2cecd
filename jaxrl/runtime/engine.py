"""The sampling engine: sessions as leases, one loop that batches them, weights that are published to it.

    async with open_engine(model, weights, config=..., ...) as engine:
        async with engine.session(group="task 7", seed=12) as session:
            turn = await session.sample(prompt_ids, stop=(im_end,), max_tokens=64, temperature=1.0)
            turn = await session.sample(observation_ids, stop=(im_end,), max_tokens=64, temperature=1.0)

A session keeps its keys and values between turns, so a turn prefills only the tokens it is given. Sessions of
one group share the prefill of the prompt they have in common. A token's randomness is a function of the
session's seed and the token's index, never of what else is in the batch.

One task (`Engine.run`) owns the device: each tick it admits sessions, prefills what they were given and decodes
a chunk for all of them, in a worker thread; everything else here is host bookkeeping on the trio thread. Knows
token ids only; text enters through `decode_text`, for stop strings.
"""

import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import trio

from jaxrl.models import cache
from jaxrl.models.config import ModelConfig
from jaxrl.models.decode import Drawn, Draws, Members, Rows, decode, extend
from jaxrl.models.spec import Params
from jaxrl.runtime.schedule import (
    MAX_STOP_IDS,
    EngineConfig,
    Row,
    batches,
    bucket,
    member_arrays,
    padded_tokens,
    row_arrays,
)
from jaxrl.types import Sample, common_prefix

_SETTLE = 4  # scheduler passes in which tasks answered by a tick may hand in their next turn


class Weights(NamedTuple):
    """What samples: base parameters and an adapter (None: none)."""

    params: Params
    adapter: Any = None


class ContextFull(ValueError):
    """A session was given more tokens than its context holds."""


@dataclass
class Stats:
    """Running totals since the engine opened. Subtract two of them for a step's share."""

    prefill_tokens: int = 0  # given tokens (prompts, observations) that went through the model; shared ones once
    decode_tokens: int = 0  # tokens drawn
    decode_row_steps: int = 0  # rows in a decode call times its steps, live or not
    busy_seconds: float = 0.0

    def __sub__(self, other: "Stats") -> "Stats":
        return Stats(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    def copy(self) -> "Stats":
        return self - Stats()


@dataclass
class _Request:
    """One `sample` call under way."""

    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    max_tokens: int
    temperature: float
    since: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: Literal["stop", "length"] = "length"
    done: trio.Event = field(default_factory=trio.Event)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.tokens)


@dataclass
class _Prompt:
    """A group's prompt in the prompt store."""

    row: int
    tokens: list[int]
    version: int
    ready: int = 0  # positions prefilled
    users: set["Session"] = field(default_factory=set)


class Session:
    """An episode's lease on the engine. Made by `Engine.session`; not to be used after its block is left."""

    def __init__(self, engine: "Engine", group: Hashable | None, seed: int) -> None:
        self._engine = engine
        self.group = group
        self.seed = seed
        self.tokens: list[int] = []
        self._given: list[bool] = []  # beside tokens: True for prompt and observations, False for draws
        self._drawn = 0  # index of the next draw: the position, but it grows even when history is rewound
        self._cached = 0  # positions whose keys and values exist, the prompt's included
        self._slot: int | None = None
        self._prompt: _Prompt | None = None
        self._prompt_length = 0
        self._request: _Request | None = None
        self._spans: list[tuple[int, int]] = []

    @property
    def capacity(self) -> int:
        """Positions the context holds."""
        return self._engine.config.context

    @property
    def room(self) -> int:
        """Positions left in the context."""
        return self.capacity - len(self.tokens)

    @property
    def kv_versions(self) -> tuple[tuple[int, int], ...]:
        """(version, end) spans: keys and values up to position `end` were written by weights `version`."""
        return tuple(self._spans)

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
        request = self._engine._request(stop, max_tokens, temperature)
        if self._request is not None:
            raise RuntimeError("this session is sampling already; a session draws one turn at a time")
        if not self.tokens and not new_tokens:
            raise ValueError("new_tokens is empty in a new session: a model needs at least one token to start from")
        if len(new_tokens) >= self.room:
            raise ContextFull(
                f"{len(new_tokens)} new tokens after {len(self.tokens)} leave no room to draw in engine.context="
                f"{self._engine.config.context}; raise engine.context or shorten the prompt"
            )
        self._append(new_tokens, given=True)
        self._cached = min(self._cached, len(self.tokens) - 1)  # the last token is the next program's input
        request.max_tokens = min(request.max_tokens, self.room)
        self._request = request
        self._engine._wake.set()
        try:
            await request.done.wait()
        finally:
            self._request = None
        return Sample(tuple(request.tokens), tuple(request.logprobs), tuple(request.versions), request.stop)

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens, keeping their keys and values."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"rewind length={length}: expected 0 to {len(self.tokens)}, the tokens this session holds")
        self._truncate(length)

    def _append(self, tokens: Sequence[int], *, given: bool) -> None:
        self.tokens += [int(t) for t in tokens]
        self._given += [given] * len(tokens)
        self._drawn += len(tokens)

    def _truncate(self, length: int) -> None:
        del self.tokens[length:], self._given[length:]
        self._keep(length)

    def _keep(self, cached: int) -> None:
        self._cached = min(self._cached, cached)
        self._prompt_length = min(self._prompt_length, self._cached)
        self._spans = [(v, min(end, self._cached)) for v, end in self._spans]
        self._spans = [s for i, s in enumerate(self._spans) if s[1] > (self._spans[i - 1][1] if i else 0)]

    def _advance(self, count: int, version: int) -> int:
        """Note that `count` more positions are cached; return how many of them held given tokens."""
        given = sum(self._given[self._cached : self._cached + count])
        self._cached += count
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, self._cached)
        else:
            self._spans.append((version, self._cached))
        return given

    @property
    def _pending(self) -> int:
        return len(self.tokens) - self._cached

    @property
    def _row(self) -> Row:
        assert self._slot is not None
        prompt = self._prompt.row if self._prompt else 0
        return Row(self._slot, self._cached - self._prompt_length, prompt, self._prompt_length)


class Engine:
    """Owns the key/value stores and the loop that fills them. Open one with `open_engine`."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Weights,
        *,
        config: EngineConfig,
        lora_scale: float,
        version: int,
        decode_text: Callable[[Sequence[int]], str] | None,
        limiter: trio.CapacityLimiter,
    ) -> None:
        if config.context > model.max_positions:
            raise ValueError(
                f"engine.context={config.context} exceeds the model's max_positions={model.max_positions}; lower it"
            )
        self.config = config
        self.version = version
        self.stats = Stats()
        self._model = model
        self._weights = weights
        self._decode_text = decode_text
        self._limiter = limiter
        dtype = jnp.float32 if jax.default_backend() == "cpu" else weights.params["embed"].dtype
        self._main = cache.empty(model, config.slots, config.context + config.slack, dtype)
        self._prompt_store = cache.empty(model, config.prompts, config.prompt_context + config.slack, dtype)
        static = {"config": model, "lora_scale": lora_scale}
        self._extend = jax.jit(
            partial(extend, **static), static_argnames=("positions", "prompt_positions"), donate_argnames="store"
        )
        self._decode = jax.jit(
            partial(decode, steps=config.decode_steps, **static),
            static_argnames=("positions", "prompt_positions"),
            donate_argnames="store",
        )
        self._sessions: set[Session] = set()
        self._free_slots = list(range(config.slots))
        self._free_prompts = list(range(config.prompts))
        self._prompts: dict[Hashable, _Prompt] = {}
        self._wake = trio.Event()
        self._turn = trio.Lock()  # held by a tick or by a publish
        self._ticks = 0

    # --- for episodes ----------------------------------------------------------------------------

    @asynccontextmanager
    async def session(self, *, group: Hashable | None = None, seed: int) -> AsyncIterator[Session]:
        """Lease a place for one episode; leaving the block gives it back, also on cancellation.

        group: sessions of the same group share the prefill of their common prompt. seed: 64-bit integer; the
        episode's tokens depend on it and on nothing else that is random.
        """
        session = Session(self, group, seed)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)
            self._release(session)
            self._wake.set()  # a slot may be free for someone who waits

    # --- for the trainer -------------------------------------------------------------------------

    async def publish(self, weights: Weights, *, version: int) -> None:
        """Sample from `weights` from the next tick on. Copies nothing. Live sessions: EngineConfig.on_publish."""
        async with self._turn:
            self._weights = weights
            self.version = version
            if self.config.on_publish == "recompute":
                for session in self._sessions:
                    self._drop_prompt(session)
                    session._keep(0)

    @property
    def live_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    @property
    def slots_in_use(self) -> int:
        """Slots held by sessions."""
        return self.config.slots - len(self._free_slots)

    @property
    def compilations(self) -> int:
        """Programs compiled so far; at most `config.compile_budget`."""
        return sum(program._cache_size() for program in (self._extend, self._decode))  # pyright: ignore

    # --- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve sessions until cancelled. An error on the device ends the engine and everyone who waits on it."""
        while True:
            async with self._turn:
                worked = await self._tick()
            for _ in range(_SETTLE):
                await trio.lowlevel.checkpoint()
            if not worked and not self._admissible():
                self._wake = trio.Event()
                await self._wake.wait()

    def _admissible(self) -> list[Session]:
        waiting = [s for s in self._sessions if s._request is not None and not s._request.done.is_set()]
        holding = [s for s in waiting if s._slot is not None]
        queued = sorted((s for s in waiting if s._slot is None), key=lambda s: (_since(s), s.seed))
        return sorted(holding, key=lambda s: s._slot or 0) + queued[: len(self._free_slots)]

    async def _tick(self) -> bool:
        """Admit, prefill, decode once. False when there was nothing to do."""
        sessions = self._admissible()
        if not sessions:
            return False
        self._ticks += 1
        for session in sessions:
            if session._slot is None:
                session._slot = self._free_slots.pop(0)
            if session._cached == 0 and session.group is not None:
                self._share_prompt(session)
        began = time.perf_counter()
        for prompt in sorted({id(p): p for s in sessions if (p := s._prompt)}.values(), key=lambda p: p.row):
            await self._prefill_prompt(prompt)
        turns = [(s, s._request) for s in sessions if s._request]
        await self._extend_sessions([turn for turn in turns if _held(*turn) and turn[0]._pending > 1])
        await self._decode_sessions([turn for turn in turns if _held(*turn) and turn[0]._pending == 1])
        self.stats.busy_seconds += time.perf_counter() - began
        return True

    async def _on_device(self, call: Callable[[], Any]) -> Any:
        return await trio.to_thread.run_sync(call, limiter=self._limiter)

    # --- prompts ---------------------------------------------------------------------------------

    def _share_prompt(self, session: Session) -> None:
        """Point a new session at its group's prompt, making the entry if it is the first."""
        group = session.group
        entry = self._prompts.get(group)
        if entry is not None and entry.version != self.version and not entry.users:
            self._free_prompts.append(self._prompts.pop(group).row)
            entry = None
        context = session.tokens[:-1][: self.config.prompt_context]
        if entry is None and context and self._free_prompts:
            entry = self._prompts[group] = _Prompt(self._free_prompts.pop(0), context, self.version)
        if entry is None or entry.version != self.version or len(entry.users) >= self.config.members:
            return
        shared = common_prefix(entry.tokens, context)
        if shared:
            entry.users.add(session)
            session._prompt, session._prompt_length = entry, shared
            session._advance(shared, entry.version)

    def _drop_prompt(self, session: Session) -> None:
        if session._prompt is not None:
            session._prompt.users.discard(session)
            session._prompt, session._prompt_length = None, 0

    def _release(self, session: Session) -> None:
        self._drop_prompt(session)
        if session._slot is not None:
            self._free_slots.append(session._slot)
            self._free_slots.sort()
            session._slot = None
        group = session.group
        if group in self._prompts and not any(s.group == group for s in self._sessions):
            self._free_prompts.append(self._prompts.pop(group).row)
            self._free_prompts.sort()

    async def _prefill_prompt(self, prompt: _Prompt) -> None:
        while prompt.ready < len(prompt.tokens):
            length = bucket(len(prompt.tokens) - prompt.ready, self.config.extend_lengths)
            tokens = prompt.tokens[prompt.ready : prompt.ready + length]
            row = Row(prompt.row, prompt.ready)
            self._prompt_store = await self._on_device(
                partial(self._run_extend, self._prompt_store, [row], [tokens], length)
            )
            prompt.ready += len(tokens)
            self.stats.prefill_tokens += len(tokens)

    # --- programs --------------------------------------------------------------------------------

    # What a program takes is written down on the trio thread, before the worker starts: while it runs, a session
    # may be cancelled and its slot given back.

    async def _extend_sessions(self, turns: list["_Turn"]) -> None:
        """Prefill what each session was given, but for its last token."""
        for length, indices in batches([s._pending - 1 for s, _ in turns], self.config):
            chosen = [turns[i] for i in indices if _held(*turns[i])]
            if not chosen:
                continue
            tokens = [s.tokens[s._cached : len(s.tokens) - 1][:length] for s, _ in chosen]
            rows = [s._row for s, _ in chosen]
            self._main = await self._on_device(partial(self._run_extend, self._main, rows, tokens, length))
            for (session, request), new in zip(chosen, tokens, strict=True):
                if _held(session, request):
                    self.stats.prefill_tokens += session._advance(len(new), self.version)

    def _run_extend(self, store: cache.KV, rows: list[Row], tokens: list[list[int]], length: int) -> cache.KV:
        size = bucket(len(rows), self.config.rows)
        spans = self.config.positions if store is self._main else self.config.prompt_positions
        prompts, prompt_positions = self._shared(rows)
        return self._extend(
            *self._weights,
            store=store,
            prompts=prompts,
            rows=Rows(**_to_device(row_arrays(rows, size, padding_slot=store.rows))),
            tokens_BT=jnp.asarray(padded_tokens(tokens, size, length)),
            positions=bucket(max(r.length for r in rows), spans),
            prompt_positions=prompt_positions,
        )

    def _shared(self, rows: list[Row]) -> tuple[cache.KV | None, int]:
        longest = max(r.prompt_length for r in rows)
        if not longest:
            return None, 0
        return self._prompt_store, bucket(longest, self.config.prompt_positions)

    async def _decode_sessions(self, turns: list["_Turn"]) -> None:
        """Draw a chunk for every session whose context is all cached but its last token."""
        if not turns:
            return
        size = bucket(len(turns), self.config.rows)
        span = bucket(max(s._row.length for s, _ in turns), self.config.positions)
        whole = size == self.config.slots and span == self.config.context
        # With every slot in order the store is read where it lies; else its rows are gathered once a call.
        places = [s._row.slot for s, _ in turns] if whole else list(range(len(turns)))
        rows = [Row(self._main.rows, 0)] * size
        draws = [_NO_DRAW] * size
        for place, (session, request) in zip(places, turns, strict=True):
            rows[place] = session._row
            draws[place] = _draw(session, request, self.config.decode_steps)
        drawn = await self._on_device(partial(self._run_decode, rows, draws, None if whole else span))
        self.stats.decode_row_steps += int(drawn.count_B.max()) * size
        for place, (session, request) in zip(places, turns, strict=True):
            if not _held(session, request):
                continue
            count = int(drawn.count_B[place])
            self.stats.decode_tokens += count
            self.stats.prefill_tokens += session._advance(count, self.version)
            tokens, logprobs = drawn.token_BT[place, :count], drawn.logp_BT[place, :count]
            self._receive(session, request, tokens.tolist(), logprobs.tolist())

    def _run_decode(self, rows: list[Row], draws: list["_Draw"], positions: int | None) -> Drawn:
        prompts, prompt_positions = self._shared(rows)
        members = member_arrays(rows, len(rows), self.config.prompts, self.config.members)
        self._main, drawn = self._decode(
            *self._weights,
            store=self._main,
            prompts=prompts,
            rows=Rows(**_to_device(row_arrays(rows, len(rows), padding_slot=self._main.rows))),
            draws=Draws(**_to_device(_draw_arrays(draws))),
            members=None if prompts is None else Members(**_to_device(members)),
            positions=positions,
            prompt_positions=prompt_positions,
        )
        return jax.tree.map(np.asarray, drawn)

    # --- answers ---------------------------------------------------------------------------------

    def _request(self, stop: Sequence[int] | Sequence[str], max_tokens: int, temperature: float) -> _Request:
        ids = tuple(s for s in stop if not isinstance(s, str))
        strings = tuple(s for s in stop if isinstance(s, str))
        if len(ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(ids)} stop ids: the engine takes at most {MAX_STOP_IDS}")
        if strings and self._decode_text is None:
            raise ValueError(f"stop strings {strings} need an engine opened with decode_text; or give stop token ids")
        if "" in strings:
            raise ValueError("stop contains an empty string, which would stop every turn at once")
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: expected at least 1")
        if not temperature >= 0:
            raise ValueError(f"temperature={temperature}: expected 0 (greedy) or more")
        return _Request(ids, strings, max_tokens, temperature, since=self._ticks)

    def _receive(self, session: Session, request: _Request, tokens: list[int], logprobs: list[float]) -> None:
        before = len(request.tokens)
        request.tokens += tokens
        request.logprobs += logprobs
        request.versions += [self.version] * len(tokens)
        session._append(tokens, given=False)
        if request.stop_strings and (end := self._string_end(request, before)) is not None:
            surplus = len(request.tokens) - end
            for kept in (request.tokens, request.logprobs, request.versions):
                del kept[end:]
            session._truncate(len(session.tokens) - surplus)
            session._keep(len(session.tokens) - 1)
            request.stop = "stop"
            request.done.set()
        elif request.tokens and request.tokens[-1] in request.stop_ids:
            request.stop = "stop"
            request.done.set()
        elif request.remaining <= 0:
            request.done.set()

    def _string_end(self, request: _Request, before: int) -> int | None:
        """How many of the turn's tokens it takes to complete a stop string; None when there is none yet."""
        assert self._decode_text is not None
        if not any(s in self._decode_text(request.tokens) for s in request.stop_strings):
            return None
        for end in range(before + 1, len(request.tokens) + 1):
            text = self._decode_text(request.tokens[:end])
            if any(s in text for s in request.stop_strings):
                return end
        return len(request.tokens)


_Turn = tuple[Session, _Request]


def _held(session: Session, request: _Request) -> bool:
    """Whether the session still waits for this very request (it may have left while the device worked)."""
    return session._request is request and session._slot is not None


class _Draw(NamedTuple):
    """One row of `models.decode.Draws`."""

    token_B: int
    budget_B: int
    seed_B2: tuple[int, int]
    draw_B: int
    temperature_B: float
    stop_BN: tuple[int, ...]


_NO_DRAW = _Draw(0, 0, (0, 0), 0, 1.0, ())
_DRAW_DTYPES = (np.int32, np.int32, np.uint32, np.int32, np.float32, np.int32)


def _draw(session: Session, request: _Request, steps: int) -> _Draw:
    seed = (session.seed >> 32 & 0xFFFFFFFF, session.seed & 0xFFFFFFFF)
    budget = min(request.remaining, steps)
    return _Draw(session.tokens[-1], budget, seed, session._drawn, request.temperature, request.stop_ids)


def _draw_arrays(draws: Sequence[_Draw]) -> dict[str, np.ndarray]:
    padded = [d._replace(stop_BN=d.stop_BN + (-1,) * (MAX_STOP_IDS - len(d.stop_BN))) for d in draws]
    columns = zip(*padded, strict=True)
    return {name: np.array(c, t) for name, c, t in zip(_Draw._fields, columns, _DRAW_DTYPES, strict=True)}


def _to_device(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def _since(session: Session) -> int:
    return session._request.since if session._request else 0


@asynccontextmanager
async def open_engine(
    model: ModelConfig,
    weights: Weights,
    *,
    config: EngineConfig,
    lora_scale: float = 1.0,
    version: int = 0,
    decode_text: Callable[[Sequence[int]], str] | None = None,
    limiter: trio.CapacityLimiter | None = None,
) -> AsyncIterator[Engine]:
    """Run an engine for the length of the block.

    limiter: the one through which blocking JAX calls go; share it with the trainer (default: one of its own).
    """
    limiter = limiter or trio.CapacityLimiter(1)
    engine = Engine(
        model,
        weights,
        config=config,
        lora_scale=lora_scale,
        version=version,
        decode_text=decode_text,
        limiter=limiter,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        yield engine
        nursery.cancel_scope.cancel()
