"""The study as configuration, and the runs it is made of: one model, one game, and a combination for every run.

Everything that differs between two runs is the variant, the seed and the gap between sampler and trainer. Knows what
is trained and where it lies; must not know what is made of the numbers.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from jaxrl.algo.advantage import needs_peers
from jaxrl.algo.aggregate import NEEDS_CONSTANT
from jaxrl.algo.algorithm import resolve
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.variants import VARIANTS
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.lag import SamplerGap
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.run_dir import RunDir, write_atomic
from jaxrl.train import Config, checked_algorithm, describe, main
from recipes import sft_warmup
from recipes.guess_number import GuessNumber, PoorPlayer

COMMITTED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "importance_sampling", "dppo")
"""Variants of the study whose figure is in the README, in the order of its legend."""

HELD_OUT = "test/env/all/reward/total"
"""The mean reward of held-out games: 1 for a win, 0 for a loss, -0.1 where a turn could not be read.

Unlike the game's own metric of success it is there when a policy has broken down so far that no game reaches its end.
"""

DIVERGED = "diverged.json"
"""In the directory of a run that ended because its loss or gradient was not finite."""

_HEAD_ROOM = 8  # tokens a turn may sample; a guess and its end take two or three


@chz.chz
class Study:
    """What is compared. Lists are written with commas: variants=grpo,dapo seeds=0,1 staleness=0,16."""

    variants: tuple[str, ...] = chz.field(default=COMMITTED, doc=f"of {', '.join(VARIANTS)}")
    seeds: tuple[int, ...] = chz.field(default=(0, 1, 2), doc="of sampling and of the adapter; the games are the same")
    staleness: tuple[int, ...] = chz.field(default=(0, 4, 16), doc="optimizer steps the sampler is behind the trainer")
    noise: tuple[float, ...] = chz.field(default=(0.0,), doc="relative size of noise on the sampling adapter")
    steps: int = chz.field(default=40, doc="optimizer steps of a run")
    learning_rate: float = chz.field(default=2e-3, doc="of Adam, for every variant")
    learning_rates: dict[str, float] = chz.field(
        default_factory=dict, doc="learning_rates.<variant>=...: of one variant, instead of learning_rate"
    )
    knobs: dict[str, dict[str, int | float | str]] = chz.field(
        default_factory=dict, doc="knobs.<variant>.<knob>=...: its loss_fn_config"
    )
    high: int = chz.field(default=7, doc="the game: guess a number from 1 to this")
    turns: int = chz.field(default=4, doc="guesses of a game")
    batch_size: int = chz.field(default=8, doc="secrets a step")
    group_size: int = chz.field(default=8, doc="games a secret")
    test_games: int = chz.field(default=128, doc="held-out games of an evaluation, the same for all runs")
    eval_every: int = chz.field(default=5, doc="steps between evaluations")
    context: int = chz.field(default=80, doc="tokens a game may take")
    max_grad_norm: float = chz.field(
        default=100.0, doc="clip the gradient at this norm; the report says why it is high"
    )
    warm_start_steps: int = chz.field(default=130, doc="supervised steps of the model that all runs start from")
    strength: float = chz.field(default=0.2, doc="share of good turns in the games that the warm start imitates")
    log_path: str = chz.field(default="runs/loss_study", doc="directory of the study; a run is a directory in it")
    report: str = chz.field(default="after", doc="'only' makes the report anew from what is there, and trains nothing")
    replay: str | None = chz.field(
        default=None, doc="a run directory: send one of its recorded batches through every variant's gradient instead"
    )
    replay_step: int | None = chz.field(default=None, doc="whose rollouts are replayed; None is the last recorded")
    replay_checkpoint: int | None = chz.field(
        default=None, doc="whose weights the gradient is taken at; 0 is before training, None the newest checkpoint"
    )


@dataclass(frozen=True)
class Gap:
    """How far the sampler is from the trainer: a panel of the figure."""

    staleness: int
    noise: float = 0.0

    def __str__(self) -> str:
        age = {0: "on-policy", 1: "1 step behind"}.get(self.staleness, f"{self.staleness} steps behind")
        return age + (f", noise {self.noise:g}" if self.noise else "")


@dataclass(frozen=True)
class Combination:
    """One run of the study."""

    variant: str
    gap: Gap
    seed: int

    @property
    def name(self) -> str:
        """Its directory."""
        noise = f"-n{self.gap.noise:g}" if self.gap.noise else ""
        return f"{self.variant}-s{self.gap.staleness}{noise}-seed{self.seed}"


_NAME = re.compile(r"(?P<variant>\w+)-s(?P<staleness>\d+)(?:-n(?P<noise>[\d.e+-]+?))?-seed(?P<seed>\d+)")


def parse_name(name: str) -> Combination | None:
    """The combination whose directory is called so; None for another directory."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    gap = Gap(int(found["staleness"]), float(found["noise"] or 0.0))
    return Combination(found["variant"], gap, int(found["seed"]))


def combinations(study: Study) -> list[Combination]:
    """All runs in the order they are made: a seed after the other, so that an unfinished study compares everything."""
    gaps = [Gap(s, n) for s, n in itertools.product(study.staleness, study.noise)]
    return [Combination(v, gap, seed) for seed, gap, v in itertools.product(study.seeds, gaps, study.variants)]


def check(study: Study) -> None:
    """Raise ValueError for what can be seen to be wrong before anything runs, in any of the runs asked for."""
    for field in ("variants", "seeds", "staleness", "noise"):
        values = getattr(study, field)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{field}={','.join(map(str, values))}: expected one or more values, each once")
    unknown = [v for v in (*study.variants, *study.learning_rates, *study.knobs) if v not in VARIANTS]
    if unknown:
        raise ValueError(f"variant {unknown[0]!r} is unknown; expected some of {', '.join(VARIANTS)}")
    for field in ("learning_rates", "knobs"):
        unused = [v for v in getattr(study, field) if v not in study.variants]
        if unused:
            raise ValueError(f"{field}.{unused[0]} has no effect: variants={','.join(study.variants)} lacks it")
    for field in ("seeds", "staleness", "noise"):
        if not all(math.isfinite(value) and value >= 0 for value in getattr(study, field)):
            raise ValueError(f"{field}={getattr(study, field)}: expected numbers of 0 or more")
    if study.replay is not None:
        for variant in study.variants:
            with _named(variant):
                resolve(VARIANTS[variant], knobs_of(study, variant))
    elif study.report != "only":
        _check_runs(study)


def _check_runs(study: Study) -> None:
    """Raise ValueError for what one of the runs would be refused for, so that the first does not start in vain."""
    if (behind := max(study.staleness)) >= study.steps:
        raise ValueError(f"staleness={behind} is never reached in steps={study.steps}; raise steps")
    if study.eval_every < 0:
        raise ValueError(f"eval_every={study.eval_every}: expected 0 or more")
    for combination in combinations(study):
        with _named(combination.variant):
            config = run_config(study, combination, Path(study.log_path) / "model")
            assert config.learning_rate is not None
            dataclasses.replace(config.optimizer, learning_rate=config.learning_rate)
            algorithm = checked_algorithm(config)
            if needs_peers(algorithm.advantage) and study.group_size < 2:
                raise ValueError(
                    f"group_size={study.group_size}: advantage={algorithm.advantage} compares the games of a group, so "
                    "a group of one teaches nothing; use at least 2"
                )


@contextlib.contextmanager
def _named(variant: str) -> Iterator[None]:
    """Let an error say which variant of the study it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"variant {variant}: {error}") from error


# --- one model for all ---------------------------------------------------------------------------


def model_of(study: Study) -> Path:
    """The model that all runs of the study start from: warm-started the first time, and kept."""
    folder = Path(study.log_path).expanduser() / "model"
    settings = {"high": study.high, "turns": study.turns, "steps": study.warm_start_steps, "strength": study.strength}
    note = folder / "warm_start.json"
    if folder.is_dir():
        kept = json.loads(note.read_text())
        if kept != settings:
            raise ValueError(
                f"{folder} was made with {kept}, and this study asks for {settings}: give another log_path, or "
                "the same settings"
            )
        return folder
    part = folder.with_name("model.new")
    shutil.rmtree(part, ignore_errors=True)
    player = PoorPlayer(study.high, study.turns, study.strength)
    sft_warmup.main(
        sft_warmup.SftConfig(
            env="guess_number",
            out=str(part),
            demonstrator=player,
            steps=study.warm_start_steps,
            batch_size=16,
            learning_rate=1e-3,
            rows=16,
            remat=False,
        )
    )
    (part / note.name).write_text(json.dumps(settings) + "\n")
    part.rename(folder)
    return folder


def run_config(study: Study, combination: Combination, model: Path) -> Config:
    """What `jaxrl.train.main` is given. Shapes are the same for all runs, so what one compiled serves the next."""
    gap, slots = combination.gap, study.batch_size * study.group_size
    return Config(
        model_name=str(model),
        dataset_builder=GuessNumber(
            high=study.high,
            turns=study.turns,
            batch_size=study.batch_size,
            group_size=study.group_size,
            steps=study.steps,
            test_games=study.test_games,
        ),
        log_path=str(Path(study.log_path).expanduser() / combination.name),
        behavior_if_log_dir_exists="delete",  # only of what is unfinished: a finished run is not made again
        learning_rate=study.learning_rates.get(combination.variant, study.learning_rate),
        optimizer=OptimizerConfig(max_grad_norm=study.max_grad_norm),
        lora=LoraConfig(rank=16, alpha=16.0),
        loss_fn=combination.variant,
        loss_fn_config=knobs_of(study, combination.variant),
        sampler_gap=SamplerGap(gap.staleness, gap.noise) if gap != Gap(0) else None,
        max_tokens=_HEAD_ROOM,
        max_turns=study.turns + 1,
        eval_every=study.eval_every,
        save_every=0,
        seed=combination.seed,
        num_groups_to_log=study.batch_size,
        engine=EngineConfig(
            slots=slots,
            context=study.context,
            prompts=0,
            prompt_context=1,
            decode_steps=8,
            extend_lengths=(32,),
            row_buckets=(slots,),
            position_buckets=(study.context,),
        ),
        packing=Packing(widths=(study.context,), rows=16),
        remat=False,
    )


def knobs_of(study: Study, variant: str) -> dict[str, int | float | str]:
    """The variant's knobs. A constant that an aggregation must be given is the most tokens a game can sample."""
    given = study.knobs.get(variant, {})
    aggregation = given.get("aggregation", VARIANTS[variant].aggregation)
    needed = {"aggregation_constant": study.turns * _HEAD_ROOM} if aggregation in NEEDS_CONSTANT else {}
    return {**needed, **given}


# --- running -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a run ended. held_out: what its evaluations measured, first to last. diverged: in which step it ended early.

    A run diverges when its loss or gradient is no longer finite; that is a result too.
    """

    seconds: float
    held_out: tuple[float, ...]
    diverged: int | None = None

    def __str__(self) -> str:
        scores = f"held-out {self.held_out[0]:.3f} to {self.held_out[-1]:.3f}, " if self.held_out else ""
        return scores + (f"{self.seconds:.0f} s" if self.diverged is None else f"diverged in step {self.diverged}")


def is_finished(study: Study, combination: Combination, model: Path) -> bool:
    """Whether the run is there to its end, or to where it diverged.

    Raises ValueError when it is, but was made with other settings: a study compares runs that are alike.
    """
    run = RunDir(Path(study.log_path).expanduser() / combination.name)
    if not (run.checkpoints / str(study.steps)).is_dir() and not (run.path / DIVERGED).is_file():
        return False
    asked = dict(_flat(json.loads(json.dumps(describe(run_config(study, combination, model))))))
    made = dict(_flat(json.loads(run.config.read_text())))
    differing = [k for k in sorted(asked.keys() & made.keys()) if asked[k] != made[k] and k not in _NOT_COMPARED]
    if differing:
        key = differing[0]
        raise ValueError(
            f"{run.path} is finished, but with {key}={made[key]} instead of {asked[key]}: a study compares runs that "
            "are alike. Give another log_path, or remove that run"
        )
    return True


_NOT_COMPARED = frozenset({"log_path", "behavior_if_log_dir_exists", "model_name"})


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, tree


def train_all(study: Study, say: Callable[[str], None]) -> None:
    """Make every run that is not there yet, each with one line from `say`. What the runs print goes to log.txt.

    Errors: those of a run, but for a loss or gradient that is not finite, which is a result: that run ends there.
    """
    folder = Path(study.log_path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = combinations(study)
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        with contextlib.redirect_stderr(log):
            model = model_of(study)
        write_atomic(folder / "study.json", json.dumps(describe(study), indent=1) + "\n")
        done = [c for c in chosen if is_finished(study, c, model)]
        if done:
            say(f"{len(done)} of {len(chosen)} runs are finished already")
        for number, combination in enumerate(chosen, start=1):
            if combination in done:
                continue
            with contextlib.redirect_stderr(log):
                outcome = train_one(run_config(study, combination, model))
            what = f"{combination.variant}, {combination.gap}, seed {combination.seed}"
            say(f"[{number}/{len(chosen)}] {what}: {outcome}")


def train_one(config: Config) -> Outcome:
    """One run, in this process."""
    began, run, error = time.monotonic(), RunDir(Path(config.log_path)), None
    try:
        main(config)
    except FloatingPointError as raised:
        error = str(raised)
    steps = read_metrics(run.metrics)
    scores = tuple(step[HELD_OUT] for step in steps if HELD_OUT in step)
    if error is None:
        return Outcome(time.monotonic() - began, scores)
    diverged = next_step(steps)
    write_atomic(run.path / DIVERGED, json.dumps({"step": diverged, "error": error}) + "\n")
    return Outcome(time.monotonic() - began, scores, diverged)


def next_step(steps: Sequence[Mapping[str, float]]) -> int:
    """The step after those that were finished and written: the one in which a run that ended early did."""
    return int(steps[-1]["step"]) + 1 if steps else 0
