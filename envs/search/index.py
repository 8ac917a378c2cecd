"""Index folders: built once, never changed afterwards, found again by a fingerprint of all that went into them.

Knows folders, locks and fingerprints; must not know what an index holds. A folder is filled under another name, by
one process at a time, and gets its own in one step, with a manifest that was written last. So a folder that has its
name is whole, whoever was killed meanwhile, and since nobody writes to it any process may read it. What a changed
corpus or embedder needs has another fingerprint, hence another folder; old ones stay until someone deletes them.
"""

import fcntl
import itertools
import json
import os
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

MANIFEST = "manifest.json"
_POLL_SECONDS = 0.1

Checkpoint = Callable[[], None]
"""Called now and then in long work; it raises to stop (`trio.from_thread.check_cancelled`, in a thread of trio's)."""

_Opened = TypeVar("_Opened")


def default_root() -> str:
    """Where indexes lie unless told otherwise: in the user's cache folder."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxrl" / "search")


def index_folder(
    root: str | Path, kind: str, fingerprint: str, build: Callable[[Path], None], checkpoint: Checkpoint = lambda: None
) -> Path:
    """The folder of this fingerprint, filled by `build` if nobody has done it yet. Blocks while another process does.

    What `build` or `checkpoint` raises comes out here, and leaves no folder behind that could be taken for a whole one.
    """
    folder = Path(root).expanduser() / f"{kind}-{fingerprint[:16]}"
    if _is_whole(folder, fingerprint):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(folder.name + ".lock"), checkpoint):
        if not _is_whole(folder, fingerprint):
            part = folder.with_name(folder.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            build(part)
            (part / MANIFEST).write_text(json.dumps({"kind": kind, "fingerprint": fingerprint}) + "\n")
            shutil.rmtree(folder, ignore_errors=True)  # of the same name and not whole: damaged
            part.rename(folder)
    return folder


def _is_whole(folder: Path, fingerprint: str) -> bool:
    try:
        return json.loads((folder / MANIFEST).read_text())["fingerprint"] == fingerprint
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """What cannot be read of a folder that was whole once is an OSError that says what to do about it.

    It is not built again under the feet of other processes, which may be reading it.
    """
    try:
        yield
    except (FileNotFoundError, ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
        raise OSError(f"the index {folder} is damaged: delete that folder, and it is built again ({error})") from error


@contextmanager
def _alone(file: Path, checkpoint: Checkpoint) -> Iterator[None]:
    """Hold the lock, which the system takes away from a process that dies."""
    with file.open("w") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                checkpoint()
                time.sleep(_POLL_SECONDS)
        yield


def owned_copy(folder: Path) -> Path:
    """A copy of a whole index folder that belongs to this process alone, for what writes where it only reads.

    Copies are numbered; one whose owner has ended, however it ended, is the next one's: its lock stays open until then.
    Blocks while it copies.
    """
    fingerprint = json.loads((folder / MANIFEST).read_text())["fingerprint"]
    for number in itertools.count():
        copy = folder.with_name(f"{folder.name}.copy{number}")
        held = os.open(copy.with_name(copy.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            continue
        if not _is_whole(copy, fingerprint):
            part = copy.with_name(copy.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, part)
            part.rename(copy)
        return copy
    raise AssertionError("numbers do not end")


_opened: dict[Hashable, Any] = {}
_guards: dict[Hashable, threading.Lock] = {}
_guards_guard = threading.Lock()


def opened_once(key: Hashable, make: Callable[[], _Opened]) -> _Opened:
    """What `make` gave for this key, in this process; threads that ask at once wait for the one that makes it.

    It stays open until the process ends: episodes come and go by the thousand, and share it.
    """
    with _guards_guard:
        guard = _guards.setdefault(key, threading.Lock())
    with guard:
        if key not in _opened:
            _opened[key] = make()
        return _opened[key]
