"""The root file system of a task: which one stands for the image that it starts from, and the steps that change it.

Knows Dockerfiles as read by dockerfile.py, and the protocol of a sandbox; knows no task and no back-end. Nothing is
fetched: an image is a directory that was prepared, or the programs of this machine where its user says that they do.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import trio

from envs.terminal.dockerfile import Build, BuildStep, Copy, MakeDirectory, Run
from envs.terminal.sandbox import CommandResult, File, Sandbox, SandboxFault

HOST = "host"
STAND_INS = ("ubuntu", "debian", "*/ubuntu-*", "*/t-bench/*", "python", "bash", "buildpack-deps")
"""Images, without their tags, for which this machine's own programs stand unless another root is given."""

SYSTEM = ("bin", "boot", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
"""Directories of a root that hold programs and what they load. A fresh root has them as the image has."""

_SAID = 2000  # characters of a failed step's output


class BuildFailed(SandboxFault):
    """A step of a Dockerfile that failed. It is never the model's doing: it has not begun."""


@dataclass(frozen=True)
class Images:
    """What stands for an image: rows of a pattern and a directory, `host`, or an image of the back-end's own.

    The first row that matches counts. A pattern matches the whole name or the name without its tag, and may hold *.
    by_name: an image without a row is passed on by name, for back-ends that fetch images; else it must be a stand-in.
    """

    rows: tuple[tuple[str, str], ...] = ()
    by_name: bool = False

    def find(self, image: str) -> str | None:
        """What `SandboxSpec.image` should be. ValueError where nothing stands for the image."""
        name = image.removeprefix("docker.io/").removeprefix("library/")
        names = {name, re.sub(r"(:[^/:@]+)?(@.+)?$", "", name)}
        for pattern, root in self.rows:
            if any(fnmatchcase(each, pattern) for each in names):
                return None if root == HOST else root
        if self.by_name:
            return image
        if any(fnmatchcase(each, pattern) for each in names for pattern in STAND_INS):
            return None
        raise ValueError(
            f"no root file system stands for the image {image!r}: give rootfs={image}=DIRECTORY, one that you prepared "
            f"(debootstrap, docker export), or rootfs={image}={HOST} where this machine's own programs will do"
        )


def parse_images(rows: Sequence[str], *, by_name: bool = False) -> Images:
    """`Images` of rows that are written IMAGE=DIRECTORY."""
    pairs = [row.rpartition("=") for row in rows]
    for row, (pattern, _, root) in zip(rows, pairs, strict=True):
        if not pattern or not root:
            raise ValueError(f"rootfs has {row!r}: expected IMAGE=DIRECTORY, or IMAGE={HOST}")
    return Images(tuple((pattern, root) for pattern, _, root in pairs), by_name)


# --- carrying a Dockerfile out -----------------------------------------------------------------------


async def build(sandbox: Sandbox, plan: Build, context: Mapping[str, File], seconds: float) -> str | None:
    """Carry out the steps of `plan` in `sandbox`. context: the files that COPY may name, by relative path.

    Returns a path of a system directory that a step changed, None where none did. BuildFailed says which step failed.
    """
    watched = ["/etc"] if sandbox.spec.image is None else [f"/{name}" for name in SYSTEM]
    runs = any(isinstance(step, Run) for step in plan.steps)
    if runs:
        await _checked(sandbox, "touch /tmp/.before; sleep 0.02", "the beginning of a build")
    with trio.move_on_after(seconds) as clock:
        for step in plan.steps:
            await _carry_out(sandbox, step, context)
    if clock.cancelled_caught:
        raise BuildFailed(f"the Dockerfile's steps took longer than {seconds:g} s")
    copied = [step.target for step in plan.steps if isinstance(step, Copy) and step.target.split("/")[1] in SYSTEM]
    if not runs:
        return next(iter(copied), None)
    search = f"find {' '.join(watched)} -xdev -cnewer /tmp/.before -print -quit 2>/dev/null; rm -f /tmp/.before"
    found = (await _checked(sandbox, search, "the end of a build")).stdout.strip()
    return next(iter(copied), None) or found or None


async def _carry_out(sandbox: Sandbox, step: BuildStep, context: Mapping[str, File]) -> None:
    if isinstance(step, MakeDirectory):
        await _checked(sandbox, f"mkdir -p -- {shlex.quote(step.path)}", f"WORKDIR {step.path}")
    elif isinstance(step, Run):
        await _checked(sandbox, shlex.join(step.argv), f"line {step.line}: {step.text}", step.workdir, step.env)
    else:
        await _copy(sandbox, step, context)


async def _checked(
    sandbox: Sandbox, command: str, what: str, cwd: str = "/", env: Mapping[str, str] | None = None
) -> CommandResult:
    result = await sandbox.run(command, cwd=cwd, env=env, seconds=float("inf"))
    if result.exit_code != 0:
        said = (result.stderr or result.stdout).strip()[-_SAID:]
        hint = "" if sandbox.spec.network else "\n(the sandbox has no network: what a step fetches must be in its root)"
        raise BuildFailed(f"{what}: exit code {result.exit_code} {result.notice}\n{said}{hint}")
    return result


async def _copy(sandbox: Sandbox, step: Copy, context: Mapping[str, File]) -> None:
    found: dict[str, File] = {name: File(text.encode()) for name, text in step.written.items()}
    folder = step.folder
    for source in step.sources:
        files, whole = _select(context, source, step.line)
        folder = folder or whole
        found |= files
    if not folder:
        folder = len(found) > 1 or (await sandbox.run(f"[ -d {shlex.quote(step.target)} ]", cwd="/")).exit_code == 0
    plain: dict[str, File] = {}
    for name, file in found.items():
        place = f"{step.target.rstrip('/')}/{name}" if folder else step.target
        file = file if step.mode is None else File(file.data, step.mode)
        if step.unpack and (option := _archive_option(file.data)) is not None:
            target = shlex.quote(step.target)
            command = f"mkdir -p -- {target} && tar {option} -xf - --no-same-owner -C {target}"
            result = await sandbox.run(command, cwd="/", stdin=file.data)
            if result.exit_code != 0:
                raise BuildFailed(f"line {step.line}: cannot unpack {name}: {result.stderr.strip()[-_SAID:]}")
        else:
            plain[place] = file
    if plain:
        await sandbox.write_files(plain)


def _select(context: Mapping[str, File], source: str, line: int) -> tuple[dict[str, File], bool]:
    """The files that a source names, by their path below the target, and whether it names a directory.

    A directory gives what is in it; a file, its name.
    """
    parts = [part for part in source.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BuildFailed(f"line {line}: COPY {source} leaves the directory environment/")
    files: dict[str, File] = {}
    whole = not parts
    for path, file in context.items():
        components = path.split("/")
        depth = len(parts)
        if len(components) < depth or not all(map(fnmatchcase, components, parts)):
            continue
        whole = whole or len(components) > depth
        files["/".join(components[depth:]) or components[-1]] = file
    if not files:
        raise BuildFailed(f"line {line}: COPY {source}: no such file in environment/")
    return files, whole


_MAGIC = ((b"\x1f\x8b", "-z"), (b"BZh", "-j"), (b"\xfd7zXZ", "-J"))


def _archive_option(data: bytes) -> str | None:
    """The option with which tar unpacks `data`; None where it is no archive."""
    if data[257:262] == b"ustar":
        return ""
    return next((option for magic, option in _MAGIC if data.startswith(magic)), None)
