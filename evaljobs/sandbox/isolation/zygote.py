# ruff: noqa: PTH101, PTH123, PTH208
# pathlib, and what it imports, would enlarge every fork.
"""The warm process of a lane: it forks a process per job, keeps the deadline, and reaps.

Rule: this process reads a job's header, never a program or a test; the checker's process reads the
rest from the same socket. So no later program can find an earlier test in inherited memory. It
reports a job's end when the program's process and all descendants are reaped. Started by `launch`.
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
import time
from typing import Any, Final

from evaljobs.sandbox.isolation import kernel
from evaljobs.sandbox.isolation.protocol import HEADER, NUMPY, SETUP_FAILED, STDIO
from evaljobs.sandbox.rpc import candidate
from evaljobs.sandbox.rpc.judge import DONE, READ, Judge, serve

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
        self._judge: Judge | None = None
        self._cloner = kernel.Cloner() if level == "namespaces" else None
        self._ruleset = kernel.landlock_ruleset(readable, ["/dev/null"]) if level == "landlock" else None
        self._filter = kernel.seccomp_program(pid=1, metadata=True) if level == "namespaces" else None
        # RLIMIT_NPROC counts all processes of a user; without a user namespace it can only bound
        # their growth.
        self._processes = _THREADS if level == "namespaces" else 4096 + _tasks_alive()
        # Limits that fit the zygote and the checker too are set once, and inherited.
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
            _limit(kind, 0)
        _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
        _limit(resource.RLIMIT_NOFILE, 64)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        if level == "rlimits":
            kernel.become_subreaper()
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Run jobs until the supervisor closes its socket."""
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
        scratch = _make_scratch() if self._level == "rlimits" else "/tmp"
        subject = self._cloner.clone(_NAMESPACES) if self._cloner else os.fork()
        if subject == 0:
            self._become_candidate(theirs, output_write, timeout, memory, scratch)
        theirs.close()
        judge = self._judge = self._judge or self._new_judge()
        judge.give(length, ours, output_read)
        ours.close()
        for fd in (output_read, output_write):
            if fd >= 0:
                os.close(fd)
        end = self._watch(judge, subject, timeout)
        if self._level == "rlimits":
            _end_descendants(but=self._judge.pid if self._judge else None)
            _remove(scratch)
        self._verdict.send(json.dumps(end).encode())

    def _watch(self, judge: Judge, subject: int, timeout: float) -> dict[str, Any]:
        """Wait for the checker's end or the deadline, then end and reap both.

        Time that the two were runnable without a core is added, up to once the timeout, so that a
        loaded node does not fail honest programs.
        """
        if judge.receive() != READ:  # the checker has read its job: the clock starts
            os._exit(3)  # the job socket is out of step: the supervisor starts another lane
        start = time.monotonic()
        poller = select.poll()
        poller.register(judge.control, select.POLLIN)
        poller.register(self._job, select.POLLHUP)
        timed_out, grace = True, 0.0
        while True:
            left = start + timeout + grace - time.monotonic()
            if left <= 0:
                starved = min(_starved(judge.pid, subject), timeout)
                if starved - grace < _GRACE_STEP:
                    break
                grace = starved
                continue
            events = dict(poller.poll(left * 1000 + 1))
            if self._job.fileno() in events:
                os._exit(0)  # the supervisor has ended; the kernel ends the rest
            if judge.control.fileno() in events:
                timed_out = False
                break
        early, status = os.waitpid(subject, os.WNOHANG)
        if not early:
            os.kill(subject, signal.SIGKILL)
            os.waitpid(subject, 0)
        if timed_out:
            os.kill(judge.pid, signal.SIGKILL)
        if timed_out or judge.receive() != DONE:
            judge.close()
            self._judge = None
        seconds = time.monotonic() - start
        return {
            "end": 1,
            "timed_out": timed_out,
            "seconds": round(seconds, 6),
            "status": status if early else None,
        }

    # --- the two children

    def _new_judge(self) -> Judge:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            return Judge(pid, ours)
        try:
            ours.close()
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            for kind, value in (
                (resource.RLIMIT_AS, CHECKER_MEMORY),
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_NOFILE, 64),
            ):
                _limit(kind, value)
            gc.enable()
            self._enter_landlock()
            self._install_filter()
            serve(theirs, self._job, self._verdict)
        finally:
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
            kernel.mount_proc()
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
        _limit(resource.RLIMIT_NPROC, self._processes)
        gc.enable()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        if self._cloner:
            kernel.drop_capabilities()
        self._install_filter()

    def _enter_landlock(self) -> None:
        if self._ruleset is not None:  # it cannot trace or signal siblings and parent
            kernel.landlock_restrict(self._ruleset)
            os.close(self._ruleset)

    def _install_filter(self) -> None:
        """Install the system call filter: this process, pid 1, may signal itself alone."""
        pid = os.getpid()
        program = self._filter if pid == 1 else None
        try:
            kernel.install_seccomp(
                program or kernel.seccomp_program(pid=pid, metadata=self._level != "landlock")
            )
        except OSError:
            if self._level != "rlimits":  # level rlimits uses the filter where the kernel has it
                raise


def read_text(path: str) -> str:
    """A small file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


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


# --- the rlimits level, which has no namespace that ends with its first process -----------------------------------------


def _tasks_alive() -> int:
    """Processes that this process can see."""
    return sum(name.isdigit() for name in os.listdir("/proc"))


def _children() -> list[int]:
    me = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int(read_text(f"/proc/{name}/stat").rpartition(")")[2].split()[1]) == me:
                    found.append(int(name))
    return found


def _make_scratch() -> str:
    import tempfile  # noqa: PLC0415  (it would enlarge every fork of the other levels)

    return tempfile.mkdtemp(prefix="evalspan-")


def _end_descendants(but: int | None) -> None:
    """Kill and reap a candidate's processes. Orphans become children here, so repeating finds all."""
    while children := [pid for pid in _children() if pid != but]:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _remove(folder: str) -> None:
    """Remove a scratch folder, also where the program has changed its permissions."""
    import shutil  # noqa: PLC0415

    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
