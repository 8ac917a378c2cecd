"""A directory in Harbor's task format, read and checked: what the model is told, where the tests lie, what is allowed.

Knows the format, schema 1.0 to 1.4; it must not know a sandbox, a message or a reward. A task of one step and one of
several are the same thing here: a list of steps. What this project cannot do is refused by name when the task is
loaded (`UnsupportedTask`), never left out in silence. Keys that the format does not have are ignored, as Harbor does.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
TEST, SOLUTION = "test.sh", "solve.sh"
ENCODING = "utf-8-sig"
"""Of a task's files. A mark of the byte order in front of UTF-8 is none of the text."""
ARTIFACTS = "/logs/artifacts"
"""What an episode leaves here is an artifact without being declared."""


class InvalidTask(ValueError):
    """A directory that is no task in Harbor's format. The message names the file and the key."""


class UnsupportedTask(ValueError):
    """A task that needs what this project does not offer. The message names it."""


@dataclass(frozen=True)
class Healthcheck:
    """A command that ends with 0 once the environment is ready; numbers are seconds, and tries in a row."""

    command: str
    interval: float = 5.0
    timeout: float = 30.0
    start_period: float = 0.0
    start_interval: float = 5.0
    retries: int = 3


@dataclass(frozen=True)
class Artifact:
    """A file or directory of the sandbox worth keeping. destination: where below the episode's own; None: `source`."""

    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """What the sandbox is made of. Variables may still hold ${NAME} (`resolve_variables`); sizes are MiB."""

    context: Path
    docker_image: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    build_seconds: float = 600.0
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: bool = True
    healthcheck: Healthcheck | None = None

    @property
    def dockerfile(self) -> Path | None:
        """The Dockerfile, if there is one."""
        path = self.context / "Dockerfile"
        return path if path.is_file() else None


@dataclass(frozen=True)
class Step:
    """One instruction and how its result is graded.

    tests: directories that become /tests, a later one over an earlier. script: the test script in them. solution: the
    directory with the reference solution, None without one. workdir: files that are put into the working directory
    before the step. agent_seconds: None is unlimited. separate: graders see nothing but the artifacts. min_reward:
    with less in any of these keys the steps after it are not played.
    """

    name: str
    instruction: str
    tests: tuple[Path, ...]
    solution: Path | None = None
    workdir: Path | None = None
    agent_seconds: float | None = None
    grader_seconds: float = 600.0
    grader_env: Mapping[str, str] = field(default_factory=dict)
    separate: bool = False
    collect: tuple[tuple[str, float], ...] = ()
    min_reward: Mapping[str, float] = field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    artifacts: tuple[Artifact, ...] = ()


@dataclass(frozen=True)
class HarborTask:
    """A task of one or more steps. final: its reward is the last step's, not the mean of all.

    Paths are read when they are used, so the directory must be there wherever the task is played.
    """

    directory: Path
    name: str
    steps: tuple[Step, ...]
    environment: Environment
    solution_env: Mapping[str, str] = field(default_factory=dict)
    final: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


def find_tasks(directory: Path) -> list[Path]:
    """The directories at and below `directory` that hold a task.toml, sorted. ValueError where there is none."""
    found = sorted(path.parent for path in directory.rglob("task.toml")) if directory.is_dir() else []
    if not found:
        raise ValueError(f"{directory}: expected a directory with tasks in Harbor's format; no task.toml is below it")
    return found


def load_task(directory: Path) -> HarborTask:
    """The task in `directory`. InvalidTask, or UnsupportedTask, say which key of which file is the matter."""
    path = directory / "task.toml"
    try:
        values = tomllib.loads(path.read_text(ENCODING))
    except FileNotFoundError:
        raise InvalidTask(f"{path} is missing: a task in Harbor's format has one") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of too many digits
        raise InvalidTask(f"{path}: {error}") from None
    root = _Table(values, str(path), "")
    version = root.text("schema_version", root.text("version", SCHEMAS[-1]))
    if version not in SCHEMAS:
        raise UnsupportedTask(f"{path}: schema_version={version!r}; this project reads {SCHEMAS[0]} to {SCHEMAS[-1]}")
    _refuse_unsupported(root, directory)
    strategy = root.choice("multi_step_reward_strategy", ("mean", "final"), "mean")
    return HarborTask(
        directory=directory,
        name=root.table("task").text("name", directory.name) or directory.name,
        steps=_steps(root, directory),
        environment=_environment(root.table("environment"), directory / "environment"),
        solution_env=root.table("solution").variables("env"),
        final=strategy == "final",
        metadata=root.table("metadata").values,
    )


# --- tables of task.toml ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """One table, and what its keys are called in messages."""

    values: Mapping[str, Any]
    file: str
    name: str

    def _get(self, key: str, wanted: type | tuple[type, ...], what: str) -> Any:
        value = self.values.get(key)
        if value is None or (isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool)):
            return value
        raise self.wrong(key, what)

    def wrong(self, key: str, what: str) -> InvalidTask:
        where = f"{self.name}.{key}" if self.name else key
        return InvalidTask(f"{self.file}: {where}={self.values.get(key)!r}; expected {what}")

    def text(self, key: str, default: Any = None) -> Any:
        value = self._get(key, str, "a string")
        if value is not None and "\0" in value:
            raise self.wrong(key, "a string without NUL")
        return default if value is None else value

    def path(self, key: str) -> str | None:
        value = self.text(key)
        if value is not None and (not value.startswith("/") or {".", ".."} & set(value.split("/"))):
            raise self.wrong(key, "an absolute path, without . and ..")
        return value

    def flag(self, key: str) -> bool | None:
        return self._get(key, bool, "true or false")

    def choice(self, key: str, options: Sequence[str], default: str) -> str:
        value = self.text(key, default)
        if value not in options:
            raise self.wrong(key, f"one of {', '.join(options)}")
        return value

    def number(self, key: str, default: Any = None, *, least: float = 0.0) -> Any:
        """A finite number of at least `least`, which is 0 or no bound at all."""
        value = self._get(key, (int, float), "a number")
        if value is not None and not least <= value <= sys.float_info.max:
            raise self.wrong(key, "a finite number, 0 or more" if least == 0 else "a finite number")
        return default if value is None else value

    def table(self, key: str) -> "_Table":
        return _Table(self._get(key, dict, "a table") or {}, self.file, f"{self.name}.{key}" if self.name else key)

    def tables(self, key: str) -> list["_Table"]:
        values = self._get(key, list, "an array of tables") or []
        if not all(isinstance(each, dict) for each in values):
            raise self.wrong(key, "an array of tables")
        return [_Table(each, self.file, f"{self.name}.{key}[{i}]".lstrip(".")) for i, each in enumerate(values)]

    def variables(self, key: str) -> Mapping[str, str]:
        table = self.table(key)
        for name in table.values:
            if not name or {"=", "\0"} & set(name):
                raise table.wrong(name, "a name that is not empty, without = and NUL")
        return {name: table.text(name) for name in table.values}

    def array(self, key: str) -> list[Any]:
        return self._get(key, list, "an array") or []

    def texts(self, key: str) -> tuple[str, ...]:
        values = self._get(key, list, "an array of strings") or []
        if not all(isinstance(each, str) and "\0" not in each for each in values):
            raise self.wrong(key, "an array of strings without NUL")
        return tuple(values)


# --- what is refused -------------------------------------------------------------------------------

_NO_ACCELERATOR = "a sandbox has no accelerator"
_UNSUPPORTED: Mapping[tuple[str, str], tuple[Callable[[Any], bool], str]] = {
    ("environment", "os"): (lambda value: str(value).lower() != "linux", "only Linux tasks run here"),
    ("environment", "gpus"): (bool, _NO_ACCELERATOR),
    ("environment", "tpu"): (bool, _NO_ACCELERATOR),
    ("environment", "mcp_servers"): (bool, "the model is given a shell, and no MCP servers"),
    ("environment", "skills_dir"): (bool, "the model is given a shell, and no skills"),
    ("verifier", "environment"): (bool, "graders run on the environment's own image; one of their own is not made"),
}
_ROOT = (None, "root", 0, "0")


def _refuse_unsupported(root: _Table, directory: Path) -> None:
    for (table, key), (refused, why) in _UNSUPPORTED.items():
        if key in (values := root.table(table).values) and refused(values[key]):
            raise UnsupportedTask(f"{root.file}: {table}.{key}={values[key]!r}: {why}")
    for path in ("environment/docker-compose.yaml", "tests/Dockerfile", "tests/docker-compose.yaml", "trajectory.json"):
        if (directory / path).exists():
            raise UnsupportedTask(f"{directory / path}: a task that needs this file is not supported")
    for ignored in directory.rglob(".harborignore"):
        raise UnsupportedTask(f"{ignored}: files cannot be left out of a task; remove them, and this")


def _refuse_user(table: _Table) -> None:
    if (user := table.values.get("user")) not in _ROOT:
        raise UnsupportedTask(
            f"{table.file}: {table.name}.user={user!r}: a sandbox has one user, who is root inside it; leave it out"
        )


def _network(table: _Table) -> bool | None:
    """Whether a table gives a network; None where it does not say. A list of hosts is refused."""
    if "network_mode" not in table.values:
        return None
    mode = table.choice("network_mode", ("public", "no-network", "allowlist"), "public")
    if mode == "allowlist":
        raise UnsupportedTask(
            f"{table.file}: {table.name}.network_mode={mode!r}: a sandbox reaches everything or nothing; say public or "
            "no-network"
        )
    return mode == "public"


def _refuse_other_network(table: _Table, environment: _Table) -> None:
    if _network(table) not in (None, _has_network(environment)):
        raise UnsupportedTask(
            f"{table.file}: {table.name}.network_mode={table.text('network_mode')!r}: commands and graders have the "
            "environment's network; say the same in environment.network_mode, or leave this out"
        )


def _has_network(environment: _Table) -> bool:
    return _network(environment) is not False and environment.flag("allow_internet") is not False


# --- the parts -------------------------------------------------------------------------------------


def _environment(table: _Table, context: Path) -> Environment:
    found = Environment(
        context=context,
        docker_image=table.text("docker_image"),
        workdir=table.path("workdir"),
        env=table.variables("env"),
        build_seconds=table.number("build_timeout_sec", 600.0),
        memory_mb=_size(table, "memory"),
        storage_mb=_size(table, "storage"),
        network=_has_network(table),
        healthcheck=_healthcheck(table),
    )
    if found.dockerfile is None and found.docker_image is None:
        raise InvalidTask(f"{context}: expected a Dockerfile, or environment.docker_image in {table.file}")
    return found


_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


def _size(table: _Table, key: str) -> int | None:
    """MiB of `<key>_mb`, or of the older `<key>` that is spelled like 2G."""
    if (size := table.number(f"{key}_mb")) is not None:
        return int(size)
    if (text := table.text(key)) is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])\s*", text.upper())
    if not found:
        raise table.wrong(key, "a size like 512M or 2G")
    return int(min(float(found[1]), sys.maxsize) * _UNITS[found[2]])


def _healthcheck(table: _Table) -> Healthcheck | None:
    if "healthcheck" not in table.values:
        return None
    found = table.table("healthcheck")
    if (command := found.text("command")) is None:
        raise found.wrong("command", "a shell command")
    names = ("interval", "timeout", "start_period", "start_interval")
    given = {name: found.number(f"{name}_sec") for name in names} | {"retries": found.number("retries")}
    return Healthcheck(command, **{name: value for name, value in given.items() if value is not None})


def _steps(root: _Table, directory: Path) -> tuple[Step, ...]:
    tables = root.tables("steps")
    if not tables:
        if root.text("multi_step_reward_strategy"):
            raise root.wrong("multi_step_reward_strategy", "none, since the task has no steps")
        return (_step(root, root, directory, directory, ""),)
    names = [table.text("name", "") for table in tables]
    for table, name in zip(tables, names, strict=True):
        if not name or name in (".", "..") or re.search(r"[/\\\0]", name):
            raise table.wrong("name", "the name of a directory in steps/")
    if len({name.casefold() for name in names}) < len(names):
        raise InvalidTask(f"{root.file}: the steps are named {', '.join(names)}; expected each name once")
    return tuple(
        _step(table, root, directory / "steps" / name, directory, name)
        for table, name in zip(tables, names, strict=True)
    )


def _step(table: _Table, root: _Table, place: Path, directory: Path, name: str) -> Step:
    """The step whose files lie at `place`; what its table leaves out, the task's says."""
    several = place != directory
    agent, verifier = table.table("agent"), table.table("verifier")
    for each in (agent, verifier, root.table("agent"), root.table("verifier")):
        _refuse_user(each)
        _refuse_other_network(each, root.table("environment"))
    if "environment" in verifier.values:
        raise UnsupportedTask(f"{root.file}: {verifier.name}.environment: graders run on the environment's own image")
    tests = tuple(each for each in dict.fromkeys((directory / "tests", place / "tests")) if each.is_dir())
    if not any((each / TEST).is_file() for each in tests):
        raise InvalidTask(f"{place / 'tests' / TEST} is missing: it is what grades the task")
    declared = [*root.array("artifacts"), *(table.array("artifacts") if several else [])]
    shared = root.table("verifier")
    mode = verifier.choice("environment_mode", ("", "shared", "separate"), "") or shared.text("environment_mode", "")
    return Step(
        name=name,
        instruction=_instruction(place / "instruction.md"),
        tests=tests,
        solution=next((each for each in (place / "solution", directory / "solution") if each.is_dir()), None),
        workdir=place / "workdir" if several and (place / "workdir").is_dir() else None,
        agent_seconds=agent.number("timeout_sec", root.table("agent").number("timeout_sec")),
        grader_seconds=verifier.number("timeout_sec", shared.number("timeout_sec", 600.0)),
        grader_env=shared.variables("env"),
        separate=mode == "separate",
        collect=tuple(_collect(each) for each in [*shared.tables("collect"), *verifier.tables("collect") * several]),
        min_reward=_min_reward(table),
        healthcheck=_healthcheck(table) if several else None,
        artifacts=tuple(_artifact(each, root) for each in declared),
    )


def _instruction(path: Path) -> str:
    """The text of an instruction, without the lines in front that only mark it as a benchmark's."""
    try:
        lines = path.read_text(ENCODING).split("\n")
    except FileNotFoundError:
        raise InvalidTask(f"{path} is missing: it is what the model is told") from None
    except UnicodeDecodeError as error:
        raise InvalidTask(f"{path}: {error}") from None
    marker = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)
    while lines and marker.fullmatch(lines[0]):
        lines.pop(0)
    return "\n".join(lines).strip("\n")


def _collect(table: _Table) -> tuple[str, float]:
    _refuse_user(table)
    if table.text("service", "main") != "main":
        raise UnsupportedTask(f"{table.file}: {table.name}.service: a sandbox is one container")
    if (command := table.text("command")) is None:
        raise table.wrong("command", "a shell command")
    return command, table.number("timeout_sec", 60.0)


_NO_BOUND = -sys.float_info.max


def _min_reward(table: _Table) -> Mapping[str, float]:
    value = table.values.get("min_reward")
    if isinstance(value, dict):
        least = table.table("min_reward")
        return {key: float(least.number(key, least=_NO_BOUND)) for key in value}
    number = table.number("min_reward", least=_NO_BOUND)
    return {} if number is None else {"reward": float(number)}


def _artifact(value: Any, root: _Table) -> Artifact:
    table = _Table(value if isinstance(value, dict) else {"source": value}, root.file, "artifacts")
    if table.text("service", "main") != "main":
        raise UnsupportedTask(f"{root.file}: artifacts.service: a sandbox is one container")
    source, destination = table.path("source"), table.text("destination")
    if not source or not source.strip("/"):
        raise table.wrong("source", "an absolute path below /")
    if destination is not None and (destination.startswith("/") or ".." in destination.split("/")):
        raise table.wrong("destination", "a relative path, without ..")
    return Artifact(source.rstrip("/"), destination or None, table.texts("exclude"))


# --- variables -------------------------------------------------------------------------------------

_REFERENCE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def resolve_variables(variables: Mapping[str, str], readable: Mapping[str, str], where: str) -> dict[str, str]:
    """`variables` with each value that is ${NAME}, or ${NAME:-default}, looked up in `readable`.

    readable: what a task may read of the trainer's environment, which is nothing unless its user says so. ValueError
    for a name that is neither there nor has a default.
    """
    found: dict[str, str] = {}
    for name, value in variables.items():
        reference = _REFERENCE.fullmatch(value)
        if reference is None:
            found[name] = value
        elif reference[1] in readable or reference[2] is not None:
            found[name] = readable.get(reference[1], reference[2])
        else:
            raise ValueError(
                f"{where}: {name}={value!r} asks for the variable {reference[1]} of this machine, which tasks may not "
                "read; name it in host_env, and set it"
            )
    return found
