"""Datums packed into dense micro-batches of fixed shape.

Knows datums and their weights. Knows nothing about losses or models. A datum of n tokens takes n - 1 positions:
position t holds token t and is asked for token t + 1, so everything about a target (mask, sampler log-prob,
advantage, weight, version) lies at the position that predicts it.

Attention masks are dense [T, T] for now, so `width` should be a small bucket: see `choose_width`.
"""

from collections.abc import Collection, Sequence
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

    segments numbers the datums of a row 1, 2, ... and is 0 at padding; positions count from 0 in each datum. episodes
    and groups number those of the batch from 0. All but tokens, positions and segments belong to the target of a
    position. logp_old, logp_ref, correction: None where the datums were not scored. observed: weights of targets that
    the environment said, None where they are not learned.
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
    episodes: Leaf  # int32
    groups: Leaf  # int32
    count: Leaf  # int32, no dimensions
    logp_old: Leaf = None  # float32
    logp_ref: Leaf = None  # float32
    correction: Leaf = None  # float32
    observed: Leaf = None  # float32


_SCORED = {"logp_old": "logprobs_old", "logp_ref": "logprobs_ref", "correction": "correction"}
"""Optional columns that are read from datums: a batch's name for them, and theirs."""

OPTIONAL = (*_SCORED, "observed")
"""Columns that a batch has only where a loss reads them."""


def choose_width(data_D: Sequence[Datum], buckets: Sequence[int]) -> int:
    """The smallest bucket that holds the longest datum."""
    longest = max((len(d.tokens) - 1 for d in data_D), default=0)
    fitting = [width for width in buckets if width >= longest]
    if not fitting:
        raise ValueError(_too_long(data_D, max(buckets, default=0)))
    return min(fitting)


def pack(
    data_D: Sequence[Datum],
    weights_D: Sequence[Float[np.ndarray, " _"]],
    *,
    width: int,
    rows: int,
    micro_batches: int | None = None,
    columns: Collection[str] = (),
    observed_D: Sequence[Float[np.ndarray, " _"]] = (),
) -> Batch:
    """First-fit-decreasing packing into rows of `width` positions, `rows` rows a micro-batch. Deterministic.

    The number of micro-batches is rounded up to a power of two, or is `micro_batches` where that is given (then
    more is an error), so that the number of shapes, hence of compilations, is bounded. columns: which of the optional
    ones the batch gets (`Loss.columns`); a ValueError if a datum lacks one. observed_D: those of the column `observed`.
    """
    filled = _first_fit([len(d.tokens) - 1 for d in data_D], width) if _fits(data_D, width) else []
    count = -(-len(filled) // rows)
    n = _bucket(count) if micro_batches is None else micro_batches
    if count > n:
        raise ValueError(
            f"{len(data_D)} datums need {count} micro-batches of {rows} rows of {width} positions, but "
            f"micro_batches={n}. Allow more, or widen or add rows"
        )
    flat, columns_D = _empty(n * rows, width, columns), _columns(data_D, weights_D, columns, observed_D)
    for row, members in enumerate(filled):
        start = 0
        for segment, index in enumerate(members, 1):
            start = _write(flat, row, start, columns_D[index] | {"segments": segment})
    shaped = {name: x.reshape(n, rows, width) for name, x in flat.items()}
    return Batch(**shaped, count=np.array(count, np.int32))


def datum_values(values_NBT: np.ndarray, data_D: Sequence[Datum]) -> list[np.ndarray]:
    """The values at the positions of a packed batch, given back to the tokens of its datums; 0 for each first token.

    values_NBT: of the batch that `pack` made of these datums.
    """
    flat = np.asarray(values_NBT).reshape(-1, values_NBT.shape[-1])
    values_D = [np.zeros(len(d.tokens), np.float32) for d in data_D]
    for row, members in enumerate(_first_fit([len(d.tokens) - 1 for d in data_D], flat.shape[1])):
        start = 0
        for index in members:
            stop = start + len(data_D[index].tokens) - 1
            values_D[index][1:] = flat[row, start:stop]
            start = stop
    return values_D


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


def _empty(rows: int, width: int, optional: Collection[str]) -> dict[str, np.ndarray]:
    shape = (rows, width)
    whole = ("tokens", "targets", "positions", "segments", "episodes", "groups")
    flat: dict[str, np.ndarray] = {name: np.zeros(shape, np.int32) for name in whole}
    flat |= {name: np.zeros(shape, np.float32) for name in ("logp_sampler", "advantage", "weight", *optional)}
    return flat | {"mask": np.zeros(shape, bool), "versions": np.full(shape, -1, np.int32)}


def _columns(
    data_D: Sequence[Datum],
    weights_D: Sequence[np.ndarray],
    optional: Collection[str],
    observed_D: Sequence[np.ndarray],
) -> list[dict[str, Any]]:
    """What each datum puts at its positions, by column."""
    episodes = {key: i for i, key in enumerate(sorted({(d.group, d.episode) for d in data_D}))}
    groups = {key: i for i, key in enumerate(sorted({d.group for d in data_D}))}
    columns_D = []
    for index, d in enumerate(data_D):
        of_targets = {
            "mask": d.mask,
            "logp_sampler": d.logprobs,
            "advantage": d.advantages,
            "weight": weights_D[index],
            "versions": d.versions,
            **{name: _scored(d, field) for name, field in _SCORED.items() if name in optional},
            **({"observed": observed_D[index]} if "observed" in optional else {}),
        }
        columns_D.append(
            {name: values[1:] for name, values in of_targets.items()}
            | {
                "tokens": d.tokens[:-1],
                "targets": d.tokens[1:],
                "positions": np.arange(len(d.tokens) - 1),
                "episodes": episodes[d.group, d.episode],
                "groups": groups[d.group],
            }
        )
    return columns_D


def _scored(d: Datum, field: str) -> np.ndarray:
    column = getattr(d, field)
    if column is None:
        raise ValueError(
            f"a datum of group {d.group}, episode {d.episode} has no {field}, which the loss reads: score the batch "
            "before it is packed"
        )
    return column


def _write(flat: dict[str, np.ndarray], row: int, start: int, columns: dict[str, Any]) -> int:
    """Put one datum into a row; returns where the next one starts."""
    stop = start + len(columns["tokens"])
    for name, values in columns.items():
        flat[name][row, start:stop] = values
    return stop
