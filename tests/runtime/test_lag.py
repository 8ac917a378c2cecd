"""A gap between sampler and trainer that is set, not suffered: whose weights sample which step, and who refuses it."""

from pathlib import Path
from typing import Any

import chz
import jax
import numpy as np
import pytest
from conftest_runtime import LORA, MODEL, SmallPolicy, random_adapter
from small_run import small, write_model

from jaxrl.runtime.engine import Engine
from jaxrl.runtime.lag import Lag, SamplerGap, noise_key, perturbed
from jaxrl.runtime.learner import Learner
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.record import read_records
from jaxrl.runtime.weights import Weights
from jaxrl.train import AsyncConfig, StreamMinibatchConfig, main, parse


def fresh(seed: int) -> Any:
    return random_adapter(MODEL, LORA, seed)


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(tree)]


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def donate(tree: Any) -> None:
    jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(tree)


@pytest.mark.parametrize("behind", [1, 3])
def test_I8_step_s_samples_with_the_weights_of_step_s_minus_the_gap(policy: SmallPolicy, behind: int) -> None:
    lag = Lag(SamplerGap(behind), seed=0)
    for step in range(6):
        live = Weights(policy.weights.params, fresh(step))
        weights, version = lag.sampling(live, step)
        assert (version, lag.step) == (step - min(step, behind), step)
        assert same(weights.adapter, fresh(version))
        assert weights.params is live.params
        donate(live.adapter)  # as the update does; what was sampled from must survive it
        assert not any(x.is_deleted() for x in jax.tree.leaves(weights.adapter))


def test_only_the_adapters_that_are_still_needed_are_kept(policy: SmallPolicy) -> None:
    lag = Lag(SamplerGap(2), seed=0)
    for step in range(9):
        lag.sampling(Weights(policy.weights.params, fresh(step)), step)
    assert len(lag._kept) == 3


def test_I7_noise_is_a_function_of_seed_and_step(policy: SmallPolicy) -> None:
    def sampled(seed: int, step: int) -> Any:
        lag = Lag(SamplerGap(noise=0.1), seed=seed)
        for earlier in range(step):
            lag.sampling(policy.weights, earlier)
        weights, version = lag.sampling(policy.weights, step)
        assert version == step
        return weights.adapter

    assert same(sampled(3, 2), sampled(3, 2))
    assert not same(sampled(3, 2), sampled(3, 1))
    assert not same(sampled(3, 2), sampled(4, 2))


def test_noise_has_the_size_it_was_given_in_every_array_and_none_where_all_is_zero(policy: SmallPolicy) -> None:
    adapter = policy.weights.adapter | {"zero": {"b": np.zeros((3, 4), np.float32)}}
    noisy = perturbed(adapter, noise_key(0, 0), 0.2)
    for new, old in zip(arrays(noisy), arrays(adapter), strict=True):
        size = np.sqrt(np.mean(old**2))
        assert np.sqrt(np.mean((new - old) ** 2)) == pytest.approx(0.2 * size, rel=0.25)
        assert new.dtype == old.dtype
    moved = [(n - o).ravel()[:8] for n, o in zip(arrays(noisy), arrays(adapter), strict=True) if o.any()]
    assert len({tuple(np.sign(m)) for m in moved}) > 1, "every array has noise of its own"


def test_I10_steps_out_of_order_are_refused(policy: SmallPolicy) -> None:
    lag = Lag(SamplerGap(1), seed=0)
    lag.sampling(policy.weights, 0)
    with pytest.raises(ValueError, match=r"step 4 comes after step 0; past weights are not checkpointed"):
        lag.sampling(policy.weights, 4)
    with pytest.raises(ValueError, match="have none: train a LoRA"):
        lag.sampling(Weights(policy.weights.params), 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "has no effect with steps_behind=0 and noise=0"),
        ({"steps_behind": -1}, "steps_behind=-1: expected 0 or more"),
        ({"noise": -0.5}, "noise=-0.5: expected a finite number"),
        ({"noise": float("inf")}, "noise=inf: expected a finite number"),
    ],
)
def test_I12_a_gap_that_is_none_or_nonsense_is_refused(fields: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplerGap(**fields)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model") / "m")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": None}, "sampler_gap keeps an adapter for every step back, and lora=None trains none"),
        ({"off_policy": AsyncConfig(1, 2)}, "sampler_gap with off_policy"),
        ({"stream_minibatch": StreamMinibatchConfig(1)}, "sampler_gap with stream_minibatch"),
        ({"max_steps": 2}, "sampler_gap.steps_behind=2 is never reached: the run has 2 steps"),
    ],
)
def test_I12_a_gap_is_refused_where_it_means_nothing(model: str, tmp_path: Path, changes: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        main(small(model, tmp_path / "run", sampler_gap=SamplerGap(2), **changes))
    assert not (tmp_path / "run").exists()


def test_the_command_line_sets_a_gap() -> None:
    needed = ["model_name=tiny", "log_path=x", "learning_rate=1", "max_tokens=1"]
    assert parse(needed).sampler_gap is None
    assert parse([*needed, "sampler_gap.steps_behind=4"]).sampler_gap == SamplerGap(4)
    assert parse([*needed, "sampler_gap.noise=0.5"]).sampler_gap == SamplerGap(0, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [SamplerGap(2), SamplerGap(1, 0.3)], ids=str)
def test_I8_I15_a_run_samples_old_weights_and_evaluates_new_ones(
    model: str, tmp_path: Path, gap: SamplerGap, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: dict[int, list[np.ndarray]] = {}
    sampled: list[tuple[int, list[np.ndarray]]] = []
    publish, update = Engine.publish, Learner.update

    async def noted(self: Engine, weights: Weights, *, version: int, copy: bool = False) -> None:
        sampled.append((version, arrays(weights.adapter)))
        await publish(self, weights, version=version, copy=copy)

    def watched(self: Learner, data: Any) -> dict[str, float]:
        trained.setdefault(0, arrays(self.weights.adapter))
        metrics = update(self, data)
        trained[len(trained)] = arrays(self.weights.adapter)
        return metrics

    monkeypatch.setattr(Engine, "publish", noted)
    monkeypatch.setattr(Learner, "update", watched)
    run = main(small(model, tmp_path / "run", sampler_gap=gap, max_steps=5, num_groups_to_log=9))

    behind = gap.steps_behind
    assert [m["async/staleness_max"] for m in read_metrics(run / "metrics.jsonl")] == [
        min(step, behind) for step in range(5)
    ]
    for step in range(5):
        old = step - min(step, behind)
        assert versions(run, f"step_{step:06d}") == {old}
        (version, lagging), (newest, live) = sampled[2 * step : 2 * step + 2]
        assert (version, newest) == (old, step + 1)
        assert same(live, trained[step + 1])
        assert same(lagging, trained[old]) == (not gap.noise)
    for step in (0, 2, 5):
        assert versions(run, f"test_{step:06d}") == {step}

    again = chz.replace(
        small(model, run, sampler_gap=gap, max_steps=5), behavior_if_log_dir_exists="resume", num_groups_to_log=9
    )
    with pytest.raises(ValueError, match=r"cannot be resumed: sampler_gap samples with weights of past steps"):
        main(again)


def versions(run: Path, name: str) -> set[int]:
    """Of every sampled token in a file of rollouts."""
    records = read_records(run / "rollouts" / f"{name}.jsonl")
    return {v for record in records for turn in record["turns"] for v in turn["versions"]}
