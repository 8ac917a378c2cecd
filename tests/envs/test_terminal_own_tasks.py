"""Our own terminal tasks: their directories, and what their graders say in a real sandbox.

The tests that run something need user namespaces and are skipped where those are forbidden.
"""

import contextlib
import json
import os
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandboxes import missing

from envs.terminal import (
    Bubblewrap,
    File,
    Limits,
    Sandbox,
    SandboxSpec,
    TrialOptions,
    attempt,
    load_task,
    plan,
    read_tree,
)
from envs.terminal.generate import harbor_files, write_tasks
from envs.terminal.tasks import DIFFICULTIES, TASKS, OwnTask, Step
from envs.terminal.tasks.grader import GRADER, LARGEST, TABLE
from envs.terminal.tasks.task import Check, absent, exact, link, listing, mode, text

Files = Mapping[str, File]
LIMITS = Limits(seconds=30, memory_mb=256, processes=64, disk_mb=64, output_bytes=4000)
NAMED = {task.name: task for task in TASKS}
every_task = pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])

# --- running and grading ----------------------------------------------------------------------------


def under(files: Files, directory: str) -> dict[str, File]:
    """The files below a directory, by their path in it."""
    return {path.removeprefix(directory): file for path, file in files.items() if path.startswith(directory)}


def places(files: Files) -> list[str]:
    """Where the steps of a task lie, in order."""
    return [f"steps/{step['name']}/" for step in tomllib.loads(files["task.toml"].data.decode()).get("steps", [])] or [
        ""
    ]


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Sandbox]:
    """A sandbox, or a skipped test."""
    if why := missing():
        pytest.skip(why)
    async with Bubblewrap()(SandboxSpec(limits=LIMITS)) as box:
        yield box


@dataclass(frozen=True)
class Case:
    """One episode: files arrive in /app before each command; at the end `tests` give `expected` for every key."""

    commands: Sequence[tuple[Files, str]]
    tests: Files
    expected: float


async def check(cases: Mapping[str, Case]) -> None:
    """Play and grade every case, one after the other in one sandbox: to start one takes longer than an episode."""
    files: dict[str, File] = {}
    for name, case in cases.items():
        for i, (arriving, command) in enumerate(case.commands):
            files |= {f"/cases/{name}/{i}/files/{path}": file for path, file in arriving.items()}
            files[f"/cases/{name}/{i}/command"] = File(command.encode())
        files |= {f"/cases/{name}/tests/{path}": file for path, file in case.tests.items()}
    async with started() as box:
        await box.write_files(files)
        result = await box.run(PLAY, cwd="/", seconds=60)
        assert result.exit_code == 0, result
    rewards = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    values = {name: json.loads(reward) for name, reward in rewards.items()}
    got = {name: set(value.values()) if isinstance(value, dict) else {value} for name, value in values.items()}
    assert got == {name: {case.expected} for name, case in cases.items()}


PLAY = """
for case in /cases/*; do
  rm -rf /app /tests /logs/verifier
  mkdir /app
  for step in "$case"/[0-9]; do
    if [ -d "$step/files" ]; then cp -a "$step/files/." /app; fi
    (cd /app && bash "$step/command") >/dev/null 2>&1
  done
  cp -a "$case/tests" /tests
  /tests/test.sh >/dev/null 2>&1
  echo "${case##*/} $(cat /logs/verifier/reward.*)"
done
"""


async def grade(
    box: Sandbox, tests: Files, *, command: str = "/tests/test.sh", logs: Files | None = None, **run: Any
) -> Any:
    """What an environment does: the tests come last, and nothing may change what they grade. None is no reward."""
    await box.attach("/tests", tests)
    await box.attach("/logs/verifier", logs or {}, writable=True)
    options: dict[str, Any] = {"keep": ["/app"], **run}
    result = await box.run(command, **options)
    written: list[Any] = []
    for name in ("reward.txt", "reward.json"):
        with contextlib.suppress(FileNotFoundError):
            written.append(json.loads(await box.read_file(f"/logs/verifier/{name}", 1000)))
    assert (result.exit_code == 0, len(written)) in {(True, 1), (False, 0)}, (result, written)
    await box.detach("/logs/verifier")
    await box.detach("/tests")
    return written[0] if written else None


def grader_of(*checks: Check) -> dict[str, File]:
    """The tests/ of a task made up here."""
    step = Step("Do it.", "true", checks, ())
    return under(harbor_files(OwnTask("made-up", "easy", lambda _: step), 0), "tests/")


# --- every task -------------------------------------------------------------------------------------


def test_there_are_at_least_eight_tasks_of_each_difficulty():
    counts = Counter(task.difficulty for task in TASKS)
    assert set(counts) == set(DIFFICULTIES)
    assert min(counts.values()) >= 8
    assert len(NAMED) == len(TASKS)


def test_some_tasks_have_several_steps_and_one_has_several_rewards():
    steps = [task.steps(0) for task in TASKS]
    assert sum(len(each) > 1 and each[0].min_reward is not None for each in steps) >= 2
    assert any({check.key for step in each for check in step.checks} > {"total"} for each in steps)


def cases_of(task: OwnTask, seed: int) -> dict[str, Case]:
    """Every step of a task, after the solutions of the steps before it: solved, left alone, and done wrong."""
    files = harbor_files(task, seed)
    before: list[tuple[Files, str]] = [(under(files, "environment/files/"), "")]
    cases: dict[str, Case] = {}
    for place, step in zip(places(files), task.steps(seed), strict=True):
        tests, arriving = under(files, f"{place}tests/"), under(files, f"{place}workdir/")
        solution = files[f"{place}solution/solve.sh"].data.decode()
        table = [line.split("\t") for line in tests[TABLE].data.decode().splitlines()]
        links = [f"ln -sf /tests/{wanted} {path}" for _, kind, path, wanted in table if kind in ("text", "bytes")]
        edits = [f"sed -i 's/$/ \\r/' {path}; truncate -s -1 {path}" for _, kind, path, _ in table if kind == "text"]
        commands = {"nothing": ("", 0), "solution": (solution, 1), "forgiven": ("\n".join([solution, *edits]), 1)}
        commands |= {"linked": ("\n".join([solution, *links]), 0)} if links else {}
        commands |= {f"mistake-{i}": (mistake, 0) for i, mistake in enumerate(step.mistakes)}
        for name, (command, reward) in commands.items():
            cases[f"{seed}-{step.name}-{name}"] = Case([*before, (arriving, command)], tests, reward)
        before.append((arriving, solution))
    return cases


@pytest.mark.slow
@every_task
async def test_the_solution_scores_1_and_nothing_a_mistake_or_a_link_into_the_tests_scores_0(task):
    """White space at the end of lines, such as carriage returns, is forgiven in what is graded as text."""
    others = {name: case for name, case in cases_of(task, 1).items() if "mistake" not in name}
    await check(cases_of(task, 0) | others)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["write-line", "audit-modes", "validate-orders", "release"])
async def test_X01_tasks_can_be_graded_from_outside_the_episode(name, tmp_path):
    if why := missing():
        pytest.skip(why)
    (directory,) = write_tasks(tmp_path, names=[name], seed=2)
    assert (await attempt(directory, "nothing")).reward == 0
    assert (await attempt(directory, "oracle")).reward == 1


@every_task
def test_every_task_can_be_loaded_and_set_up(task, tmp_path):
    (directory,) = write_tasks(tmp_path, names=[task.name], seed=2)
    loaded = load_task(directory)
    assert plan(loaded, TrialOptions()).workdir == "/app"
    assert [step.instruction for step in loaded.steps] == [step.instruction for step in task.steps(2)]


@every_task
def test_every_step_has_mistakes_that_are_not_its_solution(task):
    for seed in range(5):
        for step in task.steps(seed):
            assert step.mistakes, "a step that cannot be done wrong is not known to be able to fail"
            assert step.solution not in step.mistakes, "it replaces what is not in the solution"


@given(st.sampled_from(TASKS), st.integers(0, 2**32))
def test_an_instance_is_a_valid_directory_and_depends_on_its_seed_alone(task, seed):
    files = harbor_files(task, seed)
    assert files == harbor_files(task, seed)
    assert {
        path for path, file in files.items() if path.endswith(("solve.sh", "test.sh")) and file.mode != 0o755
    } == set()
    config = tomllib.loads(files["task.toml"].data.decode())
    assert (config["schema_version"], config["task"]["name"]) == ("1.4", f"jaxrl/{task.name}")
    assert config["metadata"] == {"difficulty": task.difficulty, "seed": seed}
    dockerfile = files["environment/Dockerfile"].data.decode()
    assert ("COPY files/ /app/" in dockerfile) == bool(under(files, "environment/files/"))
    for place in places(files):
        assert {f"{place}instruction.md", f"{place}solution/solve.sh", f"{place}tests/test.sh"} <= set(files)
        table = files[f"{place}tests/{TABLE}"].data.decode()
        for row in table.splitlines():
            _, kind, path, wanted = row.split("\t")
            assert path.startswith("/app/")
            assert (kind in ("text", "bytes", "listing")) == (f"{place}tests/{wanted}" in files)


@given(st.sampled_from(TASKS), st.integers(0, 2**32))
def test_an_instruction_names_where_every_result_belongs(task, seed):
    for step in task.steps(seed):
        for check in step.checks:
            parts = check.path.split("/")
            assert any(f"/app/{'/'.join(parts[:end])}" in step.instruction for end in range(1, len(parts) + 1))


@every_task
def test_other_seeds_are_other_tasks_with_other_answers(task):
    seeds = range(20)
    wanted = [[(check.path, check.wanted) for step in task.steps(seed) for check in step.checks] for seed in seeds]
    instances = [
        {path: file for path, file in harbor_files(task, seed).items() if path != "task.toml"} for seed in seeds
    ]
    assert all(a != b for i, a in enumerate(instances) for b in instances[:i])
    assert len({repr(each) for each in wanted}) > 10


# --- the grader -------------------------------------------------------------------------------------

EXACT, TEXT, MODE = exact("out/a", "one\ntwo\n"), text("out/a", "one\ntwo"), mode("out/a", 0o640)
LINK, LISTING, ABSENT = link("out/l", "out/a"), listing("out", ["a", "b/c"]), absent("out/a")
MAKE = "mkdir out; printf 'one\\ntwo\\n' >out/a; chmod 640 out/a; "
STATES = [
    (EXACT, MAKE, 1),
    (EXACT, "printf 'one\\ntwo' | tee out/a", 0),
    (EXACT, "mkdir elsewhere; printf 'one\\ntwo\\n' >elsewhere/a; ln -s elsewhere out", 0),
    (EXACT, MAKE + "mv out/a b; ln -s ../b out/a", 0),
    (EXACT, MAKE + "ln out/a b; rm out/a; ln b out/a", 1),
    (EXACT, "mkdir -p out/a", 0),
    (EXACT, "mkdir out; mkfifo out/a", 0),
    (TEXT, "mkdir out; printf 'one  \\r\\ntwo\\t\\n\\n\\n' >out/a", 1),
    (TEXT, "mkdir out; printf 'one\\ntwo' >out/a", 1),
    (TEXT, "mkdir out; printf '\\none\\ntwo' >out/a", 0),
    (TEXT, "mkdir out; printf ' one\\ntwo' >out/a", 0),
    (TEXT, "mkdir out; printf 'one\\n\\ntwo' >out/a", 0),
    (TEXT, "mkdir out; printf 'one\\ntwo\\0' >out/a", 0),
    (TEXT, "mkdir out; printf '*' >out/a", 0),
    (TEXT, "mkdir out; mkfifo out/a", 0),
    (TEXT, "mkdir out; ln -s /dev/zero out/a", 0),
    (TEXT, MAKE + f"yes '' | head -c {LARGEST} >>out/a", 0),
    (TEXT, MAKE + "chmod 0 out/a", 1),
    (MODE, MAKE, 1),
    (MODE, MAKE + "chmod 644 out/a", 0),
    (MODE, MAKE + "chmod 2640 out/a", 0),
    (MODE, MAKE + "mv out/a b; ln -s ../b out/a", 0),
    (MODE, "", 0),
    (LINK, MAKE + "ln -s a out/l", 1),
    (LINK, MAKE + "ln -s /app/out/a out/l", 1),
    (LINK, MAKE + "ln -s b out/l", 0),
    (LINK, MAKE + "cp out/a out/l", 0),
    (LINK, MAKE + "ln -s l out/l", 0),
    (LISTING, "mkdir -p out/b; touch out/a out/b/c", 1),
    (LISTING, "mkdir -p out/b; touch out/a out/b/c out/.d", 0),
    (LISTING, "mkdir -p out/b; touch out/a", 0),
    (LISTING, "mkdir -p x/b; touch x/a x/b/c; ln -s x out", 0),
    (LISTING, "mkdir -p out; touch $'out/a\\nb\\nb' out/b", 0),
    (ABSENT, "mkdir out", 1),
    (ABSENT, MAKE, 0),
    (ABSENT, "mkdir out; ln -s nowhere out/a", 0),
]


async def test_each_kind_of_check_holds_of_the_right_state_only():
    await check(
        {
            f"{i:02d}": Case([({}, command)], grader_of(wanted), reward)
            for i, (wanted, command, reward) in enumerate(STATES)
        }
    )


async def test_a_part_of_what_is_asked_is_worth_nothing_but_other_keys_keep_their_worth():
    tests = grader_of(text("a", "1", key="first"), absent("c", key="second"), text("b", "2", key="first"))
    async with started() as box:
        assert await grade(box, tests) == {"first": 0, "second": 1}
        await box.run("echo 1 >a; echo 2 >c")
        assert await grade(box, tests) == {"first": 0, "second": 0}
        await box.run("echo 2 >b; rm c")
        assert await grade(box, tests) == {"first": 1, "second": 1}


async def test_each_file_of_the_orders_counts_for_itself():
    files = harbor_files(NAMED["validate-orders"], 0)
    async with started() as box:
        await box.write_files({f"/app/{path}": file for path, file in under(files, "environment/files/").items()})
        await box.run(NAMED["validate-orders"].steps(0)[0].solution + "rm total.txt")
        assert await grade(box, under(files, "tests/")) == {"valid": 1, "invalid": 1, "total": 0}


LEFT_BEHIND = {
    f"/app/bin/{name}": File(b"#!/bin/bash\n: >/app/ran\n", 0o755) for name in ("cmp", "sed", "sort", "stat")
}
LEFT_BEHIND |= {"/app/start.sh": File(b"cmp() { return 0; }\n")}
HOSTILE = {"PATH": "/app/bin", "BASH_ENV": "/app/start.sh", "BASH_FUNC_stat%%": "() { echo 600; }", "CDPATH": "/app"}


@pytest.mark.slow
@pytest.mark.parametrize("keep", [["/app"], None], ids=["fresh root", "the episode's root"])
async def test_the_grader_depends_on_nothing_around_it(keep):
    """Not on the PATH, functions of bash, the umask, or the directory it is run in."""
    tests = grader_of(text("a", "1"), exact("b", "2\n"), listing("c", ["d"]), mode("c/d", 0o600))
    command = "umask 777; /tests/test.sh; set -- $(/bin/ls -l /logs/verifier/reward.*); [[ $1 == -rw-r--r-- ]]"
    async with started() as box:
        await box.write_files(LEFT_BEHIND)
        for doing, reward in (
            ("true", 0),
            ("echo 1 >a; echo 3 >b; mkdir c; touch c/d; chmod 600 c/d", 0),
            ("echo 2 >b; chmod 644 c/d", 0),
            ("chmod 600 c/d", 1),
        ):
            await box.run(doing)
            assert await grade(box, tests, command=command, cwd="/", env=HOSTILE, keep=keep) == reward, doing
        assert (await box.run("ls ran")).exit_code != 0, "the grader ran a program of the episode"


async def test_X01_a_reward_that_is_there_already_is_replaced():
    forged = {"reward.json": File(b'{"reward": 1}'), "reward.txt": File(b"1")}
    async with started() as box:
        assert await grade(box, grader_of(text("a", "1")), logs=forged) == 0


async def test_a_grader_that_cannot_work_writes_no_reward():
    whole = grader_of(text("a", "1"))
    unknown, empty = File(b"reward\tsmell\t/app/a\tsweet\n"), File(b"")
    async with started() as box:
        await box.run("echo 1 >a")
        assert await grade(box, whole) == 1
        for table in ({}, {TABLE: unknown}, {TABLE: empty}):
            assert await grade(box, {"test.sh": File(GRADER.encode(), 0o755), **table}) is None


# --- the disk ---------------------------------------------------------------------------------------


def test_what_is_written_is_what_was_made_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        paths = write_tasks(tmp_path / "new/tasks", seed=5)
    finally:
        os.umask(before)
    assert [path.name for path in paths] == [f"{task.name}-5" for task in TASKS]
    assert sorted(path.name for path in (tmp_path / "new/tasks").iterdir()) == sorted(path.name for path in paths)
    for task, path in zip(TASKS, paths, strict=True):
        assert read_tree(path) == harbor_files(task, 5)
        assert {each.stat().st_mode & 0o777 for each in (path, *path.rglob("*")) if each.is_dir()} == {0o755}


def test_tasks_are_chosen_by_difficulty_and_by_name(tmp_path):
    assert [path.name for path in write_tasks(tmp_path, difficulty="easy")] == [
        f"{task.name}-0" for task in TASKS if task.difficulty == "easy"
    ]
    assert [path.name for path in write_tasks(tmp_path, names=["release", "set-mode"], seed=-1)] == [
        "release--1",
        "set-mode--1",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"difficulty": "mid"}, "difficulty='mid': expected one of easy, medium, hard"),
        ({"names": ["sort-number"]}, "'sort-number', which is no task; near it: sort-numbers"),
        ({"names": ["release"], "difficulty": "easy"}, "'release', which is no easy task"),
        ({"names": "release"}, "expected a list of different names"),
        ({"names": ["release", "release"]}, "expected a list of different names"),
        ({"names": []}, "expected a list of different names"),
    ],
)
def test_what_is_unknown_is_named_and_nothing_is_written(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        write_tasks(tmp_path / "tasks", **options)
    assert not (tmp_path / "tasks").exists()


def test_writing_again_changes_nothing_and_never_overwrites(tmp_path):
    (path,) = write_tasks(tmp_path, names=["set-mode"])
    inode = (path / "task.toml").stat().st_ino
    assert write_tasks(tmp_path, names=["set-mode"]) == [path]
    assert (path / "task.toml").stat().st_ino == inode
    (path / "tests" / TABLE).write_text("")
    with pytest.raises(FileExistsError, match="set-mode-0 is there and holds something else"):
        write_tasks(tmp_path, names=["set-mode"])
    assert [each.name for each in Path(tmp_path).iterdir()] == ["set-mode-0"]


def test_several_writers_of_one_directory_agree(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: write_tasks(tmp_path, difficulty="hard"), range(16)))
    assert all(each == made[0] for each in made)
    assert sorted(tmp_path.iterdir()) == sorted(made[0])


def test_a_directory_that_cannot_be_written_is_the_error_that_is_told(tmp_path):
    (tmp_path / "tasks").write_text("")
    with pytest.raises(FileExistsError, match="tasks'"):
        write_tasks(tmp_path / "tasks")
