"""What the engine runs next, as plain numbers: buckets, batches of rows, and the arrays a program takes.

Pure functions of small records of each session's lengths. Knows nothing of trio, of devices, or of who waits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from jaxrl.settings import ascending, at_least

MAX_STOP_IDS = 8
"""Stop token ids a row may have; fixed, because it is a shape."""


OnPublish = Literal["keep", "recompute"]


@dataclass(frozen=True)
class EngineConfig:
    """Capacity and shapes of the sampling engine. Every bucket is a compiled program.

    on_publish says what happens to keys and values written by older weights when new ones are published:
    "recompute" prefills a live episode again under the new weights before its next token; "keep" goes on with
    them (cheaper, slightly off-policy, and each span's version is recorded).
    """

    slots: int = 64  # episodes that decode together
    context: int = 1024  # positions an episode may hold, its prompt included
    prompts: int = 16  # group prompts kept at once; 0 shares none, which saves programs where prompts are short
    prompt_context: int = 512  # positions of a prompt that are shared; what is longer is prefilled per episode
    members: int = 8  # episodes that may share one prompt
    decode_steps: int = 16  # tokens drawn per row between two visits of the host
    extend_lengths: tuple[int, ...] = (32, 128, 512)
    row_buckets: tuple[int, ...] = ()  # () is a quarter of the slots, and all of them
    position_buckets: tuple[int, ...] = ()  # () is a quarter of the context, and all of it
    on_publish: OnPublish = "recompute"

    def __post_init__(self) -> None:
        for name in ("slots", "context", "prompts", "prompt_context", "members", "decode_steps"):
            at_least(f"engine.{name}", getattr(self, name), 0 if name == "prompts" else 1)
        if self.on_publish not in get_args(OnPublish):
            raise ValueError(f"engine.on_publish={self.on_publish!r}: expected one of {', '.join(get_args(OnPublish))}")
        if self.prompt_context > self.context:
            raise ValueError(
                f"engine.prompt_context={self.prompt_context} is larger than engine.context={self.context}: "
                "a prompt is part of its episode's context; lower the first or raise the second"
            )
        if not self.extend_lengths:
            raise ValueError("engine.extend_lengths is empty: name at least one prefill length, such as 128")
        for name in ("extend_lengths", "row_buckets", "position_buckets"):
            ascending(f"engine.{name}", getattr(self, name))

    @property
    def rows(self) -> tuple[int, ...]:
        """Row buckets, ascending; the last is all slots. Never 1: products with one row are slow in bf16."""
        chosen = self.row_buckets or (self.slots // 4,)
        return tuple(sorted({min(self.slots, max(2, r)) for r in chosen} | {self.slots}))

    @property
    def positions(self) -> tuple[int, ...]:
        """Position buckets, ascending; the last is the whole context."""
        chosen = self.position_buckets or (self.context // 4,)
        return tuple(sorted({p for p in chosen if 0 < p < self.context} | {self.context}))

    @property
    def prompt_positions(self) -> tuple[int, ...]:
        """Position buckets of the prompt store, ascending; none without one."""
        if not self.prompts:
            return ()
        return tuple(sorted({p for p in self.positions if p < self.prompt_context} | {self.prompt_context}))

    @property
    def slack(self) -> int:
        """Spare positions of a stored row, so that no block crosses its end (see `models.cache`)."""
        return max(self.decode_steps, *self.extend_lengths)

    @property
    def compile_budget(self) -> int:
        """The most programs these buckets can need: extend and decode, with and without a shared prompt."""
        rows, spans = len(self.rows), len(self.positions)
        variants = 1 + len(self.prompt_positions)
        extends = rows * len(self.extend_lengths) * (spans * variants + len(self.prompt_positions))
        return extends + rows * spans * variants


def bucket(value: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending buckets that holds `value`; the largest when none does."""
    return next((b for b in buckets if b >= value), buckets[-1])


@dataclass(frozen=True)
class Row:
    """One row of a call: its place in the store, its lengths, and its share of a prompt."""

    slot: int
    length: int
    prompt: int = 0
    prompt_length: int = 0


def row_arrays(rows: Sequence[Row], size: int, padding_slot: int) -> dict[str, np.ndarray]:
    """The fields of `models.decode.Rows`, padded to `size` rows that write nowhere."""
    padded = [*rows, *[Row(padding_slot, 0)] * (size - len(rows))]
    return {
        "slot_B": np.array([r.slot for r in padded], np.int32),
        "length_B": np.array([r.length for r in padded], np.int32),
        "prompt_B": np.array([r.prompt for r in padded], np.int32),
        "prompt_length_B": np.array([r.prompt_length for r in padded], np.int32),
    }


def member_arrays(rows: Sequence[Row], size: int, prompts: int, members: int) -> dict[str, np.ndarray]:
    """The fields of `models.decode.Members` for the rows that share a prompt."""
    index = np.zeros((prompts, members), np.int32)
    rank = np.zeros((size,), np.int32)
    filled = [0] * prompts
    for b, row in enumerate(rows):
        if row.prompt_length:
            rank[b] = filled[row.prompt]
            index[row.prompt, rank[b]] = b
            filled[row.prompt] += 1
    return {"index_PG": index, "rank_B": rank}


def padded_tokens(tokens: Iterable[Sequence[int]], size: int, length: int) -> np.ndarray:
    """Ragged token lists as int32 [size, length], padded with 0."""
    out = np.zeros((size, length), np.int32)
    for b, row in enumerate(tokens):
        out[b, : len(row)] = row
    return out


def batches(lengths: Sequence[int], config: EngineConfig) -> list[tuple[int, list[int]]]:
    """Split rows that wait for prefill into calls: (tokens per row, indices of the rows), in a fixed order.

    A row longer than the largest call gives it that many tokens now and the rest at the next tick.
    """
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(bucket(length, config.extend_lengths), []).append(index)
    most = config.rows[-1]
    return [
        (length, indices[i : i + most])
        for length, indices in sorted(by_length.items())
        for i in range(0, len(indices), most)
    ]
