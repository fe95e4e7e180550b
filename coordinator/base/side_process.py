"""A Python module run as a process beside the daemon's loop, one at a time, with a job on its standard input.

Rule: the loop never waits for it, and nothing it does can harm the loop. Its output is appended to a log file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from evaljobs.contract.storage import make_file, make_folder

STOP_SECONDS = 5.0  # longest wait for its end
MOST_LOG_BYTES = 1 << 20  # a larger log is truncated at the next start


class SideProcess:
    """Starts `module` and tells how it ended."""

    def __init__(self, module: str, log: Path) -> None:
        self.log = log
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Return whether one was started whose end `ended` has not reported yet."""
        return self._process is not None

    def begin(self, job: bytes) -> None:
        """Start the process. Raise OSError: no memory, no process, a full disk."""
        make_folder(self.log.parent)
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > MOST_LOG_BYTES:
                self.log.unlink()
        with os.fdopen(make_file(self.log), "ab") as out:
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
        """Return the exit status of an ended process, once; otherwise None."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            self._process = None
        return code

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for its end; it keeps running after that."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def stop(self) -> None:
        """Kill it now; one that hangs in a system call is left."""
        if self._process is not None:
            self._process.terminate()
            self.wait(STOP_SECONDS)
            self._process = None
