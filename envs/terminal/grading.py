"""Grading: a task's tests run where the model cannot write, and what they leave is read without following a link.

Knows Harbor's contract for tests and the protocol of a sandbox; knows no message. By the contract the exit code of
test.sh means nothing: it writes /logs/verifier/reward.json, which is read first, or reward.txt. A reward that is
missing or no number is a `GraderError`, which is no reward at all; only a reward of 0 is 0.

Where the tests run is one of two choices:

    fresh   a root as the image has it, in which of the episode's root only directories for data are seen, read-only.
            Nothing the model put in the place of a program, a library or a setting has any effect: HOME is new and
            empty, and a task whose variables would lead programs to where commands may write is refused
            (`led_astray`). What is wanted of a home directory is found by its path below /root, or with HOME in
            verifier.env. A named pipe is gone before, since who reads one waits for ever; a link to /dev/zero is not,
            so tests of what may be endless should bound what they read.
    shared  the root that the episode left, as Harbor does. All that ran is dead and the tests cannot be changed, but
            they call whatever the model put into /usr, /etc or on the path.

Either way /tests is shown read-only after everything of the model's has ended, and /logs/verifier is a new directory.
A test that runs a program of the model's gives it the grader's own rights: such tests should write reward.json last.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath

import trio

from envs.terminal.files import read_tree
from envs.terminal.harbor_task import ARTIFACTS, TEST, Artifact, Step
from envs.terminal.rootfs import SYSTEM
from envs.terminal.sandbox import CommandResult, File, RefusedFile, Sandbox
from jaxrl.env import EnvironmentFault

TESTS, VERIFIER, HOME = "/tests", "/logs/verifier", "/logs/home"
_LARGEST = 1_000_000  # bytes of a file that holds rewards
_SAID = 2000  # characters of the tests' output that an error shows
_HIDDEN = (*SYSTEM, "dev", "proc", "sys", "run", "tmp", "logs", "tests", "solution")
_ALONE = {"HOME": HOME, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
# Programs such as sqlite3 ask the list of users for a home directory, and not for HOME.
_MOVE_IN = 'users=$(</etc/passwd) && echo "${users//:\\/root:/:"$HOME":}" >/etc/passwd; '
_SEARCHED = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT", "BASH_ENV", "ENV", "PYTHONPATH", "PYTHONHOME")
_SEARCHED += ("PYTHONSTARTUP", "PERL5LIB", "PERLLIB", "RUBYLIB", "GEM_HOME", "GEM_PATH", "NODE_PATH", "CLASSPATH")
_SEARCHED += ("R_LIBS", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "XDG_CONFIG_HOME")
_DETACH_SECONDS = 60.0

Rewards = Mapping[str, float]
"""What tests gave, by key; most give one, called reward."""


class GraderError(EnvironmentFault):
    """The tests gave no reward that can be read: their fault, or the machinery's, and never a reward of 0."""


@dataclass(frozen=True)
class Graded:
    """Rewards, and the end of what the tests printed."""

    rewards: Rewards
    output: str = ""


def total(rewards: Rewards, key: str | None = None) -> float:
    """One number out of several rewards: the one called `key`, else `reward`, else the mean of all.

    GraderError where `key` is not among them, or there is none.
    """
    if key is None and rewards and "reward" not in rewards:
        return sum(rewards.values()) / len(rewards)
    chosen = key or "reward"
    if chosen not in rewards:
        raise GraderError(f"the tests gave {sorted(rewards) or 'no rewards'}; expected the key {chosen!r}")
    return rewards[chosen]


def led_astray(env: Mapping[str, str]) -> str | None:
    """The first of the variables by which programs find code or settings that names a place outside of the system's
    directories, where commands of an episode may write; None where none does."""
    for name in _SEARCHED:
        for place in re.split(r"[:\s]", env[name]) if env.get(name) else ():
            if not place.startswith("/") or normpath(place).split("/")[1] not in SYSTEM:
                return name
    return None


async def grade(
    sandbox: Sandbox,
    step: Step,
    *,
    fresh: bool,
    cwd: str,
    env: Mapping[str, str],
    seconds: float,
) -> Graded:
    """Run the tests of `step` and read their rewards. Nothing may be running in the sandbox.

    fresh: see above; a step that is `separate` is graded so anyway, and then nothing but its artifacts is seen.
    Errors: GraderError, also when the tests take longer than `seconds`.
    """
    for command, limit in step.collect:
        await sandbox.run(command, cwd=cwd, seconds=limit)
    keeps = await _kept(sandbox, step, cwd) if fresh or step.separate else [None]
    alone = keeps != [None]
    env = {**_ALONE, **env} if alone else env
    command = f"cd -- {shlex.quote(cwd)} 2>/dev/null; ({TESTS}/{TEST}) >{VERIFIER}/test-stdout.txt 2>&1"
    try:
        await sandbox.attach(TESTS, read_tests(step.tests))
        for target in (VERIFIER, HOME) if alone else (VERIFIER,):
            await sandbox.attach(target, {}, writable=True)
        result = await _run_in_first(sandbox, _MOVE_IN * alone + command, keeps, env, seconds)
        output = await _tail(sandbox)
        if result.exit_code is None:
            raise GraderError(f"the tests were {result.notice}\n{output}")
        return Graded(await _read_rewards(sandbox, output), output)
    except RefusedFile as error:
        raise GraderError(f"the tests could not be put in place: {error}") from error
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(_DETACH_SECONDS):
            await _detach(sandbox)


def read_tests(directories: Sequence[Path]) -> dict[str, File]:
    """The files of /tests: those of all `directories`, a later one's over an earlier one's; test.sh can be run."""
    files: dict[str, File] = {}
    for directory in directories:
        files |= read_tree(directory)
    files[TEST] = File(files[TEST].data, files[TEST].mode | 0o755)
    return files


async def _run_in_first(
    sandbox: Sandbox,
    command: str,
    keeps: Sequence[Sequence[str] | None],
    env: Mapping[str, str],
    seconds: float,
) -> CommandResult:
    """Run in the first of several roots that can be made: a model may have removed or replaced what another shows."""
    *first, last = keeps
    for keep in first:
        try:
            return await sandbox.run(command, cwd="/", env=env, seconds=seconds, keep=keep)
        except (RefusedFile, FileNotFoundError):
            continue
    return await sandbox.run(command, cwd="/", env=env, seconds=seconds, keep=last)


async def _kept(sandbox: Sandbox, step: Step, cwd: str) -> list[list[str]]:
    """What graders see of the episode's root: all directories that may hold data, then only the working directory's,
    then none. What the task declares as artifacts is seen wherever it is.

    The episode's own bash lists them. A false list shows less, or what is no directory and so nothing.
    """
    if step.separate:
        return [await _declared(sandbox, step.artifacts), []]
    listing = f'shopt -s dotglob; for d in /* /logs/agent {ARTIFACTS}; do [[ -d $d && ! -L $d ]] && echo "$d"; done'
    said = (await sandbox.run(listing, cwd="/")).stdout.splitlines()
    declared = await _declared(sandbox, step.artifacts) if step.artifacts else []
    shown = list(dict.fromkeys([*filter(_is_shown, said), *declared]))
    workdir = "/" + cwd.split("/")[1]
    return [shown, [workdir] if _is_shown(workdir) else [], []]


def _is_shown(path: str) -> bool:
    parts = path.split("/")[1:]
    plain = path.startswith("/") and all(parts) and not {".", ".."} & set(parts)
    return plain and (path in ("/logs/agent", ARTIFACTS) or (len(parts) == 1 and parts[0] not in _HIDDEN))


async def _declared(sandbox: Sandbox, artifacts: Sequence[Artifact]) -> list[str]:
    """The artifacts which are there, as files or directories."""
    found: list[str] = []
    for source in dict.fromkeys([ARTIFACTS, *(each.source for each in artifacts)]):
        path = shlex.quote(source)
        if (await sandbox.run(f"[[ ( -d {path} || -f {path} ) && ! -L {path} ]]", cwd="/")).exit_code == 0:
            found.append(source)
    return found


async def _detach(sandbox: Sandbox) -> None:
    for target in (TESTS, VERIFIER, HOME):
        try:
            await sandbox.detach(target)
        except ValueError:  # it was never attached: the first one failed
            continue


async def _tail(sandbox: Sandbox) -> str:
    try:
        data = await sandbox.read_file(f"{VERIFIER}/test-stdout.txt", sandbox.spec.limits.file_mb * 1024 * 1024)
    except (FileNotFoundError, RefusedFile):
        return ""
    return data.decode("utf-8", "replace")[-_SAID:].strip()


# --- rewards ---------------------------------------------------------------------------------------


async def _read_rewards(sandbox: Sandbox, output: str) -> Rewards:
    for name, parse in (("reward.json", parse_json), ("reward.txt", parse_text)):
        try:
            data = await sandbox.read_file(f"{VERIFIER}/{name}", _LARGEST)
        except FileNotFoundError:
            continue
        except RefusedFile as error:
            raise GraderError(f"the tests left no readable reward: {error}\n{output}") from error
        try:
            return parse(data)
        except ValueError as error:
            raise GraderError(f"{name}: {error}\n{output}") from None
    raise GraderError(f"the tests wrote neither {VERIFIER}/reward.json nor reward.txt; they said:\n{output}")


def parse_text(data: bytes) -> Rewards:
    """The number of a reward.txt. ValueError for anything else, such as nothing or nan."""
    text = data.decode("utf-8", "replace").strip()
    if not text:
        raise ValueError("the file is empty; expected a number")
    try:
        return {"reward": _finite(float(text))}
    except ValueError:
        raise ValueError(f"{text[:60]!r}; expected a finite number") from None


def parse_json(data: bytes) -> Rewards:
    """The numbers of a reward.json: one number, or an object of them. ValueError for anything else."""
    if not data.strip():
        raise ValueError("the file is empty; expected an object of numbers")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply; expected an object of numbers") from None
    rewards = value if isinstance(value, dict) else {"reward": value}
    for key, reward in rewards.items():
        if not isinstance(reward, int | float):
            raise ValueError(f"{key}={str(reward)[:60]!r}; expected a finite number")
    try:
        return {key: _finite(float(reward)) for key, reward in rewards.items()}
    except OverflowError:
        raise ValueError("a number is too large; expected a finite number") from None


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value}; expected a finite number")
    return value
