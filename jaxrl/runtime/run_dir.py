"""The run directory: how one is opened, what marks it as one, and what was running in it.

Knows file names, the configuration as JSON and the versions of code and packages. It must not know what a
configuration means, nor read or write metrics, checkpoints or rollouts (`log.py`, `checkpoint.py`, `record.py`).

    config.json     the resolved configuration; written last, so that its presence marks a run directory
    versions.json   a list with one entry a start: time, Python, packages, git revisions, command
    metrics.jsonl   rollouts/   checkpoints/   report.html   curve.png
"""

import errno
import fcntl
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, get_args

Behavior = Literal["ask", "resume", "delete", "raise"]

FREE_KEYS = frozenset(
    {
        "log_path",
        "behavior_if_log_dir_exists",
        "max_steps",
        "save_every",
        "eval_every",
        "num_groups_to_log",
    }
)
"""Configuration keys that may differ between a run and its continuation: they change no trained number."""

_OPTIONS = "behavior_if_log_dir_exists=resume continues it, =delete starts over and destroys it"


class RunDirError(ValueError):
    """The directory asked for cannot be used as asked. The message says what can be done."""


@dataclass(frozen=True)
class RunDir:
    """Where the files of one run lie. `resumed` is True when the directory already held the run."""

    path: Path
    resumed: bool = False

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def versions(self) -> Path:
        """What was running, one entry a start."""
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Orbax checkpoints, one folder a step."""
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """Recorded episodes, one file a step."""
        return self.path / "rollouts"

    @property
    def report(self) -> Path:
        """The page made by `jaxrl report`."""
        return self.path / "report.html"

    @property
    def curve(self) -> Path:
        """The learning curve as a picture."""
        return self.path / "curve.png"


def is_run_dir(path: Path) -> bool:
    """Whether `path` holds a run: a config.json beside a versions.json that jaxrl wrote."""
    try:
        starts = json.loads((path / "versions.json").read_text())
        return (path / "config.json").is_file() and "jaxrl" in starts[0]["packages"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def open_run_dir(
    path: str | Path,
    behavior: Behavior = "ask",
    *,
    config: Mapping[str, Any],
    free_keys: frozenset[str] = FREE_KEYS,
    not_resumable: str | None = None,
    ask: Callable[[str], str] | None = None,
) -> RunDir:
    """Create the run directory, or take over the one that is there, as `behavior` says.

    An absent or empty directory is always created. Otherwise: "raise" refuses; "delete" empties it, but only if it
    is a run directory; "resume" requires the same configuration except for `free_keys` (dotted names, with all below
    them); "ask" asks on a terminal and refuses elsewhere. `config` is a JSON-able mapping. `not_resumable` is why a run
    cannot be continued, None where it can. `ask` answers a question (the default reads the terminal). Writes
    config.json and versions.json. Raises RunDirError.
    """
    if behavior not in get_args(Behavior):
        raise RunDirError(f"behavior_if_log_dir_exists={behavior!r}: expected one of {', '.join(get_args(Behavior))}")
    config = _as_json(config)
    where = Path(path).expanduser()
    if where.exists() and not where.is_dir():
        raise RunDirError(f"log_path={where} is a file; give a directory that does not exist yet")
    if not _occupied(where):
        return _create(where, config)
    if behavior == "ask":
        behavior = _choose(where, ask)
    if behavior == "raise":
        raise RunDirError(f"log_path={where} is in use. Give another log_path, or: {_OPTIONS}")
    if not is_run_dir(where):
        raise RunDirError(
            f"log_path={where} is not empty and is not a run directory (it has no config.json and versions.json of "
            f"jaxrl), so it is neither resumed nor deleted. Give another log_path"
        )
    if behavior == "delete":
        _empty(where)
        return _create(where, config)
    if not_resumable is not None:
        raise RunDirError(
            f"{where} cannot be resumed: {not_resumable}. behavior_if_log_dir_exists=delete starts over and destroys "
            "it; or give another log_path"
        )
    _check_same(where, config, free_keys)
    return _start(where, config, resumed=True)


@contextmanager
def claimed(path: str | Path) -> Iterator[None]:
    """Keep other processes out of a run directory, which is made if it is not there, for the length of the block.

    Resources: a lock on the directory itself, which ends with the process at the latest. A file system without locks
    keeps nobody out. Raises RunDirError.
    """
    where = Path(path).expanduser()
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"log_path={where} cannot be made ({error}); give another log_path") from error
    descriptor = os.open(where, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise RunDirError(f"log_path={where} is in use by another process: wait for it, or give another") from error
    try:
        yield
    finally:
        os.close(descriptor)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def versions() -> dict[str, Any]:
    """What is running: time, Python, platform, every installed package, git revisions, command."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "git": {"jaxrl": _git(Path(__file__).parent), "working_directory": _git(Path.cwd())},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


@functools.cache
def _packages() -> dict[str, str]:
    named = ((d.metadata["Name"], d.version) for d in distributions())
    return dict(sorted((name.lower(), version) for name, version in named if name))


def write_atomic(path: Path, text: str) -> None:
    """Replace the file in one step: a reader, or a crash, sees the old text or the new one. Raises OSError."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(config), sort_keys=True))
    except TypeError as error:
        raise RunDirError(f"the configuration cannot be written as JSON: {error}") from error


def _occupied(where: Path) -> bool:
    """A start that was interrupted before config.json was written left nothing to keep."""
    return where.is_dir() and any(not p.name.startswith(("versions.json", "config.json.part")) for p in where.iterdir())


def _choose(where: Path, ask: Callable[[str], str] | None) -> Behavior:
    if ask is None and not sys.stdin.isatty():
        raise RunDirError(
            f"log_path={where} is in use and there is no terminal to ask on. Give another one, or: {_OPTIONS}"
        )
    while True:
        answer = (ask or input)(f"{where} is in use: [r]esume it, [d]elete it, or [q]uit? ").strip().lower()
        if answer in ("r", "resume"):
            return "resume"
        if answer in ("d", "delete"):
            return "delete"
        if answer in ("", "q", "quit"):
            return "raise"


def _create(where: Path, config: dict[str, Any]) -> RunDir:
    where.mkdir(parents=True, exist_ok=True)
    (where / "versions.json").unlink(missing_ok=True)
    return _start(where, config, resumed=False)


def _start(where: Path, config: dict[str, Any], *, resumed: bool) -> RunDir:
    run = RunDir(where, resumed)
    starts = json.loads(run.versions.read_text()) if resumed else []
    write_atomic(run.versions, json.dumps([*starts, versions()], indent=1) + "\n")
    write_atomic(run.config, json.dumps(config, indent=1, sort_keys=True) + "\n")
    return run


def _empty(where: Path) -> None:
    """Remove the marker last, so that an interrupted deletion can be repeated."""
    for entry in sorted(where.iterdir(), key=lambda p: p.name in ("config.json", "versions.json")):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, json.dumps(tree)


def _check_same(where: Path, config: dict[str, Any], free_keys: frozenset[str]) -> None:
    old, new = dict(_flat(json.loads((where / "config.json").read_text()))), dict(_flat(config))
    differing = [
        f"  {key}: was {old.get(key, 'absent')}, now {new.get(key, 'absent')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _is_free(key, free_keys)
    ]
    if differing:
        lines = "\n".join(differing)
        raise RunDirError(
            f"cannot resume {where}: the configuration differs in what changes training\n{lines}\n"
            f"Restore these values, or start a new run with another log_path"
        )


def _is_free(key: str, free_keys: frozenset[str]) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in free_keys)


def _git(folder: Path) -> dict[str, Any] | None:
    """Revision and whether files differ from it; None outside a repository or without git."""
    try:
        sha = _run_git(folder, "rev-parse", "HEAD")
        return {"sha": sha, "dirty": bool(_run_git(folder, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(("git", *arguments), cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
