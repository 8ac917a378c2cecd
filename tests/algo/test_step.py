"""The training step: one gradient whatever the packing, nothing from masked tokens, one compilation a shape."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algo_cases import CHUNK, ROWS, STEP_LOSSES, TEMPERATURE, WIDTH, assert_trees_close, constant_of, datum, packed
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.algo.aggregate import AGGREGATIONS, denominator, local_weights, token_weights
from jaxrl.algo.batch import pack
from jaxrl.algo.forms import ppo
from jaxrl.algo.loss import LossRow, make_loss
from jaxrl.algo.optimizer import OptimizerConfig, make_transform
from jaxrl.algo.step import (
    StreamedStep,
    TrainState,
    base_shardings,
    init_state,
    make_eval_logprobs,
    make_gradients,
    make_streamed_step,
    make_train_step,
    state_shardings,
)
from jaxrl.algo.tokens import TokenInputs
from jaxrl.models.config import ModelConfig
from jaxrl.models.forward import hidden_states, logits
from jaxrl.models.lora import Adapter, LoraConfig, merge
from jaxrl.models.sharding import make_mesh
from jaxrl.types import SCORED, Datum

Compiled = Callable[[str], Any]
OPTIMIZER = OptimizerConfig(1e-2, "linear", warmup_steps=2, total_steps=10, eps=1e-4)


@pytest.fixture(scope="module")
def train_step(model: ModelConfig, lora: LoraConfig) -> Any:
    return make_train_step(model, lora, make_loss("ppo"), OPTIMIZER, temperature=TEMPERATURE, head_chunk=CHUNK)


@pytest.fixture(scope="module")
def logprobs(model: ModelConfig, lora: LoraConfig) -> Any:
    return make_eval_logprobs(model, lora, temperature=TEMPERATURE, head_chunk=CHUNK)


# --- against the definition ----------------------------------------------------------------------


def _dense_logp(base: Any, adapter: Any, tokens: jax.Array) -> jax.Array:
    """Log-probs of tokens[1:], one unpacked sequence, no chunks, no remat. Shapes and config of this file's model."""
    config = ModelConfig(96, 64, 192, 2, 2, 1, 32, 1024, tie_embeddings=True)
    line = tokens[None, :-1]
    where = jnp.arange(line.shape[1])[None]
    h = hidden_states(base, adapter, line, where, jnp.ones_like(line), config=config, lora_scale=2.0, remat=False)
    logp = jax.nn.log_softmax(logits(base, h, config) / TEMPERATURE)
    return jnp.take_along_axis(logp[0], tokens[1:, None], -1)[:, 0]


@pytest.fixture(scope="module")
def reference(base: Any, adapter: Adapter, data_D: list[Datum]) -> tuple[list[np.ndarray], Any]:
    """Log-probs per datum, and the PPO gradient, of datums taken one at a time, padded to one length."""
    loss, weights = make_loss("ppo"), token_weights(data_D, "seq_mean_token_mean")
    pad = lambda x: jnp.asarray(np.pad(np.asarray(x), (0, 33 - len(x))))  # noqa: E731

    def one(a: Adapter, tokens: jax.Array, q: jax.Array, adv: jax.Array, mask: jax.Array, w: jax.Array) -> tuple:
        logp = _dense_logp(base, a, tokens)
        return jnp.sum(w[1:] * loss(TokenInputs(logp, q[1:], adv[1:], mask[1:])).loss), logp

    gradient = jax.jit(jax.grad(one, has_aux=True))
    logp_D, total = [], jax.tree.map(np.zeros_like, adapter)
    for d, w in zip(data_D, weights, strict=True):
        columns = (d.tokens, d.logprobs, d.advantages, d.mask, w.astype(np.float32))
        grad, logp = gradient(adapter, *map(pad, columns))
        total = jax.tree.map(np.add, total, grad)
        logp_D.append(np.asarray(logp)[: len(d.tokens) - 1])
    return logp_D, total


def test_I5_split_equals_whole_against_one_datum_at_a_time(
    gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum], reference: tuple
) -> None:
    grads, metrics = gradients("ppo")(adapter, base, packed(data_D))
    assert_trees_close(grads, reference[1])
    assert float(metrics["optim/tokens"]) == sum(d.mask.sum() for d in data_D)
    mismatch = [(d.logprobs[1:] - logp)[d.mask[1:]] for d, logp in zip(data_D, reference[0], strict=True)]
    np.testing.assert_allclose(metrics["optim/kl_sample_train_v1"], np.concatenate(mismatch).mean(), rtol=1e-5)


def test_I3_eval_logprobs_are_those_of_each_datum_alone(
    logprobs: Any, base: Any, adapter: Adapter, data_D: list[Datum], reference: tuple
) -> None:
    batch = packed(data_D, rows=1)
    logp = np.asarray(logprobs(adapter, base, batch))
    assert logp.dtype == np.float32
    assert (logp[~batch.mask] == 0).all()
    for d, want in zip(data_D, reference[0], strict=True):
        row = next(
            (n, start)
            for n in range(4)
            for start in range(32 - len(d.tokens) + 2)
            if (batch.targets[n, 0, start : start + len(d.tokens) - 1] == d.tokens[1:]).all()
        )
        got = logp[row[0], 0, row[1] : row[1] + len(d.tokens) - 1]
        np.testing.assert_allclose(got, np.where(d.mask[1:], want, 0), atol=2e-5)


# --- I4 and I5, for every loss and aggregation ---------------------------------------------------

PAIRS = [(name, aggregation) for name in STEP_LOSSES for aggregation in AGGREGATIONS]


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
def test_I4_poison_in_a_batch_changes_nothing(
    name: str, aggregation: str, gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    batch = packed(data_D, aggregation, loss=name)
    want = gradients(name)(adapter, base, batch)
    values = {"logp_sampler": np.nan, "advantage": np.inf, "weight": -np.inf}
    values |= dict.fromkeys(STEP_LOSSES[name].columns, np.nan)
    poison = {
        field: np.where(batch.mask, getattr(batch, field), value).astype(np.float32) for field, value in values.items()
    }
    got = gradients(name)(adapter, base, batch.replace(**poison))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
def test_I5_row_order_does_not_matter(
    name: str, aggregation: str, gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    want = gradients(name)(adapter, base, packed(data_D, aggregation, loss=name))
    got = gradients(name)(adapter, base, packed(data_D[::-1], aggregation, loss=name))
    assert_trees_close(got, want)


@pytest.mark.parametrize("name", STEP_LOSSES)
def test_I5_padding_packing_and_micro_batches_do_not_matter(
    name: str, gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    """Micro-batches of one wider row, in a larger bucket, at once. Losses that pool have then to pool over them."""
    for aggregation in AGGREGATIONS:
        want = gradients(name)(adapter, base, packed(data_D, aggregation, loss=name))
        other = packed(data_D, aggregation, loss=name, width=64, rows=1, micro_batches=8)
        assert 1 < other.count < 8
        assert_trees_close(gradients(name)(adapter, base, other), want)


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
def test_I5_an_episode_that_splits_gives_the_same_gradient(
    name: str, aggregation: str, gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    """The third episode's trained tokens spread over two datums that repeat its context, as after a rewrite."""
    whole = data_D[3]
    head = np.arange(len(whole.tokens)) < 6
    halves = [replace(whole, mask=whole.mask & side) for side in (head, ~head)]
    assert all(half.mask.any() for half in halves)
    want = gradients(name)(adapter, base, packed([whole, *data_D[4:]], aggregation, loss=name))
    got = gradients(name)(adapter, base, packed([*halves, *data_D[4:]], aggregation, loss=name))
    assert_trees_close(got, want)


@pytest.mark.parametrize("name", STEP_LOSSES)
def test_I4_tokens_after_the_last_trained_one_do_not_matter(
    name: str, gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    d = data_D[4]
    last = int(np.flatnonzero(d.mask)[-1])
    tail = datum(np.random.default_rng(1), 6)
    columns = {
        f: np.concatenate([getattr(d, f)[: last + 1], np.zeros(6, getattr(d, f).dtype)])
        for f in ("mask", "logprobs", "advantages", "versions", *SCORED)
    }
    longer = replace(d, tokens=np.concatenate([d.tokens[: last + 1], tail.tokens]), **columns)
    want = gradients(name)(adapter, base, packed([d, data_D[0]], loss=name))
    got = gradients(name)(adapter, base, packed([longer, data_D[0]], loss=name))
    assert_trees_close(got, want)


@pytest.mark.parametrize("name", STEP_LOSSES)
def test_I4_empty_and_all_masked_batches_have_no_gradient(
    name: str, gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    masked = packed([replace(d, mask=np.zeros_like(d.mask)) for d in data_D], loss=name)
    for batch in (packed([], loss=name), masked):
        grads, metrics = gradients(name)(adapter, base, batch)
        assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves((grads, metrics)))


# --- the update ----------------------------------------------------------------------------------


def test_update_is_the_optimizers_and_the_rate_is_reported(
    train_step: Any, gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    batch, transform = packed(data_D), make_transform(OPTIMIZER)
    update = jax.jit(transform.update)
    state, params, moments = init_state(OPTIMIZER, adapter), adapter, jax.jit(transform.init)(adapter)
    for rate in (0.005, 0.01, 0.01):
        grads, _ = gradients("ppo")(params, base, batch)
        direction, moments = update(grads, moments, params)
        params = jax.tree.map(lambda p, u, rate=rate: np.float32(p - rate * np.asarray(u)), params, direction)
        state, metrics = train_step(state, base, batch)
        assert metrics["optim/lr"] == pytest.approx(rate)
        norm = np.sqrt(sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(grads)))
        assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["optim/nonfinite"] == 0
    assert int(state.step) == 3
    assert_trees_close(state.params, params, 1e-4)
    assert not any(a.is_deleted() for a in jax.tree.leaves(adapter))  # the caller's arrays were copied


@pytest.mark.parametrize("cause", ["empty", "nan", "inf"])
def test_a_step_without_tokens_or_with_a_bad_gradient_keeps_the_parameters(
    cause: str, train_step: Any, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    state, _ = train_step(init_state(OPTIMIZER, adapter), base, packed(data_D))  # so that Adam has momentum
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    batch = packed(data_D)
    if cause == "empty":
        batch = packed([])
    else:
        bad = np.where(np.cumsum(batch.mask).reshape(batch.mask.shape) == 3, float(cause), batch.advantage)
        batch = batch.replace(advantage=bad.astype(np.float32))
    state, metrics = train_step(state, base, batch)
    assert float(metrics["optim/nonfinite"]) == (cause != "empty")
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    assert int(state.step) == 2


def test_I11_one_compilation_a_shape(
    model: ModelConfig, lora: LoraConfig, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    traces = 0

    def counted(inputs: TokenInputs) -> Any:
        nonlocal traces
        traces += 1
        return ppo(inputs)

    loss = make_loss(LossRow(counted))
    step = make_train_step(model, lora, loss, OPTIMIZER, temperature=TEMPERATURE, head_chunk=CHUNK)
    state = init_state(OPTIMIZER, adapter)
    for data in (data_D, data_D[:3], data_D[::-1], []):
        state, _ = step(state, base, packed(data))
    first = traces
    assert step._cache_size() == 1
    state, _ = step(state, base, packed(data_D, rows=4, micro_batches=4))
    assert step._cache_size() == 2
    assert traces == 2 * first


def test_state_is_donated_and_the_base_is_not(
    train_step: Any, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    old = init_state(OPTIMIZER, adapter)
    new, _ = train_step(old, base, packed(data_D))
    assert all(x.is_deleted() for x in jax.tree.leaves((old.params, old.opt_state)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(base))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(new.params))


def test_padding_micro_batches_are_not_visited(
    gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    """What lies beyond `count` is never read, so it can cost nothing: fill it with another batch, and nothing moves."""
    batch = packed(data_D, micro_batches=4)
    full = jax.tree.map(lambda x: np.concatenate([x[:1]] * 4) if x.ndim else x, batch)
    want = gradients("ppo")(adapter, base, batch)
    jax.tree.map(np.testing.assert_array_equal, gradients("ppo")(adapter, base, full), want)


# --- a step whose batch arrives in parts ---------------------------------------------------------

Parts = Sequence[Sequence[Datum]]


@pytest.fixture(scope="module")
def start(adapter: Adapter) -> TrainState:
    return init_state(OPTIMIZER, adapter)


@pytest.fixture(scope="module")
def whole(model: ModelConfig, lora: LoraConfig) -> Compiled:
    """Compiled steps on a whole batch, one a loss."""
    kwargs = {"temperature": TEMPERATURE, "head_chunk": CHUNK}
    return functools.cache(lambda name: make_train_step(model, lora, make_loss(name), OPTIMIZER, **kwargs))


@pytest.fixture(scope="module")
def streamed(model: ModelConfig, lora: LoraConfig) -> Callable[[str], StreamedStep]:
    """Compiled steps in parts, one a loss."""
    kwargs = {"temperature": TEMPERATURE, "head_chunk": CHUNK}
    return functools.cache(lambda name: make_streamed_step(model, lora, make_loss(name), OPTIMIZER, **kwargs))


def copied(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def in_parts(step: StreamedStep, state: TrainState, base: Any, parts: Parts, aggregation: str, rows: int = ROWS) -> Any:
    """(state, metrics) of one step to which the parts were added in this order. Takes the state over."""
    sums, total = step.start(state), 0
    for part in parts:
        weights, count = local_weights(part, aggregation, constant=constant_of(aggregation))
        batch = pack(part, weights, width=WIDTH, rows=rows, micro_batches=MICRO_BATCHES)
        sums, total = step.add(sums, state.params, base, batch), total + count
    return step.finish(state, sums, np.float32(denominator(total)))


def at_once(step: Any, state: TrainState, base: Any, data: Sequence[Datum], aggregation: str) -> Any:
    return step(copied(state), base, packed(data, aggregation, micro_batches=MICRO_BATCHES))


MICRO_BATCHES = 2


STREAMED = [
    pytest.param(name, aggregation, marks=marks)
    for name, marks in (("ppo", ()), ("importance_sampling", pytest.mark.slow))
    for aggregation in AGGREGATIONS
]


@pytest.mark.parametrize(("name", "aggregation"), STREAMED)
def test_I5_parts_give_the_step_of_the_whole(
    name: str, aggregation: str, whole: Compiled, streamed: Compiled, start: Any, base: Any, data_D: list[Datum]
) -> None:
    """Parameters, moments and metrics; an empty part, and one without trained tokens, are parts like any other."""
    a, b, c = data_D[:2], data_D[2:4], data_D[4:]
    untrained = [replace(d, mask=np.zeros_like(d.mask), group=7) for d in a]
    want = at_once(whole(name), start, base, data_D, aggregation)
    for parts in ([a, b, c], [c, [], a + b], [b + c, untrained, a], [[], data_D]):
        got = in_parts(streamed(name), copied(start), base, parts, aggregation)
        assert_trees_close(got, want)
    assert float(want[1]["optim/tokens"]) == sum(d.mask.sum() for d in data_D)


@pytest.mark.slow
def test_a_single_part_gives_the_step_of_the_whole_to_the_last_bit(
    fully_optimized: None, model: ModelConfig, lora: LoraConfig, start: Any, base: Any, data_D: list[Datum]
) -> None:
    """Where dividing rounds nothing: by one, two groups or four episodes. So it is the same sum, made the same way."""
    data, kwargs = data_D[:4], {"temperature": TEMPERATURE, "head_chunk": CHUNK}
    whole, streamed = (
        make(model, lora, make_loss("ppo"), OPTIMIZER, **kwargs) for make in (make_train_step, make_streamed_step)
    )
    for aggregation in AGGREGATIONS:
        if aggregation != "token_mean":
            want = at_once(whole, start, base, data, aggregation)
            got = in_parts(streamed, copied(start), base, [data], aggregation)
            jax.tree.map(np.testing.assert_array_equal, got, want)


@given(
    part_of=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    seed=st.integers(0, 100),
    aggregation=st.sampled_from(list(AGGREGATIONS)),
)
@settings(max_examples=20)
def test_I5_properties_of_parts(
    part_of: list[int], seed: int, aggregation: str, whole: Any, streamed: Any, start: Any, base: Any
) -> None:
    """Any partition of five groups, its parts in any order, with episodes of several datums."""
    rng = np.random.default_rng(seed)
    data = [datum(rng, int(rng.integers(2, 20)), i % 5, int(rng.integers(0, 2))) for i in range(12)]
    parts = [[d for d in data if part_of[d.group] == part] for part in range(4)]
    want = at_once(whole("ppo"), start, base, data, aggregation)
    got = in_parts(streamed("ppo"), copied(start), base, parts, aggregation)
    assert_trees_close(got, want, 2e-5)


@pytest.mark.parametrize("cause", ["nothing", "nan", "inf"])
def test_parts_without_tokens_or_with_a_bad_gradient_keep_the_parameters(
    cause: str, streamed: Compiled, start: Any, base: Any, data_D: list[Datum]
) -> None:
    parts: list[list[Datum]] = [[], []]
    if cause != "nothing":
        d = data_D[0]
        parts = [data_D[2:], [replace(d, advantages=np.where(d.mask, float(cause), 0).astype(np.float32))], data_D[1:2]]
    state, metrics = in_parts(streamed("ppo"), copied(start), base, parts, "token_mean")
    assert float(metrics["optim/nonfinite"]) == (cause != "nothing")
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (start.params, start.opt_state))
    state, metrics = in_parts(streamed("ppo"), state, base, [data_D], "token_mean")
    assert float(metrics["optim/nonfinite"]) == 0
    assert int(state.step) == 2


@pytest.mark.parametrize("restored", [False, True])
def test_I11_parts_take_one_compilation_a_shape_and_two_more(
    restored: bool, model: ModelConfig, lora: LoraConfig, start: Any, base: Any, data_D: list[Datum]
) -> None:
    """Also with a state that is bound to its device, as one read from a checkpoint is."""
    step: Any = make_streamed_step(model, lora, make_loss("ppo"), OPTIMIZER, temperature=TEMPERATURE, head_chunk=CHUNK)
    programs = lambda: [f._cache_size() for f in (step.start, step.add, step.finish)]  # noqa: E731
    assert programs() == [0, 0, 0]
    state = jax.device_put(copied(start), jax.devices()[0]) if restored else copied(start)
    for parts in ([data_D[:2], data_D[2:]], [data_D], []):
        state, _ = in_parts(step, state, base, parts, "token_mean")
    assert programs() == [1, 1, 1]


def test_sums_are_donated_and_the_parameters_are_not(
    streamed: Compiled, start: Any, base: Any, data_D: list[Datum]
) -> None:
    step, batch = streamed("ppo"), packed(data_D, micro_batches=MICRO_BATCHES)
    old = step.start(start)
    new = step.add(old, start.params, base, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert not any(x.is_deleted() for x in jax.tree.leaves((start, base, new)))


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [True, False], ids=["lora", "full"])
def test_I5_parts_on_a_mesh_give_the_step_of_the_whole_on_one_device(
    adapted: bool, model: ModelConfig, lora: LoraConfig, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    mesh, loss = make_mesh(2, 2, 2), make_loss("ppo")
    kwargs = {"temperature": TEMPERATURE, "head_chunk": CHUNK}
    config, params, frozen = (lora, adapter, base) if adapted else (None, base, None)
    alone = make_train_step(model, config, loss, OPTIMIZER, **kwargs)
    want = at_once(alone, init_state(OPTIMIZER, params), frozen, data_D, "seq_mean_token_mean")
    where = state_shardings(model, config, OPTIMIZER, mesh)
    spread = None if frozen is None else jax.device_put(frozen, base_shardings(model, mesh))
    step: Any = make_streamed_step(model, config, loss, OPTIMIZER, mesh=mesh, **kwargs)
    state = init_state(OPTIMIZER, params, shardings=where)
    got = in_parts(step, state, spread, [data_D[4:], data_D[:4]], "seq_mean_token_mean", rows=8)
    assert [f._cache_size() for f in (step.start, step.add, step.finish)] == [1, 1, 1]
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, got[0], where))
    assert_trees_close(got, want, 5e-5)


# --- LoRA and full fine-tuning -------------------------------------------------------------------


def test_lora_gradient_is_the_full_gradient_through_the_chain_rule(
    model: ModelConfig, lora: LoraConfig, gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    """With W' = W + s A B: dA = s dW' B^T and dB = s A^T dW'. So the base needs no gradient of its own."""
    full = make_gradients(model, None, make_loss("ppo"), temperature=TEMPERATURE, head_chunk=CHUNK)
    wide, metrics = full(merge(base, adapter, lora), None, packed(data_D))
    narrow, lora_metrics = gradients("ppo")(adapter, base, packed(data_D))
    for name, ab in adapter.items():
        dw = jnp.stack([layer[name] for layer in wide["layers"]])
        expected = {
            "a": lora.scale * jnp.einsum("lio,lro->lir", dw, ab["b"]),
            "b": lora.scale * jnp.einsum("lir,lio->lro", ab["a"], dw),
        }
        assert_trees_close(narrow[name], expected, 5e-5)
    assert_trees_close(metrics, lora_metrics, 1e-4)
    assert float(jnp.abs(wide["final_norm"]).max()) > 0
    assert float(jnp.abs(wide["embed"]).max()) > 0


def test_structure_the_base_has_no_weight_gradient_under_lora(
    gradients: Compiled, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    """No product of the compiled step has the shape of a base matrix (64 x 192); those of the adapter are there."""
    text = gradients("ppo").lower(adapter, base, packed(data_D)).compile().as_text()
    products = set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))
    assert products & {"192,4", "4,192", "64,4", "4,64"}, products
    assert not products & {"64,192", "192,64", "64,64", "96,64", "64,96"}, products


def test_full_fine_tuning_keeps_float32_parameters_under_a_narrow_forward_pass(
    model: ModelConfig, base: Any, data_D: list[Datum]
) -> None:
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base)
    kwargs = {"temperature": TEMPERATURE, "head_chunk": CHUNK, "compute_dtype": jnp.bfloat16}
    step = make_train_step(model, None, make_loss("cross_entropy"), OptimizerConfig(1e-2), **kwargs)
    state = init_state(OptimizerConfig(1e-2), narrow)
    losses = []
    for _ in range(6):
        state, metrics = step(state, None, packed(data_D))
        losses.append(float(metrics["optim/loss"]))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim)
    assert losses[-1] < 0.7 * losses[0]


def test_lora_learns(logprobs: Any, train_step: Any, base: Any, adapter: Adapter, data_D: list[Datum]) -> None:
    """Tokens of positive advantage become likelier, those of negative advantage less likely."""
    signs = [
        replace(d, advantages=np.where(d.mask, 1 - 2 * (i % 2), 0).astype(np.float32)) for i, d in enumerate(data_D)
    ]
    batch = packed(signs)
    before = np.asarray(logprobs(adapter, base, batch))
    batch = batch.replace(logp_sampler=before)
    state = init_state(OPTIMIZER, adapter)
    for _ in range(3):
        state, metrics = train_step(state, base, batch)
    change = np.asarray(logprobs(state.params, base, batch)) - before
    assert change[batch.mask & (batch.advantage > 0)].mean() > 0.01
    assert change[batch.mask & (batch.advantage < 0)].mean() < -0.01
    assert metrics["optim/kl_sample_train_v2"] > 0


def test_I3_at_zero_lag_the_ratio_is_one(
    logprobs: Any, train_step: Any, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    batch = packed(data_D)
    batch = batch.replace(logp_sampler=np.asarray(logprobs(adapter, base, batch)))
    _, metrics = train_step(init_state(OPTIMIZER, adapter), base, batch)
    assert metrics["optim/clip_fraction"] == 0
    assert abs(float(metrics["optim/kl_sample_train_v1"])) < 1e-6
    assert float(metrics["optim/kl_sample_train_v2"]) < 1e-10


# --- knobs ---------------------------------------------------------------------------------------


def test_I12_errors_teach(model: ModelConfig, lora: LoraConfig) -> None:
    loss = make_loss("ppo")
    with pytest.raises(ValueError, match="greedy"):
        make_train_step(model, lora, loss, OPTIMIZER, temperature=0.0)
    with pytest.raises(ValueError, match="compute_dtype has no effect under LoRA"):
        make_train_step(model, lora, loss, OPTIMIZER, temperature=1.0, compute_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="at least 1 position"):
        make_eval_logprobs(model, lora, temperature=1.0, head_chunk=0)


def test_state_is_a_pytree_that_survives_flattening(adapter: Adapter) -> None:
    state = init_state(OPTIMIZER, adapter)
    leaves, treedef = jax.tree.flatten(state)
    assert isinstance(jax.tree.unflatten(treedef, leaves), TrainState)
    assert state.step.dtype == jnp.int32
