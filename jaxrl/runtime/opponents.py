"""Who an environment plays against, or is judged by: a function, a hosted model, or a frozen policy of this run.

An environment holds an `Opponent`, asks it for replies and closes it in its own `close`, whatever it is. All of them
can be pickled until they are first asked. Knows renderers and the Sampler protocol; must not know games or rewards.
What an opponent fails at is an EnvironmentFault: the policy earned nothing by it.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from jaxrl.chat.renderer import Renderer
from jaxrl.chat.transcript import Transcript, act, begin, observe
from jaxrl.env import EnvironmentFault
from jaxrl.http import SHOWN, Waiting, check_url, fetch
from jaxrl.runtime.episode import episode_seed
from jaxrl.runtime.sampler import Sampler, Session
from jaxrl.settings import at_least
from jaxrl.types import Message, Sample, common_prefix


class Opponent(Protocol):
    """Anyone who answers a conversation."""

    async def reply(self, messages: Sequence[Message]) -> Message:
        """The assistant message that follows `messages`: the whole conversation as this opponent sees it."""
        ...

    async def close(self) -> None:
        """Release what it holds. For the env that owns it to call in its own close."""
        ...


# --- scripted ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scripted:
    """A function of the conversation."""

    function: Callable[[Sequence[Message]], Message]

    async def reply(self, messages: Sequence[Message]) -> Message:
        """What the function says."""
        await trio.lowlevel.checkpoint()
        return self.function(messages)

    async def close(self) -> None:
        """Nothing is held."""
        return


# --- hosted --------------------------------------------------------------------------------------

_LONGEST_BODY = 4 * 2**20
_TELLING = 8  # so many characters of a key in a row are not shown
ADDRESS = "the bare base URL, such as https://api.example.com/v1, and the key in api_key_env"


@dataclass(frozen=True)
class Hosted:
    """A model behind an OpenAI-compatible endpoint; `url` is what its documentation calls the base URL.

    api_key_env: the environment variable that holds the key, read at each reply; None sends none. timeout: seconds
    for one attempt. retries: attempts after the first, for 408, 409, 425, 429, 5xx and broken connections. patience:
    seconds for one reply in all, waiting included. backoff: seconds before the first retry, doubled each time unless
    the server names its own. max_tokens, temperature: None leaves them to the server.
    A reply that was cut, is empty or is no reply is an EnvironmentFault, as is running out of retries or patience.
    """

    url: str
    model: str
    api_key_env: str | None = None
    timeout: float = 60.0
    retries: int = 4
    patience: float = 180.0
    backoff: float = 0.5
    max_tokens: int | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        check_url(self.url, expected=ADDRESS)
        _ = self._waiting  # which checks the rest

    @property
    def _waiting(self) -> Waiting:
        return Waiting(self.timeout, self.retries, self.patience, self.backoff)

    async def reply(self, messages: Sequence[Message]) -> Message:
        """One chat completion. Opens a connection and closes it."""
        key = _api_key(self.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body: dict[str, Any] = {"model": self.model, "messages": [_spoken(m) for m in messages]}
        body |= {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        body |= {} if self.temperature is None else {"temperature": self.temperature}
        url, content = f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode()
        try:
            said = await fetch("POST", url, self._waiting, content=content, headers=headers, longest=_LONGEST_BODY)
            return _answer(said)
        except EnvironmentFault as fault:
            raise EnvironmentFault(f"{self._name}: {_without(key, str(fault))}") from None

    async def close(self) -> None:
        """Nothing is held between replies."""
        return

    @property
    def _name(self) -> str:
        return f"opponent {self.model!r} at {self.url}"


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"api_key_env={variable!r}: the environment has no such variable, or it is empty; export it")
    if not (key.isascii() and key.isprintable() and " " not in key):  # the HTTP library would quote it in its error
        raise ValueError(f"api_key_env={variable!r}: its value has spaces or characters that no HTTP header can hold")
    return key


def _without(key: str | None, text: str) -> str:
    """The text; when a server repeats the key in it, whole, in part or escaped, nothing of it."""
    if key and any(key[i : i + _TELLING] in text for i in range(max(1, len(key) - _TELLING + 1))):
        return "(what the server said repeats the API key, so it is not shown)"
    return text


def _spoken(message: Message) -> dict[str, str]:
    if message.tool_calls or message.malformed_calls or message.role == "tool":
        raise ValueError(
            f"a message of role {message.role!r} with {len(message.tool_calls)} tool calls was to be sent to a hosted "
            "opponent: they converse in plain text; put what matters in the content"
        )
    return {"role": message.role, "content": message.content}


def _answer(content: bytes) -> Message:
    """The reply in a chat completion. Whatever is not exactly that is an EnvironmentFault."""
    try:
        (choice,) = json.loads(content.decode())["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        shown = content[:SHOWN].decode(errors="replace")
        raise EnvironmentFault(f"no chat completion with one choice ({type(error).__name__}): {shown!r}") from None
    if reason != "stop":
        raise EnvironmentFault(f"finish_reason={reason!r}: expected 'stop', a whole reply; is max_tokens too small?")
    if not isinstance(text, str) or not text.strip():
        raise EnvironmentFault(f"the content of the reply is {text!r}: expected some text")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise EnvironmentFault("the reply holds half a surrogate pair, which is no text")
    return Message("assistant", text)


# --- frozen --------------------------------------------------------------------------------------

current_sampler: ContextVar[Sampler] = ContextVar("current_sampler")
"""Whom the policies of this task's environments sample from."""

_episode: ContextVar[int] = ContextVar("seed_of_the_episode", default=0)


@contextmanager
def sampling_from(sampler: Sampler, *, seed: int = 0) -> Iterator[None]:
    """For the rollout: envs made or played in this block sample their opponents from `sampler`.

    seed: of the episode, so that the opponents of two episodes differ, and those of a repeated one do not.
    """
    tokens = current_sampler.set(sampler), _episode.set(seed)
    try:
        yield
    finally:
        current_sampler.reset(tokens[0])
        _episode.reset(tokens[1])


class NoSampler(RuntimeError):
    """An opponent was asked to play where nothing samples."""


class Frozen:
    """A policy sampled from the run's own sampler, such as a past adapter. Make one per episode; it owns its session.

    adapter: the name under which the sampler holds the policy; None is the policy that is being trained. seed: tells
    several opponents in one episode apart. timeout: seconds for a turn, waiting for a place in the sampler included.
    Its context grows as an episode's does: what it sampled stays id for id, and only new messages are prefilled. A
    turn that is cut by `max_tokens`, or is malformed, is a bad move like any other, so it is returned as text.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        adapter: str | None = None,
        seed: int = 0,
        timeout: float = 300.0,
    ) -> None:
        at_least("max_tokens", max_tokens, 1)
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: expected a positive number of seconds")
        self._renderer, self._max_tokens, self._temperature = renderer, max_tokens, temperature
        self._adapter, self._seed, self._timeout = adapter, seed, timeout
        self._lease: AsyncExitStack | None = None
        self._session: Session | None = None
        self._transcript: Transcript | None = None
        self._heard: tuple[Message, ...] = ()

        self._over = False

    async def reply(self, messages: Sequence[Message]) -> Message:
        """Sample the next turn. Messages that do not begin with those of the turn before start the context anew."""
        session = await self._open()
        transcript = self._extended(messages)
        action = await self._sample(session, transcript)
        parsed = self._renderer.parse(action.tokens)
        self._transcript = act(transcript, action.tokens)
        self._heard = (*messages, parsed.message)
        return parsed.message

    async def close(self) -> None:
        """Give the session back, and sample no more."""
        self._over = True
        lease, self._lease, self._session = self._lease, None, None
        if lease is not None:
            await lease.aclose()

    async def _open(self) -> Session:
        if self._over:
            raise RuntimeError("reply() after close(): a Frozen opponent is of one episode; make another")
        if self._session is None:
            sampler = current_sampler.get(None)
            if sampler is None:
                raise NoSampler(
                    "a Frozen opponent was asked where there is no sampler: put the episode inside "
                    "`with sampling_from(sampler):` (jaxrl.runtime.opponents), as a rollout does"
                )
            seed = episode_seed(_episode.get(), "opponent", self._seed)
            named = {} if self._adapter is None else {"policy": self._adapter}
            self._lease = AsyncExitStack()
            self._session = await self._lease.enter_async_context(sampler.session(group=None, seed=seed, **named))
        return self._session

    def _extended(self, messages: Sequence[Message]) -> Transcript:
        """The context of the next turn. Of its own turns, what was thought may be missing in `messages`."""
        known = len(self._heard)
        if self._transcript is None or list(map(_said, messages[:known])) != list(map(_said, self._heard)):
            return begin(self._renderer, messages)
        transcript, _ = observe(self._transcript, messages[known:])
        return transcript

    async def _sample(self, session: Session, transcript: Transcript) -> Sample:
        room = session.capacity - len(transcript.tokens)
        if room < 1:
            raise EnvironmentFault(
                f"the conversation of a Frozen opponent has {len(transcript.tokens)} tokens, and its sampler holds "
                f"{session.capacity}: shorten the game, or give the engine a longer context"
            )
        shared = common_prefix(session.tokens, transcript.tokens)
        session.rewind(shared)
        with trio.move_on_after(self._timeout):
            return await session.sample(
                transcript.tokens[shared:],
                stop=self._renderer.stop,
                max_tokens=min(self._max_tokens, room),
                temperature=self._temperature,
            )
        raise EnvironmentFault(
            f"a Frozen opponent got no turn within {self._timeout:g} s: when every place in the sampler is held by an "
            "episode that waits for its opponent, none is left; play fewer episodes at once, or give it more slots"
        )


def _said(message: Message) -> tuple[Any, ...]:
    return message.role, message.content, message.tool_calls, message.malformed_calls
