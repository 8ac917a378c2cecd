"""The synchronous loop: roll a batch out, learn from it, publish, look at held-out tasks now and then.

    batch step -> groups -> advantages -> datums -> one optimizer step -> new weights in the engine

Knows every part of the runtime and nothing about configuration files or command lines. One step is finished before
the next begins, so each token is trained by the weights that drew it, and a run that is killed and resumed ends bit
for bit where it would have ended.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from jaxrl.algo.advantage import compute_advantages
from jaxrl.algo.data import assemble_training_data, split_reasons, trainable
from jaxrl.env import EnvGroupBuilder, RLDataset
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.engine import Engine, Stats
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.learner import Learner
from jaxrl.runtime.log import MetricsLog, Progress
from jaxrl.runtime.measure import rollout_metrics
from jaxrl.runtime.record import episode_records, rollout_file, write_records
from jaxrl.runtime.rollout import RolloutPlan, run_batch
from jaxrl.runtime.run_dir import RunDir
from jaxrl.types import Datum, TrajectoryGroup


@dataclass(frozen=True)
class Schedule:
    """When things happen, in steps; 0 is never (the first and the last step evaluate and save in any case)."""

    steps: int
    eval_every: int
    save_every: int


@dataclass(frozen=True)
class Sampling:
    """How episodes are drawn: seed of the run, budgets, temperature of training and of evaluation."""

    seed: int
    limits: Limits
    temperature: float
    eval_temperature: float


@dataclass
class Run:
    """The parts of a run that the loop drives. They are opened, and closed, by whoever makes this."""

    engine: Engine
    learner: Learner
    limiter: trio.CapacityLimiter
    train: RLDataset
    test: RLDataset | None
    schedule: Schedule
    sampling: Sampling
    advantage: str
    overlong_masking: bool
    run_dir: RunDir
    checkpointer: Checkpointer
    log: MetricsLog
    progress: Progress
    decode: Callable[[Sequence[int]], str]
    groups_to_record: int
    totals: Counter = field(default_factory=Counter)

    async def on_device(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a blocking call in the one worker thread that may touch the device."""
        return await trio.to_thread.run_sync(call, *args, limiter=self.limiter)


async def train_loop(run: Run, *, start: int) -> None:
    """Steps `start` to `schedule.steps`. On an error or Ctrl-C the newest checkpoint is the last one saved."""
    schedule = run.schedule
    for step in range(start, schedule.steps):
        began = time.perf_counter()
        metrics: dict[str, float] = {}
        last = step + 1 == schedule.steps
        if step == 0 or (schedule.eval_every and step % schedule.eval_every == 0 and not last):
            metrics |= await evaluate(run, step)
        metrics |= await train_step(run, step)
        if last:
            metrics |= await evaluate(run, step + 1)
        metrics["time/total"] = time.perf_counter() - began
        metrics["progress/done_frac"] = (step + 1) / schedule.steps
        run.log.write(step, metrics)
        run.progress.update(step, metrics)
        if last or (schedule.save_every and (step + 1) % schedule.save_every == 0):
            await run.on_device(run.checkpointer.save, step + 1, run.learner.state)


async def train_step(run: Run, step: int) -> dict[str, float]:
    """One batch: rollouts, one optimizer step, publish. Returns the step's metrics."""
    began, before = time.perf_counter(), run.engine.stats.copy()
    plan = RolloutPlan((run.sampling.seed, "train", step), run.sampling.limits, run.sampling.temperature)
    groups_P = await run_batch(run.engine, run.train.get_batch(step), plan)
    rolled = time.perf_counter()
    data_D, data_metrics = training_data(groups_P, run.advantage, overlong_masking=run.overlong_masking)
    update = await run.on_device(run.learner.update, data_D)
    await run.engine.publish(run.learner.weights, version=step + 1)
    trained = time.perf_counter()
    await _record(run, groups_P, run.train.get_batch(step), step, kind="step")
    return {
        **rollout_metrics(groups_P),
        **data_metrics,
        **update,
        **engine_metrics(run.engine, before),
        "time/rollout": rolled - began,
        "time/train": trained - rolled,
        "time/record": time.perf_counter() - trained,
    }


def training_data(
    groups_P: Sequence[TrajectoryGroup], advantage: str, *, overlong_masking: bool
) -> tuple[list[Datum], dict[str, float]]:
    """Datums of the groups that can teach something, and what became of the others. Pure."""
    useful_P = [group for group, useful in zip(groups_P, trainable(groups_P), strict=True) if useful]
    advantages_P_G = compute_advantages(useful_P, advantage)
    data_D = assemble_training_data(useful_P, advantages_P_G, overlong_masking=overlong_masking)
    splits: Counter[str] = Counter()
    for group in useful_P:
        for trajectory in group.trajectories_G:
            splits += split_reasons(trajectory)
    episodes = len({d.episode for d in data_D})
    return data_D, {
        "data/groups_trained": float(len(useful_P)),
        "data/datums_per_episode": len(data_D) / episodes if episodes else 0.0,
        **{f"data/split/{reason}": float(count) for reason, count in splits.items()},
    }


def engine_metrics(engine: Engine, before: Stats) -> dict[str, float]:
    """What the engine did since `before`."""
    used = engine.stats - before
    return {
        "engine/prefill_tokens": float(used.prefill_tokens),
        "engine/decode_tokens": float(used.decode_tokens),
        "engine/tokens_per_second": used.decode_tokens / used.busy_seconds if used.busy_seconds else 0.0,
        "engine/row_occupancy": used.decode_tokens / used.decode_row_steps if used.decode_row_steps else 0.0,
        "engine/compilations": float(engine.compilations),
    }


async def evaluate(run: Run, step: int) -> dict[str, float]:
    """Every held-out task, under the weights of now: metrics named `test/...`; none without held-out tasks.

    The random numbers of an evaluation depend on the run's seed alone, so two evaluations differ by weights only.
    """
    if run.test is None:
        return {}
    began = time.perf_counter()
    plan = RolloutPlan((run.sampling.seed, "test"), run.sampling.limits, run.sampling.eval_temperature)
    builders_P: list[EnvGroupBuilder] = [b for i in range(len(run.test)) for b in run.test.get_batch(i)]
    groups_P = await run_batch(run.engine, builders_P, plan)
    await _record(run, groups_P, builders_P, step, kind="test")
    metrics = {f"test/{name}": value for name, value in rollout_metrics(groups_P).items()}
    return metrics | {"time/eval": time.perf_counter() - began}


async def _record(
    run: Run, groups_P: Sequence[TrajectoryGroup], builders_P: Sequence[EnvGroupBuilder], step: int, *, kind: str
) -> None:
    """Write the first groups of a batch; a file's worth of JSON is written off the trio thread."""
    shown = groups_P[: run.groups_to_record]
    if not shown:
        return
    tasks = [b.describe() for b in builders_P[: len(shown)]]
    path = rollout_file(run.run_dir.rollouts, step, kind=kind)

    def write() -> None:
        write_records(path, episode_records(shown, run.decode, step=step, tasks=tasks))

    await trio.to_thread.run_sync(write)
