"""The tool-use game: tasks without leaks, a reward table that cannot be farmed, strict answers, a safe calculator."""

import functools
import pickle
import re
import time
from collections.abc import Sequence
from typing import cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from envs.tool_use import LEVELS, Split, calculate, demonstrate, facts, make_env, pool, read_answer, tasks
from jaxrl.env import MessageStepResult
from jaxrl.tools import ToolError
from jaxrl.types import MalformedToolCall, Message, Task, ToolCall

SPLITS = ("train", "test")
EVERY_POOL = [(split, level) for split in SPLITS for level in LEVELS]


def lookup(key: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall("lookup", f'{{"key": "{key}"}}'),))


def answer(text: object) -> Message:
    return Message("assistant", f"Answer: {text}")


MALFORMED = Message("assistant", malformed_calls=(MalformedToolCall("<tool_call>", "close the tag"),))
LIST_KEYS = Message("assistant", tool_calls=(ToolCall("list_fact_keys", ""),))


def play(task: Task, messages: Sequence[Message], **options: int) -> list[MessageStepResult]:
    async def main() -> list[MessageStepResult]:
        env = make_env(task, **options)
        await env.reset(task)
        return [await env.step(message) for message in messages]

    return trio.run(main)


def total(results: Sequence[MessageStepResult]) -> float:
    return sum(result.reward for result in results)


LEVEL_1, LEVEL_2 = pool("train", 1)[0], pool("train", 2)[0]
KEY, (LEFT, RIGHT) = LEVEL_1.metadata["keys"][0], LEVEL_2.metadata["keys"]
OTHER_KEY = pool("train", 1)[5].metadata["keys"][0]


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "level"), EVERY_POOL)
def test_the_scripted_player_earns_exactly_one_on_every_task(split, level):
    for task in pool(split, level):
        said = [message for message in demonstrate(task) if message.role == "assistant"]
        results = play(task, said)
        assert total(results) == pytest.approx(1.0)
        assert [result.terminated for result in results] == [False] * (len(said) - 1) + [True]
        assert results[-1].metrics["correct"] == results[-1].metrics["lookups"] == 1.0


def test_there_are_facts_enough_and_the_splits_share_none():
    train, test = facts("train"), facts("test")
    assert len(train) >= 40
    assert not set(train) & set(test)
    assert not set(train.values()) & set(test.values())
    assert any(isinstance(value, str) for value in train.values())
    questions = [{task.prompt for level in LEVELS for task in pool(split, level)} for split in SPLITS]
    assert not questions[0] & questions[1]


@pytest.mark.parametrize(("split", "level"), EVERY_POOL)
def test_a_prompt_holds_no_number_and_level_3_gives_no_key(split, level):
    prompts = [task.prompt for task in pool(split, level)]
    assert len(set(prompts)) == len(prompts)
    assert not any(re.search("[0-9]", prompt) for prompt in prompts)
    named = [key in task.prompt for task in pool(split, level) for key in task.metadata["keys"]]
    assert all(named) if level < 3 else not any(named)


def test_an_env_shows_the_facts_of_its_split_only():
    train_key = next(iter(facts("train")))
    task = pool("test", 1)[0]
    results = play(task, [lookup(train_key), LIST_KEYS])
    assert results[0].messages[0].content.startswith("Error: no fact has key")
    assert results[1].messages[0].content.split() == list(facts("test"))


def test_tasks_are_deterministic_and_dealt_without_repeats():
    dealt = tasks("train", 60, seed=1)
    assert dealt == tasks("train", 60, seed=1)
    assert dealt[:7] == tasks("train", 7, seed=1)
    assert dealt != tasks("train", 60, seed=2)
    assert [task.metadata["level"] for task in dealt[:6]] == [1, 2, 3, 1, 2, 3]
    assert len({task.prompt for task in dealt}) == 60
    assert len(tasks("test", 100, levels=[1])) == 100


@pytest.mark.parametrize(
    ("call", "teaches"),
    [
        (lambda: tasks(cast(Split, "val"), 1), "split is 'val'; expected"),
        (lambda: tasks("train", 1, levels=[4]), "level is 4; expected one of"),
        (lambda: tasks("train", 1, levels=[]), "at least one level"),
    ],
)
def test_wrong_task_arguments_are_refused(call, teaches: str):
    with pytest.raises(ValueError, match=teaches):
        call()


# --- rewards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "messages", "reward"),
    [
        (LEVEL_1, [Message("assistant", "")], 0.0),
        (LEVEL_1, [answer(LEVEL_1.target + 1)], 0.0),
        (LEVEL_1, [answer(LEVEL_1.target)], 0.7),
        (LEVEL_1, [MALFORMED, answer(0)], 0.0),
        (LEVEL_1, [lookup("no_such_key"), answer(0)], 0.0),
        (LEVEL_1, [Message("assistant", tool_calls=(ToolCall("search", "{}"),)), answer(0)], 0.0),
        (LEVEL_1, [LIST_KEYS, answer(0)], 0.1),
        (LEVEL_1, [lookup(OTHER_KEY), answer(0)], 0.1),
        (LEVEL_1, [lookup(KEY), answer(0)], 0.3),
        (LEVEL_1, [lookup(KEY), answer(LEVEL_1.target)], 1.0),
        (LEVEL_1, [lookup(KEY)] * 5 + [LIST_KEYS] * 5 + [answer(0)], 0.3),
        (LEVEL_1, [lookup(key) for key in facts("train")] + [answer(0)], 0.3),
        (LEVEL_2, [lookup(LEFT), answer(0)], 0.2),
        (LEVEL_2, [lookup(LEFT), lookup(RIGHT), answer(-1)], 0.3),
        (LEVEL_2, [lookup(LEFT), lookup(LEFT), answer(LEVEL_2.target)], 0.9),
        (LEVEL_2, [lookup(LEFT), lookup(RIGHT), answer(LEVEL_2.target)], 1.0),
    ],
)
def test_the_reward_table(task: Task, messages: Sequence[Message], reward: float):
    results = play(task, messages)
    assert total(results) == pytest.approx(reward)
    assert results[-1].terminated
    assert not any(result.truncated for result in results)


def test_shaped_rewards_are_given_when_earned_so_a_cut_episode_keeps_them():
    assert [round(result.reward, 6) for result in play(LEVEL_2, [lookup(LEFT), LIST_KEYS, lookup(RIGHT)])] == [
        0.2,
        0.0,
        0.1,
    ]


def test_several_calls_in_one_message_are_answered_in_order():
    message = Message("assistant", tool_calls=(*lookup(RIGHT).tool_calls, *lookup(LEFT).tool_calls))
    (result,) = play(LEVEL_2, [message])
    assert [reply.content for reply in result.messages] == [str(facts("train")[key]) for key in (RIGHT, LEFT)]
    assert result.reward == pytest.approx(0.3)


def test_an_answer_beside_a_call_is_not_final():
    message = Message("assistant", f"Answer: {LEVEL_1.target}", tool_calls=lookup(KEY).tool_calls)
    (result,) = play(LEVEL_1, [message])
    assert not result.terminated
    assert result.reward == pytest.approx(0.3)


def test_only_the_final_message_is_graded():
    """N11: the instructions show an answer line, and a tool's reply may hold the right number."""
    results = play(LEVEL_1, [lookup(KEY), Message("assistant", "The answer is above.", thinking="Answer: 1")])
    assert results[-1].reward == 0.0
    assert results[-1].metrics["answered"] == 0.0


def test_malformed_calls_are_answered_up_to_the_cap():
    results = play(LEVEL_1, [MALFORMED] * 3, max_malformed=2)
    assert [result.terminated for result in results] == [False, False, True]
    assert results[0].messages[0].content == "Error: close the tag"
    assert total(results) == 0.0
    assert sum(result.metrics["malformed_calls"] for result in results) == 3.0
    assert results[-1].metrics["answered"] == 0.0


def test_metrics_of_a_finished_episode():
    results = play(LEVEL_2, [lookup(LEFT), lookup("nowhere"), answer(LEVEL_2.target)])
    counts = ("tool_calls", "tool_errors", "malformed_calls", "tool/lookup/calls", "tool/lookup/errors")
    assert {name: sum(r.metrics.get(name, 0.0) for r in results) for name in counts} == {
        "tool_calls": 2.0,
        "tool_errors": 1.0,
        "malformed_calls": 0.0,
        "tool/lookup/calls": 2.0,
        "tool/lookup/errors": 1.0,
    }
    assert results[-1].metrics == {
        "answered": 1.0,
        "correct": 1.0,
        "lookups": 0.5,
        "level_2/correct": 1.0,
    }


def test_an_env_is_one_episode():
    async def main() -> None:
        env = make_env(LEVEL_1)
        with pytest.raises(RuntimeError, match="call reset once"):
            await env.step(answer(1))
        opening = await env.reset(LEVEL_1)
        assert [message.role for message in opening] == ["system", "user"]
        with pytest.raises(RuntimeError, match="make a new one"):
            await env.reset(LEVEL_1)
        await env.step(answer(1))
        with pytest.raises(RuntimeError, match="until it ends"):
            await env.step(answer(1))
        assert [message.role for message in env.messages] == ["system", "user", "assistant"]

    trio.run(main)


def test_tools_are_shown_before_and_after_reset_and_the_factory_pickles():
    factory = pickle.loads(pickle.dumps(functools.partial(make_env, max_malformed=1)))
    assert [spec.name for spec in factory(LEVEL_1).tool_specs] == ["list_fact_keys", "lookup", "calculator"]


def test_envs_share_no_state():
    async def main() -> list[float]:
        one, two = make_env(LEVEL_1), make_env(LEVEL_1)
        await one.reset(LEVEL_1)
        await two.reset(LEVEL_1)
        await one.step(lookup(KEY))
        return [(await env.step(answer(0))).metrics["lookups"] for env in (one, two)]

    assert trio.run(main) == [1.0, 0.0]


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Answer: 1234",
        "answer:1234",
        "ANSWER = 1234.",
        "Answer: 1,234!",
        "Answer: 1234.0",
        "Answer: +1,234.00",
        "**Answer:** 1234",
        "**Answer: 1234**",
        "Answer: **1234.**",
        "Answer: **1234**.",
        "Answer: $1234$",
        "Answer: \\boxed{1234}",
        "Answer: $\\boxed{1,234}$.",
        "The sum of 1000 and 234 follows.\nAnswer: 1234\n\n",
    ],
)
def test_answers_that_are_read(text: str):
    assert read_answer(text) == 1234


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1234",
        "The answer is 1234",
        "Answer:",
        "Answer: 7 or 1234",
        "Answer: 1234, 7",
        "Answer: 1234 7",
        "Answer: 12,34",
        "Answer: 1,2345",
        "Answer: 1234 trees",
        "Answer: about 1234",
        "Answer: 1e3",
        "Answer: ١٢٣٤",
        "Answer: 7\nAnswer: 1234",
        "Answer: 1234\nAnswer: 1234",
        "Answer: 1234\nor so",
        "Answer: 1234 Answer: 7",
        "Answer: \\boxed{7}\\boxed{1234}",
        "Answer: " + "9" * 10_000,
        "Answer: --1234",
        "Answer: .1234",
        "Answer: !1234",
    ],
)
def test_answers_that_are_not_read(text: str):
    assert read_answer(text) != 1234
    if "boxed" not in text:
        assert read_answer(text) is None


@pytest.mark.parametrize("text", ["Answer: -5", "Answer: \N{MINUS SIGN}5", "Answer: -5.0"])
def test_negative_answers(text: str):
    assert read_answer(text) == -5


@given(st.integers(-(10**12), 10**12))
def test_every_number_is_read_back(value: int):
    assert read_answer(f"So it is.\nAnswer: {value:,}.") == read_answer(f"Answer: {value}") == value


@given(st.text())
def test_no_text_breaks_the_parser(text: str):
    read_answer(text)
    read_answer("Answer:" + text)


# --- calculator -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2", "3"),
        ("-7 % 5", "3"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("0.1 + 0.2", "0.3"),
        ("1e3 + 1", "1001"),
        ("1.5 * 2", "3"),
        (" 1 ", "1"),
        ("10 ** 30", "1" + "0" * 30),
        ("10**29 * 10 / 10", "1" + "0" * 29),
        ("+-+1", "-1"),
    ],
)
def test_calculator_values(expression: str, value: str):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "teaches"),
    [
        ("1 / 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("1.0 / 0.0", "division by zero"),
        ("9 ** 9 ** 9", "exponent 387420489 is out of bounds"),
        ("2 ** 1e9", "out of bounds"),
        ("2 ** -1000", "out of bounds"),
        ("10 ** 31", "too large"),
        ("10 ** 30 * 10", "too large"),
        ("1e308 * 10", "too large"),
        ("1e999", "too large"),
        ("1e29 ** 64", "too large"),
        ("9" * 150, "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("1" + "+1" * 200, "at most 200"),
        ("", "not an arithmetic expression"),
        ("   ", "not an arithmetic expression"),
        ("1 +", "not an arithmetic expression"),
        ("1 2", "not an arithmetic expression"),
        ("(" * 150 + "1", "not an arithmetic expression"),
        ("1e", "not an arithmetic expression"),
        ("007", "not an arithmetic expression"),
        ("()", "only numbers"),
        ("e", "only numbers"),
        ("E.e", "only numbers"),
        ("e(1)", "only numbers"),
        ("...", "only numbers"),
        ("abs(1)", "only numbers"),
        ("__import__('os').system('id')", "only numbers"),
        ("[1, 2]", "only numbers"),
        ("1,234 + 1", "1234, not 1,234"),
        ("True + 1", "only numbers"),
        ("1j", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("1 < 2", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("2 ^ 3", "** for powers"),
        ("1 << 99", "only numbers"),
        ("~1", "only numbers"),
        ("x := 1", "only numbers"),
        ("lambda: 1", "only numbers"),
        ("1\n+1", "only numbers"),
        ("1\0", "only numbers"),
        ("١ + ٢", "only numbers"),
        ("1_000", "only numbers"),
        ("5 # note", "only numbers"),
    ],
)
def test_calculator_refusals_are_messages(expression: str, teaches: str):
    with pytest.raises(ToolError, match=re.escape(teaches)):
        calculate(expression)


@given(st.text() | st.text("0123456789eE.+-*/%() \t", max_size=200))
def test_no_expression_breaks_the_calculator_or_keeps_it_busy(expression: str):
    started = time.thread_time()
    try:
        said = calculate(expression)
    except ToolError as error:
        said = str(error)
    assert len(said) < 300
    assert time.thread_time() - started < 1.0


def test_a_calculator_refusal_reaches_the_model():
    call = ToolCall("calculator", '{"expression": "1 / 0"}')
    (result,) = play(LEVEL_1, [Message("assistant", tool_calls=(call,))])
    assert (result.messages[0].name, result.messages[0].content) == ("calculator", "Error: division by zero")
    assert result.reward == 0.0
