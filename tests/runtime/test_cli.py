"""The command line shows runs, and says in one line what a user can mend."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fabricate import fabricate

from jaxrl import cli
from jaxrl.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fabricate(tmp_path_factory.mktemp("runs") / "demo", steps=21)


def test_report_writes_the_page_and_the_curve(run, capsys):
    assert main(["report", str(run.path)]) == 0
    said, *where = capsys.readouterr().out.splitlines()
    assert said.endswith(".")
    assert where == [str(run.report), str(run.curve)]
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


def late_names():
    return re.findall(r'_late\("([\w.]+):(\w+)"\)', Path(cli.__file__).read_text())


def test_what_a_command_will_import_is_there():
    assert len(late_names()) > 8
    for module, name in late_names():
        assert callable(getattr(importlib.import_module(module), name)), f"{module}:{name}"


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], ["jax", "matplotlib", "numpy", "rich", "transformers", "trio"]),
        (["show", "{run}"], ["jax", "matplotlib", "transformers", "trio"]),
        (["report", "{run}"], ["jax", "transformers", "trio"]),
    ],
    ids=["help", "show", "report"],
)
def test_a_command_imports_what_it_needs_and_no_more(run, arguments, unneeded):
    program = (
        "import sys\nfrom jaxrl.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print(sorted(set({unneeded}) & set(sys.modules)), file=sys.stderr)"
    )
    given = [a.format(run=run.path) for a in arguments]
    done = subprocess.run((sys.executable, "-c", program, *given), capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout


def test_the_command_is_installed_and_lists_its_commands():
    done = subprocess.run((sys.executable, "-m", "jaxrl.cli", "--help"), capture_output=True, text=True, check=True)
    assert "report" in done.stdout
    assert "show" in done.stdout
    assert "play" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipes.gues"], "no recipe 'recipes.gues'; there are: recipes.guess_number, recipes."),
        (["guess_number"], "no recipe 'guess_number'; there are: recipes.guess_number, recipes."),
        (["recipes.sft_warmup"], "recipes.sft_warmup has no DEFAULTS"),
        (["recipes.guess_number", "split=dev"], "split='dev': expected 'train' or 'test'"),
        (["recipes.guess_number", "index=x"], "index=x: expected 0 or more"),
        (["recipes.guess_number", "index=128"], "less than the 128 groups"),
        (["recipes.guess_number", "dataset_builder.hgh=3"], "dataset_builder.high"),
        (["recipes.guess_number", "dataset_builder=None"], "no dataset_builder"),
        (["recipes.guess_number", "model_name=nowhere/at-all.gguf"], "nowhere/at-all.gguf"),
    ],
)
def test_play_says_in_one_line_what_it_cannot_play(capsys, arguments, said):
    assert main(["play", *arguments]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_play_does_not_blame_the_recipe_for_what_it_imports(tmp_path, monkeypatch):
    (tmp_path / "recipe_without_its_friend.py").write_text("import a_friend_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_friend_that_is_not_there"):
        main(["play", "recipe_without_its_friend"])


def test_algorithms_lists_the_rows_with_their_parts_and_papers(capsys):
    assert main(["algorithms"]) == 0
    out = capsys.readouterr().out
    (dapo,) = (line for line in out.splitlines() if line.startswith("dapo "))
    assert "advantage=mean_std loss=ppo aggregation=token_mean  (arXiv 2503.14476)" in dapo
    assert "kl=k3" in out


def test_algorithms_explains_one_with_overrides(capsys):
    assert main(["algorithms", "dapo", "kl=k3", "kl_coef=0.2"]) == 0
    out = capsys.readouterr().out
    assert "loss=ppo  clip_low_threshold=0.8 clip_high_threshold=1.28" in out
    assert "kl=k3  kl_coef=0.2" in out
    assert "arXiv 1707.06347" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dapoo"], "did you mean dapo"),
        (["dapo", "kl_coef=0.2"], "kl_coef has no effect"),
        (["dr_grpo"], "divides by a constant length"),
    ],
)
def test_algorithms_says_in_one_line_what_is_wrong(arguments, message, capsys):
    assert main(["algorithms", *arguments]) == 1
    assert message in capsys.readouterr().err
