"""JSON over HTTP. Knows `jaxrl.http`; no retrieval contract.

Whatever a server fails at is an EnvironmentFault, which is never a reward. Nothing is held between two requests.
"""

import json
from dataclasses import dataclass
from typing import Any

from jaxrl.env import EnvironmentFault
from jaxrl.http import SHOWN, Waiting, check_url, fetch

ADDRESS = "the bare address, such as http://127.0.0.1:8000"


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
        check_url(self.url, expected=ADDRESS)
        _ = self._waiting  # which checks the rest

    @property
    def _waiting(self) -> Waiting:
        return Waiting(self.timeout, self.retries, self.patience, self.backoff)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the server answers. Raises EnvironmentFault, naming the server, for anything else."""
        url = self.url.rstrip("/") + path
        content = b"" if body is None else json.dumps(body).encode()
        try:
            return _parsed(await fetch(method, url, self._waiting, content=content))
        except EnvironmentFault as fault:
            raise EnvironmentFault(f"{method} {url}: {fault}") from None


def _parsed(content: bytes) -> Any:
    shown = content[:SHOWN].decode(errors="replace")
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise EnvironmentFault(f"byte {error.start + 1} of the answer is not UTF-8: {shown!r}") from None
    except (ValueError, RecursionError) as error:
        raise EnvironmentFault(f"the answer is not JSON ({error}): {shown!r}") from None
