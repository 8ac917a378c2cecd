"""Published algorithms as rows, and a row with a run's overrides as something to train with.

A row names an advantage, a loss form, an aggregation, what keeps the policy near a reference, and what is made of the
mismatch between sampler and trainer, with the paper. `resolve` applies `loss_fn_config`, whose keys are the parts of a
row or the knobs of those parts, and refuses what has no effect (I12). Knows the tables; never a branch: an algorithm
that does not fit a row needs a new row in one of the tables, not an `if`.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from jaxrl.algo.advantage import ADVANTAGES, CriticFit, check_advantage, critic_fit_of
from jaxrl.algo.aggregate import AGGREGATIONS
from jaxrl.algo.correction import CORRECTIONS, correct
from jaxrl.algo.entropy import ENTROPY_BONUSES
from jaxrl.algo.kl import KL_LOSSES, KL_PENALTIES, loss_term, reward
from jaxrl.algo.knobs import Value, check_knob, knobs_of, number
from jaxrl.algo.loss import LOSSES, Form, Loss, LossRow, loss_row
from jaxrl.algo.objective import Objective
from jaxrl.types import Datum

Config = Mapping[str, Value]


@dataclass(frozen=True)
class Variant:
    """One row. `loss_fn_config` holds the knobs, of any part, that differ from their defaults.

    loss: a name of `LOSSES`, or a row of one's own. kl: a name of `KL_LOSSES` (in the loss), of `KL_PENALTIES` (in the
    advantages), or "reward". correction: names of `CORRECTIONS`, joined by "+". anchor: what the form's ratio is
    against: the sampler's recorded log-probs, or those of the policy before the batch, scored anew.
    """

    advantage: str
    loss: str | LossRow
    aggregation: str
    paper: str
    kl: str | None = None
    correction: str | None = None
    anchor: Literal["sampler", "old"] = "sampler"
    loss_fn_config: Config = field(default_factory=dict)


_DPPO = "arXiv 2602.04879"
_COVARIANCE = "arXiv 2505.22617"
_PPO = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

VARIANTS: dict[str, Variant] = {
    "importance_sampling": Variant(
        "mean", "importance_sampling", "token_sum", "tinker-docs.thinkingmachines.ai/losses"
    ),
    "ppo": Variant("mean", "ppo", "token_sum", "arXiv 1707.06347"),
    "dual_clip": Variant("mean_std", "dual_clip", "token_mean", "arXiv 1912.09729"),
    "reinforce": Variant("mean", "reinforce", "token_mean", "doi 10.1007/BF00992696"),
    "rloo": Variant("leave_one_out", "reinforce", "seq_mean_token_sum", "arXiv 2402.14740"),
    "rloo_clip": Variant(
        "leave_one_out",
        "sequence_ppo",
        "seq_mean_token_sum",
        "TRL, RLOOTrainer",
        kl="reward",
        loss_fn_config={"kl_coef": 0.05},
    ),
    "reinforce_pp": Variant(
        "reinforce_pp",
        "ppo",
        "token_mean",
        "arXiv 2501.03262",
        kl="advantage",
        loss_fn_config={"kl_coef": 1e-3, "kl_discount": 1.0},
    ),
    "turn_ppo": Variant("critic", "ppo", "token_mean", "arXiv 2512.17008"),
    "opo": Variant("opo", "reinforce", "token_mean", "arXiv 2505.23585"),
    "gpg": Variant("gpg", "reinforce", "token_mean", "arXiv 2504.02546"),
    "maxrl": Variant("maxrl", "importance_sampling", "token_mean", "arXiv 2602.02710"),
    "grpo": Variant("mean_std", "ppo", "seq_mean_token_mean", "arXiv 2402.03300"),
    "grpo_kl": Variant(
        "mean_std", "ppo", "seq_mean_token_mean", "arXiv 2402.03300", kl="k3", loss_fn_config={"kl_coef": 0.04}
    ),
    "dr_grpo": Variant("mean", "ppo", "seq_mean_token_sum_norm", "arXiv 2503.20783"),
    "dapo": Variant("mean_std", "ppo", "token_mean", "arXiv 2503.14476", loss_fn_config={"clip_high_threshold": 1.28}),
    "lite_ppo": Variant("batch_std", "ppo", "token_mean", "arXiv 2508.08221"),
    "gspo": Variant("mean_std", "gspo", "seq_mean_token_mean", "arXiv 2507.18071"),
    "gspo_token": Variant("mean_std", "gspo_token", "seq_mean_token_mean", "arXiv 2507.18071"),
    "luspo": Variant(
        "mean_std",
        "gspo",
        "seq_mean_token_sum",
        "arXiv 2602.05261",
        loss_fn_config={"clip_low_threshold": 1 - 2e-3, "clip_high_threshold": 1 + 2.5e-3},
    ),
    "gmpo": Variant("mean_std", "gmpo", "seq_mean_token_mean", "arXiv 2507.20673"),
    "sapo": Variant("mean_std", "sapo", "seq_mean_token_mean", "arXiv 2511.20347"),
    "vespo": Variant("mean_std", "vespo", "token_mean", "arXiv 2602.10693"),
    "cispo": Variant("mean_std", "cispo", "token_mean", "arXiv 2506.13585"),
    "scalerl": Variant("batch_std", "cispo", "prompt_mean", "arXiv 2510.13786"),
    "rollout_is": Variant("mean_std", "rollout_is", "token_mean", "SkyRL, rollout_is"),
    "minirl": Variant("mean", "masked_pg", "token_mean", "arXiv 2512.01374", anchor="old"),
    "dppo": Variant("mean", "dppo", "seq_mean_token_sum_norm", _DPPO, loss_fn_config={"divergence": "tv"}),
    "dppo_kl": Variant(
        "mean",
        "dppo",
        "seq_mean_token_sum_norm",
        _DPPO,
        loss_fn_config={"divergence": "kl", "divergence_low": 0.05, "divergence_high": 0.05},
    ),
    "prime_rl": Variant("mean", "prime_rl", "token_mean", "prime-rl, default loss"),
    "ipo": Variant("mean", "ipo", "token_mean", "prime-rl, ipo loss"),
    "dro": Variant("mean", "dro", "token_sum", "arXiv 2405.19107"),
    "kimi": Variant("mean", "kimi", "seq_mean_token_sum", "arXiv 2501.12599"),
    "drpo": Variant("mean", "drpo", "token_mean", "UniRL, AdaSPO"),
    "topr": Variant("mean", "topr", "token_mean", "arXiv 2503.14286"),
    "topr_token": Variant("mean", "topr_token", "token_mean", "ROLL, topr"),
    "opsm": Variant("mean_std", "opsm", "token_mean", "arXiv 2512.02556"),
    "m2po": Variant("mean_std", "m2po", "token_mean", "arXiv 2510.01161"),
    "clip_cov": Variant("mean_std", "clip_cov", "token_mean", _COVARIANCE),
    "kl_cov": Variant("mean_std", "kl_cov", "token_mean", _COVARIANCE),
    "tis": Variant("mean_std", "ppo", "token_mean", "fengyao.notion.site", correction="token_truncate", anchor="old"),
    "icepop": Variant("mean_std", "ppo", "token_mean", "arXiv 2510.18855", correction="token_mask", anchor="old"),
    "decoupled_ppo": Variant(
        "mean_std",
        "ppo",
        "token_mean",
        "arXiv 2505.24298",
        correction="token_truncate",
        anchor="old",
        loss_fn_config={"weight_max": float("inf")},
    ),
    "geometric_mask": Variant(
        "mean_std", "ppo", "token_mean", "SkyRL, geometric mask", correction="geometric_mask", anchor="old"
    ),
    "distillation": Variant(
        "zero",
        "importance_sampling",
        "token_sum",
        "thinkingmachines.ai/blog/on-policy-distillation",
        kl="advantage",
        loss_fn_config={"kl_coef": 1.0},
    ),
    "reverse_kl": Variant("zero", "reverse_kl", "token_mean", "prime-rl, ref_kl"),
}


@dataclass(frozen=True)
class Algorithm:
    """What a run trains with: every part of a row with its knobs bound, checked against each other.

    penalize: datums with reference log-probs -> datums with other advantages. penalties: such datums -> what the reward
    of each (group, episode) loses. critic: how the critic learns whose values the advantage is over, if there is one.
    """

    objective: Objective
    advantage: str
    advantage_knobs: Config
    penalize: Callable[[Sequence[Datum]], list[Datum]] | None = None
    penalties: Callable[[Sequence[Datum]], Mapping[tuple[int, int], float]] | None = None
    critic: CriticFit | None = None

    @property
    def centred(self) -> bool:
        """Whether penalties are less their mean over the batch."""
        return isinstance(self.penalize, partial) and self.penalize.func is KL_PENALTIES["advantage_centred"]

    @property
    def reads_reference(self) -> bool:
        """Whether a batch is scored under the reference."""
        return self.objective.loss.reads_reference or (self.penalize or self.penalties) is not None


def variant(name: str) -> Variant:
    """The row of that name. Raises ValueError with the nearest names."""
    if name not in VARIANTS:
        close = difflib.get_close_matches(name, VARIANTS) or sorted(VARIANTS)
        raise ValueError(
            f"loss_fn={name!r} is unknown; did you mean {', '.join(close)}? A function of your own is given "
            "as package.module:function"
        )
    return VARIANTS[name]


def own_variant(name: str, given: object) -> Variant:
    """The row for something of the user's: a Variant, a LossRow, or a form, a function (tokens, *, knobs).

    A form is taken to be anchored, and gets mean-centred advantages and a mean over tokens.
    """
    if isinstance(given, Variant):
        return given
    if not isinstance(given, LossRow) and not callable(given):
        raise ValueError(f"loss_fn={name!r} is {given!r}; expected a Variant, a LossRow or a function of tokens")
    row = given if isinstance(given, LossRow) else LossRow(cast(Form, given), anchored=True)
    return Variant("mean", row, "token_mean", name)


def resolve(row: Variant, config: Config | None = None) -> Algorithm:
    """The row with `loss_fn_config` applied. Raises ValueError for what is unknown, impossible or without effect.

    A key is a part (advantage, loss, aggregation, kl, correction, anchor, entropy; "none" leaves one out), a knob of a
    part that is used, aggregation_constant, or observation_coef.
    """
    given = dict(config or {})
    parts = _parts(row, given)
    constant, observation = given.pop("aggregation_constant", None), given.pop("observation_coef", 0.0)
    readers = _readers(parts)
    _check_read(given, readers)
    defaults = {k: v for k, v in row.loss_fn_config.items() if k not in given}
    bound = {(r.kind, r.name): _bound(r, defaults | given) for r in readers}
    _check_together(parts)
    return _assembled(parts, bound, constant, number("observation_coef", observation))


@dataclass(frozen=True)
class Explained:
    """One part of an algorithm: what it is, what its docstring says, and its knobs as they are set."""

    kind: str
    name: str
    says: str
    knobs: Config


def explain(row: Variant, config: Config | None = None) -> list[Explained]:
    """The parts of the row with `loss_fn_config` applied, in the order a batch meets them. Raises as `resolve` does."""
    resolve(row, config)
    given = dict(config or {})
    parts = _parts(row, given)
    values = dict(row.loss_fn_config) | given
    explained = []
    for reader in _readers(parts):
        known = knobs_of(*reader.functions)
        function = KL_LOSSES.get(reader.name, reader.functions[0]) if reader.kind == "kl" else reader.functions[0]
        knobs = {knob: values.get(knob, default) for knob, default in known.items()}
        explained.append(Explained(reader.kind, reader.name, function.__doc__ or "", knobs))
    constant = {k: given[k] for k in ("aggregation_constant",) if k in given}
    return [*explained, Explained("aggregation", parts.aggregation, AGGREGATIONS[parts.aggregation].says, constant)]


@dataclass(frozen=True)
class _Parts:
    """The parts of an algorithm by name, None where there is none."""

    advantage: str
    loss: LossRow
    loss_name: str
    aggregation: str
    kl: str | None
    correction: tuple[str, ...]
    anchor: str
    entropy: str | None


@dataclass(frozen=True)
class _Reader:
    """Who reads knobs: a part by kind and name, and the functions whose keyword-only parameters they are."""

    kind: str
    name: str
    functions: tuple[Callable[..., Any], ...]

    @property
    def owner(self) -> str:
        """What errors call it."""
        return f"{self.kind} {self.name!r}"


def _parts(row: Variant, given: dict[str, Value]) -> _Parts:
    """The parts of the row, those that `given` names taken out of it."""

    def pick(name: str, default: str | None) -> str | None:
        word = given.pop(name, default)
        return None if word in (None, "none") else str(word)

    advantage, aggregation = pick("advantage", row.advantage), pick("aggregation", row.aggregation)
    correction = tuple((pick("correction", row.correction) or "").split("+"))
    correction = () if correction == ("",) else correction
    kl, entropy = pick("kl", row.kl), pick("entropy", None)
    loss = given.pop("loss", row.loss)
    for name, value, table in (
        ("advantage", advantage, ADVANTAGES),
        ("aggregation", aggregation, AGGREGATIONS),
        *(("correction", part, CORRECTIONS) for part in correction),
        ("kl", kl or "reward", {**KL_LOSSES, **KL_PENALTIES, "reward": None}),
        ("entropy", entropy or "fixed", ENTROPY_BONUSES),
    ):
        if value not in table:
            close = difflib.get_close_matches(str(value), table) or list(table)
            raise ValueError(f"{name}={value!r} does not exist; did you mean {', '.join(close)}?")
    anchor = str(given.pop("anchor", "old" if correction and row.correction is None else row.anchor))
    if anchor not in ("sampler", "old"):
        raise ValueError(f"anchor={anchor!r}: expected sampler (the recorded log-probs) or old (scored anew)")
    named = loss_row(str(loss)) if not isinstance(loss, LossRow) else loss
    label = str(loss) if not isinstance(loss, LossRow) else loss.form.__name__
    return _Parts(str(advantage), named, label, str(aggregation), kl, correction, anchor, entropy)


def _readers(parts: _Parts) -> list[_Reader]:
    """Who reads knobs."""
    readers = [
        _Reader("advantage", parts.advantage, ADVANTAGES[parts.advantage].functions),
        _Reader("loss", parts.loss_name, parts.loss.functions),
    ]
    if parts.kl is not None:
        readers.append(
            _Reader("kl", parts.kl, (loss_term if parts.kl in KL_LOSSES else KL_PENALTIES.get(parts.kl, reward),))
        )
    if parts.entropy is not None:
        readers.append(_Reader("entropy", parts.entropy, (ENTROPY_BONUSES[parts.entropy],)))
    if parts.correction:
        readers.append(_Reader("correction", "+".join(parts.correction), (correct,)))
    return readers + [_Reader("factor", name, (CORRECTIONS[name],)) for name in parts.correction]


def _check_read(given: Config, readers: Sequence[_Reader]) -> None:
    """Refuse a knob that none of the parts reads (I12)."""
    known = {knob for reader in readers for knob in knobs_of(*reader.functions)}
    for knob in given:
        if knob not in known and (owners := [r.owner for r in _every_reader() if knob in knobs_of(*r.functions)]):
            raise ValueError(
                f"loss_fn_config.{knob} has no effect: none of {', '.join(r.owner for r in readers)} reads it; it "
                f"belongs to {', '.join(owners)}"
            )
        if knob not in known:
            close = difflib.get_close_matches(knob, [*known, *_PART_NAMES], cutoff=0.4) or sorted(
                {*known, *_PART_NAMES}
            )
            raise ValueError(f"loss_fn_config.{knob} does not exist; the nearest names are {', '.join(close)}")


def _every_reader() -> list[_Reader]:
    """All that read knobs, whatever is chosen."""
    return [
        *(_Reader("advantage", name, row.functions) for name, row in ADVANTAGES.items()),
        *(_Reader("loss", name, row.functions) for name, row in LOSSES.items()),
        *(_Reader("kl", name, (loss_term,)) for name in KL_LOSSES),
        *(_Reader("kl", name, (function,)) for name, function in {**KL_PENALTIES, "reward": reward}.items()),
        *(_Reader("entropy", name, (function,)) for name, function in ENTROPY_BONUSES.items()),
        *(_Reader("factor", name, (function,)) for name, function in CORRECTIONS.items()),
        _Reader("correction", "any", (correct,)),
    ]


_PART_NAMES = (
    "advantage", "loss", "aggregation", "kl", "correction", "anchor", "entropy", "aggregation_constant",
    "observation_coef",
)  # fmt: skip


def _bound(reader: _Reader, config: Config) -> dict[str, Value]:
    """The knobs that the reader reads, checked; those of advantages have a check of their own."""
    known = knobs_of(*reader.functions)
    read = {knob: value for knob, value in config.items() if knob in known}
    if reader.kind == "advantage":
        return check_advantage(reader.name, read)
    return {knob: check_knob(reader.owner, knob, value, *reader.functions) for knob, value in read.items()}


_AS_THE_ENVS_GAVE = {"moving_baseline": "the baseline moves with", "critic": "the critic's values are of"}
"""Advantages that remember rewards from step to step, which no penalty is taken off, and how."""


def _check_together(parts: _Parts) -> None:
    """Refuse parts that contradict each other, with the reason."""
    loss, name = parts.loss, f"loss {parts.loss_name!r}"
    if parts.anchor == "old" and not loss.anchored and not parts.correction:
        raise ValueError(f"anchor=old has no effect: {name} has no ratio to an anchor; leave it out")
    if parts.correction and loss.corrects:
        raise ValueError(
            f"correction={'+'.join(parts.correction)} would count twice: the ratio of {name} is against the sampler "
            "already; take a form such as reinforce or ppo"
        )
    if parts.correction and loss.anchored and parts.anchor == "sampler":
        raise ValueError(
            f"correction={'+'.join(parts.correction)} with anchor=sampler would count twice: the ratio of {name} is "
            "then against the sampler already; take anchor=old, or leave the correction out"
        )
    if parts.kl is not None and parts.loss_name == "reverse_kl":
        raise ValueError(f"kl={parts.kl} would count the reference twice: {name} is the distance to it already")
    if parts.kl == "reward" and parts.advantage in _AS_THE_ENVS_GAVE:
        raise ValueError(
            f"kl=reward with advantage={parts.advantage}: {_AS_THE_ENVS_GAVE[parts.advantage]} the rewards that the "
            "envs gave; take kl=advantage, or a kl in the loss"
        )
    if parts.kl in (*KL_PENALTIES, "reward") and not loss.sampled:
        raise ValueError(f"kl={parts.kl} changes advantages, and {name} does not learn from them; take a loss's kl")


def _assembled(
    parts: _Parts, bound: Mapping[tuple[str, str], Config], constant: Value | None, observation: float
) -> Algorithm:
    """The parts with their knobs."""
    kl_knobs = bound.get(("kl", parts.kl or ""), {})
    factors = [partial(CORRECTIONS[name], **bound["factor", name]) for name in parts.correction]
    joined = "+".join(parts.correction)
    objective = Objective(
        Loss(
            parts.loss,
            bound["loss", parts.loss_name],
            anchor_old=parts.anchor == "old" and parts.loss.anchored,
            corrected=bool(factors),
            kl=partial(loss_term, KL_LOSSES[parts.kl], **kl_knobs) if parts.kl in KL_LOSSES else None,
            observation_coef=observation,
        ),
        parts.aggregation,
        None if constant is None else number("aggregation_constant", constant),
        correct=partial(correct, factors, **bound["correction", joined]) if factors else None,
        entropy=ENTROPY_BONUSES[parts.entropy](**bound["entropy", parts.entropy]) if parts.entropy else None,
    )
    return Algorithm(
        objective,
        parts.advantage,
        bound["advantage", parts.advantage],
        penalize=partial(KL_PENALTIES[parts.kl], **kl_knobs) if parts.kl in KL_PENALTIES else None,
        penalties=partial(reward, **kl_knobs) if parts.kl == "reward" else None,
        critic=critic_fit_of(parts.advantage, bound["advantage", parts.advantage]),
    )
