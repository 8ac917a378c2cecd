"""A run: its configuration, the order in which its parts are checked and opened, and its two entry points.

    main(config)                                        a dataset builder says what to train on
    train_multi_turn(config, tasks, env_factory, ...)   tasks and a factory of message-level envs do
    command(**defaults)                                 main, with key=value arguments from the command line

Everything that can be wrong is found out before a weight is read: names, combinations, the tokenizer's template,
the first task's prompt, the run directory.
"""

import dataclasses
import importlib
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import chz
import jax
import jax.numpy as jnp
import trio
from jax.sharding import Mesh
from rich.console import Console

from jaxrl.algo.advantage import CriticFit, needs_peers, reads_batch
from jaxrl.algo.algorithm import Algorithm, explain, resolve
from jaxrl.algo.learning_rate import suggested_learning_rate
from jaxrl.algo.objective import Objective
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.shaping import Shaping
from jaxrl.algo.variants import VARIANTS, Variant, own_variant, variant
from jaxrl.chat.families import renderer_for
from jaxrl.chat.renderer import Renderer
from jaxrl.chat.tokenizer import Tokenizer
from jaxrl.env import EnvFactory, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import LoraConfig
from jaxrl.models.sharding import make_mesh
from jaxrl.models.spec import Params
from jaxrl.runtime.asyncio_bridge import open_asyncio
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.endpoint import check_listening
from jaxrl.runtime.engine import EngineConfig, open_engine
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.executor import open_executor, refuse_fork
from jaxrl.runtime.failure import one_line_errors
from jaxrl.runtime.lag import Lag, SamplerGap
from jaxrl.runtime.learner import Learner, MeshShape, Packing, Reference
from jaxrl.runtime.log import MetricsLog, Progress, held_out, read_metrics
from jaxrl.runtime.loop import Mode, Run, Sampling, Schedule, Teaching, train_loop
from jaxrl.runtime.message_env import MessageEnvDataset, TurnRules
from jaxrl.runtime.opponents import NoSampler
from jaxrl.runtime.policy import check_policy, load_policy, policy_config, policy_tokenizer, save_policy
from jaxrl.runtime.report import write_report
from jaxrl.runtime.rollout import PlayGroup
from jaxrl.runtime.run_dir import RunDir, open_run_dir
from jaxrl.runtime.sampler import Sampler
from jaxrl.runtime.signals import run_interruptible
from jaxrl.runtime.strategy import FailFast, Strategy
from jaxrl.runtime.warm_start import Demonstrator, WarmStart, run_warm_start
from jaxrl.runtime.weights import snapshot
from jaxrl.types import Task

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class StreamMinibatchConfig:
    """Streaming, still on-policy: a step's gradient is taken this many groups at a time, as they finish."""

    groups_per_minibatch: int

    def __post_init__(self) -> None:
        _at_least("stream_minibatch.groups_per_minibatch", self.groups_per_minibatch, 1)


@dataclasses.dataclass(frozen=True)
class AsyncConfig:
    """Asynchronous: groups of later steps play while a step trains.

    max_steps_off_policy: no token is older than this when it is trained. groups_per_batch: groups a step.
    in_flight_updates: a group under way goes on with newly published weights (what becomes of its keys and values is
    engine.on_publish); else it ends with the weights it started with.
    """

    max_steps_off_policy: int
    groups_per_batch: int
    in_flight_updates: bool = True

    def __post_init__(self) -> None:
        _at_least("off_policy.max_steps_off_policy", self.max_steps_off_policy, 1)
        _at_least("off_policy.groups_per_batch", self.groups_per_batch, 1)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: expected at least {least}")


@chz.chz
class Config:
    """Everything a run depends on. Nested fields are set with dots: optimizer.schedule=cosine."""

    model_name: str = chz.field(doc="Hugging Face directory or hub id, a .gguf file, or 'tiny'")
    dataset_builder: RLDatasetBuilder | None = chz.field(default=None, doc="what to train on, and what to hold out")
    log_path: str = chz.field(doc="directory of the run")
    behavior_if_log_dir_exists: Literal["ask", "resume", "delete", "raise"] = chz.field(
        default="ask", doc="when log_path holds a run already"
    )
    max_steps: int | None = chz.field(default=None, doc="optimizer steps; None is one pass over the training data")
    learning_rate: float | None = chz.field(default=None, doc="peak learning rate of Adam; None suits the model's size")
    optimizer: OptimizerConfig = chz.field(default_factory=OptimizerConfig, doc="schedule, clipping, decay")
    lora: LoraConfig | None = chz.field(default_factory=LoraConfig, doc="the adapter; None trains all weights")
    warm_start: WarmStart | None = chz.field(default=None, doc="supervised steps on all weights before the RL")
    loss_fn: str = chz.field(
        default="importance_sampling", doc=f"one of {', '.join(VARIANTS)}; or package.module:function, your own"
    )
    loss_fn_config: dict[str, int | float | str] = chz.field(
        default_factory=dict,
        doc="parts of it that differ (advantage, aggregation, kl, ...), and their knobs",
    )
    num_substeps: int = chz.field(default=1, doc="optimizer steps a batch, each on an equal part of its groups")
    reference_model: str | None = chz.field(
        default=None, doc="what a KL term is the distance from, or the teacher; None is the model as training finds it"
    )
    teachers: dict[str, str] = chz.field(
        default_factory=dict, doc="tag -> model that groups with this logging tag are scored under instead"
    )
    max_tokens: int = chz.field(doc="tokens a turn may sample")
    max_turns: int | None = chz.field(default=None, doc="turns of an episode")
    val_max_turns: int | None = chz.field(default=None, doc="turns of a held-out episode; None is max_turns")
    max_sampled_tokens: int | None = chz.field(default=None, doc="tokens an episode may sample")
    max_episode_tokens: int | None = chz.field(default=None, doc="tokens of an episode, observations included")
    max_tool_calls: int | None = chz.field(default=None, doc="tool calls of an episode; what is allowed still runs")
    episode_seconds: float | None = chz.field(default=None, doc="wall clock of an episode")
    sample_seconds: float | None = chz.field(default=None, doc="wall clock of one turn's sampling")
    grader_seconds: float | None = chz.field(default=None, doc="wall clock of one grading")
    rollout_strategy: Strategy = chz.field(
        default_factory=FailFast, doc="FailFast, RetryOnFailure or MinViableGroup: what a fault of an env leads to"
    )
    temperature: float = chz.field(default=1.0, doc="of training rollouts")
    eval_temperature: float | None = chz.field(default=None, doc="of held-out evaluation; None is as in training")
    overlong_masking: bool = chz.field(default=False, doc="do not train episodes that a budget cut short")
    frozen_policies: dict[str, str] = chz.field(
        default_factory=dict, doc="name -> finished run on the same base, whose last adapter opponents sample from"
    )
    shaping: Shaping = chz.field(default_factory=Shaping, doc="rewards of episodes that a budget cut short")
    stream_minibatch: StreamMinibatchConfig | None = chz.field(
        default=None, doc="take the gradient of groups as they finish; None waits for the whole batch"
    )
    off_policy: AsyncConfig | None = chz.field(default=None, doc="groups play on while a step trains; None is in turn")
    sampler_gap: SamplerGap | None = chz.field(
        default=None, doc="training samples with weights some steps old, or with noise, to study what that does"
    )
    max_sampling_attempts: int = chz.field(
        default=1, doc="replace groups of equal rewards, starting at most this many times a step's groups"
    )
    renderer_name: str | None = chz.field(
        default=None, doc="None recognises the tokenizer's own template; 'template' asks it"
    )
    thinking: Literal["keep", "strip", "compact"] | None = chz.field(
        default=None, doc="thoughts of earlier turns: kept, dropped as the template does, or all dropped now and then"
    )
    compact_turns: int | None = chz.field(
        default=None, doc="with thinking=compact: all thoughts are dropped after every so many turns"
    )
    enable_thinking: bool | None = chz.field(
        default=None, doc="False asks for turns without thoughts, in families that can be asked; None is on"
    )
    engine: EngineConfig = chz.field(default_factory=EngineConfig, doc="capacity and shapes of the sampler")
    packing: Packing | None = chz.field(default=None, doc="shapes of a training batch; None fits engine.context")
    mesh: MeshShape = chz.field(default_factory=MeshShape, doc="devices along each axis")
    remat: bool = chz.field(default=True, doc="compute activations again in the backward pass; False is faster")
    dtype: str | None = chz.field(default=None, doc="of the base: float32 or bfloat16; None is what suits the device")
    seed: int = chz.field(default=0, doc="every random number of the run follows from it")
    eval_every: int = chz.field(default=20, doc="steps between held-out evaluations; 0 is first and last only")
    save_every: int = chz.field(default=20, doc="steps between checkpoints; 0 is the last only")
    num_groups_to_log: int = chz.field(default=4, doc="groups of a batch whose episodes are recorded")


def command(**defaults: Any) -> None:
    """Run `main` with these defaults, overridden by key=value arguments. For a recipe's last line.

    A default that is a dataclass can be overridden as a whole (lora=None) or field by field (lora.rank=8).
    """
    with one_line_errors():
        main(parse(sys.argv[1:], **defaults))


def parse(arguments: Sequence[str], **defaults: Any) -> Config:
    """The configuration that `command` runs. Unknown keys are refused, with the nearest known one."""
    given = [argument.split("=", 1)[0] for argument in arguments]
    flat = {key: value for name, default in defaults.items() for key, value in _flat(name, default)}
    kept = {key: v for key, v in flat.items() if not any(key == g or key.startswith(f"{g}.") for g in given)}
    try:
        return chz.Blueprint(Config).apply(kept).make_from_argv(list(arguments))
    except ValueError as error:  # chz says in a note which argument it was; the command shows messages only
        raise ValueError(" ".join([str(error), *map(str.strip, getattr(error, "__notes__", ()))])) from error


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A default as the keys that chz can override one by one."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        yield name, value
        return
    yield name, type(value)
    for f in dataclasses.fields(value):
        yield from _flat(f"{name}.{f.name}", getattr(value, f.name))


def main(
    config: Config,
    rollout_executor: Executor | None = None,
    *,
    rollout_host: str = "127.0.0.1",
    rollout_advertised: str | None = None,
) -> Path:
    """Train as `config` says; return the run directory. Resources: one run directory, the device, one thread.

    rollout_executor: environments run in its workers (processes, other machines), sampling stays here. None is here.
    rollout_host, rollout_advertised: where its workers' sessions are listened for, and the name they reach this machine
    by if that is another. The default serves this machine only; the traffic is not encrypted.

    Errors: ValueError (and FileNotFoundError for models) for what can be seen to be wrong before the model is
    loaded; an environment's own error, with its task, turn and env in its notes; KeyboardInterrupt, for Ctrl-C and
    SIGTERM, after everything was closed.
    """
    workers = _workers(rollout_executor, rollout_host, rollout_advertised)
    plan = _checked(config, rollout_executor)
    _check_fresh(config, plan.run_dir)
    run_interruptible(_run, config, plan, workers)
    _say_how_it_went(plan.run_dir, Console(stderr=True))
    return plan.run_dir.path


def train_multi_turn(
    config: Config,
    tasks: Sequence[Task],
    env_factory: EnvFactory,
    val_tasks: Sequence[Task] = (),
    *,
    rollout_executor: Executor | None = None,
    rollout_host: str = "127.0.0.1",
    rollout_advertised: str | None = None,
    **dataset: Any,
) -> Path:
    """`main` for tasks and a factory of message-level envs, made anew for every episode.

    dataset: fields of `TaskDatasets`, such as batch_size and group_size; they replace `config.dataset_builder`.
    """
    builder = TaskDatasets(tuple(tasks), env_factory, tuple(val_tasks), **dataset)
    return main(
        chz.replace(config, dataset_builder=builder),
        rollout_executor,
        rollout_host=rollout_host,
        rollout_advertised=rollout_advertised,
    )


@dataclasses.dataclass(frozen=True)
class TaskDatasets(RLDatasetBuilder):
    """Datasets of message-level episodes: `batch_size` tasks a step, `group_size` episodes a task."""

    tasks: tuple[Task, ...]
    env_factory: EnvFactory
    val_tasks: tuple[Task, ...] = ()
    batch_size: int = 16
    group_size: int = 8
    rules: TurnRules = dataclasses.field(default_factory=TurnRules)

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Training tasks in their order; each held-out task once."""
        train = MessageEnvDataset(self.tasks, self.env_factory, renderer, self.batch_size, self.group_size, self.rules)
        if not self.val_tasks:
            return train, None
        return train, MessageEnvDataset(self.val_tasks, self.env_factory, renderer, len(self.val_tasks), 1, self.rules)


# --- what is checked before anything is loaded ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A configuration that was checked, with the small things made from it."""

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
    run_dir: RunDir


def _checked(config: Config, executor: Executor | None) -> _Plan:
    """Everything that can fail without a model's weights, cheapest first."""
    if config.dataset_builder is None:
        raise ValueError("dataset_builder is not given: name what to train on, or call train_multi_turn with tasks")
    algorithm = checked_algorithm(config)
    sampling, mode = _sampling(config), _mode(config, executor)
    _check_frozen(config)
    if config.max_steps is not None and config.max_steps < 1:
        raise ValueError(f"max_steps={config.max_steps}: expected at least 1, or None for one pass over the data")
    for name in ("eval_every", "save_every", "num_groups_to_log", "seed"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name}={getattr(config, name)}: expected 0 or more")
    dtype = _dtype(config.dtype)
    model = policy_config(config.model_name)
    if config.engine.context > model.max_positions:
        raise ValueError(
            f"engine.context={config.engine.context} exceeds the {model.max_positions} positions that "
            f"{config.model_name} was made for; lower it"
        )
    packing = config.packing or _default_packing(config.engine)
    if max(packing.widths) < config.engine.context - 1:
        raise ValueError(
            f"packing.widths={packing.widths} has no row for an episode that fills engine.context="
            f"{config.engine.context}; add a width of {config.engine.context}, or lower the context"
        )
    if packing.rows % (config.mesh.data * config.mesh.fsdp):
        raise ValueError(
            f"packing.rows={packing.rows} do not divide among mesh.data={config.mesh.data} times mesh.fsdp="
            f"{config.mesh.fsdp} devices; make it a multiple of {config.mesh.data * config.mesh.fsdp}"
        )
    tokenizer = policy_tokenizer(config.model_name)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer of {config.model_name} has {tokenizer.vocab_size} ids, its model only {model.vocab_size}; "
            "they do not belong together"
        )
    _check_references(config, tokenizer)
    renderer = config_renderer(config, tokenizer)
    train, test = run_interruptible(_datasets, config, renderer, 2 if needs_peers(algorithm.advantage) else 1)
    steps = _steps(config, train)
    _check_used(config, train, test)
    _check_gap(config, steps)
    optimizer = _optimizer(config, model, steps)
    check_policy(config.model_name)
    return _Plan(
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
        mesh=_mesh(config.mesh),
        steps=steps,
        run_dir=open_run_dir(config.log_path, config.behavior_if_log_dir_exists, config=_recorded(config, optimizer)),
    )


_Workers = Callable[[Sampler], AbstractAsyncContextManager[PlayGroup]]


def _workers(executor: Executor | None, host: str, advertised: str | None) -> _Workers | None:
    """What lets groups run in `executor`; None where they run here."""
    if executor is not None:
        check_listening(host, advertised)
        return partial(open_executor, executor, host=host, advertised=advertised)
    if (host, advertised) != ("127.0.0.1", None):
        raise ValueError(
            f"rollout_host={host!r} with rollout_advertised={advertised!r} has no effect: there is no rollout_executor"
        )
    return None


def _sampling(config: Config) -> Sampling:
    """How episodes are drawn, in training and in evaluation."""
    if not config.temperature > 0:
        raise ValueError(f"temperature={config.temperature}: training needs one above 0; greedy samples teach nothing")
    if config.eval_temperature is not None and not config.eval_temperature >= 0:
        raise ValueError(f"eval_temperature={config.eval_temperature}: expected 0 (greedy) or more")
    if config.val_max_turns is not None and config.val_max_turns < 1:
        raise ValueError(f"val_max_turns={config.val_max_turns}: expected at least 1, or None for max_turns")
    limits = Limits(**{f.name: getattr(config, f.name) for f in dataclasses.fields(Limits)})
    held_out = limits if config.val_max_turns is None else dataclasses.replace(limits, max_turns=config.val_max_turns)
    eval_temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return Sampling(config.seed, limits, config.temperature, held_out, eval_temperature, config.rollout_strategy)


def _mode(config: Config, executor: Executor | None) -> Mode:
    """How playing and training share the time."""
    _at_least("max_sampling_attempts", config.max_sampling_attempts, 1)
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


def _check_fresh(config: Config, run_dir: RunDir) -> None:
    if config.sampler_gap is not None and run_dir.resumed:
        raise ValueError(
            f"{run_dir.path} cannot be resumed: sampler_gap samples with weights of past steps, which checkpoints do "
            "not hold. behavior_if_log_dir_exists=delete starts over and destroys it; or give another log_path"
        )


def _check_frozen(config: Config) -> None:
    for name, past in config.frozen_policies.items():
        if config.lora is None:
            raise ValueError(f"frozen_policies={{{name!r}: ...}} are adapters, and lora=None trains none; give a LoRA")
        if not _checkpoints(past).is_dir():
            raise ValueError(f"frozen_policies: {name!r} is {past!r}, which has no checkpoints; name a run directory")


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


def config_renderer(config: Config, tokenizer: Tokenizer) -> Renderer:
    """The renderer of a run."""
    return renderer_for(
        tokenizer,
        config.renderer_name,
        thinking=config.thinking,
        enable_thinking=config.enable_thinking,
        compact_turns=config.compact_turns,
    )


def _steps(config: Config, train: RLDataset) -> int:
    """Optimizer steps of the run: what is asked for, at most one pass over the data."""
    if config.off_policy is None:
        most, unit = len(train), "batches"
    else:
        groups = sum(len(train.get_batch(i)) for i in range(len(train)))
        most, unit = groups // config.off_policy.groups_per_batch, "times off_policy.groups_per_batch groups"
    steps = most if config.max_steps is None else config.max_steps
    if steps > most or not most:
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
    _at_least("num_substeps", config.num_substeps, 1)
    streamed = config.stream_minibatch is not None
    for refused, reason in (
        (
            algorithm.objective.needs_substeps and config.num_substeps == 1,
            f"loss_fn={named}: the ratio is against the policy before the batch (anchor=old), which with "
            "num_substeps=1 is the policy itself, so nothing is ever clipped; raise that, or take anchor=sampler",
        ),
        (
            _references_named(config) != {} and not algorithm.reads_reference,
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


def _references_named(config: Config) -> dict[str, str]:
    """Name -> model of every reference but the trained model itself; "" is for groups without a teacher's tag."""
    return dict(config.teachers) | ({"": config.reference_model} if config.reference_model is not None else {})


def _check_references(config: Config, tokenizer: Tokenizer) -> None:
    """Raise unless every reference can be loaded and reads the policy's tokens."""
    for tag, name in _references_named(config).items():
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


async def _datasets(config: Config, renderer: Renderer, least: int) -> tuple[RLDataset, RLDataset | None]:
    """Build the datasets and open the first episode, to see that it can be played at all.

    least: members without which a group teaches nothing.
    """
    assert config.dataset_builder is not None
    train, test = await config.dataset_builder(renderer)
    if not len(train):
        raise ValueError("the training dataset is empty: give at least one batch of tasks")
    async with open_asyncio():
        await _try_first(train.get_batch(0)[0], config.engine.context, least)
    return train, test


async def _try_first(builder: EnvGroupBuilder, context: int, least: int) -> None:
    try:
        with trio.fail_after(_LOOK_SECONDS):
            members, prompt = await _look_at(builder)
    except Exception as error:
        error.add_note(f"in a first look, before training, at task {builder.describe()!r}")
        raise
    if members < least:
        raise ValueError(
            f"group_size={members}: an episode is judged against the others of its group, so a group of one teaches "
            "nothing; use at least 2, or advantage=critic, whose values are what it is judged against"
        )
    if prompt >= context:
        raise ValueError(
            f"the prompt of the first task has {prompt} tokens, which leaves no room to answer in "
            f"engine.context={context}: {builder.describe()!r}. Raise engine.context or shorten the prompt"
        )


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


# --- the run -------------------------------------------------------------------------------------


async def _run(config: Config, plan: _Plan, workers: _Workers | None) -> None:
    limiter = trio.CapacityLimiter(1)
    learner = await trio.to_thread.run_sync(_make_learner, config, plan, limiter=limiter)
    with ExitStack() as stack:
        checkpointer = stack.enter_context(Checkpointer(plan.run_dir.checkpoints))
        start, supplied = checkpointer.latest() if plan.run_dir.resumed else None, {}
        if start is not None:
            state, supplied = checkpointer.restore(start, learner.abstract_state())
            learner.restore(state)
        start = start or 0
        log = stack.enter_context(MetricsLog(plan.run_dir.metrics, start=start))
        progress = stack.enter_context(Progress(plan.steps, start=start))
        weights = learner.weights
        if plan.mode.steps_ahead:
            weights = await trio.to_thread.run_sync(snapshot, weights, limiter=limiter)
        async with AsyncExitStack() as opened:
            engine = await opened.enter_async_context(
                open_engine(
                    plan.model,
                    weights,
                    config=config.engine,
                    lora_scale=learner.lora_scale,
                    version=start,
                    decode_text=plan.renderer.tokenizer.decode,
                    limiter=limiter,
                )
            )
            for name, past in config.frozen_policies.items():
                adapter = await trio.to_thread.run_sync(_last_adapter, past, learner, limiter=limiter)
                engine.add_policy(name, adapter)
            await opened.enter_async_context(open_asyncio())
            play = await opened.enter_async_context(workers(engine)) if workers else None
            run = Run(
                engine=engine,
                learner=learner,
                limiter=limiter,
                train=plan.train,
                test=plan.test,
                schedule=Schedule(plan.steps, config.eval_every, config.save_every),
                sampling=plan.sampling,
                teaching=plan.teaching,
                run_dir=plan.run_dir,
                checkpointer=checkpointer,
                log=log,
                progress=progress,
                decode=plan.renderer.tokenizer.decode,
                groups_to_record=config.num_groups_to_log,
                mode=plan.mode,
                play=play,
                lag=Lag(config.sampler_gap, seed=config.seed) if config.sampler_gap else None,
            )
            await train_loop(run, start=start, supplied=supplied)
    await trio.to_thread.run_sync(write_report, plan.run_dir.path)


def _last_adapter(past: str, learner: Learner) -> Any:
    """The adapter of a run's last checkpoint. Raises CheckpointError when it does not fit this model."""
    with Checkpointer(_checkpoints(past)) as checkpointer:
        step = checkpointer.latest()
        if step is None:
            raise ValueError(f"frozen_policies: {past} holds no complete checkpoint; name a run that has saved one")
        state, _ = checkpointer.restore(step, learner.abstract_state())
    return state.params


def _checkpoints(past: str) -> Path:
    return Path(past).expanduser() / "checkpoints"


def _make_learner(config: Config, plan: _Plan) -> Learner:
    model, params = _load_or_warm_start(config, plan)
    return Learner(
        model,
        params,
        lora=config.lora,
        objective=plan.objective,
        optimizer=plan.optimizer,
        packing=plan.packing,
        temperature=config.temperature,
        remat=config.remat,
        mesh=plan.mesh,
        seed=config.seed,
        num_substeps=config.num_substeps,
        references=_references(config, plan),
        critic=plan.critic,
    )


def _references(config: Config, plan: _Plan) -> dict[str, Reference]:
    """The models that batches are scored under, but for the trained one's own base."""
    load = partial(load_policy, dtype=plan.dtype, seed=config.seed, mesh=plan.mesh)
    return {tag: Reference(*load(name)) for tag, name in _references_named(config).items()}


def _load_or_warm_start(config: Config, plan: _Plan) -> tuple[ModelConfig, Params]:
    """The base of the run. A warm start is kept in the run directory, so that a resumed run starts from the same."""
    kept = plan.run_dir.path / "warm_start"
    if config.warm_start is not None and (kept / "model").is_dir():
        return load_policy(str(kept / "model"), dtype=plan.dtype, mesh=plan.mesh)
    model, params = load_policy(config.model_name, dtype=plan.dtype, seed=config.seed, mesh=plan.mesh)
    if config.warm_start is None:
        return model, params
    kept.mkdir(exist_ok=True)
    params = run_warm_start(
        config.warm_start,
        model,
        params,
        plan.renderer,
        packing=plan.packing,
        seed=config.seed,
        log=kept / "metrics.jsonl",
        remat=config.remat,
        mesh=plan.mesh,
        checkpoint=trio.from_thread.check_cancelled,
    )
    part = kept / "model.part"
    shutil.rmtree(part, ignore_errors=True)
    save_policy(part, model, params, plan.renderer.tokenizer)
    part.rename(kept / "model")
    return load_policy(str(kept / "model"), dtype=plan.dtype, mesh=plan.mesh)


# --- what the user sees --------------------------------------------------------------------------


def _say_how_it_went(run_dir: RunDir, console: Console) -> None:
    """Held-out success before and after, and where everything lies."""
    steps = read_metrics(run_dir.metrics)
    evaluated = [m for m in steps if held_out(m)]
    first, last = (evaluated[0], evaluated[-1]) if evaluated else ({}, {})
    # An env's own metric is missing where no episode reached its end; the reward never is.
    name = held_out({name: 0.0 for name in first if name in last})
    if name:
        console.print(
            f"held-out {name.removeprefix('test/')}: {first[name]:.3f} before training, {last[name]:.3f} after "
            f"{len(steps)} steps (the same tasks, sampled the same way)",
            markup=False,
        )
    console.print(f"report: {run_dir.report}\ncurve:  {run_dir.curve}", markup=False, soft_wrap=True)


def describe(config: Any) -> Any:
    """A configuration as JSON-able values, each dataclass with its type's name where a base class was declared."""
    if chz.is_chz(config):
        return {f: describe(getattr(config, f)) for f in chz.chz_fields(config)}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: describe(getattr(config, f.name)) for f in dataclasses.fields(config)}
        named = isinstance(config, (RLDatasetBuilder, Demonstrator, Strategy))
        return {"type": type(config).__qualname__, **fields} if named else fields
    if isinstance(config, Mapping):
        return {str(k): describe(v) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [describe(v) for v in config]
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)
    return config if config is None or isinstance(config, (bool, int, float, str)) else _ADDRESS.sub("", repr(config))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # differs from process to process, so a resumed run would look changed
