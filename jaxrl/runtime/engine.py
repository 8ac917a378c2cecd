"""The sampling engine: sessions as leases, one loop that batches them, weights that are published to it.

    async with open_engine(model, weights, config=..., ...) as engine:
        async with engine.session(group="task 7", seed=12) as session:
            turn = await session.sample(prompt_ids, stop=(im_end,), max_tokens=64, temperature=1.0)
            turn = await session.sample(observation_ids, stop=(im_end,), max_tokens=64, temperature=1.0)

A session keeps its keys and values between turns, so a turn prefills only the tokens it is given. Sessions of
one group share the prefill of the prompt they have in common. A token's randomness is a function of the
session's seed and the token's index, never of what else is in the batch.

A session follows what is published, or samples from one policy to its end: a past one, or a frozen adapter by name.
Sessions of one policy run together; each policy runs the same programs, because weights are their arguments.

One task (`Engine.run`) owns the stores: each tick it admits sessions, prefills what they were given and decodes
a chunk for all of them, in a worker thread; everything else here is host bookkeeping on the trio thread. Knows
token ids only; text enters through `decode_text`, for stop strings.
"""

import math
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import trio

from jaxrl.models.config import ModelConfig
from jaxrl.models.decode import Drawn
from jaxrl.runtime.programs import Draw, Programs
from jaxrl.runtime.sampler import ContextFull
from jaxrl.runtime.schedule import EngineConfig, Row, batches, bucket
from jaxrl.runtime.session import DecodeText, Lane, Prompt, Request, Session
from jaxrl.runtime.weights import FROZEN, Policy, Weights, check_alike, place_alike, snapshot
from jaxrl.types import common_prefix

__all__ = ["ContextFull", "Engine", "EngineConfig", "Policy", "Session", "Stats", "Weights", "open_engine", "snapshot"]

_PATIENCE = 0.2  # seconds an engine with nothing to run leaves idle episodes their slots while another waits for one
_SETTLE = 4  # scheduler passes in which tasks answered by a tick may hand in their next turn


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


class Engine:
    """Owns the loop that serves sessions, and who holds which slot. Open one with `open_engine`."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Weights,
        *,
        config: EngineConfig,
        lora_scale: float,
        version: int,
        decode_text: DecodeText | None,
        limiter: trio.CapacityLimiter,
    ) -> None:
        if config.context > model.max_positions:
            raise ValueError(
                f"engine.context={config.context} exceeds the model's max_positions={model.max_positions}; lower it"
            )
        self.config = config
        self.policy = Policy(weights, version)
        self.stats = Stats()
        self._named: dict[str, Policy] = {}
        self._vocab_size = model.vocab_size
        self._decode_text = decode_text
        self._limiter = limiter
        dtype = jnp.float32 if jax.default_backend() == "cpu" else weights.params["embed"].dtype
        self._programs = Programs(model, config, lora_scale, dtype)
        self._lanes: set[Lane] = set()
        self._free_slots = list(range(config.slots))
        self._free_prompts = list(range(config.prompts))
        self._prompts: dict[_PromptKey, Prompt] = {}
        self._wake = trio.Event()
        self._turn = trio.Lock()  # held by a tick or by a publish
        self._ticks = 0

    # --- for episodes ----------------------------------------------------------------------------

    @asynccontextmanager
    async def session(
        self, *, group: Hashable | None = None, seed: int, policy: Policy | str | None = None
    ) -> AsyncIterator[Session]:
        """Lease a place for one episode; leaving the block gives it back, also on cancellation.

        group: sessions of the same group share the prefill of their common prompt. seed: 64-bit integer; the
        episode's tokens depend on it and on nothing else that is random. policy: None follows what is published; a
        `Policy`, such as `engine.policy`, is sampled to the end, whatever is published; a name is that of
        `add_policy`.
        """
        lane = Lane(group, seed, self._resolve(policy))
        self._lanes.add(lane)
        try:
            yield Session(self, lane)
        finally:
            self._lanes.discard(lane)
            self._release(lane)
            self._wake.set()  # a slot may be free for someone who waits

    @property
    def capacity(self) -> int:
        """Positions a session's context holds."""
        return self.config.context

    def check(self, request: Request, new_tokens: Sequence[int]) -> None:
        """Raise ValueError for a request, or tokens given with it, that this engine cannot serve."""
        for what, ids in (("stop", request.stop_ids), ("new_tokens", new_tokens)):
            strange = next((i for i in ids if not 0 <= i < self._vocab_size), None)
            if strange is not None:
                raise ValueError(
                    f"{what} contains the id {strange}, and the model's vocabulary has the ids 0 to "
                    f"{self._vocab_size - 1}; use the tokenizer that belongs to the model"
                )
        if request.stop_strings and self._decode_text is None:
            raise ValueError(
                f"stop strings {request.stop_strings} need an engine opened with decode_text; or give stop token ids"
            )

    def submit(self, lane: Lane, request: Request) -> None:
        """Serve the request from the next tick on. Called by the session."""
        request.since = self._ticks
        lane.request = request
        self._wake.set()

    # --- for the trainer -------------------------------------------------------------------------

    async def publish(self, weights: Weights, *, version: int, copy: bool = False) -> None:
        """Sample from `weights` from the next tick on. Live sessions that follow: EngineConfig.on_publish.

        copy: sample from a `snapshot` of the weights, made now, which survives the update that donates them; without
        it nothing is copied, and nobody may sample once that update has begun.
        """
        if copy:
            weights = await self._on_device(partial(snapshot, weights))
        async with self._turn:
            self.policy = Policy(weights, version)
            if self.config.on_publish == "recompute":
                for lane in self._lanes:
                    if lane.policy is None:
                        self._drop_prompt(lane)
                        lane.keep(0)
            self._free_unwanted_prompts()

    def add_policy(self, name: str, adapter: Any) -> None:
        """Let sessions sample from the base with `adapter`, by name: an opponent, a past checkpoint.

        Its tokens get version -1 (`weights.FROZEN`): they are never trained on. The arrays are kept where they have
        the live adapter's placement already, so they must not be the learner's own, which its next update donates.
        Errors: ValueError for a name in use and for an adapter of other names, shapes or dtypes than the live one.
        """
        if name in self._named:
            raise ValueError(f"add_policy({name!r}): there is one of that name; remove_policy it first")
        live = self.policy.weights
        placed = place_alike(adapter, live, f"add_policy({name!r})")
        self._named[name] = Policy(Weights(live.params, placed), FROZEN, name)

    def remove_policy(self, name: str) -> None:
        """Forget a named policy. RuntimeError while a session samples from it."""
        policy = self._find(name)
        users = sum(lane.policy is policy for lane in self._lanes)
        if users:
            raise RuntimeError(
                f"remove_policy({name!r}): open sessions that sample from it: {users}; remove it when they have ended"
            )
        del self._named[name]

    @property
    def version(self) -> int:
        """Version of the live policy."""
        return self.policy.version

    @property
    def live_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._lanes)

    @property
    def slots_in_use(self) -> int:
        """Slots held by sessions."""
        return self.config.slots - len(self._free_slots)

    @property
    def prompts_in_use(self) -> int:
        """Rows of the prompt store held by groups."""
        return self.config.prompts - len(self._free_prompts)

    @property
    def compilations(self) -> int:
        """Programs compiled so far; at most `config.compile_budget`."""
        return self._programs.compiled

    # --- policies --------------------------------------------------------------------------------

    def _resolve(self, policy: Policy | str | None) -> Policy | None:
        if isinstance(policy, str):
            return self._find(policy)
        if policy is not None and policy is not self.policy:
            check_alike(policy.weights, self.policy.weights, f"session(policy=version {policy.version})")
        return policy

    def _find(self, name: str) -> Policy:
        if name not in self._named:
            close = get_close_matches(name, self._named) or sorted(self._named)
            known = (
                f"the nearest names are {', '.join(close)}" if close else "none is; add_policy(name, adapter) adds one"
            )
            raise ValueError(f"no policy {name!r} is registered; {known}")
        return self._named[name]

    def _policy_of(self, lane: Lane) -> Policy:
        return self.policy if lane.policy is None else lane.policy

    def _by_policy(self, lanes: Iterable[Lane]) -> dict[Policy, list["_Turn"]]:
        turns: dict[Policy, list[_Turn]] = {}
        for lane in lanes:
            if lane.request is not None:
                turns.setdefault(self._policy_of(lane), []).append((lane, lane.request))
        return turns

    # --- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve sessions until cancelled. An error on the device ends the engine and everyone who waits on it.

        So does a policy whose logits are not finite, with a FloatingPointError: what it wrote would spoil its slots.
        """
        while True:
            async with self._turn:
                worked = await self._tick()
            for _ in range(_SETTLE):
                await trio.lowlevel.checkpoint()
            if not worked and not self._admissible():
                self._wake = trio.Event()
                with trio.move_on_after(_PATIENCE if self._starved() else math.inf) as waited:
                    await self._wake.wait()
                if waited.cancelled_caught:
                    self._evict()

    def _admissible(self) -> list[Lane]:
        """Who runs in a tick: those with a slot, and as many of the others as there are slots for.

        A group that has begun comes before one that has not: its members may wait for each other, as seats do.
        """
        waiting = self._waiting()
        holding = [s for s in waiting if s.slot is not None]
        begun = {s.group for s in self._lanes if s.slot is not None} - {None}
        queued = [s for s in waiting if s.slot is None]
        queued.sort(key=lambda s: (s.group not in begun, _since(s), s.seed))
        return sorted(holding, key=lambda s: s.slot or 0) + queued[: len(self._free_slots)]

    def _waiting(self) -> list[Lane]:
        return [s for s in self._lanes if s.request is not None and not s.request.done.is_set()]

    def _starved(self) -> bool:
        """Whether an episode waits for a slot while all slots belong to episodes that wait for something else."""
        return not self._free_slots and any(s.slot is None for s in self._waiting())

    def _evict(self) -> None:
        """Take the slots of the idle episodes that are cheapest to prefill again, which they are at their next turn.

        Without this, episodes that wait for an opponent in the same engine could hold every slot the opponent needs.
        Half of them are enough for all to go on, and as games end their slots pass to others without another stall.
        """
        idle = [s for s in self._lanes if s.slot is not None and s.request is None]
        idle.sort(key=lambda s: (len(s.tokens), s.seed))
        queued = sum(s.slot is None for s in self._waiting())
        for lane in idle[: min(queued, (len(idle) + 1) // 2)]:
            self._release(lane)
            lane.keep(0)

    async def _tick(self) -> bool:
        """Admit, prefill, decode once, one policy after the other. False when there was nothing to do."""
        lanes = self._admissible()
        if not lanes:
            return False
        self._ticks += 1
        for lane in lanes:
            if lane.slot is None:
                lane.slot = self._free_slots.pop(0)
            if lane.cached == 0 and lane.group is not None:
                self._share_prompt(lane, self._policy_of(lane))
        began = time.perf_counter()
        new = {p.row: (self._policy_of(s), p) for s in lanes if (p := s.prompt) and p.ready < len(p.tokens)}
        for row in sorted(new):
            await self._prefill_prompt(*new[row])
        for policy, turns in self._by_policy(lanes).items():
            await self._extend_lanes(policy, [(s, r) for s, r in turns if s.holds(r) and s.pending > 1])
            await self._decode_lanes(policy, [(s, r) for s, r in turns if s.holds(r) and s.pending == 1])
        self.stats.busy_seconds += time.perf_counter() - began
        return True

    async def _on_device(self, call: Callable[[], Any]) -> Any:
        return await trio.to_thread.run_sync(call, limiter=self._limiter)

    # --- slots and prompts -----------------------------------------------------------------------

    def _release(self, lane: Lane) -> None:
        self._drop_prompt(lane)
        self._free_unwanted_prompts()
        if lane.slot is not None:
            self._free_slots.append(lane.slot)
            self._free_slots.sort()
            lane.slot = None

    def _share_prompt(self, lane: Lane, policy: Policy) -> None:
        """Point a new lane at its group's prompt under its policy, making the entry if it is the first."""
        if lane.prompt is not None:  # of a context that was rewound to nothing, perhaps by other weights
            self._drop_prompt(lane)
            self._free_unwanted_prompts()
        key = (lane.group, policy.key)
        entry = self._prompts.get(key)
        context = lane.tokens[:-1][: self.config.prompt_context]
        if entry is None and context and self._free_prompts:
            entry = self._prompts[key] = Prompt(self._free_prompts.pop(0), context)
        if entry is None or len(entry.users) >= self.config.members:
            return
        shared = common_prefix(entry.tokens, context)
        if shared:
            entry.users.add(lane)
            lane.prompt, lane.prompt_length = entry, shared
            lane.advance(shared, policy.version)

    def _drop_prompt(self, lane: Lane) -> None:
        if lane.prompt is not None:
            lane.prompt.users.discard(lane)
            lane.prompt, lane.prompt_length = None, 0

    def _free_unwanted_prompts(self) -> None:
        """Free the prompts that nobody uses and no open session could come to use."""
        unused = [key for key, prompt in self._prompts.items() if not prompt.users]
        wanted = {(s.group, self._policy_of(s).key) for s in self._lanes} if unused else set()
        self._free_prompts += [self._prompts.pop(key).row for key in unused if key not in wanted]
        self._free_prompts.sort()

    async def _prefill_prompt(self, policy: Policy, prompt: Prompt) -> None:
        while prompt.ready < len(prompt.tokens):
            length = bucket(len(prompt.tokens) - prompt.ready, self.config.extend_lengths)
            tokens = prompt.tokens[prompt.ready : prompt.ready + length]
            row = Row(prompt.row, prompt.ready)
            await self._on_device(partial(self._programs.extend_prompt, policy, row, tokens, length))
            prompt.ready += len(tokens)
            self.stats.prefill_tokens += len(tokens)

    # --- programs --------------------------------------------------------------------------------

    # What a program takes is written down on the trio thread, before the worker starts: while it runs, a session
    # may be cancelled and its slot given back.

    async def _extend_lanes(self, policy: Policy, turns: list["_Turn"]) -> None:
        """Prefill what each lane was given, but for its last token."""
        for length, indices in batches([s.pending - 1 for s, _ in turns], self.config):
            chosen = [(s, r) for s, r in (turns[i] for i in indices) if s.holds(r)]
            if not chosen:
                continue
            tokens = [s.tokens[s.cached : len(s.tokens) - 1][:length] for s, _ in chosen]
            rows = [s.row for s, _ in chosen]
            await self._on_device(partial(self._programs.extend, policy, rows, tokens, length))
            for (lane, request), new in zip(chosen, tokens, strict=True):
                if lane.holds(request):
                    self.stats.prefill_tokens += lane.advance(len(new), policy.version)

    async def _decode_lanes(self, policy: Policy, turns: list["_Turn"]) -> None:
        """Draw a chunk for every lane whose context is all cached but its last token."""
        if not turns:
            return
        rows = [s.row for s, _ in turns]
        draws = [_draw(s, r, self.config.decode_steps) for s, r in turns]
        drawn, size = await self._on_device(partial(self._programs.decode, policy, rows, draws))
        _check_finite(drawn, policy)
        self.stats.decode_row_steps += int(drawn.count_B.max()) * size
        for i, (lane, request) in enumerate(turns):
            if not lane.holds(request):
                continue
            count = int(drawn.count_B[i])
            self.stats.decode_tokens += count
            self.stats.prefill_tokens += lane.advance(count, policy.version)
            tokens, logprobs = drawn.token_BT[i, :count].tolist(), drawn.logp_BT[i, :count].tolist()
            lane.receive(request, tokens, logprobs, policy.version, self._decode_text)


_Turn = tuple[Lane, Request]
_PromptKey = tuple[Hashable, object]  # a group, and the key of the policy whose weights wrote the prompt


def _draw(lane: Lane, request: Request, steps: int) -> Draw:
    seed = (lane.seed >> 32 & 0xFFFFFFFF, lane.seed & 0xFFFFFFFF)
    budget = min(request.remaining, steps)
    return Draw(lane.tokens[-1], budget, seed, lane.position, request.temperature, request.stop_ids)


def _check_finite(drawn: Drawn, policy: Policy) -> None:
    real_BT = np.arange(drawn.logp_BT.shape[1]) < drawn.count_B[:, None]
    if not np.isfinite(drawn.logp_BT[real_BT]).all():
        raise FloatingPointError(
            f"the logits of policy {policy} are not finite, so nothing can be drawn from them: its weights have "
            "diverged, or overflow in their dtype. Lower the learning rate or the LoRA's alpha, or look at what it was "
            "loaded from"
        )


def _since(lane: Lane) -> int:
    return lane.request.since if lane.request else 0


@asynccontextmanager
async def open_engine(
    model: ModelConfig,
    weights: Weights,
    *,
    config: EngineConfig,
    lora_scale: float = 1.0,
    version: int = 0,
    decode_text: DecodeText | None = None,
    limiter: trio.CapacityLimiter | None = None,
) -> AsyncIterator[Engine]:
    """Run an engine for the length of the block.

    limiter: the one through which blocking JAX calls go; share it with the trainer (default: one of its own). To
    sample while the trainer updates, give `snapshot(weights)`: an update donates the arrays it trains.
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
