"""One attempt at a task, whoever makes it: the sandbox as the task wants it, its steps in turn, a grade for each.

Knows tasks, sandboxes and grading; knows no message and no model. A trial is over after its last step, after a step
whose rewards are below its min_reward, and when a later step cannot be prepared in what the attempt has left: its files
find no place, its setup or its healthcheck fails. Whoever played before it may have done that, so it counts as 0, and
so do those after it; where the first step cannot be prepared it is nobody's doing but the task's, and a fault.
"""

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import trio

from envs.terminal.artifacts import collect_artifacts, write_artifacts
from envs.terminal.bubblewrap import Bubblewrap
from envs.terminal.dockerfile import Build, UnsupportedDockerfile, parse_dockerfile
from envs.terminal.files import read_tree
from envs.terminal.grading import Graded, Rewards, grade, led_astray, total
from envs.terminal.harbor_task import (
    ARTIFACTS,
    ENCODING,
    SOLUTION,
    Artifact,
    HarborTask,
    Healthcheck,
    Step,
    UnsupportedTask,
    resolve_variables,
)
from envs.terminal.rootfs import BuildFailed, Images, build
from envs.terminal.sandbox import PATH, CommandResult, File, Limits, RefusedFile, Sandbox, SandboxFactory, SandboxSpec
from envs.terminal.shell import Shell

Grading = Literal["fresh", "shared"]

_SOLUTION_AT = "/solution"
_SETUP = "setup.sh"


class NotHealthy(BuildFailed):
    """A task's healthcheck did not succeed in time."""


@dataclass(frozen=True)
class TrialOptions:
    """How trials are made, whatever the task. Seconds are wall clock; None is what the task says.

    sandbox: the back-end. images: what stands for an image of a FROM. grading: where tests run (grading.py). network:
    give it to tasks that ask for it, which is the default of the format. agent_seconds: of a step. command_seconds: of
    one command. grader_seconds: of the tests. memory_mb, disk_mb: what a sandbox may use where the task asks for more,
    or for nothing. output_bytes: of a command's output that are kept. host_env: variables of the trainer's environment
    that tasks may read by writing ${NAME}. artifacts: a directory in which each trial gets one of its own for the
    artifacts of each step, collected before it is graded; None collects none.
    """

    sandbox: SandboxFactory = field(default_factory=Bubblewrap)
    images: Images = field(default_factory=Images)
    grading: Grading = "fresh"
    network: bool = False
    agent_seconds: float | None = None
    command_seconds: float = 60.0
    grader_seconds: float | None = None
    memory_mb: int = 2048
    disk_mb: int = 512
    output_bytes: int = 8192
    host_env: tuple[str, ...] = ()
    artifacts: Path | None = None

    def __post_init__(self) -> None:
        for name in ("agent_seconds", "command_seconds", "grader_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: expected more than 0 seconds")
        if self.grading not in ("fresh", "shared"):
            raise ValueError(f"grading={self.grading!r}: expected fresh or shared")

    def variables(self, given: Mapping[str, str], where: str) -> dict[str, str]:
        """Variables of a task, with what they may read of the trainer's environment."""
        readable = {name: os.environ[name] for name in self.host_env if name in os.environ}
        return resolve_variables(given, readable, where)


@dataclass(frozen=True)
class Plan:
    """What a task's sandbox is made of, found out without making one."""

    build: Build
    spec: SandboxSpec
    workdir: str


def plan(task: HarborTask, options: TrialOptions) -> Plan:
    """How `task` would be set up. ValueError where it cannot be: its Dockerfile, its image, its variables."""
    environment = task.environment
    dockerfile, image = environment.dockerfile, environment.docker_image
    if dockerfile is not None and not (image and options.images.by_name):
        if (environment.context / ".dockerignore").exists():
            raise UnsupportedTask(f"{environment.context / '.dockerignore'} is not understood; remove it")
        try:
            made = parse_dockerfile(dockerfile.read_text(ENCODING), {"PATH": PATH})
        except (UnsupportedDockerfile, UnicodeDecodeError) as error:
            raise UnsupportedDockerfile(f"{dockerfile}: {error}") from None
    else:
        assert image is not None, "load_task saw to it"
        made = Build(image, (), {}, environment.workdir or "/app")
    workdir = environment.workdir or made.workdir
    env = {**made.env, **options.variables(environment.env, f"{task.name}: environment.env")}
    for step in task.steps if options.grading == "fresh" else ():
        if name := led_astray({name: env[name] for name in env.keys() - step.grader_env.keys()}):
            raise UnsupportedTask(
                f"{task.name}: its environment sets {name}={env[name]!r}, by which graders would run what commands of "
                f"the episode wrote; give {name} in verifier.env the value that graders should have, or grading=shared"
            )
    limits = Limits(
        seconds=options.command_seconds,
        memory_mb=min(environment.memory_mb or options.memory_mb, options.memory_mb),
        disk_mb=min(environment.storage_mb or options.disk_mb, options.disk_mb),
        output_bytes=options.output_bytes,
    )
    spec = SandboxSpec(
        image=options.images.find(made.base),
        workdir="/" + (workdir.split("/")[1] or "app"),
        env=env,
        network=options.network and environment.network,
        limits=limits,
    )
    return Plan(made, spec, workdir)


class Trial:
    """Owns a sandbox and the shell in it. `start` once, then commands and `hand_in`, then `aclose`."""

    def __init__(self, task: HarborTask, options: TrialOptions | None = None) -> None:
        self.task = task
        self.options = options or TrialOptions()
        self.graded: list[Graded] = []
        self.over = False
        self.spoilt = False  # a step could not be prepared in what those before it left
        self.timed_out = False
        self._open = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._shell: Shell | None = None
        self._deadline = float("inf")
        self._workdir = "/"
        self._name = ""  # of its directory of artifacts, once it has one

    @property
    def step(self) -> Step:
        """The step that is being played."""
        return self.task.steps[len(self.graded)]

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox, once `start` is done."""
        if self._sandbox is None:
            raise RuntimeError("the trial has no sandbox; start it first, and use it before it is closed")
        return self._sandbox

    @property
    def playing(self) -> bool:
        """Whether a step can be worked on and graded."""
        return self._shell is not None and not self.over

    @property
    def seconds_left(self) -> float:
        """Of the step, for whoever works on it."""
        return self._deadline - trio.current_time()

    async def start(self) -> Step:
        """Make the sandbox and prepare the first step. Errors: those of the task and of the sandbox."""
        found = plan(self.task, self.options)
        self._workdir = found.workdir
        environment = self.task.environment
        self._sandbox = await self._open.enter_async_context(self.options.sandbox(found.spec))
        context = read_tree(environment.context) if environment.context.is_dir() else {}
        changed = await build(self.sandbox, found.build, context, environment.build_seconds)
        if changed is not None and self.options.grading == "fresh":
            raise UnsupportedTask(
                f"{self.task.name}: its Dockerfile changes {changed}, which a fresh root for graders would lack; give "
                "rootfs= a directory that has the change, or grading=shared"
            )
        await self._do(f"mkdir -p -- /logs/agent {ARTIFACTS} {shlex.quote(self._workdir)}", "/")
        await self._until_healthy(environment.healthcheck)
        await self._prepare(self.step)
        return self.step

    async def run(self, command: str) -> CommandResult:
        """Run a command in the shell of the step, for as long as it may. `timed_out` tells when the step's time is up.

        What the step has left bounds the command; with nothing left it is not run.
        """
        assert self._shell is not None, "start comes first"
        left = self.seconds_left
        if left <= 0:
            self.timed_out = True
            return CommandResult(None, "", timed_out=True, notice="not run: the time for the task is up")
        result = await self._shell.run(command, seconds=min(self.options.command_seconds, left))
        self.timed_out = self.seconds_left <= 0
        return result

    async def solve(self) -> None:
        """Work on the step as its reference solution does. UnsupportedTask where it has none."""
        directory = self.step.solution
        files = read_tree(directory) if directory is not None else {}
        if SOLUTION not in files:
            raise UnsupportedTask(f"{self.task.name} {self.step.name}: it has no reference solution, {SOLUTION}")
        files[SOLUTION] = File(files[SOLUTION].data, files[SOLUTION].mode | 0o755)
        env = self.options.variables(self.task.solution_env, f"{self.task.name}: solution.env")
        await self._close_shell()
        await self.sandbox.attach(_SOLUTION_AT, files)
        try:
            command = f"({_SOLUTION_AT}/{SOLUTION}) >/logs/agent/oracle.txt 2>&1"
            await self.sandbox.run(command, cwd=self._workdir, env=env, seconds=max(self.seconds_left, 0.001))
        finally:
            with trio.CancelScope(shield=True):
                await self.sandbox.detach(_SOLUTION_AT)

    async def hand_in(self) -> bool:
        """Grade the step. True where another step follows, and is prepared. Errors: GraderError, of a grader.

        Whatever still runs is killed before: no process of one step sees the tests of it, or the next step.
        """
        step = self.step
        await self._close_shell()
        if self.options.artifacts is not None:
            await self._keep_artifacts(self.options.artifacts, step)
        env = self.options.variables(step.grader_env, f"{self.task.name}: verifier.env")
        graded = await grade(
            self.sandbox,
            step,
            fresh=self.options.grading == "fresh",
            cwd=self._workdir,
            env=env,
            seconds=self.options.grader_seconds or step.grader_seconds,
        )
        self.graded.append(graded)
        self.over = len(self.graded) == len(self.task.steps) or falls_short(graded.rewards, step.min_reward)
        if not self.over:
            try:
                await self._prepare(self.step)
            except (BuildFailed, RefusedFile):
                self.over = self.spoilt = True
        return not self.over

    def reward(self, key: str | None = None, *, unplayed: bool = False) -> float:
        """The reward of the steps graded so far. unplayed: steps that were never reached count as 0, which those that
        could not be prepared do anyway."""
        missing = len(self.task.steps) - len(self.graded) if unplayed or self.spoilt else 0
        return total(combined([each.rewards for each in self.graded], final=self.task.final, zeros=missing), key)

    async def aclose(self) -> None:
        """Close the shell and the sandbox."""
        self.over = True
        try:
            await self._close_shell()
        finally:
            self._sandbox = None
            await self._open.aclose()

    # --- inside ---

    async def _prepare(self, step: Step) -> None:
        """The files, the setup and the healthcheck of a step, and a new shell."""
        if step.workdir is not None:
            files = read_tree(step.workdir)
            await self.sandbox.write_files({f"{self._workdir.rstrip('/')}/{path}": files[path] for path in files})
            if _SETUP in files:
                await self._do(f"bash {_SETUP}", self._workdir)
        await self._until_healthy(step.healthcheck)
        self._shell = Shell(self.sandbox, cwd=self._workdir)
        seconds = self.options.agent_seconds or step.agent_seconds
        self._deadline = float("inf") if seconds is None else trio.current_time() + seconds
        self.timed_out = False

    async def _keep_artifacts(self, place: Path, step: Step) -> None:
        self._name = self._name or f"{self.task.directory.name}-{secrets.token_hex(4)}"
        wanted = [Artifact(ARTIFACTS), *step.artifacts]
        found = await collect_artifacts(self.sandbox, wanted)
        await trio.to_thread.run_sync(write_artifacts, place / self._name / step.name, found)

    async def _do(self, command: str, cwd: str) -> None:
        result = await self.sandbox.run(command, cwd=cwd, seconds=self.task.environment.build_seconds)
        if result.exit_code != 0:
            said = f"{result.stdout}{result.stderr}".strip()
            raise BuildFailed(f"{self.task.name}: {command!r} gave {result.exit_code} {result.notice}\n{said}")

    async def _until_healthy(self, check: Healthcheck | None) -> None:
        if check is None:
            return
        began, failures = trio.current_time(), 0
        while failures < max(check.retries, 1):
            starting = trio.current_time() - began < check.start_period
            if (await self.sandbox.run(check.command, cwd=self._workdir, seconds=check.timeout)).exit_code == 0:
                return
            failures += not starting
            if failures < check.retries:
                await trio.sleep(check.start_interval if starting else check.interval)
        raise NotHealthy(f"{self.task.name}: the healthcheck failed {failures} times in a row: {check.command}")

    async def _close_shell(self) -> None:
        if self._shell is not None:
            await self._shell.aclose()


def falls_short(rewards: Rewards, least: Mapping[str, float]) -> bool:
    """Whether any key that has a least reward is below it, or missing."""
    return any(rewards.get(key, float("-inf")) < value for key, value in least.items())


def combined(rewards: Sequence[Rewards], *, final: bool, zeros: int = 0) -> Rewards:
    """The rewards of a trial from those of its steps: the last ones, or the mean of each key with a missing one as 0.

    zeros: so many steps more, of which nothing was done.
    """
    keys = list(dict.fromkeys(key for each in rewards for key in each))
    if final:
        return dict.fromkeys(keys, 0.0) if zeros else dict(rewards[-1])
    return {key: sum(each.get(key, 0.0) for each in rewards) / (len(rewards) + zeros) for key in keys}
