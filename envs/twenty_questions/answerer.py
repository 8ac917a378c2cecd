"""Who answers: the table by default, or any model that answers messages, such as one behind an endpoint.

Only yes, no or unknown ever reaches the player, whatever an answering model said, so it cannot give the secret away.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import trio

from envs.twenty_questions.answers import answer_about, words
from envs.twenty_questions.knowledge import Answer
from jaxrl.types import Message

INSTRUCTIONS = (
    "You answer in a game of twenty questions. The secret is: {thing}. "
    "Reply to each question about it with one word: yes, no or unknown."
)


class Answerer(Protocol):
    """Answers the questions of one episode."""

    async def answer(self, thing: str, question: str) -> Answer:
        """Whether it is so, of the secret."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...


class Model(Protocol):
    """Anyone who answers a conversation, such as `jaxrl.runtime.opponents.Hosted`."""

    async def reply(self, messages: Sequence[Message]) -> Message:
        """The assistant message that follows."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...


MakeAnswerer = Callable[[], Answerer]
"""Makes the answerer of one episode."""


class TableAnswerer:
    """Looks it up in `knowledge`."""

    async def answer(self, thing: str, question: str) -> Answer:
        """Raises ValueError for a thing that is not in the table."""
        await trio.lowlevel.checkpoint()
        return answer_about(thing, question)

    async def close(self) -> None:
        """Nothing is held."""
        return


class ModelAnswerer:
    """Asks a model that is told the secret. Each question stands alone. Owns the model it was given."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def answer(self, thing: str, question: str) -> Answer:
        """The first of its words that is an answer; unknown when none is."""
        asked = (Message("system", INSTRUCTIONS.format(thing=thing)), Message("user", question))
        said = await self._model.reply(asked)
        known = {answer.value: answer for answer in Answer}
        return next((known[word] for word in words(said.content) if word in known), Answer.UNKNOWN)

    async def close(self) -> None:
        """Close the model."""
        await self._model.close()


def answered_by(make_model: Callable[[], Model]) -> MakeAnswerer:
    """Answerers that ask a model, made anew for each episode."""
    return partial(_asking, make_model)


def _asking(make_model: Callable[[], Model]) -> Answerer:
    return ModelAnswerer(make_model())
