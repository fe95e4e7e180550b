"""Processes by identity, never by name: a pid counts only with the start time that was recorded with it.

Rule: the one place that reads /proc and sends signals. A zombie counts as dead. A
zombie whose other threads still end does not: until the last of them has, its ports are taken and its files may change.
"""

from __future__ import annotations

import contextlib
import json
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
        now = _stat(self.pid)
        return now is not None and now.started == self.started and not now.ended

    def send(self, number: int) -> None:
        """Signal it if it is still the same process."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stat:
    state: str
    parent: int
    threads: int
    started: int

    @property
    def ended(self) -> bool:
        return self.state in "ZX" and self.threads <= 1


def _stat(pid: int) -> _Stat | None:
    try:
        # a name is 15 bytes, and those may end within a character
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(state=fields[0], parent=int(fields[1]), threads=int(fields[17]), started=int(fields[19]))


def identify(pid: int) -> Proc | None:
    """The living process with this pid now."""
    now = _stat(pid)
    return None if now is None or now.ended else Proc(pid=pid, started=now.started)


def everyone() -> list[Proc]:
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())  # noqa: PTH208
    return [proc for proc in map(identify, pids) if proc is not None]


def children(pid: int) -> list[Proc]:
    """Living children of `pid`."""
    return [p for p in everyone() if (now := _stat(p.pid)) is not None and now.parent == pid]


def namespace(pid: int, kind: str) -> str:
    """Identity of a namespace (`mnt`, `pid`, …) as the kernel prints it; empty where the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")  # noqa: PTH115
    except OSError:
        return ""


def members(pid: int, kind: str) -> list[Proc]:
    """Living processes that share the namespace `kind` of `pid`, itself included.

    None where that is our own namespace: these lists are made to be killed, and the machine is never among them.
    """
    wanted = namespace(pid, kind)
    if wanted in {"", namespace(os.getpid(), kind), namespace(1, kind)}:
        return []
    return [p for p in everyone() if namespace(p.pid, kind) == wanted]


def command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def environment(pid: int) -> dict[str, str]:
    """The environment the process was started with; empty where it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0") if "=" in item)
    return {key: value for key, _, value in pairs}


def spawn(argv: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Proc:
    """Start a process that outlives us, is reaped by init and writes to `log`.

    The shell between ends at once, so that a long-lived caller has no child to wait for.
    """
    text = subprocess.run(
        ["sh", "-c", 'log=$1; shift; setsid "$@" >>"$log" 2>&1 </dev/null & echo $!', "sh", str(log), *argv],
        check=True,
        text=True,
        capture_output=True,
        env=dict(env),
        cwd="/",
    ).stdout
    proc = identify(int(text))
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


def save(proc: Proc, path: Path) -> None:
    """Write a pid file; whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"pid": proc.pid, "started": proc.started}))
    part.replace(path)


def load(path: Path) -> Proc | None:
    """The living process of a pid file."""
    try:
        data = json.loads(path.read_text())
    except OSError:
        return None
    proc = Proc(pid=data["pid"], started=data["started"])
    return proc if proc.alive else None
