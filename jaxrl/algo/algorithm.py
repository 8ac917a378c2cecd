"""A row of the table with a run's overrides, as something to train with.

`resolve` applies `loss_fn_config`, whose keys are the parts of a row or the knobs of those parts, and refuses what is
unknown, makes no sense, or would have no effect (I12). Knows every table of algo/; nothing about models or runs.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxrl.algo.advantage import ADVANTAGES, CriticFit, check_advantage, critic_fit_of
from jaxrl.algo.aggregate import AGGREGATIONS
from jaxrl.algo.correction import CORRECTIONS, correct
from jaxrl.algo.entropy import ENTROPY_BONUSES
from jaxrl.algo.kl import KL_LOSSES, KL_PENALTIES, loss_term, reward
from jaxrl.algo.knobs import Value, check_knobs, knobs_of, number
from jaxrl.algo.loss import LOSSES, Loss, LossRow, loss_row
from jaxrl.algo.objective import Objective
from jaxrl.algo.variants import PARTS, Config, Variant
from jaxrl.types import Datum


@dataclass(frozen=True)
class Algorithm:
    """What a run trains with: every part of a row with its knobs bound, checked against each other.

    penalize: datums with reference log-probs -> datums with other advantages. penalties: such datums -> what the reward
    of each (group, episode) loses. whole_batch: why neither can be told of a part of a batch; None if both can.
    critic: how the critic learns whose values the advantage is over, if there is one.
    """

    objective: Objective
    advantage: str
    advantage_knobs: Config
    penalize: Callable[[Sequence[Datum]], list[Datum]] | None = None
    penalties: Callable[[Sequence[Datum]], Mapping[tuple[int, int], float]] | None = None
    whole_batch: str | None = None
    critic: CriticFit | None = None

    @property
    def reads_reference(self) -> bool:
        """Whether a batch is scored under the reference."""
        return self.objective.loss.reads_reference or (self.penalize or self.penalties) is not None


def resolve(row: Variant, config: Config | None = None) -> Algorithm:
    """The row with `loss_fn_config` applied. Raises ValueError for what is unknown, impossible or without effect.

    A key is one of `variants.PARTS` ("none" leaves a kl, correction or entropy out), a knob of a part that is used,
    aggregation_constant, or observation_coef. A part that is replaced takes the row's knobs for it along.
    """
    parts, given = _parts(row, config or {})
    numbers = {name: number(name, given.pop(name)) for name in _NUMBERS if name in given}
    readers = _readers(parts)
    _check_read(given, readers)
    _check_together(parts, given)
    values = _defaults(row, readers) | given
    bound = {(r.kind, r.name): _bound(r, values) for r in readers}
    return _assembled(parts, bound, numbers)


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
    parts, given = _parts(row, config or {})
    numbers = {name: given.pop(name) for name in _NUMBERS if name in given}
    readers = _readers(parts)
    values = _defaults(row, readers) | given
    aggregation = Explained("aggregation", parts.aggregation, AGGREGATIONS[parts.aggregation].says, numbers)
    return [*(_explained(reader, values) for reader in readers), aggregation, _ANCHORS[parts.anchor]]


_ANCHORS = {
    "sampler": Explained("anchor", "sampler", "Ratios are against the log-probs recorded when tokens were drawn.", {}),
    "old": Explained("anchor", "old", "Ratios are against the policy before the batch, which is scored anew.", {}),
}

_NUMBERS = ("aggregation_constant", "observation_coef")


# --- parts and who reads what ---------------------------------------------------------------------


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

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


_KL = {**dict.fromkeys(KL_LOSSES, loss_term), **KL_PENALTIES, "reward": reward}
"""Where each distance to the reference takes its knobs."""

_OPTIONAL = ("kl", "correction", "entropy")


def _parts(row: Variant, config: Config) -> tuple[_Parts, dict[str, Value]]:
    """(the parts of the row with those that `config` names in their place, the rest of `config`)."""
    given = dict(config)
    words: dict[str, Any] = {name: getattr(row, name) for name in PARTS}
    words |= {name: given.pop(name) for name in PARTS if name in given}
    words |= {name: None for name in _OPTIONAL if words[name] == "none"}
    if words["correction"] and row.correction is None and "anchor" not in config:
        words["anchor"] = "old"
    correction = tuple(str(words["correction"]).split("+")) if words["correction"] else ()
    loss = words["loss"] if isinstance(words["loss"], LossRow) else loss_row(str(words["loss"]))
    name = words["loss"] if isinstance(words["loss"], str) else loss.form.__name__
    _named("advantage", words["advantage"], ADVANTAGES)
    _named("aggregation", words["aggregation"], AGGREGATIONS)
    _named("kl", words["kl"], {None: None, **_KL})
    _named("entropy", words["entropy"], {None: None, **ENTROPY_BONUSES})
    _named("anchor", words["anchor"], _ANCHORS)
    for part in correction:
        _named("correction", part, CORRECTIONS)
    kept = {key: words[key] for key in ("advantage", "aggregation", "kl", "anchor", "entropy")}
    return _Parts(loss=loss, loss_name=name, correction=correction, **kept), given


def _named(part: str, name: Any, table: Mapping[Any, Any]) -> None:
    if name not in table:
        known = [n for n in table if n is not None]
        close = difflib.get_close_matches(str(name), known) or known
        raise ValueError(f"{part}={name!r} does not exist; did you mean {', '.join(close)}?")


def _readers(parts: _Parts) -> list[_Reader]:
    """Who reads knobs."""
    return [
        _Reader("advantage", parts.advantage, ADVANTAGES[parts.advantage].functions),
        _Reader("loss", parts.loss_name, parts.loss.functions),
        *([_Reader("kl", parts.kl, (_KL[parts.kl],))] if parts.kl else []),
        *([_Reader("entropy", parts.entropy, (ENTROPY_BONUSES[parts.entropy],))] if parts.entropy else []),
        *([_Reader("correction", "+".join(parts.correction), (correct,))] if parts.correction else []),
        *(_Reader("factor", name, (CORRECTIONS[name],)) for name in parts.correction),
    ]


def _defaults(row: Variant, readers: Sequence[_Reader]) -> dict[str, Value]:
    """The row's own knobs, less those of its parts that were replaced."""
    replaced = [reader for reader in _readers(_parts(row, {})[0]) if reader not in readers]
    gone = {knob for reader in replaced for knob in knobs_of(*reader.functions)}
    return {knob: value for knob, value in row.loss_fn_config.items() if knob not in gone}


def _every_reader() -> list[_Reader]:
    """All that read knobs, whatever is chosen."""
    return [
        *(_Reader("advantage", name, row.functions) for name, row in ADVANTAGES.items()),
        *(_Reader("loss", name, row.functions) for name, row in LOSSES.items()),
        *(_Reader("kl", name, (function,)) for name, function in _KL.items()),
        *(_Reader("entropy", name, (function,)) for name, function in ENTROPY_BONUSES.items()),
        *(_Reader("factor", name, (function,)) for name, function in CORRECTIONS.items()),
        _Reader("correction", "of any kind", (correct,)),
    ]


# --- what is refused ------------------------------------------------------------------------------


def _check_read(given: Config, readers: Sequence[_Reader]) -> None:
    """Refuse a knob that none of the parts reads (I12)."""
    known = {knob for reader in readers for knob in knobs_of(*reader.functions)}
    for knob in given:
        if knob in known:
            continue
        if owners := [str(r) for r in _every_reader() if knob in knobs_of(*r.functions)]:
            raise ValueError(
                f"loss_fn_config.{knob} has no effect: none of {', '.join(map(str, readers))} reads it; it belongs to "
                f"{', '.join(owners)}"
            )
        names = sorted({*known, *PARTS, *_NUMBERS})
        close = difflib.get_close_matches(knob, names, cutoff=0.4) or names
        raise ValueError(f"loss_fn_config.{knob} does not exist; the nearest names are {', '.join(close)}")


_OTHER_REWARDS = {
    "moving_baseline": "the baseline moves with the rewards that the envs gave",
    "critic": "the critic's values are of the rewards that the envs gave",
    "gdpo": "its rewards are metrics, and not the total that would be penalised",
    "pass_at_k": "it asks which rewards are successes, and a penalty would decide that",
    "zero": "it reads no reward",
}
"""Advantages for which a penalty on the total reward makes no sense, and why."""

Rule = tuple[Callable[[_Parts, Config], bool], str]

_RULES: tuple[Rule, ...] = (
    (
        lambda p, given: p.anchor == "old" and not (p.loss.anchored or p.correction),
        "anchor=old has no effect: loss {p.loss_name!r} has no ratio to an anchor; leave it out",
    ),
    (
        lambda p, given: len(set(p.correction)) < len(p.correction),
        "correction={correction} names a factor twice, which would square it",
    ),
    (
        lambda p, given: bool(p.correction) and not p.loss.sampled,
        "correction={correction} has no effect: loss {p.loss_name!r} does not correct for who sampled",
    ),
    (
        lambda p, given: bool(p.correction) and p.loss.corrects,
        "correction={correction} would count twice: the ratio of loss {p.loss_name!r} is against the sampler already; "
        "take a form such as reinforce or ppo",
    ),
    (
        lambda p, given: bool(p.correction) and p.loss.anchored and p.anchor == "sampler",
        "correction={correction} with anchor=sampler would count twice: the ratio of loss {p.loss_name!r} is then "
        "against the sampler already; take anchor=old, or leave the correction out",
    ),
    (
        lambda p, given: p.kl is not None and p.loss.reference,
        "kl={p.kl} would count the reference twice: loss {p.loss_name!r} is about the distance to it already",
    ),
    (
        lambda p, given: p.kl in (*KL_PENALTIES, "reward") and not p.loss.advantages,
        "kl={p.kl} changes advantages, and loss {p.loss_name!r} does not learn from them; take a kl in the loss",
    ),
    (
        lambda p, given: p.kl == "reward" and p.advantage in _OTHER_REWARDS,
        "kl=reward with advantage={p.advantage}: {why}; take kl=advantage, or a kl in the loss",
    ),
    (
        lambda p, given: p.advantage == "zero" and p.loss.advantages and p.kl not in KL_PENALTIES,
        "advantage=zero with loss {p.loss_name!r} learns nothing; give it a kl in the advantages",
    ),
    (
        lambda p, given: not p.loss.advantages and bool(set(given) & set(knobs_of(*_readers(p)[0].functions))),
        "loss {p.loss_name!r} does not read advantages, so no knob of advantage={p.advantage} has an effect",
    ),
)


def _check_together(parts: _Parts, given: Config) -> None:
    """Refuse parts that contradict each other, with the reason."""
    for refused, reason in _RULES:
        if refused(parts, given):
            why, joined = _OTHER_REWARDS.get(parts.advantage), "+".join(parts.correction)
            raise ValueError(reason.format(p=parts, correction=joined, why=why))


# --- putting it together --------------------------------------------------------------------------


def _explained(reader: _Reader, values: Config) -> Explained:
    function = KL_LOSSES.get(reader.name, reader.functions[0]) if reader.kind == "kl" else reader.functions[0]
    knobs = {knob: values.get(knob, default) for knob, default in knobs_of(*reader.functions).items()}
    return Explained(reader.kind, reader.name, function.__doc__ or "", knobs)


def _bound(reader: _Reader, config: Config) -> dict[str, Value]:
    """The knobs that the reader reads, checked; those of advantages have a check of their own."""
    read = {knob: config[knob] for knob in knobs_of(*reader.functions) if knob in config}
    if reader.kind == "advantage":
        return check_advantage(reader.name, read)
    return check_knobs(str(reader), read, *reader.functions)


_WHOLE_BATCH = {
    "advantage_centred": "kl: its penalties sum to zero over the batch",
    "advantage_whitened": "kl: its returns are whitened over the batch",
}


def _assembled(parts: _Parts, bound: Mapping[tuple[str, str], Config], numbers: Mapping[str, float]) -> Algorithm:
    """The parts with their knobs."""
    kl, kl_knobs = parts.kl or "", bound.get(("kl", parts.kl or ""), {})
    factors = [partial(CORRECTIONS[name], **bound["factor", name]) for name in parts.correction]
    loss = Loss(
        parts.loss,
        bound["loss", parts.loss_name],
        anchor_old=parts.anchor == "old" and parts.loss.anchored,
        corrected=bool(factors),
        kl=partial(loss_term, KL_LOSSES[kl], **kl_knobs) if kl in KL_LOSSES else None,
        observation_coef=numbers.get("observation_coef", 0.0),
    )
    objective = Objective(
        loss,
        parts.aggregation,
        numbers.get("aggregation_constant"),
        correct=partial(correct, factors, **bound["correction", "+".join(parts.correction)]) if factors else None,
        entropy=ENTROPY_BONUSES[parts.entropy](**bound["entropy", parts.entropy]) if parts.entropy else None,
    )
    advantage_knobs = bound["advantage", parts.advantage]
    return Algorithm(
        objective,
        parts.advantage,
        advantage_knobs,
        penalize=partial(KL_PENALTIES[kl], **kl_knobs) if kl in KL_PENALTIES else None,
        penalties=partial(reward, **kl_knobs) if kl == "reward" else None,
        whole_batch=_WHOLE_BATCH.get(kl),
        critic=critic_fit_of(parts.advantage, advantage_knobs),
    )
