"""Metrics of a batch, by numbers worked out by hand."""

from collections.abc import Mapping, Sequence

import pytest

from jaxrl.runtime.measure import rollout_metrics
from jaxrl.types import Sample, StopReason, Trajectory, TrajectoryGroup, Transition


def turn(shown: int, said: int, metrics: Mapping[str, float] | None = None, held: int = 0) -> Transition:
    """A turn whose context holds `held` tokens from before and `shown` new ones."""
    action = Sample((1,) * said, (-1.0,) * said, (0,) * said, "stop")
    return Transition((0,) * (held + shown), action, 0.0, False, metrics=metrics or {})


def episode(*turns: Transition, stop: StopReason = StopReason.TERMINATED) -> Trajectory:
    return Trajectory(turns, stop)


def group(rewards: Sequence[float], *episodes: Trajectory, tags: tuple[str, ...] = (), metrics=None) -> TrajectoryGroup:
    each = metrics or [{}] * len(rewards)
    return TrajectoryGroup(episodes or tuple(episode(turn(1, 1)) for _ in rewards), tuple(rewards), tuple(each), tags)


TWO = [
    group(
        (1.0, 0.0),
        episode(turn(10, 3, {"hit": 1.0}), turn(2, 5, {"hit": 1.0, "late": 4.0}, held=13)),
        episode(turn(10, 4, {"hit": 0.0}), stop=StopReason.PARSE_FAILURE),
        tags=("easy",),
        metrics=[{"bonus": 0.5}, {"bonus": 0.25}],
    ),
    group(
        (0.5, 0.5),
        episode(turn(6, 2), stop=StopReason.MAX_TOKENS),
        episode(stop=StopReason.CONTEXT_OVERFLOW),
        tags=("easy", "hard"),
    ),
]


def test_a_batch_by_hand() -> None:
    m = rollout_metrics(TWO)
    expected = {
        "reward/total": 0.5,
        "total_episodes": 4,
        "total_turns": 4,
        "turns_per_episode": 1.0,
        "total_ac_tokens": 14,
        "ac_tokens_per_turn": 3.5,
        "ob_tokens_per_turn": (10 + 2 + 10 + 6) / 4,
        "hit": (2.0 + 0.0 + 0 + 0) / 4,  # turns of an episode add up; one that reports nothing counts as 0
        "late": 1.0,
        "bonus": 0.75 / 4,
        "by_group/frac_mixed": 0.5,
        "by_group/frac_all_good": 0.0,
        "by_group/frac_all_bad": 0.5,
    }
    assert {name.removeprefix("env/all/"): v for name, v in m.items() if name.startswith("env/all/")} == pytest.approx(
        expected
    )
    assert m["env/easy/reward/total"] == 0.5
    assert (m["env/hard/reward/total"], m["env/hard/total_turns"]) == (0.5, 1)


def called(tool: str, calls: float, errors: float, timeouts: float, seconds: float) -> dict[str, float]:
    numbers = {"calls": calls, "errors": errors, "timeouts": timeouts, "seconds": seconds}
    return {f"tool/{tool}/{what}": value for what, value in numbers.items()}


def test_what_a_call_came_to_is_a_quotient_of_sums_not_a_mean_of_means() -> None:
    busy = episode(turn(1, 1, called("look", 6, 0, 0, 3.0)), turn(1, 1, called("look", 2, 1, 1, 60.0)))
    idle, other = episode(turn(1, 1)), episode(turn(1, 1, called("look", 1, 1, 0, 0.5) | called("a/b", 0, 0, 0, 0.0)))
    lost = episode(turn(1, 1, called("look", 99, 99, 99, 99.0)), stop=StopReason.TOOL_ERROR)
    m = rollout_metrics([group((0.0,) * 4, busy, idle, other, lost)])
    assert {name.removeprefix("env/all/tool/"): v for name, v in m.items() if "/tool/" in name} == pytest.approx(
        {
            "look/calls": 9 / 3,
            "look/errors": 2 / 3,
            "look/timeouts": 1 / 3,
            "look/seconds": 63.5 / 3,
            "look/error_rate": 2 / 9,
            "look/timeout_rate": 1 / 9,
            "look/seconds_per_call": 63.5 / 9,
            **{f"a/b/{what}": 0.0 for what in ("calls", "errors", "timeouts", "seconds")},
        }
    )


def test_endings_sum_to_one_and_make_the_ratios() -> None:
    m = rollout_metrics(TWO)
    stops = {name: v for name, v in m.items() if name.startswith("rollout/stop/")}
    assert set(stops) == {f"rollout/stop/{reason.value}" for reason in StopReason}
    assert sum(stops.values()) == pytest.approx(1.0)
    assert {n: v for n, v in stops.items() if v} == {
        f"rollout/stop/{r}": 0.25 for r in ("terminated", "parse_failure", "max_tokens", "context_overflow")
    }
    assert (
        m["rollout/terminated_ratio"] == m["rollout/parse_failure_ratio"] == m["rollout/context_overflow_ratio"] == 0.25
    )
    assert m["rollout/truncated_ratio"] == 0.5


@pytest.mark.parametrize(
    ("rewards", "mixed", "good", "bad"),
    [
        ([(1, 1), (0, 1), (0, 0), (0.5, 0.5)], 0.25, 0.25, 0.5),
        ([(1, 1), (1, 1 - 1e-9)], 0.0, 1.0, 0.0),
        ([(0, 1)], 1.0, 0.0, 0.0),
        ([(0.3,), (0.7,)], 0.0, 0.5, 0.5),
    ],
)
def test_groups_that_agree(rewards: list, mixed: float, good: float, bad: float) -> None:
    m = rollout_metrics([group(r) for r in rewards])
    got = [m[f"env/all/by_group/frac_{name}"] for name in ("mixed", "all_good", "all_bad")]
    assert got == pytest.approx([mixed, good, bad])


def test_rewritten_history_counts_only_what_is_longer() -> None:
    rewritten = group((0.0,), episode(turn(10, 5), turn(4, 1)))
    assert rollout_metrics([rewritten])["env/all/ob_tokens_per_turn"] == 5.0


def test_nothing_is_a_normal_case() -> None:
    assert rollout_metrics([]) == {}
    empty = TrajectoryGroup((), (), ())
    assert rollout_metrics([empty]) == {}
    assert rollout_metrics([empty, TWO[0]])["env/all/total_episodes"] == 2
    only_overflow = group((0.0,), episode(stop=StopReason.CONTEXT_OVERFLOW))
    assert rollout_metrics([only_overflow])["env/all/ac_tokens_per_turn"] == 0.0
