"""One optimizer step as one compiled function, and the log-probs it is made of.

Knows the model, the loss, the optimizer and the packed batch. Knows nothing about rollouts, files or clocks. The
micro-batches of a batch are a loop with a dynamic trip count inside the compiled step: their gradients are added in
float32, nothing is divided (the weights hold the denominators, I5), and the padding micro-batches of a bucket are
never visited. A batch that arrives in parts is summed by that same loop, which goes on where the last part ended, and
divided once. Under LoRA only the adapter is differentiated.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import Mesh

from jaxrl.algo.batch import OPTIONAL, Batch
from jaxrl.algo.critic import Critic, init_critic
from jaxrl.algo.entropy import EntropyBonus
from jaxrl.algo.loss import Loss
from jaxrl.algo.optimizer import OptimizerConfig, make_schedule, make_transform
from jaxrl.algo.scoring import HEAD_CHUNK, Scoring, micro_batch, named_sharding
from jaxrl.algo.tokens import TokenInputs
from jaxrl.models import sharding
from jaxrl.models.config import ModelConfig
from jaxrl.models.linear import accumulator
from jaxrl.models.lora import LoraConfig, lora_specs
from jaxrl.models.spec import Params, abstract, logical_axes, param_specs

MetricArrays = dict[str, jax.Array]
TrainStep = Callable[["TrainState", Params | None, Batch], tuple["TrainState", MetricArrays]]
EvalLogprobs = Callable[[Any, Params | None, Batch], jax.Array]
Gradients = Callable[[Any, Params | None, Batch], tuple[Any, MetricArrays]]


@struct.dataclass
class Sums:
    """What adds up over the micro-batches of a step, in float32: the weighted gradient, and metrics over tokens."""

    grads: Any
    metrics: Any  # MetricArrays; in a tree of shardings, a sharding
    entropy_coef: Any  # the step's coefficient of the entropy bonus, the same throughout


Add = Callable[[Sums, Any, Params | None, Batch], Sums]
Apply = Callable[["TrainState", Sums], tuple["TrainState", MetricArrays]]


@dataclass(frozen=True)
class StreamedStep:
    """The three programs of a step whose batch arrives in parts: start, add each part, finish."""

    start: Callable[["TrainState"], Sums]
    add: Add
    finish: Callable[["TrainState", Sums, Any], tuple["TrainState", MetricArrays]]


@struct.dataclass
class TrainState:
    """Everything a run changes. params: a LoRA adapter, or the whole model under full fine-tuning; float32.

    critic: `critic.Critic`, or None without one. A step hands it on as it is; it is fitted beside.
    """

    step: Any  # int32, no dimensions: how many steps were taken
    params: Any
    opt_state: Any
    entropy_coef: Any  # float32, no dimensions: of the next step's entropy bonus
    critic: Any = None


def init_state(
    optimizer: OptimizerConfig,
    params: Any,
    *,
    entropy: EntropyBonus | None = None,
    critic: Critic | None = None,
    shardings: TrainState | None = None,
) -> TrainState:
    """A state at step 0 from the tree to train: an adapter, or a whole model. The arrays are copied, as float32.

    A step donates its state, so whoever wants to keep parameters (a sampler, say) takes them from the newest state,
    or copies. critic: the one to begin with. shardings: those of `state_shardings` when there is a mesh.
    """

    build = partial(_first_state, optimizer=optimizer, coef=entropy.start if entropy else 0.0)
    return build(params, critic) if shardings is None else jax.jit(build, out_shardings=shardings)(params, critic)


@partial(jax.jit, static_argnames=("optimizer", "coef"))
def _first_state(params: Any, critic: Critic | None, *, optimizer: OptimizerConfig, coef: float) -> TrainState:
    wide = jax.tree.map(lambda x: jnp.array(x, accumulator(x.dtype), copy=True), params)
    moments = make_transform(optimizer).init(wide)
    return TrainState(jnp.zeros((), jnp.int32), wide, moments, jnp.array(coef, jnp.float32), critic)


def make_train_step(
    model: ModelConfig,
    lora: LoraConfig | None,
    loss: Loss,
    optimizer: OptimizerConfig,
    *,
    temperature: float,
    mesh: Mesh | None = None,
    entropy: EntropyBonus | None = None,
    remat: bool = True,
    head_chunk: int = HEAD_CHUNK,
    compute_dtype: Any = None,
) -> TrainStep:
    """step(state, base, batch) -> (state, metrics): jitted, state donated, compiled once per shape of the batch.

    base: the frozen model under LoRA; None under full fine-tuning (lora=None), whose float32 parameters are cast
    to compute_dtype (if given) for the forward pass. With a mesh, every argument has an explicit sharding.

    A loss with statistics of the batch runs the forward pass over all of it first, without a gradient; the others
    make one pass. entropy: the bonus that is added, and how its coefficient, which is in the state, goes on.

    A batch without trainable tokens changes nothing but the step number. Neither does one whose loss or gradient is
    not finite: then `optim/nonfinite` is 1 and the parameters survive; the caller decides whether to go on.
    """
    scoring = Scoring(model, lora, temperature, mesh, remat, head_chunk, compute_dtype)
    state_sharding = _step_shardings(model, lora, optimizer, mesh)
    add, apply = _adding(scoring, loss, entropy), _applying(optimizer, entropy, state_sharding)

    def step(state: TrainState, base: Params | None, batch: Batch) -> tuple[TrainState, MetricArrays]:
        return apply(state, add(_nothing(loss, state), state.params, base, batch))

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    base_sharding = None if lora is None else base_shardings(model, mesh)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(state_sharding, base_sharding, batch_shardings(mesh, loss.columns)),
        out_shardings=(state_sharding, sharding.replicated(mesh)),
    )


def make_streamed_step(
    model: ModelConfig,
    lora: LoraConfig | None,
    loss: Loss,
    optimizer: OptimizerConfig,
    *,
    temperature: float,
    mesh: Mesh | None = None,
    entropy: EntropyBonus | None = None,
    remat: bool = True,
    head_chunk: int = HEAD_CHUNK,
    compute_dtype: Any = None,
) -> StreamedStep:
    """The step of `make_train_step` in pieces, for a batch of which only some whole groups are there yet.

    start(state) -> sums of nothing; add(sums, params, base, batch) -> sums, donating those it is given, compiled once
    per shape of the batch; finish(state, sums, denominator) -> (state, metrics), donating the state. The batches hold
    local weights (`aggregate.local_weights`), which the denominator of the whole divides in the end, so the
    parameters are those of one step on everything, up to the order of summation.
    """
    scoring = Scoring(model, lora, temperature, mesh, remat, head_chunk, compute_dtype)
    state_sharding = _step_shardings(model, lora, optimizer, mesh)
    add, apply = _adding(scoring, loss, entropy), _applying(optimizer, entropy, state_sharding)

    def start(state: TrainState) -> Sums:
        return _nothing(loss, state)

    def finish(state: TrainState, sums: Sums, denominator: Any) -> tuple[TrainState, MetricArrays]:
        scale = 1 / denominator  # XLA merges a division with that by the norm, and one part would not equal a whole
        grads, total = jax.tree.map(lambda x: x * scale, (sums.grads, sums.metrics["loss"]))
        return apply(state, Sums(grads, sums.metrics | {"loss": total}, sums.entropy_coef))

    if state_sharding is None:
        # kept, so that the first sums are bound to a device when the parameters are: else `add` compiles twice
        begin = jax.jit(start, keep_unused=True)
        return StreamedStep(begin, jax.jit(add, donate_argnums=0), jax.jit(finish, donate_argnums=0))
    assert mesh is not None
    params, whole = state_sharding.params, sharding.replicated(mesh)
    sums = Sums(params, whole, whole)
    base = None if lora is None else base_shardings(model, mesh)
    added, finished = (sums, params, base, batch_shardings(mesh, loss.columns)), (state_sharding, sums, whole)
    return StreamedStep(
        jax.jit(start, in_shardings=(state_sharding,), out_shardings=sums),
        jax.jit(add, donate_argnums=0, in_shardings=added, out_shardings=sums),
        jax.jit(finish, donate_argnums=0, in_shardings=finished, out_shardings=(state_sharding, whole)),
    )


def make_gradients(
    model: ModelConfig,
    lora: LoraConfig | None,
    loss: Loss,
    *,
    temperature: float,
    mesh: Mesh | None = None,
    entropy: EntropyBonus | None = None,
    remat: bool = True,
    head_chunk: int = HEAD_CHUNK,
    compute_dtype: Any = None,
) -> Gradients:
    """gradients(params, base, batch) -> (gradient of the weighted loss, metrics), jitted: a first step's, not made."""
    scoring = Scoring(model, lora, temperature, mesh, remat, head_chunk, compute_dtype)
    add = _adding(scoring, loss, entropy)

    def run(params: Any, base: Params | None, batch: Batch) -> tuple[Any, MetricArrays]:
        coef = jnp.array(entropy.start if entropy else 0.0, jnp.float32)
        sums = add(_nothing(loss, TrainState(None, params, None, coef)), params, base, batch)
        return sums.grads, _metrics(sums.metrics)

    return jax.jit(run)


def make_eval_logprobs(
    model: ModelConfig,
    lora: LoraConfig | None,
    *,
    temperature: float,
    mesh: Mesh | None = None,
    head_chunk: int = HEAD_CHUNK,
    compute_dtype: Any = None,
) -> EvalLogprobs:
    """logprobs(params, base, batch) -> logp_NBT: the trainer's log-prob of each target in the mask, 0 elsewhere.

    The very function the step differentiates, to compare with what the sampler recorded (I3).
    """
    scoring = Scoring(model, lora, temperature, mesh, False, head_chunk, compute_dtype)

    return jax.jit(scoring.all_logprobs)


def _inputs(batch: Batch, logp: jax.Array, entropy: jax.Array | None = None) -> TokenInputs:
    """What the loss sees of a batch or a micro-batch."""
    return TokenInputs(
        logp_new=logp,
        logp_sampler=batch.logp_sampler,
        advantage=batch.advantage,
        mask=batch.mask,
        logp_old=batch.logp_old,
        logp_ref=batch.logp_ref,
        correction=batch.correction,
        entropy=entropy,
        position=batch.positions,
        episode=batch.episodes,
        group=batch.groups,
    )


def _adding(scoring: Scoring, loss: Loss, entropy: EntropyBonus | None) -> Add:
    """add(sums, params, base, batch): the sums with those of the real micro-batches of a batch on top."""

    def micro_loss(
        params: Any, base: Params | None, micro: Batch, pooled: MetricArrays, coef: jax.Array
    ) -> tuple[jax.Array, MetricArrays]:
        logp, spread = scoring.logprobs(params, base, micro, entropy_gradient=entropy is not None)
        out = loss(_inputs(micro, logp, spread)._replace(pooled=pooled))
        spread = jnp.where(micro.mask, spread, 0.0)
        weight = jnp.where(micro.mask, micro.weight, 0.0)
        total = jnp.sum(weight * out.loss)
        if entropy is not None:
            total -= coef * jnp.sum(weight * spread)
        sums = {name: x.sum() for name, x in (out.metrics | {"entropy": spread}).items()}
        if micro.observed is not None:
            heard = -jnp.sum(micro.observed * jnp.where(micro.observed > 0, logp, 0.0))
            total, sums = total + loss.observation_coef * heard, sums | {"observation_loss": heard}
        return total, sums | {"loss": total, "tokens": micro.mask.sum().astype(total.dtype)}

    gradient = jax.grad(micro_loss, has_aux=True)

    def add(sums: Sums, params: Any, base: Params | None, batch: Batch) -> Sums:
        pooled: MetricArrays = {}
        if loss.row.statistics is not None:
            pooled = loss.statistics(_inputs(batch, scoring.all_logprobs(params, base, batch)))

        def body(i: jax.Array, sums: Sums) -> Sums:
            grads, metrics = gradient(params, base, micro_batch(batch, i), micro_batch(pooled, i), sums.entropy_coef)
            more = lambda a, x: a + x.astype(a.dtype)  # noqa: E731
            return Sums(
                jax.tree.map(more, sums.grads, grads), jax.tree.map(more, sums.metrics, metrics), sums.entropy_coef
            )

        return lax.fori_loop(0, batch.count, body, sums)

    return add


def _nothing(loss: Loss, state: TrainState) -> Sums:
    """The sums before any micro-batch."""
    heard = ["observation_loss"] if loss.observation_coef else []
    names = (*loss.metrics, "entropy", "loss", "tokens", *heard)
    grads = jax.tree.map(lambda p: jnp.zeros(p.shape, accumulator(p.dtype)), state.params)
    return Sums(grads, {name: jnp.zeros((), jnp.float32) for name in names}, state.entropy_coef)


def _applying(optimizer: OptimizerConfig, entropy: EntropyBonus | None, where: TrainState | None) -> Apply:
    """apply(state, sums): clip the gradient, move the parameters by it and report, unless there is nothing to move by.

    where: the shardings of the state when there is a mesh.
    """
    transform, schedule = make_transform(optimizer), make_schedule(optimizer)

    def apply(state: TrainState, sums: Sums) -> tuple[TrainState, MetricArrays]:
        grads = sums.grads
        if where is not None:
            grads = lax.with_sharding_constraint(grads, where.params)
        norm, rate = optax.tree.norm(grads), schedule(state.step)
        finite = jnp.isfinite(norm) & jnp.isfinite(sums.metrics["loss"])
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        use = finite & (sums.metrics["tokens"] > 0)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(use, new, old), (params, opt_state), (state.params, state.opt_state)
        )
        report = {"optim/grad_norm": norm, "optim/lr": rate, "optim/nonfinite": (~finite).astype(norm.dtype)}
        metrics, coef = _metrics(sums.metrics), state.entropy_coef
        if entropy is not None:
            report["optim/entropy_coef"] = coef
            coef = jnp.where(use, entropy.step(coef, metrics["optim/entropy"]), coef)
        return TrainState(state.step + 1, params, opt_state, coef, state.critic), metrics | report

    return apply


def _metrics(sums: MetricArrays) -> MetricArrays:
    """Weighted sums and the count of tokens as they are, and means over tokens of the rest."""
    tokens = jnp.maximum(sums["tokens"], 1.0)
    whole = ("loss", "observation_loss", "tokens")
    return {f"optim/{name}": x if name in whole else x / tokens for name, x in sums.items()}


# --- shardings -----------------------------------------------------------------------------------


def batch_shardings(mesh: Mesh, columns: Collection[str] = ()) -> Batch:
    """Rows over `data` and `fsdp`, everything else whole. columns: the optional ones that the batches have."""
    rows = named_sharding(mesh, (None, "batch", None))
    fields = {name: rows for name in Batch.__dataclass_fields__ if name not in OPTIONAL or name in columns}
    return Batch(**fields | {"count": sharding.replicated(mesh)})


def base_shardings(model: ModelConfig, mesh: Mesh) -> Params:
    """Shardings of a model's parameters."""
    specs = param_specs(model)
    return sharding.shardings(mesh, logical_axes(specs), abstract(specs, jnp.dtype(jnp.float32)))


def state_shardings(
    model: ModelConfig, lora: LoraConfig | None, optimizer: OptimizerConfig, mesh: Mesh, *, critic: bool = False
) -> TrainState:
    """Shardings of a training state: each optimizer moment lies with its parameter, a critic whole everywhere."""
    specs = param_specs(model) if lora is None else lora_specs(model, lora)
    shapes = abstract(specs, jnp.dtype(jnp.float32))
    params = sharding.shardings(mesh, logical_axes(specs), shapes)
    transform, whole = make_transform(optimizer), sharding.replicated(mesh)
    opt_state = optax.tree.map_params(
        transform,
        lambda _, where: where,
        jax.eval_shape(transform.init, shapes),
        params,
        transform_non_params=lambda _: whole,
    )
    of_critic = jax.tree.map(lambda _: whole, jax.eval_shape(lambda: init_critic(model.width))) if critic else None
    return TrainState(whole, params, opt_state, whole, of_critic)


def _step_shardings(
    model: ModelConfig, lora: LoraConfig | None, optimizer: OptimizerConfig, mesh: Mesh | None
) -> TrainState | None:
    """Those of a state with or without a critic: one sharding stands for all there may be of it."""
    if mesh is None:
        return None
    return replace(state_shardings(model, lora, optimizer, mesh), critic=sharding.replicated(mesh))
