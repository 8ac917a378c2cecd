"""The loop: groups play, batches are learned from, weights are published, held-out tasks are looked at now and then.

    supply of groups -> advantages -> datums -> one optimizer step -> new weights in the engine

One loop with parameters (`Mode`). Synchronous: a step's groups start when the step before is published, so each token
is trained by the weights that drew it, and a run that is killed and resumed ends bit for bit where it would have
ended. Streaming: the same, with the gradient of the first groups taken while the last ones play. Asynchronous: groups
of later steps play while a step trains, at most so many that no token gets older than the bound.

Knows every part of the runtime and nothing about configuration files or command lines.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import trio

from jaxrl.algo.advantage import Values, compute_advantages, next_baselines, reads_values
from jaxrl.algo.data import (
    TurnStarts,
    assemble_training_data,
    by_member,
    duplicated_tokens,
    in_order,
    split_reasons,
    trainable,
    turn_starts,
)
from jaxrl.algo.objective import PAIR, signs_by_group
from jaxrl.algo.shaping import Shaping, shape
from jaxrl.env import EnvGroupBuilder, EnvironmentFault, RLDataset
from jaxrl.runtime.admission import Admission
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.engine import Engine, Stats
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.lag import Lag
from jaxrl.runtime.learner import Learner, TurnValues
from jaxrl.runtime.log import MetricsLog, Progress
from jaxrl.runtime.measure import rollout_metrics
from jaxrl.runtime.record import episode_records, rollout_file, write_records
from jaxrl.runtime.rollout import PlayGroup, RolloutPlan, run_batch, run_group
from jaxrl.runtime.run_dir import RunDir
from jaxrl.runtime.sampler import Session
from jaxrl.runtime.strategy import FailFast, Strategy
from jaxrl.runtime.supply import Place, Played, Stream, Supply
from jaxrl.runtime.weights import Policy
from jaxrl.types import Datum, TrajectoryGroup


@dataclass(frozen=True)
class Schedule:
    """When things happen, in steps.

    eval_every: 0 evaluates before the first step and after the last only. save_every: 0 saves after the last only.
    """

    steps: int
    eval_every: int
    save_every: int


@dataclass(frozen=True)
class Sampling:
    """How episodes are drawn: seed of the run, budgets and temperature of training and of evaluation, strategy."""

    seed: int
    limits: Limits
    temperature: float
    eval_limits: Limits
    eval_temperature: float
    strategy: Strategy = field(default_factory=FailFast)


@dataclass(frozen=True)
class Mode:
    """How playing and training share the time.

    steps_ahead: how many steps the trained weights may be ahead of those that drew a token (S of I8); 0 is on-policy.
    groups_per_batch: groups a step; None takes the dataset's batches. minibatch: groups whose gradient is taken
    together as they finish; None takes all of them at once. in_flight_updates: a group under way goes on with newly
    published weights (each token has its version), instead of ending with those it started with. max_attempts:
    groups of equal rewards are replaced by the next tasks', until this many times a step's groups were started.
    """

    steps_ahead: int = 0
    groups_per_batch: int | None = None
    minibatch: int | None = None
    in_flight_updates: bool = True
    max_attempts: int = 1


Penalties = Mapping[tuple[int, int], float]
"""What the reward of a (group, episode) of a batch loses."""


@dataclass(frozen=True)
class Teaching:
    """What is made of rewards: the advantage estimator, and what happens to episodes that ran into a budget.

    knobs: of the estimator, where they are not its defaults. reference: datums are scored under a reference, that of
    the teacher whose name is a tag of their group, if there is one; `penalize` then changes their advantages, and what
    `penalties` says of a (group, episode) is taken off its reward. pairs: a loss compares a group's two episodes.
    """

    advantage: str
    overlong_masking: bool = False
    shaping: Shaping = field(default_factory=Shaping)
    knobs: Mapping[str, float | str] = field(default_factory=dict)
    reference: bool = False
    teachers: Collection[str] = ()
    penalize: Callable[[Sequence[Datum]], list[Datum]] | None = None
    penalties: Callable[[Sequence[Datum]], Penalties] | None = None
    pairs: bool = False

    @property
    def reads_values(self) -> bool:
        """Whether advantages are over a critic's values, which the learner is then asked for, and taught."""
        return reads_values(self.advantage)


@dataclass
class Run:
    """The parts of a run that the loop drives. They are opened, and closed, by whoever makes this.

    play: where groups play; None is here. lag: keeps the sampler behind the trainer; None samples with what is trained.
    baselines: what the moving baselines of an estimator that has them came to; changes with every step.
    """

    engine: Engine
    learner: Learner
    limiter: trio.CapacityLimiter
    train: RLDataset
    test: RLDataset | None
    schedule: Schedule
    sampling: Sampling
    teaching: Teaching
    run_dir: RunDir
    checkpointer: Checkpointer
    log: MetricsLog
    progress: Progress
    decode: Callable[[Sequence[int]], str]
    groups_to_record: int
    mode: Mode = field(default_factory=Mode)
    play: PlayGroup | None = None
    lag: Lag | None = None
    baselines: Mapping[str, float] = field(default_factory=dict)

    async def on_device(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a blocking call in the one worker thread that may touch the device."""
        return await trio.to_thread.run_sync(call, *args, limiter=self.limiter)

    def player(self, *, pinned: bool) -> PlayGroup:
        """What plays groups. pinned: with the weights of now to their end, whatever is published meanwhile."""
        if self.play is not None:
            return self.play
        return partial(run_group, _Pinned(self.engine, self.engine.policy) if pinned else self.engine)


@dataclass(frozen=True)
class _Pinned:
    """A sampler whose sessions keep one policy, unless they ask for another by name."""

    engine: Engine
    policy: Policy

    def session(
        self, *, group: Hashable | None = None, seed: int, policy: str | None = None
    ) -> AbstractAsyncContextManager[Session]:
        return self.engine.session(group=group, seed=seed, policy=policy or self.policy)


async def train_loop(run: Run, *, start: int, supplied: dict[str, Any] | None = None) -> None:
    """Steps `start` to `schedule.steps`. On an error or Ctrl-C the newest checkpoint is the last one saved.

    supplied: what `Supply.state` said at the checkpoint that is resumed.
    """
    schedule = run.schedule
    async with trio.open_nursery() as nursery:
        supply = open_supply(run, nursery)
        if supplied:
            supply.restore(supplied)
        run.baselines = (supplied or {}).get("baselines", {})
        for step in range(start, schedule.steps):
            began = time.perf_counter()
            metrics: dict[str, float] = {}
            last = step + 1 == schedule.steps
            if step == 0 or (schedule.eval_every and step % schedule.eval_every == 0 and not last):
                metrics |= await evaluate(run, step)
            metrics |= await train_step(run, supply, step)
            if last:
                metrics |= await evaluate(run, step + 1)
            metrics["time/total"] = time.perf_counter() - began
            metrics["progress/done_frac"] = (step + 1) / schedule.steps
            run.log.write(step, metrics)
            run.progress.update(step, metrics)
            if last or (schedule.save_every and (step + 1) % schedule.save_every == 0):
                await run.on_device(run.checkpointer.save, step + 1, run.learner.state, _kept(run, supply))
        nursery.cancel_scope.cancel()  # nothing is left playing, unless dynamic sampling has started too much


def _kept(run: Run, supply: Supply) -> dict[str, Any]:
    """What a checkpoint keeps beside the learner's state."""
    return {**supply.state(), "baselines": dict(run.baselines)}


def open_supply(run: Run, nursery: trio.Nursery) -> Supply:
    """The run's groups, in the order of its data."""

    async def play(builder: EnvGroupBuilder, place: Place) -> TrajectoryGroup:
        sampling = run.sampling
        identity = (sampling.seed, "train", place.batch)
        plan = RolloutPlan(identity, sampling.limits, sampling.temperature, sampling.strategy)
        play = run.player(pinned=not run.mode.in_flight_updates)
        return await play(builder, plan, group=place.index)

    return Supply(
        Stream(run.train),
        play,
        nursery,
        version=lambda: run.lag.step if run.lag else run.engine.version,  # a gap on purpose is not an age
        teaches=lambda group: trainable([group], run.teaching.advantage, **run.teaching.knobs)[0],
        max_attempts=run.mode.max_attempts,
    )


async def train_step(run: Run, supply: Supply, step: int) -> dict[str, float]:
    """One batch: rollouts, its optimizer steps, publish. Returns the step's metrics."""
    began, before = time.perf_counter(), run.engine.stats.copy()
    if run.lag is not None:  # between two steps the newest weights are published, so evaluations see those
        weights, version = await run.on_device(run.lag.sampling, run.learner.weights, step)
        await run.engine.publish(weights, version=version)
    admit(run, supply, step)
    batch = _Batch(run)
    played = [await batch.add(await supply.take(step)) for _ in range(batch_size(run, supply, step))]
    started = sorted([*played, *supply.replaced()], key=lambda p: p.place.number)
    groups_P = [p.group for p in started]
    _check_trust(groups_P, "a step")
    rolled = time.perf_counter()
    update = await batch.learn()
    weights = await run.on_device(lambda: run.learner.weights)
    await run.engine.publish(weights, version=step + 1, copy=run.mode.steps_ahead > 0)
    supply.trained()
    if run.mode.steps_ahead and step + 1 < run.schedule.steps:
        admit(run, supply, step + 1)
    trained = time.perf_counter()
    await _record(run, groups_P, [supply.builder(p.place) for p in started[: run.groups_to_record]], step, kind="step")
    return {
        **rollout_metrics(groups_P),
        **update,
        "data/groups_replaced": float(len(started) - len(played)),
        **staleness(batch.data_D, step),
        **engine_metrics(run.engine, before),
        "time/rollout": rolled - began,
        "time/train": trained - rolled,
        "time/record": time.perf_counter() - trained,
    }


def batch_size(run: Run, supply: Supply, step: int) -> int:
    """Groups that step trains."""
    return run.mode.groups_per_batch or supply.size(step)


def admit(run: Run, supply: Supply, step: int) -> None:
    """Start what may start in `step`."""
    groups = batch_size(run, supply, step)
    ahead = min(run.mode.steps_ahead, run.schedule.steps - step - 1)
    supply.fill(Admission(groups, run.mode.steps_ahead), needed=groups * (ahead + 1))


class _Batch:
    """The groups of one step: collected, or under `minibatch` learned from as they come."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting: list[Played] = []
        self._taken = 0
        self._unpaired = 0
        self._useful: list[TrajectoryGroup] = []
        self._lessons: list[tuple[TurnValues, np.ndarray]] = []
        self.data_D: list[Datum] = []

    async def add(self, played: Played) -> Played:
        """Take a finished group."""
        self._waiting.append(played)
        if self._run.mode.minibatch == len(self._waiting):
            await self._run.on_device(self._run.learner.accumulate, await self._datums())
        return played

    async def learn(self) -> dict[str, float]:
        """The optimizer steps. What is learned together is in the order of the data, whoever finished first."""
        if self._run.mode.minibatch is None:
            metrics = await self._run.on_device(self._run.learner.update, await self._datums())
        else:
            await self._run.on_device(self._run.learner.accumulate, await self._datums())
            metrics = await self._run.on_device(self._run.learner.finish)
        if self._run.teaching.reads_values:
            metrics |= await self._run.on_device(self._run.learner.fit_critic, *joined(self._lessons))
        self._run.baselines = baselines_after(self._useful, self._run.teaching, self._run.baselines)
        unpaired = {"data/groups_unpaired": float(self._unpaired)} if self._run.teaching.pairs else {}
        return reference_metrics(self.data_D) | metrics | data_metrics(self.data_D, self._useful) | unpaired

    async def _datums(self) -> list[Datum]:
        self._waiting.sort(key=lambda p: p.place.number)
        groups_P, teaching = [p.group for p in self._waiting], self._run.teaching
        make = partial(
            training_data,
            groups_P,
            teaching,
            first_group=self._taken,
            baselines=self._run.baselines,
            values_P_G=await self._values([g for g in groups_P if g.viable]) if teaching.reads_values else None,
        )
        data_D, useful_P = make()
        if teaching.reference:
            names = teacher_names(useful_P, teaching.teachers, first_group=self._taken)
            data_D = await self._run.on_device(self._run.learner.score_reference, data_D, names)
            if teaching.penalties is not None:
                data_D = with_advantages_of(data_D, make(penalties=teaching.penalties(data_D))[0])
            if teaching.penalize is not None:
                data_D = teaching.penalize(data_D)
        if teaching.pairs:
            count = len(useful_P)
            data_D, useful_P = only_pairs(data_D, useful_P, first_group=self._taken)
            self._unpaired += count - len(useful_P)
        self._taken += len(groups_P)
        self._waiting.clear()
        self._useful += useful_P
        self.data_D += data_D
        return data_D

    async def _values(self, groups_P: Sequence[TrajectoryGroup]) -> Values:
        """What the critic says of the turns of these groups; what it should have said is noted for the step's fit."""
        starts = turn_starts(groups_P)
        turns = await self._run.on_device(self._run.learner.turn_values, starts)
        values_P_G = by_member(starts, turns.values_N)
        self._lessons.append((turns, value_targets(groups_P, self._run.teaching, starts, values_P_G)))
        return values_P_G


def value_targets(
    groups_P: Sequence[TrajectoryGroup], teaching: Teaching, starts: TurnStarts, values_P_G: Values
) -> np.ndarray:
    """What a critic should have said of each turn, in the order of the starts: its values + the advantages over them.

    Pure. Also of episodes that are not trained, if their rewards count.
    """
    shaped_P = [shape(group, teaching.shaping) for group in groups_P]
    advantages_P_G = compute_advantages(
        shaped_P, teaching.advantage, baselines=None, values_P_G=values_P_G, **teaching.knobs
    )
    return in_order(starts, values_P_G) + in_order(starts, advantages_P_G)


def joined(lessons: Sequence[tuple[TurnValues, np.ndarray]]) -> tuple[TurnValues, np.ndarray]:
    """The turns of all parts of a step, and their targets."""
    turns, targets = zip(*lessons, strict=True)
    features_NM, values_N = (np.concatenate([getattr(t, name) for t in turns]) for name in ("features_NM", "values_N"))
    return TurnValues(features_NM, values_N), np.concatenate(targets)


def training_data(
    groups_P: Sequence[TrajectoryGroup],
    teaching: Teaching,
    *,
    first_group: int = 0,
    baselines: Mapping[str, float] | None = None,
    penalties: Penalties | None = None,
    values_P_G: Values | None = None,
) -> tuple[list[Datum], list[TrajectoryGroup]]:
    """Datums of the groups that can teach something, and those groups. Pure.

    Statistics of the batch know the other groups too, unless their strategy gave them up; what cannot teach by the
    rewards that the envs gave is not shaped, or penalised, into something that could. values_P_G: a critic's, of the
    groups that were not given up.
    """
    useful_P = trainable(groups_P, teaching.advantage, **teaching.knobs)
    viable = [(group, useful) for group, useful in zip(groups_P, useful_P, strict=True) if group.viable]
    shaped_P = [shape(group, teaching.shaping) if useful else group for group, useful in viable]
    if penalties:
        shaped_P = _penalised(shaped_P, [useful for _, useful in viable], penalties, first_group)
    advantages_P_G = compute_advantages(
        shaped_P, teaching.advantage, baselines=baselines, values_P_G=values_P_G, **teaching.knobs
    )
    kept = [n for n, (_, useful) in enumerate(viable) if useful]
    data_D = assemble_training_data(
        [shaped_P[n] for n in kept],
        [advantages_P_G[n] for n in kept],
        overlong_masking=teaching.overlong_masking,
        first_group=first_group,
    )
    return data_D, [viable[n][0] for n in kept]


def _penalised(
    groups_P: Sequence[TrajectoryGroup], useful_P: Sequence[bool], penalties: Penalties, first_group: int
) -> list[TrajectoryGroup]:
    """The groups with the penalties taken off their rewards, numbered as `assemble_training_data` numbers them."""
    penalised_P, number, episode = [], first_group, 0
    for group, useful in zip(groups_P, useful_P, strict=True):
        if useful:
            rewards = (r - penalties.get((number, episode + i), 0.0) for i, r in enumerate(group.rewards_G))
            group, number, episode = (
                replace(group, rewards_G=tuple(rewards)),
                number + 1,
                episode + len(group.rewards_G),
            )
        penalised_P.append(group)
    return penalised_P


def with_advantages_of(data_D: Sequence[Datum], others_D: Sequence[Datum]) -> list[Datum]:
    """The datums with the advantages of others, which are the same tokens in the same order."""
    return [replace(d, advantages=other.advantages) for d, other in zip(data_D, others_D, strict=True)]


def only_pairs(
    data_D: Sequence[Datum], useful_P: Sequence[TrajectoryGroup], *, first_group: int = 0
) -> tuple[list[Datum], list[TrajectoryGroup]]:
    """What a loss of pairs can learn from: without the groups of two of which not one is better and one worse. Pure.

    They teach by their rewards, but a member is masked, or shaping or a penalty has taken the difference away. Groups
    of other sizes stay: the loss refuses them, for no change of their rewards would make them pairs.
    """
    signs = signs_by_group(data_D)
    numbered = list(enumerate(useful_P, start=first_group))
    out = {n for n, group in numbered if len(group.trajectories_G) == len(PAIR) and signs.get(n) != PAIR}
    return [d for d in data_D if d.group not in out], [group for n, group in numbered if n not in out]


def teacher_names(
    groups_P: Sequence[TrajectoryGroup], teachers: Collection[str], *, first_group: int = 0
) -> dict[int, str]:
    """Group number -> the first of its tags that is a teacher's name; groups without one are left out."""
    tagged = enumerate(groups_P, start=first_group)
    return {number: tag for number, group in tagged for tag in reversed(group.tags) if tag in teachers}


def reference_metrics(data_D: Sequence[Datum]) -> dict[str, float]:
    """optim/kl_ref: the mean of q - f over the trained tokens, where the batch was scored under a reference."""
    differences = [(d.logprobs - d.logprobs_ref)[d.mask] for d in data_D if d.logprobs_ref is not None]
    return {"optim/kl_ref": float(np.concatenate(differences).mean())} if any(map(len, differences)) else {}


def baselines_after(
    useful_P: Sequence[TrajectoryGroup], teaching: Teaching, baselines: Mapping[str, float]
) -> dict[str, float]:
    """What the moving baselines come to with the groups a step has trained, whichever finished first. Pure."""
    shaped_P = [shape(group, teaching.shaping) for group in useful_P]
    return next_baselines(shaped_P, teaching.advantage, baselines, **teaching.knobs)


def data_metrics(data_D: Sequence[Datum], useful_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """How much was trained, and what it cost that history was rewritten.

    data/groups_trained: groups that teach something. data/datums_per_episode: 1 where nothing was rewritten, 0 without
    data. data/split/<reason>: rewrites in those groups, by reason. data/duplicated_tokens: what the step processes
    again because of them, the beginnings that the datums of an episode have in common.
    """
    episodes = len({(d.group, d.episode) for d in data_D})
    splits = sum((split_reasons(t) for group in useful_P for t in group.trajectories_G), Counter())
    return {
        "data/groups_trained": float(len(useful_P)),
        "data/datums_per_episode": len(data_D) / episodes if episodes else 0.0,
        "data/duplicated_tokens": float(duplicated_tokens(data_D)),
        **{f"data/split/{reason}": float(count) for reason, count in splits.items()},
    }


def staleness(data_D: Sequence[Datum], step: int) -> dict[str, float]:
    """How many steps old the trained tokens are, read from their versions; nothing without tokens."""
    ages = [step - d.versions[d.mask] for d in data_D if d.mask.any()]
    if not ages:
        return {}
    ages_T = np.concatenate(ages)
    return {"async/staleness_max": float(ages_T.max()), "async/staleness_mean": float(ages_T.mean())}


def _check_trust(groups_P: Sequence[TrajectoryGroup], when: str) -> None:
    """Raise when not one of the episodes can be trusted: the environment is broken, not unlucky."""
    if not groups_P or any(t.ending.in_baseline for group in groups_P for t in group.trajectories_G):
        return
    errors = [error for group in groups_P for error in group.errors]
    shown = "".join(f"\n  {error}" for error in errors[:5])
    raise EnvironmentFault(
        f"all {len(groups_P)} groups of {when} failed, with {len(errors)} errors: mend the environment, or raise the "
        f"limits that end its episodes. The first of them:{shown}"
    )


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
    sampling = run.sampling
    plan = RolloutPlan((sampling.seed, "test"), sampling.eval_limits, sampling.eval_temperature, sampling.strategy)
    builders_P: list[EnvGroupBuilder] = [b for i in range(len(run.test)) for b in run.test.get_batch(i)]
    groups_P = await run_batch(run.player(pinned=run.mode.steps_ahead > 0), builders_P, plan)
    _check_trust(groups_P, "an evaluation")
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
