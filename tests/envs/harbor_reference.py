"""What the package `harbor` itself says of tasks: its trials, agents and verifier, on a small sandbox of bubblewrap.

    python tests/envs/harbor_reference.py TASK...       for a Python of 3.12 or later that has harbor installed

Prints one JSON object a trial: task, agent (oracle or nop), rewards or null, error or null. Knows nothing of this
project, so that it can disagree with it. The sandbox runs only the solutions of tasks that we wrote: it is no defence.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult  # pyright: ignore[reportMissingImports]
from harbor.environments.capabilities import EnvironmentCapabilities  # pyright: ignore[reportMissingImports]
from harbor.models.trial import config as trials  # pyright: ignore[reportMissingImports]
from harbor.trial.trial import Trial  # pyright: ignore[reportMissingImports]

_WRITABLE = ("app", "logs", "tests", "solution", "tmp", "srv")
_LINKS = [
    word
    for link in (Path("/", name) for name in ("bin", "sbin", "lib", "lib64"))
    if link.is_symlink()
    for word in ("--symlink", str(link.readlink()), str(link))
]


class BubblewrapEnvironment(BaseEnvironment):
    """The programs of this machine, and a few directories of the trial's own."""

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if not (self.environment_dir / "Dockerfile").is_file():
            raise FileNotFoundError(self.environment_dir / "Dockerfile")

    async def start(self, force_build: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="harbor-"))
        for name in (*_WRITABLE, "logs/agent", "logs/verifier", "logs/artifacts"):
            (self.root / name).mkdir()
        for line in (self.environment_dir / "Dockerfile").read_text().splitlines():
            words = line.split()
            if words[:1] == ["COPY"]:
                await self.upload_dir(self.environment_dir / words[1], words[2])
            elif words and words[0] not in ("FROM", "WORKDIR"):
                raise ValueError(f"only FROM, WORKDIR and COPY of a directory are understood here: {line}")

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _here(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._here(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._here(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._here(target_dir), symlinks=True, dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self._here(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._here(source_dir), target_dir, symlinks=True, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        argv = ["bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc", "/etc"]
        argv += _LINKS
        for name in _WRITABLE:
            argv += ["--bind", str(self.root / name), f"/{name}"]
        argv += ["--dev", "/dev", "--proc", "/proc", "--clearenv", "--setenv", "PATH", "/usr/bin:/usr/sbin:/bin"]
        for name, value in (env or {}).items():
            argv += ["--setenv", name, value]
        argv += ["--chdir", cwd or self.task_env_config.workdir or "/app", "--", "/bin/bash", "-c", command]
        process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL, stdout=-1, stderr=-1)
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


async def play(task: Path, agent: str, trials_dir: Path) -> dict[str, object]:
    """One trial of Harbor's."""
    config = trials.TrialConfig(
        task=trials.TaskConfig(path=task),
        trial_name=f"{task.name}-{agent}",
        trials_dir=trials_dir,
        agent=trials.AgentConfig(name=agent),
        environment=trials.EnvironmentConfig(import_path="harbor_reference:BubblewrapEnvironment"),
    )
    result = await (await Trial.create(config)).run()
    rewards = result.verifier_result.rewards if result.verifier_result else None
    error = result.exception_info.exception_type if result.exception_info else None
    return {"task": str(task), "agent": agent, "rewards": rewards, "error": error}


async def main(tasks: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as place:
        for task in tasks:
            for agent in ("oracle", "nop"):
                print(json.dumps(await play(task, agent, Path(place))), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    asyncio.run(main([Path(argument).resolve() for argument in sys.argv[1:]]))
