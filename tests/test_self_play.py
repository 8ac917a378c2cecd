"""A run against its own past: the adapter of a finished run plays the other side of every episode."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from small_run import BYTES, small, write_model

from jaxrl.chat.families import renderer_for
from jaxrl.env import MessageEnv, MessageStepResult
from jaxrl.runtime.opponents import Frozen
from jaxrl.runtime.record import read_records
from jaxrl.train import main
from jaxrl.types import Message, Task

pytestmark = pytest.mark.slow


class Duel(MessageEnv):
    """Each turn the other side answers; the longer text wins the turn."""

    answers: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self._opponent = Frozen(renderer_for(BYTES), max_tokens=4, adapter="past", timeout=60)
        self._messages: list[Message] = []

    async def reset(self, task: Task) -> Sequence[Message]:
        self._messages = [Message("user", task.prompt)]
        return tuple(self._messages)

    async def step(self, message: Message) -> MessageStepResult:
        self._messages.append(message)
        theirs = [Message("user" if m.role == "assistant" else "assistant", m.content) for m in self._messages[1:]]
        answer = await self._opponent.reply(theirs)
        Duel.answers.append(answer.content)
        reply = Message("user", answer.content)
        self._messages.append(reply)
        won = float(len(message.content) > len(answer.content))
        return MessageStepResult(terminated=len(self._messages) == 5, messages=(reply,), reward=won)

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    async def close(self) -> None:
        await self._opponent.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "late")


def test_a_past_adapter_plays_by_name_and_is_never_trained(model: str, tmp_path: Path) -> None:
    past = main(small(model, tmp_path / "past", max_steps=2))
    data = {"env_factory": lambda task: Duel(), "val_tasks": ()}
    Duel.answers.clear()
    config = small(
        model, tmp_path / "duel", max_steps=2, data=data, frozen_policies={"past": str(past)}, num_groups_to_log=9
    )
    run = main(config)
    episodes = [e for file in sorted((run / "rollouts").glob("step_*")) for e in read_records(file)]
    assert len(episodes) == 2 * 2 * 3
    answered = sum(len(e["turns"]) - (e["stop_reason"] != "terminated") for e in episodes)
    assert len(Duel.answers) == answered > 0, "every turn but one that was cut short"
    versions = {(e["step"], v) for e in episodes for turn in e["turns"] for v in turn["versions"]}
    assert versions == {(0, 0), (1, 1)}, "only the policy's own tokens are in the record"


def test_a_past_that_is_not_there_is_named_before_a_model_is_loaded(model: str, tmp_path: Path) -> None:
    for changes in ({}, {"lora": None}):
        with pytest.raises(ValueError, match=r"frozen_policies.*'past'"):
            main(small(model, tmp_path / "run", frozen_policies={"past": str(tmp_path / "nowhere")}, **changes))
    assert not (tmp_path / "run").exists()
