"""Cached listings of folders for a process that lives for months: a folder is only listed again if it may have changed.

Rule: a folder whose mtime has been constant since well before the last listing has the same entries. Opening the folder makes
an NFS client ask the server for the mtime. The caller passes the time. Called by `intake.folder_watch` and `runtime`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SETTLED_SECONDS = (
    2.0  # coarsest time stamps of file systems: a later change within them does not change the stamp
)
ANYWAY_SECONDS = 30.0  # between two listings of an unchanged folder, since some file systems keep no mtime


def entries_with_prefix(folder: Path, start: str) -> list[Path]:
    """Return entries of a folder whose names begin with `start`, unordered; none if it cannot be listed.

    `Path.glob` would cache a compiled pattern for every name ever requested.
    """
    with contextlib.suppress(OSError):
        return [folder / name for name in os.listdir(folder) if name.startswith(start)]  # noqa: PTH208 (names alone)
    return []


class Listing:
    """The entries of one folder, from the last look at which it may have changed."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self._stamp = -1
        self._seen_at = 0.0  # when this mtime was first seen
        self._listed_at = float("-inf")

    @contextlib.contextmanager
    def news(self, now: float) -> Iterator[Iterator[os.DirEntry[str]] | None]:
        """Yield all entries; None if they are unchanged. `now`: seconds of any monotonic clock. Raise OSError."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not self._may_differ(os.fstat(descriptor).st_mtime_ns, now):
                yield None
                return
            with os.scandir(descriptor) as entries:
                yield entries
            self._listed_at = now
        finally:
            os.close(descriptor)

    def _may_differ(self, stamp: int, now: float) -> bool:
        if stamp != self._stamp:
            self._stamp, self._seen_at = stamp, now
        return self._listed_at < self._seen_at + SETTLED_SECONDS or now - self._listed_at >= ANYWAY_SECONDS
