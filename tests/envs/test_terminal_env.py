"""An episode: the tool, the end, the clock, several steps, what is closed, and the oracle's demonstrations."""

import contextlib
import functools
import io
import json
import pickle
import secrets
import tarfile
from pathlib import Path

import pytest
import trio
from sandboxes import missing
from task_directory import write_task

from envs.terminal import (
    GraderError,
    HarborEnv,
    Shell,
    Trial,
    TrialOptions,
    UnsupportedTask,
    attempt,
    demonstrate,
    harbor_task,
    load_task,
    make_env,
    parse_images,
    plan,
)
from envs.terminal.artifacts import _unpacked, collect_artifacts, write_artifacts
from envs.terminal.environment import told
from envs.terminal.files import pack
from envs.terminal.harbor_task import Artifact
from envs.terminal.oracle import typed_solution
from envs.terminal.rootfs import BuildFailed
from envs.terminal.sandbox import PATH, CommandResult, File
from envs.terminal.trial import NotHealthy
from jaxrl.env import MessageStepResult
from jaxrl.types import MalformedToolCall, Message, StopReason, ToolCall

pytestmark = pytest.mark.slow  # hundreds of sandboxes


@pytest.fixture(scope="module")
def sandboxes() -> None:
    """Skips where no sandbox can be made. Before any event loop runs, since the probe runs its own."""
    if why := missing():
        pytest.skip(why)


def calls(*commands: str) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall("bash", json.dumps({"command": each})) for each in commands))


DONE = Message("assistant", "Done.")


async def play(
    directory: Path, *turns: Message, options: TrialOptions | None = None, **kind
) -> list[MessageStepResult]:
    """The results of the turns of one episode."""
    env = HarborEnv(options, **kind)
    try:
        await env.reset(harbor_task(directory))
        return [await env.step(turn) for turn in turns]
    finally:
        await env.close()


# --- the tool -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (CommandResult(0, "out\n"), "out"),
        (CommandResult(0, "\n"), "[no output]"),
        (CommandResult(2, "no\n"), "no\n[exit code 2]"),
        (CommandResult(None, "", timed_out=True, notice="stopped after 1 s"), "[stopped after 1 s]"),
        (CommandResult(0, "  indented\n"), "  indented"),
    ],
)
def test_what_the_model_reads_of_a_command(result, text):
    assert told(result) == text


def test_the_tool_is_called_bash_and_takes_a_command():
    (spec,) = HarborEnv().tool_specs
    assert (spec.name, list(spec.parameters["properties"])) == ("bash", ["command"])


async def test_a_shell_stays_over_the_turns_and_the_last_turn_is_graded(sandboxes, tmp_path):
    first, second, last = await play(
        write_task(tmp_path), calls("cd /srv; x=42", "pwd"), calls("echo $x >/app/answer"), DONE
    )
    assert [each.content for each in first.messages] == ["[no output]", "/srv"]
    assert (first.terminated, first.reward, second.reward) == (False, 0.0, 0.0)
    assert (last.terminated, last.truncated, last.reward, last.metrics["solved"]) == (True, False, 1.0, 1.0)
    assert first.metrics["tool/bash/calls"] == 2.0


async def test_the_opening_is_the_instruction_and_the_system_message_can_be_left_out(sandboxes, tmp_path):
    task = harbor_task(write_task(tmp_path, toml="[metadata]\ndifficulty = 'easy'"))
    assert task.prompt == "Write 42 to /app/answer."
    assert task.metadata["difficulty"] == "easy"
    env = pickle.loads(pickle.dumps(functools.partial(make_env, instructions=None)))(task)
    try:
        assert await env.reset(task) == (Message("user", task.prompt),)
        with pytest.raises(RuntimeError, match="already reset"):
            await env.reset(task)
    finally:
        await env.close()


@pytest.mark.parametrize(
    "turn",
    [
        calls("false\0"),
        calls("echo \ud83d"),
        calls("cat \udc80"),
        Message("assistant", tool_calls=(ToolCall("sh", "{}"),)),
    ],
)
async def test_a_call_that_cannot_run_is_told_and_the_episode_goes_on(sandboxes, tmp_path, turn):
    first, last = await play(write_task(tmp_path), turn, DONE)
    assert first.messages[0].content.startswith("Error: ")
    assert not first.terminated
    assert last.reward == 0.0


async def test_malformed_calls_end_the_episode_after_some(sandboxes, tmp_path):
    bad = Message("assistant", malformed_calls=(MalformedToolCall("{", "no JSON"),))
    *early, last = await play(write_task(tmp_path), bad, bad, bad, bad)
    assert [each.terminated for each in early] == [False] * 3
    assert (last.terminated, last.reward) == (True, 0.0)


async def test_X09_a_command_sees_no_variable_of_the_trainer(sandboxes, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("GIVEN", "given")
    toml = "[environment.env]\nA = '${GIVEN}'\nB = '${OPENAI_API_KEY:-none}'"
    options = TrialOptions(host_env=("GIVEN",))
    (result,) = await play(write_task(tmp_path, toml=toml), calls("env; echo $A $B"), options=options)
    said = result.messages[0].content
    assert "given none" in said
    assert "secret" not in said
    assert "OPENAI_API_KEY" not in said


async def test_output_is_cut_and_a_command_that_does_not_end_is_stopped(sandboxes, tmp_path):
    options = TrialOptions(command_seconds=0.5, output_bytes=100)
    long, slow, last = await play(
        write_task(tmp_path), calls("yes | head -c 5000"), calls("sleep 60"), DONE, options=options
    )
    assert "4900 bytes cut" in long.messages[0].content
    assert "stopped after 0.5 s" in slow.messages[0].content
    assert last.reward == 0.0


# --- the end ----------------------------------------------------------------------------------------------------

SOLVE = "echo 42 >answer"


@pytest.mark.parametrize("solved", [True, False])
async def test_F27_an_agent_that_ran_out_of_time_is_graded_all_the_same(sandboxes, tmp_path, solved):
    task = write_task(tmp_path, toml="[agent]\ntimeout_sec = 0.7")
    (result,) = await play(task, calls(f"{SOLVE if solved else 'true'}; sleep 60", "echo 43 >answer"))
    assert (result.truncated, result.reward, result.metrics["agent_timeouts"]) == (True, float(solved), 1.0)
    assert "time for the task is up" in result.messages[-1].content if result.messages else True


async def test_F27_a_grader_that_ran_out_of_time_is_an_error_whether_the_agent_did_or_not(sandboxes, tmp_path):
    task = write_task(tmp_path, test="#!/bin/bash\nsleep 60")
    for seconds, turn in ((None, DONE), (0.3, calls("sleep 60"))):
        with pytest.raises(GraderError, match=r"the tests were stopped after 0\.5 s"):
            await play(task, turn, options=TrialOptions(agent_seconds=seconds, grader_seconds=0.5))


async def test_turns_that_ran_out_are_graded(sandboxes, tmp_path):
    *_, last = await play(write_task(tmp_path), calls("true"), calls(SOLVE), max_turns=2)
    assert (last.truncated, last.terminated, last.reward) == (True, False, 1.0)


async def test_I13_a_limit_of_the_run_is_graded_once_and_a_fault_before_the_start_is_not(sandboxes, tmp_path):
    task = harbor_task(write_task(tmp_path))
    env = HarborEnv()
    assert await env.conclude(StopReason.TIMEOUT) is None
    try:
        await env.reset(task)
        await env.step(calls(SOLVE))
        with trio.move_on_after(0.3) as clock:
            await env.step(calls("sleep 60"))
        assert clock.cancelled_caught
        concluded = await env.conclude(StopReason.TIMEOUT)
        assert concluded is not None
        assert concluded.reward == 1.0
        assert await env.conclude(StopReason.MAX_TURNS) is None
        with pytest.raises(RuntimeError, match="no episode is running"):
            await env.step(DONE)
    finally:
        await env.close()


async def test_I9_nothing_of_an_episode_is_left_when_it_is_cancelled(sandboxes, tmp_path):
    number = f"{secrets.randbelow(10**6) + 10**6}"

    def running() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if f"sleep\0{number}".encode() in path.read_bytes():
                    return True
        return False

    env = HarborEnv()
    seen = []
    async with trio.open_nursery() as nursery:

        async def episode() -> None:
            await env.reset(harbor_task(write_task(tmp_path)))
            await env.step(calls(f"setsid sleep {number} & sleep {number}"))

        nursery.start_soon(episode)
        for _ in range(400):
            if not seen:
                await trio.sleep(0.05)
                seen += [True] * running()
        nursery.cancel_scope.cancel()
    await env.close()
    assert seen
    assert not running()


async def test_I14_members_start_from_the_same_state_and_do_not_see_each_other(sandboxes, tmp_path):
    task = harbor_task(write_task(tmp_path, dockerfile="FROM ubuntu\nWORKDIR /app\nRUN echo 1 >a\n"))
    envs = [HarborEnv(), HarborEnv()]
    try:
        for env in envs:
            await env.reset(task)
        for env in envs:
            result = await env.step(calls("cat a; echo 2 >a"))
            assert result.messages[0].content == "1"
    finally:
        for env in envs:
            await env.close()


# --- steps -------------------------------------------------------------------------------------------------------

STEPS = """
[[steps]]
name = "one"
min_reward = 0.5
[[steps]]
name = "two"
[[steps]]
name = "three"
"""


def several(directory: Path, toml: str = STEPS, **files: str) -> Path:
    """Three steps, each solved by a file of its name."""
    for name in ("one", "two", "three"):
        test = (
            f"#!/bin/bash\ncat /app/{name} >/logs/verifier/reward.txt 2>/dev/null || echo 0 >/logs/verifier/reward.txt"
        )
        files = {f"steps/{name}/instruction.md": f"do {name}", f"steps/{name}/tests/test.sh": test, **files}
    return write_task(directory, toml=toml, **files)


async def test_the_next_step_is_told_when_one_is_handed_in_and_the_reward_is_the_mean(sandboxes, tmp_path):
    files = {"steps/two/workdir/setup.sh": "echo set >ready", "steps/two/workdir/given": "x"}
    results = await play(
        several(tmp_path, **files), calls("x=1; echo 1 >one"), DONE, calls("cat ready given; echo [$x]"), DONE, DONE
    )
    assert [message.content for message in results[1].messages] == ["do two"]
    assert results[2].messages[0].content == "set\nx[]"
    assert [message.content for message in results[3].messages] == ["do three"]
    assert [each.reward for each in results[:-1]] == [0.0] * 4
    assert results[-1].reward == pytest.approx(1 / 3)
    assert results[-1].metrics["steps_graded"] == 3.0


@pytest.mark.parametrize(
    ("strategy", "turns", "reward", "graded"),
    [
        ("mean", [DONE], 0.0, 1.0),  # too little in the first step
        ("mean", [calls("echo 0.5 >one"), DONE, DONE, DONE], 0.5 / 3, 3.0),
        ("final", [calls("echo 1 >one; echo 1 >two"), DONE, DONE, DONE], 0.0, 3.0),
        ("final", [calls("echo 1 >one; echo 1 >three"), DONE, DONE, DONE], 1.0, 3.0),
    ],
)
async def test_a_step_below_its_least_reward_is_the_last(sandboxes, tmp_path, strategy, turns, reward, graded):
    toml = f'multi_step_reward_strategy = "{strategy}"\n{STEPS}'
    *_, last = await play(several(tmp_path, toml), *turns)
    assert last.terminated
    assert (last.reward, last.metrics["steps_graded"]) == (pytest.approx(reward), graded)


async def test_steps_that_were_never_reached_count_nothing(sandboxes, tmp_path):
    *_, last = await play(several(tmp_path), calls("echo 1 >one"), DONE, calls("echo 1 >two"), max_turns=3)
    assert (last.truncated, last.reward) == (True, pytest.approx(2 / 3))
    *_, last = await play(several(tmp_path), calls("echo 1 >one"), max_turns=1)
    assert last.reward == pytest.approx(1 / 3)


async def test_time_of_a_step_that_is_up_begins_the_next_one(sandboxes, tmp_path):
    options = TrialOptions(agent_seconds=1.0)
    first, second = await play(several(tmp_path), calls("echo 1 >one; sleep 60"), calls("true"), options=options)
    assert [message.content for message in first.messages][1:] == ["do two"]
    assert second.messages[0].content == "[no output]"


UNHEALTHY = "[steps.healthcheck]\ncommand = '! [ -e broken ]'\nretries = 1\n"


@pytest.mark.parametrize(
    ("files", "spoil"),
    [
        ({"steps/two/workdir/data": "x"}, "mkdir -p data/x"),
        ({"steps/two/workdir/setup.sh": "! [ -e broken ]"}, "touch broken"),
        ({"toml": STEPS.replace('name = "two"\n', f'name = "two"\n{UNHEALTHY}')}, "touch broken"),
    ],
    ids=["files", "setup", "healthcheck"],
)
@pytest.mark.parametrize("final", [False, True])
async def test_a_step_that_cannot_be_prepared_ends_the_trial_and_counts_nothing(
    sandboxes, tmp_path, files, spoil, final
):
    files = {**files, "toml": 'multi_step_reward_strategy = "final"\n' * final + files.get("toml", STEPS)}
    task = several(tmp_path, **files)
    _, last = await play(task, calls(f"echo 1 >one; {spoil}"), DONE)
    assert (last.terminated, last.reward) == (True, 0.0 if final else pytest.approx(1 / 3))
    (last,) = await play(task, calls(f"echo 1 >one; {spoil}"), max_turns=1)
    assert last.reward == (0.0 if final else pytest.approx(1 / 3))
    *_, last = await play(task, calls("echo 1 >one; echo 1 >two; echo 1 >three"), DONE, DONE, DONE)
    assert last.reward == 1.0


async def test_a_first_step_that_cannot_be_prepared_is_a_fault(sandboxes, tmp_path):
    with pytest.raises(BuildFailed, match=r"'bash setup\.sh' gave 1"):
        await attempt(several(tmp_path, **{"steps/one/workdir/setup.sh": "exit 1"}), "nothing")


# --- the beginning -------------------------------------------------------------------------------------------------


async def test_a_dockerfile_is_carried_out(sandboxes, tmp_path):
    lines = """
    FROM ubuntu:24.04
    ARG NAME=x
    ENV WHERE=/srv/deep
    WORKDIR $WHERE
    COPY --chmod=755 data/ copied/
    COPY one.txt renamed
    COPY one.txt .
    ADD archive.tar.gz unpacked/
    RUN echo "$NAME $WHERE $PWD" >ran && mkdir -p /app
    COPY <<EOF /app/written
    text $WHERE
    EOF
    COPY one.txt /app
    WORKDIR /app
    ENTRYPOINT ["false"]
    """
    text = "\n".join(line.strip() for line in lines.strip().splitlines())
    files = {"environment/data/.hidden/run.sh": "echo ran", "environment/one.txt": "1"}
    task = write_task(tmp_path, dockerfile=text, **files)
    data = pack({"inside": File(b"archived")})
    (tmp_path / "environment/archive.tar.gz").write_bytes(data)
    look = "cd $WHERE; pwd; copied/.hidden/run.sh; cat renamed one.txt unpacked/inside ran /app/written /app/one.txt"
    (result,) = await play(task, calls("pwd; echo [$NAME]", look))
    assert result.messages[0].content == "/app\n[]"
    assert result.messages[1].content.replace("\n", "|") == (
        "/srv/deep|ran|11archivedx /srv/deep /srv/deep|text /srv/deep|1"
    )


@pytest.mark.parametrize("value", ['"/usr/local/lib/x:${PATH}"', "$PATH:/usr/local/lib/x", "/usr/bin:/bin"])
async def test_a_path_that_a_dockerfile_adds_to_is_the_one_that_commands_have(sandboxes, tmp_path, value):
    task = write_task(tmp_path, dockerfile=f"FROM ubuntu\nENV PATH={value}\nWORKDIR /app\nRUN ls /\n")
    first, last = await play(task, calls(f"ls / >/dev/null && {SOLVE} && echo $PATH"), DONE)
    assert first.messages[0].content == value.strip('"').replace("${PATH}", PATH).replace("$PATH", PATH)
    assert last.reward == 1.0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("RUN echo why >&2; exit 3", "line 2: RUN echo why .*: exit code 3.*why.*no network"),
        ("COPY none /app/", "line 2: COPY none: no such file"),
        ("RUN sleep 60", "the Dockerfile's steps took longer than 1 s"),
    ],
)
async def test_I13_a_step_of_the_dockerfile_that_fails_is_a_fault(sandboxes, tmp_path, line, says):
    task = write_task(tmp_path, dockerfile=f"FROM ubuntu\n{line}", toml="[environment]\nbuild_timeout_sec = 1")
    with trio.fail_after(30), pytest.raises(BuildFailed, match=f"(?s){says}"):
        await attempt(task, "nothing")


async def test_an_episode_begins_when_the_healthcheck_succeeds(sandboxes, tmp_path):
    check = "[environment.healthcheck]\ninterval_sec = 0.01\nstart_interval_sec = 0.01\nretries = 3\n"
    third = check + "command = 'echo x >>tries; [ $(wc -l <tries) = 3 ]'"
    assert (await attempt(write_task(tmp_path / "a", toml=third), "oracle")).reward == 1.0
    with pytest.raises(NotHealthy, match="failed 3 times in a row: false"):
        await attempt(write_task(tmp_path / "b", toml=check + "command = 'false'"), "oracle")
    grace = check + "start_period_sec = 60\ncommand = 'echo x >>tries; [ $(wc -l <tries) = 6 ]'"
    assert (await attempt(write_task(tmp_path / "c", toml=grace), "oracle")).reward == 1.0


def test_a_task_may_ask_for_less_than_there_is_and_not_for_more(tmp_path):
    toml = "[environment]\nmemory_mb = 100\nstorage_mb = 100000"
    task = load_task(write_task(tmp_path, toml=toml))
    spec = plan(task, TrialOptions(memory_mb=2048, disk_mb=512)).spec
    assert (spec.limits.memory_mb, spec.limits.disk_mb, spec.network) == (100, 512, False)
    assert plan(task, TrialOptions(network=True)).spec.network
    quiet = load_task(write_task(tmp_path / "quiet", toml="[environment]\nnetwork_mode = 'no-network'"))
    assert not plan(quiet, TrialOptions(network=True)).spec.network


def test_what_cannot_be_set_up_is_found_without_a_sandbox(tmp_path):
    options = TrialOptions()
    for name, files, says in (
        ("from", {"dockerfile": "FROM rust:1"}, "no root file system stands for the image 'rust:1'"),
        ("user", {"dockerfile": "FROM ubuntu\nUSER app"}, "environment/Dockerfile: line 2: USER 'app'"),
        ("variable", {"toml": "[environment.env]\nA = '${B}'"}, "environment.env: A="),
        ("ignored", {"environment/.dockerignore": "x"}, "dockerignore is not understood"),
    ):
        with pytest.raises(ValueError, match=says):
            plan(load_task(write_task(tmp_path / name, **files)), options)


def test_an_image_by_name_makes_the_dockerfile_unnecessary(tmp_path):
    toml = "[environment]\ndocker_image = 'org/image:1'\nworkdir = '/app/x'"
    task = load_task(write_task(tmp_path, toml=toml, dockerfile="FROM rust:1\nRUN x"))
    found = plan(task, TrialOptions(images=parse_images([], by_name=True)))
    assert (found.spec.image, found.build.steps, found.workdir, found.spec.workdir) == (
        "org/image:1",
        (),
        "/app/x",
        "/app",
    )


@pytest.mark.parametrize("wrong", [{"agent_seconds": 0}, {"command_seconds": -1.0}, {"grading": "none"}])
def test_options_say_what_they_expect(wrong):
    with pytest.raises(ValueError, match="expected"):
        TrialOptions(**wrong)
    with pytest.raises(ValueError, match="max_turns=0: expected at least 1"):
        HarborEnv(max_turns=0)


# --- artifacts ------------------------------------------------------------------------------------------------------


async def test_artifacts_are_collected_before_a_step_is_graded(sandboxes, tmp_path):
    toml = "artifacts = ['/app/out', {source = '/srv/log', destination = 'logs/server', exclude = ['*.tmp']}, '/none']"
    task = write_task(tmp_path / "task", toml=toml)
    make = "mkdir -p out/deep; echo 1 >out/deep/a; ln -s /etc/passwd out/link; mkdir /srv/log; echo 2 >/srv/log/b; "
    make += "echo 3 >/srv/log/c.tmp; echo 4 >/logs/artifacts/d"
    options = TrialOptions(artifacts=tmp_path / "kept")
    await play(task, calls(make), DONE, options=options)
    (kept,) = (tmp_path / "kept").iterdir()
    found = {path.relative_to(kept).as_posix(): path.read_text() for path in kept.rglob("*") if path.is_file()}
    assert found == {"app/out/deep/a": "1\n", "logs/server/b": "2\n", "logs/artifacts/d": "4\n"}


async def test_artifacts_with_names_too_long_for_this_machine_are_left_out(sandboxes, tmp_path):
    deep = (
        f"cd /logs/artifacts; echo 1 >a; for i in {{1..30}}; do mkdir {'x' * 200}; cd -P {'x' * 200}; done; echo 2 >b"
    )
    options = TrialOptions(artifacts=tmp_path / "kept")
    _, last = await play(write_task(tmp_path / "task"), calls(deep), DONE, options=options)
    assert last.reward == 0.0
    assert [path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()] == ["a"]


async def test_an_artifact_that_is_too_large_or_no_archive_is_left_out(sandboxes, tmp_path):
    trial = Trial(load_task(write_task(tmp_path)))
    try:
        await trial.start()
        async with Shell(trial.sandbox) as shell:
            await shell.run("head -c 300000 /dev/zero >big; echo 1 >small")
        found = await collect_artifacts(trial.sandbox, [Artifact("/app/big"), Artifact("/app/small")], most=100_000)
        assert found == {"app/small": b"1\n"}
        assert (await trial.sandbox.run("ls -A /tmp")).stdout == ""
    finally:
        await trial.aclose()


def packed(*members: tuple[str, int, dict[str, str]], mode: str = "w:") -> bytes:
    """An archive of files of zeros, with these pax headers."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.PAX_FORMAT) as archive:
        for name, size, headers in members:
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = size, headers
            archive.addfile(member, io.BytesIO(bytes(size)))
    return buffer.getvalue()


long_name = tarfile.TarInfo("x")
long_name.type = tarfile.GNUTYPE_LONGNAME
HOSTILE = {
    "compressed": packed(*((f"app/{i}", 5000, {}) for i in range(1000)), mode="w:gz"),
    "a size that is not there": packed(("app/a", 10, {"size": "10000000"})),
    "a size that goes back": packed(("app/a", 10, {"size": "-1536"})),
    "names upon names": long_name.tobuf() * 5000,
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_gives_no_more_than_it_holds(kind):
    assert _unpacked(HOSTILE[kind], "app") == {}


def test_names_of_a_hostile_archive_do_not_climb(tmp_path):
    archive = pack({"app/ok": File(b"1"), "app/xx/up": File(b"2"), "other": File(b"3")})
    assert set(_unpacked(archive, "app")) == {"app/ok", "app/xx/up"}
    climbing = archive.replace(b"app/xx/up", b"app/../up")
    header = bytearray(climbing[climbing.index(b"app/../up") :][:512])
    header[148:156] = b" " * 8
    check = b"%06o\0 " % sum(header)
    at = climbing.index(b"app/../up") + 148
    assert set(_unpacked(climbing[:at] + check + climbing[at + 8 :], "app")) == {"app/ok"}
    long = {"/".join(["x" * 200] * 30): b"4", "y" * 256: b"5"}
    write_artifacts(tmp_path, {"a": b"1", "a/b": b"2", **long, "c/d": b"3"})
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["a", "c", "c/d"]


# --- the oracle -------------------------------------------------------------------------------------------------------


async def test_the_oracle_scores_1_and_whoever_does_nothing_0(sandboxes, tmp_path):
    toml = "[solution.env]\nANSWER = '42'"
    task = write_task(tmp_path, toml=toml, solve="echo $ANSWER >answer; ls /solution >/srv/x; exit 1")
    assert [(await attempt(task, player)).reward for player in ("oracle", "nothing")] == [1.0, 0.0]


async def test_a_task_without_a_solution_says_so(sandboxes, tmp_path):
    with pytest.raises(UnsupportedTask, match="no reference solution"):
        await attempt(write_task(tmp_path, solve=None), "oracle")


async def test_a_demonstration_types_the_solution(sandboxes, tmp_path):
    task = write_task(tmp_path)
    assert typed_solution(load_task(task).steps[0]) == "echo 42 >answer"
    messages, reward = await demonstrate(task)
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert reward == 1.0
    several_steps = several(
        tmp_path / "b", **{f"steps/{n}/solution/solve.sh": f"echo 1 >{n}" for n in ("one", "two", "three")}
    )
    messages, reward = await demonstrate(several_steps)
    assert (sum(message.role == "user" for message in messages), reward) == (3, 1.0)
