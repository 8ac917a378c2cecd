"""Artifacts: files of a sandbox that are worth keeping, brought out of reach of whoever wrote them.

Knows archives and the protocol of a sandbox. The archive is made by programs that may be the model's own, so nothing of
it is believed: only regular files of a bounded size are taken, by names that stay below the place they are written to.
"""

import errno
import io
import secrets
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import trio

from envs.terminal.harbor_task import Artifact
from envs.terminal.sandbox import RefusedFile, Sandbox

LARGEST = 64 * 1024 * 1024
"""Bytes of all files of one artifact."""

_NAMED_WRONG = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


async def collect_artifacts(
    sandbox: Sandbox, artifacts: Sequence[Artifact], *, most: int = LARGEST
) -> dict[str, bytes]:
    """The files of all artifacts by the relative path each is kept at. What is missing or too large is left out."""
    found: dict[str, bytes] = {}
    for artifact in artifacts:
        source = artifact.source.strip("/")
        for path, data in (await _archived(sandbox, source, artifact.exclude, most)).items():
            kept = artifact.destination
            found.setdefault(path if kept is None else kept.rstrip("/") + path.removeprefix(source), data)
    return found


async def _archived(sandbox: Sandbox, source: str, exclude: Sequence[str], most: int) -> dict[str, bytes]:
    """The regular files at and below `source`, a path relative to the root."""
    place = f"/tmp/.{secrets.token_hex(8)}"
    options = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in exclude)
    await sandbox.run(f"tar -cf {place} -C / {options} -- {shlex.quote(source)}", cwd="/")
    try:
        data = await sandbox.read_file(place, most)
    except (FileNotFoundError, RefusedFile):
        return {}
    finally:
        await sandbox.run(f"rm -f {place}", cwd="/")
    return await trio.to_thread.run_sync(_unpacked, data, source)


def _unpacked(data: bytes, source: str) -> dict[str, bytes]:
    try:
        return dict(_regular_files(data, source))
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError):
        return {}


def _regular_files(data: bytes, source: str) -> Iterator[tuple[str, bytes]]:
    """The regular files of a plain archive, which together are no larger than itself."""
    left = len(data)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            left -= tarfile.BLOCKSIZE + member.size
            if member.size < 0 or left < 0:
                return
            inside = member.name == source or member.name.startswith(f"{source}/")
            plain = not {"", ".", ".."} & set(member.name.split("/")) and "\0" not in member.name
            if inside and plain and member.isreg() and not member.issparse():
                content = archive.extractfile(member)
                assert content is not None, "it is a regular file"
                yield member.name, content.read()


def write_artifacts(place: Path, files: Mapping[str, bytes]) -> None:
    """Write files below `place`, which is made. Left out is one whose name another's needs for a directory, or is too
    long for this machine."""
    for path, data in files.items():
        target = place / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except OSError as error:
            if error.errno not in _NAMED_WRONG:
                raise
