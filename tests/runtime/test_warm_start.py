"""A warm start imitates: the loss falls, it is a function of its seed, and it can be interrupted."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from episodes import RENDERER, TALKER, talker

from jaxrl.runtime.learner import Packing
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart, _batches, run_warm_start
from jaxrl.types import Datum, Message

pytestmark = pytest.mark.slow


class Counter(Demonstrator):
    """Says two digits, one a turn."""

    def play(self, rng: np.random.Generator) -> Demonstration:
        first = int(rng.integers(0, 8))
        said = [Message("assistant", str(first + i)) for i in range(2)]
        return Demonstration([Message("user", "count"), said[0], Message("user", "on"), said[1]])


def start(log: Path, steps: int, **options: Any) -> Any:
    config = WarmStart(Counter(), steps=steps, batch_size=8, learning_rate=3e-2)
    return run_warm_start(
        config, TALKER, talker().params, RENDERER, packing=Packing((32, 64), 8), seed=1, log=log, **options
    )


def test_the_loss_falls_and_the_rate_climbs_and_decays(tmp_path: Path) -> None:
    params = start(tmp_path / "m.jsonl", 20)
    steps = read_metrics(tmp_path / "m.jsonl")
    losses = [m["optim/loss"] for m in steps]
    assert len(losses) == 20
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])
    rates = [m["optim/lr"] for m in steps]
    assert rates[0] < max(rates) == pytest.approx(3e-2)
    assert rates[-1] < 1e-3
    assert steps[0]["data/datums"] == 8
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert jax.tree.structure(params) == jax.tree.structure(talker().params)


def test_it_stops_where_it_is_asked_to(tmp_path: Path) -> None:
    calls = iter(range(10))

    def checkpoint() -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "m.jsonl", 20, checkpoint=checkpoint)
    assert len(read_metrics(tmp_path / "m.jsonl")) == 2


def shown(seed: int, batches: int = 3) -> list[list[list[int]]]:
    stream = _batches(WarmStart(Counter(), batch_size=4), RENDERER, seed)
    return [[d.tokens.tolist() for d in next(stream)] for _ in range(batches)]


def test_I7_demonstrations_are_a_function_of_the_seed_and_the_step() -> None:
    assert shown(1) == shown(1)
    assert shown(1) != shown(2)
    assert len({str(batch) for batch in shown(1)}) == 3


def test_every_demonstration_is_an_episode_of_its_own() -> None:
    batch: list[Datum] = next(_batches(WarmStart(Counter(), batch_size=4), RENDERER, 0))
    assert [d.episode for d in batch] == [0, 1, 2, 3]
    assert all((d.advantages == d.mask).all() for d in batch)


@pytest.mark.parametrize("name", ["steps", "batch_size"])
def test_I12_a_warm_start_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"warm_start.{name}=0: expected at least 1"):
        WarmStart(Counter(), **{name: 0})


def test_what_is_no_demonstrator_or_no_demonstration_is_refused() -> None:
    class Lists(Demonstrator):
        def play(self, rng: np.random.Generator) -> Any:
            return [Message("assistant", "1")]

    with pytest.raises(TypeError, match=r"play of Lists returned \[Message\(.*: expected a Demonstration"):
        next(_batches(WarmStart(Lists()), RENDERER, 0))
    for wrong in (Counter, 30):
        given: Any = wrong
        with pytest.raises(TypeError, match=r"warm_start\.demonstrator=.*: expected a Demonstrator"):
            WarmStart(given)
