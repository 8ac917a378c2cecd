"""From the rewards of a batch of groups to the advantages of their members, one number an episode or one a turn.

Knows groups of trajectories, how episodes end, and numbers. Knows nothing about losses or JAX. An estimator is a row
of `ADVANTAGES`: a function whose keyword-only parameters are its knobs, at what level it works, and what it compares
a reward with. Everything that makes a group degenerate is decided once, in `estimate`: members that do not count are
not shown to any row, and a group that cannot teach has advantage 0, whatever the row says.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl.algo.baseline import ROLES, Baselines, moving_baseline
from jaxrl.algo.knobs import knobs_of as keyword_only
from jaxrl.algo.members import (
    Members,
    centred,
    concatenated,
    informative,
    lengths,
    members,
    metric,
    standardised,
    turn_lengths,
    turn_rewards,
    weighted_deviations,
)
from jaxrl.algo.returns import (
    EPISODE_ROWS,
    NO_PEERS,
    PEERS,
    STATES,
    gae,
    gigpo,
    gigpo_signals,
    gigpo_std,
    returns_of,
    turn_return_signals,
    turn_returns,
)
from jaxrl.types import StopReason, TrajectoryGroup

Advantage = float | tuple[float, ...]
"""Of an episode, or of each of its turns."""

Knob = int | float | str

Values = Sequence[Sequence[Sequence[float]]]
"""One number for each turn of each member of each group."""

# --- from the rewards of one group ---------------------------------------------------------------


def mean(rewards: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = R_i - mean(R) (Liu et al. 2025, arXiv 2503.20783: no division, so no bias towards easy or hard tasks)."""
    return rewards - rewards.mean()


def mean_std(rewards: Float[np.ndarray, " G"], *, ddof: float = 1.0, epsilon: float = 1e-6) -> Float[np.ndarray, " G"]:
    """A_i = (R_i - mean(R)) / (std(R) + epsilon) (Shao et al. 2024, arXiv 2402.03300).

    The paper does not say which standard deviation. Ours is the sample's (ddof=1) with 1e-6, as in verl, SkyRL, slime
    and tunix; TRL adds 1e-4, understand-r1-zero 1e-8, OpenRLHF 1e-9. ddof=0, which numpy and JAX take by default,
    makes advantages larger by sqrt(G / (G - 1)). verl and SkyRL give a group of one its raw reward; here it has 0.
    """
    return mean(rewards) / (rewards.std(ddof=ddof) + epsilon)


def leave_one_out(rewards: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = R_i - mean of the others (Ahmadian et al. 2024, arXiv 2402.14740)."""
    return mean(rewards) * (len(rewards) / (len(rewards) - 1))


def leave_one_out_std(
    rewards: Float[np.ndarray, " G"], *, ddof: float = 1.0, epsilon: float = 1e-6
) -> Float[np.ndarray, " G"]:
    """A_i = (R_i - mean of the others) / (std of the others + epsilon), the default of NeMo-RL.

    A member whose others all agree keeps its advantage undivided: the one success of four gets 1, while the failures
    beside it are scaled up. That is the published behaviour, and not the estimator of the GRPO paper.
    """
    advantages = leave_one_out(rewards)
    for i in range(len(rewards)):
        others = np.delete(rewards, i)
        if informative(others):
            advantages[i] /= others.std(ddof=ddof) + epsilon
    return advantages


def maxrl(rewards: Float[np.ndarray, " G"], *, epsilon: float = 0.0) -> Float[np.ndarray, " G"]:
    """A_i = (R_i - mean(R)) / (mean(R) + epsilon): the gradient of a truncated log-likelihood, arXiv 2602.02710.

    For rewards of 0 and more. A group whose mean is not positive has none, as in prime-rl; SkyRL has epsilon=1e-6.
    """
    average = rewards.mean()
    return mean(rewards) / (average + epsilon) if average > 0 else np.zeros(len(rewards))


def pass_at_k(rewards: Float[np.ndarray, " G"], *, k: float = 4.0, threshold: float = 0.0) -> Float[np.ndarray, " G"]:
    """The closed form of pass@k training (Chen et al. 2025, arXiv 2508.10751): a reward above `threshold` is a success.

    Every k of the members are a group that passes when one of them does; a member's advantage is the mean of the
    standardised scores of the groups it is in. 0 when all of them pass. Of fewer than k members, all are the group.
    """
    size, failed = len(rewards), int((rewards <= threshold).sum())
    k = min(int(k), size)
    passing = 1 - math.comb(failed, k) / math.comb(size, k)
    spread = math.sqrt(passing * (1 - passing))
    if spread == 0:
        return np.zeros(size)
    with_a_failure = 1 - math.comb(failed - 1, k - 1) / math.comb(size - 1, k - 1)
    return np.where(rewards > threshold, 1 - passing, with_a_failure - passing) / spread


def best_minus_second(
    rewards: Float[np.ndarray, " G"], *, ddof: float = 1.0, epsilon: float = 1e-6
) -> Float[np.ndarray, " G"]:
    """Only the best member gets an advantage, (best - second) / (std(R) + epsilon): arXiv 2503.19595.

    verl calls it pass@k. The sum over a group is not 0.
    """
    order = np.argsort(rewards)
    advantages = np.zeros(len(rewards))
    advantages[order[-1]] = (rewards[order[-1]] - rewards[order[-2]]) / (rewards.std(ddof=ddof) + epsilon)
    return advantages


def reward(rewards: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = R_i: no baseline, for rewards that are compared already, such as those of a zero-sum game."""
    return rewards


def zero(rewards: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = 0: what is learned comes from elsewhere, such as a teacher's log-probs (`jaxrl.algo.kl`)."""
    return np.zeros(len(rewards))


# --- from one group and its lengths ---------------------------------------------------------------


def opo(members: Members) -> Float[np.ndarray, " G"]:
    """A_i = R_i - sum(L R) / sum(L), with L the trained tokens (Hao et al. 2025, arXiv 2505.23585)."""
    tokens_G = lengths(members)
    return members.rewards_G - np.average(members.rewards_G, weights=tokens_G if tokens_G.any() else None)


# --- from the whole batch ------------------------------------------------------------------------


def batch_std(members_P: Sequence[Members], *, ddof: float = 1.0, epsilon: float = 1e-4) -> list[np.ndarray]:
    """A_i = (R_i - mean of its group) / (std of all rewards of the batch + epsilon) (Lite PPO, arXiv 2508.08221).

    The standard deviation is of the raw rewards of every member that counts, those of constant groups included, and
    the constants are TRL's (`scale_rewards="batch"`).
    """
    spread = concatenated([m.rewards_G for m in members_P]).std(ddof=ddof) + epsilon
    return [centred(m.rewards_G) / spread for m in members_P]


def reinforce_pp(
    members_P: Sequence[Members], *, gamma: float = 1.0, ddof: float = 1.0, epsilon: float = 1e-8
) -> list[list[np.ndarray]]:
    """The return from a turn on, whitened over the batch: REINFORCE++ (Hu 2025, arXiv 2501.03262).

    A = (G - mean) / sqrt(var + epsilon). Mean and variance run over the trained tokens of every member that counts,
    constant groups and groups of one included, so long answers outvote short ones. Ours is verl's (ddof=1); OpenRLHF
    takes ddof=0 and no epsilon but a floor, which no batch that can teach reaches: ddof=0, epsilon=0.
    """
    returns = [r for m in members_P for r in returns_of(m, gamma)]
    tokens = [n for m in members_P for n in turn_lengths(m)]
    deviations, variance = weighted_deviations(returns, tokens, ddof)
    return _by_group([d / math.sqrt(variance + epsilon) for d in deviations], members_P)


def reinforce_pp_baseline(
    members_P: Sequence[Members], *, ddof: float = 1.0, epsilon: float = 1e-8
) -> list[np.ndarray]:
    """R less the mean of its group, whitened as in `reinforce_pp` (REINFORCE++-baseline of the same paper)."""
    centred_P, tokens_P = [centred(m.rewards_G) for m in members_P], [lengths(m) for m in members_P]
    deviations, variance = weighted_deviations(centred_P, tokens_P, ddof)
    return [d / math.sqrt(variance + epsilon) for d in deviations]


def gpg(members_P: Sequence[Members], *, alpha: str = "constant_groups") -> list[np.ndarray]:
    """alpha (R_i - mean of its group) (Chu et al. 2025, arXiv 2504.02546, F_norm = 1).

    alpha makes up for what has no gradient. "constant_groups" is the paper's B / (B - M), where M of the B members
    of the batch are in groups of one reward; "nonzero_rewards" is verl's B / (number of rewards that are not 0),
    another quantity.
    """
    scale = _ALPHAS[alpha](members_P)
    return [scale * centred(m.rewards_G) for m in members_P]


def _members_per_gradient(members_P: Sequence[Members]) -> float:
    return sum(map(len, members_P)) / sum(len(m) for m in members_P if informative(m.rewards_G))


def _members_per_reward(members_P: Sequence[Members]) -> float:
    return sum(map(len, members_P)) / int(np.count_nonzero(concatenated([m.rewards_G for m in members_P])))


_ALPHAS: dict[str, Callable[[Sequence[Members]], float]] = {
    "constant_groups": _members_per_gradient,
    "nonzero_rewards": _members_per_reward,
}


def gdpo(
    members_P: Sequence[Members], *, rewards: str = "", ddof: float = 1.0, epsilon: float = 1e-4, over: str = "episodes"
) -> list[np.ndarray]:
    """Several rewards: each standardised in its group, summed by weight, and the sum standardised over the batch.

    (arXiv 2601.05242.) Summing first would give different mixtures of rewards with equal sums one advantage.
    rewards: metrics and their weights, as in "correct:1,format:0.5" (1 where none is given). A member's reward is the
    metric's sum over its turns, conclusion and group reward, and 0 if it did not get as far as reporting it, which
    is how metrics are logged. The total reward is not read. Raises ValueError for a metric that no member reports.
    over: the batch's statistics run over "episodes" (TRL) or their trained "tokens" (verl), constant groups included.
    """
    sums = [
        sum(
            (w * standardised(column, ddof=ddof, epsilon=epsilon) for w, column in _columns(m, rewards)),
            np.zeros(len(m)),
        )
        for m in members_P
    ]
    deviations, variance = weighted_deviations(sums, [_WEIGHTS[over](m) for m in members_P], ddof)
    return [d / (math.sqrt(variance) + epsilon) for d in deviations]


_WEIGHTS: dict[str, Callable[[Members], np.ndarray]] = {
    "episodes": lambda members: np.ones(len(members)),
    "tokens": lengths,
}


def _weighted(rewards: str) -> dict[str, float]:
    """Names and weights out of "name:weight,name"."""
    parts = [part.rpartition(":") if ":" in part else (part, "", "1") for part in rewards.split(",")]
    return {name.strip(): float(weight) for name, _, weight in parts}


def _columns(members: Members, rewards: str) -> list[tuple[float, np.ndarray]]:
    """Each reward of the members, with its weight."""
    return [
        (weight, np.array([value or 0.0 for value in metric(members, name)], np.float64))
        for name, weight in _weighted(rewards).items()
    ]


def _check_reported(members_P: Sequence[Members], names: Iterable[str]) -> None:
    """Raise when a metric is in no episode, though some ended by themselves; or is not finite in one."""
    ended = sum(t.stop_reason is StopReason.TERMINATED for m in members_P for t in m.trajectories_G)
    for name in names:
        reported = [value for m in members_P for value in metric(m, name) if value is not None]
        if ended and not reported:
            known = {k for m in members_P for e in m.metrics_G for k in e}
            known |= {k for m in members_P for t in m.trajectories_G for turn in t.transitions for k in turn.metrics}
            raise ValueError(
                f"rewards names {name!r}, but of {ended} episodes that ended by themselves none reports a metric of "
                f"that name; reported are: {', '.join(sorted(known)) or 'none'}"
            )
        if not np.isfinite(reported).all():
            raise ValueError(f"metric {name!r}, which is a reward, has a value that is not finite: {reported}")


# --- from a critic's values ----------------------------------------------------------------------


def critic(
    members: Members, values_G: Sequence[Sequence[float]], *, gamma: float = 1.0, lam: float = 0.95
) -> list[np.ndarray]:
    """`gae` over turns, as in Turn-PPO (arXiv 2512.17008): a turn's temporal differences from here to the end.

    values_G: what a critic says of the context of each turn of each of these members. The turn is the step: gamma and
    lam discount by turns, observations are in no recursion, and after the last turn the value is 0. What the values
    should have been is the advantages + values. Raises ValueError for more or fewer values than turns.
    """
    advantages_G = []
    for seat, rewards, given in zip(members.seats_G, turn_rewards(members), values_G, strict=True):
        if len(given) != len(rewards):
            raise ValueError(f"member {seat} has {len(rewards)} turns, and {len(given)} values were given for them")
        advantages_G.append(gae(rewards, np.array(given, np.float64), gamma=gamma, lam=lam))
    return advantages_G


@dataclass(frozen=True)
class CriticFit:
    """How a critic learns from a batch: so many updates of Adam, on all of its turns at once."""

    learning_rate: float
    epochs: int


def critic_fit(*, critic_learning_rate: float = 0.03, critic_epochs: float = 16.0) -> CriticFit:
    """critic_learning_rate: about how far an update moves a value, in reward. critic_epochs: updates a step."""
    return CriticFit(critic_learning_rate, int(critic_epochs))


def _by_group(values: Sequence[np.ndarray], members_P: Sequence[Members]) -> list[list[np.ndarray]]:
    """What was in one row for all members of the batch, by group."""
    rest = iter(values)
    return [[next(rest) for _ in m.seats_G] for m in members_P]


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """What an estimator may be told beside the rewards of a batch.

    baselines: what the running means came to before it. values_P_G: what a critic says of each turn.
    """

    baselines: Baselines
    values_P_G: Values | None = None


Estimates = tuple[Sequence[Any], Baselines]
"""Of each group, those of its members, and the running means after the batch."""


def _of_rewards(function: Callable[..., Any]) -> Callable[..., Estimates]:
    """A row that sees the rewards of one group that can teach."""
    return _of_group(lambda m, **knobs: function(m.rewards_G, **knobs))


def _of_group(function: Callable[..., Any]) -> Callable[..., Estimates]:
    """A row that sees one group that can teach."""

    def apply(members_P: Sequence[Members], teaches_P: Sequence[bool], beside: Beside, **knobs: Knob) -> Estimates:
        return [
            function(m, **knobs) if teaches else None for m, teaches in zip(members_P, teaches_P, strict=True)
        ], beside.baselines

    return apply


def _of_batch(function: Callable[..., Any]) -> Callable[..., Estimates]:
    """A row that sees the whole batch, groups that cannot teach included, for its statistics."""
    return lambda members_P, teaches_P, beside, **knobs: (function(members_P, **knobs), beside.baselines)


def _of_baselines(function: Callable[..., Any]) -> Callable[..., Estimates]:
    """A row that also sees what it came to before."""
    return lambda members_P, teaches_P, beside, **knobs: function(members_P, beside.baselines, **knobs)


def _of_values(function: Callable[..., Any]) -> Callable[..., Estimates]:
    """A row that also sees what a critic says of the turns of a group."""

    def apply(members_P: Sequence[Members], teaches_P: Sequence[bool], beside: Beside, **knobs: Knob) -> Estimates:
        if beside.values_P_G is None:
            raise ValueError("this advantage is over a critic's values: give values_P_G, one for each turn")
        return [
            function(m, [values_G[seat] for seat in m.seats_G], **knobs)
            for m, values_G in zip(members_P, beside.values_P_G, strict=True)
        ], beside.baselines

    return apply


def _totals(members_P: Sequence[Members], **_: Knob) -> list[list[np.ndarray]]:
    return [[m.rewards_G] for m in members_P]


def _returns(members_P: Sequence[Members], *, gamma: float, **_: Knob) -> list[list[np.ndarray]]:
    return [returns_of(m, gamma) for m in members_P]


def _rewards_of_gdpo(members_P: Sequence[Members], *, rewards: str, **_: Knob) -> list[list[np.ndarray]]:
    _check_reported(members_P, _weighted(rewards))
    return [[column for _, column in _columns(m, rewards)] for m in members_P]


def _of_turns(signals: Callable[..., list[np.ndarray]]) -> Callable[..., list[list[np.ndarray]]]:
    return lambda members_P, **knobs: [signals(m, **knobs) for m in members_P]


@dataclass(frozen=True)
class Estimator:
    """One row.

    function: its keyword-only parameters are the knobs. lift: what it is shown. baseline: what a reward is compared
    with: the rest of its "group", the "batch", or something "outside" of both (so that every member teaches). per_turn:
    advantages are of turns. signals: the values that have to differ in the baseline for anything to be taught. fit: how
    the critic learns whose values the function is shown, where it is; its keyword-only parameters are knobs.
    """

    function: Callable[..., Any]
    lift: Callable[[Callable[..., Any]], Callable[..., Estimates]]
    baseline: str = "group"
    per_turn: bool = False
    signals: Callable[..., list[list[np.ndarray]]] = _totals
    fit: Callable[..., CriticFit] | None = None

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Those whose keyword-only parameters are the knobs of the row."""
        return (self.function,) if self.fit is None else (self.function, self.fit)


ADVANTAGES: dict[str, Estimator] = {
    "mean": Estimator(mean, _of_rewards),
    "mean_std": Estimator(mean_std, _of_rewards),
    "leave_one_out": Estimator(leave_one_out, _of_rewards),
    "leave_one_out_std": Estimator(leave_one_out_std, _of_rewards),
    "maxrl": Estimator(maxrl, _of_rewards),
    "pass_at_k": Estimator(pass_at_k, _of_rewards),
    "best_minus_second": Estimator(best_minus_second, _of_rewards),
    "reward": Estimator(reward, _of_rewards, "outside"),
    "zero": Estimator(zero, _of_rewards, "outside"),
    "opo": Estimator(opo, _of_group),
    "batch_std": Estimator(batch_std, _of_batch),
    "gpg": Estimator(gpg, _of_batch),
    "gdpo": Estimator(gdpo, _of_batch, signals=_rewards_of_gdpo),
    "reinforce_pp": Estimator(reinforce_pp, _of_batch, "batch", per_turn=True, signals=_returns),
    "reinforce_pp_baseline": Estimator(reinforce_pp_baseline, _of_batch),
    "moving_baseline": Estimator(moving_baseline, _of_baselines, "outside"),
    "turn_returns": Estimator(turn_returns, _of_group, per_turn=True, signals=_of_turns(turn_return_signals)),
    "gigpo": Estimator(gigpo, _of_group, per_turn=True, signals=_of_turns(gigpo_signals)),
    "gigpo_std": Estimator(gigpo_std, _of_group, per_turn=True, signals=_of_turns(gigpo_signals)),
    "critic": Estimator(critic, _of_values, "outside", per_turn=True, fit=critic_fit),
}


Signals = Sequence[Sequence[np.ndarray]]
"""Of each group of a batch, the arrays of values that have to differ."""


def _in_group(members_P: Sequence[Members], signals_P: Signals) -> list[bool]:
    return [any(map(informative, signals)) for signals in signals_P]


def _in_batch(members_P: Sequence[Members], signals_P: Signals) -> list[bool]:
    differs = informative(concatenated([values for signals in signals_P for values in signals]))
    return [differs and len(m) > 0 for m in members_P]


def _outside(members_P: Sequence[Members], signals_P: Signals) -> list[bool]:
    return [len(m) > 0 for m in members_P]


_TEACHES: dict[str, Callable[[Sequence[Members], Signals], list[bool]]] = {
    "group": _in_group,
    "batch": _in_batch,
    "outside": _outside,
}
"""Which groups can teach, by where the baseline lies."""


# --- knobs ---------------------------------------------------------------------------------------


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _names_rewards(value: Any) -> bool:
    try:
        weights = _weighted(value) if isinstance(value, str) else {}
    except ValueError:  # a weight that is no number
        return False
    return all(weights) and all(map(math.isfinite, weights.values())) and len(weights) == len(str(value).split(","))


def _one_of(*names: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in names, "one of " + ", ".join(names)


_FRACTION: tuple[Callable[[Any], bool], str] = (lambda x: _number(x) and 0 <= x <= 1, "a number from 0 to 1")
_SIZE: tuple[Callable[[Any], bool], str] = (lambda x: _number(x) and x >= 0, "a number of 0 or more")
_WHOLE: tuple[Callable[[Any], bool], str] = (
    lambda x: _number(x) and x >= 1 and x == int(x),
    "a whole number of 1 or more",
)
_FINITE: tuple[Callable[[Any], bool], str] = (_number, "a finite number")

SENSIBLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ddof": (lambda x: _number(x) and x in (0, 1), "0 (population) or 1 (sample)"),
    "epsilon": _SIZE,
    "k": _WHOLE,
    "threshold": _FINITE,
    "gamma": _FRACTION,
    "lam": _FRACTION,
    "critic_learning_rate": (lambda x: _number(x) and x > 0, "a number above 0"),
    "critic_epochs": _WHOLE,
    "omega": _SIZE,
    "decay": (lambda x: _number(x) and 0 <= x < 1, "a number from 0 to below 1"),
    "initial": _FINITE,
    "role": _one_of(*ROLES),
    "peers": _one_of(*PEERS, NO_PEERS),
    "state": _one_of(*STATES),
    "episode_baseline": _one_of(*EPISODE_ROWS),
    "alpha": _one_of(*_ALPHAS),
    "over": _one_of(*_WEIGHTS),
    "rewards": (_names_rewards, 'names of metrics with weights, such as "correct:1,format:0.5"'),
}
"""For each knob, whatever row it is of: which values make sense, and how to say so."""


def knobs_of(method: str) -> dict[str, Knob]:
    """The knobs of a row with their defaults. Raises ValueError for a method that does not exist."""
    if method not in ADVANTAGES:
        close = difflib.get_close_matches(method, ADVANTAGES) or list(ADVANTAGES)
        raise ValueError(f"advantage method {method!r} does not exist; did you mean {', '.join(close)}?")
    return keyword_only(*ADVANTAGES[method].functions)


def check_advantage(method: str, knobs: Mapping[str, Any] | None = None) -> dict[str, Knob]:
    """All knobs of a row, given or by default. Raises ValueError for what is unknown or makes no sense."""
    knobs, defaults = knobs or {}, knobs_of(method)
    for name in knobs:
        if name not in defaults:
            raise ValueError(_unknown_knob(method, name, defaults))
    complete = {**defaults, **knobs}
    for name, value in complete.items():
        sensible, expected = SENSIBLE[name]
        if not sensible(value):
            raise ValueError(f"{name}={value!r} of advantage method {method!r}: expected {expected}")
    return {name: value if isinstance(value, str) else float(value) for name, value in complete.items()}


def _unknown_knob(method: str, name: str, defaults: Mapping[str, Knob]) -> str:
    has = f"its knobs are {', '.join(defaults)}" if defaults else "it has none"
    owners = [other for other in ADVANTAGES if name in knobs_of(other)]
    if owners:
        return f"knob {name!r} has no effect on advantage method {method!r} ({has}); it belongs to {', '.join(owners)}"
    close = difflib.get_close_matches(name, defaults or SENSIBLE, cutoff=0.4)
    near = f"; the nearest names are {', '.join(close)}" if close else ""
    return f"advantage method {method!r} has no knob {name!r} ({has}){near}"


def reads_batch(method: str) -> bool:
    """Whether a row's numbers depend on other groups of the batch, so that it cannot be computed part by part."""
    knobs_of(method)
    return ADVANTAGES[method].lift is _of_batch


def reads_values(method: str) -> bool:
    """Whether a row is over the values of a critic, which has to be asked first and taught afterwards."""
    knobs_of(method)
    return ADVANTAGES[method].fit is not None


def needs_peers(method: str) -> bool:
    """Whether a row compares a member with others of its group, so that a group of one teaches nothing."""
    knobs_of(method)
    return ADVANTAGES[method].baseline == "group"


def critic_fit_of(method: str, knobs: Mapping[str, Any] | None = None) -> CriticFit | None:
    """How the critic of a row learns under these knobs; None for a row without one."""
    complete, fit = check_advantage(method, knobs), ADVANTAGES[method].fit
    return None if fit is None else fit(**{name: complete[name] for name in keyword_only(fit)})


# --- batches -------------------------------------------------------------------------------------


def teaches(groups_P: Sequence[TrajectoryGroup], method: str = "mean", **knobs: Knob) -> list[bool]:
    """Which groups can teach anything under `method`, as parts of this batch.

    Where a reward is compared with its group, that takes two members that count, whose rewards differ; where with the
    batch, a batch in which two of them do; where with neither, one member that counts.
    """
    complete = check_advantage(method, knobs)
    return _teaching(list(map(members, groups_P)), ADVANTAGES[method], complete)


def _teaching(members_P: Sequence[Members], row: Estimator, knobs: Mapping[str, Knob]) -> list[bool]:
    return _TEACHES[row.baseline](members_P, row.signals(members_P, **knobs))


def compute_advantages(
    groups_P: Sequence[TrajectoryGroup],
    method: str,
    *,
    baselines: Baselines | None = None,
    values_P_G: Values | None = None,
    **knobs: Knob,
) -> list[list[Advantage]]:
    """advantages_P_G: of each member of each group a number, or with a row of turns a tuple of one a turn.

    All zero for a member that does not count, and for a group that teaches nothing. `groups_P` is the whole batch,
    constant groups included: some rows read statistics of it. baselines: what `next_baselines` came to. values_P_G: of
    a critic, for a row that is over them; those of members that do not count are not read.
    """
    return estimate(groups_P, method, Beside(baselines or {}, values_P_G), **knobs)[0]


def next_baselines(
    groups_P: Sequence[TrajectoryGroup], method: str, baselines: Baselines | None = None, **knobs: Knob
) -> dict[str, float]:
    """What `compute_advantages` is to be given for the batch after this one. JSON-able; unchanged for most rows."""
    check_advantage(method, knobs)
    if ADVANTAGES[method].lift is not _of_baselines:
        return dict(baselines or {})
    return estimate(groups_P, method, Beside(baselines or {}), **knobs)[1]


def estimate(
    groups_P: Sequence[TrajectoryGroup], method: str, beside: Beside, **knobs: Knob
) -> tuple[list[list[Advantage]], dict[str, float]]:
    """`compute_advantages` and `next_baselines`. Raises ValueError as `check_advantage` does, and for bad rewards."""
    complete = check_advantage(method, knobs)
    row, members_P = ADVANTAGES[method], list(map(members, groups_P))
    teaches_P = _teaching(members_P, row, complete)
    if not any(teaches_P):
        return [_placed(group, None, None, row.per_turn) for group in groups_P], dict(beside.baselines)
    read = {name: complete[name] for name in keyword_only(row.function)}
    estimated_P, after = row.lift(row.function)(members_P, teaches_P, beside, **read)
    advantages_P_G = [
        _placed(group, m, estimated if useful else None, row.per_turn)
        for group, m, estimated, useful in zip(groups_P, members_P, estimated_P, teaches_P, strict=True)
    ]
    return advantages_P_G, dict(after)


def _placed(
    group: TrajectoryGroup, counted: Members | None, estimated: Iterable[Any] | None, per_turn: bool
) -> list[Advantage]:
    """Estimates in the places of the members they are of, and zeros in the others."""
    placed: list[Advantage] = [(0.0,) * len(t.transitions) if per_turn else 0.0 for t in group.trajectories_G]
    if counted is not None and estimated is not None:
        for seat, advantage in zip(counted.seats_G, estimated, strict=True):
            placed[seat] = tuple(advantage.tolist()) if per_turn else float(advantage)
    return placed
