"""Pairwise preferences: who is compared, what verdicts come to, and that a judge's failure is never an answer's."""

import itertools
import logging
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from envs.preference import (
    FIRST,
    SECOND,
    TIE,
    BothOrders,
    Comparison,
    Contestant,
    FunctionJudge,
    Judge,
    JudgeFault,
    Judging,
    Limit,
    PairwisePreferenceGroupBuilder,
    Preference,
    PreferenceEnv,
    RewardModelJudge,
    answer,
    compare_all,
    make_env,
    matchups,
    pairs,
    reward,
    standings,
)
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import EnvironmentFault
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.message_env import EnvFromMessageEnv, TurnRules
from jaxrl.runtime.rollout import RolloutPlan, run_group
from jaxrl.runtime.strategy import FailFast, MinViableGroup, RetryOnFailure, Strategy
from jaxrl.types import Conclusion, Message, StopReason, Task, Trajectory, TrajectoryGroup
from tests.runtime.episodes import ScriptedEngine, said

BYTES = byte_tokenizer()
RENDERER = renderer_for(BYTES)
LIFT = partial(EnvFromMessageEnv, renderer=RENDERER, rules=TurnRules(failed_parse_reward=0.0))
TASK = Task("Say something.")
ONCE = Judging(retries=0)


def text(completion: Sequence[Message]) -> str:
    return answer(completion)


def shorter(comparison: Comparison) -> Preference:
    one, other = len(text(comparison.first)), len(text(comparison.second))
    return TIE if one == other else FIRST if one < other else SECOND


def always_first(comparison: Comparison) -> Preference:
    return FIRST


def builder(judge: Judge | Callable[[Comparison], Preference], **changes: Any) -> PairwisePreferenceGroupBuilder:
    judge = judge if isinstance(judge, (FunctionJudge, BothOrders, RewardModelJudge, Flaky)) else FunctionJudge(judge)
    settings: dict[str, Any] = {"group_size": 4, "judging": ONCE, "format_coef": 0.0}
    return PairwisePreferenceGroupBuilder(TASK, LIFT, judge=judge, **(settings | changes))


def contestant(said: str | None) -> Contestant:
    """An env whose episode went by, with this answer; None never answered."""
    player = PreferenceEnv()
    player._messages = [Message("user", "Say something.")]
    env = Contestant(player, LIFT(player, TASK))
    env._prompt = (Message("user", "Say something."),)
    if said is not None:
        player._messages.append(Message("assistant", said))
    return env


def ended(said: str | None) -> Trajectory:
    return Trajectory((), StopReason.MAX_TOKENS if said is None else StopReason.TERMINATED)


async def graded(
    judge: Judge | Callable[[Comparison], Preference], answers: Sequence[str | None], **changes: Any
) -> tuple[list[float], list[dict[str, float]]]:
    """Rewards and metrics of a group with these answers."""
    group = builder(judge, group_size=max(len(answers), 1), **changes)
    given_back = await group.compute_group_rewards([*map(ended, answers)], [*map(contestant, answers)])
    return [r for r, _ in given_back], [dict(m) for _, m in given_back]


@dataclass
class Flaky:
    """Prefers the shorter, but fails where told to. Counts how often each comparison was asked for."""

    fails: Callable[[str, str, int], bool]
    asked: dict[tuple[str, str], int] = field(default_factory=dict)

    async def __call__(self, comparison: Comparison) -> Preference:
        key = text(comparison.first), text(comparison.second)
        self.asked[key] = self.asked.get(key, 0) + 1
        await trio.lowlevel.checkpoint()
        if self.fails(*key, self.asked[key]):
            raise EnvironmentFault("the judge is out to lunch")
        return shorter(comparison)


# --- pairs ----------------------------------------------------------------------------------------


def test_all_pairs_both_ways_and_one_way() -> None:
    both = pairs(3, "all_pairs_both_ways")
    assert sorted(both) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    one = pairs(3, "all_pairs_one_way")
    assert sorted(map(sorted, one)) == [[0, 1], [0, 2], [1, 2]]
    assert pairs(1) == pairs(0) == []


@given(st.integers(2, 12))
def test_one_way_every_member_is_shown_first_equally_often_or_nearly(members: int) -> None:
    first = [sum(i == place for i, _ in pairs(members, "all_pairs_one_way")) for place in range(members)]
    assert max(first) - min(first) <= 1


@given(st.integers(1, 30), st.integers(2, 8))
def test_matchups_hold_everybody_once_and_leave_nobody_alone(members: int, size: int) -> None:
    runs = matchups(members, size)
    assert [place for run in runs for place in run] == list(range(members))
    assert all(len(run) >= 2 for run in runs) or members == 1
    assert max(map(len, runs)) <= max(size, 3)
    inside = pairs(members, matchup_group_size=size)
    assert all(any(i in run and j in run for run in runs) for i, j in inside)
    assert len(inside) == sum(len(run) * (len(run) - 1) for run in runs)


def test_references_are_compared_with_members_only() -> None:
    found = pairs(2, "all_pairs_both_ways", references=2)
    assert {frozenset(p) for p in found} == {frozenset(p) for p in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]}
    assert len(found) == 10


@pytest.mark.parametrize(
    ("change", "teaches"),
    [
        ({"pattern": "some"}, "pattern='some': expected one of all_pairs_both_ways"),
        ({"matchup_group_size": 1}, "matchup_group_size=1: expected at least 2"),
        ({"scale": "elo"}, "scale='elo': expected one of plus_minus, win_rate"),
        ({"group_size": 0}, "group_size=0"),
        ({"format_coef": -1.0}, r"format_coef=-1\.0"),
    ],
)
def test_I12_wrong_settings_are_refused(change: dict, teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        builder(shorter, **change)


def test_a_preference_is_a_share() -> None:
    assert FIRST.swapped() == SECOND
    assert TIE.swapped() == TIE
    for wrong in (1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match="expected a share"):
            Preference(wrong)


# --- rewards --------------------------------------------------------------------------------------


async def test_the_reward_is_the_mean_over_comparisons() -> None:
    rewards, metrics = await graded(shorter, ["a", "bb", "ccc"])
    assert rewards == [1.0, 0.0, -1.0]
    assert [m["win_rate"] for m in metrics] == [1.0, 0.5, 0.0]
    assert {m["comparisons"] for m in metrics} == {4.0}
    rewards, _ = await graded(shorter, ["a", "bb", "ccc"], scale="win_rate")
    assert rewards == [1.0, 0.5, 0.0]
    larger, _ = await graded(shorter, ["a", "bb", "ccc", *["dddd"] * 5])
    assert larger[0] == 1.0, "a mean, so it does not grow with the group"


ANSWERS = st.lists(st.one_of(st.none(), st.text("ab", min_size=1, max_size=5)), min_size=2, max_size=5)


@given(ANSWERS, st.sampled_from(["all_pairs_both_ways", "all_pairs_one_way"]))
async def test_wins_and_losses_sum_to_zero(answers: list[str | None], pattern: str) -> None:
    def odd(comparison: Comparison) -> Preference:
        return Preference((7 * len(text(comparison.first)) + 3 * text(comparison.second).count("a")) % 11 / 10)

    rewards, _ = await graded(odd, answers, pattern=pattern)
    assert sum(rewards) == pytest.approx(0.0, abs=1e-9)


@given(ANSWERS, st.randoms(use_true_random=False))
async def test_permuting_the_group_permutes_the_rewards(answers: list[str | None], rng: Any) -> None:
    def odd(comparison: Comparison) -> Preference:  # no order of the answers, and not the same in both orders
        return Preference((7 * len(text(comparison.first)) + 3 * text(comparison.second).count("a")) % 11 / 10)

    order = list(range(len(answers)))
    rng.shuffle(order)
    rewards, _ = await graded(odd, answers)
    moved, _ = await graded(odd, [answers[i] for i in order])
    assert moved == pytest.approx([rewards[i] for i in order])


@pytest.mark.parametrize("judge", [always_first, lambda c: SECOND, lambda c: Preference(0.8)])
async def test_a_judge_that_sees_only_the_place_gives_everybody_the_same(judge: Callable) -> None:
    rewards, metrics = await graded(judge, ["a", "bb", "ccc", "dddd"])
    assert rewards == pytest.approx([0.0] * 4)
    assert metrics[0]["judge_first_share"] == pytest.approx(judge(Comparison((), (), ())).first)
    one_way, _ = await graded(judge, ["a", "bb", "ccc", "dddd"], pattern="all_pairs_one_way")
    assert max(one_way) > 0, "in one order it does matter"
    both, _ = await graded(BothOrders(FunctionJudge(judge)), ["a", "bb", "ccc"], pattern="all_pairs_one_way")
    assert both == pytest.approx([0.0] * 3)


async def test_identical_answers_tie_without_the_judge() -> None:
    asked: list[Comparison] = []
    judge = FunctionJudge(lambda c: asked.append(c) or FIRST)
    rewards, metrics = await graded(judge, ["same"] * 4)
    assert rewards == [0.0] * 4
    assert asked == []
    assert metrics[0]["comparisons"] == 6.0


async def test_an_episode_without_an_answer_loses_and_the_judge_is_not_asked_about_it() -> None:
    asked: list[Comparison] = []
    judge = FunctionJudge(lambda c: asked.append(c) or shorter(c))
    rewards, metrics = await graded(judge, ["long answer", None, None, "  "], format_coef=0.25)
    assert rewards == pytest.approx([1.0, -1 / 3 - 0.25, -1 / 3 - 0.25, -1 / 3 - 0.25])
    assert [m["format"] for m in metrics] == [1.0, 0.0, 0.0, 0.0]
    assert asked == []


async def test_a_wrong_form_costs_format_coef_and_is_still_compared() -> None:
    rewards, metrics = await graded(shorter, ["a", "bb."], format_coef=0.5, check_format=lambda t: t.endswith("."))
    assert rewards == [0.5, -1.0]
    assert [m["format"] for m in metrics] == [0.0, 1.0]


async def test_one_survivor_and_nobody() -> None:
    rewards, metrics = await graded(shorter, ["alone"])
    assert rewards == [0.0]
    assert metrics[0]["win_rate"] == 0.5
    assert metrics[0]["comparisons"] == 0.0
    assert await builder(shorter).compute_group_rewards([], []) == []


async def test_references_stand_in_for_the_group() -> None:
    rewards, metrics = await graded(shorter, ["mine"], references=("their answer", "an", "none"))
    assert metrics[0]["comparisons"] == 6.0
    assert metrics[0]["win_rate"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert rewards[0] == pytest.approx(0.0)


async def test_only_runs_of_the_matchup_size_meet() -> None:
    judge = Flaky(lambda *_: False)
    await graded(judge, ["a", "bb", "ccc", "dddd"], matchup_group_size=2)
    assert {frozenset(key) for key in judge.asked} == {frozenset({"a", "bb"}), frozenset({"ccc", "dddd"})}


async def test_envs_of_another_group_are_refused() -> None:
    with pytest.raises(TypeError, match="is no Contestant"):
        await builder(shorter).compute_group_rewards([ended("x")], [LIFT(PreferenceEnv(), TASK)])


# --- a judge that fails ----------------------------------------------------------------------------


async def test_I13_a_judge_that_fails_is_asked_again_as_often_as_allowed() -> None:
    judge = Flaky(lambda first, second, attempt: attempt <= 2)
    rewards, metrics = await graded(judge, ["a", "bb"], judging=Judging(retries=2))
    assert rewards == [1.0, -1.0]
    assert judge.asked == {("a", "bb"): 3, ("bb", "a"): 3}
    assert metrics[0]["comparisons_missing"] == 0.0


async def test_I13_a_missing_comparison_is_in_nobodys_mean(caplog: pytest.LogCaptureFixture) -> None:
    judge = Flaky(lambda first, second, attempt: {first, second} == {"a", "ccc"})
    with caplog.at_level(logging.WARNING):
        rewards, metrics = await graded(judge, ["a", "bb", "ccc"])
    assert rewards == [1.0, 0.0, -1.0], "a loss or a tie in its place would have moved the first and the last"
    assert [m["comparisons_missing"] for m in metrics] == [2.0, 0.0, 2.0]
    assert [m["comparisons"] for m in metrics] == [2.0, 4.0, 2.0]
    assert caplog.text.count("out to lunch") == 2


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=2, max_size=5),
    st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))),
)
def test_I13_with_comparisons_missing_the_wins_still_cancel(answers: list[str], lost: set[tuple[int, int]]) -> None:
    shown = pairs(len(answers))
    verdicts = [None if p in lost else Preference((p[0] * 3 + p[1]) % 5 / 4) for p in shown]
    found = standings(len(answers), shown, verdicts)
    assert sum(s.judged * reward(s.share) for s in found if s.share is not None) == pytest.approx(0.0, abs=1e-9)
    assert all(s.judged + s.missing == 2 * (len(answers) - 1) for s in found)
    assert all((s.share is None) == (s.judged == 0) for s in found)


async def test_I13_a_member_of_which_nothing_is_known_fails_the_grading() -> None:
    judge = Flaky(lambda first, second, attempt: "ccc" in (first, second))
    with pytest.raises(JudgeFault, match=r"none of the 4 comparisons .* out to lunch"):
        await graded(judge, ["a", "bb", "ccc"])


async def test_a_mistake_in_the_judge_is_not_a_missing_comparison() -> None:
    asked: list[Comparison] = []

    def broken(comparison: Comparison) -> Preference:
        asked.append(comparison)
        raise KeyError("verdict")

    with pytest.raises(ExceptionGroup) as caught:
        await graded(broken, ["a", "bb"], judging=Judging(retries=5))
    assert caught.group_contains(KeyError)
    assert len(asked) <= 2, "it is not tried again"
    with pytest.raises(ExceptionGroup) as caught:
        await graded(lambda c: 1.0, ["a", "bb"])  # type: ignore[arg-type,return-value]
    assert caught.group_contains(TypeError, match="expected a Preference")


async def test_a_judge_that_takes_too_long_is_missing(autojump_clock: trio.abc.Clock) -> None:
    async def slow(comparison: Comparison) -> Preference:
        await trio.sleep(1000.0 if "bb" in (text(comparison.first), text(comparison.second)) else 1.0)
        return shorter(comparison)

    with pytest.raises(JudgeFault, match=r"none of the 4 .* no verdict within 5\.0 s"):
        await graded(FunctionJudge(slow), ["a", "bb", "ccc"], judging=Judging(retries=1, seconds=5.0))
    assert trio.current_time() < 100


async def test_comparisons_run_at_once_within_the_limit_of_the_whole_process(autojump_clock: trio.abc.Clock) -> None:
    now, most = 0, 0

    async def slow(comparison: Comparison) -> Preference:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await trio.sleep(1.0)
        now -= 1
        return shorter(comparison)

    began = trio.current_time()
    wide = Judging(limit=Limit("wide", 100))
    await graded(FunctionJudge(slow), ["a", "bb", "ccc", "dddd"], judging=wide)
    assert most == 12
    assert trio.current_time() - began == pytest.approx(1.0)
    most, began = 0, trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            narrow = pickle.loads(pickle.dumps(Judging(limit=Limit("narrow", 4))))
            run = partial(graded, FunctionJudge(slow), ["a", "bb", "ccc", "dddd"], judging=narrow)
            nursery.start_soon(run)
    assert most == 4, "three groups share one limit"
    assert trio.current_time() - began == pytest.approx(9.0)


async def test_I9_cancelling_the_grading_leaves_no_comparison(autojump_clock: trio.abc.Clock) -> None:
    left: list[str] = []

    async def slow(comparison: Comparison) -> Preference:
        try:
            await trio.sleep(1000.0)
        finally:
            left.append("ended")
        return TIE

    with trio.move_on_after(1.0) as scope:
        await compare_all(FunctionJudge(slow), [Comparison((), (), ())] * 5, Judging())
    assert scope.cancelled_caught
    assert left == ["ended"] * 5


@pytest.mark.parametrize("wrong", [{"retries": -1}, {"seconds": 0.0}, {"seconds": math.inf}])
def test_I12_wrong_judging_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        Judging(**wrong)
    with pytest.raises(ValueError, match="at_once=0"):
        Limit("x", 0)


# --- whole groups, as a run plays them ------------------------------------------------------------


def plan(strategy: Strategy) -> RolloutPlan:
    return RolloutPlan((0, "test"), Limits(max_tokens=20, max_turns=4), strategy=strategy)


async def played(group: PairwisePreferenceGroupBuilder, texts: Sequence[str], strategy: Strategy) -> TrajectoryGroup:
    """The group, whose members say these; one that is longer than the budget is cut."""
    given_out = itertools.cycle(texts)
    engine = ScriptedEngine(lambda seed, turn, context: said(next(given_out)))
    return await run_group(engine, group, plan(strategy), group=0)


async def test_a_group_is_played_and_compared() -> None:
    asked: list[Comparison] = []
    judge = FunctionJudge(lambda c: asked.append(c) or shorter(c))
    group = await played(builder(judge, group_size=2, format_coef=0.5), ["a" * 30, "bb"], FailFast())
    assert {t.stop_reason for t in group.trajectories_G} == {StopReason.TERMINATED, StopReason.MAX_TOKENS}
    by_reason = {t.stop_reason: r for t, r in zip(group.trajectories_G, group.rewards_G, strict=True)}
    assert by_reason == {StopReason.TERMINATED: 1.0, StopReason.MAX_TOKENS: -1.5}
    assert asked == [], "a cut answer is none"
    group = await played(builder(judge, group_size=2), ["a", "bb"], FailFast())
    assert sorted(group.rewards_G) == [-1.0, 1.0]
    assert asked[0].prompt == (Message("user", TASK.prompt),)


BROKEN = Flaky(lambda *_: True)


async def test_I13_under_fail_fast_a_judge_that_never_answers_ends_the_run() -> None:
    with pytest.raises(JudgeFault, match="could be judged"):
        await played(builder(BROKEN), ["a", "bb", "ccc", "dddd"], FailFast())


@pytest.mark.parametrize("strategy", [RetryOnFailure(max_retries=1), MinViableGroup(max_retries=1)])
async def test_I13_else_its_group_is_a_grader_error_after_the_retries_and_not_trained(strategy: Strategy) -> None:
    judge = Flaky(lambda *_: True)
    group = await played(builder(judge), ["a", "bb", "ccc", "dddd"], strategy)
    assert {t.stop_reason for t in group.trajectories_G} == {StopReason.GRADER_ERROR}
    assert not group.viable
    assert [e.kind for e in group.errors] == ["JudgeFault"] * 2
    assert set(judge.asked.values()) == {2}, "once, and once more in the retry of the grading"


async def test_I13_a_retry_of_the_grading_brings_the_rewards() -> None:
    judge = Flaky(lambda first, second, attempt: attempt == 1)
    group = await played(builder(judge), ["a", "bb", "ccc", "dddd"], RetryOnFailure(max_retries=1))
    assert sorted(group.rewards_G) == pytest.approx([-1.0, -1 / 3, 1 / 3, 1.0])
    assert group.viable


class Fragile(PreferenceEnv):
    """Breaks where the answer says so."""

    async def step(self, message: Message) -> Any:
        if message.content == "break":
            raise OSError("disk full")
        return await super().step(message)


def fragile(task: Task) -> Fragile:
    return Fragile()


async def test_I13_a_member_that_failed_is_compared_with_nobody() -> None:
    group = builder(shorter, env_factory=fragile)
    result = await played(group, ["a", "bb", "ccc", "break"], MinViableGroup(min_successful=3, max_retries=0))
    good = [r for t, r in zip(result.trajectories_G, result.rewards_G, strict=True) if t.ending.in_baseline]
    assert sorted(good) == [-1.0, 0.0, 1.0]
    alone = await played(
        builder(shorter, env_factory=fragile, group_size=2), ["a", "break"], MinViableGroup(1, max_retries=0)
    )
    assert sorted(t.stop_reason.value for t in alone.trajectories_G) == ["env_error", "terminated"]
    assert alone.rewards_G == (0.0, 0.0)


class GradesTimeouts(PreferenceEnv):
    async def conclude(self, reason: StopReason) -> Conclusion | None:
        return Conclusion(0.0)


async def test_a_timeout_that_is_graded_has_no_answer() -> None:
    players = [contestant("long answer"), contestant("x")]
    ends = [Trajectory((), StopReason.TERMINATED), Trajectory((), StopReason.TIMEOUT, conclusion=Conclusion())]
    found = await builder(shorter, group_size=2).compute_group_rewards(ends, players)
    assert [r for r, _ in found] == [1.0, -1.0]


# --- episodes -------------------------------------------------------------------------------------


async def test_an_episode_of_several_turns_is_compared_as_a_whole() -> None:
    task = Task("one", metadata={"follow_ups": ("two",)})
    seen: list[Comparison] = []
    group = PairwisePreferenceGroupBuilder(task, LIFT, 2, FunctionJudge(lambda c: seen.append(c) or TIE))
    engine = ScriptedEngine(lambda seed, turn, context: said(f"{seed % 1000}-{turn}"))
    await run_group(engine, group, plan(FailFast()), group=0)
    assert [m.role for m in seen[0].first] == ["assistant", "user", "assistant"]
    assert seen[0].prompt == (Message("user", "one"),)
    assert seen[0].first[1] == Message("user", "two")
    assert answer(seen[0].first).endswith("-1")


async def test_a_conversation_can_come_before_the_prompt() -> None:
    before = (Message("system", "Be brief."), Message("user", "hi"))
    env = make_env(TASK)
    opened = await env.reset(Task("hi", metadata={"conversation": before}))
    assert tuple(opened) == before
    assert (await env.step(Message("assistant", "yes"))).metrics == {"answer_characters": 3.0}
    with pytest.raises(RuntimeError, match="make a new one"):
        await env.reset(TASK)


async def test_what_was_thought_is_not_shown_to_the_judge() -> None:
    env = contestant(None)
    env.player._messages.append(Message("assistant", "yes", thinking="no"))  # type: ignore[attr-defined]
    assert env.completion == (Message("assistant", "yes"),)


async def test_I9_envs_made_before_one_that_cannot_be_are_closed() -> None:
    closed: list[int] = []

    class Closes(PreferenceEnv):
        async def close(self) -> None:
            closed.append(1)

    made = itertools.count()

    async def make(task: Task) -> PreferenceEnv:
        if next(made) == 2:
            raise OSError("no more")
        return Closes()

    with pytest.raises(OSError, match="no more"):
        await builder(shorter, env_factory=make).make_envs()
    assert closed == [1, 1]


def test_builders_pickle() -> None:
    group = pickle.loads(pickle.dumps(builder(shorter)))
    assert group.judge == FunctionJudge(shorter)


# --- reward models --------------------------------------------------------------------------------


def by_length(prompt: Sequence[Message], completion: Sequence[Message]) -> float:
    return -float(len(text(completion)))


async def test_a_reward_model_by_sign_and_by_sigmoid() -> None:
    rewards, _ = await graded(RewardModelJudge(by_length, link="sign", margin=1.0), ["a", "bb", "dddd"])
    assert rewards == [0.5, 0.5, -1.0], "a difference within the margin is a tie"
    rewards, _ = await graded(RewardModelJudge(by_length, temperature=2.0), ["a", "bbb"])
    assert rewards[0] == pytest.approx(2 / (1 + math.exp(-1.0)) - 1)
    assert sum(rewards) == pytest.approx(0.0)
    extreme, _ = await graded(RewardModelJudge(lambda p, c: by_length(p, c) * 1e6), ["a", "bbb"])
    assert extreme == [1.0, -1.0]


async def test_a_reward_model_scores_each_answer_once_in_a_worker_thread() -> None:
    scored: list[tuple[str, bool]] = []

    def score(prompt: Sequence[Message], completion: Sequence[Message]) -> float:
        try:
            trio.lowlevel.current_task()
            inside = True
        except RuntimeError:
            inside = False
        scored.append((text(completion), inside))
        return by_length(prompt, completion)

    rewards, _ = await graded(RewardModelJudge(score, link="sign"), ["a", "bb", "ccc"])
    assert rewards == [1.0, 0.0, -1.0]
    assert sorted(scored) == [("a", False), ("bb", False), ("ccc", False)]


async def test_I13_a_score_that_is_no_number_is_a_missing_verdict() -> None:
    def score(prompt: Sequence[Message], completion: Sequence[Message]) -> float:
        return math.nan if text(completion) == "bb" else by_length(prompt, completion)

    with pytest.raises(JudgeFault, match="scored an answer nan"):
        await graded(RewardModelJudge(score), ["a", "bb", "ccc"])


@pytest.mark.parametrize(
    ("change", "teaches"),
    [
        ({"link": "probit"}, "link='probit': expected one of sign, sigmoid"),
        ({"temperature": 0.0}, r"temperature=0\.0"),
        ({"margin": -1.0}, r"margin=-1\.0"),
        ({"link": "sign", "temperature": 2.0}, "no effect with link=sign"),
        ({"margin": 0.5}, "no effect with link=sigmoid"),
    ],
)
def test_I12_wrong_reward_models_are_refused(change: dict, teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        RewardModelJudge(by_length, **change)
