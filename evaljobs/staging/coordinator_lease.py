"""What the coordinator says by files on shared storage, seen from another host: its lease, and whether a job shall end.

Rule: the lease has expired once the file's mtime has stood still for long enough by our own clock; clocks need not agree.
A file that is away stands still, too. A storage error (ESTALE, EIO: a failover) is no news: neither that a file is there nor that it is not.
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
        self._seen, self._since = _mtime(path, None), time.monotonic()

    def expired(self) -> str:
        """Why nobody will come back, or "" while somebody may."""
        now, stamp = time.monotonic(), _mtime(self._path, self._seen)
        if stamp != self._seen:
            self._seen, self._since = stamp, now
        if now - self._since <= self._seconds:
            return ""
        return f"the coordinator's lease {self._path} was not renewed for {self._seconds:.0f} s"


def is_there(path: Path) -> bool | None:
    """Is the file there? None where the storage cannot say: ask again."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    return True


def _mtime(path: Path, before: int | None) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    except OSError:
        return before
