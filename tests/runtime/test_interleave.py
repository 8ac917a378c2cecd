"""Datasets mixed by weight: everybody's share at every moment, nothing lost, nothing twice, any batch at once."""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from episodes import RENDERER, CountingBuilder
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.env import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from jaxrl.runtime.interleave import (
    ConcatenatedDataset,
    InterleavedDataset,
    InterleavedDatasetBuilder,
    SourceGroupBuilder,
    source_names,
    turns,
)

WEIGHTS = st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 5.0, allow_subnormal=False)), min_size=1, max_size=6)


@dataclass(frozen=True)
class Named(EnvGroupBuilder):
    """A group that is only a name."""

    name: str

    async def make_envs(self) -> Sequence[Env]:
        return []

    def describe(self) -> str:
        return self.name

    def logging_tags(self) -> Sequence[str]:
        return ("named",)


@dataclass(frozen=True)
class Letters(RLDataset):
    """`count` groups in batches of `width`."""

    letter: str
    count: int
    width: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        assert 0 <= index < len(self)
        start = index * self.width
        return [Named(f"{self.letter}{i}") for i in range(start, min(start + self.width, self.count))]

    def __len__(self) -> int:
        return -(-self.count // self.width)


def names(batch: Sequence[EnvGroupBuilder]) -> list[str]:
    return [builder.describe() for builder in batch]


def all_names(dataset: RLDataset) -> list[str]:
    return [name for i in range(len(dataset)) for name in names(dataset.get_batch(i))]


# --- the schedule --------------------------------------------------------------------------------


def test_the_turns_of_two_to_one_by_hand() -> None:
    # Windows of the first: [0, 2), [1, 3); of the second: [0, 3). The one due first goes first; ties go to the first.
    assert turns((2, 1), 7).sources(0, 7) == [0, 0, 1, 0, 0, 1, 0]


@given(weights=WEIGHTS, slots=st.integers(1, 200))
def test_after_any_number_of_slots_each_source_is_within_one_of_its_share(weights: list[float], slots: int) -> None:
    schedule = turns(weights, slots)
    exact = [Fraction(str(float(w))) for w in weights]
    had = Counter[int]()
    for n, source in enumerate(schedule.sources(0, slots), start=1):
        had[source] += 1
        for s, weight in enumerate(exact):
            assert abs(had[s] - n * weight / sum(exact)) < 1
        if n < slots:
            assert schedule.before(n).tolist() == [had[s] for s in range(len(weights))]


def test_the_schedule_repeats_so_that_a_far_slot_costs_what_a_near_one_does() -> None:
    schedule = turns((0.7, 0.2, 0.1), 10**12)
    assert len(schedule.cycle) == 10
    assert schedule.before(10**11).tolist() == [7 * 10**10, 2 * 10**10, 10**10]
    assert schedule.sources(10**11, 10**11 + 10) == schedule.sources(0, 10)


# --- the dataset ---------------------------------------------------------------------------------


def test_N23_ragged_sources_of_5_and_3_in_batches_of_4_are_all_seen_once() -> None:
    dataset = InterleavedDataset([Letters("a", 5, 2), Letters("b", 3, 2)], (5, 3), groups_per_batch=4)
    assert len(dataset) == 2
    batches = [names(dataset.get_batch(i)) for i in range(2)]
    assert [len(batch) for batch in batches] == [4, 4]
    assert sorted(all_names(dataset)) == ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "b2"]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    groups=st.integers(1, 7),
    batches=st.integers(1, 12),
    seed=st.integers(0, 3),
)
def test_every_epoch_of_a_source_has_each_of_its_groups_once(
    sizes: list[tuple[int, int]], weights: list[int], groups: int, batches: int, seed: int
) -> None:
    sources = [Letters("abcd"[s], count, width) for s, (count, width) in enumerate(sizes)]
    chosen = weights[: len(sources)]
    dataset = InterleavedDataset(sources, chosen, groups, batches, seed)
    seen = [names(dataset.get_batch(i)) for i in range(len(dataset))]
    assert [len(batch) for batch in seen] == [groups] * batches
    counts = Counter(name for batch in seen for name in batch)
    for s, source in enumerate(sources):
        of_source = {f"{source.letter}{i}": counts[f"{source.letter}{i}"] for i in range(source.count)}
        total = sum(of_source.values())
        assert abs(total - Fraction(groups * batches * chosen[s], sum(chosen))) < 1
        whole, started = divmod(total, source.count)  # the epochs that ended, and how far the last one came
        assert list(of_source.values()) == [whole + (i < started) for i in range(source.count)]
    assert sum(counts.values()) == groups * batches


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 3.0), min_size=4, max_size=4),
)
def test_without_a_number_of_batches_it_is_the_most_that_repeat_nothing(
    counts: list[int], weights: list[float]
) -> None:
    sources = [Letters("abcd"[s], count, 3) for s, count in enumerate(counts)]
    ended = InterleavedDataset(sources, weights[: len(counts)], 1)
    seen = all_names(ended)
    assert len(seen) == len(set(seen))
    longer = all_names(InterleavedDataset(sources, weights[: len(counts)], 1, len(ended) + 1))
    assert longer[: len(seen)] == seen
    assert len(set(longer)) < len(longer), "one batch more would have repeated a group"


def test_I7_a_batch_is_a_function_of_seed_and_index_asked_for_in_any_order() -> None:
    def dataset(seed: int) -> InterleavedDataset:
        return InterleavedDataset([Letters("a", 7, 3), Letters("b", 4, 4)], (0.6, 0.4), 5, 9, seed)

    forwards = [names(dataset(1).get_batch(i)) for i in range(9)]
    fresh = {i: names(dataset(1).get_batch(i)) for i in (8, 0, 5, 3)}
    assert all(forwards[i] == batch for i, batch in fresh.items())
    other = [names(dataset(2).get_batch(i)) for i in range(9)]
    assert other != forwards
    assert [sorted(batch) for batch in other] == [sorted(batch) for batch in forwards], "the seed only orders"


def test_a_batch_is_shuffled_and_not_by_source() -> None:
    dataset = InterleavedDataset([Letters("a", 50, 10), Letters("b", 50, 10)], (1, 1), 10, 10)
    patterns = {"".join(name[0] for name in names(dataset.get_batch(i))) for i in range(10)}
    assert len(patterns) == 10


def test_a_resumed_run_asks_its_sources_for_what_it_needs_only() -> None:
    asked: list[int] = []

    class Watched(Letters):
        def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
            asked.append(index)
            return super().get_batch(index)

    dataset = InterleavedDataset([Watched("a", 100_000, 4), Letters("b", 10, 4)], (1, 1), 8, 10_000)
    asked.clear()
    batch = names(dataset.get_batch(9_000))
    assert asked == [9_000]
    assert sorted(name for name in batch if name[0] == "a") == [f"a{36_000 + i}" for i in range(4)]


def test_a_group_that_comes_twice_in_a_batch_is_two_builders() -> None:
    batch = InterleavedDataset([Letters("a", 2, 2)], (1,), 4, 1).get_batch(0)
    assert sorted(names(batch)) == ["a0", "a0", "a1", "a1"]
    inner = [builder.builder for builder in batch if isinstance(builder, SourceGroupBuilder)]
    assert len({id(builder) for builder in inner}) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": (1,)}, r"weights=\[1\] for 2 sources"),
        ({"weights": (1, 0)}, r"weights=\[1, 0\]: expected numbers above 0"),
        ({"weights": (1, float("nan"))}, "expected numbers above 0"),
        ({"groups_per_batch": 0}, "groups_per_batch=0: expected at least 1"),
        ({"batches": 0}, "batches=0: expected at least 1"),
        ({"seed": -1}, "seed=-1: expected at least 0"),
        ({"names": ("x", "x")}, "expected one for each, all different"),
        ({"sources": (Letters("a", 3, 2), Letters("b", 0, 2))}, "source '1' is empty"),
        ({"groups_per_batch": 50}, "hold without starting again"),
    ],
)
def test_wrong_mixtures_are_refused(change: dict, message: str) -> None:
    right = {"sources": (Letters("a", 3, 2), Letters("b", 3, 2)), "weights": (1, 1), "groups_per_batch": 2}
    InterleavedDataset(**right)
    with pytest.raises(ValueError, match=message):
        InterleavedDataset(**{**right, **change})


def test_a_source_whose_batches_shrink_in_the_middle_is_found_out() -> None:
    class Odd(Letters):
        def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
            return super().get_batch(index)[: 1 if index == 1 else None]

    dataset = InterleavedDataset([Odd("a", 6, 2)], (1,), 2)
    with pytest.raises(ValueError, match="batch 1 of source '0' has 1 groups; expected 2"):
        dataset.get_batch(1)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_batch_that_does_not_exist(index: int) -> None:
    with pytest.raises(IndexError, match="of a dataset of 2 batches"):
        InterleavedDataset([Letters("a", 4, 2)], (1,), 2).get_batch(index)


# --- the builder, and what a group becomes ---------------------------------------------------------


@dataclass(frozen=True)
class LettersBuilder(RLDatasetBuilder):
    letter: str
    count: int
    test: int = 0

    async def __call__(self, renderer: Any) -> tuple[RLDataset, RLDataset | None]:
        held_out = Letters(self.letter.upper(), self.test, 2) if self.test else None
        return Letters(self.letter, self.count, 2), held_out


async def test_held_out_data_is_every_sources_one_after_another_with_its_tag() -> None:
    sources = (LettersBuilder("a", 4, test=3), LettersBuilder("b", 4), LettersBuilder("c", 4, test=1))
    builder = InterleavedDatasetBuilder(sources, (2, 1, 1), groups_per_batch=4, names=("x", "y", "z"))
    train, test = await builder(RENDERER)
    assert len(train) == 2, "the third batch would need a fifth group of a"
    assert isinstance(test, ConcatenatedDataset)
    assert all_names(test) == ["A0", "A1", "A2", "C0"]
    tags = {b.describe(): tuple(b.logging_tags()) for i in range(len(test)) for b in test.get_batch(i)}
    assert tags["A2"] == ("named", "source/x")
    assert tags["C0"] == ("named", "source/z")
    assert {tag for b in train.get_batch(0) for tag in b.logging_tags()} == {
        "named",
        "source/x",
        "source/y",
        "source/z",
    }


async def test_without_any_held_out_data_there_is_none_and_types_are_the_names() -> None:
    builder = InterleavedDatasetBuilder((LettersBuilder("a", 4), LettersBuilder("b", 4)), (1, 1), 2, total_batches=3)
    train, test = await builder(RENDERER)
    assert test is None
    assert len(train) == 3
    tags = {tag for b in train.get_batch(0) for tag in b.logging_tags()}
    assert tags == {"named", "source/LettersBuilder_0", "source/LettersBuilder_1"}


async def test_wrong_weights_are_found_before_a_source_is_built() -> None:
    class Slow(LettersBuilder):
        async def __call__(self, renderer: Any) -> tuple[RLDataset, RLDataset | None]:
            raise AssertionError("built")

    with pytest.raises(ValueError, match="weights"):
        await InterleavedDatasetBuilder((Slow("a", 1),), (1, 2), 1)(RENDERER)


def test_names_of_sources() -> None:
    assert source_names([1, 2], None) == ("0", "1")
    assert source_names([1], ["x"]) == ("x",)


async def test_a_marked_group_is_the_group_in_all_it_does() -> None:
    log: list[str] = []
    inner = CountingBuilder(log, size=2)
    marked = SourceGroupBuilder(inner, "s")
    envs = await marked.make_envs()
    assert len(envs) == 2
    assert await marked.compute_group_rewards([], envs) == []
    await marked.cleanup()
    assert log == ["make_envs", "compute_group_rewards", "cleanup"]
    assert (marked.describe(), marked.logging_tags()) == ("count", ("source/s",))


def test_a_marked_group_pickles_and_stays_coupled() -> None:
    class Coupled(Named):
        coupled = True

    assert SourceGroupBuilder(Coupled("x"), "s").coupled
    again = pickle.loads(pickle.dumps(SourceGroupBuilder(Named("x"), "s")))
    assert (again, again.coupled) == (SourceGroupBuilder(Named("x"), "s"), False)
