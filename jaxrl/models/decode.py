"""The two programs a sampling engine runs: `extend` a row by tokens it is given, `decode` tokens it draws.

A row's context is a chain of three segments: a prompt shared by the row's group, the row's own history, and the
tail written during this call. Attention reads each once and merges. While `decode` loops, the two big segments
are loop constants and only the tail, written at one index for all rows, changes; it is flushed into the store
once at the end. So no cache is copied on any backend, and a prompt is read once a group, not once a row.

The last token of a row's context has no keys or values yet: it is the first input of `decode`. Pure; knows
slots and lengths as arrays, and nothing of sessions, strings or text.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxrl.models import cache
from jaxrl.models.attention import EMPTY, Part, merge, part, within
from jaxrl.models.cache import KV, Leaf
from jaxrl.models.config import ModelConfig
from jaxrl.models.forward import block, embed, logits
from jaxrl.models.lora import at_layer
from jaxrl.models.sample import draw, uniforms
from jaxrl.models.spec import Params


@struct.dataclass
class Rows:
    """Where the rows of a call live, int32 [B] each. A row with slot >= the store's rows is padding.

    slot_B: row of the main store. length_B: positions it holds there. prompt_B: row of the prompt store.
    prompt_length_B: how many of the prompt's positions the row uses (0: none).
    """

    slot_B: Leaf
    length_B: Leaf
    prompt_B: Leaf
    prompt_length_B: Leaf


@struct.dataclass
class Draws:
    """What to draw, per row.

    token_B: int32, the input. budget_B: int32, draws allowed in this call (0: the row sits it out). seed_B2: uint32,
    halves of the episode's seed. draw_B: int32, index of its next draw. temperature_B: float32. stop_BN: int32, the
    ids that end the turn, padded with -1.
    """

    token_B: Leaf
    budget_B: Leaf
    seed_B2: Leaf
    draw_B: Leaf
    temperature_B: Leaf
    stop_BN: Leaf


@struct.dataclass
class Members:
    """The rows of each shared prompt: index_PG into B (padded with any row), and each row's place rank_B in G."""

    index_PG: Leaf
    rank_B: Leaf


@struct.dataclass
class Drawn:
    """Tokens drawn [B, T], their float32 log-probs, and how many of the columns are real, per row."""

    token_BT: Leaf
    logp_BT: Leaf
    count_B: Leaf


def extend(
    params: Params,
    adapter: Any,
    store: KV,
    prompts: KV | None,
    rows: Rows,
    tokens_BT: Int[Array, "B T"],
    *,
    config: ModelConfig,
    lora_scale: float,
    positions: int,
    prompt_positions: int = 0,
) -> KV:
    """Append tokens to each row's history and return the store (donate it).

    tokens_BT: right-padded; the padding is written too, beyond the length the caller then gives the row.

    positions, prompt_positions: static bounds on the lengths in `rows` (their buckets). With prompts=None the
    rows have no shared prompt; this is also how a prompt itself is prefilled, with the prompt store as `store`.
    """
    b, t = tokens_BT.shape
    start_B = rows.prompt_length_B + rows.length_B
    positions_BT = start_B[:, None] + jnp.arange(t)
    main = cache.read(store, jnp.minimum(rows.slot_B, store.rows - 1), positions)
    prompt = None if prompts is None else cache.read(prompts, rows.prompt_B, prompt_positions)
    own_T = jnp.arange(t)
    own_mask = own_T[:, None] >= own_T[None, :]
    new: list[tuple[jax.Array, jax.Array]] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, i: int, window: int | None) -> jax.Array:
        k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        new.append((k, v))
        seen = partial(within, positions_BT, window=window)
        parts = [part(q, k, v, own_mask & seen(positions_BT))]
        parts.append(
            part(q, main.k[i], main.v[i], _filled(rows.length_B, positions) & seen(_main_positions(rows, positions)))
        )
        if prompt is not None:
            keys = jnp.broadcast_to(jnp.arange(prompt_positions), (b, prompt_positions))
            mask = _filled(rows.prompt_length_B, prompt_positions) & seen(keys)
            parts.append(part(q, prompt.k[i], prompt.v[i], mask))
        return merge(parts)

    _through_layers(params, adapter, tokens_BT, positions_BT, attend, config=config, lora_scale=lora_scale)
    written = KV(k=tuple(k for k, _ in new), v=tuple(v for _, v in new))
    return cache.write(store, rows.slot_B, rows.length_B, written)


def decode(
    params: Params,
    adapter: Any,
    store: KV,
    prompts: KV | None,
    rows: Rows,
    draws: Draws,
    members: Members | None,
    *,
    config: ModelConfig,
    lora_scale: float,
    steps: int,
    positions: int | None,
    prompt_positions: int = 0,
) -> tuple[KV, Drawn]:
    """Draw up to `steps` tokens per row, stopping a row at its budget or at a stop id; return (store, drawn).

    positions: bound on the lengths, or None when the rows are all rows of the store in order (then the store is
    read where it lies). members is given exactly when prompts is.
    """
    b = rows.slot_B.shape[0]
    whole = positions is None
    span = store.positions if positions is None else positions
    main = cache.read(store, None if whole else jnp.minimum(rows.slot_B, store.rows - 1), span)
    prompt = None if prompts is None else cache.read(prompts, jnp.arange(prompts.rows), prompt_positions)
    start_B = rows.prompt_length_B + rows.length_B
    dtype = store.k[0].dtype

    def step(state: tuple) -> tuple:
        t, token_B, live_B, drawn, tail = state
        positions_B1 = (start_B + t)[:, None]
        tails: list[tuple[jax.Array, jax.Array]] = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, i: int, window: int | None) -> jax.Array:
            tail_k = lax.dynamic_update_slice_in_dim(tail.k[i], k.transpose(0, 2, 3, 1).astype(dtype), t, axis=3)
            tail_v = lax.dynamic_update_slice_in_dim(tail.v[i], v.transpose(0, 2, 1, 3).astype(dtype), t, axis=2)
            tails.append((tail_k, tail_v))
            seen = partial(within, positions_B1, window=window)
            tail_T = jnp.arange(steps)
            tail_mask = (tail_T <= t)[None, None] & seen(start_B[:, None] + tail_T)
            main_mask = _filled(rows.length_B, span) & seen(_main_positions(rows, span))
            parts = [part(q, tail_k, tail_v, tail_mask), part(q, main.k[i], main.v[i], main_mask)]
            if prompt is not None and members is not None:
                parts.append(_prompt_part(q, prompt.k[i], prompt.v[i], rows, members, positions_B1, window))
            return merge(parts)

        x = _through_layers(
            params, adapter, token_B[:, None], positions_B1, attend, config=config, lora_scale=lora_scale
        )
        uniform_B = uniforms(draws.seed_B2, draws.draw_B + t)
        next_B, logp_B = draw(logits(params, x[:, 0], config), uniform_B, draws.temperature_B)

        count_B = drawn.count_B + live_B.astype(jnp.int32)
        drawn = Drawn(
            token_BT=lax.dynamic_update_slice_in_dim(drawn.token_BT, next_B[:, None], t, axis=1),
            logp_BT=lax.dynamic_update_slice_in_dim(drawn.logp_BT, logp_B[:, None], t, axis=1),
            count_B=count_B,
        )
        stopped_B = (next_B[:, None] == draws.stop_BN).any(-1)
        live_B = live_B & ~stopped_B & (count_B < draws.budget_B)
        return t + 1, next_B, live_B, drawn, KV(k=tuple(k for k, _ in tails), v=tuple(v for _, v in tails))

    def more(state: tuple) -> jax.Array:
        return (state[0] < steps) & state[2].any()

    nothing = Drawn(
        token_BT=jnp.zeros((b, steps), jnp.int32),
        logp_BT=jnp.zeros((b, steps), jnp.float32),
        count_B=jnp.zeros((b,), jnp.int32),
    )
    state = (jnp.int32(0), draws.token_B, draws.budget_B > 0, nothing, cache.empty(config, b, steps, dtype))
    _, _, _, drawn, tail = lax.while_loop(more, step, state)
    return cache.write(store, rows.slot_B, rows.length_B, tail), drawn


def _through_layers(
    params: Params,
    adapter: Any,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    attend: Callable[..., jax.Array],
    *,
    config: ModelConfig,
    lora_scale: float,
) -> jax.Array:
    """Hidden states [B, T, M] of every layer in turn, unrolled: `attend` is told which one it serves."""
    x = embed(params, tokens_BT)
    for i, (layer, window) in enumerate(zip(params["layers"], config.layer_windows, strict=True)):
        attend_here = partial(attend, i=i, window=window)
        adapter_here = at_layer(adapter, i)
        x = block(x, layer, adapter_here, positions_BT, attend_here, config=config, lora_scale=lora_scale)
    return x


def _prompt_part(
    q_B1HC: jax.Array,
    k_PKCS: jax.Array,
    v_PKSC: jax.Array,
    rows: Rows,
    members: Members,
    positions_B1: jax.Array,
    window: int | None,
) -> Part:
    """Attention of every row to its group's prompt, each prompt read once for all of its members.

    A row without a prompt has no place in `members`; what its index picks is another row's, and is emptied.
    """
    span = k_PKCS.shape[3]
    length_PG = rows.prompt_length_B[members.index_PG]
    keys_PS = jnp.broadcast_to(jnp.arange(span), (k_PKCS.shape[0], span))
    mask_PGS = (keys_PS[:, None] < length_PG[..., None]) & within(positions_B1[:, 0][members.index_PG], keys_PS, window)
    shared = part(q_B1HC[:, 0][members.index_PG], k_PKCS, v_PKSC, mask_PGS)
    own = (rows.prompt_B, slice(None), slice(None), members.rank_B)

    def pick(x: jax.Array, nothing: float) -> jax.Array:
        chosen = x[own][:, :, :, None]
        has_prompt = rows.prompt_length_B.reshape(-1, *[1] * (chosen.ndim - 1)) > 0
        return jnp.where(has_prompt, chosen, nothing)

    return Part(pick(shared.out, 0.0), pick(shared.top, EMPTY), pick(shared.total, 0.0))


def _filled(length_B: jax.Array, span: int) -> Bool[Array, "B 1 S"]:
    return (jnp.arange(span)[None] < length_B[:, None])[:, None]


def _main_positions(rows: Rows, span: int) -> Int[Array, "B S"]:
    return rows.prompt_length_B[:, None] + jnp.arange(span)[None]
