"""The training state: one update a batch, whole or in parts, what is sampled is what is trained, and a step that
diverged says so."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import forget_programs
from episodes import ENGINE, TALKER, talker

from jaxrl.algo.algorithm import resolve
from jaxrl.algo.loss import make_loss
from jaxrl.algo.objective import Objective
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.step import TrainState
from jaxrl.algo.variants import VARIANTS
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.engine import Engine, open_engine
from jaxrl.runtime.learner import Learner, Packing, Reference
from jaxrl.types import Datum

LORA = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))


def trained_tokens(data_D: Sequence[Datum]) -> int:
    """How many tokens get a gradient."""
    return int(sum(np.count_nonzero(d.mask) for d in data_D))


def make(lora: LoraConfig | None = LORA, **options: Any) -> Learner:
    given = {"objective": Objective(make_loss("ppo"), "token_mean"), "packing": Packing((32, 64), 4), **options}
    given = {"optimizer": OptimizerConfig(1e-2), **given}
    return Learner(TALKER, talker().params, lora=lora, **given)


@pytest.fixture(scope="module")
def _compiled() -> tuple[Learner, TrainState]:
    """One learner for the module, because a new one traces its step anew, and a copy of its first state."""
    learner = make()
    return learner, copied(learner.state)


@pytest.fixture
def learner(_compiled: tuple[Learner, TrainState]) -> Learner:
    """A learner in its first state."""
    learner, start = _compiled
    learner.restore(copied(start))
    return learner


def copied(state: TrainState) -> TrainState:
    """A state of its own arrays: an update donates those it is given."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def datums(count: int, seed: int = 0, longest: int = 30) -> list[Datum]:
    """Random sequences, half of each trained, advantages of both signs."""
    rng = np.random.default_rng(seed)
    data = []
    for episode in range(count):
        n = int(rng.integers(5, longest))
        mask = np.arange(n) >= n // 2
        data.append(
            Datum(
                tokens=rng.integers(0, 256, n).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                advantages=np.where(mask, (-1.0) ** episode, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                group=episode // 2,
                episode=episode,
            )
        )
    return data


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(tree)]


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


@pytest.mark.parametrize("lora", [True, False])
def test_an_update_moves_what_is_trained_and_nothing_else(learner: Learner, lora: bool) -> None:
    learner = learner if lora else make(None)
    before, base = arrays(learner.state.params), arrays(learner.weights.params)
    metrics = learner.update(datums(6))
    assert learner.step == 1
    assert metrics["optim/tokens"] == trained_tokens(datums(6)) > 0
    assert metrics["optim/grad_norm"] > 0
    assert metrics["optim/lr"] == pytest.approx(1e-2)
    assert metrics["data/datums"] == 6.0
    assert 0 < metrics["data/padding_fraction"] < 1
    assert not all(np.array_equal(a, b) for a, b in zip(before, arrays(learner.state.params), strict=True))
    assert same(learner.weights.params, base) == lora, "the base is never trained under LoRA"


def test_I15_the_weights_to_sample_from_are_the_arrays_that_are_trained(learner: Learner) -> None:
    learner.update(datums(2))
    assert learner.weights.adapter is learner.state.params
    full = make(None)
    assert full.weights.params is full.state.params
    assert full.weights.adapter is None
    assert (learner.lora_scale, full.lora_scale) == (2.0, 1.0)


async def drawn(engine: Engine, seed: int) -> Datum:
    """An episode of one turn as the trainer sees it, good or bad by the parity of its seed."""
    given = [1, 2, 3 + seed]
    async with engine.session(seed=seed) as session:
        turn = await session.sample(given, max_tokens=20)
    mask = np.arange(len(session.tokens)) >= len(given)
    return Datum(
        tokens=np.array(session.tokens, np.int32),
        mask=mask,
        logprobs=np.array([0.0] * len(given) + list(turn.logprobs), np.float32),
        advantages=np.where(mask, (-1.0) ** seed, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        group=seed // 2,
        episode=seed,
    )


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_I3_all_weights_are_kept_in_float32_and_computed_with_and_sampled_from_in_bf16(streamed: bool) -> None:
    learner = make(None, compute_dtype=jnp.bfloat16)
    assert same(learner.state.params, talker().params), "rounded before the first step"
    for _ in range(2):
        weights, before = learner.weights, learner.state.params
        assert {x.dtype for x in jax.tree.leaves(weights)} == {jnp.dtype(jnp.bfloat16)}
        async with open_engine(TALKER, weights, config=ENGINE) as engine:
            data = [await drawn(engine, seed) for seed in range(6)]
            if streamed:
                learner.accumulate(data)
            metrics = learner.finish() if streamed else learner.update(data)
            assert jax.tree.leaves(before)[0].is_deleted()
            again = await drawn(engine, 0)
        np.testing.assert_array_equal(again.tokens, data[0].tokens, "what is sampled from outlives the step")
        assert metrics["optim/kl_sample_train_v2"] < 5e-3**2 / 2, "half the mean square, so |mean| < 5e-3"
    assert {x.dtype for x in jax.tree.leaves(learner.state) if x.ndim} == {jnp.dtype(jnp.float32)}


def test_a_batch_without_datums_changes_nothing(learner: Learner) -> None:
    before = arrays(learner.state)
    assert learner.update([]) == {"data/datums": 0.0}
    assert same(before, learner.state)


def test_a_step_that_diverges_raises_and_leaves_the_parameters(learner: Learner) -> None:
    learner.update(datums(4))
    before = arrays((learner.state.params, learner.state.opt_state))
    broken = [replace(d, advantages=np.where(d.mask, np.inf, 0.0).astype(np.float32)) for d in datums(4)]
    with pytest.raises(FloatingPointError, match=r"step 2: loss or gradient is not finite; .* Lower the learning rate"):
        learner.update(broken)
    assert same(before, (learner.state.params, learner.state.opt_state))
    assert np.isfinite(learner.update(datums(4, seed=1))["optim/loss"])


def test_a_sequence_that_no_row_holds_is_named(learner: Learner) -> None:
    with pytest.raises(ValueError, match=r"a datum of group 0, episode 0 has 80 tokens .* widest row has 64"):
        learner.update([replace(d, tokens=np.resize(d.tokens, 80), **resized(d)) for d in datums(1)])


def resized(d: Datum) -> dict[str, np.ndarray]:
    return {name: np.resize(getattr(d, name), 80) for name in ("mask", "logprobs", "advantages", "versions")}


def test_I11_a_batch_of_any_size_uses_one_of_the_declared_shapes(learner: Learner) -> None:
    for count in (1, 2, 5, 7, 8, 3):
        learner.update(datums(count, seed=count))
    few = learner.compilations
    assert few <= 2, "1 or 2 micro-batches of one width"
    learner.update(datums(6, seed=99))
    assert learner.compilations == few


def test_I10_a_restored_state_goes_on_bit_for_bit(learner: Learner, tmp_path: Any) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        metrics = []
        for i in range(4):
            metrics.append(learner.update(datums(4, seed=i)))
            if learner.step == 2:
                checkpoints.save(2, learner.state)
        straight = arrays(learner.state)
        state, _ = checkpoints.restore(2, learner.abstract_state())
    assert isinstance(state, TrainState)
    learner.restore(state)
    assert learner.step == 2
    assert [learner.update(datums(4, seed=i)) for i in (2, 3)] == metrics[2:]
    assert same(learner.state, straight)


# --- a step in parts ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _streaming() -> tuple[Learner, TrainState]:
    learner = make_streaming()
    return learner, copied(learner.state)


def make_streaming() -> Learner:
    """One shape for everything here. A larger eps, or Adam makes whole numbers of rounding errors."""
    given = {"optimizer": OptimizerConfig(1e-2, eps=1e-4), "packing": Packing((32,), 8)}
    return make(objective=Objective(make_loss("ppo"), "prompt_mean"), **given)


@pytest.fixture
def streaming(_streaming: tuple[Learner, TrainState]) -> Learner:
    """A learner in its first state, with nothing accumulated."""
    learner, start = _streaming
    learner.restore(copied(start))
    return learner


def in_parts(learner: Learner, parts: Sequence[Sequence[Datum]]) -> dict[str, float]:
    for part in parts:
        learner.accumulate(part)
    return learner.finish()


def assert_close(got: TrainState, want: TrainState) -> None:
    for x, y in zip(arrays(got), arrays(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "parts", [[(0, 2), (2, 4), (4, 8)], [(4, 8), (0, 0), (0, 4)]], ids=["in_order", "out_of_order"]
)
def test_I5_steps_in_parts_are_the_updates(streaming: Learner, parts: list[tuple[int, int]]) -> None:
    """Three steps, so that the moments of one reach the next. The padding is that of other batches."""
    first = copied(streaming.state)
    want = [streaming.update(datums(8, seed=i)) for i in range(3)]
    whole = copied(streaming.state)
    streaming.restore(first)
    got = [in_parts(streaming, [datums(8, seed=i)[a:b] for a, b in parts]) for i in range(3)]
    assert_close(streaming.state, whole)
    assert streaming.step == 3
    for one, other in zip(got, want, strict=True):
        assert other.pop("data/padding_fraction") < one.pop("data/padding_fraction") < 1
        assert one == pytest.approx(other, rel=2e-4, abs=1e-6)


@pytest.mark.slow
def test_I10_one_part_is_the_update_and_its_state_is_checkpointed_like_it(tmp_path: Any) -> None:
    """Two groups, so that dividing rounds nothing: the same to the last bit, padding too."""
    streaming = make_streaming()
    shape, first = streaming.abstract_state(), copied(streaming.state)
    want = [streaming.update(datums(4, seed=i)) for i in range(2)]
    whole = copied(streaming.state)
    streaming.restore(first)
    assert in_parts(streaming, [datums(4, seed=0)]) == want[0]
    assert streaming.abstract_state() == shape
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, streaming.state)
        state, _ = checkpoints.restore(1, shape)
    streaming.restore(state)
    assert in_parts(streaming, [datums(4, seed=1)]) == want[1]
    assert same(streaming.state, whole)


def test_nothing_accumulated_is_no_step(streaming: Learner) -> None:
    before = arrays(streaming.state)
    assert streaming.finish() == {"data/datums": 0.0}
    assert in_parts(streaming, [[], []]) == {"data/datums": 0.0}
    assert same(before, streaming.state)


def test_I15_the_weights_stay_until_the_step_is_finished(streaming: Learner) -> None:
    before, sampled = arrays(streaming.weights.adapter), streaming.weights.adapter
    streaming.accumulate(datums(4))
    assert streaming.weights.adapter is sampled
    assert same(sampled, before)
    streaming.finish()
    assert streaming.weights.adapter is streaming.state.params
    assert not same(streaming.state.params, before)


def test_a_group_in_two_parts_is_refused_and_the_step_goes_on(streaming: Learner) -> None:
    data = datums(8)
    want = in_parts(streaming, [data[:4], data[4:]])
    assert want["data/datums"] == 8
    streaming.accumulate(data[:4])
    with pytest.raises(
        ValueError, match=r"group 1 was accumulated already: .* Number the groups through the whole step"
    ):
        streaming.accumulate(data[3:6])
    with pytest.raises(ValueError, match=r"has 80 tokens .* widest row has 32"):
        streaming.accumulate([replace(d, tokens=np.resize(d.tokens, 80), **resized(d)) for d in data[4:5]])
    streaming.accumulate(data[4:])
    assert streaming.finish()["optim/tokens"] == want["optim/tokens"] == trained_tokens(data)
    streaming.accumulate(data[:2])  # the next step knows nothing of these groups
    assert streaming.finish()["data/datums"] == 2


def test_a_part_that_diverges_spoils_its_own_step_only(streaming: Learner) -> None:
    streaming.update(datums(4))
    before = arrays((streaming.state.params, streaming.state.opt_state))
    data = datums(6)
    broken = [replace(d, advantages=np.where(d.mask, np.inf, 0.0).astype(np.float32)) for d in data[2:4]]
    with pytest.raises(FloatingPointError, match=r"step 2: loss or gradient is not finite; .* Lower the learning rate"):
        in_parts(streaming, [data[:2], broken, data[4:]])
    assert same(before, (streaming.state.params, streaming.state.opt_state))
    after = copied(streaming.state)
    metrics = in_parts(streaming, [datums(4, seed=1)])
    streaming.restore(after)
    assert streaming.update(datums(4, seed=1)) == metrics


def test_a_whole_update_cannot_come_between(streaming: Learner) -> None:
    first = copied(streaming.state)
    streaming.accumulate(datums(4))
    with pytest.raises(RuntimeError, match=r"4 accumulated datums is under way.* call finish\(\) before update"):
        streaming.update(datums(4))
    streaming.restore(first)
    assert streaming.finish() == {"data/datums": 0.0}, "a restored state takes no gradient of another one"


def test_I11_parts_of_any_number_use_the_declared_shapes(streaming: Learner) -> None:
    in_parts(streaming, [datums(8)])
    streaming.update(datums(8))
    programs = streaming.compilations
    for cut in (2, 4, 6):
        in_parts(streaming, [datums(8, seed=cut)[:cut], datums(8, seed=cut)[cut:]])
    assert streaming.compilations == programs
    forget_programs()
    assert make().compilations == 0, "each program waits for its first use"


def test_I11_learners_with_equal_settings_share_their_programs() -> None:
    forget_programs()
    first = make()
    first.update(datums(4))
    few = first.compilations
    again, other = make(), make(optimizer=OptimizerConfig(2e-2))
    assert again.compilations == few > 0, "compiled before it was made"
    again.update(datums(3, seed=1))
    assert again.compilations == few
    assert other.compilations == 0
    other.update(datums(4))
    assert first.compilations == few


def test_the_seed_makes_the_adapter() -> None:
    assert same(make(seed=3).state.params, make(seed=3).state.params)
    assert not same(make(seed=3).state.params, make(seed=4).state.params)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(make().state.params))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("token_men",), "did you mean token_mean"),
        (("token_mean", 5.0), "would have no effect"),
        (("seq_mean_token_sum_norm",), "divides by a constant length"),
    ],
)
def test_I12_an_objective_is_checked_when_it_is_written_down(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(make_loss("ppo"), *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": ()}, "packing.widths is empty: name at least one"),
        ({"widths": (0, 5)}, r"packing.widths=\(0, 5\), of which=0: expected at least 1"),
        ({"widths": (5,), "rows": 0}, "packing.rows=0: expected at least 1"),
    ],
)
def test_I12_shapes_of_nothing_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packing(**arguments)


# --- several steps a batch, and other policies than the one that is trained ----------------------


def one_group_at_a_time(learner: Learner, data_D: list[Datum]) -> list[dict[str, float]]:
    return [learner.update([d for d in data_D if d.group == g]) for g in dict.fromkeys(d.group for d in data_D)]


def test_I5_substeps_are_steps_on_whole_groups_each_with_its_own_weights() -> None:
    data_D = datums(6)  # three groups
    together, alone = make(num_substeps=3), make()
    metrics, parts = together.update(data_D), one_group_at_a_time(alone, data_D)
    assert same(together.state, alone.state)
    assert together.step == 3
    assert metrics["optim/tokens"] == sum(p["optim/tokens"] for p in parts) == trained_tokens(data_D)
    assert metrics["data/datums"] == 6.0
    expected = np.average([p["optim/entropy"] for p in parts], weights=[p["optim/tokens"] for p in parts])
    assert metrics["optim/entropy"] == pytest.approx(expected)


def test_substeps_are_no_more_than_the_groups_there_are() -> None:
    learner = make(num_substeps=5)
    learner.update(datums(4))
    assert learner.step == 2
    assert learner.update([]) == {"data/datums": 0.0}
    assert learner.step == 2


OLD = Objective(make_loss("ppo", anchor_old=True), "token_mean")


def test_the_old_policy_is_the_one_before_the_first_substep() -> None:
    """The first substep is on-policy whatever the sampler was; the second has moved away from the anchor."""
    data_D = datums(4)
    far = make(objective=OLD, num_substeps=1)
    assert far.update(data_D)["optim/clip_fraction"] == 0.0  # the sampler is off by far more than the clip range
    assert make().update(data_D)["optim/clip_fraction"] > 0.0
    moved = make(objective=OLD, num_substeps=2, optimizer=OptimizerConfig(0.5))
    assert moved.update(data_D)["optim/clip_fraction"] > 0.0


def test_I5_old_log_probs_are_the_same_in_parts_and_in_one() -> None:
    data_D = datums(4)
    whole, parts = make(objective=OLD), make(objective=OLD)
    whole.update(data_D)
    for g in (0, 1):
        parts.accumulate([d for d in data_D if d.group == g])
    parts.finish()
    for a, b in zip(arrays(whole.state.params), arrays(parts.state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("lora", [LORA, None])
def test_the_reference_is_the_model_before_training(lora: LoraConfig | None) -> None:
    learner, data_D = make(lora), datums(5)
    before = learner.score_reference(data_D)
    for d in before:
        assert d.logprobs_ref is not None
        assert (d.logprobs_ref[d.mask] < 0).all()
        assert (d.logprobs_ref[~d.mask] == 0).all()
    learner.update(data_D)
    for a, b in zip(learner.score_reference(data_D), before, strict=True):
        np.testing.assert_array_equal(a.logprobs_ref, b.logprobs_ref)
    assert learner.score_reference([]) == []


async def test_I3_old_and_reference_logprobs_of_all_weights_are_in_the_dtype_they_are_trained_in() -> None:
    told: list[Datum] = []
    objective = Objective(make_loss("ppo"), "token_mean", correct=lambda data_D: told.extend(data_D) or list(data_D))
    learner = make(None, compute_dtype=jnp.bfloat16, objective=objective)
    async with open_engine(TALKER, learner.weights, config=ENGINE) as engine:
        data = learner.score_reference([await drawn(engine, seed) for seed in range(6)])
    learner.update(data)
    for d in told:
        assert d.logprobs_old is not None
        assert d.logprobs_ref is not None
        np.testing.assert_array_equal(d.logprobs_old, d.logprobs_ref)
        assert np.abs(d.logprobs_old - d.logprobs)[d.mask].mean() < 5e-3
    assert len(told) == 6


def test_each_group_is_scored_under_its_own_teacher() -> None:
    other = jax.tree.map(lambda x: x * 1.5, talker().params)
    learner = make(references={"math": Reference(TALKER, other)})
    data_D = datums(6)
    own = learner.score_reference(data_D)
    mixed = learner.score_reference(data_D, {1: "math"})
    for a, b in zip(mixed, own, strict=True):
        assert np.array_equal(a.logprobs_ref, b.logprobs_ref) == (a.group != 1)
    replaced = make(references={"": Reference(TALKER, other)}).score_reference(data_D)
    for a, b in zip(replaced, mixed, strict=True):
        assert np.array_equal(a.logprobs_ref, b.logprobs_ref) == (a.group == 1)


def test_a_kl_term_pulls_the_policy_towards_the_reference() -> None:
    """Advantages of 0 and a policy that has moved: only the term is left, and it moves back."""
    objective = resolve(VARIANTS["ppo"], {"kl": "k2", "kl_coef": 1.0, "aggregation": "token_mean"}).objective
    learner, data_D = make(objective=objective, optimizer=OptimizerConfig(0.05)), datums(6)
    learner.update(learner.score_reference(data_D))  # away
    silent = [replace(d, advantages=0 * d.advantages) for d in learner.score_reference(data_D)]
    distances = [abs(learner.update(silent)["optim/kl_ref"]) for _ in range(8)]
    assert distances[-1] < distances[0] / 2


def test_what_the_environment_said_can_be_learned_beside_the_policy() -> None:
    """Cross-entropy on answers, with its own denominator; prompts and the policy's own tokens have no part in it."""
    objective = resolve(VARIANTS["ppo"], {"observation_coef": 0.5, "aggregation": "token_mean"}).objective
    half = [(d, d.mask & (np.arange(len(d.mask)) % 2 == 0)) for d in datums(6)]
    talking = [replace(d, mask=mask, versions=np.where(mask, 0, -1).astype(np.int32)) for d, mask in half]
    silent = [replace(d, advantages=0 * d.advantages) for d in talking]
    learner = make(objective=objective, optimizer=OptimizerConfig(0.05))
    losses = [learner.update(silent)["optim/observation_loss"] for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    unsaid = [replace(d, versions=np.zeros_like(d.versions)) for d in silent]  # sampled, and context only
    assert learner.update(unsaid)["optim/observation_loss"] == 0.0
    prompts = [replace(d, mask=np.arange(len(d.mask)) == len(d.mask) - 1) for d in silent]
    assert learner.update(prompts)["optim/observation_loss"] == 0.0


def test_I11_scoring_is_one_more_program_a_shape() -> None:
    forget_programs()
    learner = make(objective=OLD)
    learner.update(datums(4))
    assert learner.compilations == 2
    learner.update(datums(3))
    assert learner.compilations == 2
    learner.score_reference(datums(4))
    assert learner.compilations == 3
