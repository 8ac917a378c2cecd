"""A shell that stays: what one command leaves behind (directory, variables, background processes), the next one finds.

Knows the protocol of a sandbox and bash. It must not know a back-end, a task or a message.

bash reads one command after another from its stdin and ends each with a line of its own that holds a number made for
that command alone, so that nothing printed earlier can pass for it. Where the end does not come in time, the shell ends
itself, or what it reports is no exit code and directory (a command may have redefined whatever reports), its whole tree
is killed and the next command starts a new shell in the last directory known.
"""

import re
import secrets
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import trio

from envs.terminal.capture import Kept, finish, notice_of
from envs.terminal.sandbox import CommandResult, Sandbox, SandboxProcess, check_characters

_BASH = ("/bin/bash", "--noprofile", "--norc")
_NO_REPORT = "the shell no longer reports exit code and directory, so it was ended"
_CHUNK, _LAST_SECONDS = 65_536, 1.0
_REPORT = re.compile(rb"(\d{1,3}) (/[^\0]{0,4095})\0")  # an exit code and a directory that can be entered by its name
_LONGEST_REPORT = 8192
_RESTARTED = "the next command starts a new shell: variables and background processes are gone, files stay"


class Shell:
    """Owns one process of `sandbox`. Commands run one at a time; stderr is part of stdout, in order.

    Use as a block, or call `aclose`. restarts: how often a shell had to be replaced.
    """

    def __init__(self, sandbox: Sandbox, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> None:
        self.restarts = 0
        self.cwd = cwd or sandbox.spec.workdir
        self._sandbox = sandbox
        self._env = dict(env or {})
        self._open = AsyncExitStack()
        self._process: SandboxProcess | None = None
        self._carry = b""  # output read after the end of a command: of processes in the background

    async def __aenter__(self) -> "Shell":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Kill the shell and everything that was started from it."""
        self._process, self._carry = None, b""
        await self._open.aclose()

    async def run(self, command: str, *, seconds: float | None = None) -> CommandResult:
        """Run `command` as if typed. ValueError for a character that no shell can be given."""
        check_characters(command)
        limits = self._sandbox.spec.limits
        seconds = limits.seconds if seconds is None else seconds
        process = self._process or await self._start()
        nonce = secrets.token_hex(16).encode()
        kept = Kept(limits.output_bytes)
        ending: bytes | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(process.watch)
                with trio.move_on_after(seconds) as clock:
                    ending = await _exchange(process, command, nonce, self._carry, kept)
                nursery.cancel_scope.cancel()
        except BaseException:
            await self.aclose()  # where it was interrupted is unknown
            raise
        if ending is None:
            return await self._replace(process, kept, clock.cancelled_caught, seconds)
        if (report := _REPORT.match(ending)) is None:
            return await self._renew(CommandResult(None, kept.text(), truncated=bool(kept.cut), notice=_NO_REPORT))
        self._carry = ending[report.end() :]
        self.cwd = report[2].decode("utf-8", "surrogateescape")
        return CommandResult(int(report[1]), kept.text(), truncated=bool(kept.cut))

    async def _start(self) -> SandboxProcess:
        spawned = self._sandbox.spawn(_BASH, cwd=self.cwd, env=self._env)
        self._process = await self._open.enter_async_context(spawned)
        await self._process.stdin.send_all(b"exec 2>&1\n")
        return self._process

    async def _replace(self, process: SandboxProcess, kept: Kept, timed_out: bool, seconds: float) -> CommandResult:
        """The result of a command that left no usable shell."""
        limits = self._sandbox.spec.limits
        ended = not (timed_out or process.out_of_memory)
        if ended:
            last = await finish(process, b"", _LAST_SECONDS, limits)
        why = "the command ended the shell" if ended else notice_of(timed_out, process.out_of_memory, seconds, limits)
        result = CommandResult(
            last.exit_code if ended else None,
            kept.text(),
            timed_out=timed_out,
            out_of_memory=process.out_of_memory,
            truncated=bool(kept.cut),
            notice=why,
        )
        return await self._renew(result)

    async def _renew(self, result: CommandResult) -> CommandResult:
        """End the shell; `result` says that its next command starts a new one."""
        await self.aclose()
        self.restarts += 1
        return replace(result, notice=f"{result.notice}; {_RESTARTED}")


async def _exchange(process: SandboxProcess, command: str, nonce: bytes, carry: bytes, kept: Kept) -> bytes | None:
    """Send a command, keep its output, return what follows its mark: `code directory NUL ...`. None: the shell ended.

    The command may have changed what reports, so that anything may follow the mark, but little more than is asked for.
    eval makes a command with an error in it harmless to the commands after it; its stdin is not the shell's.
    """
    text = shlex.quote(command).encode()
    mark = b"\0" + nonce + b" "
    report = b"builtin printf '\\0%s %d %s\\0' " + nonce + b' "$?" "$PWD"\n'
    with suppress(trio.BrokenResourceError):  # it ended while it was written to: its output says the rest
        await process.stdin.send_all(b"eval " + text + b" </dev/null\n" + report)
    return await _read_to_mark(process.stdout, mark, carry, kept)


async def _read_to_mark(stream: trio.abc.ReceiveStream, mark: bytes, carry: bytes, kept: Kept) -> bytes | None:
    pending = carry
    while mark not in pending:
        whole = max(0, len(pending) - len(mark) + 1)  # the rest may be the beginning of the mark
        kept.add(pending[:whole])
        pending = pending[whole:]
        try:
            chunk = await stream.receive_some(_CHUNK)
        except trio.Cancelled:
            kept.add(pending)
            raise
        if not chunk:
            kept.add(pending)
            return None
        pending += chunk
        if kept.cut:
            await trio.sleep(0.001)
    output, _, ending = pending.partition(mark)
    kept.add(output)
    while b"\0" not in ending and len(ending) < _LONGEST_REPORT:
        chunk = await stream.receive_some(_CHUNK)
        if not chunk:
            return None
        ending += chunk
    return ending
