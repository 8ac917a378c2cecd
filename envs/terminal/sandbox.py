"""The nouns of a sandbox: what a command may use, what it gave back, and the protocol that every back-end keeps.

Knows no back-end, no task format and no message. Who is to blame decides how a failure is told: what a command does,
its time, memory and output included, is a `CommandResult`; what the machinery does is a `SandboxFault`, which is never
a reward; a path that the other side made dangerous is a `RefusedFile`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from typing import Protocol

import trio

from jaxrl.env import EnvironmentFault

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of commands, unless an image or a spec says otherwise. It is Docker's as well."""


class SandboxFault(EnvironmentFault):
    """The sandbox, not the command, failed."""


class SandboxUnavailable(SandboxFault):
    """This machine cannot run the back-end. The message says what to change."""


class RefusedFile(Exception):
    """A file that must not be read: a link, a device, a pipe, a directory, or one larger than the limit."""


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Sizes are MiB, except `output_bytes`.

    seconds: wall clock of a command that names none of its own. memory_mb: resident memory of a command and all that it
    started. processes: at a time, in the whole sandbox. disk_mb: all files together, which live in memory. inodes: the
    number of files. file_mb: one file. open_files: of one process. output_bytes: kept of a command's stdout, and of
    its stderr; the rest is cut out of the middle.
    """

    seconds: float = 60.0
    memory_mb: int = 2048
    processes: int = 256
    disk_mb: int = 512
    inodes: int = 100_000
    file_mb: int = 256
    open_files: int = 1024
    output_bytes: int = 65_536

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise ValueError(f"{each.name}={getattr(self, each.name)!r}: expected more than 0")


@dataclass(frozen=True)
class SandboxSpec:
    """What a factory makes a sandbox of.

    image: the root file system, in the back-end's own terms: a directory for bubblewrap (None is the programs of this
    machine), the name of an image for docker. env: variables of every command; nothing else of the trainer's
    environment is seen. network: False leaves a loopback that only the sandbox's own processes reach; True is for
    commands you trust with what this machine reaches (with bubblewrap its own local services too).
    """

    image: str | None = None
    workdir: str = "/app"
    env: Mapping[str, str] = field(default_factory=dict)
    network: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_path("workdir", self.workdir)


@dataclass(frozen=True)
class CommandResult:
    """What a command gave back.

    exit_code: 128 + the number of the signal that ended it, where one did; None when a limit of the sandbox did.
    truncated: bytes were cut out of stdout or stderr, which say where. notice: what no stream says and whoever asked
    for the command should be told.
    """

    exit_code: int | None
    stdout: str
    stderr: str = ""
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False
    notice: str = ""


@dataclass(frozen=True)
class File:
    """A file to put into a sandbox: its bytes and its permission bits."""

    data: bytes
    mode: int = 0o644


class SandboxProcess(Protocol):
    """A running process of a sandbox, with everything it started."""

    @property
    def stdin(self) -> trio.abc.SendStream: ...

    @property
    def stdout(self) -> trio.abc.ReceiveStream: ...

    @property
    def stderr(self) -> trio.abc.ReceiveStream: ...

    @property
    def out_of_memory(self) -> bool: ...

    async def wait(self) -> None:
        """Until it ended."""

    async def kill(self) -> None:
        """End the whole tree, which is gone soon after. Nothing in the sandbox can delay it."""

    async def watch(self) -> None:
        """Kill the tree when it uses more memory than it may. Returns only then."""

    async def exit_code(self, stderr: str) -> int:
        """Of the process itself, once it has ended. SandboxFault where it never started: `stderr` says why."""
        ...


class Sandbox(Protocol):
    """A root file system that lives as long as the sandbox, and processes that live as long as their command."""

    @property
    def spec(self) -> SandboxSpec: ...

    async def run(
        self,
        command: str,
        *,
        seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        keep: Sequence[str] | None = None,
    ) -> CommandResult:
        """Run `command` with bash. All that it started is dead when it returns, daemons included.

        keep: None runs on the root as it is. Otherwise on a fresh root, as it was before any command, in which of the
        present one only the directories and files `keep` are seen, read-only: for graders. Then nothing else may be
        running; what is a link or anything else, or a file where the fresh root has a directory or the other way
        round, is a RefusedFile. Named pipes in `keep` are removed: who reads one waits for ever.
        """
        ...

    def spawn(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[SandboxProcess]:
        """Start a process that stays; it and all that it started is killed at the end of the block."""
        ...

    async def write_files(self, files: Mapping[str, File]) -> None:
        """Put files at absolute paths, in directories made as needed, as the sandbox's own user."""

    async def read_file(self, path: str, limit: int) -> bytes:
        """The bytes of a regular file of at most `limit` bytes, reached without following a link.

        FileNotFoundError where there is none, RefusedFile where it is something else.
        """
        ...

    async def attach(self, target: str, files: Mapping[str, File], *, writable: bool = False) -> None:
        """Show a directory of `files` (relative paths) at `target` to whatever starts from now on.

        Nothing may be running: what ran before the call never sees it. Unless `writable`, nobody can change it.
        """

    async def detach(self, target: str) -> None:
        """Take an attached directory away, with what was written to it. Nothing may be running."""


SandboxFactory = Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]
"""What an environment is given: `async with factory(spec) as sandbox`. A back-end is added by writing one of these.

For a remote service (Modal, Daytona, E2B) it is one function around the service's own client:

    @asynccontextmanager
    async def remote(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        box = await client.create(image=spec.image, memory=spec.limits.memory_mb, internet=spec.network)
        try:
            yield RemoteSandbox(spec, box)  # run, spawn, write_files, read_file, attach, detach in terms of `box`
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(30):
                await box.delete()

Its errors become SandboxFault. A service without a root of its own for graders refuses `run(keep=...)` by ValueError.
The block may be entered and left in different tasks' calls of one episode, so it must not hold a nursery open.
"""


def check_path(name: str, path: str) -> tuple[str, ...]:
    """The components of an absolute path. ValueError where it is relative, the root, or climbs."""
    parts = tuple(part for part in path.split("/") if part)
    if not path.startswith("/") or not parts or "\0" in path or {".", ".."} & set(parts):
        raise ValueError(f"{name}={path!r}: expected an absolute path below /, without . and ..")
    return parts


_LONGEST_COMMAND = 100_000  # the kernel takes 128 KiB for one argument


def check_characters(command: str) -> None:
    """ValueError where no shell can be given `command`: it has a NUL, or half a surrogate pair (a JSON escape's)."""
    if found := re.search("[\0\ud800-\udfff]", command):
        raise ValueError(f"a command cannot hold the character {found[0]!r}; remove it")


def check_command(command: str) -> None:
    """ValueError where `command` cannot be an argument of a process."""
    check_characters(command)
    if (size := len(command.encode())) > _LONGEST_COMMAND:
        raise ValueError(
            f"a command of {size} bytes: expected at most {_LONGEST_COMMAND}; write it to a file with write_files and "
            "run that"
        )
