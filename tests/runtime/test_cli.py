"""The command line shows runs, and says in one line what a user can mend."""

import subprocess
import sys

import pytest
from fabricate import fabricate

from jaxrl.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fabricate(tmp_path_factory.mktemp("runs") / "demo", steps=21)


def test_report_writes_the_page_and_the_curve(run, capsys):
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out.split() == [str(run.report), str(run.curve)]
    assert run.report.exists()


def test_show_prints_the_latest_episodes_best_first(run, capsys):
    assert main(["show", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "step 20, guess 1-8, group 0 member 0: 2 turns" in out
    assert "So it is 12" in out
    assert "10 more episodes" in out


def test_X11_show_prints_hostile_text_as_it_is(run, capsys):
    assert main(["show", str(run.path), "--step", "10", "--episodes", "99", "--test"]) == 0
    out = capsys.readouterr().out
    assert "<script>alert(1)</script> [/bold] [red]x[/red] \u27e81B\u27e9[31m" in out
    assert "\x1b" not in out
    assert "more episodes" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "{run}", "--step", "3"], "no recorded episodes of step 3; it has: 0, 10, 20"),
        (["show", "{run}/rollouts"], "has no recorded episodes"),
        (["report", "{run}/nowhere"], "has no metrics.jsonl"),
    ],
)
def test_errors_are_one_line(run, capsys, arguments, said):
    assert main([a.format(run=run.path) for a in arguments]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_command_is_installed_and_lists_its_commands():
    done = subprocess.run((sys.executable, "-m", "jaxrl.cli", "--help"), capture_output=True, text=True, check=True)
    assert "report" in done.stdout
    assert "show" in done.stdout
