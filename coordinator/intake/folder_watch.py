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
from collections.abc import Mapping, Sequence
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
        self._seen: dict[str, str] = {}  # reported folder -> digest of its contents then
        self._left: dict[str, Path] = {}  # reported folder -> its notice, until the daemon has dealt with it
        self._due: deque[str] = deque()  # reported folders, the next to be checked again first
        self._unwritten = False  # has the file of reported folders to be written?
        self._write_at = float("-inf")  # not before, in monotonic seconds
        self._guard = LoopGuard(log)  # an error in one place skips that place alone
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._seen = dict(json.loads(paths.watched.read_text()))

    def look(self) -> None:
        """Leave a notice of each checkpoint folder that was not reported, MOST_NEW at most; check AGAIN reported ones."""
        self._left = {key: file for key, file in self._left.items() if os.path.lexists(file)}
        again = self._in_turn()
        left = 0
        for place in self._places:
            listed = self._guard(f"watching {place.pattern!r}", place.new, self._seen) or ()
            for key in sorted({*listed, *(again & place.keys)}):
                folder = Path(key.partition("\0")[2])
                if left < MOST_NEW and key not in self._left:
                    left += bool(
                        self._guard(f"watching {str(folder)!r}", self._report, folder, place.suite, key)
                    )
        for key in again:
            if _is_gone(Path(key.partition("\0")[2])):
                self._seen.pop(key, None)
                self._unwritten = True
        self._write()

    def _in_turn(self) -> set[str]:
        if not self._due:
            self._due.extend(self._seen)
        return {self._due.popleft() for _ in range(min(AGAIN, len(self._due)))}

    def _report(self, folder: Path, suite: str, key: str) -> bool:
        """Announce a checkpoint with new contents; False: it is none, or has none."""
        if not self._is_checkpoint(folder):
            return False
        held = _held(folder)
        if self._seen.get(key) == held:
            return False
        str(folder).encode()  # raises for a name that is no UTF-8: no notice can hold it
        step, now = step_of(folder.name), time.time()
        self._left[key] = leave(
            self.paths, Notice(checkpoint=str(folder), step=step, suite=suite, noticed_at=now, seen=True)
        )
        self._seen[key] = held
        self._unwritten = True
        return True

    def _is_checkpoint(self, folder: Path) -> bool:
        # `Path.exists` raises in a folder that this user may not enter
        return os.path.exists(folder / "config.json") or (  # noqa: PTH110
            self.any_format and step_of(folder.name) is not None
        )

    def _write(self) -> None:
        """Write the file of reported folders where they have changed; it takes at most a thousandth of the time, however long it is.

        What is not in it, also on a full disk, is reported again after a restart, without effect.
        """
        began = time.monotonic()
        if self._unwritten and began >= self._write_at:
            with contextlib.suppress(OSError):
                write_atomic(self.paths.watched, json.dumps(self._seen, sort_keys=True).encode())
                self._unwritten = False
            ended = time.monotonic()
            self._write_at = ended + 1000 * (ended - began)


class _Place:
    """A watched folder or glob, with the folders that its last listing showed."""

    def __init__(self, pattern: str, suite: str) -> None:
        self.pattern, self.suite = pattern, suite
        self.keys: frozenset[str] = frozenset()
        self._new: frozenset[str] = frozenset()  # of `keys`, those that were not reported
        plain = not any(char in pattern for char in "*?[")
        self._listing = Listing(pattern) if plain else None

    def new(self, seen: Mapping[str, str]) -> frozenset[str]:
        """Keys of folders that are not reported yet. OSError."""
        found = self._listed()
        if found is not None:
            self.keys = frozenset(f"{self.suite}\0{folder}" for folder in found)
            self._new = self.keys
        self._new = frozenset(key for key in self._new if key not in seen)
        return self._new

    def _listed(self) -> list[str] | None:
        """Folders of the place; None where they are those of the last time."""
        if self._listing is None:
            root = Path(self.pattern)
            anchor = Path(root.anchor or ".")
            relative = str(root.relative_to(anchor)) if root.anchor else self.pattern
            return [str(p) for p in anchor.glob(relative) if not _is_unfinished(p.name)]
        try:
            with self._listing.news(time.monotonic()) as entries:
                if entries is None:
                    return None
                within = [e.name for e in entries if not _is_unfinished(e.name) and _is_folder(e)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        # the folder may be a checkpoint itself
        return [str(Path(self.pattern)), *(os.path.join(self.pattern, name) for name in within)]  # noqa: PTH118


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


def _is_unfinished(name: str) -> bool:
    """Is it the name of a folder that a copy or a training is still writing, by custom?"""
    return name.startswith((".", "tmp-")) or name.endswith((".tmp", ".partial"))
