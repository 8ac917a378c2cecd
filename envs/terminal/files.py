"""Files between the trainer and a sandbox whose owner is hostile: archives in, bytes out, no link ever followed.

Knows paths and file descriptors; knows no back-end. A directory is named by an open descriptor, so that nothing can be
swapped under a path between a check and its use.
"""

import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from envs.terminal.sandbox import File, RefusedFile


def read_tree(directory: Path) -> dict[str, File]:
    """Every file below `directory` by relative path, dot files and permission bits included.

    Links are refused: they would mean something else in the sandbox than here.
    """
    found: dict[str, File] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            raise RefusedFile(f"{path} is a link; copy what it points to into {directory}")
        if path.is_file():
            found[path.relative_to(directory).as_posix()] = File(path.read_bytes(), path.stat().st_mode & 0o777)
    return found


def pack(files: Mapping[str, File]) -> bytes:
    """A tar archive of `files`, the same bytes for the same files. Leading slashes of paths are dropped."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(files):
            member = tarfile.TarInfo(_relative(path))
            member.size, member.mode = len(files[path].data), files[path].mode
            archive.addfile(member, io.BytesIO(files[path].data))
    return buffer.getvalue()


def _relative(path: str) -> str:
    parts = [part for part in path.split("/") if part]
    if not parts or {".", ".."} & set(parts):
        raise ValueError(f"path {path!r}: expected the path of a file, without . and ..")
    return "/".join(parts)


def read_inside(root: int, parts: Sequence[str], limit: int) -> bytes:
    """The bytes of the regular file at `parts` below the directory `root` (a descriptor).

    FileNotFoundError, or RefusedFile for a link at any component, a special file, or more than `limit` bytes.
    """
    with open_inside(root, parts) as found:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedFile(f"/{'/'.join(parts)} is {_kind(status.st_mode)}; expected a regular file")
        descriptor = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        raise RefusedFile(f"/{'/'.join(parts)} is larger than {limit} bytes")
    return data


@contextmanager
def open_inside(root: int, parts: Sequence[str]) -> Iterator[int]:
    """A descriptor of what is at `parts` below `root`, opened for nothing: even a pipe or a link cannot act."""
    here = os.dup(root)
    try:
        for i, part in enumerate(parts):
            there = _open_at(here, part, tuple(parts[: i + 1]), last=i + 1 == len(parts))
            os.close(here)
            here = there
        yield here
    finally:
        os.close(here)


def _open_at(directory: int, name: str, parts: tuple[str, ...], *, last: bool) -> int:
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    mode = os.fstat(found).st_mode
    if last or stat.S_ISDIR(mode):
        return found
    os.close(found)
    raise RefusedFile(f"/{'/'.join(parts)} is {_kind(mode)}; expected a directory")


def first_obstacle(root: int, parts: Sequence[str]) -> str | None:
    """The first of the paths down to `parts` that is there and no directory; None where a directory can be made."""
    for end in range(1, len(parts) + 1):
        try:
            with open_inside(root, parts[:end]) as found:
                if not stat.S_ISDIR(os.fstat(found).st_mode):
                    return "/" + "/".join(parts[:end])
        except FileNotFoundError:
            return None
    return None


_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a regular file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "of no known kind")
