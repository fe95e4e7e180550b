"""Our folder in a node's memory: its layout, its locks, and who holds or reads a copy.

    <root>/evalspan-<uid>/          0700, ours, no link; its lock (flock) guards every change of names below it
        <digest>/                   a checkpoint; its lock (flock) is shared by those who read or verify a whole copy, and
                                    exclusive to the one process that copies or removes
            held.lock               held shared by each precursor while it lives: its lease on the copy
            incoming/               half-written; trials do not read it
            model/                  the files, whole once manifest.json exists
            manifest.json           written last: sizes and hashes
        retired-<digest>-<nonce>/   out of use: any of our processes may remove it

Rules: names change only under the home's lock. A checkpoint with a living lease is not touched by other jobs. A home that
another user owns or may write to, or that is a link, is refused and left alone. Locks are the kernel's: those of a killed
process end at once. A dead precursor's copy stays for its successor until a precursor (not a prefetch) stages there.
`trial/trial.py` uses `reading` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaljobs.contract.storage import try_lock
from evaljobs.staging import segments

# File /dev/shm/evalspan-UID/DIGEST/held.lock: locked (flock) by each precursor while it lives | a precursor | with the copy
# File /dev/shm/evalspan-UID/DIGEST/incoming/…: half-written weights | a precursor | once they are whole
# File /dev/shm/evalspan-UID/DIGEST/model/…: the checkpoint's weights, whole once manifest.json is there | a precursor | at the
# end of the last evaluation that needs them, or when the coordinator's lease expires; `evalspan clean`
# File /dev/shm/evalspan-UID/DIGEST/manifest.json: sizes and hashes, written last | a precursor | with the copy
# File /dev/shm/evalspan-UID/retired-DIGEST-RANDOM/…: a copy out of use | a precursor | at once; by any later job; `evalspan
# clean`
MODEL, INCOMING, MANIFEST = "model", "incoming", "manifest.json"
HELD_LOCK = "held.lock"
RETIRED_PREFIX = "retired-"
DIGEST_NAME = re.compile(r"[0-9a-f]{16,64}")


class StoreRefused(Exception):  # noqa: N818 (a fact about the node)
    """This memory cannot be used; the message says what was found there, and what to do about it."""


# --- locks -----------------------------------------------------------------------------------------------------------


def open_lock(path: Path, *, shared: bool = False) -> int | None:
    """Lock a file or folder, returning a descriptor to close; None if it is not free, or the name is gone."""
    with contextlib.ExitStack() as undo, contextlib.suppress(FileNotFoundError):
        taken = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        undo.callback(os.close, taken)
        if try_lock(taken, shared=shared) and same_file(taken, path):
            undo.pop_all()
            return taken
    return None


def is_locked(path: Path) -> bool:
    """Return whether a living process holds a checkpoint's lock: its folder a trial, HELD_LOCK a precursor."""
    if (taken := open_lock(path)) is not None:
        os.close(taken)
        return False
    return path.exists()


def same_file(descriptor: int, path: Path) -> bool:
    """Return whether an open file or folder still has this name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


# --- the home --------------------------------------------------------------------------------------------------------


HOME_NAME = re.compile(r"evalspan-\d+")
LOCK_SECONDS = 60.0  # longest wait for another process that changes names in a home


def home_name(uid: int) -> str:
    return f"evalspan-{uid}"


@contextlib.contextmanager
def locked_home(root: str | Path, *, create: bool = False) -> Iterator[Path]:
    """Lock our home below `root`, so that names in it may be changed. Leaves no empty home behind.

    Raises FileNotFoundError if there is none (and `create` is off), Refused, OSError.
    """
    home = Path(root) / home_name(os.geteuid())
    with contextlib.ExitStack() as stack:
        while True:
            if create:
                with contextlib.suppress(FileExistsError):
                    home.mkdir(mode=0o700)
            folder = _open_home(home)
            stack.callback(os.close, folder)
            # changing names takes milliseconds, or a reader's patience
            if not try_lock(folder, wait=LOCK_SECONDS):
                raise StoreRefused(
                    f"{home} has been locked by another process for {LOCK_SECONDS:.0f} s: is a job suspended?"
                )
            if same_file(folder, home):  # a process that empties a home removes it
                break
        yield home
        if not any(home.iterdir()):
            home.rmdir()


def _open_home(home: Path) -> int:
    what = "is not ours and was left alone; remove it if it should not be there"
    try:
        folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreRefused(f"{home} ({error.strerror}) {what}") from error
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        os.close(folder)
        raise StoreRefused(f"{home} (of uid {found.st_uid}, mode {found.st_mode & 0o777:o}) {what}")
    return folder


def remove_tree(folder: Path) -> int:
    """Remove a folder with its contents, if it exists; return the bytes of its files."""
    freed = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    return freed


# --- a checkpoint's folder -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A checkpoint's folder, kept by this process's `lease`, an open and locked HELD_LOCK."""

    root: Path
    path: Path
    lease: int

    @property
    def model(self) -> Path:
        return self.path / MODEL

    def lost(self) -> bool:
        """Whether another process (`clean --all`, an epilog) has removed the folder."""
        return not same_file(self.lease, self.path / HELD_LOCK)


def join_slot(root: str | Path, digest: str) -> Slot:
    """Take a lease on a checkpoint's folder, creating it if necessary. Raise Refused, OSError (ENOSPC)."""
    with locked_home(root, create=True) as home:
        path = home / digest
        path.mkdir(mode=0o700, exist_ok=True)
        lease = os.open(path / HELD_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try_lock(lease, shared=True, wait=math.inf)  # another process only tries it under the home's lock
        return Slot(root=Path(root), path=path, lease=lease)


def leave_slot(slot: Slot, *, patience: float = 10.0, damaged: bool = False) -> int:
    """Give the lease back; the last living precursor removes the checkpoint, and any removes a damaged one. Return the bytes
    freed.

    Trials get `patience` seconds to exit; then the names go, and each trial keeps what it has mapped.
    """
    lost = slot.lost()
    os.close(slot.lease)
    with contextlib.suppress(FileNotFoundError), locked_home(slot.root) as home:
        if not lost and (damaged or not is_locked(slot.path / HELD_LOCK)):
            return remove_tree(_retire(home, slot.path.name, patience))
    return 0


def _retire(home: Path, digest: str, patience: float) -> Path:
    """Take a checkpoint out of use atomically, once no process reads it, or after `patience` seconds; return its remains."""
    deadline = time.monotonic() + patience
    while (taken := open_lock(home / digest)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:  # while the lock is held no new reader comes
        return (home / digest).rename(home / f"{RETIRED_PREFIX}{digest}-{secrets.token_hex(4)}")
    finally:
        if taken is not None:
            os.close(taken)


def remove_unused(
    home: Path,
    *,
    keep: str = "",
    retired_only: bool = False,
    even_used: bool = False,
    patience: float = 0.0,
) -> dict[str, int | None]:
    """Remove what no living precursor holds and no trial reads: retired checkpoints, and every other one except `keep`.

    Return name -> bytes freed, None for one in use. With `even_used` none is kept: trials get `patience` seconds to exit.
    """
    found: dict[str, int | None] = {}
    for path in sorted(home.iterdir()):
        if path.name.startswith(RETIRED_PREFIX):
            found[path.name] = remove_tree(path)
        elif DIGEST_NAME.fullmatch(path.name) and path.name != keep and not retired_only:
            used = not even_used and (is_locked(path / HELD_LOCK) or is_locked(path))
            found[path.name] = None if used else remove_tree(_retire(home, path.name, patience))
    return found


# --- the `clean` verb -----------------------------------------------------------------------------------------------


def clean_copies(root: str | Path, *, everything: bool = False, patience: float = 2.0) -> dict[str, Any]:
    """Remove copies below `root` that are not in use, or with `everything` all: a living precursor notices and exits.

    Return what was done, as `clean` prints it; `kept`: copies in use; `problems`: names that are not evalspan's, left alone,
    or why none could be removed. `patience`: seconds for a trial to finish opening files.
    """
    found: dict[str, int | None] = {}
    problems = []
    try:
        with locked_home(root) as home:
            found = remove_unused(home, even_used=everything, patience=patience)
            strange = [path for path in home.iterdir() if path.name not in found]
            problems = [f"{path} is not one of evalspan's names: it was left alone" for path in strange]
    except FileNotFoundError:
        pass
    except (StoreRefused, OSError) as error:
        problems = [str(error)]
    return {
        "root": str(root),
        "freed_bytes": sum(freed or 0 for freed in found.values()),
        "removed": [name for name, freed in found.items() if freed is not None],
        "kept": [name for name, freed in found.items() if freed is None],
        "problems": problems,
    }


def clean_main(argv: Sequence[str]) -> int:
    """Run the `clean` verb: print one JSON object per root. Exit status 1 if something was left alone."""
    parser = argparse.ArgumentParser(prog="python -m evaljobs clean", description="Remove unused copies.")
    parser.add_argument("--root", action="append", help="default: /dev/shm")
    parser.add_argument("--all", action="store_true", help="copies in use, too")
    chosen = parser.parse_args(argv)
    status = 0
    segments.sweep_segments()
    for root in chosen.root or ["/dev/shm"]:
        done = clean_copies(root, everything=chosen.all)
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(done) + "\n")
        status |= bool(done["problems"])
    return int(status)


# --- the trial's side ------------------------------------------------------------------------------------------------


class NotStaged(FileNotFoundError):  # noqa: N818 (a fact about a path)
    """A staged path without a complete copy (not yet, or no longer)."""


def slot_of(model_path: str | Path) -> Path | None:
    """Return the checkpoint folder of a staged model path; None if the path is not staged."""
    path = Path(model_path)
    ours = (
        path.name == MODEL
        and DIGEST_NAME.fullmatch(path.parent.name)
        and HOME_NAME.fullmatch(path.parent.parent.name)
    )
    return path.parent if ours else None


@contextlib.contextmanager
def hold_for_reading(model_path: str | Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock on staged weights, so that their names stay until they are loaded; does nothing for other paths.

    A trial holds it until it ends. Waits up to `wait_seconds` for a copy in progress, logging its progress. Raises NotStaged.
    """
    slot = slot_of(model_path)
    if slot is None:
        yield
        return
    deadline, said = time.monotonic() + wait_seconds, 0.0
    while (taken := _lock_whole(slot)) is None:
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
        os.close(taken)


def _lock_whole(slot: Path) -> int | None:
    """Return a shared lock on a complete copy; None if there is none (yet)."""
    taken = open_lock(slot, shared=True)
    if taken is None or (slot / MANIFEST).exists():
        return taken
    os.close(taken)
    return None


def _copied(slot: Path) -> int:
    """Return the bytes of a copy in progress (written pages, not the files' sizes)."""
    with contextlib.suppress(OSError):
        return sum(f.stat().st_blocks * 512 for f in (slot / INCOMING).rglob("*"))
    return 0
