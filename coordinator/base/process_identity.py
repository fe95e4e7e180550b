"""Identity of a process, and whether it lives. Reads Linux's /proc.

Rule: a process is (pid, start time, boot id), since the kernel reuses pids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def boot_id() -> str:
    """Return this boot's id (random(4))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of one boot. `birth` is its start in clock ticks since the boot."""

    pid: int
    birth: int
    boot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """Fields of /proc/PID/stat."""

    pid: int
    state: str
    threads: int
    birth: int

    @property
    def ended(self) -> bool:
        """Whether it has ended. A zombie has, since its parent, or a container's first process, may never reap it; but not
        while it has threads left, which die separately after a kill and hold its ports and files until then.
        """
        return self.state == "X" or (self.state == "Z" and self.threads < 2)


def read_stat(pid: int) -> Stat | None:
    """Read the status of a process; None if it does not exist."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def parse_stat(line: str) -> Stat:
    """Parse a status. The second field is the program's name in parentheses and may contain anything."""
    fields = line.rpartition(")")[2].split()
    return Stat(
        pid=int(line.partition(" ")[0]),
        state=fields[0],
        threads=int(fields[17]),
        birth=int(fields[19]),
    )


def identify_process(pid: int) -> Process | None:
    """Return the process that has this pid now; None if it has ended."""
    seen = read_stat(pid)
    return None if seen is None or seen.ended else Process(pid=pid, birth=seen.birth, boot=boot_id())


def is_alive(process: Process) -> bool:
    return identify_process(process.pid) == process
