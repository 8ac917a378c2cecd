"""How a run ends badly: the one error that began it, and what a command says about it.

Knows exceptions only. It must not know what was being run.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from chz.blueprint._entrypoint import EntrypointException, EntrypointHelpException


def the_one(group: BaseExceptionGroup) -> BaseException | None:
    """The one error that ended a run, out of the nested groups that nurseries wrap it in; None when it takes several.

    Ctrl-C reaches the main task at a checkpoint; with it, everything else is a consequence, and so is what was raised
    by something that was being cancelled. Consequences become notes of the error, as do the notes of its groups.
    """
    leaves = list(_leaves(group))
    interrupts = [error for error in leaves if isinstance(error, KeyboardInterrupt)]
    causes = interrupts or [error for error in leaves if not _while_cancelled(error)] or leaves
    if not interrupts and len(causes) > 1:
        return None
    for error in leaves:
        if error is not causes[0]:
            causes[0].add_note(f"afterwards, while everything was closed: {error!r}")
    return causes[0]


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
def one_line_errors() -> Iterator[None]:
    """For commands: mistakes of the user and Ctrl-C end in one line (and exit codes 2, 130), not in a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint is whole: behavior_if_log_dir_exists=resume goes on", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except EntrypointHelpException as text:
        print(text)
        sys.exit(0)
    except (EntrypointException, ValueError, FileNotFoundError) as error:
        if getattr(error, "__notes__", None):
            raise  # it comes from inside an episode: whoever wrote the env needs the traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
