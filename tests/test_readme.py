"""The program in the README is run, shortened: what a newcomer copies has to work."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_program_in_the_readme_has_at_most_thirty_lines() -> None:
    assert sum(bool(line) for line in PROGRAM.splitlines()) <= 30  # as `make format` lays them out


@pytest.mark.slow
def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    shorter = PROGRAM.replace("steps=30", "steps=4").replace("* 160", "* 32").replace("runs/", f"{tmp_path}/")
    assert shorter != PROGRAM
    exec(compile(shorter, "README.md", "exec"), {"__name__": "__main__"})
    lines = (tmp_path / "letter" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert (tmp_path / "letter" / "report.html").is_file()


def test_the_commands_in_the_readme_are_targets_of_the_makefile() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
