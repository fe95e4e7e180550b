# ruff: noqa: PTH123, PTH208
# pathlib, and what it imports, would enlarge every fork.
"""The warm process of a lane: it forks a process per program, keeps the deadline, and reaps.

Rule: this process reads a job's header, never a program or a test; the program's process reads the
rest from the same socket. So no later program can find an earlier test in inherited memory. Started
by `launch`.

A job is HEADER, then the body, JSON for `execute.judge_program`. Each answer is a line of JSON: {"ready"}
or {"error"} once, then {"verdict", "reason", "seconds"} per job, once its process is reaped.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Final

from evaljobs.sandbox.isolation import execute, kernel

HEADER: Final = struct.Struct("!III?")  # bytes of the body, timeout in ms, address space in MiB, numpy
FILE_BYTES: Final = 16 << 20
SCRATCH_OPTIONS: Final = "size=64m,nr_inodes=4096,mode=700"
_READY: Final = b"r"  # the program's process is isolated and has read its job: the clock starts
_ANSWER_FD: Final = 3
_THREADS: Final = 64
_GRACE_STEP: Final = 0.05  # seconds; less starvation adds no time to a job
_PRELOADED: Final = [
    "bisect",
    "collections",
    "collections.abc",
    "copy",
    "datetime",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "re",
    "string",
    "typing",
]
# Bound before a program can replace them.
_write: Final = os.write
_leave: Final = os._exit


def preload_modules() -> None:
    """Import what most programs import, once for all of them."""
    for name in _PRELOADED:
        __import__(name)
    for name in ("exit", "quit"):  # as the site module, which is not loaded, would set them
        setattr(builtins, name, sys.exit)


class Zygote:
    """Serves one lane. Made after the process is isolated."""

    def __init__(self, *, level: str, job: socket.socket, readable: list[str]) -> None:
        self._job = job
        self._private = level == "namespaces"
        self._ruleset = kernel.landlock_ruleset(readable, ["/dev/null"]) if level == "landlock" else None
        if self._private:
            _mount_scratch()
        kernel.seccomp_program()  # built once, for all forks
        # RLIMIT_NPROC counts all processes of a user; without a user namespace it can only bound
        # their growth.
        alive = sum(name.isdigit() for name in os.listdir("/proc"))
        self._processes = _THREADS if self._private else 4096 + alive
        # Limits that fit the zygote too are set once, and inherited.
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
            _limit(kind, 0)
        _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
        _limit(resource.RLIMIT_NOFILE, 64)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Run jobs until the supervisor closes its socket, then end this process."""
        while (head := receive_exactly(self._job, HEADER.size)) is not None:
            length, timeout_ms, memory_mib, numpy = HEADER.unpack(head)
            if numpy:
                with contextlib.suppress(ImportError):
                    __import__("numpy")
            verdict, reason, seconds = self._run(length, timeout_ms / 1000, memory_mib << 20)
            answer = {"verdict": verdict, "reason": reason, "seconds": round(seconds, 6)}
            self._job.sendall(json.dumps(answer).encode() + b"\n")
        os._exit(0)

    def _run(self, length: int, timeout: float, memory: int) -> tuple[str, str, float]:
        token = os.urandom(16)
        answer, theirs = os.pipe()
        program = os.fork()
        if program == 0:
            self._become_program(theirs, length, timeout, memory, token)
        os.close(theirs)
        if os.read(answer, 1) != _READY:
            os._exit(3)  # the job socket is out of step: the supervisor starts another lane
        start = time.monotonic()
        message = self._wait(program, answer, timeout)
        os.close(answer)
        os.kill(program, signal.SIGKILL)  # one that has ended is a zombie until the next line
        _, status = os.waitpid(program, 0)
        if self._private:
            kernel.syscall("umount2", b"/tmp", kernel.MNT_DETACH)
            _mount_scratch()
        return *_conclude(message, token, status), time.monotonic() - start

    def _wait(self, program: int, answer: int, timeout: float) -> bytes | None:
        """Return the program's message, empty if its process has ended; None at the deadline.

        Time that the process was runnable without a core is added, up to once the timeout, so that a loaded node does not
        fail honest programs.
        """
        poller = select.poll()
        poller.register(answer, select.POLLIN)
        poller.register(self._job, select.POLLHUP)
        end, grace = time.monotonic() + timeout, 0.0
        while True:
            left = end + grace - time.monotonic()
            if left <= 0:
                starved = min(_starved(program), timeout)
                if starved - grace < _GRACE_STEP:
                    return None
                grace = starved
                continue
            events = dict(poller.poll(left * 1000 + 1))
            if self._job.fileno() in events:
                os._exit(0)  # the supervisor has ended; the kernel ends the rest
            if answer in events:
                return os.read(answer, 4096)  # a pipe holds a message of this length whole

    # --- the child

    def _become_program(self, answer: int, length: int, timeout: float, memory: int, token: bytes) -> None:
        try:
            source = json.loads(receive_exactly(self._job, length) or b"")
            self._shut_in(answer, timeout, memory)
            _write(_ANSWER_FD, _READY)
            _write(_ANSWER_FD, execute.judge_program(source, token))
        finally:
            _leave(0)

    def _shut_in(self, answer: int, timeout: float, memory: int) -> None:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._private:
            os.chdir("/tmp")
            kernel.drop_capabilities()
        if self._ruleset is not None:  # a domain of its own: it cannot trace or signal the zygote
            kernel.syscall("landlock_restrict_self", self._ruleset, 0)
        os.dup2(answer, _ANSWER_FD)
        os.closerange(_ANSWER_FD + 1, 256)
        random.seed(0)  # a fork seeds anew; a program that draws numbers gets the same verdict each time
        _limit(resource.RLIMIT_AS, memory)
        _limit(resource.RLIMIT_CPU, int(timeout * 2) + 1)
        _limit(resource.RLIMIT_NPROC, self._processes)
        gc.enable()
        kernel.install_seccomp()


def _conclude(message: bytes | None, token: bytes, status: int) -> tuple[str, str]:
    """Return verdict and reason: only the token is a pass."""
    if message is None:
        return "timeout", "the time limit was reached"
    if message == token:
        return "pass", ""
    if message:
        kind = "memory" if message.startswith(execute.MEMORY) else "fail"
        text = message[1:].decode(errors="replace")
        return kind, text[: execute.MOST_REASON]  # the program may have written it
    if os.WIFSIGNALED(status):
        return "crash", f"killed by signal {os.WTERMSIG(status)}"
    return "crash", f"the program ended its process (status {os.WEXITSTATUS(status)})"


def _mount_scratch() -> None:
    """Mount the program's own folder for files."""
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, SCRATCH_OPTIONS)


def receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    """Return the next `size` bytes, or None if the stream ends before."""
    parts = bytearray()
    while len(parts) < size:
        chunk = sock.recv(min(size - len(parts), 1 << 20))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)


def read_text(path: str) -> str:
    """Read a small file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _starved(pid: int) -> float:
    """Return the seconds that a process has waited for a core (/proc/PID/schedstat, field 2)."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(read_text(f"/proc/{pid}/schedstat").split()[1]) / 1e9
    return 0.0


def _limit(kind: int, value: int) -> None:
    """Lower a limit permanently; a lower one is kept."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
