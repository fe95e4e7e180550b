"""Runs a local job and ends all of its processes: python local_guardian.py SECONDS COMMAND …

Rule: no process of a job outlives its guardian, and no guardian outlives its coordinator. The coordinator holds the other end
of the guardian's standard input: at the coordinator's end, also by SIGKILL, that pipe closes. The guardian is a child
subreaper, so every process of the job is among its descendants. The exit code is the job's, or 128 plus the signal that ended
it, as in a shell.

`local.py` starts it in an interpreter without site packages: it only imports the standard library.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORPHANED_SECONDS = 4.0
"""Time between SIGTERM and SIGKILL without a coordinator: everything ends within 10 s."""
NO_PROGRAM = 127  # a shell's exit code for a command that cannot be run
KILL_ROUNDS = 300  # scans for descendants, 10 ms apart; bounded, since SIGKILL may fail to end a process


def main(argv: list[str]) -> int:
    """Run `argv[1:]`; `argv[0]` is the time in seconds between SIGTERM and SIGKILL."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, waking = os.pipe()
    for end in (woken, waking):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    terms: list[int] = []
    passed: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: terms.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _frame: passed.append(number))
    try:
        child = subprocess.Popen(
            argv[1:],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 (one thread)
        )
    except OSError as error:
        sys.stderr.write(f"{argv[1]}: {error.strerror}\n")
        return NO_PROGRAM
    code = _wait(child, woken, terms, passed, float(argv[0]))
    _end_descendants()
    return code if code >= 0 else 128 - code


def _wait(
    child: "subprocess.Popen[bytes]", woken: int, terms: list[int], passed: list[int], patience: float
) -> int:
    """Wait for the job's first process. Pass SIGTERM and the coordinator's end on to its process group, `passed` itself."""
    watched = [0, woken]
    deadline: float | None = None
    while (code := child.poll()) is None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(watched, [], [], left)
        if woken in ready:
            os.read(woken, 4096)
        while passed:
            child.send_signal(passed.pop(0))
        if 0 in ready and not os.read(0, 1):
            watched.remove(0)
            patience = min(patience, ORPHANED_SECONDS)
            terms.append(signal.SIGTERM)
        if terms:
            terms.clear()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            ends = time.monotonic() + patience
            deadline = ends if deadline is None else min(deadline, ends)
        if deadline is not None and time.monotonic() >= deadline:
            child.kill()
            return child.wait()
    return code


def _end_descendants() -> None:
    """Send SIGKILL to every descendant until none is left; the next scan finds children forked meanwhile."""
    for _ in range(KILL_ROUNDS):
        left = _descendants()
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(0.01)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (place / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(place.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
