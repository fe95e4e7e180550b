"""One lane: an isolated process that runs one program at a time, fed over a socket.

Rule: output of a lane is parsed as data and bounded. A lane that violates the protocol, dies or overruns is killed and
reported, never waited for. Called from `run`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from evaljobs.sandbox.isolation.zygote import HEADER
from evaljobs.sandbox.records import VERDICTS, Job, Level, SandboxUnavailableError

_START_SECONDS: Final = 60.0  # longest start: a cold interpreter on slow storage
_GRACE_SECONDS: Final = 20.0  # added to twice a job's own limit, for a loaded node
_MOST_BYTES: Final = 1 << 16  # of an answer
_LAUNCH: Final = Path(__file__).with_name("launch.py")
ENVIRONMENT: Final[Mapping[str, str]] = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same order of sets, and so the same verdict, each time
    "MALLOC_ARENA_MAX": "1",  # each arena takes 64 MiB of a program's address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class LaneDeadError(Exception):
    """The lane has ended; its job has no verdict."""


class Lane:
    """A running lane. A thread may `close` it while another waits in `run`."""

    def __init__(self, level: Level) -> None:
        """Start the process and wait for it. Raise SandboxUnavailableError without isolation."""
        self._socket, theirs = socket.socketpair()
        packages = {os.path.realpath(p) for p in sys.path if p.endswith(("/site-packages", "/dist-packages"))}
        config = {"level": level.value, "fd": theirs.fileno(), "packages": sorted(packages)}
        # the interpreter itself with its own packages, not a virtual environment's link to it
        interpreter = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        flags = ["-S", "-s", "-P", "-X", "utf8"]
        with theirs:
            self._process = subprocess.Popen(
                [interpreter, *flags, str(_LAUNCH), json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(ENVIRONMENT),
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        try:
            started = self._answer(_START_SECONDS)
            reason = started.get("error")
        except LaneDeadError:
            reason = "the sandbox did not start: see what its interpreter wrote to this process's log"
        if reason:
            self.close()
            raise SandboxUnavailableError(str(reason))

    def run(self, job: Job) -> tuple[str, str, float]:
        """Return verdict, reason and seconds of a job, once its process is reaped. Raise LaneDeadError if the lane dies."""
        head = HEADER.pack(len(job.body), round(job.timeout_seconds * 1000), job.memory_mib, job.numpy)
        try:
            self._socket.sendall(head + job.body)
        except OSError as error:
            raise LaneDeadError(f"the lane did not accept the job: {error}") from None
        answer = self._answer(2 * job.timeout_seconds + _GRACE_SECONDS)
        if answer.get("verdict") not in VERDICTS:
            raise LaneDeadError("the lane gave no verdict")
        return answer["verdict"], str(answer["reason"]), float(answer["seconds"])

    def _answer(self, seconds: float) -> dict[str, Any]:
        line = b""
        with contextlib.suppress(OSError, ValueError):
            self._socket.settimeout(seconds)
            while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
                if not (chunk := self._socket.recv(_MOST_BYTES)):
                    break
                line += chunk
            if isinstance(answer := json.loads(line), dict):
                return answer
        raise LaneDeadError("the lane ended")

    def close(self) -> None:
        """Kill the lane and everything in it, and wait for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # an idle zygote exits by itself
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._socket.close()
