"""One recorded batch through the gradient of every variant: how far do they agree before any of them is followed?

Reads a run directory: its configuration, a file of rollouts, a checkpoint. Makes no environment, samples nothing and
moves no weight. The losses see what they would see in training: the recorded tokens, log-probs, versions and rewards.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algo.aggregate import token_weights
from jaxrl.algo.algorithm import Algorithm, resolve
from jaxrl.algo.batch import choose_width, datum_values, pack
from jaxrl.algo.data import trainable
from jaxrl.algo.objective import packed
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.shaping import Shaping, SoftOverlong
from jaxrl.algo.step import make_eval_logprobs, make_gradients
from jaxrl.algo.variants import VARIANTS
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import LoraConfig
from jaxrl.models.spec import Params
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.learner import Learner, Packing, Reference
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.loop import Teaching, teacher_names, training_data
from jaxrl.runtime.policy import load_policy
from jaxrl.runtime.record import groups_from_records, read_records, rollout_file
from jaxrl.runtime.run_dir import RunDir, write_atomic
from jaxrl.train import Config, checked_algorithm
from jaxrl.types import Datum, TrajectoryGroup
from recipes.loss_study.study import Study, knobs_of


@dataclass(frozen=True)
class Gradient:
    """What a variant makes of the batch. direction: all its numbers in one row, float64."""

    variant: str
    metrics: dict[str, float]
    direction: np.ndarray

    @property
    def norm(self) -> float:
        """Its Euclidean length."""
        return float(np.linalg.norm(self.direction))


def write_replay(study: Study) -> Path:
    """Write replay_step_NNNNNN.md and .json into the run directory; return the first.

    Errors: ValueError for a directory that cannot be replayed, with what is missing; those of the checkpoint.
    """
    assert study.replay is not None
    run = RunDir(Path(study.replay).expanduser())
    if not run.config.is_file():
        raise ValueError(f"replay={run.path} is no run directory: it has no config.json")
    config = with_numbers(json.loads(run.config.read_text()))
    step = _step(run, study.replay_step)
    algorithm = recorded_algorithm(config)
    groups_P = recorded_groups(run, config, algorithm, step)
    checkpoint, gradients = take_gradients(run, config, algorithm, groups_P, study)
    path = run.path / f"replay_step_{step:06d}.md"
    write_atomic(path, markdown(gradients, run.path.name, step, checkpoint, len(groups_P)) + "\n")
    write_atomic(path.with_suffix(".json"), json.dumps(as_json(gradients, step, checkpoint), indent=1) + "\n")
    return path


def with_numbers(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with numbers for the words that JSON has instead: inf, in knobs and in the optimizer."""
    numbers = {word: float(word) for word in ("inf", "-inf", "nan")}
    for name in {"loss_fn_config", "optimizer", "shaping"} & config.keys():
        config[name] = {key: numbers.get(v, v) if isinstance(v, str) else v for key, v in config[name].items()}
    return config


def recorded_algorithm(config: dict[str, Any]) -> Algorithm:
    """What the run itself trained with. A loss of its own is imported; raises ValueError where that fails."""
    return checked_algorithm(Config(**{name: config[name] for name in _OF_AN_ALGORITHM}))


_OF_AN_ALGORITHM = (
    "model_name", "log_path", "max_tokens", "loss_fn", "loss_fn_config", "num_substeps", "reference_model", "teachers",
)  # fmt: skip


def _step(run: RunDir, step: int | None) -> int:
    """The step that is replayed."""
    recorded = [int(p.stem.split("_")[1]) for p in sorted(run.rollouts.glob("step_*.jsonl"))]
    if not recorded:
        raise ValueError(f"{run.path} has no recorded rollouts: a run with num_groups_to_log=0 cannot be replayed")
    if step is not None and step not in recorded:
        raise ValueError(f"replay_step={step} was not recorded; {run.path} has {recorded[0]} to {recorded[-1]}")
    return recorded[-1] if step is None else step


def recorded_groups(run: RunDir, config: dict[str, Any], algorithm: Algorithm, step: int) -> list[TrajectoryGroup]:
    """The whole batch of a step. Raises ValueError when only a part of it was recorded."""
    groups_P = groups_from_records(read_records(rollout_file(run.rollouts, step)))
    (metrics,) = [m for m in read_metrics(run.metrics) if m["step"] == step] or [{}]
    if "data/groups_trained" not in metrics:
        raise ValueError(f"step {step} of {run.path} was not finished, so it cannot be told whether its batch is whole")
    trained = int(metrics["data/groups_trained"])
    found = sum(trainable(groups_P, algorithm.advantage, **algorithm.advantage_knobs))
    if found != trained:
        raise ValueError(
            f"the rollouts of step {step} hold {found} of the {trained} groups that it trained on: the run kept "
            f"num_groups_to_log={config['num_groups_to_log']} of a batch. Replay a run that kept "
            "at least the groups of a batch"
        )
    return groups_P


def taught(config: dict[str, Any], algorithm: Algorithm) -> Teaching:
    """What the algorithm makes of rewards in a run configured like that."""
    overlong = config["shaping"]["overlong"]
    shaping = Shaping(**{**config["shaping"], "overlong": overlong and SoftOverlong(**overlong)})
    return Teaching(
        algorithm.advantage,
        config["overlong_masking"],
        shaping,
        algorithm.advantage_knobs,
        reference=algorithm.reads_reference,
        teachers=tuple(config["teachers"]),
    )


@dataclass(frozen=True)
class _Recorded:
    """The policy of the recorded run at a checkpoint, and how its batches are packed.

    baselines: what moving baselines had come to there.
    """

    learner: Learner
    model: ModelConfig
    base: Params
    lora: LoraConfig | None
    packing: Packing
    config: dict[str, Any]
    baselines: Mapping[str, float]

    @property
    def weights(self) -> tuple[Any, Params | None]:
        """What a step differentiates, and what it holds fixed."""
        return self.learner.state.params, self.base if self.lora else None


def take_gradients(
    run: RunDir, config: dict[str, Any], own: Algorithm, groups_P: Sequence[TrajectoryGroup], study: Study
) -> tuple[int, list[Gradient]]:
    """The gradient of every variant at a checkpoint of the run (0: before training), and which one.

    own: what the run trained with, of which the checkpoint's state is. Raises ValueError for a variant that asks what
    a replay does not know.
    """
    algorithms = {v: resolve(VARIANTS[v], knobs_of(study, v)) for v in study.variants}
    for variant, algorithm in algorithms.items():
        _check_replayed(variant, algorithm, config)
    scored = any(algorithm.reads_reference for algorithm in algorithms.values())
    checkpoint, recorded = _open(run, config, own, study.replay_checkpoint, scored=scored)
    return checkpoint, [_gradient(recorded, groups_P, v, algorithm) for v, algorithm in algorithms.items()]


def _check_replayed(variant: str, algorithm: Algorithm, config: dict[str, Any]) -> None:
    named = config["reference_model"] is not None
    refusals = (
        (algorithm.penalties is not None, "takes a distance to a reference off the rewards, which a replay cannot do"),
        (algorithm.critic is not None, "judges turns by a critic, whose values of this batch were not recorded"),
        (
            algorithm.advantage == "zero" and algorithm.reads_reference and not named,
            "learns from a teacher alone, and this run has none: replay a run with a reference_model",
        ),
    )
    for refused, reason in refusals:
        if refused:
            raise ValueError(f"variant {variant} {reason}; leave it out")


def _gradient(recorded: _Recorded, groups_P: Sequence[TrajectoryGroup], variant: str, algorithm: Algorithm) -> Gradient:
    teaching = taught(recorded.config, algorithm)
    data_D, useful_P = training_data(groups_P, teaching, baselines=recorded.baselines)
    if not data_D:
        raise ValueError(f"variant {variant} learns nothing from this batch; replay another step")
    if algorithm.reads_reference:
        data_D = recorded.learner.score_reference(data_D, teacher_names(useful_P, teaching.teachers))
    if algorithm.penalize is not None:
        data_D = algorithm.penalize(data_D)
    objective, (params, base), packing = algorithm.objective, recorded.weights, recorded.packing
    if objective.reads_old:
        data_D = _scored_old(recorded, data_D)
    if objective.correct is not None:
        data_D = objective.correct(data_D)
    weights_D = token_weights(data_D, objective.aggregation, constant=objective.aggregation_constant)
    batch = packed(data_D, weights_D, objective, widths=packing.widths, rows=packing.rows)
    take = make_gradients(
        recorded.model,
        recorded.lora,
        objective.loss,
        temperature=recorded.config["temperature"],
        entropy=objective.entropy,
        remat=recorded.config["remat"],
    )
    gradient, metrics = jax.device_get(take(params, base, batch))
    flat = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(gradient)]
    return Gradient(variant, {name: float(x) for name, x in metrics.items()}, np.concatenate(flat))


def _scored_old(recorded: _Recorded, data_D: Sequence[Datum]) -> list[Datum]:
    """The datums with their log-probs under the weights that the gradient is taken at."""
    score = make_eval_logprobs(recorded.model, recorded.lora, temperature=recorded.config["temperature"])
    width = choose_width(data_D, recorded.packing.widths)
    batch = pack(data_D, [np.zeros(len(d.tokens)) for d in data_D], width=width, rows=recorded.packing.rows)
    logp_D = datum_values(np.asarray(score(*recorded.weights, batch)), data_D)
    return [dataclasses.replace(d, logprobs_old=logp) for d, logp in zip(data_D, logp_D, strict=True)]


def _open(
    run: RunDir, config: dict[str, Any], own: Algorithm, checkpoint: int | None, *, scored: bool
) -> tuple[int, _Recorded]:
    """The run's model at a checkpoint, and which one. scored: whether its references are wanted, too."""
    kept = run.path / "warm_start" / "model"
    name = str(kept) if config["warm_start"] is not None else config["model_name"]
    dtype = config["dtype"] or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    load = partial(load_policy, dtype=jnp.dtype(dtype), seed=config["seed"])
    model, base = load(name)
    references = config["teachers"] | ({"": config["reference_model"]} if config["reference_model"] else {})
    lora = config["lora"] and LoraConfig(**{**config["lora"], "targets": tuple(config["lora"]["targets"])})
    given = config["packing"] or {"widths": [config["engine"]["context"]]}
    packing = Packing(**{**given, "widths": tuple(given["widths"])})
    learner = Learner(
        model,
        base,
        lora=lora,
        objective=own.objective,  # an entropy bonus is state, and so is a critic
        critic=own.critic,
        optimizer=OptimizerConfig(**{name: config["optimizer"][name] for name in _IN_STATE}),
        packing=packing,
        temperature=config["temperature"],
        seed=config["seed"],
        references={tag: Reference(*load(name)) for tag, name in references.items()} if scored else None,
    )
    chosen, baselines = _go_to(run, learner, checkpoint)
    return chosen, _Recorded(learner, model, base, lora, packing, config, baselines)


_IN_STATE = ("weight_decay", "max_grad_norm")  # settings that say what a checkpoint's optimizer state consists of


def _go_to(run: RunDir, learner: Learner, checkpoint: int | None) -> tuple[int, Mapping[str, float]]:
    """Give the learner the state of a checkpoint; return which, and the moving baselines that are kept with it."""
    if checkpoint == 0:
        return 0, {}
    with Checkpointer(run.checkpoints, read_only=True) as checkpointer:
        chosen = checkpointer.latest() if checkpoint is None else checkpoint
        if chosen is None:
            raise ValueError(f"{run.path} has no checkpoint yet; replay_checkpoint=0 takes the weights before training")
        state, supplied = checkpointer.restore(chosen, learner.abstract_state())
    learner.restore(state)
    return chosen, (supplied or {}).get("baselines", {})


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of the angle between two gradients; NaN when one of them is zero."""
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / norms if norms else math.nan


METRICS = ("optim/loss", "optim/clip_fraction", "optim/kl_sample_train_v1", "optim/entropy")


def markdown(gradients: Sequence[Gradient], name: str, step: int, checkpoint: int, groups: int) -> str:
    """Two tables: what each variant makes of the batch, and the cosines between their gradients."""
    titles = [m.removeprefix("optim/") for m in METRICS]
    where = "the weights before training" if checkpoint == 0 else f"checkpoint {checkpoint}"
    lines = [
        f"Step {step} of {name}, {groups} groups, through every variant at {where}.",
        "",
        f"| variant | gradient norm | {' | '.join(titles)} |",
        f"|{' --- |' * (len(titles) + 2)}",
    ]
    for g in gradients:
        values = [f"{g.metrics[m]:.4g}" if m in g.metrics else "–" for m in METRICS]
        lines.append(f"| {g.variant} | {g.norm:.4g} | {' | '.join(values)} |")
    lines += ["", f"| cosine | {' | '.join(g.variant for g in gradients)} |", f"|{' --- |' * (len(gradients) + 1)}"]
    for a in gradients:
        lines.append(f"| {a.variant} | {' | '.join(f'{cosine(a.direction, b.direction):.3f}' for b in gradients)} |")
    return "\n".join(lines)


def as_json(gradients: Sequence[Gradient], step: int, checkpoint: int) -> dict[str, Any]:
    """The same as JSON-able values; null where a number is not finite."""
    pairs = itertools.combinations(gradients, 2)
    return {
        "step": step,
        "checkpoint": checkpoint,
        "variants": {
            g.variant: {"grad_norm": g.norm, **{m: _json(v) for m, v in g.metrics.items()}} for g in gradients
        },
        "cosines": [[a.variant, b.variant, _json(cosine(a.direction, b.direction))] for a, b in pairs],
    }


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None
