"""Watching folders for checkpoints, including those whose notices were lost, and announcing them in the inbox.

Rule: a reported folder is remembered with its contents; a look only lists folders that have changed, and checks a few of the
reported ones for new contents. Called by `runtime.service`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from coordinator.base.isolate import LoopGuard
from coordinator.base.listing import Listing
from coordinator.hook import PIN_PREFIX
from coordinator.intake.checkpoint import step_of
from coordinator.intake.inbox import Notice, leave_notice
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import write_atomic

log = logging.getLogger(__name__)

RECHECKED_CHECKPOINTS = 10  # reported checkpoints checked for new contents per look
MOST_NEW = 100  # checkpoints announced per look: each is a synced file


class FolderWatch:
    """Announces checkpoint folders below watched folders, including those of lost notices.

    Remembers reported folders with their contents: a restarted training may write other checkpoints into folders of the same
    names. Folders that a training has removed are forgotten.
    """

    def __init__(
        self, paths: WorkPaths, folders: Sequence[tuple[str, str]], *, any_format: bool = False
    ) -> None:
        """Watch `folders`: (folder of checkpoints or a glob, suite).

        `any_format`: a folder with a training step in its name also counts as a checkpoint.
        """
        self.any_format = any_format
        self.paths = paths
        self._places = [_Place(pattern, suite) for pattern, suite in folders]
        # keys are "SUITE\0FOLDER"
        self._seen: dict[str, str] = {}  # reported folder -> digest of its contents at the time
        self._left: dict[str, Path] = {}  # reported folder -> its notice, until the daemon has handled it
        self._due: deque[str] = deque()  # reported folders, the next to check again first
        self._unwritten = False  # the file of reported folders has to be written
        self._guard = LoopGuard(log)  # an error in one place only skips that place
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._seen = dict(json.loads(paths.watched.read_text()))

    def look(self) -> None:
        """Leave notices of checkpoint folders not yet reported, at most MOST_NEW; check AGAIN reported ones."""
        self._left = {key: file for key, file in self._left.items() if os.path.lexists(file)}
        self._due.extend(() if self._due else self._seen)
        again = {self._due.popleft() for _ in range(min(RECHECKED_CHECKPOINTS, len(self._due)))}
        listed: set[str] = set()
        for place in self._places:
            listed |= self._guard(f"watching {place.pattern!r}", place.keys) or set()
        left = 0
        for key in sorted(((listed - self._seen.keys()) | (listed & again)) - self._left.keys()):
            if left < MOST_NEW:
                left += bool(self._guard(f"watching {_folder_of(key)!r}", self._report, key))
        for key in again:
            if _is_gone(Path(_folder_of(key))):
                self._seen.pop(key, None)
                self._unwritten = True
        if self._unwritten:
            # after a restart, whatever is not in the file (on a full disk) is reported again, without effect
            with contextlib.suppress(OSError):
                write_atomic(self.paths.watched, json.dumps(self._seen, sort_keys=True).encode())
                self._unwritten = False

    def _report(self, key: str) -> bool:
        """Announce a checkpoint with new contents. Return False if it is not a checkpoint or has none."""
        suite, _, place = key.partition("\0")
        folder = Path(place)
        step = step_of(folder.name)
        # `Path.exists` raises in a folder that this user may not enter
        if not os.path.exists(folder / "config.json") and not (self.any_format and step is not None):  # noqa: PTH110
            return False
        held = _held(folder)
        if self._seen.get(key) == held:
            return False
        place.encode()  # raises for a name that is not UTF-8: no notice can hold it
        notice = Notice(checkpoint=place, step=step, suite=suite, noticed_at=time.time(), seen=True)
        self._left[key] = leave_notice(self.paths, notice)
        self._seen[key] = held
        self._unwritten = True
        return True


def _folder_of(key: str) -> str:
    return key.partition("\0")[2]


class _Place:
    """A watched folder or glob, with the folders of its last listing."""

    def __init__(self, pattern: str, suite: str) -> None:
        self.pattern, self.suite = pattern, suite
        self._keys: set[str] = set()
        self._listing = None if any(char in pattern for char in "*?[") else Listing(pattern)

    def keys(self) -> set[str]:
        """Return the keys of its folders. Raise OSError if they cannot be listed."""
        found = self._listed()
        if found is not None:
            self._keys = {f"{self.suite}\0{folder}" for folder in found}
        return self._keys

    def _listed(self) -> list[str] | None:
        """Return the folders of the place; None if they have not changed."""
        if self._listing is None:
            return [str(p) for p in Path("/").glob(self.pattern.lstrip("/")) if not is_unfinished(p.name)]
        try:
            with self._listing.news(time.monotonic()) as entries:
                if entries is None:
                    return None
                within = [e.name for e in entries if not is_unfinished(e.name) and _is_folder(e)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        # the folder may itself be a checkpoint
        return [self.pattern, *(os.path.join(self.pattern, name) for name in within)]  # noqa: PTH118


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether the entry is a folder; False for a link that this user may not follow, where `is_dir` raises."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_gone(folder: Path) -> bool:
    """Return whether it was removed. An empty parent folder may be a mount point whose storage is unavailable."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(folder):
            above = next(p for p in folder.parents if p.is_dir())
            with os.scandir(above) as entries:
                return any(True for _ in entries)
    return False


def _held(folder: Path) -> str:
    """Return a digest of a folder's entries (names, sizes, times) without evalspan's pins. Raise OSError."""
    rows = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(PIN_PREFIX):
                with contextlib.suppress(OSError):  # since deleted, or a dangling link
                    found = entry.stat()
                    rows.append((entry.name, found.st_size, found.st_mtime_ns))
    rows.sort()
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def is_unfinished(name: str) -> bool:
    """Return whether by convention this names a folder that a copy or a training is still writing."""
    return name.startswith((".", "tmp-")) or name.endswith((".tmp", ".partial"))
