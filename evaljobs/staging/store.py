"""Our folder in a node's memory: its layout, its locks, and who holds or reads a copy.

    <root>/evalspan-<uid>/          0700, ours, no link; its lock (flock) guards every change of names below it
        <digest>/                   a checkpoint
            stage.lock              held (flock) by the one process that copies or verifies
            readers.lock            held shared by each process that maps the weights
            held.lock               held shared by each precursor while it lives: its lease on the copy
            incoming/               half-written; trials do not read it
            model/                  the files, whole once manifest.json exists
            manifest.json           written last: sizes and hashes
        retired-<digest>-<nonce>/   out of use: any of our processes may remove it

Rules: names change only under the home's lock. A checkpoint with a living lease is not touched by other jobs. What
another user owns or may write to, and every link, is refused and left alone. Locks are the kernel's: those of a killed
process end at once. A dead precursor's copy stays for its successor until a precursor (not a prefetch) stages there.
`trial/trial.py` uses `reading` alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evaljobs.staging.owned_files import (
    Refused,
    flock_within,
    names_in,
    open_folder,
    open_lock,
    open_root,
    remove_tree,
    still_there,
    try_flock,
)

# File /dev/shm/evalspan-UID/DIGEST/stage.lock: locked (flock) by the one process that copies or verifies | a precursor |
# with the copy
# File /dev/shm/evalspan-UID/DIGEST/readers.lock: locked (flock) by each process that maps the weights | a precursor | with
# the copy
# File /dev/shm/evalspan-UID/DIGEST/held.lock: locked (flock) by each precursor while it lives | a precursor | with the copy
# File /dev/shm/evalspan-UID/DIGEST/incoming/…: half-written weights | a precursor | once they are whole
# File /dev/shm/evalspan-UID/DIGEST/model/…: the checkpoint's weights, whole once manifest.json is there | a precursor | at the
# end of the last evaluation that needs them, or when the coordinator's lease expires; `evalspan clean`
# File /dev/shm/evalspan-UID/DIGEST/manifest.json: sizes and hashes, written last | a precursor | with the copy
# File /dev/shm/evalspan-UID/retired-DIGEST-RANDOM/…: a copy out of use | a precursor | at once; by any later job; `evalspan
# clean`
MODEL, INCOMING, MANIFEST = "model", "incoming", "manifest.json"
STAGE_LOCK, HELD_LOCK, READERS_LOCK = "stage.lock", "held.lock", "readers.lock"
RETIRED = "retired-"
DIGEST = re.compile(r"[0-9a-f]{16,64}")
LOCK_SECONDS = 60.0  # names are changed in milliseconds: past this, something hangs


# --- the home and its lock -------------------------------------------------------------------------------------------


HOME = re.compile(r"evalspan-\d+")


def home_name(uid: int) -> str:
    return f"evalspan-{uid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Our folder below a root, open and locked: names in it may be changed."""

    fd: int
    path: Path


@contextlib.contextmanager
def locked_home(root: str | Path, *, create: bool = False) -> Iterator[Home]:
    """Open our home below `root` and lock it. Leaves no empty home behind.

    Raises FileNotFoundError where there is none (and `create` is off), Refused, TimeoutError.
    """
    name = home_name(os.geteuid())
    with contextlib.ExitStack() as stack:
        parent = open_root(root)
        stack.callback(os.close, parent)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            home = open_folder(parent, name, where=str(root), create=create)
            stack.callback(os.close, home)
            if not flock_within(home, deadline - time.monotonic()):
                raise TimeoutError(
                    f"{root}/{name} is locked for {LOCK_SECONDS:.0f} s: see which process holds it"
                )
            if still_there(home, parent, name):  # a process that empties a home removes it
                break
        yield Home(fd=home, path=Path(root) / name)
        if not names_in(home):
            os.rmdir(name, dir_fd=parent)


def is_locked(slot: int, name: str) -> bool:
    """Whether a living process holds a lock in an open checkpoint folder: HELD_LOCK a precursor, READERS_LOCK a trial."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=slot)
    except FileNotFoundError:
        return False
    try:
        return not try_flock(descriptor)
    finally:
        os.close(descriptor)


# --- a checkpoint's folder -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A checkpoint's folder, open, with this process's `lease`, an open and locked HELD_LOCK, which keeps it."""

    root: Path
    digest: str
    path: Path
    fd: int
    lease: int

    @property
    def model(self) -> Path:
        return self.path / MODEL

    def lost(self) -> bool:
        """Whether another process (`clean --all`, an epilog) has removed the folder."""
        with contextlib.suppress(FileNotFoundError):
            return not os.path.samestat(os.fstat(self.fd), self.path.stat(follow_symlinks=False))
        return True


def join(root: str | Path, digest: str) -> Slot:
    """Take a lease on a checkpoint's folder, made if need be. Raises Refused, TimeoutError, OSError (ENOSPC)."""
    if not DIGEST.fullmatch(digest):
        raise Refused(f"{digest!r} is no checkpoint digest")
    with locked_home(root, create=True) as home, contextlib.ExitStack() as undo:
        fd = open_folder(home.fd, digest, where=str(home.path), create=True)
        undo.callback(os.close, fd)
        os.close(open_lock(fd, READERS_LOCK))
        lease = open_lock(fd, HELD_LOCK)
        fcntl.flock(lease, fcntl.LOCK_SH)  # another process tries it under the home's lock alone
        undo.pop_all()
        return Slot(root=Path(root), digest=digest, path=home.path / digest, fd=fd, lease=lease)


def leave(slot: Slot, *, patience: float = 10.0) -> int:
    """Give the lease back; the last living precursor removes the checkpoint. Gives the bytes freed.

    Trials get `patience` seconds to end; then the names go, and each trial keeps what it has mapped.
    """
    try:
        fcntl.flock(slot.lease, fcntl.LOCK_UN)
        with contextlib.suppress(FileNotFoundError), locked_home(slot.root) as home:
            name = next((n for n in names_in(home.fd) if still_there(slot.fd, home.fd, n)), None)
            if name is not None and not is_locked(slot.fd, HELD_LOCK):
                with readers_gone(slot.fd, patience):
                    left = retire(home, name) if name == slot.digest else name
                return remove_tree(home.fd, left)
        return 0
    finally:
        os.close(slot.lease)
        os.close(slot.fd)


@contextlib.contextmanager
def readers_gone(slot: int, seconds: float) -> Iterator[None]:
    """Wait until no process reads this checkpoint, `seconds` at most, and keep new readers out."""
    lock = open_lock(slot, READERS_LOCK)
    try:
        flock_within(lock, seconds)
        yield
    finally:
        os.close(lock)


def retire(home: Home, digest: str) -> str:
    """Take a checkpoint out of use in one step; the name under which its remains lie."""
    name = f"{RETIRED}{digest}-{secrets.token_hex(4)}"
    os.rename(digest, name, src_dir_fd=home.fd, dst_dir_fd=home.fd)
    return name


def retire_unused(home: Home, digest: str, *, even_used: bool = False, patience: float = 0.0) -> str | None:
    """Retire a checkpoint that no living precursor holds and no trial reads; None where it stays, being used.

    With `even_used` it never stays: trials get `patience` seconds to end. Raises Refused, FileNotFoundError.
    """
    slot = open_folder(home.fd, digest, where=str(home.path))
    try:
        if not even_used and (is_locked(slot, HELD_LOCK) or is_locked(slot, READERS_LOCK)):
            return None
        with readers_gone(slot, patience):
            return retire(home, digest)
    finally:
        os.close(slot)


def remove_unused(home: Home, *, keep: str, retired_only: bool = False) -> None:
    """Remove what no living precursor holds and no trial reads: retired checkpoints, and each other one but `keep`."""
    for name in names_in(home.fd):
        if name != keep and DIGEST.fullmatch(name) and not retired_only:
            with contextlib.suppress(Refused, FileNotFoundError):
                retire_unused(home, name)
    for name in names_in(home.fd):
        if name.startswith(RETIRED):
            remove_tree(home.fd, name)


# --- the trial's side ------------------------------------------------------------------------------------------------


class NotStaged(FileNotFoundError):  # noqa: N818 (a fact about a path)
    """A staged path without a whole copy (not yet, or no more)."""


def slot_of(model_path: str | Path) -> Path | None:
    """The checkpoint folder that a staged model path lies in; None where the path is not staged."""
    path = Path(model_path)
    ours = (
        path.name == MODEL and DIGEST.fullmatch(path.parent.name) and HOME.fullmatch(path.parent.parent.name)
    )
    return path.parent if ours else None


@contextlib.contextmanager
def reading(model_path: str | Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the readers' lock on staged weights, so that their names stay until they are loaded; nothing for other paths.

    A trial holds it until it ends. Waits up to `wait_seconds` for a copy under way, with progress in the log. Raises
    NotStaged.
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
    """A shared lock on a whole copy; None where there is none (yet)."""
    path = slot / READERS_LOCK
    with contextlib.ExitStack() as undo, contextlib.suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        undo.callback(os.close, lock)
        found = os.fstat(lock)
        if (
            found.st_uid == os.geteuid()
            and try_flock(lock, shared=True)
            and os.path.samestat(found, path.stat(follow_symlinks=False))
            and (slot / MANIFEST).exists()
        ):
            undo.pop_all()
            return lock
    return None


def _copied(slot: Path) -> int:
    """Bytes of a copy under way (pages that are written, not the files' sizes)."""
    with contextlib.suppress(OSError):
        return sum(f.stat().st_blocks * 512 for f in (slot / INCOMING).rglob("*"))
    return 0
