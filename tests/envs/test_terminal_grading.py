"""Grading by Harbor's contract, and against those who would rather write the reward themselves."""

import math
import shutil
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from sandboxes import missing
from task_directory import PASS_IF_42, rewards, write_task

from envs.terminal import (
    GraderError,
    Trial,
    TrialOptions,
    UnsupportedTask,
    attempt,
    load_task,
    plan,
)
from envs.terminal.grading import parse_json, parse_text, read_tests, total
from envs.terminal.sandbox import PATH
from envs.terminal.trial import combined, falls_short

pytestmark = pytest.mark.slow  # hundreds of sandboxes

FRESH, SHARED = TrialOptions(command_seconds=20), TrialOptions(grading="shared", command_seconds=20)


@pytest.fixture(scope="module")
def sandboxes() -> None:
    """Skips where no sandbox can be made. Before any event loop runs, since the probe runs its own."""
    if why := missing():
        pytest.skip(why)


async def graded(directory: Path, options: TrialOptions, *commands: str) -> float:
    """The reward of whoever types `commands`."""
    trial = Trial(load_task(directory), options)
    try:
        await trial.start()
        for command in commands:
            await trial.run(command)
        await trial.hand_in()
        return trial.reward()
    finally:
        await trial.aclose()


# --- rewards -------------------------------------------------------------------------------------------


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_finite_number_is_a_reward(value):
    assert parse_text(f" {value!r}\n".encode()) == {"reward": value}
    assert parse_json(repr(value).encode()) == {"reward": value}
    assert parse_json(f'{{"a": {value!r}, "b": 1}}'.encode()) == {"a": value, "b": 1.0}


@pytest.mark.parametrize("data", [b"", b" \n", b"nan", b"inf", b"1e999", b"yes", b"1 2", b"0.5 x", b"\xff"])
def test_anything_else_in_a_reward_txt_is_an_error(data):
    with pytest.raises(ValueError, match="expected a"):
        parse_text(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"NaN",
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": "1"}',
        b'{"a": null}',
        b"[1]",
        b'"1"',
        b"[" * 100_000,
        b'{"a": ' + b"9" * 400 + b"}",
    ],
    ids=lambda data: data[:12],
)
def test_anything_else_in_a_reward_json_is_an_error(data):
    with pytest.raises(ValueError, match=r"expected|Expecting|too large"):
        parse_json(data)


@pytest.mark.parametrize(
    ("found", "key", "value"),
    [
        ({"reward": 0.25, "speed": 1.0}, None, 0.25),
        ({"correctness": 1.0, "speed": 0.5}, None, 0.75),
        ({"correctness": 1.0, "speed": 0.5}, "speed", 0.5),
    ],
)
def test_several_rewards_make_one_by_a_rule(found, key, value):
    assert total(found, key) == value


@pytest.mark.parametrize(("found", "key"), [({"speed": 1.0}, "correctness"), ({}, None)])
def test_a_reward_that_is_not_there_is_an_error(found, key):
    with pytest.raises(GraderError, match="expected the key"):
        total(found, key)


def test_steps_make_a_reward_by_their_mean_or_the_last():
    steps = [{"reward": 1.0, "speed": 0.5}, {"reward": 0.0}]
    assert combined(steps, final=False) == {"reward": 0.5, "speed": 0.25}
    assert combined(steps, final=True) == {"reward": 0.0}
    assert combined(steps, final=False, zeros=2) == {"reward": 0.25, "speed": 0.125}
    assert combined(steps[:1], final=True, zeros=1) == {"reward": 0.0, "speed": 0.0}


def test_a_step_falls_short_below_its_least_reward_or_without_it():
    assert not falls_short({"reward": 0.0}, {})
    assert not falls_short({"reward": 0.5}, {"reward": 0.5})
    assert falls_short({"reward": 0.4}, {"reward": 0.5})
    assert falls_short({"speed": 1.0}, {"reward": 0.0, "speed": 1.0})


def test_X07_the_tests_of_a_step_lie_over_those_of_the_task_with_all_their_bits(tmp_path):
    for path, text in {"all/test.sh": "1", "all/deep/data": "2", "own/test.sh": "3", "own/.hidden": "4"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "own/.hidden").chmod(0o600)
    found = read_tests([tmp_path / "all", tmp_path / "own"])
    assert {path: file.data for path, file in found.items()} == {"test.sh": b"3", "deep/data": b"2", ".hidden": b"4"}
    assert (found["test.sh"].mode & 0o111, found[".hidden"].mode) == (0o111, 0o600)


# --- the contract, in sandboxes ------------------------------------------------------------------------------

BOTH = "#!/bin/bash\necho 0.25 >/logs/verifier/reward.txt\necho '{\"reward\": 0.75}' >/logs/verifier/reward.json\n"


@pytest.mark.parametrize(
    ("test", "reward"),
    [
        (BOTH, 0.75),
        (rewards("0.5") + "exit 3\n", 0.5),
        (rewards("-1"), -1.0),
        (rewards('{"a": 1, "b": 0}', "reward.json"), 0.5),
        ("echo no shebang; echo 1 >/logs/verifier/reward.txt", 1.0),
    ],
    ids=["json first", "exit code ignored", "negative", "several", "no shebang"],
)
async def test_what_the_tests_leave_is_the_reward(sandboxes, tmp_path, test, reward):
    assert await graded(write_task(tmp_path, test=test), FRESH) == reward


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("#!/bin/bash\necho why not", "wrote neither .*they said:\nwhy not"),
        (rewards(""), "reward.txt: the file is empty"),
        (rewards("nan"), "reward.txt: 'nan'; expected a finite number"),
        (rewards("{}x", "reward.json"), "reward.json: Extra data"),
        ("#!/bin/bash\nln -s /etc/passwd /logs/verifier/reward.txt", "no readable reward: .* is a link"),
        ("#!/bin/bash\nmkfifo /logs/verifier/reward.json", "is a named pipe"),
        ("#!/bin/bash\nhead -c 2000000 /dev/zero >/logs/verifier/reward.json", "is larger than"),
        ("#!/bin/bash\necho slow; sleep 60", "the tests were stopped after 0.5 s.*\nslow"),
        ("#!/nowhere\n", "wrote neither"),
    ],
    ids=["missing", "empty", "nan", "no json", "link", "pipe", "large", "late", "no interpreter"],
)
async def test_I13_tests_that_give_no_reward_are_an_error_and_not_0(sandboxes, tmp_path, test, says):
    options = TrialOptions(grader_seconds=0.5 if "sleep" in test else None)
    with trio.fail_after(30), pytest.raises(GraderError, match=f"(?s){says}"):
        await graded(write_task(tmp_path, test=test), options)


async def test_tests_have_their_variables_and_run_in_the_working_directory(sandboxes, tmp_path):
    test = '#!/bin/bash\necho "$A $B $PWD" >&2\n[ "$A $B $PWD" = "1 2 /app" ] && echo 1 >/logs/verifier/reward.txt\n'
    toml = "[verifier.env]\nB = '2'\n[environment.env]\nA = '1'"
    assert await graded(write_task(tmp_path, toml=toml, test=test), FRESH) == 1.0


async def test_X05_a_megabyte_of_tests_arrives(sandboxes, tmp_path):
    write_task(tmp_path, test="#!/bin/bash\nwc -c </tests/data/big >/logs/verifier/reward.txt\n")
    (tmp_path / "tests/data").mkdir()
    (tmp_path / "tests/data/big").write_bytes(b"x" * 1_048_576)
    assert await graded(tmp_path, FRESH) == 1_048_576.0


# --- attacks ------------------------------------------------------------------------------------------------------

ATTACKS = {
    "the reward in advance": "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; "
    "echo '{\"reward\": 1}' >/logs/verifier/reward.json",
    "a link for the rewards' directory": "rm -rf /logs/verifier; mkdir /mine; echo 1 >/mine/reward.txt; "
    "ln -s /mine /logs/verifier",
    "a link for all logs": "rm -rf /logs; mkdir -p /mine/verifier; echo 1 >/mine/verifier/reward.txt; "
    "ln -s /mine /logs",
    "a writer that stays": "(setsid bash -c 'while :; do echo 1 >/logs/verifier/reward.txt; sleep 0.01; done' &); true",
    "tests of its own": "mkdir -p /tests; printf '#!/bin/bash\\necho 1 >/logs/verifier/reward.txt' >/tests/test.sh; "
    "chmod +x /tests/test.sh",
    "a link for the tests": "mkdir /mine; ln -s /mine /tests",
}
POISON = {
    "the shell": "rm /bin; mkdir /bin; printf '#!/usr/bin/bash\\necho 1 >/logs/verifier/reward.txt\\n' >/bin/bash; "
    "chmod +x /bin/bash",
    "a program earlier on the path": "mkdir -p /usr/local/bin; printf '#!/bin/sh\\necho 42' >/usr/local/bin/cat; "
    "chmod +x /usr/local/bin/cat",
    "the loader": "echo /app/none.so >/etc/ld.so.preload",
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("options", [FRESH, SHARED], ids=["fresh", "shared"])
async def test_X01_a_reward_cannot_be_written_by_who_is_graded(sandboxes, tmp_path, attack, options):
    assert await graded(write_task(tmp_path), options, ATTACKS[attack]) == 0.0


@pytest.mark.parametrize("options", [FRESH, SHARED], ids=["fresh", "shared"])
async def test_X01_an_honest_answer_is_rewarded_whatever_else_was_tried(sandboxes, tmp_path, options):
    assert await graded(write_task(tmp_path), options, *ATTACKS.values(), "echo 42 >/app/answer") == 1.0


@pytest.mark.parametrize("poison", POISON)
async def test_X01_what_replaces_a_program_does_not_reach_a_fresh_root(sandboxes, tmp_path, poison):
    assert await graded(write_task(tmp_path), FRESH, POISON[poison]) == 0.0


async def test_X01_a_module_in_a_home_directory_is_not_imported_by_the_tests(sandboxes, tmp_path):
    test = '#!/bin/bash\nmkdir -p /app 2>/dev/null; python3 -c \'open("/logs/verifier/reward.txt", "x").write("0")\''
    poison = (
        'd=$(python3 -c "import site; print(site.getusersitepackages())"); mkdir -p "$d"; '
        "echo \"open('/logs/verifier/reward.txt', 'w').write('1')\" >\"$d/usercustomize.py\""
    )
    if (await attempt(write_task(tmp_path / "probe", test=test), "nothing", FRESH)).reward != 0.0:
        pytest.skip("no python3 in the sandbox")
    assert await graded(write_task(tmp_path / "task", test=test), FRESH, poison) == 0.0


COMMIT = "git init -q; git -c user.name=x -c user.email=x commit -q --allow-empty -m x; echo 0 >reward.txt"
HOMES = {  # a program, what the tests do with it, and settings that make it write the reward
    "git": (COMMIT, "printf '#!/bin/sh\nCHEAT' >hook; git config --global core.hooksPath /app; mv hook pre-commit"),
    "sqlite3": ("sqlite3 x.db 'select 0' >reward.txt", "printf '.shell CHEAT' >~/.sqliterc"),
    "bash": ("echo 0 >reward.txt; source ~/.rc; source ~root/.rc", "echo 'CHEAT' >~/.rc"),
}


@pytest.mark.parametrize("program", HOMES)
async def test_X01_settings_in_a_home_directory_do_not_reach_the_tests(sandboxes, tmp_path, program):
    does, poison = HOMES[program]
    test = f"#!/bin/bash\ncd /logs/verifier; command -v {program} && {{ {does}; }}"
    poison = poison.replace("CHEAT", "echo 1 >/logs/verifier/reward.json") + "; chmod -R +x ."
    if shutil.which(program, path=PATH) is None:  # the sandbox has this machine's programs
        pytest.skip(f"no {program} on this machine")
    assert (await attempt(write_task(tmp_path / "probe", test=test), "nothing", FRESH)).reward == 0.0
    assert await graded(write_task(tmp_path / "task", test=test), FRESH, poison) == 0.0
    assert await graded(write_task(tmp_path / "task", test=test), SHARED, poison) == 1.0


async def test_what_is_wanted_of_a_home_directory_is_found_by_its_path_or_with_a_home_for_the_tests(
    sandboxes, tmp_path
):
    home, path = "[verifier.env]\nHOME = '/root'", "#!/bin/bash\ncd /root; cat x >/logs/verifier/reward.txt"
    for i, (toml, test) in enumerate([("", path), (home, path.replace("/root", "~")), (home, path)]):
        assert await graded(write_task(tmp_path / str(i), toml=toml, test=test), FRESH, "echo 0.5 >~/x") == 0.5


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("ENV PATH=/opt/tool/bin:$PATH", "PATH"),
        ("ENV PATH=$PATH:", "PATH"),
        ("ENV PYTHONPATH=/app", "PYTHONPATH"),
        ("ENV LD_PRELOAD='/usr/lib/x.so /app/y.so'", "LD_PRELOAD"),
        ("ENV BASH_ENV=/usr/../app/x", "BASH_ENV"),
        ("ENV PATH=$PATH:/usr/games PYTHONPATH= DATA=/app/data", None),
    ],
)
def test_X01_a_variable_that_leads_tests_to_what_commands_wrote_needs_another_kind_of_grading(tmp_path, line, refused):
    dockerfile = f"FROM ubuntu\n{line}\n"
    task = load_task(write_task(tmp_path / "a", dockerfile=dockerfile))
    assert plan(task, SHARED)
    if refused is None:
        assert plan(task, FRESH)
        return
    with pytest.raises(UnsupportedTask, match=f"its environment sets {refused}='.*verifier.env.*grading=shared"):
        plan(task, FRESH)
    toml = f"[verifier.env]\n{refused} = '/usr/bin:/bin'"
    assert plan(load_task(write_task(tmp_path / "b", toml=toml, dockerfile=dockerfile)), FRESH)


async def test_an_episode_that_destroyed_its_root_is_graded_on_a_fresh_one(sandboxes, tmp_path):
    task = write_task(tmp_path)
    assert await graded(task, FRESH, "rm -rf /app /lib64 /lib /bin /logs 2>/dev/null; rmdir /app") == 0.0
    assert await graded(task, FRESH, "rmdir /app; ln -s /etc /app") == 0.0
    assert await graded(task, FRESH, "mkdir /x; echo 42 >/x/answer; cd /; rmdir /app; ln -s /x /app") == 0.0


async def test_tests_are_not_there_before_grading_nor_after_a_step(sandboxes, tmp_path):
    toml = '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'
    files = {f"steps/{name}/instruction.md": name for name in "ab"}
    task = write_task(tmp_path, toml=toml, **files)
    trial = Trial(load_task(task), SHARED)
    spy = "setsid bash -c 'while :; do cat /tests/* /logs/verifier/* >>/srv/seen 2>/dev/null; done' &"
    try:
        await trial.start()
        for _ in range(2):
            assert not (await trial.run(f"{spy} cat /tests/* /logs/verifier/* 2>/dev/null; true")).stdout
            await trial.hand_in()
        left = await trial.sandbox.run("cat /srv/seen; ls -A /tests /logs/verifier")
        assert left.stdout.split() == ["/logs/verifier:", "/tests:"]
    finally:
        await trial.aclose()


async def test_a_fresh_root_shows_data_wherever_it_was_written_but_not_programs_or_settings(sandboxes, tmp_path):
    files = "/srv/a /new/b /.hidden/c /etc/d /tmp/e /opt/f /logs/artifacts/g"
    test = f"#!/bin/bash\nfor f in {files}; do [ -e $f ] && printf %s $(cat $f); done >/logs/verifier/reward.txt\n"
    write = "mkdir /new /.hidden; echo 1 >/srv/a; echo 2 >/new/b; echo 3 >/.hidden/c; echo 4 >/etc/d; echo 5 >/tmp/e; "
    write += "echo 6 >/opt/f; echo 7 >/logs/artifacts/g"
    assert await graded(write_task(tmp_path / "a", test=test), FRESH, write) == 12367.0
    toml = "artifacts = ['/tmp/e']"
    assert await graded(write_task(tmp_path / "b", toml=toml, test=test), FRESH, write) == 123567.0
    assert await graded(write_task(tmp_path / "c", test=test), SHARED, write) == 1234567.0


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        ("touch /out", "file"),
        ("mkdir /out", "directory"),
        ("mkfifo /out", "nothing"),
        ("ln -s /etc/passwd /out", "nothing"),
        ("true", "nothing"),
        ("rmdir /srv; touch /srv /out; echo 42 >answer", "nothing"),
    ],
)
@pytest.mark.parametrize("mode", ["shared", "separate"])
async def test_an_artifact_is_seen_as_the_file_or_directory_that_it_is(sandboxes, tmp_path, make, seen, mode):
    """Where one is in the way of what a fresh root has, none is seen, but still the working directory is."""
    toml = f"artifacts = ['/srv', '/out', '/logs/artifacts']\n[verifier]\nenvironment_mode = '{mode}'"
    test = """#!/bin/bash
    said=nothing; [[ -f /out ]] && said=file; [[ -d /out ]] && said=directory
    { [[ $said == SEEN ]] && echo 1 || echo 0; } >/logs/verifier/reward.txt""".replace("SEEN", seen)
    assert await graded(write_task(tmp_path, toml=toml, test=test), FRESH, make) == 1.0


async def test_a_named_pipe_does_not_hold_the_tests_up(sandboxes, tmp_path):
    pipes = "mkfifo answer; mkdir -p d/e /opt/x; mkfifo $'d/e/a\\nb' /opt/x/p; echo 1 >d/kept; ln -s /opt/x/p d/l"
    test = "#!/bin/bash\ncat /app/answer /app/d/e/* /app/d/l /opt/x/*; cat /app/d/kept >/logs/verifier/reward.txt"
    with trio.fail_after(20):
        assert await graded(write_task(tmp_path, test=test), FRESH, pipes) == 1.0
        assert await graded(write_task(tmp_path), FRESH, "mkfifo answer") == 0.0


async def test_an_artifact_around_the_tests_own_directories_is_seen(sandboxes, tmp_path):
    task = write_task(tmp_path, toml="artifacts = ['/logs']", test="#!/bin/bash\ncp /logs/x /logs/verifier/reward.txt")
    assert await graded(task, FRESH, "echo 0.5 >/logs/x; ln -s /etc /logs/home") == 0.5


async def test_a_separate_verifier_sees_nothing_but_artifacts(sandboxes, tmp_path):
    test = "#!/bin/bash\ncat /app/answer /app/out/x /srv/y 2>/dev/null | tr -d '\\n' >/logs/verifier/reward.txt"
    toml = "artifacts = ['/app/out', '/srv/none', '/logs/artifacts']\n[verifier]\nenvironment_mode = 'separate'"
    write = "mkdir out; echo 1 >answer; echo 2 >out/x; echo 3 >/srv/y"
    task = write_task(tmp_path, toml=toml, test=test)
    for options in (FRESH, SHARED):
        assert await graded(task, options, write) == 2.0


async def test_collect_commands_run_before_the_tests_in_what_the_episode_left(sandboxes, tmp_path):
    toml = "[[verifier.collect]]\ncommand = 'echo 42 >answer'"
    assert await graded(write_task(tmp_path, toml=toml, test=PASS_IF_42), FRESH) == 1.0


async def test_a_dockerfile_that_changes_the_system_needs_another_kind_of_grading(sandboxes, tmp_path):
    for name, line in {"run": "RUN echo x >/etc/x", "copy": "COPY x /etc/x"}.items():
        task = write_task(tmp_path / name, dockerfile=f"FROM ubuntu\n{line}\n", **{"environment/x": ""})
        with pytest.raises(UnsupportedTask, match=r"changes /etc.*grading=shared"):
            await graded(task, FRESH)
        assert math.isfinite(await graded(task, SHARED))
