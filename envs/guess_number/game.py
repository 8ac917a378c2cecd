"""The guessing game: one secret, a budget of guesses, "higher" or "lower" in between.

Knows the rules and the texts. It must not know tokens, nor the scripted players.

Running out of guesses is losing by the rules, so it terminates the episode; the turn limit of a run is another
matter and belongs to the runtime. Texts are short because a byte-level model pays one token a byte.
"""

import re
from collections.abc import Sequence

from jaxrl.env import MessageEnv, MessageStepResult
from jaxrl.types import Message, Task

HIGHER, LOWER = "higher", "lower"

_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def opening(task: Task) -> list[Message]:
    """The messages an episode starts with."""
    return [Message("user", task.prompt)]


def read_guess(text: str, high: int) -> int | None:
    """The guess in `text`: its only number, whole and in [1, high]; None otherwise ("7 or 8" is no guess)."""
    numbers = _NUMBER.findall(text)
    if len(numbers) != 1 or len(numbers[0]) > 9 or not numbers[0].isdigit():
        return None
    guess = int(numbers[0])
    return guess if 1 <= guess <= high else None


class GuessNumberEnv(MessageEnv):
    """One episode. Reward 1.0 on the turn that finds the secret, else 0.0."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._secret = self._high = self._turns = 0
        self._guesses = self._valid = 0
        self._done = True

    async def reset(self, task: Task) -> Sequence[Message]:
        return self.start(task)

    async def step(self, message: Message) -> MessageStepResult:
        return self.guess(message)

    def start(self, task: Task) -> Sequence[Message]:
        """`reset`, for callers that are not async: nothing here waits."""
        if self._messages:
            raise RuntimeError("this GuessNumberEnv was already started; an env is one episode, so make a new one")
        self._secret, self._high, self._turns = task.target, task.metadata["high"], task.metadata["turns"]
        if not 1 <= self._secret <= self._high:
            raise ValueError(f"task target is {self._secret}; expected a secret in [1, {self._high}]")
        self._messages = opening(task)
        self._done = False
        return tuple(self._messages)

    def guess(self, message: Message) -> MessageStepResult:
        """`step`, for callers that are not async."""
        if self._done:
            raise RuntimeError("no episode is running; call reset once, and step only until it ends")
        guess = read_guess(message.content, self._high)
        self._guesses += 1
        self._valid += guess is not None
        self._messages.append(message)
        won = guess == self._secret
        self._done = won or self._guesses == self._turns
        if self._done:
            return MessageStepResult(terminated=True, reward=float(won), metrics=self._metrics(won))
        reply = Message("user", self._reply(guess))
        self._messages.append(reply)
        return MessageStepResult(messages=(reply,))

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    def _reply(self, guess: int | None) -> str:
        if guess is None:
            return f"Say 1-{self._high}."
        return HIGHER if self._secret > guess else LOWER

    def _metrics(self, won: bool) -> dict[str, float]:
        guesses = float(self._guesses)
        return {"success": float(won), "guesses": guesses, "valid_guesses": self._valid / guesses}


def make_env(task: Task) -> GuessNumberEnv:
    """An env factory: a fresh env; the task arrives with `reset`."""
    return GuessNumberEnv()
