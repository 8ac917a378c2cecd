"""Reading a directory in Harbor's format: what is taken from it, what is refused and how that is said."""

import os

import pytest
from task_directory import write_task as write

from envs.terminal import TrialOptions, plan
from envs.terminal.harbor_task import (
    Artifact,
    Healthcheck,
    InvalidTask,
    UnsupportedTask,
    find_tasks,
    load_task,
    resolve_variables,
)


def test_a_task_of_one_step_has_the_defaults_of_the_format(tmp_path):
    task = load_task(write(tmp_path / "one"))
    (step,) = task.steps
    assert (task.name, task.final, step.name, step.instruction) == ("one", False, "", "Write 42 to /app/answer.")
    assert (step.agent_seconds, step.grader_seconds, step.min_reward, step.separate) == (None, 600.0, {}, False)
    assert task.environment.network
    assert (task.environment.memory_mb, task.environment.healthcheck) == (None, None)
    assert step.solution == tmp_path / "one/solution"


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_every_schema_of_version_1_is_read(tmp_path, version):
    assert load_task(write(tmp_path, toml=f'schema_version = "{version}"'))
    assert load_task(write(tmp_path, toml=f'version = "{version}"'))  # its older name


def test_a_schema_of_the_future_is_refused(tmp_path):
    with pytest.raises(UnsupportedTask, match=r"schema_version='2\.0'; this project reads 1\.0 to 1\.4"):
        load_task(write(tmp_path, toml='schema_version = "2.0"'))


def test_every_key_arrives(tmp_path):
    toml = """
    artifacts = ["/app/out", {source = "/var/log/x", destination = "logs/x", exclude = ["*.tmp"]}]
    unknown = 1
    [task]
    name = "org/name"
    [metadata]
    difficulty = "easy"
    [agent]
    timeout_sec = 90
    [verifier]
    timeout_sec = 30.5
    env = {KEY = "${KEY}"}
    environment_mode = "separate"
    [[verifier.collect]]
    command = "dump"
    [environment]
    build_timeout_sec = 5
    memory = "2G"
    storage_mb = 100
    network_mode = "no-network"
    env = {A = "1"}
    workdir = "/srv"
    [environment.healthcheck]
    command = "true"
    interval_sec = 1
    retries = 7
    [solution]
    env = {B = "2"}
    """
    task = load_task(write(tmp_path, toml=toml, **{"solution/solve.sh": "true"}))
    (step,) = task.steps
    assert task.name == "org/name"
    assert task.metadata == {"difficulty": "easy"}
    assert (step.agent_seconds, step.grader_seconds, step.separate) == (90, 30.5, True)
    assert step.artifacts == (Artifact("/app/out"), Artifact("/var/log/x", "logs/x", ("*.tmp",)))
    assert (step.grader_env, step.collect) == ({"KEY": "${KEY}"}, (("dump", 60.0),))
    assert step.solution == tmp_path / "solution"
    environment = task.environment
    assert (environment.build_seconds, environment.memory_mb, environment.storage_mb) == (5, 2048, 100)
    assert (environment.network, environment.env, environment.workdir) == (False, {"A": "1"}, "/srv")
    assert environment.healthcheck == Healthcheck("true", interval=1, retries=7)
    assert task.solution_env == {"B": "2"}


def test_the_steps_of_a_task_have_files_of_their_own_and_take_the_rest_from_the_task(tmp_path):
    toml = """
    multi_step_reward_strategy = "final"
    artifacts = ["/a"]
    [agent]
    timeout_sec = 10
    [verifier]
    timeout_sec = 20
    [[steps]]
    name = "first"
    min_reward = 0.5
    artifacts = ["/b"]
    [steps.healthcheck]
    command = "true"
    [[steps]]
    name = "second"
    min_reward = {speed = 1.0}
    agent = {timeout_sec = 30}
    """
    steps = {f"steps/{name}/instruction.md": name for name in ("first", "second")}
    own = {"steps/first/workdir/setup.sh": "", "steps/second/tests/test.sh": "", "solution/solve.sh": ""}
    task = load_task(write(tmp_path, toml=toml, **steps, **own))
    first, second = task.steps
    assert task.final
    assert [(each.name, each.instruction, each.agent_seconds) for each in task.steps] == [
        ("first", "first", 10),
        ("second", "second", 30),
    ]
    assert (first.min_reward, second.min_reward) == ({"reward": 0.5}, {"speed": 1.0})
    assert first.tests == (tmp_path / "tests",)
    assert second.tests == (tmp_path / "tests", tmp_path / "steps/second/tests")
    assert (first.workdir, second.workdir) == (tmp_path / "steps/first/workdir", None)
    assert (first.healthcheck, second.healthcheck) == (Healthcheck("true"), None)
    assert (first.artifacts, second.artifacts) == ((Artifact("/a"), Artifact("/b")), (Artifact("/a"),))
    assert first.solution == tmp_path / "solution"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<!-- a canary GUID -->\n# canary 2\n\nDo it.\n", "Do it."),
        ("# A title\nDo it.", "# A title\nDo it."),
        ("Do it.\n<!-- canary -->", "Do it.\n<!-- canary -->"),
    ],
)
def test_marks_of_a_benchmark_are_not_shown(tmp_path, text, shown):
    assert load_task(write(tmp_path, instruction=text)).steps[0].instruction == shown


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("x = [", "task.toml: "),
        ("[agent]\ntimeout_sec = 'soon'", r"agent.timeout_sec='soon'; expected a number"),
        ("[agent]\ntimeout_sec = nan", "expected a finite number"),
        ("[agent]\ntimeout_sec = true", "expected a number"),
        ("[environment]\nmemory = 'much'", "environment.memory='much'; expected a size like 512M or 2G"),
        ("[environment]\nnetwork_mode = 'some'", "expected one of public, no-network, allowlist"),
        ("[environment.env]\nA = 1", "environment.env.A=1; expected a string"),
        ("[environment.healthcheck]\nretries = 1", "environment.healthcheck.command=None; expected a shell command"),
        ("agent = 1", "agent=1; expected a table"),
        ("[[steps]]\nname = '../x'", r"steps\[0\].name='../x'; expected the name of a directory"),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'", "expected each name once"),
        ("[[steps]]\nname = 'a'", "steps/a/instruction.md is missing"),
        ("multi_step_reward_strategy = 'mean'", "expected none, since the task has no steps"),
        ("[agent]\ntimeout_sec = " + "9" * 400, "agent.timeout_sec=9+; expected a finite number, 0 or more"),
        ("[agent]\ntimeout_sec = " + "9" * 5000, "task.toml: .*digits"),
        ("min_reward = inf", "min_reward=inf; expected a finite number"),
        ("[environment]\nworkdir = '/../b'", r"environment.workdir='/\.\./b'; expected an absolute path, without"),
        ("[environment]\nworkdir = 'b'", "environment.workdir='b'; expected an absolute path"),
        ("[environment.env]\n'A=B' = '1'", "environment.env.A=B='1'; expected a name that is not empty, without ="),
        ("[verifier.env]\n'' = '1'", "verifier.env.='1'; expected a name that is not empty"),
        ('[solution.env]\nA = "\\u0000"', "solution.env.A=.*; expected a string without NUL"),
        ("artifacts = 5", "artifacts=5; expected an array"),
        ("artifacts = '/logs/x'", "artifacts='/logs/x'; expected an array"),
        ("artifacts = ['/']", "artifacts.source='/'; expected an absolute path below /"),
        ("artifacts = ['/a/./b']", "artifacts.source='/a/./b'; expected an absolute path, without"),
        ("artifacts = ['out']", "artifacts.source='out'; expected an absolute path"),
        ("artifacts = [{source = '/a', destination = '../b'}]", "expected a relative path, without"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(tmp_path, toml, says):
    with pytest.raises(InvalidTask, match=says):
        load_task(write(tmp_path, toml=toml))


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[environment]\nos = 'windows'", "environment.os='windows': only Linux"),
        ("[environment]\ngpus = 1", "environment.gpus=1: a sandbox has no accelerator"),
        ("[environment]\nmcp_servers = [{name = 'x', url = 'y'}]", "no MCP servers"),
        ("[environment]\nskills_dir = '/skills'", "skills"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment"),
        ("[agent]\nuser = 'agent'", "agent.user='agent': a sandbox has one user"),
        ("[verifier]\nuser = 1000", "verifier.user=1000"),
        (
            "[environment]\nnetwork_mode = 'allowlist'",
            "environment.network_mode='allowlist': a sandbox reaches everything",
        ),
        ("[agent]\nnetwork_mode = 'no-network'", "agent.network_mode='no-network': commands and graders have the"),
        ("[verifier]\nnetwork_mode = 'allowlist'", "verifier.network_mode='allowlist'"),
        (
            "[verifier]\nnetwork_mode = 'public'\n[environment]\nallow_internet = false",
            "verifier.network_mode='public'",
        ),
        ("artifacts = [{source = '/a', service = 'db'}]", "artifacts.service"),
        ("[[verifier.collect]]\ncommand = 'x'\nservice = 'db'", "service: a sandbox is one container"),
    ],
)
def test_what_no_sandbox_offers_is_refused_by_name(tmp_path, toml, says):
    with pytest.raises(UnsupportedTask, match=says):
        load_task(write(tmp_path, toml=toml))
    toml = "[environment]\nos = 'Linux'\ngpus = 0\nnetwork_mode = 'no-network'\n[agent]\nuser = 'root'\n"
    assert load_task(write(tmp_path, toml=toml + "network_mode = 'no-network'"))


@pytest.mark.parametrize("path", ["environment/docker-compose.yaml", "tests/Dockerfile", "tests/.harborignore"])
def test_files_that_would_change_a_task_are_refused_by_name(tmp_path, path):
    with pytest.raises(UnsupportedTask, match=os.path.basename(path)):
        load_task(write(tmp_path, **{path: ""}))


@pytest.mark.parametrize("path", ["task.toml", "instruction.md", "environment/Dockerfile"])
def test_a_file_that_is_no_text_is_named_and_a_mark_of_the_byte_order_is_none_of_it(tmp_path, path):
    write(tmp_path)
    text = (tmp_path / path).read_bytes()
    (tmp_path / path).write_bytes(b"\xef\xbb\xbf" + text)
    task = load_task(tmp_path)
    assert (plan(task, TrialOptions()).workdir, task.steps[0].instruction) == ("/app", "Write 42 to /app/answer.")
    (tmp_path / path).write_bytes(text + b"\xff")
    with pytest.raises(ValueError, match=f"{path}: 'utf-8' codec"):
        plan(load_task(tmp_path), TrialOptions())


def test_a_least_reward_may_be_below_0(tmp_path):
    steps = {"steps/a/instruction.md": "a"}
    for text, least in (("-0.5", {"reward": -0.5}), ("{speed = -1}", {"speed": -1.0})):
        task = load_task(write(tmp_path, toml=f"[[steps]]\nname = 'a'\nmin_reward = {text}", **steps))
        assert task.steps[0].min_reward == least


@pytest.mark.parametrize("path", ["task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh"])
def test_a_missing_file_is_named(tmp_path, path):
    write(tmp_path)
    (tmp_path / path).unlink()
    with pytest.raises(InvalidTask, match=os.path.basename(path)):
        load_task(tmp_path)


def test_an_image_that_is_made_elsewhere_needs_no_dockerfile(tmp_path):
    write(tmp_path, toml="[environment]\ndocker_image = 'org/image:1'")
    (tmp_path / "environment/Dockerfile").unlink()
    assert load_task(tmp_path).environment.docker_image == "org/image:1"


def test_tasks_are_found_at_any_depth_and_in_order(tmp_path):
    for name in ("b", "set/a", "set/c"):
        write(tmp_path / name)
    assert find_tasks(tmp_path) == [tmp_path / "b", tmp_path / "set/a", tmp_path / "set/c"]
    assert find_tasks(tmp_path / "b") == [tmp_path / "b"]
    for nothing in (tmp_path / "b/tests", tmp_path / "none"):
        with pytest.raises(ValueError, match=r"no task\.toml is below it"):
            find_tasks(nothing)


def test_X09_a_task_reads_no_variable_of_this_machine_that_it_was_not_given():
    asked = {"A": "plain", "B": "${TOKEN}", "C": "${NONE:-default}", "D": "${TOKEN} and more"}
    assert resolve_variables(asked, {"TOKEN": "secret"}, "x") == {
        "A": "plain",
        "B": "secret",
        "C": "default",
        "D": "${TOKEN} and more",
    }
    with pytest.raises(ValueError, match=r"environment\.env: B='\$\{TOKEN\}' asks for the variable TOKEN.*host_env"):
        resolve_variables(asked, {}, "environment.env")
