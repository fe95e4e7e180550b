"""The checker's process: it judges one job after another, and is replaced after anything unusual.

Rule: no sample can change how a later one is judged. The process ends after a job that reached its
deadline, sent an invalid answer, ran out of memory, grew or left threads. It also ends after a test
that may have changed the interpreter. Programs' processes are not its children, so they inherit no
test. Called from `zygote`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import socket
import struct
import sys
from typing import Any, Final

from evaljobs.sandbox.rpc import checker, codec
from evaljobs.sandbox.rpc.frames import receive_exactly
from evaljobs.sandbox.rpc.link import Outcome

# Messages to the zygote: job read; verdict sent; verdict sent, and this process ends.
READ, DONE, WORN = b"r", b"d", b"w"
_LENGTH: Final = struct.Struct("!I")
_JOBS: Final = 200  # most jobs of one process
_GROWN_KIB: Final = 300 << 10
# A test with one of these texts may change the interpreter that runs it.
_TRACES: Final = (
    *("sys", "os.", "environ", "builtins", "setattr", "__", "signal", "thread", "gc.", "mock", "warnings"),
    *("open(", "decimal", "locale", "numpy", "import_module"),
)


class Judge:
    """The zygote's end: a checker's process and the socket to it."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control

    def give(self, length: int, channel: socket.socket, output: int) -> None:
        """Send a job of `length` bytes, its candidate's channel, and the output's read end."""
        socket.send_fds(
            self.control, [_LENGTH.pack(length)], [channel.fileno(), *([output] if output >= 0 else [])]
        )

    def receive(self) -> bytes:
        """The next message, one byte; empty if the process has ended."""
        try:
            return self.control.recv(1)
        except OSError:
            return b""

    def close(self) -> None:
        """Reap the process, which must have ended or been killed."""
        self.control.close()
        os.waitpid(self.pid, 0)


def serve(control: socket.socket, job: socket.socket, verdict: socket.socket) -> None:
    """Judge jobs until worn, or until the supervisor or zygote ends."""
    state = random.getstate()
    for left in range(_JOBS - 1, -1, -1):
        length, fds, _, _ = socket.recv_fds(control, _LENGTH.size, 2)
        body = receive_exactly(job, *_LENGTH.unpack(length)) if fds else None
        if body is None:
            return
        control.send(READ)
        outcome, worn = _judge(body, fds)
        del body
        random.setstate(state)
        verdict.send(json.dumps({"verdict": outcome[0], "reason": outcome[1][:400]}).encode())
        if worn or not left:
            control.send(WORN)
            return
        control.send(DONE)


def _judge(body: bytes, fds: list[int]) -> tuple[Outcome, bool]:
    """Verdict and reason, and whether this process is worn."""
    try:
        task: dict[str, Any] = json.loads(body)
        with socket.socket(fileno=fds[0]) as channel:
            outcome = checker.judge(task, channel, fds[1] if len(fds) > 1 else None)
    except MemoryError:
        return ("memory", "out of memory in the checker"), True
    except BaseException as error:  # noqa: BLE001  (its end is a verdict, whatever it is)
        return ("crash", f"the checker failed: {type(error).__name__}"), True
    finally:
        for fd in fds[1:]:
            os.close(fd)
        codec.forget()
    return outcome, outcome[0] not in ("pass", "fail") or _is_worn(task)


def _is_worn(task: dict[str, Any]) -> bool:
    text = task.get("test", "") + task.get("setup", "")
    if any(word in text for word in _TRACES):
        return True
    if len(sys._current_frames()) > 1 or sys.gettrace() is not None:  # noqa: SLF001  (importing threading costs each fork)
        return True
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _GROWN_KIB or bool(gc.garbage)
