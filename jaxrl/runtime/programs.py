"""The engine's device half: the key/value stores and the two compiled programs that fill them.

Owns the arrays. Its methods block on the device and are called one at a time, through the run's limiter; they take
plain rows and return numbers. Knows nothing of sessions, of trio, or of which policy is live: weights are arguments.
"""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import cache
from jaxrl.models.config import ModelConfig
from jaxrl.models.decode import Drawn, Draws, Members, Rows, decode, extend
from jaxrl.runtime.schedule import (
    MAX_STOP_IDS,
    EngineConfig,
    Row,
    bucket,
    member_arrays,
    padded_tokens,
    row_arrays,
)
from jaxrl.runtime.weights import Policy


class Draw(NamedTuple):
    """One row of `models.decode.Draws`."""

    token_B: int
    budget_B: int
    seed_B2: tuple[int, int]
    draw_B: int
    temperature_B: float
    stop_BN: tuple[int, ...]


@functools.cache
def _program(run: Any, **static: Any) -> Any:
    """`extend` or `decode`, jitted for a model; engines of equal models share it, so many runs compile once."""
    lengths = ("positions", "prompt_positions")
    return jax.jit(partial(run, **static), static_argnames=lengths, donate_argnames="store")


class Programs:
    """Owns the stores of episodes and of prompts."""

    def __init__(self, model: ModelConfig, config: EngineConfig, lora_scale: float, dtype: jnp.dtype) -> None:
        self._config = config
        self._main = cache.empty(model, config.slots, config.context + config.slack, dtype)
        self._prompts = cache.empty(model, config.prompts, config.prompt_context + config.slack, dtype)
        self._extend = _program(extend, config=model, lora_scale=lora_scale)
        self._decode = _program(decode, config=model, lora_scale=lora_scale, steps=config.decode_steps)

    @property
    def compiled(self) -> int:
        """Programs compiled so far, for this engine and for those of equal models."""
        return self._extend._cache_size() + self._decode._cache_size()

    def extend(self, policy: Policy, rows: Sequence[Row], tokens: Sequence[Sequence[int]], length: int) -> None:
        """Append at most `length` tokens to each row of the main store."""
        self._main = self._extended(self._main, self._config.positions, policy, rows, tokens, length)

    def extend_prompt(self, policy: Policy, row: Row, tokens: Sequence[int], length: int) -> None:
        """Append at most `length` tokens to a row of the prompt store."""
        spans = self._config.prompt_positions
        self._prompts = self._extended(self._prompts, spans, policy, [row], [tokens], length)

    def _extended(
        self,
        store: cache.KV,
        spans: Sequence[int],
        policy: Policy,
        rows: Sequence[Row],
        tokens: Sequence[Sequence[int]],
        length: int,
    ) -> cache.KV:
        size = bucket(len(rows), self._config.rows)
        prompts, prompt_positions = self._shared(rows)
        return self._extend(
            *policy.arrays(),
            store=store,
            prompts=prompts,
            rows=Rows(**_to_device(row_arrays(rows, size, padding_slot=store.rows))),
            tokens_BT=jnp.asarray(padded_tokens(tokens, size, length)),
            positions=bucket(max(r.length for r in rows), spans),
            prompt_positions=prompt_positions,
        )

    def decode(self, policy: Policy, rows: Sequence[Row], draws: Sequence[Draw]) -> tuple[Drawn, int]:
        """Draw a chunk for each row: what was drawn, in the order of `rows`, and how many rows the call had, padded."""
        config = self._config
        size = bucket(len(rows), config.rows)
        span = bucket(max(r.length for r in rows), config.positions)
        whole = size == config.slots and span == config.context
        # With every slot in order the store is read where it lies; else its rows are gathered once a call.
        places = [r.slot for r in rows] if whole else list(range(len(rows)))
        rows_B, draws_B = [Row(self._main.rows, 0)] * size, [_NO_DRAW] * size
        for place, row, draw in zip(places, rows, draws, strict=True):
            rows_B[place], draws_B[place] = row, draw
        drawn = self._decoded(policy, rows_B, draws_B, None if whole else span)
        return jax.tree.map(lambda x: np.asarray(x)[places], drawn), size

    def _decoded(self, policy: Policy, rows: list[Row], draws: list[Draw], positions: int | None) -> Drawn:
        config = self._config
        prompts, prompt_positions = self._shared(rows)
        members = member_arrays(rows, len(rows), config.prompts, config.members)
        self._main, drawn = self._decode(
            *policy.arrays(),
            store=self._main,
            prompts=prompts,
            rows=Rows(**_to_device(row_arrays(rows, len(rows), padding_slot=self._main.rows))),
            draws=Draws(**_to_device(_draw_arrays(draws))),
            members=None if prompts is None else Members(**_to_device(members)),
            positions=positions,
            prompt_positions=prompt_positions,
        )
        return drawn

    def _shared(self, rows: Sequence[Row]) -> tuple[cache.KV | None, int]:
        longest = max(r.prompt_length for r in rows)
        if not longest:
            return None, 0
        return self._prompts, bucket(longest, self._config.prompt_positions)


_NO_DRAW = Draw(0, 0, (0, 0), 0, 1.0, ())
_DRAW_DTYPES = (np.int32, np.int32, np.uint32, np.int32, np.float32, np.int32)


def _draw_arrays(draws: Sequence[Draw]) -> dict[str, np.ndarray]:
    padded = [d._replace(stop_BN=d.stop_BN + (-1,) * (MAX_STOP_IDS - len(d.stop_BN))) for d in draws]
    columns = zip(*padded, strict=True)
    return {name: np.array(c, t) for name, c, t in zip(Draw._fields, columns, _DRAW_DTYPES, strict=True)}


def _to_device(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x) for name, x in arrays.items()}
