"""A run's plan: its configuration held against the model, the data and itself, before a weight is read.

`check` refuses what cannot work and what would have no effect, cheapest first: names, combinations, the tokenizer's
template, the first task's prompt. It must not load weights, write anything or start what lasts.
"""

import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import trio
from jax.sharding import Mesh

from jaxrl.algo.advantage import CriticFit, needs_peers, reads_batch
from jaxrl.algo.algorithm import Algorithm, explain, resolve
from jaxrl.algo.learning_rate import suggested_learning_rate
from jaxrl.algo.objective import Objective
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.step import base_shardings, state_shardings
from jaxrl.algo.variants import Variant, own_variant, variant
from jaxrl.chat.renderer import Renderer
from jaxrl.chat.tokenizer import Tokenizer
from jaxrl.config import Config, config_renderer, describe
from jaxrl.env import EnvGroupBuilder, RLDataset
from jaxrl.models.config import ModelConfig
from jaxrl.models.sharding import make_mesh
from jaxrl.runtime.asyncio_bridge import open_asyncio
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.executor import refuse_fork
from jaxrl.runtime.learner import MeshShape, Packing
from jaxrl.runtime.loop import Mode, Sampling, Teaching
from jaxrl.runtime.opponents import NoSampler
from jaxrl.runtime.policy import check_policy, policy_config, policy_tokenizer
from jaxrl.runtime.run_dir import RunDir, is_run_dir
from jaxrl.runtime.signals import run_interruptible
from jaxrl.settings import above_zero, at_least

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A configuration that was checked, with the small things made from it.

    recorded: what a resumed run must agree with. not_resumable: why there can be none, None where there can.
    """

    model: ModelConfig
    renderer: Renderer
    train: RLDataset
    test: RLDataset | None
    objective: Objective
    teaching: Teaching
    critic: CriticFit | None
    optimizer: OptimizerConfig
    packing: Packing
    sampling: Sampling
    mode: Mode
    dtype: Any
    mesh: Mesh | None
    steps: int
    recorded: Mapping[str, Any]
    not_resumable: str | None


def check(config: Config, executor: Executor | None) -> Plan:
    """Everything that can fail without a model's weights, cheapest first."""
    if config.dataset_builder is None:
        raise ValueError("dataset_builder is not given: name what to train on, or call train_multi_turn with tasks")
    algorithm = checked_algorithm(config)
    sampling, mode = sampling_of(config), _mode(config, executor)
    _check_inputs_stay(config)
    _check_frozen(config)
    _check_counts(config)
    dtype, mesh = _dtype(config.dtype), _mesh(config.mesh)
    model, packing = policy_config(config.model_name), config.packing or _default_packing(config.engine)
    _check_shapes(config, model, packing)
    tokenizer = policy_tokenizer(config.model_name)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer of {config.model_name} has {tokenizer.vocab_size} ids, its model only {model.vocab_size}; "
            "they do not belong together"
        )
    _check_references(config, tokenizer)
    renderer = config_renderer(config, tokenizer)
    train, test = run_interruptible(_datasets, config, renderer, algorithm)
    steps = steps_of(config, train)
    _check_used(config, train, test)
    _check_gap(config, steps)
    optimizer = _optimizer(config, model, steps)
    if mesh is not None:  # an axis that does not divide
        base_shardings(model, mesh)
        state_shardings(model, config.lora, optimizer, mesh)
    check_policy(config.model_name)
    return Plan(
        model=model,
        renderer=renderer,
        train=train,
        test=test,
        objective=algorithm.objective,
        teaching=_teaching(config, algorithm),
        critic=algorithm.critic,
        optimizer=optimizer,
        packing=packing,
        sampling=sampling,
        mode=mode,
        dtype=dtype,
        mesh=mesh,
        steps=steps,
        recorded=_recorded(config, optimizer),
        not_resumable=_PAST_WEIGHTS if config.sampler_gap is not None else None,
    )


def _check_counts(config: Config) -> None:
    if config.max_steps is not None:
        at_least("max_steps", config.max_steps, 1)
    for name in ("eval_every", "save_every", "num_groups_to_log", "seed"):
        at_least(name, getattr(config, name), 0)


def _check_shapes(config: Config, model: ModelConfig, packing: Packing) -> None:
    """Refuse a context that the model, a row or the mesh has no place for."""
    context, mesh = config.engine.context, config.mesh
    if context > model.max_positions:
        raise ValueError(
            f"engine.context={context} exceeds the {model.max_positions} positions that {config.model_name} was made "
            "for; lower it"
        )
    if max(packing.widths) < context - 1:
        raise ValueError(
            f"packing.widths={packing.widths} has no row for an episode that fills engine.context={context}; add a "
            f"width of {context}, or lower the context"
        )
    if packing.rows % (mesh.data * mesh.fsdp):
        raise ValueError(
            f"packing.rows={packing.rows} do not divide among mesh.data={mesh.data} times mesh.fsdp={mesh.fsdp} "
            f"devices; make it a multiple of {mesh.data * mesh.fsdp}"
        )


def sampling_of(config: Config) -> Sampling:
    """How episodes are drawn, in training and in evaluation."""
    above_zero("temperature", config.temperature)  # greedy samples teach nothing
    if config.eval_temperature:  # 0 is greedy
        above_zero("eval_temperature", config.eval_temperature)
    if config.val_max_turns is not None:
        at_least("val_max_turns", config.val_max_turns, 1)
    limits = Limits(**{f.name: getattr(config, f.name) for f in dataclasses.fields(Limits)})
    held_out = limits if config.val_max_turns is None else dataclasses.replace(limits, max_turns=config.val_max_turns)
    eval_temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return Sampling(config.seed, limits, config.temperature, held_out, eval_temperature, config.rollout_strategy)


def _mode(config: Config, executor: Executor | None) -> Mode:
    """How playing and training share the time."""
    at_least("max_sampling_attempts", config.max_sampling_attempts, 1)
    if executor is not None:
        refuse_fork(executor)
    ahead, stream = config.off_policy, config.stream_minibatch
    if config.engine.on_publish == "keep" and not (ahead and ahead.in_flight_updates):
        raise ValueError(
            "engine.on_publish='keep' has no effect: no group lives through an update, unless off_policy is given "
            "with in_flight_updates; leave it out"
        )
    if executor is not None and ahead is not None and not ahead.in_flight_updates:
        raise ValueError(
            "off_policy.in_flight_updates=False pins a group to the weights it started with, which sessions from a "
            "rollout_executor cannot do; leave it on, or run without an executor"
        )
    return Mode(
        steps_ahead=ahead.max_steps_off_policy if ahead else 0,
        groups_per_batch=ahead.groups_per_batch if ahead else None,
        minibatch=stream.groups_per_minibatch if stream else None,
        in_flight_updates=ahead.in_flight_updates if ahead else True,
        max_attempts=config.max_sampling_attempts,
    )


_PAST_WEIGHTS = "sampler_gap samples with weights of past steps, which checkpoints do not hold"


def _check_gap(config: Config, steps: int) -> None:
    gap = config.sampler_gap
    if gap is None:
        return
    if config.lora is None:
        raise ValueError("sampler_gap keeps an adapter for every step back, and lora=None trains none; give a LoRA")
    for name in ("off_policy", "stream_minibatch"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"sampler_gap with {name}: the age of a token would be the one setting plus whatever the machine makes "
                "of the other; leave one of them out"
            )
    if gap.steps_behind >= steps:
        raise ValueError(
            f"sampler_gap.steps_behind={gap.steps_behind} is never reached: the run has {steps} steps; lower it, or "
            "raise max_steps"
        )


def _check_inputs_stay(config: Config) -> None:
    """Refuse to read what lies in the run's own directory, which may be emptied before."""
    own = Path(config.log_path).expanduser().resolve()
    named = {"model_name": config.model_name, "reference_model": config.reference_model}
    named |= {f"teachers[{tag!r}]": name for tag, name in config.teachers.items()}
    named |= {f"frozen_policies[{name!r}]": past for name, past in config.frozen_policies.items()}
    for what, name in named.items():
        path = Path(name or "").expanduser().resolve()
        if name and path.exists() and path.is_relative_to(own):
            raise ValueError(f"{what}={name!r} lies in log_path={config.log_path!r}: give this run another log_path")


def past_run(path: str) -> RunDir:
    """The run directory of a finished run that a frozen policy is taken from."""
    return RunDir(Path(path).expanduser())


def _check_frozen(config: Config) -> None:
    for name, past in config.frozen_policies.items():
        if config.lora is None:
            raise ValueError(f"frozen_policies={{{name!r}: ...}} are adapters, and lora=None trains none; give a LoRA")
        run = past_run(past)
        if not is_run_dir(run.path) or not run.checkpoints.is_dir():
            raise ValueError(f"frozen_policies: {name!r} is {past!r}, which has no checkpoints; name a run directory")
        with Checkpointer(run.checkpoints, read_only=True) as checkpoints:
            if checkpoints.latest() is None:
                raise ValueError(f"frozen_policies: {past} holds no complete checkpoint; name a run that has saved one")
        theirs, ours = json.loads(run.config.read_text())["lora"], describe(config.lora)
        if theirs != ours:
            raise ValueError(f"frozen_policies: {name!r} is {past!r}, which trained lora={theirs}, and this run {ours}")


def _check_used(config: Config, train: RLDataset, test: RLDataset | None) -> None:
    """Refuse what this data gives no effect to (I12)."""
    groups = config.off_policy.groups_per_batch if config.off_policy else len(train.get_batch(0))
    if config.num_substeps > groups:
        raise ValueError(f"num_substeps={config.num_substeps} is more than the {groups} groups of a batch; lower it")
    for name in ("val_max_turns", "eval_temperature"):
        if test is None and getattr(config, name) is not None:
            raise ValueError(f"{name}={getattr(config, name)} has no effect: there are no held-out tasks")
    if config.stream_minibatch is not None:
        part, ahead = config.stream_minibatch.groups_per_minibatch, config.off_policy
        most = ahead.groups_per_batch if ahead else len(train.get_batch(0))
        if part > most:
            raise ValueError(
                f"stream_minibatch.groups_per_minibatch={part} is more than the {most} groups of a step, so it would "
                "never be reached; lower it, or leave stream_minibatch out"
            )


def steps_of(config: Config, train: RLDataset) -> int:
    """Steps of the run, a batch each: what is asked for, at most one pass over the data."""
    if config.off_policy is None:
        most, unit = len(train), "batches"
    else:
        groups, wanted = sum(len(train.get_batch(i)) for i in range(len(train))), config.off_policy.groups_per_batch
        most, unit = groups // wanted, "times off_policy.groups_per_batch groups"
        if not most:
            raise ValueError(
                f"off_policy.groups_per_batch={wanted}, but the training data has {groups} groups in all; lower it, or "
                "give more tasks"
            )
    steps = most if config.max_steps is None else config.max_steps
    if steps > most:
        raise ValueError(f"max_steps={steps}, but the training data has {most} {unit}; lower it, or give more tasks")
    return steps


def _recorded(config: Config, optimizer: OptimizerConfig) -> dict[str, Any]:
    """What a resumed run must agree with: the configuration, and what was worked out from it."""
    decays = {} if optimizer.schedule == "constant" else {"schedule_steps": optimizer.total_steps}
    parts = explain(_variant(config), config.loss_fn_config)
    algorithm = {f"{part.kind} {part.name}": dict(part.knobs) for part in parts}
    return describe(config) | decays | describe({"learning_rate": optimizer.learning_rate, "algorithm": algorithm})


def _variant(config: Config) -> Variant:
    """The row that loss_fn names: of the table, or of one's own."""
    named = config.loss_fn
    return own_variant(named, _imported(named)) if ":" in named else variant(named)


def checked_algorithm(config: Config) -> Algorithm:
    """The row and its overrides. Raises ValueError for what does not go together, or with how the run is made."""
    named, algorithm = config.loss_fn, resolve(_variant(config), config.loss_fn_config)
    at_least("num_substeps", config.num_substeps, 1)
    streamed = config.stream_minibatch is not None
    for refused, reason in (
        (
            algorithm.objective.needs_substeps and config.num_substeps == 1,
            f"loss_fn={named}: the ratio is against the policy before the batch (anchor=old), which with "
            "num_substeps=1 is the policy itself, so nothing is ever clipped; raise that, or take anchor=sampler",
        ),
        (
            references_named(config) != {} and not algorithm.reads_reference,
            f"reference_model and teachers have no effect: nothing in loss_fn={named} reads a reference; give a kl",
        ),
        (
            algorithm.advantage == "zero" and algorithm.reads_reference and config.reference_model is None,
            f"loss_fn={named} learns from a teacher alone: name it with reference_model, which also teaches groups "
            "without a tag in teachers",
        ),
        (
            config.max_sampling_attempts > 1 and not needs_peers(algorithm.advantage),
            f"max_sampling_attempts={config.max_sampling_attempts} replaces groups of equal rewards, and with "
            f"advantage={algorithm.advantage} those teach too; leave it out",
        ),
        *((streamed and part, f"stream_minibatch takes the gradient part by part, but {part}; leave it out")
          for part in _of_the_whole_batch(config, algorithm)),
    ):  # fmt: skip
        if refused:
            raise ValueError(reason)
    return algorithm


def _of_the_whole_batch(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """What cannot be done for a part of a batch, and why."""
    if config.num_substeps > 1:
        yield "num_substeps: it would change the weights under groups that still play"
    if algorithm.objective.whole_batch is not None:
        yield f"loss_fn: {algorithm.objective.whole_batch}"
    if reads_batch(algorithm.advantage):
        yield "advantage: its numbers depend on the other groups of the batch"
    if algorithm.whole_batch is not None:
        yield algorithm.whole_batch


def references_named(config: Config) -> dict[str, str]:
    """Name -> model of every reference but the trained model itself; "" is for groups without a teacher's tag."""
    return dict(config.teachers) | ({"": config.reference_model} if config.reference_model is not None else {})


def _check_references(config: Config, tokenizer: Tokenizer) -> None:
    """Raise unless every reference can be loaded and reads the policy's tokens."""
    for tag, name in references_named(config).items():
        where = f"teachers[{tag!r}]={name!r}" if tag else f"reference_model={name!r}"
        model, theirs = policy_config(name), policy_tokenizer(name)
        if theirs.encode(_PROBE) != tokenizer.encode(_PROBE) or model.vocab_size < tokenizer.vocab_size:
            raise ValueError(f"{where} has another tokenizer than {config.model_name!r}, so it cannot score its tokens")
        if model.max_positions < config.engine.context:
            raise ValueError(
                f"{where} was made for {model.max_positions} positions, and engine.context={config.engine.context}"
            )
        check_policy(name)


_PROBE = "What is 12 + 34?\n\tTokenizers differ: \u00e9\u4e16 _x9 ()"


def _imported(path: str) -> object:
    """What `package.module:name` names. Raises ValueError when there is no such thing."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"loss_fn={path!r} cannot be imported ({error}); expected package.module:function") from error


def _teaching(config: Config, algorithm: Algorithm) -> Teaching:
    return Teaching(
        algorithm.advantage,
        config.overlong_masking,
        config.shaping,
        knobs=algorithm.advantage_knobs,
        reference=algorithm.reads_reference,
        teachers=tuple(config.teachers),
        penalize=algorithm.penalize,
        penalties=algorithm.penalties,
        pairs=algorithm.objective.loss.row.pairs,
    )


def _optimizer(config: Config, model: ModelConfig, steps: int) -> OptimizerConfig:
    """The optimizer with the run's learning rate, and the run's length for a schedule that decays."""
    rate = config.learning_rate
    if config.optimizer.learning_rate not in (OptimizerConfig().learning_rate, rate):
        raise ValueError(
            f"optimizer.learning_rate={config.optimizer.learning_rate} has no effect: set learning_rate (now {rate})"
        )
    rate = suggested_learning_rate(model, lora=config.lora is not None) if rate is None else rate
    chosen = dataclasses.replace(config.optimizer, learning_rate=rate)
    if chosen.schedule != "constant" and chosen.total_steps is None:
        chosen = dataclasses.replace(chosen, total_steps=steps * config.num_substeps)
    return chosen


def _default_packing(engine: EngineConfig) -> Packing:
    return Packing(tuple(sorted({max(32, engine.context // 4), max(32, engine.context // 2), engine.context})))


def _dtype(name: str | None) -> Any:
    name = name or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _mesh(shape: MeshShape) -> Mesh | None:
    """The device mesh; None for one device."""
    if shape == MeshShape():
        return None
    return make_mesh(shape.data, shape.fsdp, shape.tensor)


async def _datasets(config: Config, renderer: Renderer, algorithm: Algorithm) -> tuple[RLDataset, RLDataset | None]:
    """Build the datasets and open the first episode, to see that it can be played at all."""
    assert config.dataset_builder is not None
    train, test = await config.dataset_builder(renderer)
    if not len(train):
        raise ValueError("the training dataset is empty: give at least one batch of tasks")
    async with open_asyncio():
        await _try_first(train.get_batch(0)[0], config.engine.context, algorithm)
    return train, test


async def _try_first(builder: EnvGroupBuilder, context: int, algorithm: Algorithm) -> None:
    try:
        with trio.fail_after(_LOOK_SECONDS):
            members, prompt = await _look_at(builder)
    except Exception as error:
        error.add_note(f"in a first look, before training, at task {builder.describe()[:_SHOWN]!r}")
        raise
    if algorithm.objective.loss.row.pairs and members != 2:
        raise ValueError(f"group_size={members}: the loss compares pairs of episodes; set it to 2")
    if members < 2 and needs_peers(algorithm.advantage):
        raise ValueError(
            f"group_size={members}: an episode is judged against the others of its group, so a group of one teaches "
            "nothing; use at least 2, or advantage=critic, whose values are what it is judged against"
        )
    if prompt >= context:
        raise ValueError(
            f"the prompt of the first task has {prompt} tokens, which leaves no room to answer in "
            f"engine.context={context}; raise that, or shorten the prompt: {builder.describe()[:_SHOWN]!r}"
        )


_SHOWN = 200  # characters of a task's description
_LOOK_SECONDS = 600.0  # the first container may have to be fetched


async def _look_at(builder: EnvGroupBuilder) -> tuple[int, int]:
    """How many members the group has, and how many tokens its prompt (0 where only a run can open it)."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(builder.cleanup)
        envs = await builder.make_envs()
        for env in envs:
            stack.push_async_callback(env.close)
        if not envs or builder.coupled:  # a seat opens when the others sit too
            return len(envs), 0
        try:
            observation, _ = await envs[0].initial_observation()
        except NoSampler:
            return len(envs), 0
        return len(envs), len(observation)
