"""A request over HTTP until it is answered: what may pass is tried again, what does not is named.

Knows httpx; no service and no format. Whatever a server fails at is an EnvironmentFault, which is never a reward.
Nothing is held between two requests.
"""

import functools
import math
import random
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import trio

from jaxrl.env import EnvironmentFault

_TRANSIENT = frozenset({408, 409, 425, 429})  # and every 5xx
_LONGEST_WAIT = 30.0
SHOWN = 300
"""So many characters of what a server said are in an error."""

_JITTER = random.SystemRandom()  # has no state: games may draw from the global generator, and must not see a difference


@dataclass(frozen=True)
class Waiting:
    """How long to wait for an answer, and how often to ask.

    timeout: seconds for one attempt. retries: attempts after the first, for 408, 409, 425, 429, 5xx and broken
    connections. patience: seconds in all, waiting included. backoff: seconds before the first retry, at most, doubled
    each time, of which half is random, unless the server names its own; never more than 30.
    """

    timeout: float
    retries: int
    patience: float
    backoff: float

    def __post_init__(self) -> None:
        for name in ("timeout", "patience", "backoff"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number of seconds")
        if self.retries < 0:
            raise ValueError(f"retries={self.retries}: expected 0 or more")


async def fetch(
    method: str,
    url: str,
    waiting: Waiting,
    *,
    content: bytes = b"",
    headers: Mapping[str, str] | None = None,
    longest: int = 32 * 2**20,
) -> bytes:
    """The body of a good response, of at most `longest` bytes. Anything else is an EnvironmentFault that says what.

    The fault does not name the server: whoever knows what it is for does. content: JSON.
    """
    failures: list[str] = []
    with trio.move_on_after(waiting.patience):
        async with httpx.AsyncClient(headers=headers, verify=_certificates(), timeout=None) as client:
            for attempt in range(waiting.retries + 1):
                try:
                    with trio.fail_after(waiting.timeout):
                        return await _attempt(client, method, url, content, longest)
                except trio.TooSlowError:
                    failures.append(f"no whole response within {waiting.timeout:g} s")
                    wait = None
                except _TryAgain as trouble:
                    failures.append(str(trouble))
                    wait = trouble.after
                if attempt < waiting.retries:
                    wait = wait or _JITTER.uniform(0.5, 1.0) * waiting.backoff * 2**attempt
                    await trio.sleep(min(wait, _LONGEST_WAIT))
    raise EnvironmentFault(
        f"no answer after {len(failures)} failed attempts (retries={waiting.retries}, patience={waiting.patience:g}); "
        f"the last: {failures[-1] if failures else 'not even one ended in time'}. Is the server running, and is the "
        "address right?"
    )


def check_url(url: str, *, expected: str) -> None:
    """Refuse what is no address, and, without repeating it, one in which a secret could hide: errors name it.

    expected: such as "a base URL such as https://api.example.com/v1".
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise ValueError(f"url is not a URL: expected {expected}") from None
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError(f"url has a user, a query or a fragment, which errors would show: expected {expected}")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url={url!r}: expected {expected}")


class _TryAgain(Exception):
    """An attempt failed in a way that may pass. `after`: seconds the server asked to wait."""

    def __init__(self, text: str, *, after: float | None = None) -> None:
        super().__init__(text)
        self.after = after


async def _attempt(client: httpx.AsyncClient, method: str, url: str, content: bytes, longest: int) -> bytes:
    kind = {"Content-Type": "application/json"} if content else {}
    try:
        async with client.stream(method, url, content=content, headers=kind) as response:
            said = await _read(response, longest)
    except httpx.RequestError as error:
        raise _TryAgain(f"{type(error).__name__}: {error}") from None
    if response.is_success:
        return said
    status = f"status {response.status_code}: {said[:SHOWN].decode(errors='replace')}"
    if response.status_code in _TRANSIENT or response.status_code >= 500:
        raise _TryAgain(status, after=_seconds(response.headers.get("Retry-After")))
    raise EnvironmentFault(f"{status} (not tried again)")


async def _read(response: httpx.Response, longest: int) -> bytes:
    content = bytearray()
    # httpx reads through nested generators. Only an exception from the innermost, as a cancellation is, closes all.
    with trio.CancelScope() as scope:
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > longest:
                scope.cancel()
    if len(content) > longest:
        raise EnvironmentFault(f"the response is longer than {longest} bytes")
    return bytes(content)


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
