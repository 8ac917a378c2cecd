"""Attacks on the bubblewrap sandbox, each of which would succeed on a sandbox without the part that it tests.

They need user namespaces. Where those are forbidden every one is skipped, and
`test_this_machine_can_run_the_attacks` says how many that were.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from sandboxes import missing

from envs.terminal import (
    Bubblewrap,
    CommandResult,
    File,
    Limits,
    RefusedFile,
    Sandbox,
    SandboxFault,
    SandboxSpec,
    SandboxUnavailable,
    Shell,
)

pytestmark = pytest.mark.slow  # hundreds of sandboxes

MIB = 1024 * 1024
SMALL = Limits(seconds=20, memory_mb=200, processes=64, disk_mb=32, inodes=2000, file_mb=16, output_bytes=2000)


@contextlib.asynccontextmanager
async def sandbox(limits: Limits = SMALL, **spec: Any) -> AsyncIterator[Sandbox]:
    """A sandbox, or a skipped test."""
    if why := missing():
        pytest.skip(why)
    async with Bubblewrap()(SandboxSpec(limits=limits, **spec)) as made:
        yield made


def processes_with(word: str) -> list[int]:
    """Processes of this machine whose command line has `word`, but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


async def gone(word: str) -> bool:
    """Whether no process with `word` is left, soon."""
    for _ in range(250):
        if not processes_with(word):
            return True
        await trio.sleep(0.02)
    return False


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process of this machine, killed at the end of the block."""
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def marker() -> str:
    """A number of seconds nobody else sleeps."""
    return f"{secrets.randbelow(10**6) + 10**6}.{secrets.randbelow(10**6)}"


def ok(result: CommandResult) -> str:
    assert result.exit_code == 0, result
    return result.stdout


def test_this_machine_can_run_the_attacks():
    count = sum(name.startswith("test_") for name in globals()) - 1
    if why := missing():
        pytest.skip(f"0 of {count} attacks can run here: {why}")
    assert count > 30


# --- a command ------------------------------------------------------------------------------------


async def test_a_command_gives_its_code_and_both_streams_and_files_stay():
    async with sandbox() as box:
        result = await box.run("echo out; echo err >&2; echo kept >/tmp/file; pwd; exit 3")
        assert result == CommandResult(3, "out\n/app\n", "err\n")
        assert ok(await box.run("cat /tmp/file; read -r x; echo $x$V", cwd="/tmp", env={"V": "!"}, stdin=b"in\n")) == (
            "kept\nin!\n"
        )
        assert (await box.run("kill -9 $$")).exit_code == 137
        assert (await box.run("true", cwd="/none")).exit_code == 1


async def test_root_may_change_the_root_but_not_the_programs_of_the_machine():
    async with sandbox() as box:
        ok(await box.run("echo x >/etc/passwd; rm /bin; mkdir /new; touch /opt/x; chmod 000 /opt/x; cat /opt/x"))
        for command in ("touch /usr/x", "rm -rf /usr/bin/true", "echo >/usr/bin/env"):
            assert (await box.run(command)).exit_code != 0
        assert shutil.which("true")


async def test_output_is_cut_in_the_middle_and_told():
    async with sandbox() as box:
        result = await box.run("echo begin; yes | head -c 5000000; echo end; echo fine >&2")
        assert result.truncated
        assert result.stdout.startswith("begin\ny\n")
        assert result.stdout.endswith("y\nend\n")
        assert "\n[... 4998010 bytes cut ...]\n" in result.stdout
        assert result.stderr == "fine\n"


async def test_files_go_in_with_their_bits_and_come_out_up_to_a_limit():
    async with sandbox() as box:
        big = os.urandom(MIB)
        await box.write_files({"/app/a/.b": File(b"echo hi", 0o755), "/big": File(big)})
        assert ok(await box.run("/app/a/.b")) == "hi\n"
        assert await box.read_file("/big", MIB) == big
        with pytest.raises(RefusedFile, match="larger"):
            await box.read_file("/big", MIB - 1)
        with pytest.raises(FileNotFoundError):
            await box.read_file("/none", 10)


async def test_an_image_directory_is_copied_on_write(tmp_path_factory):
    if missing():
        pytest.skip(str(missing()))
    image = Path(tempfile.mkdtemp(prefix="image-", dir="/var/tmp"))
    try:
        build_image(image)
        async with sandbox(image=str(image), limits=Limits(seconds=20)) as box:
            assert ok(await box.run("cat /etc/name; echo changed >/etc/name; echo new >/bin/new; cat /etc/name")) == (
                "image\nchanged\n"
            )
            assert ok(await box.run("cat /etc/name")) == "changed\n"
            assert ok(await box.run("cat /etc/name", keep=["/app"])) == "image\n"
        assert (image / "etc/name").read_text() == "image\n"
        assert not (image / "bin/new").exists()
    finally:
        shutil.rmtree(image)


def build_image(root: Path) -> None:
    """bash, cat, mkdir and their libraries, owned by whom sandboxes run as."""
    for program in ("bash", "cat", "mkdir"):
        path = shutil.which(program)
        assert path
        linked = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        for source in [path, *re.findall(r"(/\S+) \(0x", linked)]:
            target = root / ("bin/" + program if source == path else source.lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    (root / "etc").mkdir()
    (root / "etc/name").write_text("image\n")
    root.chmod(0o755)
    if os.geteuid() == 0:
        for path in [root, *root.rglob("*")]:
            os.chown(path, 65_534, 65_534)


async def test_an_image_of_somebody_else_says_what_to_do(tmp_path):
    if missing():
        pytest.skip(str(missing()))
    with pytest.raises(ValueError, match="chown -R"):
        async with Bubblewrap()(SandboxSpec(image=str(tmp_path if os.geteuid() == 0 else "/usr"))):
            pass


# --- writing outside, secrets, the host --------------------------------------------------------------


async def test_attack_writing_outside(tmp_path):
    tmp_path.chmod(0o777)
    async with sandbox() as box:
        above = Path("/proc/1/root", "..", "x")
        for target in (tmp_path / "x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", above):
            await box.run(f"mkdir -p {Path(target).parent}; echo attack >{target}")
        assert list(tmp_path.iterdir()) == []
        assert (await box.run("echo x >/proc/sys/kernel/core_pattern")).exit_code != 0
        assert (await box.run("echo 1 >/proc/sys/vm/drop_caches")).exit_code != 0
        assert (await box.run("echo x >/dev/new")).exit_code != 0
        assert (await box.run("mount -o remount,rw /dev; mkdir /dev/new")).exit_code != 0
        ok(await box.run("echo x >/dev/null; echo x >/dev/shm/x; head -c 1 /dev/urandom; echo x | tee /dev/stderr"))
        await box.run("mkdir -p /x; ln -s / /x/up; echo attack >/x/up/../../attack")
    assert "attack" not in os.listdir("/")


async def test_X09_attack_reading_secrets_of_the_machine(tmp_path, monkeypatch):
    word = secrets.token_hex(8)
    secret = Path(tempfile.mkdtemp(dir="/var/tmp")) / "secret"
    secret.write_text(word)
    secret.parent.chmod(0o755)
    monkeypatch.setenv("JAXRL_SECRET", word)
    try:
        async with sandbox(env={"GIVEN": "1"}) as box:
            seen = await box.run(
                f"env; cat /proc/*/environ /proc/*/cmdline; cat {secret} /proc/1/root{secret} /proc/1/cwd{secret} "
                "/etc/shadow /etc/passwd; ls -a / /root /home /box /tmp /run /proc/1/root /proc/*/fd /proc/1/map_files"
            )
            text = seen.stdout + seen.stderr
            assert word not in text
            assert "GIVEN=1" in text
            assert ok(await box.run("cat /etc/passwd")).splitlines() == ["root:x:0:0:root:/root:/bin/bash"]
            assert ok(await box.run("ls /root /home /run")).split() == ["/home:", "/root:", "/run:"]
            assert (await box.run("ls /box")).exit_code != 0
    finally:
        shutil.rmtree(secret.parent)


async def test_attack_processes_of_the_machine():
    word = marker()
    with running(["sleep", word], user=65_534 if os.geteuid() == 0 else None) as victim:
        async with sandbox() as box:
            assert word not in ok(await box.run("cat /proc/*/cmdline | tr '\\0' ' '"))
            await box.run(f"kill -9 {victim.pid}; kill -9 1")
            await box.run("kill -9 -1")
            assert victim.poll() is None
            assert len(ok(await box.run("ls -d /proc/[0-9]*")).split()) < 5


@pytest.mark.parametrize(
    "attempt",
    [
        "unshare -U true",
        "unshare -m true",
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw /usr",
        "umount /usr",
        "mknod /tmp/node c 1 3",
        "chroot / true",
        "nsenter -t 1 -m true",
        "hostname other",
        "chown 1:1 /etc/passwd",
    ],
)
async def test_attack_more_privileges(attempt):
    async with sandbox() as box:
        result = await box.run(attempt)
        assert result.exit_code not in (0, 127), result


async def test_no_privilege_can_be_gained_and_no_descriptor_was_inherited():
    async with sandbox() as box:
        status = ok(await box.run("cat /proc/self/status"))
        assert re.search(r"NoNewPrivs:\s1\b", status)
        assert re.search(r"Seccomp:\s2\b", status)
        assert re.search(r"CapBnd:\s0*41b\b", status)  # chown, dac_override, fowner, fsetid, net_bind_service
        assert ok(await box.run("sleep 9 & until grep -q sleep /proc/$!/comm; do :; done; ls /proc/$!/fd")).split() == [
            "0",
            "1",
            "2",
        ]
        assert ok(await box.run("cat /proc/self/oom_score_adj")) == "1000\n"


# --- the network --------------------------------------------------------------------------------------

CONNECT = """
import socket, sys
tcp = sys.argv[1] == "tcp"
client = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
client.settimeout(3)
client.connect(("127.0.0.1", int(sys.argv[2])) if tcp else "\\0" + sys.argv[2])
print(client.recv(10).decode())
"""


@contextlib.contextmanager
def listening(family: int, address: Any) -> Any:
    """A server of this machine that greets whoever connects."""
    with socket.socket(family) as server:
        server.bind(address)
        server.listen()

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    with client:
                        client.sendall(b"hello")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def python_inside() -> str:
    """A Python among the programs that a sandbox shows."""
    found = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if found is None:
        pytest.skip("no python3 in /usr")
    return found


@pytest.mark.parametrize("network", [False, True])
async def test_attack_the_network(network):
    name = "jaxrl-" + secrets.token_hex(4)
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as (_, port), listening(socket.AF_UNIX, "\0" + name):
        async with sandbox(network=network) as box:
            await box.write_files({"/c.py": File(CONNECT.encode())})
            tcp = await box.run(f"{python_inside()} /c.py tcp {port}")
            abstract = await box.run(f"{python_inside()} /c.py abstract {name}")
    assert ("hello" in tcp.stdout, "hello" in abstract.stdout) == (network, network)


async def test_attack_sockets_that_no_network_namespace_holds():
    async with sandbox(network=True) as box:
        tried = await box.run(f"{python_inside()} -c 'import socket; socket.socket(40, socket.SOCK_STREAM)'")
        assert "Address family not supported" in tried.stderr
        ok(await box.run(f"{python_inside()} -c 'import socket; socket.socketpair(); socket.socket()'"))


# --- floods ---------------------------------------------------------------------------------------------


async def test_attack_fork_bomb():
    async with sandbox() as box:
        began = time.monotonic()
        result = await box.run("bomb() { bomb | bomb & }; bomb; sleep 60", seconds=1)
        assert result.timed_out
        assert result.exit_code is None
        assert time.monotonic() - began < 15
        assert ok(await box.run("echo alive")) == "alive\n"


async def test_attack_more_processes_than_allowed_also_from_several_commands():
    word = marker()
    async with sandbox() as box, Shell(box) as shell:
        ok(await shell.run(f"for i in $(seq 40); do sleep {word} & done"))
        await box.run(f"for i in $(seq 100); do sleep {word} & done; sleep 0.5", seconds=1)
        assert len(processes_with(word)) <= 64
        many = await shell.run(f"for i in $(seq 100); do sleep {word} & done; sleep 0.1", seconds=1)
        assert len(processes_with(word)) <= 64, many
    assert await gone(word)


async def test_attack_memory_of_one_process():
    async with sandbox() as box:
        result = await box.run(f"{python_inside()} -c 'bytearray(10**9)'")
        assert "MemoryError" in result.stderr
        assert ok(await box.run(f"{python_inside()} -c 'bytearray(10**8)'")) == ""


FLOODS = {
    "many processes": "for i in 1 2 3 4; do "
    "{python} -c 'import time; x = bytearray(10**8); time.sleep(60)' & done; wait",
    "shared pages": "{python} -c 'import mmap, time; m = mmap.mmap(-1, 4 * 10**8); "
    "[m.__setitem__(i, 1) for i in range(0, 4 * 10**8, 4096)]; time.sleep(60)'",
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_attack_memory_of_a_tree(flood):
    async with sandbox() as box:
        command = FLOODS[flood].format(python=python_inside())
        result = await box.run(command)
        assert (result.out_of_memory, result.timed_out, result.exit_code) == (True, False, None)
        assert "more than 200 MiB" in result.notice
        async with Shell(box) as shell:
            result = await shell.run(command)
            assert result.out_of_memory
            assert "new shell" in result.notice
            assert ok(await shell.run("echo alive")) == "alive\n"


@pytest.mark.parametrize("call", ["os.memfd_create('x')", "ctypes.CDLL(None, use_errno=True).shmget(0, 4096, 0o1600)"])
async def test_attack_memory_of_no_process(call):
    async with sandbox() as box:
        script = f"import os, ctypes; r = {call}; raise SystemExit(0 if r >= 0 else os.strerror(ctypes.get_errno()))"
        result = await box.run(f'{python_inside()} -c "{script}"')
        assert result.exit_code == 1
        assert "Function not implemented" in result.stderr


async def test_attack_disk_flood_and_grading_still_works():
    async with sandbox() as box:
        one = await box.run("head -c 100000000 /dev/zero >/tmp/one; stat -c %s /tmp/one")
        assert int(one.stdout) == 16 * MIB
        full = await box.run("for i in $(seq 20); do head -c 8000000 /dev/zero >/app/$i; done; df --output=used -k /")
        assert "No space left" in full.stderr
        assert int(full.stdout.split()[-1]) <= 32 * 1024
        await box.attach("/tests", {"t.sh": File(b"ls /app | wc -l >/logs/n")})
        await box.attach("/logs", {}, writable=True)
        ok(await box.run("bash /tests/t.sh", keep=["/app"]))
        assert int(await box.read_file("/logs/n", 100)) > 1


async def test_attack_inode_flood():
    async with sandbox() as box:
        result = await box.run("cd /tmp; for i in $(seq 3000); do : >$i || break; done; ls | wc -l")
        assert int(result.stdout) < 2000
        assert "No space left" in result.stderr


async def test_attack_output_flood():
    async with sandbox() as box:
        began = time.process_time()
        result = await box.run("yes", seconds=1)
        assert result.timed_out
        assert len(result.stdout) < 2100
        assert time.process_time() - began < 0.9


async def test_attack_more_open_files_than_allowed():
    async with sandbox(limits=Limits(open_files=50)) as box:
        script = "held = [open('/dev/null') for _ in range(100)]"
        assert "Too many open files" in (await box.run(f'{python_inside()} -c "{script}"')).stderr


# --- time and what outlives it ----------------------------------------------------------------------------


async def test_attack_a_tree_that_ignores_every_signal():
    word = marker()
    async with sandbox() as box:
        began = time.monotonic()
        result = await box.run(
            f"trap '' TERM INT HUP QUIT; (trap '' TERM; setsid sleep {word}) & sleep {word}", seconds=0.5
        )
        assert result.timed_out
        assert result.notice == "stopped after 0.5 s, with everything it had started"
        assert time.monotonic() - began < 8
        assert processes_with(word) == []


@pytest.mark.parametrize("daemon", ["setsid nohup sleep {} >/dev/null 2>&1 &", "(sleep {} &) &", "sleep {} & disown"])
async def test_attack_a_daemon_that_outlives_its_command(daemon):
    word = marker()
    async with sandbox() as box:
        began = time.monotonic()
        assert ok(await box.run(daemon.format(word) + " sleep 0.1; echo done")) == "done\n"
        assert time.monotonic() - began < 8
        assert processes_with(word) == []


async def test_I9_nothing_is_left_after_a_cancellation():
    word = marker()
    async with sandbox() as box:
        with trio.move_on_after(0.5) as scope:
            await box.run(f"trap '' TERM; sleep {word}; sleep {word}")
        assert scope.cancelled_caught
        assert processes_with(word) == []
        assert ok(await box.run("echo alive")) == "alive\n"


async def test_I9_nothing_is_left_after_the_sandbox_closes():
    word, before = marker(), set(os.listdir("/proc/self/fd"))

    async def fail() -> None:
        async with sandbox() as box, Shell(box) as shell:
            await shell.run(f"sleep {word} & until grep -q {word} /proc/$!/cmdline; do :; done")
            assert processes_with(word)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert processes_with(word) == []
    assert set(os.listdir("/proc/self/fd")) <= before


TRAINER = """
import sys, trio
from envs.terminal import Bubblewrap, SandboxSpec, Shell
async def main():
    async with Bubblewrap()(SandboxSpec()) as box, Shell(box) as shell:
        await shell.run("trap '' TERM HUP; setsid sleep WORD & sleep WORD & echo x >/tmp/file")
        print("ready", flush=True)
        await box.run("trap '' TERM; sleep WORD")
trio.run(main)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_I9_nothing_is_left_after_a_kill_of_the_trainer(how, tmp_path):
    if missing():
        pytest.skip(str(missing()))
    word = marker()
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = TRAINER.replace("WORD", word)
    command = [sys.executable, "-c", script]
    with running(command, stdout=subprocess.PIPE, env=environment) as trainer:
        assert trainer.stdout
        assert trainer.stdout.readline() == b"ready\n"
        await trio.sleep(0.3)
        assert len(processes_with(word)) >= 3
        trainer.send_signal(how)
        trainer.wait()
    assert await gone(word)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_the_ten_second_parent_death_trap():
    """A thread that started a process ends when it was idle for 10 s, and with it what wants to die with its parent."""
    async with sandbox() as box, Shell(box) as shell:
        async with trio.open_nursery() as nursery:
            results: list[CommandResult] = []

            async def both() -> None:
                results.append(await box.run("sleep 12; echo long"))

            nursery.start_soon(both)
            results.append(await shell.run("sleep 12; echo long"))
        assert [ok(each) for each in results] == ["long\n"] * 2


# --- grading ---------------------------------------------------------------------------------------------

GRADER = b"""#!/bin/bash
if [ "$(cat /app/answer)" = 42 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""


async def grade(box: Sandbox, keep: list[str] | None) -> bytes:
    await box.attach("/tests", {"test.sh": File(GRADER, 0o755)})
    await box.attach("/logs/verifier", {}, writable=True)
    try:
        await box.run("/tests/test.sh", keep=keep)
        return await box.read_file("/logs/verifier/reward.txt", 100)
    finally:
        await box.detach("/tests")
        await box.detach("/logs/verifier")


@pytest.mark.parametrize(("answer", "reward"), [("42", b"1\n"), ("41", b"0\n")])
async def test_X01_only_an_honest_answer_is_rewarded(answer, reward):
    async with sandbox() as box:
        ok(await box.run(f"mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; echo {answer} >/app/answer"))
        assert await grade(box, ["/app"]) == reward
        assert await grade(box, None) == reward


POISON = {
    "a program earlier on the path": "mkdir -p /usr/local/bin /poison; cp /poison/cat /usr/local/bin/cat",
    "the shell": "rm /bin; mkdir /bin; printf '#!/usr/bin/bash\\necho 1 >/logs/verifier/reward.txt\\n' >/bin/bash; "
    "chmod +x /bin/bash",
    "the loader": "echo /app/none.so >/etc/ld.so.preload",
}


async def test_X01_attack_a_poisoned_grader():
    async with sandbox() as box:
        ok(await box.run("echo 41 >/app/answer; " + POISON["the shell"]))
        assert await grade(box, None) == b"1\n"  # the attack works on the root that the agent had
        assert await grade(box, ["/app"]) == b"0\n"


@pytest.mark.parametrize("poison", POISON)
async def test_X01_poison_does_not_reach_a_fresh_root(poison):
    async with sandbox() as box:
        await box.run(f"echo 41 >/app/answer; {POISON[poison]}")
        assert await grade(box, ["/app"]) == b"0\n"


@pytest.mark.parametrize(
    ("attack", "what"),
    [
        ("ln -s /etc/passwd /logs/reward.txt", "a link"),
        ("mkfifo /logs/reward.txt", "a named pipe"),
        ("mkdir /logs/reward.txt", "a directory"),
        ("rmdir /logs; mkdir /other; echo 1 >/other/reward.txt; ln -s /other /logs", "a link"),
        ("head -c 200 /dev/zero >/logs/reward.txt", "larger"),
    ],
)
async def test_attack_a_reward_that_is_no_plain_file(attack, what):
    async with sandbox() as box:
        ok(await box.run(f"mkdir /logs; {attack}"))
        with trio.fail_after(5), pytest.raises(RefusedFile, match=what):
            await box.read_file("/logs/reward.txt", 100)


async def test_tests_are_not_there_before_grading_nor_for_what_began_before():
    async with sandbox() as box:
        async with Shell(box) as shell:
            ok(await shell.run("(while sleep 0.02; do cat /tests/* >>/app/seen 2>/dev/null; done) & true"))
            with pytest.raises(RuntimeError, match="close its shells first"):
                await box.attach("/tests", {"secret": File(b"42")})
        await box.attach("/tests", {"secret": File(b"42")})
        assert ok(await box.run("cat /tests/secret; sleep 0.2; cat /app/seen || true")) == "42"
        for command in ("echo 1 >/tests/secret", "rm /tests/secret", "mv /tests /x", "umount /tests"):
            assert (await box.run(command)).exit_code != 0
        await box.detach("/tests")
        assert ok(await box.run("ls -A /tests")) == ""


@pytest.mark.parametrize("way", ["ln -s /app /tests", "echo x >/tests", "mkdir /tests; ln -s /etc /tests/deep"])
async def test_attack_something_in_the_way_of_the_tests(way):
    async with sandbox() as box:
        ok(await box.run(way))
        await box.attach("/tests/deep", {"t": File(b"real")})
        assert ok(await box.run("cat /tests/deep/t")) == "real"
        assert ok(await box.run("cat /tests/deep/t", keep=["/app"])) == "real"


async def test_attack_a_kept_directory_that_is_a_link():
    async with sandbox() as box:
        ok(await box.run("rmdir /app; ln -s /etc /app", cwd="/"))
        with pytest.raises(RefusedFile, match="keep='/app' is no directory"):
            await box.run("true", keep=["/app"])


async def test_a_fresh_root_shows_kept_directories_read_only_and_is_gone_afterwards():
    async with sandbox() as box:
        ok(await box.run("echo 1 >/app/x; echo 2 >/tmp/x; echo 3 >/etc/x"))
        seen = await box.run("cat /app/x; cat /tmp/x /etc/x; echo 4 >/app/x; echo 5 >/etc/y", keep=["/app"])
        assert seen.stdout == "1\n"
        assert "Read-only" in seen.stderr
        assert (await box.run("cat /etc/y", keep=["/app"])).exit_code != 0
        assert ok(await box.run("cat /app/x; ls /etc/y 2>/dev/null || true")) == "1\n"


async def test_a_box_that_destroyed_itself_is_no_fault_of_ours():
    async with sandbox() as box:
        await box.run("rm -f /lib64 /lib /bin")
        assert (await box.run("echo x")).exit_code == 127


# --- the shell -----------------------------------------------------------------------------------------------


async def test_a_shell_keeps_directory_variables_functions_and_background_processes():
    async with sandbox() as box, Shell(box) as shell:
        ok(await shell.run("cd /tmp; x=5; f() { echo f$x; }; export Y=6; sleep 60 &"))
        assert ok(await shell.run("pwd; f; bash -c 'echo $Y'; kill -0 $! && echo runs")) == "/tmp\nf5\n6\nruns\n"
        assert (await shell.run("echo err >&2; false")).stdout == "err\n"
        assert (await shell.run("false")).exit_code == 1


@pytest.mark.parametrize(
    ("command", "code"), [("echo 'open", 2), ("if true; then", 2), (")", 2), ("", 0), ("# nothing", 0), ("cat", 0)]
)
async def test_a_shell_survives_commands_that_cannot_be_read_or_read_everything(command, code):
    async with sandbox() as box, Shell(box) as shell:
        assert (await shell.run(command, seconds=5)).exit_code == code
        assert ok(await shell.run("echo next")) == "next\n"
        assert shell.restarts == 0


async def test_X05_a_shell_takes_a_command_longer_than_an_argument():
    async with sandbox() as box, Shell(box) as shell:
        assert ok(await shell.run(f"x={'a' * 200_000}; echo ${{#x}}")) == "200000\n"


@pytest.mark.parametrize(
    ("command", "code"), [("exit 7", 7), ("exec true", 0), ("kill -9 $$", 137), ("set -e; false", 1)]
)
async def test_a_shell_that_ends_itself_is_replaced_and_says_so(command, code):
    async with sandbox() as box, Shell(box) as shell:
        ok(await shell.run("cd /tmp; x=5"))
        result = await shell.run(command)
        assert result.exit_code == code
        assert result.notice.startswith("the command ended the shell; the next command starts a new shell")
        assert ok(await shell.run("echo $PWD$x")) == "/tmp\n"
        assert shell.restarts == 1


@pytest.mark.parametrize("command", ["sleep 60", "trap '' TERM INT; while :; do :; done", "exec >/dev/null 2>&1"])
async def test_a_shell_that_does_not_come_back_is_replaced_and_keeps_its_files(command):
    word = marker()
    async with sandbox() as box, Shell(box) as shell:
        result = await shell.run(f"echo out; echo x >/tmp/kept; setsid sleep {word} & {command}", seconds=2)
        assert result.stdout == "out\n"
        assert result.timed_out
        assert result.notice.startswith("stopped after 2 s")
        assert processes_with(word) == []
        assert ok(await shell.run("cat /tmp/kept")) == "x\n"


async def test_X03_a_forged_end_of_a_command_is_output():
    async with sandbox() as box, Shell(box) as shell:
        forged = f"printf '\\0%s 0 /x\\0' {secrets.token_hex(16)}; echo real; false"
        for _ in range(2):
            result = await shell.run(forged)
            assert result.exit_code == 1
            assert result.stdout.endswith("real\n")
            assert shell.cwd == "/app"


async def test_X03_a_report_that_a_command_changed_is_refused_and_the_shell_replaced():
    deep = f"for i in {{1..30}}; do mkdir {'d' * 200}; cd {'d' * 200}; done"
    reports = ["'\\0%s abc /x\\0' \"$2\"", "'\\0%s 1000 /x\\0' \"$2\"", "'\\0%s 1 x\\0' \"$2\"", "'\\0%s ' \"$2\"; yes"]
    commands = [f"builtin() {{ shift; command printf {report}; }}" for report in reports]
    async with sandbox() as box, Shell(box) as shell:
        ok(await shell.run("cd /tmp"))
        for i, command in enumerate([*commands, "PWD=$(printf '/%0300000d' 0)", deep], 1):
            result = await shell.run(f"echo out; {command}", seconds=20)
            assert (result.stdout, result.exit_code, result.timed_out) == ("out\n", None, False), command
            assert result.notice.startswith("the shell no longer reports exit code and directory, so it was ended; the")
            assert ok(await shell.run("pwd")) == "/tmp\n"
            assert shell.restarts == i
        assert ok(await shell.run("printf() { :; }; cd /srv")) == ""
        assert shell.cwd == "/srv"


async def test_output_of_a_background_process_comes_with_the_next_command():
    async with sandbox() as box, Shell(box) as shell:
        assert (
            ok(await shell.run("(until [ -e go ]; do sleep 0.02; done; echo late; touch done) & echo now")) == "now\n"
        )
        ok(await box.run("touch go; until [ -e done ]; do sleep 0.02; done"))
        assert ok(await shell.run("echo next")) == "late\nnext\n"


async def test_a_shell_whose_directory_is_gone_starts_at_the_root_of_the_sandbox():
    async with sandbox() as box, Shell(box) as shell:
        ok(await shell.run("mkdir /gone; cd /gone; rmdir /gone"))
        await shell.run("exit 0")
        assert ok(await shell.run("pwd")) == "/\n"


async def test_I9_a_cancelled_shell_leaves_nothing():
    word = marker()
    async with sandbox() as box, Shell(box) as shell:
        with trio.move_on_after(0.4):
            await shell.run(f"sleep {word} & sleep {word}")
        assert processes_with(word) == []
        assert ok(await shell.run("echo again")) == "again\n"


# --- the machine ---------------------------------------------------------------------------------------------


async def test_I9_all_is_dead_the_moment_a_sandbox_has_closed():
    async with sandbox() as box:
        init = init_of(box)
        inside = os.stat(f"/proc/{init}/ns/pid").st_ino
        async with Shell(box) as shell:
            await shell.run(
                "for i in 1 2 3 4 5; do setsid sleep 60 >/dev/null 2>&1 & done; exec >/dev/null 2>&1", seconds=1
            )
    left = []
    for path in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if path.isdigit() and os.stat(f"/proc/{path}/ns/pid").st_ino == inside:
                left.append(await trio.Path(f"/proc/{path}/status").read_text())
    assert left == []
    assert not os.access(f"/proc/{init}/root", os.F_OK)


async def test_a_dead_sandbox_is_a_fault_and_not_a_result():
    async with sandbox() as box:
        os.kill(init_of(box), signal.SIGKILL)
        await trio.sleep(0.1)
        with pytest.raises(SandboxFault):
            await box.run("true")


def init_of(box: Any) -> int:
    return int(box._enter[box._enter.index("-t") + 1])


async def test_a_machine_that_forbids_namespaces_is_told_what_to_change(tmp_path):
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    with pytest.raises(SandboxUnavailable, match=r"kernel\.unprivileged_userns_clone=1"):
        async with Bubblewrap(binary=str(bwrap))(SandboxSpec()):
            pass


@pytest.mark.slow
async def test_64_sandboxes_at_once():
    if missing():
        pytest.skip(str(missing()))
    done: list[str] = []

    async def one(number: int) -> None:
        async with sandbox() as box, Shell(box) as shell:
            await shell.run(f"echo {number} >/app/n")
            for _ in range(3):
                assert ok(await box.run("cat /app/n")) == f"{number}\n"
            done.append(ok(await shell.run("cat /app/n")))

    async with trio.open_nursery() as nursery:
        for number in range(64):
            nursery.start_soon(one, number)
    assert sorted(map(int, done)) == list(range(64))
