"""Credit inside an episode: returns, states that were met twice, temporal differences around observations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played import advantages_of, episode, flat, group, of_episodes

from jaxrl.algo.members import (
    centred,
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
    HOLES,
    discounted_returns,
    gae,
    gae_tokens,
    newly_observed,
    states,
    whole_context,
)
from jaxrl.types import Conclusion, Sample, StopReason, Trajectory, Transition

floats = st.floats(-3, 3)
sequences = st.lists(floats, max_size=50).map(np.array).map(lambda a: a.astype(float))


# --- who counts, and what each turn was worth -------------------------------------------------------


def test_what_no_step_gave_is_the_last_turns() -> None:
    concluded = replace(episode([1, 1], [0.25, 0.5]), conclusion=Conclusion(2.0), stop_reason=StopReason.MAX_TURNS)
    played = of_episodes(concluded, episode([1], [1.0]), episode([]), extra=4.0)
    counted = members(played)
    assert counted.rewards_G.tolist() == [6.75, 5.0, 4.0]
    assert [r.tolist() for r in turn_rewards(counted)] == [[0.25, 6.5], [5.0], []]


@given(st.lists(floats, min_size=1, max_size=50), floats)
def test_rewards_by_turn_sum_to_the_total(rewards: list[float], extra: float) -> None:
    (by_turn,) = turn_rewards(members(of_episodes(episode([1] * len(rewards), rewards), extra=extra)))
    assert by_turn.sum() == pytest.approx(sum(rewards) + extra)
    assert by_turn[:-1].tolist() == rewards[:-1]


def test_members_that_count_keep_their_places() -> None:
    reasons = [StopReason.ENV_ERROR, StopReason.TERMINATED, StopReason.CANCELLED, StopReason.MAX_TOKENS]
    counted = members(group([9.0, 1.0, 9.0, 2.0], reasons, lengths=[(1,), (2, 3), (1,), (4,)]))
    assert (counted.seats_G, counted.rewards_G.tolist(), len(counted)) == ((1, 3), [1.0, 2.0], 2)
    assert lengths(counted).tolist() == [5.0, 4.0]


def test_masked_turns_have_no_trained_tokens_but_keep_their_place() -> None:
    counted = members(of_episodes(episode([2, 3, 4], masked=[1])))
    assert [n.tolist() for n in turn_lengths(counted)] == [[2.0, 0.0, 4.0]]
    assert metric(counted, "nothing") == [None]


def test_values_that_agree_are_no_contrast() -> None:
    same = np.array([0.3, 0.1 * 3, 0.1 + 0.2])
    assert not informative(same)
    for got in (centred(same), standardised(same, ddof=1.0, epsilon=0.0)):
        assert got.tolist() == [0.0] * 3
    deviations, variance = weighted_deviations([same, np.array([5.0])], [np.ones(3), np.zeros(1)], 1.0)
    assert ([d.tolist() for d in deviations], variance) == ([[0.0] * 3, [0.0]], 1.0), "what weighs nothing has no say"
    assert weighted_deviations([np.array([1.0, 2.0])], [np.array([1.0, 0.0])], 1.0)[1] == 1.0


# --- returns ---------------------------------------------------------------------------------------


@given(sequences, st.floats(0, 1))
def test_a_return_is_the_discounted_sum_of_what_follows(rewards: np.ndarray, gamma: float) -> None:
    discounts = gamma ** np.arange(len(rewards))
    expected = [float(np.dot(rewards[i:], discounts[: len(rewards) - i])) for i in range(len(rewards))]
    np.testing.assert_allclose(discounted_returns(rewards, gamma), expected, atol=1e-9)


def test_peers_of_a_turn_by_hand() -> None:
    played = of_episodes(episode([1] * 3, [0.0, 0.0, 1.0]), episode([1] * 2, [0.0, 0.0]))
    by_peers = {p: advantages_of([played], "turn_returns", gamma=0.5, peers=p)[0] for p in ("group", "turn")}
    average = (0.25 + 0.5 + 1.0) / 5
    assert by_peers["group"] == [
        pytest.approx((0.25 - average, 0.5 - average, 1 - average)),
        pytest.approx((-average, -average)),
    ]
    assert by_peers["turn"] == [(0.125, 0.25, 0.0), (-0.125, -0.25)], "the third turn has no peer"
    assert advantages_of([played], "turn_returns", gamma=0.5, peers="none")[0] == [(0.25, 0.5, 1.0), (0.0, 0.0)]


# --- states ----------------------------------------------------------------------------------------


def turn(observation: tuple[int, ...], *action: int, rewrite: str | None = None) -> Transition:
    sample = Sample(action, (-1.0,) * len(action), (0,) * len(action), "stop")
    return Transition(observation, sample, 0.0, False, rewrite=rewrite)


def test_a_state_is_what_was_newly_shown() -> None:
    walk = Trajectory(
        (
            turn((1, 2), 7, 8),
            turn((1, 2, 7, 8, 3), 9),
            turn((1, 2, 7, 8, 3, 9), 6),  # nothing was said between
            turn((1, 2, 8, 4), 5, rewrite="thinking_stripped"),
        ),
        StopReason.TERMINATED,
    )
    assert newly_observed(walk) == [(1, 2), (3,), (1, 2, 7, 8, 3, 9), (8, 4)]
    assert whole_context(walk) == [t.observation for t in walk.transitions]


def test_the_same_place_on_two_ways_is_one_state_unless_the_way_counts() -> None:
    left = episode([1, 1], [0.0, 1.0], states=[1, 5])
    right = replace(episode([2, 1], [0.0, 0.0], states=[1, 5]))
    played = of_episodes(left, right)
    assert states(members(played), "observation") == [[(1,), (5,)], [(1,), (5,)]]
    (near, _), (far, _) = (advantages_of([played], "gigpo", gamma=1.0, state=a)[0] for a in ("observation", "context"))
    assert near == (1.0, 1.0)
    assert far == (1.0, 0.5), "only the opening is shared"


def test_a_state_met_twice_in_one_episode_is_compared_with_itself() -> None:
    circle = episode([1, 1, 1], [0.0, 0.0, 1.0], states=[1, 2, 1])
    straight = episode([1], [0.0], states=[9])
    ((first, second, third), (only,)) = advantages_of([of_episodes(circle, straight)], "gigpo", gamma=0.5)[0]
    assert (first, second, third, only) == (0.5 - 0.375, 0.5, 0.5 + 0.375, -0.5)


def test_gigpo_std_divides_both_parts() -> None:
    played = of_episodes(episode([1, 1], [0.0, 1.0], [1, 2]), episode([1, 1], [0.0, 0.0], [1, 3]))
    ((won_first, won_last), (lost_first, _)) = advantages_of([played], "gigpo_std", gamma=0.5, epsilon=0.0)[0]
    one = 0.5 / np.std([0, 1], ddof=1)
    assert (won_first, won_last, lost_first) == pytest.approx((2 * one, one, -2 * one))
    halved = advantages_of([played], "gigpo_std", omega=0.5, epsilon=0.0)[0]
    assert halved[0] == pytest.approx((1.5 * one, one))


def test_episode_baselines_over_turns_survive_members_without_any() -> None:
    played = of_episodes(episode([]), episode([1, 1], [0.0, 1.0]), episode([1], [0.0]))
    (none, won, lost) = advantages_of([played], "gigpo", omega=0.0, episode_baseline="turns")[0]
    assert (none, won, lost) == ((), pytest.approx((1 / 3, 1 / 3)), pytest.approx((-2 / 3,)))
    silent = of_episodes(episode([]), episode([]), extra=1.0)
    assert advantages_of([replace(silent, rewards_G=(1.0, 0.0))], "gigpo", episode_baseline="turns") == [[(), ()]]


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0, 1))
def test_what_happens_in_one_state_only_is_the_episodes_advantage(one: int, other: int, gamma: float) -> None:
    """Where no state is met twice, GiGPO is the mean-centred reward on every turn."""
    a = episode([1] * one, [0.0] * (one - 1) + [1.0], states=range(100, 100 + one))
    b = episode([1] * other, [0.0] * other, states=range(200, 200 + other))
    got = advantages_of([of_episodes(a, b)], "gigpo", gamma=gamma)[0]
    assert got == [(0.5,) * one, (-0.5,) * other]


# --- a critic --------------------------------------------------------------------------------------


@given(sequences, st.floats(0, 1), st.floats(0, 1), st.data())
def test_gae_is_the_sum_of_its_differences(rewards: np.ndarray, gamma: float, lam: float, data: st.DataObject) -> None:
    values = np.array(data.draw(st.lists(floats, min_size=len(rewards), max_size=len(rewards))), float)
    deltas = rewards + gamma * np.append(values, 0.0)[1:] - values
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
    np.testing.assert_allclose(gae(rewards, values, gamma=gamma, lam=lam), expected, atol=1e-9)


@given(sequences, st.data())
def test_a_critic_that_knows_the_returns_leaves_nothing(rewards: np.ndarray, data: st.DataObject) -> None:
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    values = discounted_returns(rewards, gamma)
    np.testing.assert_allclose(gae(rewards, values, gamma=gamma, lam=lam), 0.0, atol=1e-9)


@given(st.lists(st.tuples(st.booleans(), floats, floats), max_size=40))
def test_observations_are_no_steps(steps: list[tuple[bool, float, float]]) -> None:
    """Carried: what the critic says of an observation is never read, not even when it is not a number."""
    mask = np.array([m for m, _, _ in steps], bool)
    rewards = np.array([r if m else 0.0 for m, r, _ in steps], float)
    values = np.array([v if m else np.nan for m, _, v in steps], float)
    got = gae_tokens(rewards, values, mask, gamma=0.9, lam=0.8)
    np.testing.assert_array_equal(got[mask], gae(rewards[mask], values[mask], gamma=0.9, lam=0.8))
    assert (got[~mask] == 0).all()


@pytest.mark.parametrize("hole", HOLES)
def test_without_observations_all_conventions_agree(hole: str) -> None:
    rewards, values = np.array([0.0, 0.5, 1.0]), np.array([0.1, 0.2, 0.3])
    got = gae_tokens(rewards, values, np.ones(3, bool), gamma=0.9, lam=0.8, hole=hole)
    np.testing.assert_allclose(got, gae(rewards, values, gamma=0.9, lam=0.8))
    assert gae_tokens(np.zeros(0), np.zeros(0), np.zeros(0, bool), hole=hole).tolist() == []


def test_errors_teach() -> None:
    three = np.zeros(3)
    with pytest.raises(ValueError, match="one of carry, naive, zeroed"):
        gae_tokens(three, three, np.ones(3, bool), hole="skip")
    with pytest.raises(ValueError, match=r"rewards at tokens \[1\].*did not sample"):
        gae_tokens(np.array([0.0, 1.0, 0.0]), three, np.array([True, False, True]))


def test_failed_members_have_a_zero_for_each_turn_they_played() -> None:
    failed = episode([1, 1], [5.0, 5.0], reason=StopReason.TOOL_ERROR)
    played = of_episodes(failed, episode([1], [1.0]), episode([1], [0.0]))
    assert advantages_of([played], "gigpo")[0] == [(0.0, 0.0), (1.0,), (-1.0,)]
    assert flat(advantages_of([played], "turn_returns")).tolist() == [0.0, 0.0, 0.5, -0.5]
