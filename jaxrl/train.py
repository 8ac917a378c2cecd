"""A run: its three entry points, and the order in which its parts are opened.

    main(config)                                        a dataset builder says what to train on
    train_multi_turn(config, tasks, env_factory, ...)   tasks and a factory of message-level envs do
    command(defaults)                                   main, with key=value arguments from the command line

What a run depends on is `jaxrl.config`; what can be wrong is found out in `jaxrl.plan`, before a weight is read.
"""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import chz
import jax
import jax.numpy as jnp
import trio
from rich.console import Console

from jaxrl.chat.renderer import Renderer
from jaxrl.config import AsyncConfig, Config, StreamMinibatchConfig, config_renderer, describe, parse
from jaxrl.env import EnvFactory, RLDataset, RLDatasetBuilder
from jaxrl.models.config import ModelConfig
from jaxrl.models.spec import Params
from jaxrl.plan import Plan, check, checked_algorithm, past_run, references_named
from jaxrl.runtime.asyncio_bridge import open_asyncio
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.endpoint import check_listening
from jaxrl.runtime.engine import open_engine
from jaxrl.runtime.executor import open_executor
from jaxrl.runtime.failure import one_line_errors
from jaxrl.runtime.lag import Lag
from jaxrl.runtime.learner import Learner, Reference
from jaxrl.runtime.log import MetricsLog, Progress, held_out, read_metrics, trained_nothing
from jaxrl.runtime.loop import Run, Schedule, train_loop
from jaxrl.runtime.message_env import MessageEnvDataset, TurnRules
from jaxrl.runtime.policy import load_policy, save_policy
from jaxrl.runtime.report import write_report
from jaxrl.runtime.rollout import PlayGroup
from jaxrl.runtime.run_dir import RunDir, claimed, open_run_dir
from jaxrl.runtime.sampler import Sampler
from jaxrl.runtime.signals import run_interruptible
from jaxrl.runtime.warm_start import run_warm_start
from jaxrl.runtime.weights import snapshot
from jaxrl.types import Task

__all__ = [
    "AsyncConfig",
    "Config",
    "StreamMinibatchConfig",
    "TaskDatasets",
    "checked_algorithm",
    "command",
    "config_renderer",
    "describe",
    "main",
    "one_line_errors",
    "parse",
    "train_multi_turn",
]


def command(
    defaults: Mapping[str, Any],
    *,
    check: Callable[[Config], None] = lambda config: None,
    afterwards: Callable[[Config, Path], None] = lambda config, run: None,
) -> None:
    """Run `main` with these defaults, overridden by key=value arguments. For a recipe's last line.

    A default that is a dataclass can be overridden as a whole (lora=None) or field by field (lora.rank=8). check raises
    ValueError for what does not go together; afterwards is given the run directory. Errors end in one line.
    """
    with one_line_errors():
        config = parse(sys.argv[1:], **defaults)
        check(config)
    with one_line_errors(interrupted=lambda: _how_it_goes_on(config)):
        afterwards(config, main(config))


def _how_it_goes_on(config: Config) -> str:
    """What an interrupted run has saved."""
    run = RunDir(Path(config.log_path).expanduser())
    saved = None
    if run.checkpoints.is_dir():
        with Checkpointer(run.checkpoints, read_only=True) as checkpoints:
            saved = checkpoints.latest()
    if saved is None:
        return f"interrupted before the first checkpoint (save_every={config.save_every}): a resumed run starts over"
    return f"interrupted; behavior_if_log_dir_exists=resume goes on after step {saved}"


def main(
    config: Config,
    rollout_executor: Executor | None = None,
    *,
    rollout_host: str = "127.0.0.1",
    rollout_advertised: str | None = None,
) -> Path:
    """Train as `config` says; return the run directory. Resources: one run directory, the device, worker threads,
    of which one at a time uses the device.

    rollout_executor: environments run in its workers (processes, other machines), sampling stays here. None is here.
    rollout_host, rollout_advertised: where its workers' sessions are listened for, and the name they reach this machine
    by if that is another. The default serves this machine only; the traffic is not encrypted.

    Errors: ValueError (and FileNotFoundError for models) for what can be seen to be wrong before the model is
    loaded; an environment's own error, with its task, turn and env in its notes; KeyboardInterrupt, for Ctrl-C and
    SIGTERM, after everything was closed.
    """
    workers = _workers(rollout_executor, rollout_host, rollout_advertised)
    plan = check(config, rollout_executor)
    with claimed(config.log_path) if jax.process_index() == 0 else nullcontext():  # of several processes of one run
        run_dir = open_run_dir(
            config.log_path,
            config.behavior_if_log_dir_exists,
            config=plan.recorded,
            not_resumable=plan.not_resumable,
        )
        run_interruptible(_run, config, plan, run_dir, workers)
        _say_how_it_went(run_dir, _console())
    return run_dir.path


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


# --- the run -------------------------------------------------------------------------------------

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


async def _run(config: Config, plan: Plan, run_dir: RunDir, workers: _Workers | None) -> None:
    limiter = trio.CapacityLimiter(1)
    learner = await trio.to_thread.run_sync(_make_learner, config, plan, run_dir, limiter=limiter)
    with ExitStack() as stack:
        checkpointer = stack.enter_context(Checkpointer(run_dir.checkpoints))
        start, supplied = checkpointer.latest() if run_dir.resumed else None, {}
        if start is not None:
            state, supplied = checkpointer.restore(start, learner.abstract_state())
            learner.restore(state)
        start = start or 0
        if run_dir.resumed:
            _console().print(f"resumed after step {start}" if start else "no checkpoint yet: starts over", markup=False)
        log = stack.enter_context(MetricsLog(run_dir.metrics, start=start))
        progress = stack.enter_context(Progress(plan.steps, start=start))
        weights = await trio.to_thread.run_sync(lambda: learner.weights, limiter=limiter)
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
                run_dir=run_dir,
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
    await trio.to_thread.run_sync(write_report, run_dir.path)


def _last_adapter(past: str, learner: Learner) -> Any:
    """The adapter of a run's last checkpoint. Raises CheckpointError when it does not fit this model."""
    with Checkpointer(past_run(past).checkpoints, read_only=True) as checkpointer:
        step = checkpointer.latest()
        if step is None:
            raise ValueError(f"frozen_policies: {past} holds no complete checkpoint; name a run that has saved one")
        state, _ = checkpointer.restore(step, learner.abstract_state())
    return state.params


def _make_learner(config: Config, plan: Plan, run_dir: RunDir) -> Learner:
    model, params = _load_or_warm_start(config, plan, run_dir)
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
        compute_dtype=None if config.lora else _narrow(plan),
    )


def _narrow(plan: Plan) -> Any:
    """What all weights are trained in, where that is not the float32 in which they are kept; else None."""
    return None if plan.dtype == jnp.float32 else plan.dtype


def _references(config: Config, plan: Plan) -> dict[str, Reference]:
    """The models that batches are scored under, but for the trained one's own base."""
    load = partial(load_policy, dtype=plan.dtype, seed=config.seed, mesh=plan.mesh)
    return {tag: Reference(*load(name)) for tag, name in references_named(config).items()}


def _load_or_warm_start(config: Config, plan: Plan, run_dir: RunDir) -> tuple[ModelConfig, Params]:
    """The base of the run. A warm start is kept in the run directory, so that a resumed run starts from the same."""
    kept, dtype = run_dir.path / "warm_start", plan.dtype if config.lora else jnp.float32
    if config.warm_start is None:
        return load_policy(config.model_name, dtype=dtype, seed=config.seed, mesh=plan.mesh)
    if (kept / "model").is_dir():
        return load_policy(str(kept / "model"), dtype=dtype, mesh=plan.mesh)
    model, params = load_policy(config.model_name, dtype=jnp.float32, seed=config.seed, mesh=plan.mesh)
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
        compute_dtype=_narrow(plan),
        checkpoint=trio.from_thread.check_cancelled,
    )
    part = kept / "model.part"
    shutil.rmtree(part, ignore_errors=True)
    save_policy(part, model, params, config.model_name)
    part.rename(kept / "model")
    return load_policy(str(kept / "model"), dtype=dtype, mesh=plan.mesh)


# --- what the user sees --------------------------------------------------------------------------


def _console() -> Console:
    return Console(stderr=True, soft_wrap=True)


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
    if idle := sum(map(trained_nothing, steps)):
        console.print(f"{idle} of {len(steps)} steps trained nothing: no group had rewards to tell apart", markup=False)
    console.print(f"report: {run_dir.report}\ncurve:  {run_dir.curve}", markup=False)
