"""Whether the coordinator still cares: the file that it touches, seen from another host.

Rule: the lease has expired once the file's mtime has stood still for long enough by our own clock; clocks need not agree.
A file that is away (storage, or never written) stands still, too.
It does not know: who holds what under the lease.
"""

from __future__ import annotations

import time
from pathlib import Path


class CoordinatorLease:
    """`path` is touched by a living coordinator many times in `seconds`."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._seconds = seconds
        self._seen, self._since = _mtime(path), time.monotonic()

    def expired(self) -> str:
        """Why nobody will come back, or "" while somebody may."""
        now, stamp = time.monotonic(), _mtime(self._path)
        if stamp != self._seen:
            self._seen, self._since = stamp, now
        if now - self._since <= self._seconds:
            return ""
        return f"the coordinator's lease {self._path} was not renewed for {self._seconds:.0f} s"


def _mtime(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
