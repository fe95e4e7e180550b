"""One lane: an isolated process that runs one job at a time, fed over two sockets.

Rule: what a lane sends is parsed as data and bounded. A lane that breaks the protocol, dies or
overruns is ended and reported, never waited for. Called from `run`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from evaljobs.sandbox.isolation.zygote import HEADER, NUMPY, SETUP_FAILED, STDIO
from evaljobs.sandbox.records import VERDICTS, Job, Level, SandboxUnavailableError

_START_SECONDS: Final = 60.0  # most seconds to start: a cold interpreter on slow storage
_GRACE_SECONDS: Final = 20.0  # seconds added to a job's own limit, for a loaded node
_SEND_SECONDS: Final = 20.0
_MESSAGE: Final = 1 << 16
_LAUNCH: Final = Path(__file__).with_name("launch.py")
ENVIRONMENT: Final[Mapping[str, str]] = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same order of sets, and so the same verdict, each time
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class LaneDeadError(Exception):
    """The lane has ended; its job has no verdict."""


@functools.cache
def _numpy() -> dict[str, Any] | None:
    """Location of numpy, found without importing it; None if it is not installed."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("numpy")
        if spec and spec.origin:
            folder = Path(spec.origin).parent
            libraries = folder.with_name("numpy.libs")
            return {
                "init": spec.origin,
                "paths": [str(folder), *([str(libraries)] if libraries.exists() else [])],
            }
    return None


class Lane:
    """A running lane. Not thread-safe; its user multiplexes with `fileno()`."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._job, job = socket.socketpair()
        self._verdict, verdict = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "level": level.value,
            "job_fd": job.fileno(),
            "verdict_fd": verdict.fileno(),
            "numpy": _numpy(),
        }
        # The interpreter itself, not a virtual environment's link to it: a lane has no site packages.
        interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        flags = ["-S", "-s", "-P", "-X", "utf8"]
        try:
            self._process = subprocess.Popen(
                [interpreter, *flags, str(_LAUNCH), json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=dict(ENVIRONMENT),
                cwd="/",
                pass_fds=(job.fileno(), verdict.fileno()),
                start_new_session=True,
            )
        finally:
            job.close()
            verdict.close()
        self._job.settimeout(_SEND_SECONDS)
        self._verdict.setblocking(False)
        self._checker: dict[str, Any] | None = None
        self.ready = False
        self.deadline = time.monotonic() + _START_SECONDS

    def fileno(self) -> int:
        """Readable when the lane has sent a message or has ended."""
        return self._verdict.fileno()

    def send(self, job: Job) -> None:
        """Send the next job; LaneDeadError if the lane does not take it."""
        flags = (STDIO if job.stdio else 0) | (NUMPY if job.numpy else 0)
        head = HEADER.pack(len(job.body), round(job.timeout_seconds * 1000), job.memory_mib, flags)
        self._checker = None
        self.deadline = time.monotonic() + job.timeout_seconds + _GRACE_SECONDS
        try:
            self._job.sendall(head + job.body)
        except OSError as error:
            raise LaneDeadError(f"the lane took no job: {error}") from None

    def receive(self) -> tuple[str, str, float] | None:
        """Verdict, reason and seconds once the job's processes are reaped; None if more is to come.

        SandboxUnavailableError without isolation; LaneDeadError if the lane has ended.
        """
        try:
            data = self._verdict.recv(_MESSAGE)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        try:
            message = json.loads(data) if data else None
        except ValueError:
            message = None
        if not isinstance(message, dict):
            if not self.ready:
                raise SandboxUnavailableError(f"the sandbox did not start: {self._last_words()}")
            raise LaneDeadError("the lane ended")
        if "error" in message:
            raise SandboxUnavailableError(str(message["error"]))
        if "ready" in message:
            self.ready = True
            return None
        if "end" not in message:
            self._checker = message
            return None
        return _conclude(self._checker, message)

    def _last_words(self) -> str:
        stream = self._process.stderr
        if stream is None or not select.select([stream], [], [], 0.5)[0]:
            return "no reason given"
        text = os.read(stream.fileno(), 4096).decode(errors="replace").strip()
        return text.splitlines()[-1][:300] if text else "no reason given"

    def close(self) -> None:
        """End the lane and all that runs in it, and wait for it."""
        self._job.close()  # an idle zygote ends by itself
        self._verdict.close()
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stderr:
            self._process.stderr.close()


def _conclude(checked: dict[str, Any] | None, end: dict[str, Any]) -> tuple[str, str, float]:
    """Verdict, reason and seconds from the checker's message and the job's end."""
    seconds = float(end["seconds"])
    if end["timed_out"]:
        return "timeout", "the time limit was reached", seconds
    if checked is None or checked.get("verdict") not in VERDICTS:
        return "crash", "the checker died", seconds
    verdict, reason, status = checked["verdict"], str(checked.get("reason", "")), end["status"]
    if verdict == "crash" and isinstance(status, int):
        if os.WIFSIGNALED(status):
            reason = f"killed by signal {os.WTERMSIG(status)}"
        elif os.WEXITSTATUS(status) == SETUP_FAILED:
            reason = "its process could not be shut in"
        else:
            reason = f"the program ended its process (status {os.WEXITSTATUS(status)})"
    return verdict, reason, seconds
