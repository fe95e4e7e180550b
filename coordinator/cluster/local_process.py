"""Processes of the local cluster: started so that a coordinator's death loses none, known by more than their pid.

Rule: a job's process claims its member by a hard link before it becomes the job: of two starts of one member (a
coordinator that was killed and its successor) one runs.
It does not know: jobs, queues, slots. It reads Linux's /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator import processes
from coordinator.processes import Process

MARK = "EVALSPAN_LOCAL_JOB"  # in the environment of all of a job's processes, wherever they went
ROUNDS = 5  # of looking for a job's processes: one that does not die of SIGKILL yet holds nobody up
# $1: the claim, $2: a note kept in it. exec keeps the pid and the start time that the stat line says. Claim first, then
# look for the order to stop: who gives the order writes it first and then looks for the claim, so one sees the other.
LAUNCH = """\
read -r boot < /proc/sys/kernel/random/boot_id && read -r stat < /proc/$$/stat || exit 125
printf '%s\\n' "$boot" "$stat" "$2" > "$1.$$" || exit 125
ln "$1.$$" "$1" 2> /dev/null; lost=$?
rm -f "$1.$$"
[ "$lost" = 0 ] || exit 125
[ ! -e "${1%.run}.stop" ] || exit 143
shift 2
exec "$@"
"""


def start(
    argv: Sequence[str], *, claim: Path, note: str, log: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `argv` in a session of its own, output appended to `log`. OSError where that cannot be done now.

    `claim` ends in ".run"; `note` is one line.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            ["/bin/sh", "-c", LAUNCH, "sh", str(claim), note, *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )


def read_claim(path: Path) -> tuple[Process, str] | None:
    """Who claimed it, and the note; None while nobody has. A claim appears whole."""
    try:
        boot, line, note = path.read_text().split("\n")[:3]
    except FileNotFoundError:
        return None
    stat = processes.parse_stat(line)
    return Process(pid=stat.pid, birth=stat.birth, boot=boot), note


def has_exited(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child of ours is over, without reaping it: until then nobody else gets its pid, or its session."""
    if child.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def tell(pid: int) -> None:
    """SIGTERM to the process group that `pid` leads; the caller knows that it is alive."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)


def kill_all(mark: str, session: int | None = None) -> None:
    """SIGKILL to every process that bears the mark, and to a session while its leader is known to be ours.

    Whoever was met may have forked before it was: one looks again until nobody is met.
    """
    for _ in range(ROUNDS):
        if not _kill_seen(f"{MARK}={mark}".encode(), session):
            return


def _kill_seen(wanted: bytes, session: int | None) -> int:
    count = 0
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        if pid == os.getpid():
            continue
        stat = processes.stat(pid)
        if stat is None or stat.ended:
            continue
        if (session is not None and stat.session == session) or wanted in _environment(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                count += 1
    return count


def _environment(pid: int) -> list[bytes]:
    place = Path(f"/proc/{pid}/environ")
    try:
        for _ in range(100):
            if raw := place.read_bytes():
                return raw.split(b"\0")
            if not _should_have_one(pid):
                break
            time.sleep(0.001)
    except OSError:
        pass
    return []


def _should_have_one(pid: int) -> bool:
    """Its environment is empty: that may be in the midst of exec, when its memory is new and has none for a moment. Few
    processes are started without any; they are waited for in vain. The kernel's own, and those that end, have no
    memory (field 23).
    """
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[20] != "0"
