# ruff: noqa: PTH123, PTH208
# pathlib, and what it imports, would enlarge every fork.
"""The warm process of a lane: it forks a process per job, keeps the deadline, and reaps.

Rule: this process reads a job's header, never a program or a test; the checker's process reads the
rest from the same socket. So no later program can find an earlier test in inherited memory. Started
by `launch`.

A job on the stream socket is HEADER, then the body, JSON for the checker. Each message on the
verdict socket is one JSON object: {"ready"} or {"error"} once, then two per job: the checker's
{"verdict", "reason"}, unless it was killed, and the zygote's {"end", "timed_out", "seconds",
"status"} once the program's process is reaped.
"""

from __future__ import annotations

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
import time
from typing import Any, Final

from evaljobs.sandbox.isolation import kernel
from evaljobs.sandbox.rpc import candidate, checker
from evaljobs.sandbox.rpc.frames import receive_exactly

HEADER: Final = struct.Struct("!IIII")  # bytes of the body, timeout in ms, address space in MiB, flags
STDIO: Final = 1  # flag: the program reads standard input and its output is compared
NUMPY: Final = 2  # flag: load numpy in the zygote, so that each fork has it
SETUP_FAILED: Final = 97  # exit status of a candidate that could not be isolated
FILE_BYTES: Final = 16 << 20
SCRATCH: Final = "size=64m,nr_inodes=4096,mode=700"
CHECKER_MEMORY: Final = 2 << 30
_INNER_ID: Final = 65534
_THREADS: Final = 64
_GRACE_STEP: Final = 0.05  # seconds; less starvation adds no time to a job
_NAMESPACES: Final = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
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


def preload() -> None:
    """Import what most programs import, once for all of them."""
    for name in _PRELOADED:
        __import__(name)
    random.seed(0)  # a program that draws numbers gets the same verdict each time


class Zygote:
    """Serves one lane. Made after the process is isolated."""

    def __init__(
        self, *, level: str, job: socket.socket, verdict: socket.socket, readable: list[str]
    ) -> None:
        self._level = level
        self._job = job
        self._verdict = verdict
        self._judge: tuple[int, socket.socket] | None = None  # the checker's process, the socket to it
        self._private = level == "namespaces"
        self._ruleset = kernel.landlock_ruleset(readable, ["/dev/null"]) if level == "landlock" else None
        self._filter = kernel.seccomp_program(pid=1, metadata=True) if self._private else None
        # RLIMIT_NPROC counts all processes of a user; without a user namespace it can only bound
        # their growth.
        alive = sum(name.isdigit() for name in os.listdir("/proc"))
        self._processes = _THREADS if self._private else 4096 + alive
        # Limits that fit the zygote and the checker too are set once, and inherited.
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
            length, timeout_ms, memory_mib, flags = HEADER.unpack(head)
            if flags & NUMPY:
                with contextlib.suppress(ImportError):
                    __import__("numpy")
            self._run(length, timeout_ms / 1000, memory_mib << 20, flags)
        os._exit(0)

    def _run(self, length: int, timeout: float, memory: int, flags: int) -> None:
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe() if flags & STDIO else (-1, -1)
        subject = kernel.clone(_NAMESPACES) if self._private else os.fork()
        if subject == 0:
            self._become_candidate(theirs, output_write, timeout, memory)
        theirs.close()
        judge, control = self._judge = self._judge or self._new_judge()
        fds = [ours.fileno(), *([output_read] if output_read >= 0 else [])]
        socket.send_fds(control, [checker.LENGTH.pack(length)], fds)
        ours.close()
        for fd in (output_read, output_write):
            if fd >= 0:
                os.close(fd)
        end = self._watch(judge, control, subject, timeout)
        self._verdict.send(json.dumps(end).encode())

    def _watch(self, judge: int, control: socket.socket, subject: int, timeout: float) -> dict[str, Any]:
        """Wait for the checker's end or the deadline, then end and reap both.

        Time that the two were runnable without a core is added, up to once the timeout, so that a
        loaded node does not fail honest programs.
        """
        if _message(control) != checker.READ:  # the checker has read its job: the clock starts
            os._exit(3)  # the job socket is out of step: the supervisor starts another lane
        start = time.monotonic()
        poller = select.poll()
        poller.register(control, select.POLLIN)
        poller.register(self._job, select.POLLHUP)
        timed_out, grace = True, 0.0
        while True:
            left = start + timeout + grace - time.monotonic()
            if left <= 0:
                starved = min(_starved(judge, subject), timeout)
                if starved - grace < _GRACE_STEP:
                    break
                grace = starved
                continue
            events = dict(poller.poll(left * 1000 + 1))
            if self._job.fileno() in events:
                os._exit(0)  # the supervisor has ended; the kernel ends the rest
            if control.fileno() in events:
                timed_out = False
                break
        early, status = os.waitpid(subject, os.WNOHANG)
        if not early:
            os.kill(subject, signal.SIGKILL)
            os.waitpid(subject, 0)
        if timed_out:
            os.kill(judge, signal.SIGKILL)
        if timed_out or _message(control) != checker.DONE:
            control.close()
            os.waitpid(judge, 0)
            self._judge = None
        seconds = time.monotonic() - start
        return {
            "end": 1,
            "timed_out": timed_out,
            "seconds": round(seconds, 6),
            "status": status if early else None,
        }

    # --- the two children

    def _new_judge(self) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            return pid, ours
        try:
            ours.close()
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            _limit(resource.RLIMIT_AS, CHECKER_MEMORY)
            gc.enable()
            self._enter_landlock()
            self._install_filter()
            checker.serve(theirs, self._job, self._verdict)
        finally:
            os._exit(0)

    def _become_candidate(self, channel: socket.socket, output: int, timeout: float, memory: int) -> None:
        try:
            self._shut_in_candidate(channel, output, timeout, memory)
        except BaseException:  # noqa: BLE001  (half a box must not run anything)
            os._exit(SETUP_FAILED)
        try:
            candidate.Agent(socket.socket(fileno=candidate.CHANNEL_FD)).serve()
        finally:
            os._exit(0)

    def _shut_in_candidate(self, channel: socket.socket, output: int, timeout: float, memory: int) -> None:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # its own /proc files must be writable for a moment
        if self._private:
            kernel.map_ids(_INNER_ID, _INNER_ID, _INNER_ID)
        with contextlib.suppress(OSError):
            kernel.write_proc("/proc/self/oom_score_adj", "1000")
        if self._private:
            flags = kernel.MS_NOSUID | kernel.MS_NODEV
            kernel.mount("tmpfs", "/tmp", "tmpfs", flags, SCRATCH)
            kernel.mount_proc()
            os.chdir("/tmp")
        else:
            os.setsid()
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        self._enter_landlock()  # before its descriptor is overwritten
        if output >= 0:
            os.dup2(os.memfd_create("stdin"), 0)
            os.dup2(output, 1)
        os.dup2(channel.fileno(), candidate.CHANNEL_FD)
        channel.detach()
        os.closerange(candidate.CHANNEL_FD + 1, 256)
        _limit(resource.RLIMIT_AS, memory)
        _limit(resource.RLIMIT_CPU, int(timeout * 2) + 1)
        _limit(resource.RLIMIT_NPROC, self._processes)
        gc.enable()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        if self._private:
            kernel.drop_capabilities()
        self._install_filter()

    def _enter_landlock(self) -> None:
        if self._ruleset is not None:  # it cannot trace or signal siblings and parent
            kernel.call("landlock_restrict_self", self._ruleset, 0)
            os.close(self._ruleset)

    def _install_filter(self) -> None:
        """Install the system call filter: this process may signal itself alone, and start no other."""
        pid = os.getpid()
        program = self._filter if pid == 1 else None
        kernel.install_seccomp(program or kernel.seccomp_program(pid=pid, metadata=self._private))


def read_text(path: str) -> str:
    """A small file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _message(control: socket.socket) -> bytes:
    """The checker's next message, one byte; empty if its process has ended."""
    try:
        return control.recv(1)
    except OSError:
        return b""


def _starved(*pids: int) -> float:
    """Longest wait of these processes for a core, in seconds (/proc/PID/schedstat, field 2)."""
    waits = [0.0]
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            waits.append(int(read_text(f"/proc/{pid}/schedstat").split()[1]) / 1e9)
    return max(waits)


def _limit(kind: int, value: int) -> None:
    """Lower a limit for good; a lower one stays."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
