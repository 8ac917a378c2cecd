"""The search game: its reward, its limits, what the model is told, and that only its last message is graded."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import trio

from envs.search import MAX_QUERIES, MAX_QUERY_LENGTH, NOTHING, Hit, Passage, Rules, make_env
from jaxrl.env import EnvironmentFault, MessageStepResult
from jaxrl.tools import ToolFault
from jaxrl.types import MalformedToolCall, Message, StopReason, Task, ToolCall

CHAD, MALI = Passage("td", "Chad: Capital", "N'Djamena"), Passage("ml", "Mali: Capital", "Bamako")
TASK = Task("Capital of Chad?", target=("N'Djamena", "Fort-Lamy"), metadata={"evidence": ("td",), "hops": 1})


@dataclass(frozen=True)
class Shelf:
    """Finds the passages that have the query in them."""

    passages: tuple[Passage, ...] = (CHAD, MALI)
    broken: bool = False

    async def prepare(self) -> None:
        await trio.lowlevel.checkpoint()

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        await trio.lowlevel.checkpoint()
        if self.broken:
            raise EnvironmentFault("the shelf fell down")
        return [[Hit(p, 1.0) for p in self.passages if query in p.searched][:k] for query in queries]


def call(*queries: object) -> ToolCall:
    return ToolCall("search", json.dumps({"query_list": list(queries)}))


def search(*queries: object) -> Message:
    return Message("assistant", tool_calls=(call(*queries),))


def answer(text: str) -> Message:
    return Message("assistant", f"Answer: {text}")


MALFORMED = Message("assistant", malformed_calls=(MalformedToolCall("<tool_call>", "close the tag"),))


def play(
    messages: Sequence[Message], task: Task = TASK, retriever: Shelf = Shelf(), **rules
) -> list[MessageStepResult]:
    async def main() -> list[MessageStepResult]:
        env = make_env(task, retriever=retriever, rules=Rules(**rules))
        await env.reset(task)
        return [await env.step(message) for message in messages]

    return trio.run(main)


def said(result: MessageStepResult) -> str:
    (reply,) = result.messages
    return reply.content


@pytest.mark.parametrize(
    ("messages", "reward", "correct", "formed"),
    [
        ([search("Chad"), answer("N'Djamena")], 1.0, 1, 1),
        ([search("Chad"), answer("fort lamy")], 1.0, 1, 1),
        ([answer("N'Djamena")], 1.0, 1, 1),
        ([search("Chad"), answer("Bamako")], 0.0, 0, 1),
        ([search("Chad"), Message("assistant", "It is N'Djamena.")], -0.1, 0, 0),
        ([search("Chad"), Message("assistant", "Answer: Bamako\nAnswer: N'Djamena")], -0.1, 0, 0),
        ([search("Chad"), answer("N'Djamena or Bamako")], 0.0, 0, 1),
        ([Message("assistant", "")], -0.1, 0, 0),
        ([MALFORMED, answer("N'Djamena")], 1.0, 1, 1),
    ],
)
def test_the_reward_table(messages, reward: float, correct: int, formed: int) -> None:
    results = play(messages)
    assert [result.terminated for result in results] == [False] * (len(messages) - 1) + [True]
    assert sum(result.reward for result in results) == pytest.approx(reward)
    assert (results[-1].metrics["correct"], results[-1].metrics["format"]) == (correct, formed)


def test_the_format_coefficient_is_what_a_wrong_form_costs() -> None:
    assert play([Message("assistant", "N'Djamena")], format_coef=0.4)[-1].reward == pytest.approx(-0.4)
    assert play([Message("assistant", "N'Djamena")], format_coef=0.0)[-1].reward == 0.0


def test_N11_only_the_last_message_is_graded() -> None:
    """The instructions show an answer line, the question names the answer, a passage has one, a thought has one."""
    task = Task("Say Answer: N'Djamena", target=("N'Djamena",))
    shelf = Shelf((Passage("x", "", "x\nAnswer: N'Djamena"),))
    silent = Message("assistant", "It is above.", thinking="Answer: N'Djamena")
    assert play([search("x"), silent], task, shelf)[-1].reward == pytest.approx(-0.1)
    beside = Message("assistant", "Answer: N'Djamena", tool_calls=(call("Chad"),))
    results = play([beside, answer("Bamako")])
    assert (results[0].terminated, results[0].reward, results[1].reward) == (False, 0.0, 0.0)


def test_P11_results_that_the_model_makes_up_beside_a_call_are_not_results() -> None:
    """A turn ends where the chat format ends it; whatever stands beside the call is neither shown nor graded."""
    made_up = Message("assistant", "1. Chad: Capital: Bamako\nAnswer: N'Djamena", tool_calls=(call("Chad"),))
    (result,) = play([made_up])
    assert said(result) == "1. Chad: Capital: N'Djamena"
    assert (result.terminated, result.reward) == (False, 0.0)


def test_P13_one_search_too_many_is_refused_with_a_message() -> None:
    results = play([search("Chad"), search("Mali"), answer("N'Djamena")], max_searches=1)
    assert said(results[0]).startswith("1. Chad")
    assert said(results[1]).startswith("Error: this was search 2, and only 1 are allowed")
    assert results[2].metrics["searches"] == 1.0
    assert results[2].reward == 1.0


def test_P13_the_limit_is_exact_within_a_turn_and_refused_calls_do_not_count() -> None:
    turn = Message("assistant", tool_calls=(call(), call("Chad"), call("Mali"), call("Chad")))
    (result,) = play([turn], max_searches=2)
    assert ["Error" in reply.content for reply in result.messages] == [True, False, False, True]


def test_each_query_has_results_of_its_own() -> None:
    (result,) = play([search("Chad", "Mali", "Peru")])
    assert said(result) == (
        'Results for "Chad":\n1. Chad: Capital: N\'Djamena\n\n'
        'Results for "Mali":\n1. Mali: Capital: Bamako\n\n'
        f'Results for "Peru":\n{NOTHING}'
    )
    assert (result.metrics["queries"], result.metrics["empty_results"]) == (3.0, 1.0)


def test_an_empty_result_says_so_and_is_no_error() -> None:
    (result,) = play([search("Peru")])
    assert said(result) == NOTHING
    assert result.metrics["tool_errors"] == 0.0


def test_passages_are_shown_in_one_line_each_and_clipped() -> None:
    shelf = Shelf((Passage("a", "", "x " * 50), Passage("b", "T", "x\n\n y"), Passage("c", "Title", "x x")))
    (result,) = play([search("x")], retriever=shelf, passage_length=9)
    assert said(result) == "1. x x x x x...\n2. T: x y\n3. Title: x..."
    (result,) = play([search("x")], retriever=shelf, passage_length=None, k=1)
    assert said(result) == "1. " + " ".join("x" * 50)


@pytest.mark.parametrize(
    ("queries", "teaches"),
    [
        ([], f"query_list has 0 queries; give 1 to {MAX_QUERIES}"),
        (["x"] * 9, "query_list has 9 queries"),
        (["Chad", " \n"], "query 2 is empty"),
        (["x" * 100_000], f"query 1 has 100000 characters, and at most {MAX_QUERY_LENGTH}"),
        ([["Chad"]], r"must be of type string"),
    ],
)
def test_a_query_that_cannot_be_searched_for_is_the_models_to_correct(queries, teaches: str) -> None:
    (result,) = play([search(*queries)])
    assert said(result).startswith("Error: ")
    assert teaches in said(result)
    assert len(said(result)) < 300
    assert not result.terminated


def test_half_a_surrogate_pair_in_a_query_harms_nobody() -> None:
    smuggled = Message("assistant", tool_calls=(ToolCall("search", '{"query_list": ["\\ud800", "Chad"]}'),))
    (result,) = play([smuggled])
    said(result).encode()


def test_I13_a_retriever_that_fails_is_a_fault_and_never_a_reward() -> None:
    with pytest.raises(ToolFault, match="the shelf fell down"):
        play([search("Chad")], retriever=Shelf(broken=True))


def test_malformed_calls_are_answered_up_to_the_cap() -> None:
    results = play([MALFORMED] * 3, max_malformed=2)
    assert [result.terminated for result in results] == [False, False, True]
    assert said(results[0]) == "Error: close the tag"
    assert sum(result.reward for result in results) == pytest.approx(-0.1)
    assert results[-1].metrics["format"] == 0.0


async def test_an_episode_that_a_budget_cuts_is_badly_formed() -> None:
    env = make_env(TASK, retriever=Shelf())
    assert await env.conclude(StopReason.MAX_TURNS) is None
    await env.reset(TASK)
    await env.step(search("Chad"))
    for reason in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_OVERFLOW):
        conclusion = await env.conclude(reason)
        assert conclusion is not None
        assert conclusion.reward == pytest.approx(-0.1)
        assert (conclusion.metrics["correct"], conclusion.metrics["evidence"]) == (0.0, 1.0)
    assert await env.conclude(StopReason.TIMEOUT) is None


def test_metrics_of_a_finished_episode() -> None:
    results = play([search("Mali"), answer("N'Djamena")])
    assert results[-1].metrics == {
        "format": 1.0,
        "correct": 1.0,
        "searches": 1.0,
        "evidence": 0.0,
        "hops_1/correct": 1.0,
    }
    assert "evidence" not in play([answer("x")], Task("?", target=["x"]))[-1].metrics


async def test_an_env_is_one_episode() -> None:
    env = make_env(TASK, retriever=Shelf())
    with pytest.raises(RuntimeError, match="call reset once"):
        await env.step(answer("x"))
    opening = await env.reset(TASK)
    assert [message.role for message in opening] == ["system", "user"]
    assert [spec.name for spec in env.tool_specs] == ["search"]
    with pytest.raises(RuntimeError, match="make a new one"):
        await env.reset(TASK)
    await env.step(answer("x"))
    with pytest.raises(RuntimeError, match="until it ends"):
        await env.step(answer("x"))


async def test_a_model_that_knows_the_form_is_shown_the_question_alone() -> None:
    env = make_env(TASK, retriever=Shelf(), rules=Rules(show_tools=False))
    assert [message.content for message in await env.reset(TASK)] == ["Capital of Chad?"]
    assert env.tool_specs == ()
    result = await env.step(search("Chad"))
    assert said(result).startswith("1. Chad")


@pytest.mark.parametrize("target", ["Paris", (), ("",), ("...",)])
async def test_a_target_that_no_answer_equals_is_refused(target) -> None:
    env = make_env(TASK, retriever=Shelf())
    with pytest.raises(ValueError, match="expected a list of the accepted answers"):
        await env.reset(Task("?", target=target))


def test_the_factory_pickles() -> None:
    factory = pickle.loads(pickle.dumps(partial(make_env, retriever=Shelf(), rules=Rules(k=2))))
    assert [spec.name for spec in factory(TASK).tool_specs] == ["search"]


@pytest.mark.parametrize(
    ("setting", "teaches"),
    [
        ({"k": 0}, "k=0: expected at least 1"),
        ({"passage_length": 0}, "passage_length=0"),
        ({"max_searches": 0}, "max_searches=0"),
        ({"max_malformed": -1}, "max_malformed=-1"),
        ({"format_coef": float("nan")}, "format_coef=nan"),
    ],
)
def test_wrong_rules_are_refused(setting, teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        Rules(**setting)
