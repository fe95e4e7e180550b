"""The coordinator's signs on shared storage, read on a node: its lease file, and files that tell a job to exit.

Rules: the lease has expired once the file's mtime has been constant for long enough by the node's own clock, so clocks need
not agree. A missing file counts as unchanged. A storage error (ESTALE, EIO: a failover) changes nothing: it does not tell
whether a file exists.

Called by `precursor.py`, `trial/hosted_trials.py` and `scoring/worker.py`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path


class CoordinatorLease:
    """The lease file `path`, which a living coordinator touches many times in `seconds`."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._seconds = seconds
        self._seen, self._since = _mtime(path), time.monotonic()
        self.renewals = 0  # seen so far

    def expired(self) -> str:
        """Return why the coordinator counts as gone; "" while it may be alive."""
        now, stamp = time.monotonic(), _mtime(self._path)
        if stamp not in (None, self._seen):
            self._seen, self._since = stamp, now
            self.renewals += 1
        if now - self._since <= self._seconds:
            return ""
        return f"the coordinator's lease {self._path} was not renewed for {self._seconds:.0f} s"


def is_there(path: Path) -> bool | None:
    """Return whether the file exists; None if storage answers with an error: try again."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    return True


def _mtime(path: Path) -> int | None:
    with suppress(OSError):  # missing, or an error of storage
        return path.stat().st_mtime_ns
    return None
