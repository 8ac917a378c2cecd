"""Whether sandboxes can be made on this machine: they need bubblewrap and user namespaces."""

import functools
from concurrent.futures import ThreadPoolExecutor

import trio

from envs.terminal import Bubblewrap, SandboxSpec, SandboxUnavailable


async def _try_one() -> str | None:
    try:
        async with Bubblewrap()(SandboxSpec()):
            return None
    except SandboxUnavailable as error:
        return str(error)


@functools.cache
def missing() -> str | None:
    """Why no sandbox can be made here; None where one can. Asked in a thread of its own, as a loop may be running."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(trio.run, _try_one).result()
