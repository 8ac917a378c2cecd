"""Datums packed into dense micro-batches of fixed shape.

Knows datums and their weights. Knows nothing about losses or models. A datum of n tokens takes n - 1 positions:
position t holds token t and is asked for token t + 1, so everything about a target (mask, sampler log-prob,
advantage, weight, version) lies at the position that predicts it.

Attention masks are dense [T, T] for now, so `width` should be a small bucket: see `choose_width`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Float

from jaxrl.types import Datum

Leaf = Any
"""An array [N, B, T] of numpy or JAX; inside the step one of [B, T]; in a tree of shardings, a sharding."""


@struct.dataclass
class Batch:
    """N micro-batches of B rows of T positions; the first `count` of them are real, the others cost nothing.

    segments numbers the datums of a row 1, 2, ... and is 0 at padding; positions count from 0 in each datum.
    mask, logp_sampler, advantage, weight and versions belong to the target of a position.
    """

    tokens: Leaf  # int32
    targets: Leaf  # int32
    positions: Leaf  # int32
    segments: Leaf  # int32
    mask: Leaf  # bool
    logp_sampler: Leaf  # float32
    advantage: Leaf  # float32
    weight: Leaf  # float32
    versions: Leaf  # int32
    count: Leaf  # int32, no dimensions


def choose_width(data_D: Sequence[Datum], buckets: Sequence[int]) -> int:
    """The smallest bucket that holds the longest datum."""
    longest = max((len(d.tokens) - 1 for d in data_D), default=0)
    fitting = [width for width in buckets if width >= longest]
    if not fitting:
        raise ValueError(_too_long(data_D, max(buckets, default=0)))
    return min(fitting)


def pack(
    data_D: Sequence[Datum],
    weights_D: Sequence[Float[np.ndarray, "_"]],
    *,
    width: int,
    rows: int,
    micro_batches: int | None = None,
) -> Batch:
    """First-fit-decreasing packing into rows of `width` positions, `rows` rows a micro-batch. Deterministic.

    The number of micro-batches is rounded up to a power of two, or is `micro_batches` where that is given (then
    more is an error), so that the number of shapes, hence of compilations, is bounded.
    """
    filled = _first_fit([len(d.tokens) - 1 for d in data_D], width) if _fits(data_D, width) else []
    count = -(-len(filled) // rows)
    n = _bucket(count) if micro_batches is None else micro_batches
    if count > n:
        raise ValueError(
            f"{len(data_D)} datums need {count} micro-batches of {rows} rows of {width} positions, but "
            f"micro_batches={n}. Allow more, or widen or add rows"
        )
    flat = _empty(n * rows, width)
    for row, members in enumerate(filled):
        start = 0
        for segment, index in enumerate(members, 1):
            start = _write(flat, row, start, segment, data_D[index], weights_D[index])
    shaped = {name: x.reshape(n, rows, width) for name, x in flat.items()}
    return Batch(**shaped, count=np.array(count, np.int32))


def padding_fraction(batch: Batch) -> float:
    """Share of the positions of the real micro-batches that hold no token."""
    real = np.asarray(batch.segments)[: int(batch.count)]
    return float((real == 0).mean()) if real.size else 0.0


def _fits(data_D: Sequence[Datum], width: int) -> bool:
    """True; raises where a datum cannot be packed at all."""
    for d in data_D:
        if len(d.tokens) - 1 > width:
            raise ValueError(_too_long(data_D, width))
        if d.mask[:1].any():
            raise ValueError(
                f"a datum of group {d.group}, episode {d.episode} trains its first token, which nothing predicts"
            )
    return True


def _too_long(data_D: Sequence[Datum], width: int) -> str:
    d = max(data_D, key=lambda d: len(d.tokens))
    return (
        f"a datum of group {d.group}, episode {d.episode} has {len(d.tokens)} tokens and needs {len(d.tokens) - 1} "
        f"positions, but the widest row has {width}. Add a wider bucket, or bound the episode's tokens"
    )


def _first_fit(sizes_D: Sequence[int], width: int) -> list[list[int]]:
    """Datum indices of each row: longest first, each into the first row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes_D)), key=lambda i: (-sizes_D[i], i)):
        row = next((r for r, free in enumerate(room) if free >= sizes_D[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(index)
        room[row] -= sizes_D[index]
    return rows


def _bucket(count: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(count - 1, 0).bit_length()


def _empty(rows: int, width: int) -> dict[str, np.ndarray]:
    shape = (rows, width)
    flat: dict[str, np.ndarray] = {
        name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions", "segments")
    }
    flat |= {name: np.zeros(shape, np.float32) for name in ("logp_sampler", "advantage", "weight")}
    return flat | {"mask": np.zeros(shape, bool), "versions": np.full(shape, -1, np.int32)}


def _write(flat: dict[str, np.ndarray], row: int, start: int, segment: int, d: Datum, weight: np.ndarray) -> int:
    """Put one datum into a row; returns where the next one starts."""
    stop = start + len(d.tokens) - 1
    columns = {
        "tokens": d.tokens[:-1],
        "targets": d.tokens[1:],
        "positions": np.arange(stop - start),
        "segments": segment,
        "mask": d.mask[1:],
        "logp_sampler": d.logprobs[1:],
        "advantage": d.advantages[1:],
        "weight": weight[1:],
        "versions": d.versions[1:],
    }
    for name, values in columns.items():
        flat[name][row, start:stop] = values
    return stop
