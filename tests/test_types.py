"""What an author hands over is looked at where it is made, so that the line of a mistake is in its traceback."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxrl.env import MessageStepResult, StepResult
from jaxrl.types import Conclusion, Message, Task

TRY_AGAIN = Message("user", "try again")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Message("user", 3), "Message(role='user'): content=3: expected a str"),
        (lambda: Message("user", None), "Message(role='user'): content=None: expected a str"),
        (lambda: Task(None), "Task: prompt=None: expected a str"),
        (lambda: Task({"q": 1}), "Task: prompt={'q': 1}: expected a str"),
        (lambda: MessageStepResult(messages=["try again"]), "messages=['try again']: expected a sequence of Message"),
        (lambda: MessageStepResult(messages="try again"), "messages='try again': expected a sequence of Message"),
        (lambda: MessageStepResult(messages=TRY_AGAIN), "messages=Message(role='user', content='try again'"),
        (lambda: MessageStepResult(messages=None), "messages=None: expected a sequence of Message"),
    ],
)
def test_what_is_no_text_or_no_message_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(TypeError, match=re.escape(says)):
        make()


MAKERS: dict[str, Callable[..., Any]] = {
    "MessageStepResult": MessageStepResult,
    "StepResult": lambda reward=0.0, **rest: StepResult(reward, True, **rest),
    "Conclusion": Conclusion,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"reward": None}, "reward=None: expected a number"),
        ({"reward": "1.0"}, "reward='1.0': expected a number"),
        ({"metrics": {"x": None}}, "metrics['x']=None: expected a number"),
        ({"metrics": {"n": 1.0, "won": "yes"}}, "metrics['won']='yes': expected a number"),
        ({"metrics": None}, "metrics=None: expected a mapping of names to numbers"),
        ({"metrics": [1.0]}, "metrics=[1.0]: expected a mapping of names to numbers"),
    ],
)
def test_what_is_no_number_is_refused_with_its_name(kind: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(f'{kind}: {says}')}$"):
        MAKERS[kind](**given)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "number", [1, True, 0.5, float("nan"), np.float32(1), np.int64(2), np.bool_(True), np.array(0.5)]
)
def test_numbers_of_any_kind_are_taken_as_they_are(kind: str, number: Any) -> None:
    made = MAKERS[kind](reward=number, metrics={"x": number})
    assert made.reward is number
    assert made.metrics["x"] is number


def test_an_empty_prompt_is_for_envs_that_do_not_ask_it() -> None:
    assert Task("").prompt == ""
