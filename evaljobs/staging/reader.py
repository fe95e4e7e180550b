"""The trial's side of staged weights: wait for a whole copy, and keep it from being written over while it is mapped.

Rule: nothing is read before its manifest is there, nor without the readers' lock, which whoever takes retired files
over must have alone.

It does not know: who staged it, or what is in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from evaljobs.staging import owned_files, store


class NotStaged(FileNotFoundError):  # noqa: N818 (a fact about a path)
    """A staged path whose checkpoint is not (or no longer) whole."""


def slot_of(model_path: str | Path) -> Path | None:
    """The checkpoint folder that a staged model path lies in; None where the path is not staged."""
    path = Path(model_path)
    ours = (
        path.name == store.MODEL
        and store.DIGEST.fullmatch(path.parent.name)
        and re.fullmatch(r"evalspan-\d+", path.parent.parent.name)
    )
    return path.parent if ours else None


@contextlib.contextmanager
def reading(model_path: str | Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Keep staged weights from being written over while this process maps them; nothing for other paths.

    Hold it from before the load until the model is gone. Waits up to `wait_seconds` for a copy under way, with
    progress in the log. Raises NotStaged.
    """
    slot = slot_of(model_path)
    if slot is None:
        yield
        return
    deadline, said = time.monotonic() + wait_seconds, 0.0
    while (lock := _reader_lock(slot)) is None:
        if time.monotonic() >= deadline:
            raise NotStaged(errno.ENOENT, "no whole staged checkpoint", str(model_path))
        if time.monotonic() - said > 5.0:
            said = time.monotonic()
            said_now = f"waiting for {model_path}: {_copied(slot) / 1e9:.2f} GB are there"
            print(time.strftime("%H:%M:%S"), said_now, file=sys.stderr, flush=True)  # noqa: T201
        time.sleep(0.05)
    try:
        yield
    finally:
        os.close(lock)


def _reader_lock(slot: Path) -> int | None:
    """A shared lock on a whole checkpoint; None where there is none (yet)."""
    path = slot / store.READERS_LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if (
            os.fstat(lock).st_uid == os.geteuid()
            and owned_files.try_flock(lock, shared=True)
            and os.path.samestat(os.fstat(lock), path.stat(follow_symlinks=False))
            and (slot / store.MANIFEST).exists()
        ):
            kept, lock = lock, -1
            return kept
    except FileNotFoundError:
        return None
    finally:
        if lock >= 0:
            os.close(lock)
    return None


def _copied(slot: Path) -> int:
    """Bytes of a copy under way (pages there, not promised)."""
    with contextlib.suppress(OSError):
        return sum(f.stat().st_blocks * 512 for f in (slot / store.INCOMING).rglob("*"))
    return 0
