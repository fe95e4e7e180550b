"""Processes by identity, never by name: a pid counts only with the start time that was recorded with it.

Rule: the one place that reads /proc and sends signals. A zombie counts as dead. A zombie whose other threads still end
does not: until the last of them has, its ports are taken and its files may change.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dev_cluster.spec import DevClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Proc:
    """`started` is field 22 of /proc/PID/stat, in clock ticks since boot."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return identify(self.pid) == self

    def send(self, number: int) -> None:
        """Signal it if it is still the same process."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _look(pid: int) -> tuple[Proc, int] | None:
    """The living process with this pid now, and its parent's pid."""
    # a name is 15 bytes, and those may end within a character
    fields = _read(pid, "stat").rpartition(")")[2].split()
    if not fields or (fields[0] in "ZX" and int(fields[17]) <= 1):
        return None
    return Proc(pid=pid, started=int(fields[19])), int(fields[1])


def _read(pid: int, file: str) -> str:
    """A file of /proc/PID; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:
        return ""


def identify(pid: int) -> Proc | None:
    """The living process with this pid now."""
    now = _look(pid)
    return None if now is None else now[0]


def _all() -> list[tuple[Proc, int]]:
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())  # noqa: PTH208
    return [now for now in map(_look, pids) if now is not None]


def everyone() -> list[Proc]:
    return [proc for proc, _ in _all()]


def children(pid: int) -> list[Proc]:
    """Living children of `pid`."""
    return [proc for proc, parent in _all() if parent == pid]


def members(pid: int, kind: str) -> list[Proc]:
    """Living processes that share the namespace `kind` (`mnt`, `pid`, …) of `pid`, itself included.

    None where that is our own namespace: these lists are made to be killed, and the machine is never among them.
    """

    def namespace(pid: int) -> str:
        try:
            return os.readlink(f"/proc/{pid}/ns/{kind}")  # noqa: PTH115
        except OSError:
            return ""

    wanted = namespace(pid)
    if wanted in {"", namespace(os.getpid()), namespace(1)}:
        return []
    return [p for p in everyone() if namespace(p.pid) == wanted]


def command_name(pid: int) -> str:
    return _read(pid, "comm").strip()


def environment(pid: int) -> dict[str, str]:
    """The environment the process was started with; empty where it is gone."""
    pairs = (item.partition("=") for item in _read(pid, "environ").split("\0") if "=" in item)
    return {key: value for key, _, value in pairs}


def spawn(argv: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Proc:
    """Start a process that outlives us, is reaped by init and writes to `log`.

    The shell between ends at once, so that a long-lived caller has no child to wait for.
    """
    script = 'log=$1; shift; setsid "$@" >>"$log" 2>&1 </dev/null & echo $!'
    line = ["sh", "-c", script, "sh", str(log), *argv]
    done = subprocess.run(line, check=True, text=True, capture_output=True, env=dict(env), cwd="/")
    proc = identify(int(done.stdout))
    if proc is None:
        raise DevClusterError(f"{argv[0]} ended at once: {tail(log)}")
    return proc


def kill_all(procs: Iterable[Proc], *, deadline_s: float = 60.0) -> None:
    """SIGKILL all of them and wait until none is left."""
    listed = list(procs)
    for proc in listed:
        proc.send(signal.SIGKILL)
    if not poll(lambda: not any(p.alive for p in listed), deadline_s=deadline_s):
        left = [p.pid for p in listed if p.alive]
        raise DevClusterError(f"processes {left} do not end after SIGKILL; look at /proc/PID/stack")


def poll(done: Callable[[], object], *, deadline_s: float, every_s: float = 0.05) -> bool:
    """Whether `done` came true before the deadline."""
    end = time.monotonic() + deadline_s
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
    return True


def tail(log: Path, lines: int = 3) -> str:
    """The last lines of a log on one line; only the fatal ones where a daemon says it has such."""
    try:
        text = log.read_text(errors="replace").splitlines()
    except OSError:
        return f"(no {log})"
    bad = [line for line in text if "fatal:" in line]
    return " | ".join((bad or text)[-lines:]) or f"({log} is empty)"
