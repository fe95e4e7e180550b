"""The process in which pyslurm runs, as its caller sees it: starts it, asks it, kills it where it is late.

Rule: a failed call gives ClusterError in one line and never an empty answer; the next call starts a
new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import IO, Any

from coordinator.cluster import ClusterError, RefusedError
from coordinator.cluster import slurm_parse as text
from coordinator.cluster.job_environment import client_environment
from coordinator.cluster.sbatch_text import SlurmOptions

START_SECONDS = 60.0  # longest import of pyslurm, from slow storage
REAP_SECONDS = 5.0  # for a killed process to be gone
READ_BYTES = 1 << 16
SERVER = ("-m", "coordinator.cluster.pyslurm_server")
USE_COMMANDS = 'use [cluster] api = "cli"'
INSTALL_HINT = (
    "install it with `pip install 'evalspan[slurm]'` on a machine with the headers and libslurmfull.so of Slurm 25.11 "
    f"(SLURM_INCLUDE_DIR, SLURM_LIB_DIR), or {USE_COMMANDS}"
)
# Slurm's words where library and controller do not understand each other, and where slurmctld ends.
OTHER_VERSION = ("incompatible versions", "protocol version", "zero bytes")


class PyslurmProcess:
    """One process, one call at a time; threads wait for one another."""

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None  # what the child writes to its standard error

    def start(self) -> str:
        """Start it; pyslurm's version. ClusterError: why pyslurm cannot be used here."""
        with self._lock:
            return self._start()

    def ask(self, call: str, *arguments: Any) -> Any:
        """The result of a call of `pyslurm_server`.

        RefusedError: pyslurm or Slurm refuses a submission for good. ClusterError: else, in one
        line.
        """
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()
            answer = self._exchange({"call": call, "arguments": arguments})
        if "ok" in answer:
            return answer["ok"]
        if "invalid" in answer:
            raise RefusedError(f"pyslurm cannot express this: {answer['invalid']}; {USE_COMMANDS}")
        words = answer["error"]
        if text.says(words, OTHER_VERSION):
            raise ClusterError(
                f"{words}: where squeue answers, pyslurm is of another version than this Slurm; {USE_COMMANDS}"
            )
        raise text.failure(words) if call == "submit" else ClusterError(words)

    def stop(self) -> None:
        """End it; the next call starts another."""
        with self._lock:
            self._kill()

    def _start(self) -> str:
        self._kill()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        argv = [*self._options.command_prefix, sys.executable, *SERVER]
        try:
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=client_environment(os.environ, self._options.env),
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"{argv[0]} cannot be run: {error.strerror}") from error
        weakref.finalize(self, _end, self._child)
        return str(self._read(START_SECONDS)["ok"])

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer's absence says why
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        return self._read(self._options.timeout_seconds)

    def _read(self, seconds: float) -> dict[str, Any]:
        """The next answer; where none comes in time the process is killed."""
        assert self._child is not None
        assert self._child.stdout is not None
        pipe, words, end = self._child.stdout.fileno(), b"", time.monotonic() + seconds
        more_came = select.poll()  # takes file descriptors beyond 1023, too
        more_came.register(pipe, select.POLLIN)
        while not words.endswith(b"\n"):
            if not more_came.poll(max(0.0, end - time.monotonic()) * 1000):
                self._kill()
                raise ClusterError(f"pyslurm gave no answer within {seconds:g} s; is slurmctld up?")
            more = os.read(pipe, READ_BYTES)
            if not more:
                raise ClusterError(self._last_words())
            words += more
        answer: dict[str, Any] = json.loads(words)
        return answer

    def _last_words(self) -> str:
        """Why the process ended, in one line."""
        assert self._child is not None
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        self._kill()
        last = lines[-1] if lines else f"it ended with exit status {self._child.returncode}"
        if "No module named 'pyslurm'" in last:
            return f"pyslurm is not installed: {INSTALL_HINT}"
        return f"pyslurm cannot be used here ({last}): {INSTALL_HINT}"

    def _kill(self) -> None:
        if self._child is not None:
            _end(self._child)
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process and those that it started, and reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=REAP_SECONDS)
