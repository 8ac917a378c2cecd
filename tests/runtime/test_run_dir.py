"""A run directory is created, resumed and deleted only when that is what was meant."""

import io
import json
import subprocess

import pytest

from jaxrl.runtime.run_dir import RunDirError, claimed, is_run_dir, open_run_dir, write_atomic

CONFIG = {"model": "tiny", "lr": 1e-3, "max_steps": 10, "loss": {"name": "grpo", "clip": [0.2, 0.2]}, "seed": None}


def files(path):
    return sorted(p.name for p in path.iterdir())


def test_a_new_directory_holds_the_configuration_and_the_versions(tmp_path):
    run = open_run_dir(tmp_path / "a" / "b", "raise", config=CONFIG)
    assert not run.resumed
    assert is_run_dir(run.path)
    assert json.loads(run.config.read_text()) == CONFIG
    (start,) = json.loads(run.versions.read_text())
    assert {"jaxrl", "jax", "trio"} <= start["packages"].keys()
    assert start["python"].startswith("3.")
    assert files(run.path) == ["config.json", "versions.json"]


def test_an_empty_directory_is_taken_whatever_the_behavior(tmp_path):
    for name in ("ask", "resume", "delete", "raise"):
        (tmp_path / name).mkdir()
        assert not open_run_dir(tmp_path / name, name, config=CONFIG).resumed


def test_a_start_that_broke_off_before_the_configuration_is_taken_over(tmp_path):
    (tmp_path / "versions.json").write_text("[")
    (tmp_path / "config.json.part").write_text("{")
    assert not open_run_dir(tmp_path, "ask", config=CONFIG).resumed


def test_raise_and_ask_without_a_terminal_tell_the_options(tmp_path, monkeypatch):
    open_run_dir(tmp_path, config=CONFIG)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for behavior in ("raise", "ask"):
        with pytest.raises(RunDirError, match=r"=resume .*=delete"):
            open_run_dir(tmp_path, behavior, config=CONFIG)


@pytest.mark.parametrize(("answers", "resumed"), [(["what?", "R"], True), (["delete"], False)])
def test_ask_does_what_is_answered(tmp_path, answers, resumed):
    open_run_dir(tmp_path, config=CONFIG)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    left = iter(answers)
    run = open_run_dir(tmp_path, "ask", config=CONFIG, ask=lambda question: next(left))
    assert run.resumed is resumed
    assert run.metrics.exists() is resumed
    with pytest.raises(RunDirError):
        open_run_dir(tmp_path, "ask", config=CONFIG, ask=lambda question: "q")


def test_an_unknown_behavior_is_refused_before_anything_is_touched(tmp_path):
    with pytest.raises(RunDirError, match="ask, resume, delete, raise"):
        open_run_dir(tmp_path / "new", "overwrite", config=CONFIG)  # type: ignore[arg-type]
    assert files(tmp_path) == []


@pytest.mark.parametrize("behavior", ["delete", "resume"])
@pytest.mark.parametrize("others", [{}, {"config.json": '{"name": "webpack"}'}, {"versions.json": "[]"}])
def test_a_directory_that_is_not_a_run_is_never_touched(tmp_path, behavior, others):
    for name, text in ({"thesis.tex": "precious"} | others).items():
        (tmp_path / name).write_text(text)
    before = files(tmp_path)
    with pytest.raises(RunDirError, match="neither resumed nor deleted"):
        open_run_dir(tmp_path, behavior, config=CONFIG)
    assert files(tmp_path) == before


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirError, match="is a file"):
        open_run_dir(tmp_path / "run", config=CONFIG)


def test_delete_empties_the_run_and_follows_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "data").write_text("kept")
    run = open_run_dir(tmp_path / "run", config=CONFIG)
    (run.path / "link").symlink_to(outside)
    run.rollouts.mkdir()
    (run.rollouts / "step_000000.jsonl").write_text("")
    run = open_run_dir(run.path, "delete", config=CONFIG | {"lr": 2.0})
    assert files(run.path) == ["config.json", "versions.json"]
    assert json.loads(run.config.read_text())["lr"] == 2.0
    assert (outside / "data").read_text() == "kept"


def test_resume_with_the_same_configuration_adds_a_start(tmp_path):
    open_run_dir(tmp_path, config=CONFIG)
    (tmp_path / "metrics.jsonl").write_text("x")
    run = open_run_dir(tmp_path, "resume", config=CONFIG | {"max_steps": 20, "log_path": "elsewhere"})
    assert run.resumed
    assert run.metrics.read_text() == "x"
    assert len(json.loads(run.versions.read_text())) == 2
    assert json.loads(run.config.read_text())["max_steps"] == 20


def test_a_run_that_cannot_be_continued_is_left_as_it_is(tmp_path):
    open_run_dir(tmp_path / "run", config=CONFIG)
    before = {file: file.read_text() for file in (tmp_path / "run").iterdir()}
    for behavior in ("resume", "ask"):
        with pytest.raises(RunDirError, match=r"cannot be resumed: it forgets\. behavior_if_log_dir_exists=delete"):
            open_run_dir(
                tmp_path / "run",
                behavior,
                config=CONFIG,
                not_resumable="it forgets",
                ask=lambda question: "resume",
            )
    assert {file: file.read_text() for file in (tmp_path / "run").iterdir()} == before
    assert not open_run_dir(tmp_path / "run", "delete", config=CONFIG, not_resumable="it forgets").resumed


def test_resume_names_every_difference_that_changes_training(tmp_path):
    open_run_dir(tmp_path, config=CONFIG)
    changed = CONFIG | {"lr": 2e-3, "loss": {"name": "grpo"}, "extra": 1, "max_steps": 99}
    with pytest.raises(RunDirError) as caught:
        open_run_dir(tmp_path, "resume", config=changed)
    text = str(caught.value)
    assert "lr: was 0.001, now 0.002" in text
    assert "loss.clip: was [0.2, 0.2], now absent" in text
    assert "extra: was absent, now 1" in text
    assert "max_steps" not in text
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG


def test_resume_knows_none_from_absent_and_a_number_from_its_text(tmp_path):
    open_run_dir(tmp_path, config=CONFIG)
    for change in ({"seed": "null"}, {"seed": 0}, {"lr": "0.001"}):
        with pytest.raises(RunDirError, match="cannot resume"):
            open_run_dir(tmp_path, "resume", config=CONFIG | change)


def test_free_keys_reach_nested_configuration(tmp_path):
    open_run_dir(tmp_path, config={"eval": {"every": 1, "size": 2}})
    open_run_dir(tmp_path, "resume", config={"eval": {"every": 5, "size": 2}}, free_keys=frozenset({"eval.every"}))
    with pytest.raises(RunDirError, match=r"eval\.size"):
        open_run_dir(tmp_path, "resume", config={"eval": {"every": 5, "size": 3}}, free_keys=frozenset({"eval.every"}))


def test_a_configuration_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(RunDirError, match="JSON"):
        open_run_dir(tmp_path / "run", config={"x": object()})
    assert files(tmp_path) == []


def test_the_revision_of_a_git_repository_is_recorded(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(("git", *identity, *arguments), cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    (tmp_path / "a").write_text("2")
    monkeypatch.chdir(tmp_path)
    recorded = json.loads(open_run_dir(tmp_path / "run", config=CONFIG).versions.read_text())[0]["git"]
    assert len(recorded["working_directory"]["sha"]) == 40
    assert recorded["working_directory"]["dirty"]


def test_write_atomic_leaves_the_old_text_when_writing_fails(tmp_path):
    path = tmp_path / "x.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new\ud800")
    assert path.read_text() == "old"


def test_a_directory_is_of_one_run_at_a_time(tmp_path):
    with claimed(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
        with pytest.raises(RunDirError, match="is in use by another process"), claimed(tmp_path / "run"):
            pass
        with claimed(tmp_path / "other"):
            pass
    with claimed(tmp_path / "run"):  # it is free again
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="cannot be made"), claimed(tmp_path / "file" / "run"):
        pass


def test_a_free_key_is_free_at_its_own_place_only(tmp_path):
    open_run_dir(tmp_path, config={"env": {"max_steps": 1}, "max_steps": 1})
    assert open_run_dir(tmp_path, "resume", config={"env": {"max_steps": 1}, "max_steps": 2}).resumed
    with pytest.raises(RunDirError, match=r"env\.max_steps: was 1, now 2"):
        open_run_dir(tmp_path, "resume", config={"env": {"max_steps": 2}, "max_steps": 2})
