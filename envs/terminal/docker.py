"""Containers of a Docker engine, driven by its command line program: for images, and where namespaces are forbidden.

Knows docker's arguments; knows no task format.

The container's first process reads the pipe to the trainer, and the container is removed when that closes. It holds
one process at a time, so that the end of a command can be the end of everything in the container. What it does not
bound: disk_mb and inodes (few storage drivers can), and attached directories are plain ones, which only the absence of
other processes protects; `run(keep=...)` is refused.
"""

import os
import secrets
import shlex
import shutil
import signal
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import cast

import trio

from envs.terminal.capture import finish, pipes, read_up_to
from envs.terminal.files import pack
from envs.terminal.sandbox import (
    CommandResult,
    File,
    RefusedFile,
    Sandbox,
    SandboxFault,
    SandboxProcess,
    SandboxSpec,
    SandboxUnavailable,
    check_command,
    check_path,
)

_START_SECONDS, _DEATH_SECONDS = 300.0, 30.0  # the first may pull an image
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL", "NET_BIND_SERVICE")
_STAY = "echo ready; while read -r _; do :; done"
_KILL_ALL = "kill -KILL -1"  # all but the first process and the one that asks


@dataclass(frozen=True)
class Docker:
    """A `SandboxFactory`. `spec.image` is the name of an image that has bash and tar. program: docker, or podman."""

    program: str = "docker"

    def __call__(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """A container for the length of a block."""
        return cast(AbstractAsyncContextManager[Sandbox], _open(self.program, spec))


def run_argv(spec: SandboxSpec, name: str) -> list[str]:
    """Arguments of docker that start the container. An entry point of the image is not run."""
    if spec.image is None:
        raise ValueError("image=None: Docker() needs the name of an image, such as 'debian:12'")
    limits = spec.limits
    argv = ["run", "--interactive", "--rm", "--name", name, "--hostname", "sandbox", "--entrypoint", "/bin/bash"]
    argv += ["--network", "bridge" if spec.network else "none", "--security-opt", "no-new-privileges"]
    argv += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m", "--shm-size", "64m"]
    argv += ["--pids-limit", str(limits.processes), "--ulimit", f"nofile={limits.open_files}", "--ulimit", "core=0"]
    argv += ["--ulimit", f"fsize={limits.file_mb * 1024 * 1024}", "--cap-drop", "ALL"]
    for capability in _CAPABILITIES:
        argv += ["--cap-add", capability]
    return [*argv, spec.image, "-c", _STAY]


def exec_argv(spec: SandboxSpec, name: str, cwd: str, env: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """Arguments of docker that run `argv` in the container."""
    variables = [f"--env={key}={value}" for key, value in {**spec.env, **env}.items()]
    inside = ["/bin/bash", "-c", 'cd -- "$1" || exit; shift; exec "$@"', "bash", cwd, *argv]
    return ["exec", "--interactive", *variables, name, *inside]


@asynccontextmanager
async def _open(program: str, spec: SandboxSpec) -> AsyncIterator["_DockerSandbox"]:
    found = shutil.which(program)
    if found is None:
        raise SandboxUnavailable(f"{program!r} is not on PATH; install Docker, or use Bubblewrap()")
    name = f"jaxrl-{secrets.token_hex(8)}"
    container = await _start([found, *run_argv(spec, name)])
    sandbox = _DockerSandbox(spec, found, name)
    try:
        await _ready(container)
        await sandbox.prepare()
        yield sandbox
    finally:
        with trio.CancelScope(shield=True):
            with trio.move_on_after(_DEATH_SECONDS):
                await trio.run_process([found, "rm", "--force", name], check=False, capture_stdout=True, stderr=-3)
            await _end(container)


async def _start(argv: Sequence[str]) -> trio.Process:
    try:
        return await trio.lowlevel.open_process(argv, stdin=-1, stdout=-1, stderr=-1, start_new_session=True)
    except OSError as error:
        raise SandboxFault(f"cannot start {argv[0]}: {error}") from error


async def _ready(container: trio.Process) -> None:
    _, stdout, stderr = pipes(container)
    with trio.move_on_after(_START_SECONDS):
        if await stdout.receive_some(64):
            return
    said = b""
    with trio.move_on_after(1.0):
        said = await read_up_to(stderr, 4096)
    text = said.decode("utf-8", "replace").strip() or f"nothing happened for {_START_SECONDS:g} s"
    raise SandboxUnavailable(f"no container: {text}")


async def _end(process: trio.Process) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    for stream in pipes(process):
        await stream.aclose()


class _DockerProcess:
    """One `docker exec`, and everything in the container."""

    def __init__(self, sandbox: "_DockerSandbox", process: trio.Process) -> None:
        self.stdin, self.stdout, self.stderr = pipes(process)
        self.out_of_memory = False
        self._sandbox = sandbox
        self._process = process

    async def wait(self) -> None:
        await self._process.wait()
        await self._sandbox.kill_all()  # daemons of the command, which hold its pipes

    async def kill(self) -> None:
        with trio.CancelScope(shield=True):
            await self._sandbox.kill_all()
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    async def watch(self) -> None:
        """The engine bounds memory itself."""
        await trio.sleep_forever()

    async def exit_code(self, stderr: str) -> int:
        code = await self._process.wait()
        if code in (125, 126, 127):  # docker's own, unless the command's
            await self._sandbox.check_alive(stderr)
        return code


class _DockerSandbox:
    """Commands in one container, one at a time."""

    def __init__(self, spec: SandboxSpec, program: str, name: str) -> None:
        self.spec = spec
        self._program = program
        self._name = name
        self._attached: set[str] = set()
        self._running = False

    async def prepare(self) -> None:
        """Make the working directory, which shows that commands run."""
        result = await self.run(f"mkdir -p -- {shlex.quote(self.spec.workdir)}", cwd="/", seconds=_DEATH_SECONDS)
        if result.exit_code != 0:
            raise SandboxFault(f"image {self.spec.image!r} cannot run commands: {result.stderr}{result.notice}")

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
        check_command(command)
        if keep is not None:
            raise ValueError("Docker() has no fresh root for run(keep=...); use Bubblewrap(), or keep=None")
        seconds = self.spec.limits.seconds if seconds is None else seconds
        async with self.spawn(["/bin/bash", "-c", command], cwd=cwd, env=env) as process:
            return await finish(process, stdin, seconds, self.spec.limits)

    @asynccontextmanager
    async def spawn(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> AsyncIterator[SandboxProcess]:
        self._must_be_quiet("a second process")
        arguments = exec_argv(self.spec, self._name, cwd or self.spec.workdir, env or {}, argv)
        process = await _start([self._program, *arguments])
        self._running = True
        try:
            yield _DockerProcess(self, process)
        finally:
            with trio.CancelScope(shield=True):
                await self.kill_all()
                await _end(process)
            self._running = False

    async def write_files(self, files: Mapping[str, File]) -> None:
        for path in files:
            check_path("path", path)
        result = await self.run("tar -xf - --no-same-owner -p -C /", cwd="/", stdin=pack(files))
        if result.exit_code != 0:
            raise RefusedFile(f"the sandbox did not take {len(files)} files: {result.stderr}{result.notice}")

    async def read_file(self, path: str, limit: int) -> bytes:
        """docker resolves the directories of `path` inside the container; the file itself must be no link."""
        check_path("path", path)
        process = await _start([self._program, "cp", f"{self._name}:{path}", "-"])
        _, stdout, stderr = pipes(process)
        try:
            archive = await read_up_to(stdout, limit + 16 * tarfile.BLOCKSIZE)
            missing = b"" if archive else await read_up_to(stderr, 4096)
        finally:
            with trio.CancelScope(shield=True):
                await _end(process)
        if not archive:
            await self.check_alive(missing.decode("utf-8", "replace"))
            raise FileNotFoundError(f"{path}: {missing.decode('utf-8', 'replace').strip()}")
        return first_file(archive, path, limit)

    async def attach(self, target: str, files: Mapping[str, File], *, writable: bool = False) -> None:
        check_path("target", target)
        if target in self._attached:
            raise ValueError(f"target={target!r} is attached already; detach it first")
        await self._clear(target)
        await self.write_files({f"{target}/{path}": file for path, file in files.items()})
        self._attached.add(target)

    async def detach(self, target: str) -> None:
        if target not in self._attached:
            raise ValueError(f"target={target!r} is not attached; attached are {sorted(self._attached)}")
        self._attached.remove(target)
        await self._clear(target)

    async def _clear(self, target: str) -> None:
        """Nothing at `target`. Asking for it makes sure that nothing runs."""
        result = await self.run(f"rm -rf -- {shlex.quote(target)}", cwd="/")
        if result.exit_code != 0:
            raise RefusedFile(f"cannot remove {target} in the container: {result.stderr}{result.notice}")

    async def kill_all(self) -> None:
        """Kill whatever runs in the container but its first process."""
        argv = [self._program, "exec", self._name, "/bin/bash", "-c", _KILL_ALL]
        await trio.run_process(argv, check=False, capture_stdout=True, capture_stderr=True)

    async def check_alive(self, stderr: str) -> None:
        """SandboxFault where the container is gone."""
        argv = [self._program, "inspect", "--format", "{{.State.Running}}", self._name]
        ended = await trio.run_process(argv, check=False, capture_stdout=True, capture_stderr=True)
        if ended.stdout.strip() != b"true":
            raise SandboxFault(f"the container {self._name} is gone: {stderr.strip()}")

    def _must_be_quiet(self, what: str) -> None:
        if self._running:
            raise RuntimeError(f"{what} while a process runs in the container, which holds one: close its shell first")


def first_file(archive: bytes, path: str, limit: int) -> bytes:
    """The bytes of the first member of a tar archive, whose rest may be missing. RefusedFile unless it is a file."""
    member = tarfile.TarInfo.frombuf(archive[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    if member.type not in tarfile.REGULAR_TYPES:
        raise RefusedFile(f"{path} is no regular file in the container")
    if member.size > limit:
        raise RefusedFile(f"{path} is larger than {limit} bytes")
    return archive[tarfile.BLOCKSIZE : tarfile.BLOCKSIZE + member.size]
