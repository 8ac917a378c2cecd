"""Rewards of episodes that ran into a budget: the published penalty, the clamp, and nobody else is touched."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.shaping import Shaping, SoftOverlong, shape, soft_overlong
from jaxrl.types import ENDINGS, Conclusion, Sample, StopReason, Trajectory, TrajectoryGroup, Transition

GOLDEN = Path(__file__).parent.parent / "golden" / "loss_golden.json"
OVERLONG = tuple(r for r in StopReason if ENDINGS[r].overlong)


def episode(tokens: int, stop: StopReason, conclusion: Conclusion | None = None) -> Trajectory:
    """Two turns of `tokens` sampled tokens together."""
    parts = (tokens // 2, tokens - tokens // 2)
    turns = [Transition((1, 2, 3), Sample((5,) * n, (-0.1,) * n, (0,) * n, "stop"), 0.0, False) for n in parts]
    return Trajectory(tuple(turns), stop, conclusion=conclusion)


def group(*episodes: Trajectory, rewards: tuple[float, ...]) -> TrajectoryGroup:
    return TrajectoryGroup(episodes, rewards, ({},) * len(rewards), ("tag",))


def test_golden_dapo_soft_overlong() -> None:
    read = json.loads(GOLDEN.read_text())
    cases = [c for part in read.values() if isinstance(part, list) for c in part]
    (case,) = [c for c in cases if c.get("name") == "dapo_soft_overlong"]
    penalty = SoftOverlong(case["params"]["L_max"], case["params"]["L_cache"])
    assert [soft_overlong(n, penalty) for n in case["lengths"]] == pytest.approx(case["expected"])


@pytest.mark.parametrize(
    ("tokens", "penalty", "expected"),
    [
        (0, SoftOverlong(10, 4), 0.0),
        (6, SoftOverlong(10, 4), 0.0),
        (7, SoftOverlong(10, 4), -0.25),
        (9, SoftOverlong(10, 4, factor=2.0), -1.5),
        (1000, SoftOverlong(10, 4, factor=2.0), -2.0),
        (5, SoftOverlong(10, 10), -0.5),
    ],
)
def test_the_penalty_by_hand(tokens: int, penalty: SoftOverlong, expected: float) -> None:
    assert soft_overlong(tokens, penalty) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (Shaping(), (0.75, -0.5, 0.75)),
        (Shaping(clamp_on_limit=True), (0.0, -0.5, 0.75)),
        (Shaping(overlong=SoftOverlong(10, 4)), (0.25, -1.0, 0.75)),
        (Shaping(clamp_on_limit=True, overlong=SoftOverlong(10, 4)), (-0.5, -1.0, 0.75)),
    ],
)
def test_the_clamp_comes_before_the_penalty(shaping: Shaping, expected: tuple[float, ...]) -> None:
    cut = episode(8, StopReason.MAX_TOKENS)  # 8 tokens: half the buffer
    before = group(cut, cut, episode(8, StopReason.TERMINATED), rewards=(0.75, -0.5, 0.75))
    after = shape(before, shaping)
    assert after.rewards_G == pytest.approx(expected)
    assert (after.trajectories_G, after.tags) == (before.trajectories_G, before.tags)


def test_observations_are_nobodys_fault() -> None:
    turn = Transition((1,) * 50, Sample((5,), (-0.1,), (0,), "length"), 0.0, True)
    cut = Trajectory((turn,), StopReason.CONTEXT_OVERFLOW)
    assert shape(group(cut, rewards=(1.0,)), Shaping(overlong=SoftOverlong(10, 9))).rewards_G == (1.0,)


def test_a_graded_timeout_is_no_overlong_episode() -> None:
    late = episode(30, StopReason.TIMEOUT, Conclusion(1.0))
    shaping = Shaping(clamp_on_limit=True, overlong=SoftOverlong(10, 4))
    assert shape(group(late, rewards=(1.0,)), shaping).rewards_G == (1.0,)


@given(
    st.lists(
        st.tuples(st.sampled_from(StopReason), st.integers(0, 30), st.floats(-5, 5)),
        max_size=6,
    ),
    st.booleans(),
    st.integers(1, 20),
    st.floats(0.1, 3.0),
)
def test_only_overlong_endings_change_and_never_for_the_better(
    members: list[tuple[StopReason, int, float]], clamp: bool, buffer: int, factor: float
) -> None:
    before = group(*(episode(n, stop) for stop, n, _ in members), rewards=tuple(r for *_, r in members))
    after = shape(before, Shaping(clamp, SoftOverlong(20, buffer, factor)))
    for (stop, _, reward), shaped in zip(members, after.rewards_G, strict=True):
        if stop not in OVERLONG:
            assert shaped == reward
        else:
            assert shaped <= reward
            assert shaped >= min(reward, 0.0 if clamp else reward) - factor


def test_shaping_again_is_not_hidden_in_the_group() -> None:
    cut = group(episode(8, StopReason.MAX_TURNS), rewards=(1.0,))
    shaping = Shaping(overlong=SoftOverlong(10, 4))
    assert shape(cut, shaping).rewards_G == (0.5,)
    assert cut.rewards_G == (1.0,), "the envs' rewards stay for the metrics"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 10, "buffer": 0}, "buffer=0: expected 1 to max_tokens=10"),
        ({"max_tokens": 10, "buffer": 11}, "buffer=11: expected 1 to max_tokens=10"),
        ({"max_tokens": 10, "buffer": 4, "factor": 0.0}, r"factor=0.0: expected a number above 0"),
        ({"max_tokens": 10, "buffer": 4, "factor": float("nan")}, r"factor=nan"),
    ],
)
def test_I12_penalties_of_nothing_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftOverlong(**values)
