"""Finds checkpoints in watched folders, also those whose notices were lost, and announces them in the inbox.

Rule: a folder that was reported is remembered with its contents; a look lists only folders that have changed, and
checks a few of the reported ones for new contents. Called by `runtime.service`.
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
from coordinator.intake.inbox import Notice, leave
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import write_atomic

log = logging.getLogger(__name__)

AGAIN = 10  # reported checkpoints that one look checks for new contents
MOST_NEW = 100  # checkpoints that one look announces: each is a file that is synced


class FolderWatch:
    """Announces checkpoint folders below watched folders, also those of lost notices.

    Remembers reported folders with their contents: a restarted training may write other checkpoints
    into folders of the same names. Those that a training has removed are forgotten.
    """

    def __init__(
        self, paths: WorkPaths, folders: Sequence[tuple[str, str]], *, any_format: bool = False
    ) -> None:
        """`folders`: (folder of checkpoints or a glob, suite).

        `any_format`: a folder with a training step in its name counts as a checkpoint, too.
        """
        self.any_format = any_format
        self.paths = paths
        self._places = [_Place(pattern, suite) for pattern, suite in folders]
        # keys are "SUITE\0FOLDER"
        self._seen: dict[str, str] = {}  # reported folder -> digest of its contents then
        self._left: dict[str, Path] = {}  # reported folder -> its notice, until the daemon has dealt with it
        self._due: deque[str] = deque()  # reported folders, the next to be checked again first
        self._unwritten = False  # has the file of reported folders to be written?
        self._guard = LoopGuard(log)  # an error in one place skips that place alone
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._seen = dict(json.loads(paths.watched.read_text()))

    def look(self) -> None:
        """Leave a notice of each checkpoint folder that was not reported, MOST_NEW at most; check AGAIN reported ones."""
        self._left = {key: file for key, file in self._left.items() if os.path.lexists(file)}
        self._due.extend(() if self._due else self._seen)
        again = {self._due.popleft() for _ in range(min(AGAIN, len(self._due)))}
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
            # what is not in the file, as on a full disk, is reported again after a restart, without effect
            with contextlib.suppress(OSError):
                write_atomic(self.paths.watched, json.dumps(self._seen, sort_keys=True).encode())
                self._unwritten = False

    def _report(self, key: str) -> bool:
        """Announce a checkpoint with new contents; False: it is none, or has none."""
        suite, _, place = key.partition("\0")
        folder = Path(place)
        step = step_of(folder.name)
        # `Path.exists` raises in a folder that this user may not enter
        if not os.path.exists(folder / "config.json") and not (self.any_format and step is not None):  # noqa: PTH110
            return False
        held = _held(folder)
        if self._seen.get(key) == held:
            return False
        place.encode()  # raises for a name that is no UTF-8: no notice can hold it
        notice = Notice(checkpoint=place, step=step, suite=suite, noticed_at=time.time(), seen=True)
        self._left[key] = leave(self.paths, notice)
        self._seen[key] = held
        self._unwritten = True
        return True


def _folder_of(key: str) -> str:
    return key.partition("\0")[2]


class _Place:
    """A watched folder or glob, with the folders that its last listing showed."""

    def __init__(self, pattern: str, suite: str) -> None:
        self.pattern, self.suite = pattern, suite
        self._keys: set[str] = set()
        self._listing = None if any(char in pattern for char in "*?[") else Listing(pattern)

    def keys(self) -> set[str]:
        """Keys of its folders. OSError."""
        found = self._listed()
        if found is not None:
            self._keys = {f"{self.suite}\0{folder}" for folder in found}
        return self._keys

    def _listed(self) -> list[str] | None:
        """Folders of the place; None where they are those of the last time."""
        if self._listing is None:
            return [str(p) for p in Path("/").glob(self.pattern.lstrip("/")) if not is_unfinished(p.name)]
        try:
            with self._listing.news(time.monotonic()) as entries:
                if entries is None:
                    return None
                within = [e.name for e in entries if not is_unfinished(e.name) and _is_folder(e)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        # the folder may be a checkpoint itself
        return [self.pattern, *(os.path.join(self.pattern, name) for name in within)]  # noqa: PTH118


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """False also for a link into a folder that this user may not enter, where `is_dir` raises."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_gone(folder: Path) -> bool:
    """Was it removed? An empty folder above it may be a mount point whose storage is away."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(folder):
            above = next(p for p in folder.parents if p.is_dir())
            with os.scandir(above) as entries:
                return any(True for _ in entries)
    return False


def _held(folder: Path) -> str:
    """Digest of a folder's entries (names, sizes, times) without evalspan's pins. OSError."""
    rows = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(PIN_PREFIX):
                with contextlib.suppress(OSError):  # deleted meanwhile, or a dangling link
                    found = entry.stat()
                    rows.append((entry.name, found.st_size, found.st_mtime_ns))
    rows.sort()
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def is_unfinished(name: str) -> bool:
    """Is it the name of a folder that a copy or a training is still writing, by custom?"""
    return name.startswith((".", "tmp-")) or name.endswith((".tmp", ".partial"))
