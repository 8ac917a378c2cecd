"""Running one process of a sandbox to its end: its input, its output cut in the middle, its time, its memory.

Knows the protocol of a process and nothing of any back-end.
"""

from contextlib import suppress
from dataclasses import dataclass, field

import trio

from envs.terminal.sandbox import CommandResult, Limits, SandboxFault, SandboxProcess

_DEATH_SECONDS = 10.0
_CHUNK = 65_536


@dataclass
class Kept:
    """The first and the last half of at most `limit` bytes."""

    limit: int
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    total: int = 0

    def add(self, chunk: bytes | bytearray) -> None:
        """Take the next bytes of the stream."""
        self.total += len(chunk)
        room = (self.limit + 1) // 2 - len(self.head)
        self.head += chunk[:room]
        self.tail += chunk[room:]
        if len(self.tail) > 2 * self.limit + _CHUNK:  # not each time: a flood would copy the tail for every chunk
            self._trim()

    def _trim(self) -> None:
        del self.tail[: max(0, len(self.tail) - self.limit // 2)]

    @property
    def cut(self) -> int:
        """How many bytes are missing from the middle."""
        return max(0, self.total - self.limit)

    def data(self) -> bytes:
        """All bytes when none were cut, else both halves with a line that tells between them."""
        if not self.cut:
            return bytes(self.head + self.tail)
        self._trim()
        return bytes(self.head) + b"\n[... %d bytes cut ...]\n" % self.cut + bytes(self.tail)

    def text(self) -> str:
        """`data`, with a replacement character for whatever is no UTF-8."""
        return self.data().decode("utf-8", "replace")


def pipes(process: trio.Process) -> tuple[trio.abc.SendStream, trio.abc.ReceiveStream, trio.abc.ReceiveStream]:
    """stdin, stdout and stderr of a process that was started with all three."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdin, process.stdout, process.stderr


async def read_up_to(stream: trio.abc.ReceiveStream, most: int) -> bytes:
    """The stream to its end, or to the first chunk that reaches `most` bytes."""
    data = b""
    while len(data) < most and (chunk := await stream.receive_some(_CHUNK)):
        data += chunk
    return data


async def keep_reading(stream: trio.abc.ReceiveStream, kept: Kept) -> None:
    """Until the end of the stream. What is thrown away anyway is read slowly, so that a flood costs little."""
    while chunk := await stream.receive_some(_CHUNK):
        kept.add(chunk)
        if kept.cut:
            await trio.sleep(0.001)


async def _feed(stream: trio.abc.SendStream, data: bytes) -> None:
    with suppress(trio.BrokenResourceError):  # a command need not read its input
        async with stream:
            await stream.send_all(data)


async def finish(process: SandboxProcess, stdin: bytes, seconds: float, limits: Limits) -> CommandResult:
    """Run `process` to its end or its limit. No process of its tree is left when this returns."""
    out, err = Kept(limits.output_bytes), Kept(limits.output_bytes)
    async with trio.open_nursery() as background:
        background.start_soon(process.watch)
        background.start_soon(_feed, process.stdin, stdin)
        async with trio.open_nursery() as readers:
            readers.start_soon(keep_reading, process.stdout, out)
            readers.start_soon(keep_reading, process.stderr, err)
            with trio.move_on_after(seconds) as clock:
                await process.wait()
            if clock.cancelled_caught:
                with trio.move_on_after(_DEATH_SECONDS):
                    await process.kill()
            readers.cancel_scope.deadline = trio.current_time() + _DEATH_SECONDS
        background.cancel_scope.cancel()
    if readers.cancel_scope.cancelled_caught:
        raise SandboxFault(f"processes of a command were still alive {_DEATH_SECONDS:g} s after it was killed")
    limited = clock.cancelled_caught or process.out_of_memory
    return CommandResult(
        exit_code=None if limited else await process.exit_code(err.text()),
        stdout=out.text(),
        stderr=err.text(),
        timed_out=clock.cancelled_caught,
        out_of_memory=process.out_of_memory,
        truncated=bool(out.cut or err.cut),
        notice=notice_of(clock.cancelled_caught, process.out_of_memory, seconds, limits),
    )


def notice_of(timed_out: bool, out_of_memory: bool, seconds: float, limits: Limits) -> str:
    """What a limit did, in words for whoever asked for the command."""
    if timed_out:
        return f"stopped after {seconds:g} s, with everything it had started"
    if out_of_memory:
        return f"stopped for using more than {limits.memory_mb} MiB of memory, with everything it had started"
    return ""
