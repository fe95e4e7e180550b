"""One checkpoint's folder in node memory: make room, copy the files in, publish them whole, or verify a published copy.

Rules: the caller holds the folder's stage lock. Files are written below `incoming`, which trials do not read. `model`
and then the manifest get their names only when sizes, hashes and identity are those that were announced.

Called by `precursor.py` alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from evaljobs.staging.fingerprint import announced_mtime, check_identity, content_of
from evaljobs.staging.owned_files import Refused
from evaljobs.staging.store import INCOMING, MANIFEST, MODEL, Slot


def is_published(slot: Slot) -> bool:
    return (slot.path / MANIFEST).exists()


def verify_slot(slot: Slot, checkpoint: CheckpointSpec, *, readers: int) -> list[str]:
    """Names of published files that differ from what was copied or announced. Reads every byte."""
    try:
        rows = json.loads((slot.path / MANIFEST).read_bytes())["files"]
        if not isinstance(rows, dict) or set(rows) != {f.name for f in checkpoint.files}:
            return [MANIFEST]
    except (OSError, ValueError, LookupError, TypeError):
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


def content(slot: Slot) -> str:
    """What `fingerprint.content_of` says of the published copy, whose files were hashed while they were copied."""
    return content_of(json.loads((slot.path / MANIFEST).read_bytes())["files"])


def withdraw(slot: Slot) -> None:
    """Remove a damaged copy, its manifest first. A trial that has mapped it keeps its pages."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MANIFEST, dir_fd=slot.fd)
    owned_files.remove_tree(slot.fd, MODEL)


def make_room(slot: Slot, checkpoint: CheckpointSpec, *, margin: int, share: float | None = None) -> None:
    """Remove unused copies of other checkpoints, and the half-written one here; then see that the copy fits.

    A prefetch (`share` is set) removes only what is retired, and takes only that part of what is free. Raises Refused
    where there is no room.
    """
    need = checkpoint.bytes + margin
    with store.locked_home(slot.root) as home:
        owned_files.remove_tree(slot.fd, INCOMING)
        store.remove_unused(home, keep=slot.digest, retired_only=share is not None)
    there = room(slot.root)
    if there.free * (1.0 if share is None else share) < need:
        part = "" if share is None else f"{share:g} of "
        raise Refused(
            f"{slot.root}: {need / 1e9:.2f} GB are needed, {part}{there.free / 1e9:.2f} GB are {there.limit}"
        )


# --- copying in ------------------------------------------------------------------------------------------------------


def copy_in(
    slot: Slot,
    checkpoint: CheckpointSpec,
    *,
    readers: int,
    stop: threading.Event | None = None,
    progress: Callable[[int], None] = lambda _: None,
    read: ReadBlock = os.preadv,
) -> None:
    """Copy the checkpoint below `incoming`, check it, publish it.

    Raises SourceChanged, Stopped, TargetFailed (no space …), OSError of the source. Nothing is published then.
    """
    incoming = slot.path / INCOMING
    source = Path(checkpoint.source)
    with contextlib.ExitStack() as opened:
        copies = []
        for file in checkpoint.files:
            target = _create(incoming / file.name, file.size)
            opened.callback(os.close, target)
            copies.append(
                Copy(
                    name=file.name,
                    source=source / file.name,
                    size=file.size,
                    mtime_ns=announced_mtime(file),
                    target=target,
                )
            )
        sums = copy_files(copies, readers=readers, stop=stop, progress=progress, read=read)
    _check(checkpoint, sums, incoming)
    if stop is not None and stop.is_set():
        raise Stopped("asked to stop before the copy was published")
    owned_files.remove_tree(slot.fd, MODEL)  # a precursor that was killed left it without a manifest
    os.rename(INCOMING, MODEL, src_dir_fd=slot.fd, dst_dir_fd=slot.fd)
    manifest = json.dumps({"digest": checkpoint.digest, "files": sums})
    write_atomic(slot.path / MANIFEST, manifest.encode(), mode=0o600)


def _create(path: Path, size: int) -> int:
    """A new file of `size` bytes, open for reading and writing. Raises TargetFailed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise TargetFailed(f"{path}: {error.strerror}") from error
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise TargetFailed(f"{path}: {error.strerror}") from error
    return descriptor


def _check(checkpoint: CheckpointSpec, sums: dict[str, str], incoming: Path) -> None:
    """Raise SourceChanged unless the copy has the announced identity and the hashes written at save time, if any."""
    for file in checkpoint.files:
        if file.xxh3_128 not in (None, sums[file.name]):
            raise SourceChanged(
                f"{checkpoint.source}/{file.name} is not what was saved: its hash is {sums[file.name]},"
                f" {file.xxh3_128} was written down at save time"
            )
    check_identity(checkpoint, incoming)
