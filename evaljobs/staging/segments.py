"""Shared memory in /dev/shm of an engine's processes, freed however these processes end.

Rule: once all of an engine's processes have mapped a segment, its name is removed, so the kernel frees the memory at the end
of the last one. Until then a segment's name begins with PREFIX, by which `sweep_segments` finds those of processes killed while
loading. Called from `trial.engines`, `__main__`, `precursor` and `clean`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

FOLDER = Path("/dev/shm")
# File /dev/shm/evs_RANDOM: shared memory of an engine's processes | a trial | when they have mapped it; `evalspan clean`
PREFIX = "evs_"
# Prefixes of names that may be removed once mapped: of a Segment, of vLLM's communication on CPUs, of joblib's semaphores.
# Others stay: CUDA's may be opened by name later.
MAPPED_ONCE = (PREFIX, "vllm_", "sem.loky-")


class Segment(shared_memory.SharedMemory):
    """Shared memory whose name begins with PREFIX, and may be removed before its creator does."""

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0, **more: Any) -> None:
        own = f"{PREFIX}{secrets.token_hex(4)}" if create and name is None else name
        super().__init__(own, create, size, **more)

    def unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            super().unlink()


def name_ours() -> None:
    """Make libraries create a Segment for shared memory in this process, for the rest of its life."""
    shared_memory.SharedMemory = Segment  # type: ignore[misc]


@contextlib.contextmanager
def named_segments() -> Iterator[None]:
    """Call `name_ours`, only for the context."""
    before = shared_memory.SharedMemory
    name_ours()
    try:
        yield
    finally:
        shared_memory.SharedMemory = before  # type: ignore[misc]


def unlink_mapped() -> int:
    """Remove names in MAPPED_ONCE that this process and its descendants have mapped; return how many.

    The memory stays until the last of them has ended.
    """
    removed = 0
    for name in sorted(mapped_files(process_family(os.getpid()))):
        if not name.startswith(MAPPED_ONCE):
            continue
        with contextlib.suppress(OSError):
            (FOLDER / name).unlink()
            removed += 1
            if name.startswith(PREFIX):
                resource_tracker.unregister(f"/{name}", "shared_memory")
    return removed


def sweep_segments() -> int:
    """Remove segments with PREFIX that no process has mapped; return the bytes."""
    freed = 0
    with contextlib.suppress(FileNotFoundError):
        found = [place for place in FOLDER.iterdir() if place.name.startswith(PREFIX)]
        used = mapped_files(_processes()) if found else set()
        for place in found:
            with contextlib.suppress(OSError):
                status = place.lstat()
                if place.name not in used and status.st_uid == os.geteuid():
                    place.unlink()
                    freed += status.st_blocks * 512
    return freed


def mapped_files(processes: Iterable[int]) -> set[str]:
    """Return names of files directly below /dev/shm that the processes have mapped. Unreadable ones are ignored.

    By inode: the kernel lists a semaphore under the name that it had when it was created.
    """
    inodes: set[int] = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f"{FOLDER}/" in line:
                    inodes.add(int(line.split(maxsplit=5)[4]))
    names: set[str] = set()
    for place in FOLDER.iterdir() if inodes else ():
        with contextlib.suppress(OSError):
            if place.lstat().st_ino in inodes:
                names.add(place.name)
    return names


def process_family(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    found = [pid]
    for member in found:
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{member}/task").glob("*/children"):
                found += [int(word) for word in children.read_text().split()]
    return found


def _processes() -> list[int]:
    return [int(place.name) for place in Path("/proc").iterdir() if place.name.isdigit()]
