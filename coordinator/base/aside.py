"""A Python module that runs as a process beside the daemon's loop, one at a time, with a job on its standard input.

Rule: the loop never waits for it, and nothing that it does can harm the loop. Its output is appended to a log file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from evaljobs.contract.storage import file_mode, make_folder

STOP_SECONDS = 5.0  # longest wait for its end
MOST_LOG_BYTES = 1 << 20  # a log that has grown beyond this size is begun anew


class Aside:
    """Starts `module` and tells how it ended."""

    def __init__(self, module: str, log: Path) -> None:
        self.log = log
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Was one begun whose end `ended` has not told yet?"""
        return self._process is not None

    def begin(self, job: bytes) -> None:
        """Start the process. OSError: no memory, no process, a full disk."""
        make_folder(self.log.parent)
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > MOST_LOG_BYTES:
                self.log.unlink()
        mode = file_mode(self.log.parent)
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode), "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,  # keeps Ctrl-C at the daemon from ending it
            )
        if self._process.stdin is not None:
            with self._process.stdin as pipe:
                pipe.write(job)

    def ended(self) -> int | None:
        """The exit status of a process that has ended, once; None where none has."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._process = None
        return code

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for its end; it goes on after that."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def stop(self) -> None:
        """End it now; one that hangs in a call of the system is left."""
        if self._process is not None:
            self._process.terminate()
            self.wait(STOP_SECONDS)
            self._process = None
