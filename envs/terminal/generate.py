"""Our own tasks as directories in Harbor's format: any number of instances of each, one for every seed.

Knows the format and the tasks; it must not know how they are run. `harbor_files` is pure: the same task and seed are
the same bytes, so an instance need not be kept, and a seed that training never used is held out.
"""

import difflib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.terminal.files import read_tree
from envs.terminal.sandbox import File
from envs.terminal.tasks import DIFFICULTIES, TASKS, OwnTask, Step
from envs.terminal.tasks.grader import GRADER, TABLE
from envs.terminal.tasks.task import Content

SCHEMA_VERSION = "1.4"


def write_tasks(
    directory: Path, *, difficulty: str | None = None, seed: int = 0, names: Sequence[str] | None = None
) -> list[Path]:
    """Write tasks below `directory`, each to `<name>-<seed>`, and return where, in the order of `names` or the table.

    difficulty: only those; None is all. names: only those. What is there already with the same files is left as it is;
    with other files it is a FileExistsError. ValueError names what is unknown.
    """
    chosen = [(f"{task.name}-{seed}", harbor_files(task, seed)) for task in _chosen(difficulty, names)]
    directory.mkdir(parents=True, exist_ok=True)
    return [_write(directory / name, files) for name, files in chosen]


def _chosen(difficulty: str | None, names: Sequence[str] | None) -> list[OwnTask]:
    if difficulty is not None and difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty={difficulty!r}: expected one of {', '.join(DIFFICULTIES)}, or None for all")
    table = {task.name: task for task in TASKS if difficulty in (None, task.difficulty)}
    if names is None:
        return list(table.values())
    if isinstance(names, str) or not names or len({*names}) < len(names):
        raise ValueError(f"names={names!r}: expected a list of different names, or None for all")
    for name in names:
        if name not in table:
            near = difflib.get_close_matches(name, table, cutoff=0.4) or sorted(table)
            kind = f"{difficulty} task" if difficulty else "task"
            raise ValueError(f"names has {name!r}, which is no {kind}; near it: {', '.join(near)}")
    return [table[name] for name in names]


# --- the format ------------------------------------------------------------------------------------


def harbor_files(task: OwnTask, seed: int) -> dict[str, File]:
    """All files of one instance by their path in its directory."""
    steps = task.steps(seed)
    files = {"task.toml": _text(_toml(task, seed, steps)), "environment/Dockerfile": _text(_dockerfile(steps[0].files))}
    files |= _fixtures("environment/files/", steps[0].files)
    if len(steps) == 1:
        return files | _step_files("", steps[0])
    for i, step in enumerate(steps):
        place = f"steps/{step.name}/"
        files |= _step_files(place, step)
        files |= _fixtures(f"{place}workdir/", step.files) if i else {}
    return files


def _step_files(place: str, step: Step) -> dict[str, File]:
    files = {
        f"{place}instruction.md": _text(step.instruction.strip() + "\n"),
        f"{place}solution/solve.sh": _script(f"#!/bin/bash\nset -e\ncd /app\n{step.solution.strip()}\n"),
        f"{place}tests/test.sh": _script(GRADER),
    }
    table = ""
    for i, check in enumerate(step.checks):
        wanted = check.wanted
        if isinstance(wanted, bytes):
            files[f"{place}tests/wanted-{i}"] = File(wanted)
            wanted = f"wanted-{i}"
        table += "\t".join((check.key, check.kind, f"/app/{check.path}", wanted)) + "\n"
    return files | {f"{place}tests/{TABLE}": _text(table)}


def _toml(task: OwnTask, seed: int, steps: Sequence[Step]) -> str:
    tables = [
        f'schema_version = "{SCHEMA_VERSION}"',
        f'[task]\nname = "jaxrl/{task.name}"\nkeywords = ["terminal"]',
        f'[metadata]\ndifficulty = "{task.difficulty}"\nseed = {seed}',
        "[agent]\ntimeout_sec = 600.0",
        "[verifier]\ntimeout_sec = 60.0",
        '[environment]\nworkdir = "/app"\nnetwork_mode = "no-network"\ncpus = 1\nmemory_mb = 1024',
    ]
    for step in steps if len(steps) > 1 else ():
        gate = "" if step.min_reward is None else f"\nmin_reward = {step.min_reward}"
        tables.append(f"[[steps]]\nname = {json.dumps(step.name)}{gate}")
    return "\n\n".join(tables) + "\n"


def _dockerfile(files: Mapping[str, Content]) -> str:
    copy = "COPY files/ /app/\n" if files else ""
    return f"FROM ubuntu:24.04\nWORKDIR /app\n{copy}"


def _fixtures(place: str, files: Mapping[str, Content]) -> dict[str, File]:
    return {place + path: _file(content) for path, content in files.items()}


def _file(content: Content) -> File:
    if isinstance(content, File):
        return content
    return File(content.encode() if isinstance(content, str) else content)


def _text(content: str) -> File:
    return File(content.encode())


def _script(content: str) -> File:
    return File(content.encode(), 0o755)


# --- the disk --------------------------------------------------------------------------------------


def _write(target: Path, files: Mapping[str, File]) -> Path:
    """Write a whole directory or none: made beside `target` and moved there, which somebody else may have done."""
    if not target.exists():
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            for path, file in files.items():
                _write_file(made, made / path, file)
            made.chmod(0o755)
            try:
                made.rename(target)
            except OSError:
                if not target.exists():  # else somebody was faster, and what they wrote is compared below
                    raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    if not target.is_dir() or read_tree(target) != dict(files):
        raise FileExistsError(f"{target} is there and holds something else; remove it, or choose another directory")
    return target


def _write_file(top: Path, path: Path, file: File) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.relative_to(top).parents:
        (top / parent).chmod(0o755)  # whatever the umask: images keep the bits of directories
    path.write_bytes(file.data)
    path.chmod(file.mode)
