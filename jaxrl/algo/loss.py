"""A loss: a form with its knobs bound, the distance to a reference beside it, and what both need to be told.

Pure functions over arrays of any shape. Knows nothing about aggregation (the weights multiply afterwards), packing or
models. A form is a row of `LOSSES`, or any function of the same signature. `Loss` selects the trained tokens before
the form sees them, and again after (I4): a value at a masked position is never read, so that NaN there gives neither a
NaN loss nor a NaN gradient.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl.algo import forms, pooled
from jaxrl.algo.knobs import Value, check_knobs, knobs_of
from jaxrl.algo.tokens import TokenInputs

__all__ = ["LOSSES", "Loss", "LossRow", "TokenInputs", "TokenLoss", "make_loss"]


class TokenLoss(NamedTuple):
    """Per token: the loss, and values whose mean over trained tokens is a metric. 0 where masked."""

    loss: Float[Array, "*tokens"]
    metrics: dict[str, Float[Array, "*tokens"]]


Form = Callable[..., forms.FormResult]
StatisticsFn = Callable[..., pooled.Statistics]


@dataclass(frozen=True)
class LossRow:
    """One loss: its form, and what it reads (letters as in forms.py).

    statistics: what it needs to know of the whole batch. anchored: it reads x - o, so there is a choice of what o is.
    corrects: its ratio is against the sampler, so that nothing is left to be corrected. reference: it reads f.
    sampled: its tokens were drawn by a policy, from which the trained one may have drifted. whole_batch: its
    statistics pool more than a group, so that a batch cannot be learned from part by part. pairs: a group is a better
    and a worse episode. advantages: it reads A.
    """

    form: Form
    statistics: StatisticsFn | None = None
    anchored: bool = False
    corrects: bool = False
    reference: bool = False
    sampled: bool = True
    whole_batch: bool = False
    pairs: bool = False
    advantages: bool = True

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """What its knobs are the keyword-only parameters of."""
        return (self.form,) if self.statistics is None else (self.form, self.statistics)


LOSSES: dict[str, LossRow] = {
    "cross_entropy": LossRow(forms.cross_entropy, sampled=False, advantages=False),
    "reinforce": LossRow(forms.reinforce),
    "importance_sampling": LossRow(forms.importance_sampling, corrects=True),
    "ppo": LossRow(forms.ppo, anchored=True),
    "dual_clip": LossRow(forms.dual_clip, anchored=True),
    "cispo": LossRow(forms.cispo, anchored=True),
    "rollout_is": LossRow(forms.rollout_is, anchored=True),
    "masked_pg": LossRow(forms.masked_pg, anchored=True, corrects=True),
    "dppo": LossRow(forms.dppo, corrects=True),
    "dppo_capped": LossRow(forms.dppo_capped, corrects=True),
    "prime_rl": LossRow(forms.prime_rl, corrects=True),
    "ipo": LossRow(forms.ipo, corrects=True),
    "reverse_kl": LossRow(forms.reverse_kl, corrects=True, reference=True, advantages=False),
    "sapo": LossRow(forms.sapo, anchored=True),
    "dro": LossRow(forms.dro, corrects=True),
    "drpo": LossRow(forms.drpo, anchored=True),
    "topr_token": LossRow(forms.topr_token, corrects=True),
    "gspo": LossRow(pooled.gspo, pooled.mean_ratio_and_advantage, anchored=True),
    "gspo_token": LossRow(pooled.gspo_token, pooled.mean_ratio, anchored=True),
    "sequence_ppo": LossRow(pooled.sequence_ppo, pooled.sum_ratio, anchored=True),
    "gmpo": LossRow(pooled.gmpo, pooled.clipped_mean, anchored=True),
    "vespo": LossRow(pooled.vespo, pooled.sum_ratio, anchored=True),
    "topr": LossRow(pooled.topr, pooled.sampler_ratio, corrects=True),
    "kimi": LossRow(pooled.kimi, pooled.sampler_ratio, corrects=True),
    "opsm": LossRow(pooled.opsm, pooled.sampler_ratio, anchored=True),
    "m2po": LossRow(pooled.m2po, pooled.second_moment, anchored=True, whole_batch=True),
    "clip_cov": LossRow(pooled.clip_cov, pooled.chosen_by_covariance, anchored=True, whole_batch=True),
    "kl_cov": LossRow(pooled.kl_cov, pooled.top_by_covariance, anchored=True, whole_batch=True),
    "dpo": LossRow(pooled.dpo, pooled.pair_margin, reference=True, sampled=False, pairs=True),
}


@dataclass(frozen=True)
class Loss:
    """A row with its knobs bound. Call it on the tokens of a batch, or of a part whose `pooled` is filled in.

    anchor_old: o is the policy before the batch, and must be given; else it is the sampler. corrected: the batch has a
    factor of the policy's term. kl: a term that is added. observation_coef: of the cross-entropy on what the
    environment said, which the training step adds, as it has tokens of its own.
    """

    row: LossRow
    knobs: Mapping[str, Value] = field(default_factory=dict, hash=False)
    anchor_old: bool = False
    corrected: bool = False
    kl: Callable[[TokenInputs], jax.Array] | None = None
    observation_coef: float = 0.0

    @property
    def columns(self) -> tuple[str, ...]:
        """The optional columns that it reads of a batch."""
        read = {
            "logp_old": self.anchor_old,
            "logp_ref": self.reads_reference,
            "correction": self.corrected,
            "observed": self.observation_coef > 0,
        }
        return tuple(name for name, reads in read.items() if reads)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what it reports of each token."""
        mismatch = ("kl_sample_train_v1", "kl_sample_train_v2") if self.row.sampled else ()
        return ("clip_fraction", *mismatch, *(("kl_ref",) if self.reads_reference else ()))

    @property
    def reads_reference(self) -> bool:
        """Whether the tokens need reference log-probs."""
        return self.row.reference or self.kl is not None

    def statistics(self, inputs: TokenInputs) -> pooled.Statistics:
        """What the form needs to know of the batch whose tokens are all here; nothing for a form of single tokens."""
        if self.row.statistics is None:
            return {}
        taken = _bind(self.row.statistics, self.knobs)(self._safe(inputs))
        return jax.tree.map(lambda x: lax.stop_gradient(jnp.broadcast_to(x, inputs.mask.shape)), taken)

    def __call__(self, inputs: TokenInputs) -> TokenLoss:
        """Loss and metrics of each token, 0 where masked. Without `pooled`, these tokens are the whole batch."""
        safe = self._safe(inputs)._replace(pooled=inputs.pooled or self.statistics(inputs))
        value, clipped = _bind(self.row.form, self.knobs)(safe)
        if self.corrected:
            value = value * safe.correction
        metrics = {"clip_fraction": clipped.astype(value.dtype)} | (_mismatch(safe) if self.row.sampled else {})
        if self.kl is not None:
            value = value + self.kl(safe)
        if safe.logp_ref is not None and self.reads_reference:
            metrics["kl_ref"] = lax.stop_gradient(safe.logp_new) - safe.logp_ref
        return TokenLoss(
            jnp.where(safe.mask, value, 0.0), {k: jnp.where(safe.mask, v, 0.0) for k, v in metrics.items()}
        )

    def _safe(self, inputs: TokenInputs) -> TokenInputs:
        """The tokens with 0 where masked. Of old log-probs no more than this loss reads."""
        for name in self.columns:
            if name != "observed" and getattr(inputs, name) is None:
                raise ValueError(f"the loss {self.row.form.__name__!r} as configured reads {name}, which is not given")
        names = ("logp_new", "logp_sampler", "advantage", "logp_old", "logp_ref", "correction")
        values = {name: value for name in names if (value := getattr(inputs, name)) is not None}
        safe = inputs._replace(**{name: jnp.where(inputs.mask, value, 0.0) for name, value in values.items()})
        return safe if self.anchor_old else safe._replace(logp_old=None)


def make_loss(
    name: str | LossRow,
    config: Mapping[str, Value] | None = None,
    **options: Any,
) -> Loss:
    """The loss `name` with its knobs bound. Unknown names and knobs are errors. options: other fields of `Loss`."""
    row = name if isinstance(name, LossRow) else loss_row(name)
    owner = f"loss {name!r}" if isinstance(name, str) else f"loss {row.form.__name__!r}"
    for knob in config or {}:
        owners = [other for other, r in LOSSES.items() if knob in knobs_of(*r.functions)]
        if knob not in knobs_of(*row.functions) and owners:
            raise ValueError(f"knob {knob!r} has no effect on {owner}; it belongs to {', '.join(owners)}")
    return Loss(row, check_knobs(owner, config or {}, *row.functions), **options)


def loss_row(name: str) -> LossRow:
    """The row of that name. Raises ValueError with the nearest names."""
    if name not in LOSSES:
        close = difflib.get_close_matches(name, LOSSES) or list(LOSSES)
        raise ValueError(f"loss {name!r} does not exist; did you mean {', '.join(close)}?")
    return LOSSES[name]


def _bind(function: Callable[..., Any], knobs: Mapping[str, Value]) -> Callable[..., Any]:
    """The function with those of the knobs that it takes."""
    return partial(function, **{name: knobs[name] for name in knobs_of(function) if name in knobs})


def _mismatch(inputs: TokenInputs) -> dict[str, jax.Array]:
    """Two estimates of KL(sampler || trainer): q - x, and half its square (joschu.net/blog/kl-approx)."""
    difference = inputs.logp_sampler - lax.stop_gradient(inputs.logp_new)
    return {"kl_sample_train_v1": difference, "kl_sample_train_v2": 0.5 * difference**2}
