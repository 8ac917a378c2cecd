"""Twenty questions: find out a secret thing by asking what is or is not so of it.

Knows the turns and the reward. It must not know who answers, nor the scripted players. A turn is a question or a
guess; a wrong guess is answered with no, and costs what a question costs. Running out of turns is losing by the
rules, so it terminates the episode.
"""

from collections.abc import Sequence

from envs.twenty_questions.answerer import Answerer, MakeAnswerer, TableAnswerer
from envs.twenty_questions.answers import thing_guessed
from envs.twenty_questions.knowledge import THINGS, Answer
from jaxrl.env import MessageEnv, MessageStepResult
from jaxrl.types import Message, Task

COST = 0.02
"""What each turn before the right guess takes off the reward."""

_KNOWN = frozenset(THINGS)


def opening(task: Task) -> list[Message]:
    """The messages an episode starts with."""
    return [Message("user", task.prompt)]


class TwentyQuestionsEnv(MessageEnv):
    """One episode. Reward: 1 less `cost` for every turn before the one that names the secret; 0 when none does."""

    def __init__(self, answerer: Answerer, *, cost: float = COST) -> None:
        self._answerer, self._cost = answerer, cost
        self._messages: list[Message] = []
        self._secret, self._turns = "", 0
        self._asked = self._guessed = self._unanswered = 0
        self._done = True

    async def reset(self, task: Task) -> Sequence[Message]:
        """Show the task's prompt."""
        if self._messages:
            raise RuntimeError("this TwentyQuestionsEnv was already started; an env is one episode, so make a new one")
        self._secret, self._turns = task.target, task.metadata["turns"]
        if not (self._cost >= 0 and self._cost * (self._turns - 1) < 1):
            raise ValueError(f"cost={self._cost} with {self._turns} turns: a late success has to be worth something")
        self._messages = opening(task)
        self._done = False
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """A guess is checked, anything else is a question."""
        if self._done:
            raise RuntimeError("no episode is running; call reset once, and step only until it ends")
        self._messages.append(message)
        self._asked += 1
        guess = thing_guessed(message.content, known=_KNOWN | {self._secret})
        won = guess is not None and guess == self._secret
        self._guessed += guess is not None
        self._done = won or self._asked == self._turns
        if self._done:
            reward = 1.0 - self._cost * (self._asked - 1) if won else 0.0
            return MessageStepResult(terminated=True, reward=reward, metrics=self._metrics(won))
        answer = Answer.NO if guess is not None else await self._answerer.answer(self._secret, message.content)
        self._unanswered += answer is Answer.UNKNOWN
        reply = Message("user", answer.value)
        self._messages.append(reply)
        return MessageStepResult(messages=(reply,))

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    async def close(self) -> None:
        """Close the answerer."""
        await self._answerer.close()

    def _metrics(self, won: bool) -> dict[str, float]:
        return {
            "success": float(won),
            "turns": float(self._asked),
            "guesses": float(self._guessed),
            "unknown_answers": float(self._unanswered),
        }


def make_env(task: Task, *, answerer: MakeAnswerer = TableAnswerer, cost: float = COST) -> TwentyQuestionsEnv:
    """An env factory: a fresh env; the task arrives with `reset`."""
    return TwentyQuestionsEnv(answerer(), cost=cost)
