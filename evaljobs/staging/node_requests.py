"""Request sets beside the weights in a node's memory, so that trials there read no shared storage between two shards.

    <checkpoint's folder>/requests/<evaluation>/<set>/
        batches-N.jsonl, batches-N.index.json
        sums.json               of what was copied: size and mtime of the source, hash of the bytes

Rules: an evaluation's holder copies what the coordinator names, within its budget, the small sets first; a set gets its
name when all of it is there. A copy counts only while its bytes have the hashes that they had when they left storage:
where there is none, or a damaged one, a trial reads storage. Copies go with their holder's lease, at the latest with
the checkpoint.

It does not know: what is in a set, how long a checkpoint stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from evaljobs.contract.outcomes import RequestsStaged
from evaljobs.contract.paths import batch_file, batch_index_file, slug
from evaljobs.contract.specs import StageSpec
from evaljobs.errors import JobError, one_line
from evaljobs.staging import copy, owned_files
from evaljobs.staging.capacity import room
from evaljobs.staging.copy import Copy, copy_files, hash_file
from evaljobs.staging.owned_files import Refused
from evaljobs.staging.store import Slot

REQUESTS, SUMS = "requests", "sums.json"
MIB = 1 << 20
MARGIN = 64 * MIB  # left free on the root, as beside the weights
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def shelf_of(slot: Path, evaluation_dir: str) -> Path:
    """Where an evaluation's sets lie in a checkpoint's folder."""
    return slot / REQUESTS / slug(evaluation_dir)


def _set_name(folder: str, batch_size: int) -> str:
    return sha256(f"{folder}\0{batch_size}".encode()).hexdigest()[:32]


def _sources(folder: str, batch_size: int) -> tuple[Path, Path]:
    """What a trial reads of a set; the rest of its folder is the scorer's."""
    return batch_file(folder, batch_size), batch_index_file(folder, batch_size)


# --- the trial's side ------------------------------------------------------------------------------------------------


def copy_of(slot: Path | None, evaluation_dir: str, folder: str, batch_size: int) -> Path | None:
    """The folder of a set's copy on this node, every byte checked; None: read the set where it is.

    `slot`: the checkpoint's folder in node memory, None where the weights are not staged.
    """
    if slot is None:
        return None
    place = shelf_of(slot, evaluation_dir) / _set_name(folder, batch_size)
    rows = _rows(place)
    names = {source.name for source in _sources(folder, batch_size)}
    if rows.keys() != names:
        return None
    with contextlib.suppress(OSError):
        if all(_is_file(place / name) and hash_file(place / name) == rows[name][2] for name in names):
            return place
    return None


def _rows(place: Path) -> dict[str, tuple[int, int, str]]:
    """File name -> (size, mtime in ns, xxh3_128) of a copy; nothing where there is none that can be read."""
    try:
        rows = json.loads((place / SUMS).read_bytes())
        return {str(name): (int(row[0]), int(row[1]), str(row[2])) for name, row in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return {}


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.stat(follow_symlinks=False).st_mode)


# --- the holder's side -----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Shelf:
    """What a holder keeps of its evaluation's request sets, in the checkpoint's folder that it holds a lease in."""

    spec: StageSpec
    slot: Slot
    stamp: tuple[int, int] | None = None  # of the coordinator's word that was followed
    rounds: int = 0

    @property
    def place(self) -> Path:
        return shelf_of(self.slot.path, self.spec.evaluation_dir)

    def refresh(self, stop: threading.Event | None = None) -> RequestsStaged | None:
        """Copy what the coordinator has named since the last time; None where there is nothing new.

        Never raises for a set that cannot be copied: it is named in `why`, and trials read it from storage.
        """
        told = self._told()
        if told is None:
            return None
        started = time.monotonic()
        folders, batch_size = told
        wanted, reasons = self._choose(folders, batch_size)
        kept = copied = count = 0
        for folder, size in wanted:
            try:
                fresh = self._keep(folder, batch_size, stop)
            except (JobError, copy.TargetFailed, Refused, OSError) as error:
                reasons.append(one_line(error))
                continue
            count, kept, copied = count + 1, kept + size, copied + (size if fresh else 0)
        self.rounds += 1
        return RequestsStaged(
            name=f"{self.spec.name}.requests-{self.rounds}",
            node=self.spec.node,
            sets=count,
            bytes=kept,
            storage_bytes=copied,
            seconds=time.monotonic() - started,
            why=f"{len(folders) - count} request sets are read from storage: {reasons[0]}" if reasons else "",
        )

    def clear(self) -> int:
        """Remove the copies; gives the bytes freed. Trials that still want one read storage."""
        with contextlib.suppress(FileNotFoundError, Refused):
            shelves = owned_files.open_folder(self.slot.fd, REQUESTS, where=str(self.slot.path))
            try:
                return owned_files.remove_tree(shelves, self.place.name)
            finally:
                os.close(shelves)
        return 0

    def _told(self) -> tuple[Mapping[str, str], int] | None:
        """Leaf task -> folder, and the batch size, where the coordinator's word is new."""
        try:
            found = Path(self.spec.request_sets_file or "").stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if self.spec.request_sets_file is None or stamp == self.stamp:
                return None
            told = json.loads(Path(self.spec.request_sets_file).read_bytes())
        except (OSError, ValueError):
            return None  # not there yet, or storage is away: no news
        self.stamp = stamp
        return told["request_sets"], int(told["batch_size"])

    def _choose(self, folders: Mapping[str, str], batch_size: int) -> tuple[list[tuple[str, int]], list[str]]:
        """(folder, bytes) of the sets that fit, the smallest first, and why others do not."""
        reasons: list[str] = []
        sizes: list[tuple[int, str]] = []
        for folder in sorted(set(folders.values())):
            try:
                sizes.append((sum(s.stat().st_size for s in _sources(folder, batch_size)), folder))
            except OSError as error:
                reasons.append(one_line(error))
        there = room(self.slot.root)
        free = int(there.free * (1.0 if self.spec.share is None else self.spec.share)) - MARGIN
        left = self.spec.requests_mb * MIB
        chosen: list[tuple[str, int]] = []
        for size, folder in sorted(sizes):
            if size > left:
                reasons.append(f"they exceed [stage] requests_mb = {self.spec.requests_mb}")
                break
            if size > free and not (self.place / _set_name(folder, batch_size)).exists():
                reasons.append(f"{there.free / 1e9:.2f} GB are {there.limit}")
                break
            chosen.append((folder, size))
            left, free = left - size, free - size
        return chosen, reasons

    def _keep(self, folder: str, batch_size: int, stop: threading.Event | None) -> bool:
        """See that a whole copy of this set is there; whether it had to be read from storage."""
        sources = {source.name: source for source in _sources(folder, batch_size)}
        found = {name: source.stat() for name, source in sources.items()}
        rows = _rows(self.place / _set_name(folder, batch_size))
        same = all(rows.get(n, (0, 0))[:2] == (f.st_size, f.st_mtime_ns) for n, f in found.items())
        if same and copy_of(self.slot.path, self.spec.evaluation_dir, folder, batch_size) is not None:
            return False  # of this holder's killed predecessor, or of an earlier word
        shelves = owned_files.open_folder(self.slot.fd, REQUESTS, where=str(self.slot.path), create=True)
        try:
            shelf = owned_files.open_folder(
                shelves, self.place.name, where=str(self.place.parent), create=True
            )
        finally:
            os.close(shelves)
        name = _set_name(folder, batch_size)
        try:
            owned_files.remove_tree(shelf, f"{name}.part")
            os.mkdir(f"{name}.part", 0o700, dir_fd=shelf)
            part = self.place / f"{name}.part"
            sums = _copy(sources, found, part, readers=self.spec.readers, stop=stop)
            rows = {n: (f.st_size, f.st_mtime_ns, sums[n]) for n, f in found.items()}
            (part / SUMS).write_text(json.dumps(rows), encoding="utf-8")
            owned_files.remove_tree(shelf, name)
            os.rename(part, name, dst_dir_fd=shelf)
        except BaseException:
            owned_files.remove_tree(shelf, f"{name}.part")
            raise
        finally:
            os.close(shelf)
        return True


def _copy(
    sources: Mapping[str, Path],
    found: Mapping[str, os.stat_result],
    place: Path,
    *,
    readers: int,
    stop: threading.Event | None,
) -> dict[str, str]:
    """Copy these files into `place`; their hashes. Raises SourceChanged, Stopped, TargetFailed, OSError."""
    targets: dict[str, int] = {}
    try:
        for name, status in found.items():
            targets[name] = os.open(place / name, _NEW, 0o600)
            os.ftruncate(targets[name], status.st_size)
        copies = [
            Copy(
                name=name,
                source=sources[name],
                size=status.st_size,
                mtime_ns=status.st_mtime_ns,
                target=targets[name],
            )
            for name, status in found.items()
        ]
        return copy_files(copies, readers=readers, stop=stop)
    finally:
        for descriptor in targets.values():
            os.close(descriptor)
