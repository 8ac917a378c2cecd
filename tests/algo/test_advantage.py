"""Advantages: golden numbers, what a group that teaches nothing gets, who counts, and what each row promises."""

import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played import advantages_of, episode, flat, group, of_episodes, with_metrics

from jaxrl.algo.advantage import (
    ADVANTAGES,
    SENSIBLE,
    check_advantage,
    compute_advantages,
    critic_fit_of,
    knobs_of,
    needs_peers,
    next_baselines,
    reads_batch,
    reads_values,
    teaches,
)
from jaxrl.algo.data import trainable, trajectory_to_data
from jaxrl.algo.returns import gae_tokens
from jaxrl.types import Conclusion, StopReason, TrajectoryGroup

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "loss_golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["advantage_cases"]}
FAULTS = [reason for reason in StopReason if reason.value.endswith("_error")]

NEEDED: dict[str, dict[str, Any]] = {"gdpo": {"rewards": "solved"}}
"""Knobs without which a row refuses to work."""

GROUP_ROWS = [name for name, row in ADVANTAGES.items() if row.baseline == "group" and name != "gdpo"]
"""Rows that compare total rewards within a group."""

Case = dict[str, Any]


# --- golden numbers ------------------------------------------------------------------------------


def by_group(case: Case, lengths: Sequence[float] | None = None) -> list[TrajectoryGroup]:
    ids, rewards = np.array(case["group_ids"]), np.array(case["rewards"])
    tokens = np.array(lengths or [1] * len(ids), int)
    return [group(rewards[ids == i].tolist(), lengths=[(n,) for n in tokens[ids == i]]) for i in np.unique(ids)]


def of(method: str, **knobs: Any) -> Callable[[Case], tuple[Any, Any]]:
    """Ours and theirs, for a case of rewards and groups."""

    def compare(case: Case) -> tuple[Any, Any]:
        ours = advantages_of(by_group(case, case.get("lengths")), method, **knobs)
        return flat(ours), case["expected_advantages"]

    return compare


def by_token(**knobs: Any) -> Callable[[Case], tuple[Any, Any]]:
    """REINFORCE++: what each token of the datums gets, holes included."""

    def compare(case: Case) -> tuple[Any, Any]:
        turns = [[len(run) for run in "".join("x" if m else " " for m in row).split()] for row in case["mask"]]
        groups = [group([r], lengths=[n]) for r, n in zip(case["rewards"], turns, strict=True)]
        ours = []
        for g, (advantage,) in zip(groups, advantages_of(groups, "reinforce_pp", **knobs), strict=True):
            (datum,) = trajectory_to_data(g.trajectories_G[0], advantage, group=0, episode=0)
            ours += datum.advantages[datum.mask].tolist()
        theirs = [
            x
            for row, m in zip(case["expected_advantages"], case["mask"], strict=True)
            for x in np.array(row)[np.array(m) > 0]
        ]
        return ours, theirs

    return compare


def whitened(**knobs: Any) -> Callable[[Case], tuple[Any, Any]]:
    """REINFORCE++: the advantage of each turn, to the last digits."""

    def compare(case: Case) -> tuple[Any, Any]:
        groups = [group([r], lengths=[[int(sum(m))]]) for r, m in zip(case["rewards"], case["mask"], strict=True)]
        return flat(advantages_of(groups, "reinforce_pp", **knobs)), [row[0] for row in case["expected_advantages"]]

    return compare


def several_rewards(case: Case) -> tuple[Any, Any]:
    names, weights = ("first", "second"), case["params"]["reward_weights"]
    members = with_metrics(*(dict(zip(names, r, strict=True)) for r in case["rewards"]))
    spelled = ",".join(f"{name}:{weight}" for name, weight in zip(names, weights, strict=True))
    knobs = {"rewards": spelled, "epsilon": case["params"]["eps"]}
    return flat(advantages_of([members], "gdpo", **knobs)), case["expected_advantages"]


def constant(case: Case) -> tuple[Any, Any]:
    """Under every row that compares within a group."""
    ours = [flat(advantages_of(by_group(case), method)) for method in GROUP_ROWS]
    return np.array(ours), [case["expected_advantages"]] * len(GROUP_ROWS)


def alone(leaks: bool, *methods: str) -> Callable[[Case], tuple[Any, Any]]:
    """A group of one has no advantage here, whatever its raw reward, which some code bases let through."""

    def compare(case: Case) -> tuple[Any, Any]:
        assert case["expected_advantages"] == (case["rewards"] if leaks else [0.0])
        return [flat(advantages_of(by_group(case), method)) for method in methods], [[0.0]] * len(methods)

    return compare


def failed_member(case: Case) -> tuple[Any, Any]:
    reasons = [StopReason.TERMINATED if valid else StopReason.ENV_ERROR for valid in case["params"]["valid"]]
    return flat(advantages_of([group(case["rewards"], reasons)], "mean")), case["expected_advantages"]


def stepped(case: Case) -> TrajectoryGroup:
    numbers = {state: 10 + i for i, state in enumerate(sorted({s for e in case.get("anchor_states", ()) for s in e}))}
    states = [[numbers[s] for s in e] for e in case.get("anchor_states", [()] * len(case["step_rewards"]))]
    return of_episodes(*(episode([1] * len(r), r, s) for r, s in zip(case["step_rewards"], states, strict=True)))


def turns(expected: str, method: str, **knobs: Any) -> Callable[[Case], tuple[Any, Any]]:
    def compare(case: Case) -> tuple[Any, Any]:
        return flat(advantages_of([stepped(case)], method, **knobs)), flat([case[expected]])

    return compare


def over_turns(case: Case) -> tuple[Any, Any]:
    """Each turn of an episode has the same advantage: three turns of a success, two of a failure."""
    members = group(case["rewards"], lengths=[(1,) * 3, (1,) * 2])
    ((won, lost),) = advantages_of([members], "gigpo", omega=0.0, episode_baseline="turns")
    ((fair, _),) = advantages_of([members], "gigpo", omega=0.0)
    assert fair == (0.5,) * 3
    assert (len(set(won)), len(set(lost))) == (1, 1)
    return [won[0], lost[0]], case["expected_advantages"]


def hole(name: str) -> Callable[[Case], tuple[Any, Any]]:
    def compare(case: Case) -> tuple[Any, Any]:
        rewards, values = (np.array(case[key][0]) for key in ("token_rewards", "values"))
        mask = np.array(case["mask"][0]) > 0
        given = {"gamma": case["params"]["gamma"], "lam": case["params"]["lam"], "hole": name}
        return gae_tokens(rewards, values, mask, **given), case["expected_token_advantages"]

    return compare


def critic(case: Case) -> tuple[Any, Any]:
    members = of_episodes(episode([1, 1, 1], case["turn_rewards"]))
    advantages = advantages_of([members], "critic", values_P_G=[[case["turn_values"]]], **case["params"])
    return flat(advantages), case["expected_turn_advantages"]


COMPARISONS: dict[str, Callable[[Case], tuple[Any, Any]]] = {
    "mean_centred": of("mean"),
    "grpo/sample_std/eps=1e-06": of("mean_std"),
    "grpo/sample_std/eps=0.0001": of("mean_std", epsilon=1e-4),
    "grpo/sample_std/eps=1e-08": of("mean_std", epsilon=1e-8),
    "grpo/sample_std/eps=1e-09": of("mean_std", epsilon=1e-9),
    "grpo/population_std/eps=1e-6": of("mean_std", ddof=0),
    "rloo": of("leave_one_out"),
    "grpo/NeMo-RL_default(leave-one-out mean AND std)": of("leave_one_out_std"),
    "maxrl": of("maxrl"),
    "group_mean_batch_std(Lite PPO / ScaleRL-like)": of("batch_std"),
    "opo/length_weighted_baseline": of("opo"),
    "gpg(verl)/alpha=batch/nonzero_rewards": of("gpg", alpha="nonzero_rewards"),
    "pass@k(verl grpo_passk, best-minus-second)": of("best_minus_second"),
    "pass@k_training/analytic/k=2": of("pass_at_k", k=2),
    "reinforce++/verl_token_whiten(gamma=1)": whitened(),
    "reinforce++/OpenRLHF_token_whiten(gamma=1)": whitened(ddof=0, epsilon=0.0),
    "gdpo/TRL": several_rewards,
    "constant_group/all estimators": constant,
    "group_of_one/verl_grpo": alone(True, "mean_std"),
    "group_of_one/verl_rloo": alone(True, "leave_one_out"),
    "group_of_one/SkyRL_grpo": alone(True, "mean_std"),
    "group_of_one/verl_rloo_vectorized/tunix/TRL/NeMo/SkyRL_rloo": alone(False, "leave_one_out", "leave_one_out_std"),
    "group_of_one/mean_centred(tinker,prime-rl)": alone(False, "mean"),
    "missing_member/nan_excluded": failed_member,
    "turn/discounted_returns(gamma=0.9)": turns("expected_step_returns", "turn_returns", gamma=0.9, peers="none"),
    "turn/gigpo(mean_norm, omega=1, gamma=0.9)": turns("expected_step_advantages", "gigpo", gamma=0.9),
    "turn/gigpo_episode_baseline_verl_agent_default": over_turns,
    "gae/observation_hole/carry": hole("carry"),
    "gae/observation_hole/naive": hole("naive"),
    "gae/observation_hole/zeroed": hole("zeroed"),
    "turn/turn_level_gae": critic,
}


def test_every_golden_case_is_compared() -> None:
    assert sorted(COMPARISONS) == sorted(CASES)
    assert len(COMPARISONS) == 31


@pytest.mark.parametrize("name", COMPARISONS)
def test_golden(name: str) -> None:
    ours, theirs = COMPARISONS[name](CASES[name])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "knobs"), [("verl", {}), ("OpenRLHF", {"ddof": 0, "epsilon": 0.0})])
def test_golden_reinforce_pp_reaches_the_tokens_of_the_datums(name: str, knobs: dict[str, Any]) -> None:
    ours, theirs = by_token(**knobs)(CASES[f"reinforce++/{name}_token_whiten(gamma=1)"])
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


# --- numbers by hand, where there is no golden one ------------------------------------------------


def test_gpg_makes_up_for_groups_without_a_gradient() -> None:
    batch = [group([1.0, 0.0]), group([1.0, 1.0]), group([0.0, 0.0]), group([3.0])]
    assert advantages_of(batch, "gpg") == [
        [7 / 2 * 0.5, -7 / 2 * 0.5],
        [0, 0],
        [0, 0],
        [0],
    ]
    (first, *_) = advantages_of(batch, "gpg", alpha="nonzero_rewards")
    assert first == [7 / 4 * 0.5, -7 / 4 * 0.5]


def test_batch_std_is_of_every_reward_of_the_batch() -> None:
    batch = [group([1.0, 0.0]), group([4.0, 4.0])]
    spread = np.std([1, 0, 4, 4], ddof=1)
    assert advantages_of(batch, "batch_std", epsilon=0.0) == [[0.5 / spread, -0.5 / spread], [0.0, 0.0]]


def test_reinforce_pp_whitens_returns_from_each_turn_on_by_tokens() -> None:
    members = of_episodes(episode([3, 1], [1.0, 2.0]), episode([2], [0.0]))
    returns, tokens = np.array([3.0, 2.0, 0.0]), [3, 1, 2]
    each = np.repeat(returns, tokens)
    expected = (returns - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(flat(advantages_of([members], "reinforce_pp")), expected)


def test_reinforce_pp_baseline_is_the_group_mean_whitened_by_tokens() -> None:
    batch = [group([1.0, 0.0], lengths=[(3,), (1, 1)]), group([2.0, 2.0], lengths=[(4,), (4,)])]
    centred = np.repeat([0.5, -0.5, 0.0, 0.0], [3, 2, 4, 4])
    got = flat(advantages_of(batch, "reinforce_pp_baseline"))
    expected = (np.array([0.5, -0.5]) - centred.mean()) / np.sqrt(centred.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(got, [*expected, 0.0, 0.0])


@pytest.mark.parametrize("over", ["episodes", "tokens"])
def test_gdpo_tells_mixtures_of_equal_sums_apart(over: str) -> None:
    rows = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}]
    members = with_metrics(*rows, extra=[1.0, 1.0, 1.0])
    assert trainable([members]) == [False], "their totals agree"
    assert teaches([members], "gdpo", rewards="a,b:0.5") == [True]
    ((first, second, third),) = advantages_of([members], "gdpo", rewards="a,b:0.5", over=over)
    assert first > 0 > second == third


def test_gdpo_weighs_episodes_or_tokens() -> None:
    long, short = episode([9], metrics={"a": 1.0}), episode([1], metrics={"a": 0.0})
    members = of_episodes(long, short)
    (by_episode,) = advantages_of([members], "gdpo", rewards="a", epsilon=0.0)
    (by_tokens,) = advantages_of([members], "gdpo", rewards="a", epsilon=0.0, over="tokens")
    np.testing.assert_allclose(by_episode, [0.5**0.5, -(0.5**0.5)])
    each = np.repeat([0.5, -0.5], [9, 1]) * 2**0.5
    np.testing.assert_allclose(by_tokens, (np.array([0.5, -0.5]) * 2**0.5 - each.mean()) / each.std(ddof=1))


def test_gdpo_reads_metrics_as_they_are_logged() -> None:
    """Of turns, conclusion and group reward together; who did not get as far has 0."""
    cut = replace(episode([1, 1]), stop_reason=StopReason.MAX_TURNS)
    concluded = replace(cut, conclusion=Conclusion(metrics={"a": 2.0}))
    members = TrajectoryGroup((episode(metrics={"a": 1.0}), concluded, cut), (0.0,) * 3, ({"a": 3.0}, {}, {}))
    same = with_metrics({"a": 4.0}, {"a": 2.0}, {"a": 0.0})
    assert advantages_of([members], "gdpo", rewards="a") == advantages_of([same], "gdpo", rewards="a")


def test_a_reward_nobody_reports_is_an_error_and_one_that_was_not_reached_is_not() -> None:
    with pytest.raises(ValueError, match=r"rewards names 'format'.*of 2 episodes.*reported are: correct"):
        advantages_of([with_metrics({"correct": 1.0}, {"correct": 0.0})], "gdpo", rewards="correct,format")
    with pytest.raises(ValueError, match=r"metric 'a'.*not finite"):
        advantages_of([with_metrics({"a": 1.0}, {"a": float("inf")}, extra=[0.0, 0.0])], "gdpo", rewards="a")
    with pytest.raises(ValueError, match=r"rewards names 'correkt'"):
        trainable([with_metrics({"correct": 1.0}, {"correct": 0.0})], "gdpo", rewards="correkt")
    cut = [group([1.0, 0.0], [StopReason.MAX_TURNS] * 2)]
    assert advantages_of(cut, "gdpo", rewards="format") == [[0.0, 0.0]]


def test_pass_at_k_is_the_mean_over_all_groups_of_k() -> None:
    rewards, k = np.array([1.0, 0.0, 1.0, 0.0, 0.0, 0.0]), 3
    from_groups: list[list[float]] = [[] for _ in rewards]
    scores = []
    for bits in range(1 << len(rewards)):
        chosen = [i for i in range(len(rewards)) if bits >> i & 1]
        if len(chosen) == k:
            scores.append(float(rewards[chosen].max()))
            for i in chosen:
                from_groups[i].append(scores[-1])
    centre, spread = np.mean(scores), np.std(scores)
    expected = [(np.mean(s) - centre) / spread for s in from_groups]
    np.testing.assert_allclose(advantages_of([group(rewards.tolist())], "pass_at_k", k=k)[0], expected)


def test_pass_at_k_of_one_is_mean_over_the_population_std_of_successes() -> None:
    rewards = [0.4, -1.0, -0.5, -0.2]
    (ours,) = advantages_of([group(rewards)], "pass_at_k", k=1)
    (theirs,) = advantages_of([group([1.0, 0.0, 0.0, 0.0])], "mean_std", ddof=0, epsilon=0.0)
    np.testing.assert_allclose(ours, theirs)
    assert advantages_of([group([1.0, 0.0])], "pass_at_k", k=9) == [[0.0, 0.0]], "both are one group, and it passes"
    assert advantages_of([group(rewards)], "pass_at_k", threshold=0.5) == [[0.0] * 4], "nobody succeeds"


def test_maxrl_has_nothing_to_divide_by_without_a_success() -> None:
    assert advantages_of([group([1.0, -1.0]), group([0.5, -1.0])], "maxrl") == [[0.0, 0.0], [0.0, 0.0]]
    assert advantages_of([group([1.0, 0.0])], "maxrl", epsilon=0.5) == [[0.5, -0.5]]


def test_nemo_pairs_are_each_compared_with_the_other() -> None:
    assert advantages_of([group([1.0, 0.25])], "leave_one_out_std") == [[0.75, -0.75]]


def test_ties_have_no_best() -> None:
    assert advantages_of([group([1.0, 1.0, 0.0])], "best_minus_second") == [[0.0] * 3]


def test_opo_counts_trained_tokens_only_and_survives_without_any() -> None:
    masked = of_episodes(episode([3, 5], [0.0, 1.0], masked=[1]), episode([1], [0.0]))
    assert advantages_of([masked], "opo") == [[0.25, -0.75]]
    silent = of_episodes(episode([0], [1.0]), episode([0], [0.0]), episode([]))
    (got,) = advantages_of([silent], "opo")
    assert got == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_rewards_that_are_compared_already_stay() -> None:
    assert advantages_of([group([1.0, 1.0]), group([-1.0])], "reward") == [[1.0, 1.0], [-1.0]]


# --- a baseline that moves -----------------------------------------------------------------------


def test_each_seat_of_each_game_has_its_own_baseline() -> None:
    batch = [group([1.0, -1.0], tags=("chess",)), group([0.5, 0.0], tags=("go",)), group([1.0, 0.0], tags=("chess",))]
    assert advantages_of(batch, "moving_baseline") == [[1.0, -1.0], [0.5, 0.0], [1.0, 0.0]], "they start at 0"
    after = next_baselines(batch, "moving_baseline", decay=0.9)
    assert after == pytest.approx({"chess#0": 0.19, "chess#1": 0.19 * -0.5, "go#0": 0.05, "go#1": 0.0})
    assert json.loads(json.dumps(after)) == after
    got = advantages_of(batch, "moving_baseline", baselines=after)
    assert got[1] == pytest.approx([0.45, 0.0])
    assert next_baselines([], "moving_baseline", after) == after
    assert next_baselines(batch[1:2], "moving_baseline", after)["chess#0"] == after["chess#0"], "who did not play stays"


def test_everyone_in_the_games_of_a_tag_may_share_one() -> None:
    after = next_baselines([group([1.0, 0.0], tags=("a", "b"))], "moving_baseline", role="tags", decay=0.0)
    assert after == {"a/b": 0.5}


def test_a_constant_reward_is_its_own_baseline_from_the_start_on() -> None:
    batch = [group([2.0, 2.0])]
    assert advantages_of(batch, "moving_baseline", initial=2.0) == [[0.0, 0.0]]
    assert next_baselines(batch, "moving_baseline", initial=2.0) == {"#0": 2.0, "#1": 2.0}


def test_I13_a_failed_member_moves_no_baseline_and_keeps_the_seats() -> None:
    batch = [group([5.0, 1.0], [StopReason.ENV_ERROR, StopReason.TERMINATED])]
    assert advantages_of(batch, "moving_baseline") == [[0.0, 1.0]]
    assert list(next_baselines(batch, "moving_baseline")) == ["#1"]


@given(st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=2), min_size=1, max_size=6), st.randoms())
def test_I7_the_order_of_a_batch_moves_a_baseline_by_not_one_bit(rewards: list[list[float]], random: Any) -> None:
    batch = [group(r) for r in rewards]
    shuffled = random.sample(batch, len(batch))
    start = {"#0": 0.1, "#1": -0.3}
    assert next_baselines(batch, "moving_baseline", start) == next_baselines(shuffled, "moving_baseline", start)


@pytest.mark.parametrize("method", [name for name in ADVANTAGES if name != "moving_baseline"])
def test_rows_without_a_memory_leave_it_alone(method: str) -> None:
    batch = [with_metrics({"solved": 1.0}, {"solved": 0.0})]
    assert next_baselines(batch, method, {"x": 1.0}, **NEEDED.get(method, {})) == {"x": 1.0}


# --- what teaches nothing ------------------------------------------------------------------------


@pytest.mark.parametrize("method", GROUP_ROWS)
def test_golden_constant_group_and_group_of_one_are_exactly_zero(method: str) -> None:
    batch = [group([1.0, 1.0, 1.0]), group([0.7])]
    for groups in (batch, [*batch, group([1.0, 0.0])]):
        assert (flat(advantages_of(groups, method)[:2]) == 0).all()


@pytest.mark.parametrize("method", GROUP_ROWS)
def test_rounding_noise_is_no_signal(method: str) -> None:
    noisy = group([0.3, 0.1 + 0.2, 0.1 * 3])
    large = group([1e6, 1e6 + 1e-3, 1e6])
    batch = [noisy, large, group([0.0, 1.0])]
    assert (flat(advantages_of(batch, method)[:2]) == 0).all()
    assert trainable(batch, method) == [False, False, True]


def test_noise_in_one_of_several_rewards_is_no_signal() -> None:
    members = with_metrics({"a": 1.0, "b": 0.3}, {"a": 0.0, "b": 0.1 * 3})
    one, both = (advantages_of([members], "gdpo", rewards=r) for r in ("a", "a,b:1000"))
    assert one == both


def test_a_batch_of_one_reward_teaches_no_row_that_compares_within_it() -> None:
    batch = [group([1.0, 1.0]), group([1.0])]
    assert advantages_of(batch, "reinforce_pp") == [[(0.0,), (0.0,)], [(0.0,)]]
    assert trainable(batch, "reinforce_pp") == [False, False]
    assert trainable([*batch, group([0.0])], "reinforce_pp") == [True, True, True], "the baseline is the batch's"
    failed = group([1.0, 0.0], [StopReason.ENV_ERROR] * 2)
    assert trainable([group([1.0]), failed, group([]), group([0.0])], "reinforce_pp") == [True, False, False, True]
    assert trainable(batch, "reward") == [True, True]


def test_members_that_won_sooner_teach_the_rows_that_see_turns() -> None:
    won = of_episodes(episode([1, 1], [0.0, 1.0]), episode([1], [1.0]))
    assert trainable([won]) == [False]
    assert trainable([won], "gigpo") == [True]
    assert trainable([won], "gigpo", gamma=1.0) == [False]
    ((first, last), (only,)) = advantages_of([won], "gigpo", gamma=0.5)[0]
    assert (first, last, only) == (-0.25, 0.0, 0.25)


@pytest.mark.parametrize("method", ADVANTAGES)
def test_empty_batch_empty_group_and_all_failed(method: str) -> None:
    knobs = NEEDED.get(method, {})
    failed = group([1.0, 0.0], [StopReason.ENV_ERROR] * 2)
    assert advantages_of([], method, **knobs) == []
    assert advantages_of([group([])], method, **knobs) == [[]]
    got = advantages_of([failed, group([]), failed], method, **knobs)
    assert [len(a) for a in got] == [2, 0, 2]
    assert (flat(got) == 0).all()
    assert trainable([failed, group([])], method, **knobs) == [False, False]
    assert trainable([], method, **knobs) == []


@pytest.mark.parametrize("method", GROUP_ROWS)
def test_I13_one_survivor_is_zero(method: str) -> None:
    reasons = [StopReason.TERMINATED, StopReason.ENV_ERROR, StopReason.CANCELLED]
    one = group([1.0, 0.0, 0.0], reasons)
    assert (flat(advantages_of([one], method)) == 0).all()
    assert trainable([one], method) == [False]


def test_a_group_that_its_strategy_gave_up_teaches_nothing() -> None:
    batch = [group([1.0, 0.0], viable=False), group([1.0, 0.0]), group([0.0, 0.0], viable=False)]
    for method in ("mean", "reinforce_pp", "reward"):
        assert trainable(batch, method) == [False, True, False]


# --- who counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", FAULTS)
def test_I13_golden_a_faulty_member_has_no_advantage_and_moves_nobody(reason: StopReason) -> None:
    case = CASES["missing_member/nan_excluded"]
    reasons = [StopReason.TERMINATED if valid else reason for valid in case["params"]["valid"]]
    for rewards in (case["rewards"], [1.0, 0.0, float("nan"), 0.0], [1.0, 0.0, 99.0, 0.0]):
        got = advantages_of([group(rewards, reasons)], "mean")[0]
        np.testing.assert_allclose(got, case["expected_advantages"], atol=1e-12)


def test_cut_episodes_stay_in_the_baseline() -> None:
    reasons = [StopReason.TERMINATED, StopReason.MAX_TOKENS, StopReason.PARSE_FAILURE]
    assert advantages_of([group([1.0, 0.0, -1.0], reasons)], "mean") == [[1.0, 0.0, -1.0]]


# --- errors and knobs ----------------------------------------------------------------------------


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match="did you mean mean_std"):
        advantages_of([group([1.0, 0.0])], "mean_sd")
    for method in ADVANTAGES:
        with pytest.raises(ValueError, match="GRADER_ERROR"):
            advantages_of([group([1.0, float("nan")])], method, **NEEDED.get(method, {}))


def test_knobs_are_the_keyword_only_parameters_of_the_rows_functions() -> None:
    assert knobs_of("mean") == {}
    assert knobs_of("mean_std") == {"ddof": 1.0, "epsilon": 1e-6}
    assert check_advantage("mean_std", {"epsilon": 1e-4}) == {"ddof": 1.0, "epsilon": 1e-4}
    for name, row in ADVANTAGES.items():
        parameters = [p for f in row.functions for p in inspect.signature(f).parameters.values()]
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(knobs_of(name))
        assert set(knobs_of(name)) <= set(SENSIBLE)
        if name not in NEEDED:
            check_advantage(name)


@pytest.mark.parametrize(
    ("method", "knobs", "message"),
    [
        (
            "mean_std",
            {"epsilom": 1.0},
            r"no knob 'epsilom' \(its knobs are ddof, epsilon\); the nearest names are epsilon",
        ),
        (
            "mean",
            {"ddof": 1},
            r"'ddof' has no effect on advantage method 'mean' \(it has none\); it belongs to mean_std",
        ),
        ("mean", {"zzz": 1}, r"no knob 'zzz' \(it has none\)"),
        ("mean_std", {"ddof": 2}, r"ddof=2 .*expected 0 \(population\) or 1 \(sample\)"),
        ("mean_std", {"epsilon": -1.0}, "epsilon=-1.0 .*0 or more"),
        ("mean_std", {"epsilon": float("nan")}, "epsilon=nan"),
        ("mean_std", {"epsilon": "small"}, "epsilon='small'"),
        ("pass_at_k", {"k": 0}, "k=0 .*whole number"),
        ("pass_at_k", {"k": 1.5}, "k=1.5"),
        ("gigpo", {"gamma": 1.1}, "gamma=1.1 .*from 0 to 1"),
        ("gigpo", {"omega": -1}, "omega=-1"),
        ("gigpo", {"state": "turn"}, "state='turn' .*observation, context"),
        ("gigpo", {"episode_baseline": "steps"}, "one of episodes, turns"),
        ("turn_returns", {"peers": "all"}, "one of group, turn, none"),
        ("moving_baseline", {"decay": 1.0}, "decay=1.0 .*below 1"),
        ("moving_baseline", {"role": "player"}, "one of seat, tags"),
        ("gpg", {"alpha": 2.0}, "one of constant_groups, nonzero_rewards"),
        ("gdpo", {}, "rewards='' .*correct:1,format:0.5"),
        ("gdpo", {"rewards": "a:x"}, "rewards='a:x'"),
        ("gdpo", {"rewards": ":1"}, "rewards=':1'"),
        ("gdpo", {"rewards": "a:1,b:2,a:3"}, "rewards='a:1,b:2,a:3'"),
        ("gdpo", {"rewards": "a,"}, "rewards='a,'"),
        ("gdpo", {"rewards": 3.0}, "rewards=3.0"),
        ("gdpo", {"rewards": "a", "over": "turns"}, "one of episodes, tokens"),
        ("mean_sdt", {}, "did you mean mean_std"),
    ],
)
def test_I12_what_is_unknown_or_makes_no_sense_is_refused(method: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_advantage(method, knobs)
    with pytest.raises(ValueError, match=message):
        advantages_of([], method, **knobs)


def test_which_rows_need_the_whole_batch_at_once() -> None:
    assert {name for name in ADVANTAGES if reads_batch(name)} == {
        "batch_std",
        "gpg",
        "gdpo",
        "reinforce_pp",
        "reinforce_pp_baseline",
    }


# --- with a critic -------------------------------------------------------------------------------


def test_I13_a_critic_leaves_out_who_failed_and_needs_no_second_member() -> None:
    failed = episode([1, 1], [9.0, 9.0], reason=StopReason.ENV_ERROR)
    members = of_episodes(failed, episode([1, 1], [0.0, 1.0]), extra=0.5)
    advantages = advantages_of([members], "critic", values_P_G=[[(), [0.5, 0.25]]], lam=0.0)
    assert advantages == [[(0.0, 0.0), (-0.25, 1.25)]], "the group reward is the last turn's"
    assert teaches([members, of_episodes(failed)], "critic") == [True, False]
    with pytest.raises(ValueError, match="member 1 has 2 turns, and 1 values"):
        advantages_of([members], "critic", values_P_G=[[(), [0.5]]])
    with pytest.raises(ValueError, match="over a critic's values: give values_P_G"):
        compute_advantages([members], "critic")


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=50), st.floats(0, 1))
def test_a_critic_that_is_never_asked_gives_returns(rewards: list[float], gamma: float) -> None:
    members = of_episodes(episode([1] * len(rewards), rewards))
    values = [[[0.0] * len(rewards)]]
    advantages = advantages_of([members], "critic", values_P_G=values, gamma=gamma, lam=1.0)
    discounts = gamma ** np.arange(len(rewards))
    expected = [float(np.dot(rewards[i:], discounts[: len(rewards) - i])) for i in range(len(rewards))]
    np.testing.assert_allclose(flat(advantages), expected, atol=1e-9)


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=20))
def test_with_lam_of_one_a_critic_is_a_baseline_of_the_return(turns: list[tuple[float, float]]) -> None:
    rewards, values = zip(*turns, strict=True)
    members = of_episodes(episode([1] * len(turns), rewards))
    (((*ours,),),) = advantages_of([members], "critic", values_P_G=[[values]], lam=1.0)
    returns = np.cumsum(rewards[::-1])[::-1]
    np.testing.assert_allclose(ours, returns - values, atol=1e-9)


def test_the_rows_that_ask_a_critic_and_those_that_need_no_second_member() -> None:
    assert [name for name in ADVANTAGES if reads_values(name)] == ["critic"]
    assert {name for name in ADVANTAGES if not needs_peers(name)} == {
        "reward",
        "zero",
        "reinforce_pp",
        "moving_baseline",
        "critic",
    }


def test_I12_the_knobs_of_a_critic_are_those_of_its_advantages_and_of_its_fit() -> None:
    assert set(knobs_of("critic")) == {"gamma", "lam", "critic_learning_rate", "critic_epochs"}
    fit = critic_fit_of("critic", {"critic_learning_rate": 0.5, "critic_epochs": 3})
    assert fit is not None
    assert (fit.learning_rate, fit.epochs) == (0.5, 3)
    assert critic_fit_of("mean") is None
    for knob, value in (
        ("gamma", 1.5),
        ("lam", -0.1),
        ("critic_learning_rate", 0.0),
        ("critic_epochs", 0),
        ("critic_epochs", 1.5),
    ):
        with pytest.raises(ValueError, match=f"{knob}={value} of advantage method 'critic': expected a"):
            check_advantage("critic", {knob: value})
    with pytest.raises(ValueError, match=r"'lam' has no effect on advantage method 'mean'.*it belongs to critic"):
        check_advantage("mean", {"lam": 0.5})


# --- identities ----------------------------------------------------------------------------------

quarters = st.integers(-8, 8).map(lambda n: n / 4)
"""Rewards that are equal or far apart, so that no change of scale moves them across the tolerance."""


@st.composite
def batches(draw: st.DrawFn, *, whole: bool = False) -> list[TrajectoryGroup]:
    """Ragged groups of episodes of ragged turns, some of which failed (unless `whole`)."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(0, 4))
        lengths = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=size, max_size=size))
        reasons = draw(st.lists(st.sampled_from(list(StopReason)), min_size=size, max_size=size))
        rewards = draw(st.lists(quarters, min_size=size, max_size=size))
        episodes = tuple(
            episode(n, reason=StopReason.TERMINATED if whole else reason, metrics={"solved": r})
            for n, reason, r in zip(lengths, reasons, rewards, strict=True)
        )
        groups.append(TrajectoryGroup(episodes, tuple(rewards), ({},) * size, ("x",)))
    return groups


every_method = st.sampled_from(sorted(ADVANTAGES))


def some_values(groups: Sequence[TrajectoryGroup]) -> list[list[list[float]]]:
    """What a critic that knows only how far an episode is might say."""
    return [[[0.25 * i for i in range(len(t.transitions))] for t in g.trajectories_G] for g in groups]


def computed(groups: list[TrajectoryGroup], method: str) -> list[list[Any]]:
    given = {"baselines": {"x#0": 0.5, "x#1": -0.25}, "values_P_G": some_values(groups)}
    return advantages_of(groups, method, **given, **NEEDED.get(method, {}))


@given(batches(), every_method)
def test_I13_failed_members_have_no_advantage_and_never_move_another(
    groups: list[TrajectoryGroup], method: str
) -> None:
    got = computed(groups, method)
    worse = []
    for g, advantages in zip(groups, got, strict=True):
        counts = [t.ending.in_baseline for t in g.trajectories_G]
        assert (flat([[a for a, c in zip(advantages, counts, strict=True) if not c]]) == 0).all()
        worse.append(
            replace(g, rewards_G=tuple(r if c else math.nan for r, c in zip(g.rewards_G, counts, strict=True)))
        )
    assert computed(worse, method) == got


@given(batches(), every_method)
def test_every_row_gives_a_number_an_episode_or_one_a_turn_and_all_are_finite(
    groups: list[TrajectoryGroup], method: str
) -> None:
    for g, advantages in zip(groups, computed(groups, method), strict=True):
        for t, a in zip(g.trajectories_G, advantages, strict=True):
            assert isinstance(a, tuple if ADVANTAGES[method].per_turn else float)
            assert not isinstance(a, tuple) or len(a) == len(t.transitions)
            assert np.isfinite(a).all()


@given(batches(), every_method)
def test_who_cannot_teach_has_none(groups: list[TrajectoryGroup], method: str) -> None:
    can = teaches(groups, method, **NEEDED.get(method, {}))
    rest = [a for a, t in zip(computed(groups, method), can, strict=True) if not t]
    assert (flat(rest) == 0).all()


@given(batches(), every_method)
def test_the_order_of_the_batch_is_of_no_account(groups: list[TrajectoryGroup], method: str) -> None:
    back = computed(groups[::-1], method)[::-1]
    np.testing.assert_allclose(flat(back), flat(computed(groups, method)), atol=1e-9)


@given(batches(), st.sampled_from(sorted(set(ADVANTAGES) - {"moving_baseline"})))
def test_the_order_of_a_group_is_of_no_account(groups: list[TrajectoryGroup], method: str) -> None:
    turned = [
        replace(g, trajectories_G=g.trajectories_G[::-1], rewards_G=g.rewards_G[::-1], metrics_G=g.metrics_G[::-1])
        for g in groups
    ]
    back = [advantages[::-1] for advantages in computed(turned, method)]
    np.testing.assert_allclose(flat(back), flat(computed(groups, method)), atol=1e-9)


SHIFTABLE = {
    "mean": {},
    "mean_std": {},
    "leave_one_out": {},
    "leave_one_out_std": {},
    "best_minus_second": {},
    "opo": {},
    "batch_std": {},
    "gpg": {},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "turn_returns": {},
    "gigpo": {"gamma": 1.0},
    "gigpo_std": {"gamma": 1.0},
}
"""Rows for which only differences count; with a discount, how far the end is would count too."""


@given(batches(), st.sampled_from(sorted(SHIFTABLE)), st.sampled_from([-1.5, 0.25, 3.0]))
def test_adding_a_constant_to_all_rewards_changes_nothing(
    groups: list[TrajectoryGroup], method: str, constant: float
) -> None:
    moved = [replace(g, rewards_G=tuple(r + constant for r in g.rewards_G)) for g in groups]
    a, b = (flat(advantages_of(x, method, **SHIFTABLE[method])) for x in (groups, moved))
    np.testing.assert_allclose(a, b, atol=1e-9)


SCALELESS = ["mean_std", "leave_one_out_std", "maxrl", "best_minus_second", "batch_std", "reinforce_pp", "gigpo_std"]


@given(batches(whole=True), st.sampled_from(SCALELESS))
def test_rows_that_divide_by_what_they_measure_have_no_unit(groups: list[TrajectoryGroup], method: str) -> None:
    scaled = [replace(g, rewards_G=tuple(4 * r for r in g.rewards_G)) for g in groups]
    # The one success of a group keeps its undivided advantage under leave_one_out_std: so two of each kind.
    if method == "leave_one_out_std":
        groups = [group([1.0, 0.0, 1.0, 0.0])]
        scaled = [group([4.0, 0.0, 4.0, 0.0])]
    a, b = (flat(advantages_of(x, method, epsilon=0.0)) for x in (groups, scaled))
    np.testing.assert_allclose(a, b, atol=1e-9)


@given(batches())
def test_leave_one_out_is_the_mean_grown_by_the_size_of_the_group(groups: list[TrajectoryGroup]) -> None:
    for ours, theirs, g in zip(
        advantages_of(groups, "mean"), advantages_of(groups, "leave_one_out"), groups, strict=True
    ):
        n = sum(t.ending.in_baseline for t in g.trajectories_G)
        np.testing.assert_allclose(ours, np.array(theirs) * (n - 1) / max(n, 1), atol=1e-12)


CENTRED = ["mean", "mean_std", "leave_one_out", "maxrl", "batch_std", "gpg"]


@given(batches(), st.sampled_from(CENTRED))
def test_a_group_sums_to_zero(groups: list[TrajectoryGroup], method: str) -> None:
    for advantages in advantages_of(groups, method):
        assert sum(advantages) == pytest.approx(0.0, abs=1e-9)


@given(batches(whole=True))
def test_pass_at_k_sums_to_zero_over_a_group(groups: list[TrajectoryGroup]) -> None:
    for advantages in advantages_of(groups, "pass_at_k", k=2):
        assert sum(advantages) == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.lists(quarters, min_size=2, max_size=5), min_size=1, max_size=3))
def test_one_turn_of_one_token_each_makes_simpler_rows_of_these(rewards: list[list[float]]) -> None:
    groups = [group(r) for r in rewards]
    wanted = flat(advantages_of(groups, "mean"))
    for method, knobs in (
        ("opo", {}),
        ("turn_returns", {}),
        ("turn_returns", {"peers": "turn"}),
        ("gigpo", {"omega": 0.0}),
    ):
        np.testing.assert_allclose(flat(advantages_of(groups, method, **knobs)), wanted, atol=1e-12)
    both = flat(advantages_of(groups, "gigpo"))
    np.testing.assert_allclose(both, 2 * wanted, atol=1e-12, err_msg="one state, the opening, which all share")
