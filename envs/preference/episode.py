"""The episode whose answer is compared: a prompt, a response, and where wanted more turns of a fixed user.

Knows messages and tasks; must not know judges or groups. It gives no reward itself: that takes the whole group, or a
rubric.
"""

from collections.abc import Callable, Sequence

from envs.preference.comparison import Conversation, visible
from jaxrl.env import ActionExtra, Env, MessageEnv, MessageStepResult, Observation, StepResult, StopCondition
from jaxrl.types import ENDINGS, Conclusion, Message, StopReason, Task, Trajectory

Lift = Callable[[MessageEnv, Task], Env]
"""How a message-level env becomes tokens: such as `partial(EnvFromMessageEnv, renderer=renderer)`."""

CONVERSATION, FOLLOW_UPS = "conversation", "follow_ups"


def opening(task: Task) -> Conversation:
    """What the model is shown first: what the metadata has under "conversation", else the prompt as the user's."""
    return tuple(task.metadata.get(CONVERSATION, ())) or (Message("user", task.prompt),)


class PreferenceEnv(MessageEnv):
    """One episode. Under "follow_ups" in the metadata a task may hold more texts of the user; each gets a response.

    Metric: `answer_characters`, of all responses.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._left: list[str] = []

    async def reset(self, task: Task) -> Sequence[Message]:
        """Show the opening."""
        if self._messages:
            raise RuntimeError("this PreferenceEnv was already started; an env is one episode, so make a new one")
        self._messages = [*opening(task)]
        self._left = [*task.metadata.get(FOLLOW_UPS, ())]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        """The next text of the user, or the end."""
        self._messages.append(message)
        metrics = {"answer_characters": float(len(message.content))}
        if not self._left:
            return MessageStepResult(terminated=True, metrics=metrics)
        reply = Message("user", self._left.pop(0))
        self._messages.append(reply)
        return MessageStepResult(messages=(reply,), metrics=metrics)

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)


def make_env(task: Task) -> PreferenceEnv:
    """An env factory: a fresh env; the task arrives with `reset`."""
    return PreferenceEnv()


class Contestant(Env):
    """`env`, which lifts `player`. Remembers where the prompt ended, so that a judge can be shown the rest."""

    def __init__(self, player: MessageEnv, env: Env) -> None:
        self.player = player
        self._env = env
        self._prompt: Conversation = ()

    @property
    def prompt(self) -> Conversation:
        """The messages before the first response."""
        return self._prompt

    @property
    def completion(self) -> Conversation:
        """The messages after the prompt, up to the last response."""
        followed = visible(self.player.messages[len(self._prompt) :])
        spoke = [i for i, m in enumerate(followed) if m.role == "assistant"]
        return followed[: spoke[-1] + 1] if spoke else ()

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """The lifted env's."""
        opened = await self._env.initial_observation()
        self._prompt = tuple(self.player.messages)
        return opened

    async def step(self, action: Sequence[int], *, extra: ActionExtra | None = None) -> StepResult:
        """The lifted env's."""
        return await self._env.step(action, extra=extra)

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """The lifted env's."""
        return await self._env.conclude(reason)

    async def close(self) -> None:
        """Close the lifted env."""
        await self._env.close()

    def describe(self) -> str:
        """The lifted env's name."""
        return self._env.describe()


def finished(trajectory: Trajectory, completion: Conversation) -> bool:
    """Whether an episode ended with an answer: a last turn that was not cut, could be read, and says something."""
    cut = ENDINGS[trajectory.stop_reason].overlong or trajectory.stop_reason in _UNFINISHED
    return not cut and bool(completion) and bool(completion[-1].content.strip() or completion[-1].calls)


_UNFINISHED = (StopReason.PARSE_FAILURE, StopReason.TIMEOUT)
