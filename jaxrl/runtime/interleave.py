"""Several datasets as one: every batch mixes them by weight, by a schedule that is a function of the index.

Knows datasets and group builders. Must not know environments, renderers or training.

The schedule gives every slot of the run to a source so that, after any number of slots, each source has had its share
within one group. The j-th group of a source with share w may come from slot (j - 1) / w on and must have come by slot
j / w; among those that may, the one that must come first is next. With windows like these the earliest deadline never
misses one (Baruah et al., Proportionate progress, 1996). Shares are exact fractions, so the schedule repeats, and the
slot n of any batch is found without drawing those before it. The seed orders the groups inside a batch, nothing else.
"""

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from jaxrl.env import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from jaxrl.types import Metrics, Trajectory

# --- who comes when ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns:
    """Which source each slot belongs to. `cycle` repeats; it holds `counts` slots of each source."""

    cycle: np.ndarray
    counts: np.ndarray

    def sources(self, start: int, stop: int) -> list[int]:
        """The source of each slot in [start, stop)."""
        return self.cycle[np.arange(start, stop) % len(self.cycle)].tolist()

    def before(self, slot: int) -> np.ndarray:
        """How many slots before `slot` each source has."""
        whole, rest = divmod(slot, len(self.cycle))
        return whole * self.counts + np.bincount(self.cycle[:rest], minlength=len(self.counts))


def turns(weights: Sequence[float], slots: int) -> Turns:
    """The turns of sources with these weights. Only the first `slots` will be asked for, so no more are worked out.

    A weight is taken for the number it is written as: 0.1 is one tenth.
    """
    shares = _whole_shares(weights)
    total = sum(shares)
    had = [0] * len(shares)
    cycle = np.zeros(min(total, slots), np.int32)
    for n in range(len(cycle)):
        waiting = [(_deadline(had[s] + 1, w, total), s) for s, w in enumerate(shares) if had[s] * total < (n + 1) * w]
        _, chosen = min(waiting)
        had[chosen] += 1
        cycle[n] = chosen
    return Turns(cycle, np.array(had, np.int64))


def _deadline(j: int, share: int, total: int) -> int:
    """The number of slots among which the j-th group of a source must be."""
    return -(-j * total // share)


def _whole_shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the ratio of the weights, as small as they get."""
    exact = [Fraction(str(float(w))) for w in weights]
    scale = math.lcm(*(f.denominator for f in exact))
    whole = [int(f * scale) for f in exact]
    return [w // math.gcd(*whole) for w in whole]


# --- datasets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stream:
    """The groups of a source one after another, epoch after epoch, each epoch in the source's own order."""

    name: str
    source: RLDataset
    width: int
    groups: int

    def take(self, first: int, count: int) -> list[EnvGroupBuilder]:
        """`count` groups from position `first` on, each marked with the source's name.

        Batches are asked for anew in every epoch: a group that comes twice is two builders.
        """
        taken: list[EnvGroupBuilder] = []
        while len(taken) < count:
            at = (first + len(taken)) % self.groups
            taken += self._batch(at // self.width)[at % self.width :][: count - len(taken)]
        return [SourceGroupBuilder(builder, self.name) for builder in taken]

    def _batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        batch = self.source.get_batch(index)
        expected = min(self.width, self.groups - index * self.width)
        if len(batch) != expected:
            raise ValueError(
                f"batch {index} of source {self.name!r} has {len(batch)} groups; expected {expected}, as all batches "
                "but the last must be of the size of the first"
            )
        return batch


def _stream(name: str, source: RLDataset) -> _Stream:
    """Sizes are read from the first and the last batch: asking for all of them could take minutes."""
    if not len(source):
        raise ValueError(f"source {name!r} is empty: leave it out, or give it tasks")
    width, last = len(source.get_batch(0)), len(source.get_batch(len(source) - 1))
    if not 0 < last <= width:
        raise ValueError(f"source {name!r}: its first batch has {width} groups and its last {last}; expected 1 to all")
    return _Stream(name, source, width, (len(source) - 1) * width + last)


@dataclass(frozen=True)
class InterleavedDataset(RLDataset):
    """Batches of exactly `groups_per_batch` groups, taken from the sources by weight.

    A source is read in its own order, whatever the sizes of its batches, and starts again when it runs out. batches:
    None ends the dataset before the first source would start again. names: of the sources, for the tags
    `source/<name>`; default: their positions.
    """

    sources: Sequence[RLDataset]
    weights: Sequence[float]
    groups_per_batch: int
    batches: int | None = None
    seed: int = 0
    names: Sequence[str] | None = None
    _streams: tuple[_Stream, ...] = field(init=False, repr=False, compare=False)
    _turns: Turns = field(init=False, repr=False, compare=False)
    _length: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.weights, len(self.sources), self.groups_per_batch, self.batches, self.seed)
        names = source_names(self.sources, self.names)
        streams = tuple(_stream(name, source) for name, source in zip(names, self.sources, strict=True))
        schedule = turns(self.weights, self._slots(streams))
        for name, value in (("_streams", streams), ("_turns", schedule), ("_length", self.batches)):
            object.__setattr__(self, name, value)  # frozen
        if self.batches is None:
            object.__setattr__(self, "_length", self._one_epoch())

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`, in an order drawn from the seed."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset of {len(self)} batches")
        start = index * self.groups_per_batch
        order = self._turns.sources(start, start + self.groups_per_batch)
        first, count = self._turns.before(start).tolist(), Counter(order)
        taken = [iter(stream.take(first[s], count[s])) for s, stream in enumerate(self._streams)]
        batch = [next(taken[s]) for s in order]
        return [batch[i] for i in np.random.default_rng([self.seed, index]).permutation(len(batch))]

    def __len__(self) -> int:
        return self._length

    def _slots(self, streams: Sequence[_Stream]) -> int:
        """Slots that the run can have at most."""
        if self.batches is not None:
            return self.batches * self.groups_per_batch
        total = sum(self.weights)  # a source is never more than one group behind its share
        return min(math.ceil((s.groups + 2) * total / w) for s, w in zip(streams, self.weights, strict=True))

    def _one_epoch(self) -> int:
        """The most whole batches in which no source starts again."""
        groups = np.array([stream.groups for stream in self._streams])
        most = self._slots(self._streams) // self.groups_per_batch
        over = lambda b: bool((self._turns.before(b * self.groups_per_batch) > groups).any())  # noqa: E731
        length = bisect.bisect_left(range(1, most + 1), True, key=over)
        if not length:
            raise ValueError(
                f"groups_per_batch={self.groups_per_batch} is more than the sources, of {groups.tolist()} groups, hold "
                "without starting again: lower it, or say how many batches to make"
            )
        return length


@dataclass(frozen=True)
class ConcatenatedDataset(RLDataset):
    """The batches of one source after those of another, each group tagged `source/<name>`."""

    sources: Sequence[RLDataset]
    names: Sequence[str]

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The batch at that position of the whole."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a dataset of {len(self)} batches")
        for name, source in zip(self.names, self.sources, strict=True):
            if index < len(source):
                return [SourceGroupBuilder(builder, name) for builder in source.get_batch(index)]
            index -= len(source)
        raise AssertionError("the index was checked")

    def __len__(self) -> int:
        return sum(map(len, self.sources))


@dataclass(frozen=True)
class InterleavedDatasetBuilder(RLDatasetBuilder):
    """Mixes what other builders make: training data by weight, held-out data one source after another.

    total_batches: None ends before the first source would start again. names: for tags; default: the builders' types.
    """

    sources: tuple[RLDatasetBuilder, ...]
    weights: tuple[float, ...]
    groups_per_batch: int
    total_batches: int | None = None
    seed: int = 0
    names: tuple[str, ...] | None = None

    async def __call__(self, renderer: Any) -> tuple[RLDataset, RLDataset | None]:
        """Checks the numbers before the first source is built, as that may take long."""
        _check(self.weights, len(self.sources), self.groups_per_batch, self.total_batches, self.seed)
        names = source_names(self.sources, self.names or _type_names(self.sources))
        pairs = [await source(renderer) for source in self.sources]
        train = InterleavedDataset(
            [train for train, _ in pairs], self.weights, self.groups_per_batch, self.total_batches, self.seed, names
        )
        held_out = [(test, name) for (_, test), name in zip(pairs, names, strict=True) if test is not None]
        if not held_out:
            return train, None
        return train, ConcatenatedDataset([test for test, _ in held_out], [name for _, name in held_out])


@dataclass(frozen=True)
class SourceGroupBuilder(EnvGroupBuilder):
    """Another builder's group, reported under `source/<name>` too."""

    builder: EnvGroupBuilder
    name: str

    @property
    def coupled(self) -> bool:
        """As the wrapped builder says."""
        return self.builder.coupled

    async def make_envs(self) -> Sequence[Env]:
        """The wrapped builder's envs."""
        return await self.builder.make_envs()

    async def remake(self, member: int) -> Env | None:
        """As the wrapped builder does it."""
        return await self.builder.remake(member)

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        """The wrapped builder's rewards."""
        return await self.builder.compute_group_rewards(trajectories_G, envs_G)

    async def cleanup(self) -> None:
        """The wrapped builder's cleanup."""
        await self.builder.cleanup()

    def logging_tags(self) -> Sequence[str]:
        """The wrapped builder's tags, and the source's."""
        return (*self.builder.logging_tags(), f"source/{self.name}")

    def describe(self) -> str:
        """The group's task."""
        return self.builder.describe()


def source_names(sources: Sequence[object], names: Sequence[str] | None) -> tuple[str, ...]:
    """One name a source, all different; their positions when none are given."""
    chosen = tuple(map(str, range(len(sources)))) if names is None else tuple(names)
    if len(chosen) != len(sources) or len(set(chosen)) != len(chosen):
        raise ValueError(f"names={list(chosen)} for {len(sources)} sources: expected one for each, all different")
    return chosen


def _type_names(sources: Sequence[object]) -> list[str]:
    """The type of each; those that share one are numbered."""
    types = [type(source).__name__ for source in sources]
    return [name if types.count(name) == 1 else f"{name}_{types[:i].count(name)}" for i, name in enumerate(types)]


def _check(weights: Sequence[float], sources: int, groups_per_batch: int, batches: int | None, seed: int) -> None:
    if not sources or len(weights) != sources:
        raise ValueError(f"weights={list(weights)} for {sources} sources: expected one or more, each with its weight")
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(
            f"weights={list(weights)}: expected numbers above 0; leave out a source of which none is wanted"
        )
    for name, value, least in (("groups_per_batch", groups_per_batch, 1), ("batches", batches, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: expected at least {least}")
