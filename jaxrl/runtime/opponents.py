"""Who an environment plays against, or is judged by: a function, a hosted model, or a frozen policy of this run.

An environment holds an `Opponent`, asks it for replies and closes it in its own `close`, whatever it is. All of them
can be pickled until they are first asked. Knows renderers and the Sampler protocol; must not know games or rewards.
What an opponent fails at is an EnvironmentFault: the policy earned nothing by it.
"""

import functools
import json
import math
import os
import random
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import trio

from jaxrl.chat.renderer import Renderer
from jaxrl.chat.transcript import Transcript, act, begin, observe
from jaxrl.env import EnvironmentFault
from jaxrl.runtime.episode import episode_seed
from jaxrl.runtime.sampler import Sampler, Session
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

_TRANSIENT = frozenset({408, 409, 429})  # and every 5xx
_LONGEST_BODY = 4 * 2**20
_LONGEST_WAIT = 30.0
_TELLING = 8  # so many characters of a key in a row are not shown
_JITTER = random.SystemRandom()  # has no state: games may draw from the global generator, and must not see a difference


@dataclass(frozen=True)
class Hosted:
    """A model behind an OpenAI-compatible endpoint; `url` is what its documentation calls the base URL.

    api_key_env: the environment variable that holds the key, read at each reply; None sends none. timeout: seconds
    for one attempt. retries: attempts after the first, for 408, 409, 429, 5xx and broken connections. patience:
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
        _check_url(self.url)
        for name in ("timeout", "patience", "backoff"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number of seconds")
        if self.retries < 0:
            raise ValueError(f"retries={self.retries}: expected 0 or more")

    async def reply(self, messages: Sequence[Message]) -> Message:
        """One chat completion. Opens a connection and closes it."""
        key = _api_key(self.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body: dict[str, Any] = {"model": self.model, "messages": [_spoken(m) for m in messages]}
        body |= {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        body |= {} if self.temperature is None else {"temperature": self.temperature}
        failures: list[str] = []
        with trio.move_on_after(self.patience):
            async with httpx.AsyncClient(headers=headers, verify=_certificates(), timeout=None) as client:
                for attempt in range(self.retries + 1):
                    try:
                        return _answer(await self._attempt(client, body))
                    except _TryAgain as trouble:
                        failures.append(_without(key, str(trouble)))
                        wait = trouble.after or _JITTER.uniform(0.5, 1.0) * self.backoff * 2**attempt
                    except EnvironmentFault as fault:
                        raise EnvironmentFault(f"{self._name}: {_without(key, str(fault))}") from None
                    if attempt < self.retries:
                        await trio.sleep(min(wait, _LONGEST_WAIT))
        raise EnvironmentFault(
            f"{self._name}: no reply after {len(failures)} failed attempts (retries={self.retries}, "
            f"patience={self.patience:g}); the last: {failures[-1] if failures else 'not even one ended in time'}"
        )

    async def close(self) -> None:
        """Nothing is held between replies."""
        return

    @property
    def _name(self) -> str:
        return f"opponent {self.model!r} at {self.url}"

    async def _attempt(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> bytes:
        """The body of a good response."""
        try:
            with trio.fail_after(self.timeout):
                async with client.stream("POST", f"{self.url.rstrip('/')}/chat/completions", json=body) as response:
                    content = await _read(response)
        except trio.TooSlowError:
            raise _TryAgain(f"no whole response within {self.timeout:g} s") from None
        except httpx.RequestError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from None
        if response.status_code == 200:
            return content
        said = f"status {response.status_code}: {content[:2000].decode(errors='replace')}"
        if response.status_code in _TRANSIENT or response.status_code >= 500:
            raise _TryAgain(said, after=_seconds(response.headers.get("Retry-After")))
        raise EnvironmentFault(f"{said} (not tried again; check url, model and api_key_env)")


class _TryAgain(Exception):
    """An attempt failed in a way that may pass. `after`: seconds the server asked to wait."""

    def __init__(self, text: str, *, after: float | None = None) -> None:
        super().__init__(text)
        self.after = after


def _check_url(url: str) -> None:
    """Refuse, without repeating it, a URL in which a secret could hide: the URL is part of every error message."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise ValueError("url is not a URL: expected a base URL such as https://api.example.com/v1") from None
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError("url has a user, a query or a fragment: give the bare base URL, and the key in api_key_env")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url={url!r}: expected a base URL such as https://api.example.com/v1")


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
    """The text, shortened; when a server repeats the key in it, whole, in part or escaped, nothing of it."""
    if key and any(key[i : i + _TELLING] in text for i in range(max(1, len(key) - _TELLING + 1))):
        return "(what the server said repeats the API key, so it is not shown)"
    return text[:300]


def _spoken(message: Message) -> dict[str, str]:
    if message.tool_calls or message.malformed_calls or message.role == "tool":
        raise ValueError(
            f"a message of role {message.role!r} with {len(message.tool_calls)} tool calls was to be sent to a hosted "
            "opponent: they converse in plain text; put what matters in the content"
        )
    return {"role": message.role, "content": message.content}


async def _read(response: httpx.Response) -> bytes:
    content = bytearray()
    # httpx reads through nested generators. Only an exception from the innermost, as a cancellation is, closes all.
    with trio.CancelScope() as scope:
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > _LONGEST_BODY:
                scope.cancel()
    if len(content) > _LONGEST_BODY:
        raise EnvironmentFault(f"the response is longer than {_LONGEST_BODY} bytes")
    return bytes(content)


def _answer(content: bytes) -> Message:
    """The reply in a chat completion. Whatever is not exactly that is an EnvironmentFault."""
    try:
        (choice,) = json.loads(content.decode())["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        shown = content[:2000].decode(errors="replace")
        raise EnvironmentFault(f"no chat completion with one choice ({type(error).__name__}): {shown!r}") from None
    if reason != "stop":
        raise EnvironmentFault(f"finish_reason={reason!r}: expected 'stop', a whole reply; is max_tokens too small?")
    if not isinstance(text, str) or not text.strip():
        raise EnvironmentFault(f"the content of the reply is {text!r}: expected some text")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise EnvironmentFault("the reply holds half a surrogate pair, which is no text")
    return Message("assistant", text)


def _seconds(header: str | None) -> float | None:
    """The seconds of a Retry-After; None for a date, which needs a clock that agrees with the server's."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than a request."""
    return httpx.create_ssl_context()


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
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: expected at least 1")
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
