"""Entry point `evalspan`; `python -m coordinator` does the same where no script of it is on the path.

Rule: the commands are imported inside `main`, so that Ctrl-C during their imports is one line, too.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
from types import FrameType

from coordinator.errors import ExitCode

AGAIN_SECONDS = 0.01  # until an interrupt that was swallowed is raised again


def main() -> None:
    """Run the command line. The first Ctrl-C that no command handles is one line, a second ends at once."""
    interrupted = False
    output = _output()

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, note)
        signal.signal(signal.SIGALRM, note)
        sys.unraisablehook = _again
    # Imports make a million objects that stay. With Python's own threshold, passes over them and pydantic's search for
    # plugins take a tenth of the CPU time of `evalspan status`.
    gc.set_threshold(100_000)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from coordinator.cli import main as command_line  # noqa: PLC0415 (a tenth of a second)

        command_line()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except SystemExit as end:  # typer and rich exit with 1 where the reader is gone, which means failed tasks
        if end.code == ExitCode.FAILED and output is not None and _reader_is_gone(output):
            sys.exit(ExitCode.READER_GONE)
        raise
    finally:
        if interrupted:
            sys.stderr.write("evalspan: interrupted\n")


def _output() -> int | None:
    """Standard output, to be asked after rich has put /dev/null in its place; None where there is none."""
    try:
        return os.dup(1)
    except OSError:
        return None


def _reader_is_gone(output: int) -> bool:
    """Has the reader of this pipe ended, as of `evalspan ls | head`? False for a file or a terminal."""
    poll = select.poll()
    poll.register(output, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _again(swallowed: sys.UnraisableHookArgs) -> None:
    """Raise an interrupt again that met a callback of the interpreter, which no exception leaves (imports have them)."""
    if swallowed.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(swallowed)


if __name__ == "__main__":
    main()
