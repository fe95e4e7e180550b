"""Free space for staging: of the file system, the node's memory, and the job's own memory limit; and the GPUs' name.

Rule: the smallest limit counts and is named. Unreadable limits do not count. Only reads /proc and /sys.

Called by `precursor.py`, by `node_probe.py`, and by `evalspan doctor` for the file system's type.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MEMORY_FS = frozenset({"tmpfs", "ramfs"})
MIB = 1 << 20
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


class Files(NamedTuple):
    """Names of the memory controller's files in one version of cgroups."""

    limit: str
    usage: str
    events: str


V1 = Files("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
V2 = Files("memory.max", "memory.current", "memory.events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that may still be written below a root, and what limits them. `fs`: its file system's type."""

    free: int
    limit: str
    fs: str

    @property
    def rung(self) -> str:
        return "shm" if self.fs in MEMORY_FS else "disk"


def gpu_name(driver: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Return the name of the node's first NVIDIA GPU, readable even by a job without GPUs; "" if there is none."""
    for file in sorted(driver.glob("*/information")):
        with contextlib.suppress(OSError):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "Model" and value.strip():
                    return value.strip()
    return ""


def fs_type(path: str | Path) -> str:
    """Return the type of the file system of `path` (proc(5), mountinfo); "unknown" if it is not listed."""
    device = Path(path).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0]
    return "unknown"


def memory_available() -> int | None:
    """Return MemAvailable in bytes."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):  # absent, or "max"
        return None
    return value if value < _UNLIMITED else None


def _reclaimable(folder: Path) -> int:
    """Return the bytes of page cache, which the kernel frees before it kills a process."""
    try:
        rows = dict(
            line.split()[:2] for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        )
    except (OSError, ValueError):
        return 0
    return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))


def cgroup_limits(
    proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """Return (limit, headroom) in bytes of each memory cgroup above this process that has a limit, v2 and v1."""
    found: list[tuple[int, int]] = []
    for base, folder in _memory_groups(proc, mount):
        version = V2 if base == mount else V1
        for group in [folder, *folder.parents][: len(folder.relative_to(base).parts) + 1]:
            most, used = _number(group / version.limit), _number(group / version.usage)
            if most is not None:
                found.append((most, max(0, most - (used or 0) + _reclaimable(group))))
    return found


def short_of_memory(
    proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int | None]:
    """Return how many processes of this job the kernel has killed for lack of memory, and the job's limit in MiB."""
    killed = 0
    for base, folder in _memory_groups(proc, mount):
        version = V2 if base == mount else V1
        with contextlib.suppress(OSError):
            words = (folder / version.events).read_text(encoding="ascii").split()
            killed += int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
    limits = [most for most, _ in cgroup_limits(proc, mount)]
    return killed, min(limits) // MIB if limits else None


def _memory_groups(proc: Path, mount: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (root, this process's group) of the memory controller; the root of version 2 is `mount` itself."""
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield mount, mount / path.strip("/")
        elif "memory" in controllers.split(","):
            yield mount / "memory", mount / "memory" / path.strip("/")


def measure_room(root: str | Path) -> Room:
    """Return what may still be written below `root`. Raise OSError."""
    fs = fs_type(root)
    disk = os.statvfs(root)
    limits = [(disk.f_bavail * disk.f_frsize, f"free on {root}")]
    if fs in MEMORY_FS:
        available = memory_available()
        if available is not None:
            limits.append((available, "memory available on the node"))
        limits += [(free, "left of the job's memory limit") for _, free in cgroup_limits()]
    free, limit = min(limits)
    return Room(free=free, limit=limit, fs=fs)
