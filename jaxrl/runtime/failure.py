"""How a run ends badly: the one error that began it, and what a command says about it.

Knows exceptions only. It must not know what was being run.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import trio
from chz.blueprint._entrypoint import EntrypointException, EntrypointHelpException


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken as Ctrl-C is: whoever catches that catches this too."""


def the_one(group: BaseExceptionGroup) -> BaseException:
    """The one error that ended a run, out of the nested groups that nurseries wrap it in.

    Ctrl-C reaches the main task at a checkpoint; with it, everything else is a consequence, and so is what was raised
    by something that was being cancelled. Of errors that are nobody's consequence, such as two members of a group that
    fail at once, it is the one whose task ended first. All others become notes of it, as do the notes of its groups.
    Those that say the same are one note with their number; where words of Python's do not say what to do, a last note
    does.
    """
    leaves = list({id(error): error for error in _leaves(group)}.values())  # several may have waited for one error
    interrupts = [error for error in leaves if isinstance(error, KeyboardInterrupt)]
    first = (interrupts or [error for error in leaves if not _while_cancelled(error)] or leaves)[0]
    alike: dict[str, list[BaseException]] = {}
    for error in leaves:
        if error is not first:
            alike.setdefault(_said(error, at_once=not (interrupts or _while_cancelled(error))), []).append(error)
    for said, errors in [*alike.items()][:_SHOWN]:
        first.add_note(_beside(said, errors))
    if hidden := sum(map(len, [*alike.values()][_SHOWN:])):
        first.add_note(f"and {hidden} more errors")
    for words in [words for words in _ADVICE if words in str(first)]:
        first.add_note(_ADVICE[words])
    return first


_ADVICE = {
    "no running event loop": "what awaits asyncio runs in an environment that asyncio_envs(factory) makes "
    "(jaxrl.runtime.asyncio_bridge), or awaits trio or anyio instead"
}
"""What an error says -> what to do."""

_SHOWN = 8  # of the errors beside the one; those that say the same are one


def _said(error: BaseException, *, at_once: bool) -> str:
    when = "at the same time" if at_once else "afterwards, while everything was closed"
    return f"{when}: {error!r}"


def _beside(said: str, errors: Sequence[BaseException]) -> str:
    """What a note says of errors beside the one, with the first line of each note of the first of them."""
    where = "; ".join(note.partition("\n")[0] for note in getattr(errors[0], "__notes__", ()))
    if len(errors) == 1:
        return said + (f" ({where})" if where else "")
    return f"{said}, {len(errors)} times" + (f" (first {where})" if where else "")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        for note in getattr(error, "__notes__", ()):
            inner.add_note(note)
        yield from _leaves(inner)


def _while_cancelled(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, trio.Cancelled):
        error = error.__context__
    return error is not None


@contextmanager
def one_line_errors(*, interrupted: Callable[[], str] = lambda: "interrupted") -> Iterator[None]:
    """For commands: mistakes of the user, Ctrl-C and SIGTERM end in one line, not in a traceback.

    interrupted: gives that line after Ctrl-C or SIGTERM. The exit codes are 2, 130 and 143.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        print(interrupted(), file=sys.stderr)
        sys.exit(exit_code(interrupt))
    except EntrypointHelpException as text:
        print(text)
        sys.exit(0)
    except (EntrypointException, ValueError, FileNotFoundError) as error:
        if getattr(error, "__notes__", None):
            raise  # it comes from inside an episode: whoever wrote the env needs the traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """What a command that was interrupted returns, as shells count: 128 and the number of the signal."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)
