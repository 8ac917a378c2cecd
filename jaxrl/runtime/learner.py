"""The training half of a run: state on the device, one update a batch, weights for the engine.

A batch comes whole (`update`), or group by group while others are still being played (`accumulate`, then `finish`).
Owns the training state and the frozen base. Its methods block on the device and are called through the run's
limiter; nothing here is async, and nothing knows about environments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algo.advantage import CriticFit
from jaxrl.algo.aggregate import denominator, local_weights, token_weights
from jaxrl.algo.batch import choose_width, datum_values, pack, padding_fraction
from jaxrl.algo.critic import (
    Fit,
    TurnFeatures,
    fit_metrics,
    init_critic,
    make_fit,
    make_turn_features,
    pack_turns,
    padded,
    predict,
)
from jaxrl.algo.data import TurnStarts
from jaxrl.algo.objective import Objective, packed, substeps
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.scoring import Scoring, cast
from jaxrl.algo.step import (
    EvalLogprobs,
    Sums,
    TrainState,
    init_state,
    make_eval_logprobs,
    make_streamed_step,
    make_train_step,
    state_shardings,
)
from jaxrl.models import spec
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import LoraConfig, lora_specs
from jaxrl.models.spec import Params
from jaxrl.runtime.engine import Weights
from jaxrl.settings import ascending, at_least
from jaxrl.types import Datum

# A program is a function of its settings, so learners with equal ones share it: many runs in a process compile once.
_train_step = cache(make_train_step)
_streamed_step = cache(make_streamed_step)
_eval_logprobs = cache(make_eval_logprobs)
_turn_features = cache(make_turn_features)
_critic_fit = cache(make_fit)


@dataclass(frozen=True)
class Packing:
    """Shapes of a training batch. widths: positions of a row, ascending; a batch uses the least that fits.

    rows: rows of a micro-batch; each (number of micro-batches rounded up to a power of two, width) is a program.
    """

    widths: tuple[int, ...]
    rows: int = 8

    def __post_init__(self) -> None:
        if not self.widths:
            raise ValueError("packing.widths is empty: name at least one, such as that of engine.context")
        ascending("packing.widths", self.widths)
        at_least("packing.rows", self.rows, 1)


@dataclass(frozen=True)
class MeshShape:
    """Devices along each axis: `data` and `fsdp` split the batch, `fsdp` and `tensor` the weights."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Reference:
    """A model that is not trained, to score batches under: the one that training started from, or a teacher."""

    model: ModelConfig
    params: Params


@dataclass(frozen=True)
class TurnValues:
    """What the critic saw of some turns, and what it said of them.

    features_NM: of each turn, float32, kept for the fit to what the turns came to. values_N: in units of reward.
    """

    features_NM: np.ndarray
    values_N: np.ndarray


@dataclass(frozen=True)
class _CriticPrograms:
    features: TurnFeatures
    fit: Fit


@dataclass(frozen=True)
class _Underway:
    """The part of a batch that was accumulated so far: sums on the device, counts on the host."""

    sums: Sums
    count: int = 0
    groups: frozenset[int] = frozenset()
    datums: int = 0
    positions: int = 0
    padded: int = 0


class Learner:
    """Owns the training state. `params` of the state is the adapter under LoRA, else the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        base: Params,
        *,
        lora: LoraConfig | None,
        objective: Objective,
        optimizer: OptimizerConfig,
        packing: Packing,
        temperature: float = 1.0,
        remat: bool = True,
        mesh: Mesh | None = None,
        seed: int = 0,
        num_substeps: int = 1,
        references: Mapping[str, Reference] | None = None,
        critic: CriticFit | None = None,
        compute_dtype: Any = None,
    ) -> None:
        """references: models that batches are scored under, by name; the one without a name ("") is this one untrained.

        num_substeps: optimizer steps a batch, each on some of its groups. critic: how one learns; None has none.
        compute_dtype: what all weights are trained in (lora=None) and sampled from, where it is not float32, in which
        the state keeps them; give `base` in float32 then. None is the dtype of what is trained.
        """
        self.lora_scale = lora.scale if lora else 1.0
        self._objective, self._packing, self._num_substeps = objective, packing, num_substeps
        self._compute_dtype = compute_dtype
        forward = {"temperature": temperature, "mesh": mesh, "compute_dtype": compute_dtype}
        options = {**forward, "remat": remat, "entropy": objective.entropy}
        self._step = _train_step(model, lora, objective.loss, optimizer, **options)
        self._streamed = _streamed_step(model, lora, objective.loss, optimizer, **options)
        self._references = {"": Reference(model, cast(base, compute_dtype)), **(references or {})}
        # like the streamed step, these are compiled when they are first used
        self._score_old = _eval_logprobs(model, lora, **forward)
        self._score = {
            name: _eval_logprobs(r.model, None, temperature=temperature, mesh=mesh)
            for name, r in self._references.items()
        }
        self._underway: _Underway | None = None
        if lora is None:
            self._base, start = None, base
        else:
            self._base, start = base, spec.init(lora_specs(model, lora), jnp.float32, seed=(seed, _ADAPTER_STREAM))
        self._critic = None
        if critic is not None:
            features = _turn_features(Scoring(model, lora, **forward))
            self._critic = _CriticPrograms(features, _critic_fit(critic, mesh=mesh))
        where = None if mesh is None else state_shardings(model, lora, optimizer, mesh, critic=critic is not None)
        begun = init_critic(model.width) if critic else None
        self.state = init_state(optimizer, start, entropy=objective.entropy, critic=begun, shardings=where)

    @property
    def weights(self) -> Weights:
        """What to sample from: the very arrays that are trained. Gone after the next step, which donates them.

        With a compute_dtype a copy of them, in the numbers that a step computes with. Ask where the device is called.
        """
        if self._base is None:
            return Weights(cast(self.state.params, self._compute_dtype))
        return Weights(self._base, self.state.params)

    @property
    def step(self) -> int:
        """Optimizer steps made so far."""
        return int(self.state.step)

    @property
    def compilations(self) -> int:
        """Training programs compiled so far, by this learner and by those with equal settings."""
        programs = {self._step, self._streamed.start, self._streamed.add, self._streamed.finish}
        programs |= {self._score_old, *self._score.values()}
        of_critic = set() if self._critic is None else {self._critic.features, self._critic.fit}
        return sum(program._cache_size() for program in programs | of_critic)  # pyright: ignore

    def update(self, data_D: Sequence[Datum]) -> dict[str, float]:
        """`num_substeps` optimizer steps on a whole batch, as many as it has groups at most (none for an empty one).

        Metrics are means over its tokens, and sums of counts. Raises FloatingPointError when a step diverged.
        """
        if self._underway is not None:
            raise RuntimeError(
                f"a step with {self._underway.datums} accumulated datums is under way, and its gradient belongs to "
                "the parameters as they are: call finish() before update()"
            )
        if not data_D:
            return {"data/datums": 0.0}
        data_D = self._corrected(data_D)
        return _merged([self._one_step(part_D) for part_D in substeps(data_D, self._num_substeps)])

    def _one_step(self, data_D: Sequence[Datum]) -> dict[str, float]:
        objective = self._objective
        weights_D = token_weights(data_D, objective.aggregation, constant=objective.aggregation_constant)
        batch = packed(data_D, weights_D, objective, widths=self._packing.widths, rows=self._packing.rows)
        self.state, metrics = self._step(self.state, self._base, batch)
        return self._checked(metrics) | {
            "data/datums": float(len(data_D)),
            "data/padding_fraction": padding_fraction(batch),
        }

    def _corrected(self, data_D: Sequence[Datum]) -> list[Datum]:
        """The datums scored under the policy of now where the objective asks for it, and with its correction."""
        if not self._objective.reads_old:
            return list(data_D)
        logp_D = self._logprobs(self._score_old, self.state.params, self._base, data_D)
        scored_D = [replace(d, logprobs_old=logp) for d, logp in zip(data_D, logp_D, strict=True)]
        return scored_D if self._objective.correct is None else self._objective.correct(scored_D)

    def score_reference(self, data_D: Sequence[Datum], names: Mapping[int, str] | None = None) -> list[Datum]:
        """The datums with the log-probs of their trained tokens under a reference. names: group -> whose, "" if unsaid.

        Blocks on the device, like every method here.
        """
        names = names or {}
        scored_D = list(data_D)
        for name, reference in self._references.items():
            places = [i for i, d in enumerate(data_D) if names.get(d.group, "") == name]
            part_D = [data_D[i] for i in places]
            logp_D = self._logprobs(self._score[name], reference.params, None, part_D)
            for i, logp in zip(places, logp_D, strict=True):
                scored_D[i] = replace(data_D[i], logprobs_ref=logp)
        return scored_D

    def _logprobs(
        self, score: EvalLogprobs, params: Params, base: Params | None, data_D: Sequence[Datum]
    ) -> list[np.ndarray]:
        """Log-probs of the trained tokens of each datum."""
        if not data_D:
            return []
        unweighted_D = [np.zeros(len(d.tokens)) for d in data_D]
        width = choose_width(data_D, self._packing.widths)
        batch = pack(data_D, unweighted_D, width=width, rows=self._packing.rows)
        return datum_values(np.asarray(score(params, base, batch)), data_D)

    def accumulate(self, data_D: Sequence[Datum]) -> None:
        """Add the gradient of some whole groups to the step under way, which begins with the first of them.

        The parameters stay until `finish`, so they may be sampled from meanwhile. Does not wait for the device.
        """
        if not data_D:
            return
        data_D = self._corrected(data_D)  # the policy of now is the one before the step: it moves when that is done
        groups = frozenset(d.group for d in data_D)
        if self._underway is not None and (again := groups & self._underway.groups):
            raise ValueError(
                f"group {min(again)} was accumulated already: all datums of a group go into one call, because their "
                "weights depend on each other. Number the groups through the whole step"
            )
        weights_D, count = local_weights(
            data_D, self._objective.aggregation, constant=self._objective.aggregation_constant
        )
        batch = packed(data_D, weights_D, self._objective, widths=self._packing.widths, rows=self._packing.rows)
        so_far = self._underway or _Underway(self._streamed.start(self.state))
        positions = int(batch.count) * batch.mask[0].size
        self._underway = _Underway(
            sums=self._streamed.add(so_far.sums, self.state.params, self._base, batch),
            count=so_far.count + count,
            groups=so_far.groups | groups,
            datums=so_far.datums + len(data_D),
            positions=so_far.positions + positions,
            padded=so_far.padded + positions - sum(len(d.tokens) - 1 for d in data_D),
        )

    def finish(self) -> dict[str, float]:
        """The optimizer step of all that was accumulated: what `update` does with it (so none if nothing was)."""
        if self._underway is None:
            return {"data/datums": 0.0}
        part, self._underway = self._underway, None
        self.state, metrics = self._streamed.finish(self.state, part.sums, np.float32(denominator(part.count)))
        return self._checked(metrics) | {
            "data/datums": float(part.datums),
            "data/padding_fraction": part.padded / max(part.positions, 1),
        }

    def turn_values(self, starts: TurnStarts) -> TurnValues:
        """The critic's values of turns under the policy of now, with which its features move: ask before a step.

        Raises FloatingPointError when one is not finite.
        """
        programs, head = self._programs, jax.device_get(self.state.critic.head)
        if not starts.turns:
            return TurnValues(np.zeros((0, len(head.weights)), np.float32), np.zeros(0))
        turns = pack_turns(starts, widths=self._packing.widths, rows=self._packing.rows)
        features_NBKM = programs.features(self.state.params, self._base, turns.batch, turns.turns_NBK)
        features_NM = np.asarray(features_NBKM).reshape(-1, features_NBKM.shape[-1])[turns.slots]
        values_N = np.asarray(predict(head, features_NM.astype(np.float64)))
        if not np.isfinite(values_N).all():
            raise FloatingPointError(
                f"step {self.step}: the critic's values are not finite. Lower critic_learning_rate, or look at the "
                "rewards and the hidden states of this step"
            )
        return TurnValues(features_NM, values_N)

    def fit_critic(self, turns: TurnValues, targets_N: np.ndarray) -> dict[str, float]:
        """Teach the critic what the turns came to. Once a step, with all of its turns; of none, nothing is learned.

        The metrics say how good the values were before. Neither the policy nor its optimizer is touched.
        """
        programs = self._programs
        if len(targets_N):
            critic = programs.fit(self.state.critic, *padded(turns.features_NM, targets_N))
            self.state = replace(self.state, critic=critic)
        return fit_metrics(turns.values_N, targets_N)

    @property
    def _programs(self) -> _CriticPrograms:
        if self._critic is None:
            raise RuntimeError("this learner has no critic: make it with critic=CriticFit(...)")
        return self._critic

    def _checked(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """The metrics of the step just made, as numbers."""
        numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if numbers.get("optim/nonfinite"):
            raise FloatingPointError(
                f"step {self.step}: loss or gradient is not finite; the parameters were left as they were. Lower the "
                "learning rate, or look at the rewards and log-probs of this step's rollouts"
            )
        return numbers

    def restore(self, state: TrainState) -> None:
        """Take over a state read from a checkpoint. What was accumulated for another one is forgotten."""
        self.state, self._underway = state, None

    def abstract_state(self) -> Any:
        """Shapes and dtypes of the state, for reading a checkpoint."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)


_ADAPTER_STREAM = 0x10A  # keeps the adapter's key apart from other uses of the run's seed


def _merged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of some steps as those of one: counts and losses add up, rates and states are the last, the rest are
    means weighed by tokens."""
    if len(steps) == 1:
        return dict(steps[0])
    tokens = np.array([s["optim/tokens"] for s in steps])
    merged = {}
    for name in steps[0]:
        values = np.array([s[name] for s in steps])
        if name in ("optim/tokens", "optim/loss", "optim/observation_loss", "data/datums"):
            merged[name] = float(values.sum())
        elif name in ("optim/lr", "optim/entropy_coef"):
            merged[name] = float(values[-1])
        else:
            merged[name] = float(np.average(values, weights=tokens if tokens.any() else None))
    return merged
