"""Whole small runs of every published algorithm, of parts that reach beyond the loss, and of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import WARM, small, write_model

from jaxrl.algo.forms import FormResult
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.shaping import Shaping
from jaxrl.algo.tokens import TokenInputs
from jaxrl.algo.variants import VARIANTS
from jaxrl.models import spec
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.learner import MeshShape
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.policy import load_policy, policy_config, save_policy
from jaxrl.train import AsyncConfig, StreamMinibatchConfig, main

pytestmark = pytest.mark.slow

NEEDS: Mapping[str, dict[str, Any]] = {
    "minirl": {"num_substeps": 2},
    "distillation": {"reference_model": "teacher"},
    "reverse_kl": {"reference_model": "teacher"},
}
"""What a row cannot do without."""

CONSTANT = {"loss_fn_config": {"aggregation_constant": 16.0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "student")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, model: str) -> str:
    """A wider model of the same vocabulary, which says one letter where the student says any."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    config = policy_config(model)
    params = spec.init(spec.param_specs(config), jnp.float32, seed=1)
    params["embed"] = params["embed"].at[:, 0].set(6.0)
    params["lm_head"] = params["lm_head"].at[0, 256:].set(-8.0).at[0, ord("z")].set(2.0)
    save_policy(folder, config, params, "tiny")
    return str(folder)


def run(model: str, log_path: Path, **changes: Any) -> list[dict[str, float]]:
    """The metrics of a short run without held-out tasks."""
    data = {"val_tasks": (), "batch_size": 2, "group_size": 3, **changes.pop("data", {})}
    settings = {"max_steps": 2, "optimizer": OptimizerConfig(), **changes}
    return read_metrics(main(small(model, log_path, data=data, **settings)) / "metrics.jsonl")


@pytest.mark.parametrize("name", VARIANTS)
def test_every_row_trains(name: str, model: str, teacher: str, tmp_path: Path) -> None:
    """On-policy: the first batch clips nothing, except where a row's own anchor or design says otherwise."""
    changes = dict(NEEDS.get(name, {}))
    if VARIANTS[name].aggregation == "seq_mean_token_sum_norm":
        changes |= CONSTANT
    if "reference_model" in changes:
        changes["reference_model"] = teacher
    steps = run(model, tmp_path / "run", loss_fn=name, max_steps=1, **changes)
    for metrics in steps:
        assert metrics["optim/tokens"] > 0
        assert np.isfinite(metrics["optim/loss"])
        assert metrics["optim/grad_norm"] > 0
        if changes.get("num_substeps", 1) == 1:
            assert abs(metrics["optim/kl_sample_train_v1"]) < 1e-5
            assert metrics["optim/clip_fraction"] == 0 or name in ("clip_cov", "cispo")
    reads = VARIANTS[name].kl is not None or name == "reverse_kl"
    assert ("optim/kl_ref" in steps[-1]) == reads


@pytest.mark.parametrize("name", ["distillation", "reverse_kl"])
def test_a_student_comes_closer_to_its_teacher(name: str, model: str, teacher: str, tmp_path: Path) -> None:
    """Rewards play no part: every group teaches, also those that agree."""
    steps = run(
        model, tmp_path / "run", loss_fn=name, reference_model=teacher, max_steps=8, learning_rate=0.03,
        data={"group_size": 4},
    )  # fmt: skip
    assert {m["data/groups_trained"] for m in steps} == {2.0}
    first, last = (np.mean([abs(m["optim/kl_ref"]) for m in part]) for part in (steps[:2], steps[-2:]))
    assert last < first


def test_a_teacher_for_groups_with_its_tag(model: str, teacher: str, tmp_path: Path) -> None:
    config = {"kl": "advantage", "kl_coef": 0.1}
    steps = run(model, tmp_path / "run", loss_fn="reinforce", loss_fn_config=config, teachers={"nobody": teacher})
    assert abs(steps[0]["optim/kl_ref"]) < 1e-5, "no group has the tag, and the base is what is trained"


@pytest.mark.parametrize(
    "config",
    [
        {"advantage": "gigpo", "gamma": 0.9},
        {"advantage": "turn_returns", "gamma": 0.9},
        {"advantage": "moving_baseline"},
        {"advantage": "gdpo", "rewards": "success:1"},
        {"kl": "reward", "kl_coef": 0.1},
        {"kl": "advantage_centred", "kl_coef": 0.1, "kl_discount": 0.9},
        {"entropy": "adaptive", "entropy_target": 9.0, "entropy_rate": 0.01},
        {"observation_coef": 0.1},
        {"correction": "geometric_mask+token_truncate"},
    ],
    ids=lambda config: "+".join(map(str, config.values())),
)
def test_parts_in_whole_runs(config: dict[str, Any], model: str, tmp_path: Path) -> None:
    steps = run(model, tmp_path / "run", loss_fn="grpo", loss_fn_config=config, max_steps=3)
    assert all(np.isfinite(m["optim/loss"]) and m["optim/tokens"] > 0 for m in steps)
    if "entropy" in config:
        np.testing.assert_allclose([m["optim/entropy_coef"] for m in steps], [0.0, 0.01, 0.02], atol=1e-6)
    if "observation_coef" in config:
        assert steps[-1]["optim/observation_loss"] > 0


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "cut", [{"overlong_masking": True}, {"shaping": Shaping(clamp_on_limit=True)}], ids=["masked", "clamped"]
)
def test_a_loss_of_pairs_counts_the_groups_that_budgets_have_made_none(
    cut: dict[str, Any], streamed: bool, model: str, tmp_path: Path
) -> None:
    dpo = {"loss": "dpo", "aggregation": "prompt_mean_token_sum"}
    stream = StreamMinibatchConfig(groups_per_minibatch=1) if streamed else None
    settings = {"max_steps": 3, "max_tokens": 4, "stream_minibatch": stream, **cut}
    steps = run(model, tmp_path / "run", loss_fn_config=dpo, data={"batch_size": 4, "group_size": 2}, **settings)
    trained, unpaired = (sum(m[f"data/groups_{name}"] for m in steps) for name in ("trained", "unpaired"))
    assert min(trained, unpaired) > 0
    assert sum(m["data/datums"] for m in steps) == 2 * trained
    assert "data/groups_unpaired" not in run(model, tmp_path / "other", max_steps=1)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stream_minibatch": StreamMinibatchConfig(groups_per_minibatch=1), "warm_start": WARM},
        {"off_policy": AsyncConfig(max_steps_off_policy=1, groups_per_batch=2), "loss_fn": "grpo_kl"},
        {"loss_fn_config": {"advantage": "critic"}, "mesh": MeshShape(fsdp=2)},
    ],
    ids=lambda changes: "+".join(changes) or "in turn",
)
def test_I3_all_weights_train_in_bf16_from_what_the_checkpoint_says(
    changes: dict[str, Any], model: str, tmp_path: Path
) -> None:
    """Kept in float32, not rounded: a step as small as this one would else be lost in the rounding."""
    settings = {"lora": None, "dtype": "bfloat16", "learning_rate": 1e-6, "max_steps": 2, "save_every": 1, **changes}
    steps = run(model, tmp_path / "run", **settings)
    assert all(m["optim/kl_sample_train_v2"] < 5e-3**2 / 2 for m in steps)
    start = tmp_path / "run" / "warm_start" / "model" if "warm_start" in changes else model
    _, begun = load_policy(str(start), dtype=jnp.float32)
    with Checkpointer(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        trained = checkpoints.read(2)["params"]
    for before, after in zip(jax.tree.leaves(begun), jax.tree.leaves(trained), strict=True):
        assert after.dtype == np.float32
        np.testing.assert_allclose(after, before, atol=1e-5, rtol=0)
    assert not all(map(np.array_equal, jax.tree.leaves(begun), jax.tree.leaves(trained)))


def test_substeps_move_the_policy_inside_a_batch(model: str, tmp_path: Path) -> None:
    one, two = (
        run(model, tmp_path / str(n), loss_fn="ppo", num_substeps=n, learning_rate=0.1, max_steps=3) for n in (1, 2)
    )
    assert all(abs(m["optim/kl_sample_train_v1"]) < 1e-5 for m in one)
    assert any(m["optim/kl_sample_train_v2"] > 1e-4 for m in two)


def test_streaming_reads_the_reference_as_a_whole_batch_does(model: str, tmp_path: Path) -> None:
    config = {"kl": "k3", "kl_coef": 0.1}
    whole, parts = (
        run(model, tmp_path / str(bool(stream)), loss_fn="grpo", loss_fn_config=config, stream_minibatch=stream)
        for stream in (None, StreamMinibatchConfig(1))
    )
    for a, b in zip(whole, parts, strict=True):
        assert a["optim/kl_ref"] == pytest.approx(b["optim/kl_ref"], abs=1e-5)


def test_an_asynchronous_run_is_corrected_for_its_age(model: str, tmp_path: Path) -> None:
    steps = run(model, tmp_path / "run", loss_fn="tis", off_policy=AsyncConfig(2, 2), max_steps=4, learning_rate=0.05)
    assert all(np.isfinite(m["optim/loss"]) for m in steps)


def mine(t: TokenInputs, *, strength: float = 1.0) -> FormResult:
    """-strength A r, for the test below."""
    return -strength * t.advantage * jnp.exp(t.log_ratio), jnp.zeros_like(t.mask)


def test_a_form_of_ones_own_by_its_import_path(model: str, tmp_path: Path) -> None:
    own = run(model, tmp_path / "own", loss_fn=f"{__name__}:mine", loss_fn_config={"aggregation": "token_sum"})
    known = run(model, tmp_path / "known", loss_fn="importance_sampling")
    for a, b in zip(own, known, strict=True):
        assert a["optim/loss"] == pytest.approx(b["optim/loss"], rel=1e-5)
    stronger = {"aggregation": "token_sum", "strength": 2}
    twice = run(model, tmp_path / "twice", loss_fn=f"{__name__}:mine", loss_fn_config=stronger)
    assert twice[0]["optim/loss"] == pytest.approx(2 * own[0]["optim/loss"], rel=1e-5)
