"""The warm process of a lane: for each job it forks a candidate and a checker, keeps the deadline, and reaps.

Rule: this process never reads a program or a test. It reads the header of a job; the checker it has forked reads the
rest from the same socket. So no later candidate can find an earlier test in memory that it inherited. The end of a job
is told only when the candidate and all that it left behind are reaped.
It does not know: what a verdict is.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from evaljobs.sandbox.box import candidate, checker, kernel
from evaljobs.sandbox.box.protocol import HEADER, NUMPY, SETUP_FAILED, STDIO

FILE_BYTES: Final = 16 << 20
SCRATCH: Final = "size=64m,nr_inodes=4096,mode=700"
CHECKER_MEMORY: Final = 4 << 30
_INNER_ID: Final = 65534
_THREADS: Final = 64
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


class Zygote:
    """Serves one lane. Made after the process is in its box."""

    def __init__(
        self, *, level: str, job: socket.socket, verdict: socket.socket, readable: list[str]
    ) -> None:
        self._level = level
        self._job = job
        self._verdict = verdict
        self._cloner = kernel.Cloner() if level == "namespaces" else None
        self._ruleset = kernel.landlock_ruleset(readable, ["/dev/null"]) if level == "landlock" else None
        self._filter = kernel.seccomp_program(pid=1, metadata=True) if level == "namespaces" else None
        # RLIMIT_NPROC counts all processes of a user; outside a user namespace of its own it can only bound their growth.
        self._processes = _THREADS if level == "namespaces" else 4096 + _tasks_alive()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        if level == "rlimits":
            kernel.become_subreaper()
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Run jobs until the supervisor hangs up."""
        while True:
            head = b""
            while len(head) < HEADER.size:
                part = self._job.recv(HEADER.size - len(head))
                if not part:
                    os._exit(0)
                head += part
            length, timeout_ms, memory_mib, flags = HEADER.unpack(head)
            if flags & NUMPY:
                with contextlib.suppress(ImportError):
                    __import__("numpy")
            self._run(length, timeout_ms / 1000, memory_mib << 20, flags)

    def _run(self, length: int, timeout: float, memory: int, flags: int) -> None:
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe() if flags & STDIO else (-1, -1)
        done_read, done_write = os.pipe()
        scratch = tempfile.mkdtemp(prefix="evalspan-") if self._level == "rlimits" else "/tmp"
        subject = self._cloner.clone(_NAMESPACES) if self._cloner else os.fork()
        if subject == 0:
            self._become_candidate(theirs, output_write, timeout, memory, scratch)
        theirs.close()
        if output_write >= 0:
            os.close(output_write)
        judge = os.fork()
        if judge == 0:
            os.close(done_read)
            self._become_checker(length, ours, output_read, done_write, timeout)
        ours.close()
        os.close(done_write)
        if output_read >= 0:
            os.close(output_read)
        try:
            end = self._watch(done_read, judge, subject, timeout)
        finally:
            os.close(done_read)
        if self._level == "rlimits":
            _end_descendants()
            _remove(scratch)
        self._verdict.send(json.dumps(end).encode())

    def _watch(self, done: int, judge: int, subject: int, timeout: float) -> dict[str, Any]:
        """Wait for the checker's end or the deadline, then end and reap both."""
        if os.read(done, 1) != b"r":  # the checker has read its job: the clock starts
            os._exit(3)  # the job socket is out of step; the supervisor starts another lane
        start = time.monotonic()
        poller = select.poll()
        poller.register(done, select.POLLIN)
        poller.register(self._job, select.POLLHUP)
        timed_out = True
        while (left := start + timeout - time.monotonic()) > 0:
            events = dict(poller.poll(left * 1000 + 1))
            if self._job.fileno() in events:
                os._exit(0)  # the supervisor is gone; the namespace, or the kernel's signal, ends the rest
            if done in events:
                timed_out = False
                break
        early, status = os.waitpid(subject, os.WNOHANG)
        if not early:
            os.kill(subject, signal.SIGKILL)
            os.waitpid(subject, 0)
        if timed_out:
            os.kill(judge, signal.SIGKILL)
        os.waitpid(judge, 0)
        seconds = time.monotonic() - start
        return {
            "end": 1,
            "timed_out": timed_out,
            "seconds": round(seconds, 6),
            "status": status if early else None,
        }

    # --- the two children

    def _become_checker(
        self, length: int, channel: socket.socket, output: int, done: int, timeout: float
    ) -> None:
        outcome = ("crash", "the checker failed")
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            _limit(resource.RLIMIT_AS, CHECKER_MEMORY)
            _limit(resource.RLIMIT_CPU, int(timeout) + 5)
            _limit(resource.RLIMIT_CORE, 0)
            _limit(resource.RLIMIT_NOFILE, 64)
            gc.enable()
            self._enter_landlock()
            self._install_filter()
            body = bytearray()
            while len(body) < length:
                part = self._job.recv(length - len(body))
                if not part:
                    os._exit(0)
                body += part
            os.write(done, b"r")
            job = json.loads(body)
            del body
            outcome = checker.judge(job, channel, output)
        except MemoryError:
            outcome = ("memory", "out of memory in the checker")
        except BaseException as error:  # noqa: BLE001  (its end is a verdict, whatever it is)
            outcome = ("crash", f"the checker failed: {type(error).__name__}")
        finally:
            message = json.dumps({"verdict": outcome[0], "reason": outcome[1][:400]})
            self._verdict.send(message.encode())
            os._exit(0)

    def _become_candidate(
        self, channel: socket.socket, output: int, timeout: float, memory: int, scratch: str
    ) -> None:
        try:
            self._shut_in_candidate(channel, output, timeout, memory, scratch)
        except BaseException:  # noqa: BLE001  (half a box must not run anything)
            os._exit(SETUP_FAILED)
        try:
            candidate.Agent(socket.socket(fileno=candidate.CHANNEL_FD)).serve()
        finally:
            os._exit(0)

    def _shut_in_candidate(
        self, channel: socket.socket, output: int, timeout: float, memory: int, scratch: str
    ) -> None:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # its own /proc files must be writable for a moment
        if self._cloner:
            kernel.map_ids(_INNER_ID, _INNER_ID, _INNER_ID)
        with contextlib.suppress(OSError):
            kernel.write_proc("/proc/self/oom_score_adj", "1000")
        if self._cloner:
            flags = kernel.MS_NOSUID | kernel.MS_NODEV
            kernel.mount("tmpfs", "/tmp", "tmpfs", flags, SCRATCH)
            kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
        else:
            os.setsid()
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir("/" if self._level == "landlock" else scratch)
        self._enter_landlock()  # before its descriptor is overwritten
        if output >= 0:
            os.dup2(os.memfd_create("stdin"), 0)
            os.dup2(output, 1)
        os.dup2(channel.fileno(), candidate.CHANNEL_FD)
        channel.detach()
        kernel.close_from(candidate.CHANNEL_FD + 1)
        _limit(resource.RLIMIT_AS, memory)
        _limit(resource.RLIMIT_CPU, int(timeout * 2) + 1)
        _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
        _limit(resource.RLIMIT_NOFILE, 64)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_NPROC, self._processes)
        _limit(resource.RLIMIT_MEMLOCK, 0)
        _limit(resource.RLIMIT_MSGQUEUE, 0)
        random.seed()
        gc.enable()
        if self._cloner:
            kernel.drop_capabilities()
        self._install_filter()

    def _enter_landlock(self) -> None:
        if (
            self._ruleset is not None
        ):  # a domain of its own: it can neither trace nor signal its siblings and parent
            kernel.landlock_restrict(self._ruleset)
            os.close(self._ruleset)

    def _install_filter(self) -> None:
        """The system call filter; this process may signal itself alone. A candidate is process 1 of its namespace."""
        if self._level == "rlimits":
            return
        pid = os.getpid()
        program = self._filter if pid == 1 else None
        kernel.install_seccomp(
            program or kernel.seccomp_program(pid=pid, metadata=self._level == "namespaces")
        )


def _limit(kind: int, value: int) -> None:
    """Lower a limit for good; a lower one that is there already stays."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


# --- the rlimits level, which has no namespace that ends with its first process -----------------------------------------


def _tasks_alive() -> int:
    """Processes that this process can see."""
    return sum(entry.name.isdigit() for entry in Path("/proc").iterdir())


def _children() -> list[int]:
    me = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == me:
                    found.append(int(entry.name))
    return found


def _end_descendants() -> None:
    """Kill and reap what a candidate left. Orphans become ours (a subreaper), so repeating finds grandchildren."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _remove(folder: str) -> None:
    """Remove a scratch folder whose program may have taken its permissions away."""
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)  # noqa: PTH101  (a name may be no valid text)
    shutil.rmtree(folder, ignore_errors=True)
