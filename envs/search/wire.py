"""JSON over HTTP, with what may pass tried again and what does not named. Knows httpx; no retrieval contract.

Whatever a server fails at is an EnvironmentFault, which is never a reward. Nothing is held between two requests.
"""

import functools
import json
import math
import random
import ssl
from dataclasses import dataclass
from typing import Any

import httpx
import trio

from jaxrl.env import EnvironmentFault

_TRANSIENT = frozenset({408, 409, 425, 429})  # and every 5xx
_LONGEST_BODY = 32 * 2**20
_LONGEST_WAIT = 30.0
_SHOWN = 300
_JITTER = random.SystemRandom()  # has no state, so it disturbs nobody's draws


@dataclass(frozen=True)
class Server:
    """Where it is and how long to wait for it.

    url: http(s)://host:port, with a path if it has one. timeout: seconds for one attempt. retries: attempts after the
    first, for 408, 409, 425, 429, 5xx and broken connections. patience: seconds for one request in all, waiting
    included. backoff: seconds before the first retry, doubled each time.
    """

    url: str
    timeout: float = 30.0
    retries: int = 4
    patience: float = 120.0
    backoff: float = 0.5

    def __post_init__(self) -> None:
        check_url(self.url)
        for name in ("timeout", "patience", "backoff"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive number of seconds")
        if self.retries < 0:
            raise ValueError(f"retries={self.retries}: expected 0 or more")

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the server answers. Raises EnvironmentFault, naming the server, for anything else."""
        where = f"{method} {self.url.rstrip('/')}{path}"
        failures: list[str] = []
        with trio.move_on_after(self.patience):
            for attempt in range(self.retries + 1):
                try:
                    return _parsed(await self._attempt(method, path, body), where)
                except _TryAgain as trouble:
                    failures.append(str(trouble))
                if attempt < self.retries:
                    await trio.sleep(min(_JITTER.uniform(0.5, 1.0) * self.backoff * 2**attempt, _LONGEST_WAIT))
        raise EnvironmentFault(
            f"{where}: no answer after {len(failures)} failed attempts (retries={self.retries}, "
            f"patience={self.patience:g}); the last: {failures[-1] if failures else 'not even one ended in time'}. "
            "Is the server running, and is the address right?"
        )

    async def _attempt(self, method: str, path: str, body: Any) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if content else {}
        try:
            with trio.fail_after(self.timeout):
                async with (
                    httpx.AsyncClient(verify=_certificates(), timeout=None) as client,
                    client.stream(method, self.url.rstrip("/") + path, content=content, headers=headers) as response,
                ):
                    said = await _read(response)
        except trio.TooSlowError:
            raise _TryAgain(f"no whole response within {self.timeout:g} s") from None
        except httpx.RequestError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from None
        if response.is_success:
            return said
        status = f"status {response.status_code}: {said[:_SHOWN].decode(errors='replace')}"
        if response.status_code in _TRANSIENT or response.status_code >= 500:
            raise _TryAgain(status)
        raise EnvironmentFault(f"{method} {self.url.rstrip('/')}{path}: {status} (not tried again)")


class _TryAgain(Exception):
    """An attempt failed in a way that may pass."""


def check_url(url: str) -> None:
    """Refuse what is no address, and, without repeating it, one in which a secret could hide: errors name it."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise ValueError("url is not a URL: expected one such as http://127.0.0.1:8000") from None
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError("url has a user, a query or a fragment: give the bare address, such as http://127.0.0.1:8000")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url={url!r}: expected an address such as http://127.0.0.1:8000")


async def _read(response: httpx.Response) -> bytes:
    content = bytearray()
    # httpx reads through nested generators. Only an exception from the innermost, as a cancellation is, closes all.
    with trio.CancelScope() as scope:
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > _LONGEST_BODY:
                scope.cancel()
    if len(content) > _LONGEST_BODY:
        raise EnvironmentFault(f"the response of {response.url} is longer than {_LONGEST_BODY} bytes")
    return bytes(content)


def _parsed(content: bytes, where: str) -> Any:
    shown = content[:_SHOWN].decode(errors="replace")
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise EnvironmentFault(f"{where}: byte {error.start + 1} of the answer is not UTF-8: {shown!r}") from None
    except (ValueError, RecursionError) as error:
        raise EnvironmentFault(f"{where}: the answer is not JSON ({error}): {shown!r}") from None


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than a request."""
    return httpx.create_ssl_context()
