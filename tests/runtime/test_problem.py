"""Questions and answers: the formula, what is graded, whose fault an error is, one problem for a whole group."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from episodes import BYTES, RENDERER, Script, ScriptedEngine, lines, said
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.env import Env, GroupDataset
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.problem import (
    BoxedProblem,
    FunctionProblem,
    Problem,
    ProblemEnv,
    ProblemGroupBuilder,
    read_boxed,
)
from jaxrl.runtime.rollout import RolloutPlan, run_group
from jaxrl.types import Conclusion, Message, StopReason, Task

EIGHT = BoxedProblem(r"What is 3 + 5? Example: \boxed{8}", "8")


async def graded(problem: Problem, text: str, **form: Any) -> Any:
    env = ProblemEnv(problem, **form)
    await env.reset(Task(problem.question))
    return await env.step(Message("assistant", text))


def equals(text: str, target: str = "8") -> bool:
    return text == target


# --- the reward ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formed", "correct", "reward"), [(True, True, 1.0), (True, False, 0.0), (False, True, 0.9), (False, False, -0.1)]
)
async def test_reward_is_the_answer_and_a_tenth_of_a_missing_form(formed: bool, correct: bool, reward: float) -> None:
    problem = FunctionProblem("?", lambda text: correct, check_format=lambda text: formed)
    result = await graded(problem, "x")
    assert result.reward == pytest.approx(reward, abs=1e-12)
    assert result.metrics == {"format": float(formed), "correct": float(correct)}
    assert result.terminated


async def test_partial_credit_and_another_coefficient() -> None:
    half: Any = np.float32(0.5)
    problem = FunctionProblem("?", lambda text: 0.25, check_format=lambda text: half)
    result = await graded(problem, "x", format_coef=0.4)
    assert result.reward == pytest.approx(0.25 + 0.4 * -0.5)
    assert result.metrics == {"format": 0.5, "correct": 0.25}


async def test_a_response_cut_by_a_budget_is_worth_what_a_wrong_form_is() -> None:
    env = ProblemEnv(EIGHT)
    assert await env.conclude(StopReason.MAX_TOKENS) == Conclusion(-0.1, {"format": 0.0, "correct": 0.0})
    assert (await graded(EIGHT, "8")).reward == pytest.approx(-0.1)
    assert await env.conclude(StopReason.TIMEOUT) is None


# --- the checks ----------------------------------------------------------------------------------


class Callable8:
    def __call__(self, text: str) -> bool:
        return text == "8"


class AsyncCallable8:
    async def __call__(self, text: str) -> bool:
        return text == "8"


async def equals_later(text: str) -> bool:
    return text == "8"


@pytest.mark.parametrize(
    "check",
    [lambda text: text == "8", partial(equals, target="8"), equals, equals_later, Callable8(), AsyncCallable8()],
    ids=["lambda", "partial", "function", "async", "object", "async object"],
)
async def test_G09_any_callable_is_a_check_and_metric_names_stay(check: Any) -> None:
    right = await graded(FunctionProblem("?", check, check_format=check), "8")
    wrong = await graded(FunctionProblem("?", check, check_format=check), "9")
    assert (right.reward, right.metrics) == (1.0, {"format": 1.0, "correct": 1.0})
    assert (wrong.reward, wrong.metrics) == (-0.1, {"format": 0.0, "correct": 0.0})


async def test_N11_only_the_response_is_graded() -> None:
    seen: list[str] = []
    problem = FunctionProblem(r"Say \boxed{8}.", lambda text: seen.append(text) or read_boxed(text) == "8")
    few_shot = (Message("user", "2 + 6?"), Message("assistant", r"\boxed{8}"))
    result = await graded(problem, "no idea", few_shot=few_shot, system=r"\boxed{8}")
    assert seen == ["no idea"]
    assert result.reward == 0.0


async def test_thoughts_are_not_part_of_the_response() -> None:
    env = ProblemEnv(EIGHT)
    await env.reset(Task("?"))
    result = await env.step(Message("assistant", "dunno", thinking=r"\boxed{8}"))
    assert result.metrics == {"format": 0.0, "correct": 0.0}


@pytest.mark.parametrize("returned", [None, "yes", [True]])
async def test_a_check_that_says_nothing_is_an_error_and_not_a_zero(returned: Any) -> None:
    with pytest.raises(TypeError, match="check_answer returned"):
        await graded(FunctionProblem("?", lambda text: returned), "x")


async def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="check_format returned nan"):
        await graded(FunctionProblem("?", equals, check_format=lambda text: float("nan")), "x")


# --- boxes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "correct", "formed"),
    [
        (r"so \boxed{8}", 1, 1),
        (r"\boxed { 8 } it is, not 9", 1, 1),
        ("maybe 7, or 8", 0, 0),
        (r"\boxed{7} or \boxed{8}", 0, 0),
        (r"\boxed{8} and \boxed{8}", 0, 0),
        (r"\boxed{7, 8}", 0, 1),
        (r"\boxed{\boxed{8}}", 0, 0),
        (r"\boxed{8", 0, 0),
        ("", 0, 0),
    ],
)
async def test_N19_shotgun_answers_score_nothing(text: str, correct: int, formed: int) -> None:
    assert (await graded(EIGHT, text)).metrics == {"format": float(formed), "correct": float(correct)}


@given(st.recursive(st.text(st.characters(exclude_characters="{}\\")), lambda t: t.map(lambda s: f"x{{{s}}}")))
def test_a_box_gives_back_what_was_put_in(inside: str) -> None:
    assert read_boxed(f"a \\boxed{{{inside}}} b") == inside


# --- the opening ---------------------------------------------------------------------------------


async def test_the_opening_is_system_examples_and_question() -> None:
    few_shot = (Message("user", "1?"), Message("assistant", "1"))
    env = ProblemEnv(EIGHT, system="Be brief.", few_shot=few_shot)
    opening = await env.reset(Task("3 + 5?"))
    assert opening == (Message("system", "Be brief."), *few_shot, Message("user", "3 + 5?"))
    await env.step(Message("assistant", "8"))
    assert env.messages == (*opening, Message("assistant", "8"))
    with pytest.raises(RuntimeError, match="already reset"):
        await env.reset(Task("3 + 5?"))


# --- groups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fickle:
    """A problem with another question each time it is asked for one."""

    asked: list[int] = field(default_factory=list)
    reference_answer: str = "8"

    @property
    def question(self) -> str:
        self.asked.append(1)
        return f"question {len(self.asked)}"

    def check_answer(self, text: str) -> bool:
        return text == "8"

    def check_format(self, text: str) -> bool:
        return True


async def openings(builder: ProblemGroupBuilder) -> set[str]:
    return {BYTES.decode((await env.initial_observation())[0]) for env in await builder.make_envs()}


async def test_I14_a_problem_that_changes_its_question_cannot_give_members_different_ones() -> None:
    builder = ProblemGroupBuilder(Fickle(), RENDERER, 4)
    first, again = await openings(builder), await openings(builder)
    assert len(first) == 1
    assert first == again, "a retry asks the same"
    assert builder.describe() == "question 1"
    env = await builder.remake(2)
    assert env is not None
    assert {BYTES.decode((await env.initial_observation())[0])} == first


@pytest.mark.parametrize("problem", [EIGHT, FunctionProblem("3 + 5?", partial(equals, target="8"), "8")])
async def test_a_builder_pickles(problem: Problem) -> None:
    builder = ProblemGroupBuilder(problem, RENDERER, 2, system="s", few_shot=(Message("assistant", "hi"),), tags=("t",))
    again = pickle.loads(pickle.dumps(builder))
    assert (again.problem.reference_answer, again.logging_tags(), again.describe()) == ("8", ("t",), problem.question)
    assert await openings(again) == await openings(builder)


def engine(script: Script) -> Any:
    return ScriptedEngine(script)


PLAN = RolloutPlan((0, "test"), Limits(max_tokens=40))


async def test_a_group_is_rolled_out_and_graded() -> None:
    builder = ProblemGroupBuilder(EIGHT, RENDERER, 2, tags=("sums",))
    group = await run_group(engine(lines(r"\boxed{8}")), builder, PLAN, group=0)
    assert group.rewards_G == (1.0, 1.0)
    assert group.tags == ("sums",)
    assert [t.stop_reason for t in group.trajectories_G] == [StopReason.TERMINATED] * 2
    assert dict(group.trajectories_G[0].transitions[0].metrics) == {"format": 1.0, "correct": 1.0}


async def test_rambling_on_is_not_better_than_a_wrong_form() -> None:
    cut = await run_group(engine(lambda *_: (65,) * 40), ProblemGroupBuilder(EIGHT, RENDERER, 2), PLAN, group=0)
    broken: Sequence[int] = (BYTES.special("<tool_call>"), *said("8"))
    odd = await run_group(engine(lambda *_: broken), ProblemGroupBuilder(EIGHT, RENDERER, 2), PLAN, group=0)
    assert [t.stop_reason for t in cut.trajectories_G] == [StopReason.MAX_TOKENS] * 2
    assert [t.stop_reason for t in odd.trajectories_G] == [StopReason.PARSE_FAILURE] * 2
    assert cut.rewards_G == odd.rewards_G == (-0.1, -0.1)


async def test_I13_a_check_that_raises_ends_the_run_and_is_no_zero() -> None:
    def broken(text: str) -> bool:
        raise ConnectionError("the judge is away")

    builder = ProblemGroupBuilder(FunctionProblem("?", broken), RENDERER, 2)
    with pytest.RaisesGroup(pytest.RaisesExc(ConnectionError, match="the judge is away"), flatten_subgroups=True):
        await run_group(engine(lines("8")), builder, PLAN, group=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 0}, "group_size=0: expected at least 1"),
        ({"few_shot": (Message("user", "1?"),)}, "few_shot ends with a message of the user"),
    ],
)
def test_wrong_groups_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProblemGroupBuilder(**{"problem": EIGHT, "renderer": RENDERER, "group_size": 2, **change})


def test_a_dataset_gives_each_problem_once_the_last_batch_what_is_left() -> None:
    groups = [ProblemGroupBuilder(BoxedProblem(f"{i}?", str(i)), RENDERER, 2) for i in range(5)]
    dataset = GroupDataset(groups, batch_size=2)
    batches = [[b.describe() for b in dataset.get_batch(i)] for i in range(len(dataset))]
    assert batches == [["0?", "1?"], ["2?", "3?"], ["4?"]]
    with pytest.raises(IndexError, match="batch 3 of a dataset of 3"):
        dataset.get_batch(3)
    with pytest.raises(ValueError, match="groups is empty"):
        GroupDataset([], 1)
    with pytest.raises(ValueError, match="batch_size=0"):
        GroupDataset(groups, 0)


async def test_an_env_made_by_the_group_is_of_the_kind_and_closes() -> None:
    (env,) = await ProblemGroupBuilder(EIGHT, RENDERER, 1).make_envs()
    assert isinstance(env, Env)
    assert env.describe() == "ProblemEnv"
    await env.close()
