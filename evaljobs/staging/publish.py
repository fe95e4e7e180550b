"""Fill a checkpoint's folder in node memory and publish it whole, or verify the one that is published.

Rules: the caller holds the folder's stage lock. Files are written below `incoming`, which nobody reads; `model` and then
the manifest get their names only when sizes, hashes and identity agree with what was announced. Pages are taken over
from a retired checkpoint only with no reader's lock on it and the kernel's word (a write lease) that no process has the
file open or mapped.

It does not know: leases' lives, rungs, signals.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evaljobs.contract.specs import CheckpointFile, CheckpointSpec
from evaljobs.contract.storage import write_atomic
from evaljobs.staging import owned_files, store
from evaljobs.staging.capacity import room
from evaljobs.staging.copy import (
    Copy,
    ReadBlock,
    SourceChanged,
    Stopped,
    TargetFailed,
    copy_files,
    hash_file,
)
from evaljobs.staging.fingerprint import BadWeights, identity, is_safe_name
from evaljobs.staging.huge_pages import Purse, huge_pages
from evaljobs.staging.owned_files import Refused
from evaljobs.staging.store import INCOMING, MANIFEST, MODEL, Home, Slot

WORTH = 1 << 20  # bytes: smaller files are not worth taking over
NEAR = 0.1  # a spare file is taken for one that is at most this share larger or smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What it took: bytes that left storage, whether pages were taken over, and notes for the report."""

    storage_bytes: int
    recycled: bool
    notes: tuple[str, ...] = ()


def is_published(slot: Slot) -> bool:
    return (slot.path / MANIFEST).exists()


def verify_slot(slot: Slot, checkpoint: CheckpointSpec, *, readers: int) -> list[str]:
    """Names of published files that are not what was copied (or not what was announced). Reads every byte."""
    manifest = owned_files.read_json(slot.fd, MANIFEST) or {}
    rows = manifest.get("files")
    if not isinstance(rows, dict) or set(rows) != {f.name for f in checkpoint.files}:
        return [MANIFEST]

    def bad(file: CheckpointFile) -> bool:
        with contextlib.suppress(OSError):
            path = slot.model / file.name
            found = path.stat(follow_symlinks=False)
            good = stat.S_ISREG(found.st_mode) and found.st_size == file.size
            return (
                not good or hash_file(path) != rows[file.name] or file.xxh3_128 not in (None, rows[file.name])
            )
        return True

    with ThreadPoolExecutor(max_workers=max(1, readers)) as pool:
        return [
            f.name
            for f, wrong in zip(checkpoint.files, pool.map(bad, checkpoint.files), strict=True)
            if wrong
        ]


def withdraw(slot: Slot) -> None:
    """Take a damaged copy out of use: the manifest first. Who has mapped it keeps its pages; they are not reused."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MANIFEST, dir_fd=slot.fd)
    owned_files.remove_tree(slot.fd, MODEL)


# --- room and recycling ----------------------------------------------------------------------------------------------


def _untouched(descriptor: int) -> bool:
    """Whether no other process has this file open or mapped (fcntl(2): a write lease is granted only then).

    False where the file system grants no leases: then nothing is ever taken over.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _spare(path: Path) -> int | None:
    """Open a file of ours whose pages may be written over; None where they may not."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
    if alone and _untouched(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _files_below(folder: Path) -> list[tuple[int, Path]]:
    """(bytes, path) of the regular files below a folder of ours, the largest first."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_size, path))
    return sorted(found, reverse=True)


def _pick(wanted: list[CheckpointFile], sources: list[tuple[int, Path]]) -> dict[str, Path]:
    """For each wanted file the spare that is nearest in size, if any is near. Pure but for the paths' names."""
    chosen: dict[str, Path] = {}
    left = [s for s in sources if s[0] >= WORTH]
    for file in sorted((f for f in wanted if f.size >= WORTH), key=lambda f: -f.size):
        near = [s for s in left if abs(s[0] - file.size) <= NEAR * file.size]
        if near:
            best = min(near, key=lambda s: (abs(s[0] - file.size), str(s[1])))
            left.remove(best)
            chosen[file.name] = best[1]
    return chosen


def _take_over(home: Home, slot: Slot, checkpoint: CheckpointSpec) -> dict[str, int]:
    """Move files of retired checkpoints (and of a killed copy here) below `incoming`; name -> open file."""
    store.retire_part(home, slot, INCOMING)
    spares: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        sources: list[tuple[int, Path]] = []
        for name in store.retired(home):
            with contextlib.suppress(Refused, FileNotFoundError):
                folder = owned_files.open_folder(home.fd, name, where=str(home.path))
                stack.callback(os.close, folder)
                if stack.enter_context(store.readers_gone(folder, 0.0)):
                    sources += _files_below(home.path / name / MODEL) + _files_below(
                        home.path / name / INCOMING
                    )
        for name, path in _pick(list(checkpoint.files), sources).items():
            target = _target_path(slot.path / INCOMING, name)
            path.rename(target)  # to a name that nobody else opens; only then is it asked whether anybody has
            descriptor = _spare(target)
            if descriptor is None:
                target.unlink()  # its readers keep what they have mapped
            else:
                spares[name] = descriptor
    return spares


def _target_path(folder: Path, name: str) -> Path:
    """Where a file goes below `folder` (made if need be). Names that leave it are refused."""
    if not is_safe_name(name):
        raise SourceChanged(f"{name!r} is no name of a checkpoint's file")
    path = folder / PurePosixPath(name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def make_room(
    slot: Slot, checkpoint: CheckpointSpec, *, margin: int, share: float | None = None
) -> dict[str, int]:
    """Retire what nobody holds any more, take over its files, remove the rest; then see that the copy fits.

    Gives the files taken over (name -> open file). With `share`, new pages may take only that part of what is free, and
    what a dead holder's successor may want is left to it. Raises Refused where there is no room.
    """
    with store.locked_home(slot.root) as home:
        now = time.time()
        store.retire_abandoned(home, now=now, keep=slot.digest)
        if share is None and room(slot.root).free < checkpoint.bytes + margin:
            store.retire_abandoned(home, now=now, keep=slot.digest, even_unexpired=True)
        spares = _take_over(home, slot, checkpoint)
        need = sum(f.size for f in checkpoint.files if f.name not in spares) + margin
        for name in store.retired(home):
            if room(slot.root).free < need or not store.is_kept(home, name, now=now):
                owned_files.remove_tree(home.fd, name)
    there = room(slot.root)
    if there.free * (1.0 if share is None else share) < need:
        close_all(spares)
        part = "" if share is None else f"{share:g} of "
        raise Refused(
            f"{slot.root}: {need / 1e9:.2f} GB are needed, {part}{there.free / 1e9:.2f} GB are {there.limit}"
        )
    return spares


def close_all(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()


# --- copying in ------------------------------------------------------------------------------------------------------


def copy_in(
    slot: Slot,
    checkpoint: CheckpointSpec,
    spares: dict[str, int],
    *,
    readers: int,
    stop: threading.Event | None = None,
    progress: Callable[[int], None] = lambda _: None,
    read: ReadBlock = os.preadv,
) -> Published:
    """Copy the checkpoint below `incoming`, check it, publish it. Takes the open `spares` over.

    Raises SourceChanged, Stopped, TargetFailed (no space …), OSError of the source. Nothing is published then.
    """
    incoming = slot.path / INCOMING
    source = Path(checkpoint.source)
    targets = dict(spares)
    spares.clear()
    recycled = any(os.fstat(fd).st_size for fd in targets.values())
    purse, in_memory = Purse(), room(slot.root).rung == "shm"
    with contextlib.ExitStack() as mapped:
        mapped.callback(close_all, targets)
        copies = []
        for file in checkpoint.files:
            path = _target_path(incoming, file.name)
            fresh = file.name not in targets
            if fresh:
                targets[file.name] = _create(path)
            target = targets[file.name]
            _resize(target, file.size, path)
            pages = (
                mapped.enter_context(huge_pages(target, file.size, purse)) if fresh and in_memory else None
            )
            copies.append(
                Copy(
                    name=file.name,
                    source=source / file.name,
                    size=file.size,
                    mtime_ns=file.mtime_ns,
                    target=target,
                    pages=pages,
                )
            )
        sums = copy_files(copies, readers=readers, stop=stop, progress=progress, read=read)
    _check(checkpoint, sums, incoming)
    if stop is not None and stop.is_set():
        raise Stopped("asked to stop before the copy was published")
    owned_files.remove_tree(slot.fd, MODEL)  # left without a manifest by a killed predecessor
    os.rename(INCOMING, MODEL, src_dir_fd=slot.fd, dst_dir_fd=slot.fd)
    manifest = json.dumps({"digest": checkpoint.digest, "files": sums})
    write_atomic(slot.path / MANIFEST, manifest.encode(), mode=0o600)
    return Published(storage_bytes=checkpoint.bytes, recycled=recycled)


def _create(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise TargetFailed(f"{path}: {error.strerror}") from error


def _resize(descriptor: int, size: int, path: Path) -> None:
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise TargetFailed(f"{path}: {error.strerror}") from error


def _check(checkpoint: CheckpointSpec, sums: dict[str, str], incoming: Path) -> None:
    """Raise SourceChanged unless the copy has the announced hashes (where known) and the announced identity."""
    for file in checkpoint.files:
        if file.xxh3_128 not in (None, sums[file.name]):
            raise SourceChanged(
                f"{checkpoint.source}/{file.name} is not what was saved: its hash is {sums[file.name]},"
                f" {file.xxh3_128} was written down at save time"
            )
    try:
        found = identity(checkpoint.files, incoming)
    except BadWeights as error:
        raise SourceChanged(f"{checkpoint.source}: {error}") from error
    if found != checkpoint.digest:
        raise SourceChanged(f"{checkpoint.source} is {found}, not {checkpoint.digest} as announced")


# --- lingering -------------------------------------------------------------------------------------------------------


def linger(
    slot: Slot, seconds: float, stop: threading.Event, *, patience: float, retired: Callable[[], object]
) -> int:
    """Retire the checkpoint but stay as its holder for `seconds`, so that the next one may take its files over.

    `retired` is called once that is so. Gives the bytes that were left to free. Where others still hold it, only our
    lease goes.
    """
    name = store.retire_held(slot, patience=patience)
    if name is None:
        return store.leave(slot, patience=patience)
    retired()
    deadline = time.monotonic() + seconds
    left = slot.root / store.home_name(os.geteuid()) / name
    while time.monotonic() < deadline and not stop.wait(0.2):
        if not any(size >= WORTH for size, _ in _files_below(left / MODEL)):
            break  # taken over
    try:
        with contextlib.suppress(FileNotFoundError), store.locked_home(slot.root) as home:
            return owned_files.remove_tree(home.fd, name)
        return 0
    finally:
        slot.close()
