"""Entry point `evalspan`; `python -m coordinator` does the same if no such script is on the path.

Rule: the commands are imported inside `main`, so that Ctrl-C during their imports also prints only one line.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
from types import FrameType

from coordinator.errors import ExitCode

AGAIN_SECONDS = 0.01  # until a swallowed interrupt is raised again


def main() -> None:
    """Run the command line. The first Ctrl-C that no command handles prints one line, a second one ends the process at once."""
    interrupted = False
    output = _output()

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless a shell ignores it
        signal.signal(signal.SIGINT, note)
        signal.signal(signal.SIGALRM, note)
        sys.unraisablehook = _again
    # Imports create a million lasting objects. With Python's default threshold, scanning them and pydantic's search for
    # plugins take a tenth of the CPU time of `evalspan status`.
    gc.set_threshold(100_000)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from coordinator.interface.cli import main as command_line  # noqa: PLC0415 (a tenth of a second)

        command_line()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    # typer and rich exit with 1 if the reader is gone, which would mean failed tasks
    except SystemExit as end:
        if end.code == ExitCode.FAILED and output is not None and _reader_is_gone(output):
            sys.exit(ExitCode.READER_GONE)
        raise
    finally:
        if interrupted:
            sys.stderr.write("evalspan: interrupted\n")


def _output() -> int | None:
    """Return standard output, to be called after rich has replaced it by /dev/null; None if there is none."""
    try:
        return os.dup(1)
    except OSError:
        return None


def _reader_is_gone(output: int) -> bool:
    """Return whether the reader of this pipe has ended, as in `evalspan ls | head`. False for a file or a terminal."""
    poll = select.poll()
    poll.register(output, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _again(swallowed: sys.UnraisableHookArgs) -> None:
    """Raise an interrupt again that hit a callback of the interpreter, where exceptions cannot propagate (as in imports)."""
    if swallowed.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(swallowed)


if __name__ == "__main__":
    main()
