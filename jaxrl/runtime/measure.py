"""Numbers about groups of episodes: rewards, lengths, endings, whatever the envs measured. Pure.

Metric names are a public interface; `env/all/...` covers every group, `env/<tag>/...` those with the tag.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxrl.algo.members import informative
from jaxrl.types import ENDINGS, StopReason, TrajectoryGroup

GOOD = 0.5  # rewards lie between 0 and 1 by custom


def rollout_metrics(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """All metrics of a batch. An empty batch has none."""
    metrics = _env_metrics("env/all", groups_P)
    for tag in sorted({tag for group in groups_P for tag in group.tags}):
        metrics |= _env_metrics(f"env/{tag}", [g for g in groups_P if tag in g.tags])
    return metrics | _endings(groups_P) | error_metrics(groups_P)


def error_metrics(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Attempts that failed, by type and in all, retried ones included; groups a strategy gave up. Nothing if none."""
    kinds = Counter(error.kind for group in groups_P for error in group.errors)
    skipped = sum(not group.viable for group in groups_P)
    if not kinds and not skipped:
        return {}
    return {
        **{f"rollout_errors/{kind}": float(count) for kind, count in sorted(kinds.items())},
        "rollout_errors/total": float(kinds.total()),
        "rollout_errors/groups_skipped": float(skipped),
    }


def _env_metrics(prefix: str, groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    episodes = [t for g in groups_P for t in g.trajectories_G]
    if not episodes:
        return {}
    turns = [turn for t in episodes for turn in t.transitions]
    metrics = {
        **_rewards(groups_P),
        "total_episodes": float(len(episodes)),
        "total_turns": float(len(turns)),
        "turns_per_episode": len(turns) / len(episodes),
        "total_ac_tokens": float(sum(len(t.action.tokens) for t in turns)),
        "ac_tokens_per_turn": _mean(len(t.action.tokens) for t in turns),
        "ob_tokens_per_turn": _observed(groups_P) / max(len(turns), 1),
        **_measured(groups_P),
    }
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _rewards(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The mean reward; shares of groups whose rewards differ, and of those that agree on more than GOOD, or on less.

    Nothing where no member can be trusted: a fault is never a reward (I13).
    """
    rewards_P = [rewards for g in groups_P if (rewards := _trusted(g))]
    if not rewards_P:
        return {}
    spreads = [informative(np.array(rewards, np.float64)) for rewards in rewards_P]
    good = [not mixed and rewards[0] > GOOD for mixed, rewards in zip(spreads, rewards_P, strict=True)]
    return {
        "reward/total": _mean(r for rewards in rewards_P for r in rewards),
        "by_group/frac_mixed": _mean(spreads),
        "by_group/frac_all_good": _mean(good),
        "by_group/frac_all_bad": 1.0 - _mean(spreads) - _mean(good),
    }


def _trusted(group: TrajectoryGroup) -> list[float]:
    """The rewards of the members that count."""
    return [r for t, r in zip(group.trajectories_G, group.rewards_G, strict=True) if t.ending.in_baseline]


def _measured(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """What envs and group rewards reported, summed over an episode's turns, averaged over the episodes that count.

    An episode that did not get as far as reporting a number counts as 0: a success rate over the finished episodes
    only would flatter a policy whose other episodes were cut short. Faults are left out: they say nothing about it.
    """
    totals: dict[str, float] = defaultdict(float)
    episodes = 0
    for group in groups_P:
        for trajectory, extra in zip(group.trajectories_G, group.metrics_G, strict=True):
            if not trajectory.ending.in_baseline:
                continue
            episodes += 1
            concluded = trajectory.conclusion.metrics if trajectory.conclusion else {}
            for metrics in [*(t.metrics for t in trajectory.transitions), concluded, extra]:
                for name, value in metrics.items():
                    totals[name] += float(value)
    averages = {name: total / episodes for name, total in sorted(totals.items())}
    return averages | _tool_rates(averages)


_PER_CALL = {"errors": "error_rate", "timeouts": "timeout_rate", "seconds": "seconds_per_call"}


def _tool_rates(averages: Mapping[str, float]) -> dict[str, float]:
    """What a call of each tool came to, out of the sums of `jaxrl.tools.CallReport`: every call weighs the same."""
    rates: dict[str, float] = {}
    for name, calls in averages.items():
        tool, _, what = name.rpartition("/")
        if what == "calls" and tool.startswith("tool/") and calls:
            totals = {rate: f"{tool}/{total}" for total, rate in _PER_CALL.items()}
            rates |= {f"{tool}/{rate}": averages[total] / calls for rate, total in totals.items() if total in averages}
    return rates


def _observed(groups_P: Sequence[TrajectoryGroup]) -> int:
    """Tokens shown: the opening and what was new in each later observation."""
    total = 0
    for group in groups_P:
        for trajectory in group.trajectories_G:
            held = 0
            for turn in trajectory.transitions:
                total += max(len(turn.observation) - held, 0)
                held = len(turn.observation) + len(turn.action.tokens)
    return total


def _endings(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Fractions of all stop reasons, which sum to 1, and the cookbooks' ratios made from them."""
    reasons = [t.stop_reason for g in groups_P for t in g.trajectories_G]
    if not reasons:
        return {}
    share = {reason: reasons.count(reason) / len(reasons) for reason in StopReason}
    return {
        **{f"rollout/stop/{reason.value}": value for reason, value in share.items()},
        "rollout/terminated_ratio": share[StopReason.TERMINATED],
        "rollout/truncated_ratio": sum(share[reason] for reason in StopReason if _truncates(reason)),
        "rollout/context_overflow_ratio": share[StopReason.CONTEXT_OVERFLOW],
        "rollout/parse_failure_ratio": share[StopReason.PARSE_FAILURE],
    }


def _truncates(reason: StopReason) -> bool:
    """Whether the episode was going on when it was ended."""
    return ENDINGS[reason].overlong or reason in (StopReason.ENV, StopReason.TIMEOUT)


def _mean(values: Iterable[float]) -> float:
    listed = [float(v) for v in values]
    return sum(listed) / len(listed) if listed else 0.0
