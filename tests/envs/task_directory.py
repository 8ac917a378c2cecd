"""Small tasks in Harbor's format, written for tests."""

from pathlib import Path

PASS_IF_42 = """#!/bin/bash
if [ "$(cat /app/answer 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""
MINIMAL = {
    "task.toml": "",
    "instruction.md": "Write 42 to /app/answer.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "tests/test.sh": PASS_IF_42,
    "solution/solve.sh": "#!/bin/bash\nset -e\necho 42 >answer\n",
}
_NAMED = {"toml": "task.toml", "instruction": "instruction.md", "test": "tests/test.sh"}
_NAMED |= {"solve": "solution/solve.sh", "dockerfile": "environment/Dockerfile"}


def write_task(directory: Path, **files: str | None) -> Path:
    """A task with the minimal files and others over them, by path or by the names above; None leaves a file out."""
    for path, text in (MINIMAL | {_NAMED.get(name, name): text for name, text in files.items()}).items():
        if text is not None:
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text)
    return directory


def rewards(text: str, name: str = "reward.txt") -> str:
    """A test script that leaves `text` as the reward."""
    return f"#!/bin/bash\nprintf '%s' '{text}' >/logs/verifier/{name}\n"
