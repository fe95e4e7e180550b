"""Finds the isolation levels that work on this machine by trying to escape from them.

Rule: a level holds if the program `_ESCAPES` finds no way out, a right program passes and a wrong one fails. Versions and
installed packages are not evidence. Each level is tried once per process. Called from `run` and `evalspan doctor`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evaljobs.sandbox.isolation.lane import ENVIRONMENT, run_on
from evaljobs.sandbox.records import Level, Program, SandboxUnavailableError

_ORDER: Final = (Level.NAMESPACES, Level.LANDLOCK, Level.RLIMITS)

# Runs inside and returns the ways out that it found.
_ESCAPES: Final = """
def ways_out(spec):
    import os, socket, resource, ctypes
    found = []
    def attempt(name, action):
        try:
            if action() is not False:
                found.append(name)
        except BaseException:
            pass
    for path in spec["unreadable"]:
        attempt("read " + path, lambda: open(path, "rb").read(1))
    attempt("list " + spec["folder"], lambda: os.listdir(spec["folder"]))
    def write(folder):
        path = os.path.join(folder, "evalspan-escape")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(path)
    for folder in (spec["folder"], "/", "/var/tmp", "/usr/lib", os.path.dirname(os.__file__)):
        attempt("write " + folder, lambda: write(folder))
    attempt("chmod", lambda: os.chmod(spec["unreadable"][0], 0o600))
    attempt("unlink", lambda: os.unlink(spec["unreadable"][0]))
    attempt("internet socket", lambda: socket.socket().connect(("127.0.0.1", spec["port"])))
    attempt("udp socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    attempt("unix socket", lambda: socket.socket(socket.AF_UNIX).connect(spec["socket"]))
    attempt("datagrams", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
    attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
    attempt("signal the harness", lambda: os.kill(spec["pid"], 0))
    attempt("signal the parent", lambda: os.kill(os.getppid(), 0))
    attempt("environment", lambda: spec["variable"] in os.environ)
    attempt("environment of others", lambda: any(
        open("/proc/%s/environ" % p).read() for p in os.listdir("/proc") if p.isdigit() and p != str(os.getpid())))
    attempt("new process", lambda: os.fork() or os._exit(0))
    attempt("exec", lambda: os.execv("/bin/true", ["true"]))
    attempt("core dumps", lambda: resource.getrlimit(resource.RLIMIT_CORE)[1] != 0)
    attempt("unbounded memory", lambda: resource.getrlimit(resource.RLIMIT_AS)[1] == -1)
    attempt("raise a limit", lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 50, 1 << 50)))
    libc = ctypes.CDLL(None)
    attempt("user namespace", lambda: libc.unshare(0x10000000) == 0)
    attempt("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0)
    attempt("ptrace", lambda: libc.ptrace(16, os.getppid(), 0, 0) == 0)
    attempt("shared memory", lambda: libc.shmget(4242, 4096, 0o1600) >= 0)
    attempt("keyring", lambda: libc.syscall(250, 0, -4, 0) >= 0 and os.uname().machine == "x86_64")
    return found
"""
_JUDGE: Final = "found = ways_out({spec!r})\nassert found == [], ', '.join(found)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelReport:
    """Whether a level holds here, with the reason if not."""

    level: Level
    holds: bool
    reason: str = ""


def probe_levels() -> tuple[LevelReport, ...]:
    """Return all levels, best first, with whether each holds. Takes about a second the first time."""
    return tuple(probe_level(level) for level in _ORDER)


def best_level() -> Level:
    """Return the best level that holds; RLIMITS, which is unsafe, if no other does."""
    return next((level for level in _ORDER[:-1] if probe_level(level).holds), Level.RLIMITS)


def choose_level(level: Level | None, *, allow_unsafe: bool) -> Level:
    """Return the level to use. Raise SandboxUnavailableError with the reason if it may not be used."""
    chosen = best_level() if level is None else Level(level)
    if chosen is Level.RLIMITS and not allow_unsafe:
        why = "; ".join(f"{r.level}: {r.reason}" for r in map(probe_level, _ORDER[:-1]) if not r.holds)
        raise SandboxUnavailableError(
            "resource limits alone do not contain hostile programs"
            + (f" ({why})" if why else "")
            + ": set [metric] allow_unsafe = true (here: --allow-unsafe) to use them"
        )
    report = probe_level(chosen)
    if not report.holds:
        raise SandboxUnavailableError(f"the {chosen} level does not hold here: {report.reason}")
    return chosen


@functools.cache
def probe_level(level: Level) -> LevelReport:
    """Return whether one level holds here, tried once per process."""
    try:
        with _bait() as spec:
            # Resource limits are not tried: they do not contain programs, and an escape would be a real one.
            programs = _programs(spec)[1:] if level is Level.RLIMITS else _programs(spec)
            *escapes, right, wrong = run_on(level, programs, 1)
    except SandboxUnavailableError as error:
        return LevelReport(level=level, holds=False, reason=str(error))
    if right.verdict != "pass" or wrong.verdict != "fail":
        return LevelReport(level=level, holds=False, reason=f"cannot judge: {right.reason or wrong.verdict}")
    for escape in escapes:
        if escape.verdict != "pass":
            return LevelReport(level=level, holds=False, reason=f"a program got out: {escape.reason}")
    return LevelReport(
        level=level,
        holds=True,
        reason="resource limits do not contain hostile programs" if level is Level.RLIMITS else "",
    )


def _programs(spec: Mapping[str, Any]) -> list[Program]:
    add = "def add(a, b):\n    return {}\n"
    test = "assert add(2, 3) == 5"
    return [
        Program(id="escape", code=_ESCAPES, test=_JUDGE.format(spec=spec), timeout_seconds=20.0),
        Program(id="right", code=add.format("a + b"), test=test, timeout_seconds=20.0),
        Program(id="wrong", code=add.format("a - b"), test=test, timeout_seconds=20.0),
    ]


@contextlib.contextmanager
def _bait() -> Iterator[dict[str, Any]]:
    """Provide targets that a program must not reach: file, folder, sockets, process, variable."""
    # File /tmp/evalspan-probe-RANDOM/…: a look at what the sandbox can do here | a metric worker | within seconds
    with tempfile.TemporaryDirectory(prefix="evalspan-probe-") as folder, contextlib.ExitStack() as stack:
        Path(folder).chmod(0o755)
        secret = Path(folder, "secret")
        secret.write_text("secret")
        secret.chmod(0o644)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        address = str(Path(folder, "socket"))
        unix.bind(address)
        unix.listen()
        yield {
            "folder": folder,
            "unreadable": [
                str(secret),
                "/etc/passwd",
                "/etc/shadow",
                os.environ.get("HOME", "/root") + "/.profile",
                f"/proc/{os.getpid()}/environ",
            ],
            "port": tcp.getsockname()[1],
            "socket": address,
            "pid": os.getpid(),
            # one that this process has and programs are not given
            "variable": next(iter(os.environ.keys() - ENVIRONMENT.keys()), "USER"),
        }
