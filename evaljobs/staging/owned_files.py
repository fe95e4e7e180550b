"""Folders, locks and files of this user, in places where other users write too.

Rules: every name is opened relative to an open folder, and links are not followed. What belongs to another user, or is
writable by others, is refused in one line and left alone. Locks are the kernel's (flock): they end with their process.

Called by every module of this room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):  # noqa: N818 (a fact about the node)
    """This memory cannot be used, in one line: what was found there, and what to do about it."""


# --- folders ---------------------------------------------------------------------------------------------------------


def open_root(root: str | Path) -> int:
    """A descriptor of `root`, where other users can neither rename nor replace our files. Raises Refused."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(f"{root}: {error.strerror}") from error
    found = os.fstat(descriptor)
    if found.st_uid not in (0, os.geteuid()):
        os.close(descriptor)
        raise Refused(f"{root} belongs to uid {found.st_uid}, who could replace what is put there")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        os.close(descriptor)
        raise Refused(f"{root} is writable by others and not sticky: they could replace what is put there")
    return descriptor


def open_folder(parent: int, name: str, *, where: str, create: bool = False) -> int:
    """Open (or make, 0700) our folder `name` in `parent`, following no link. FileNotFoundError; Refused if not ours."""
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    try:
        descriptor = os.open(name, DIR_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        raise
    except OSError as error:
        kind = "a link or no folder" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
        raise Refused(
            f"{where}/{name} is {kind}: it was left alone; remove it if it should not be there"
        ) from error
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        os.close(descriptor)
        raise Refused(
            f"{where}/{name} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}:"
            " it is not ours and was left alone; remove it if it should not be there"
        )
    return descriptor


def names_in(folder: int) -> list[str]:
    """Sorted names in an open folder."""
    return sorted(os.listdir(folder))


def open_lock(parent: int, name: str) -> int:
    """Open a lock file in an open folder, made if it is missing."""
    return os.open(name, FILE_FLAGS | os.O_CREAT, 0o600, dir_fd=parent)


def still_there(descriptor: int, parent: int, name: str) -> bool:
    try:
        named = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), named)


def try_flock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock if it is free; whether it was taken."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def flock_within(descriptor: int, seconds: float) -> bool:
    """Take the lock, waiting up to `seconds`; whether it was taken."""
    deadline = time.monotonic() + seconds
    while not try_flock(descriptor):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def remove_tree(parent: int, name: str) -> int:
    """Remove `name` and all below it; gives the bytes freed. Links are removed, never followed.

    Another process may remove the same names meanwhile.
    """
    freed = 0
    try:
        folder = os.open(name, DIR_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        with contextlib.suppress(FileNotFoundError):
            freed = os.stat(name, dir_fd=parent, follow_symlinks=False).st_size
            os.unlink(name, dir_fd=parent)
        return freed
    try:
        for child in names_in(folder):
            freed += remove_tree(folder, child)
    finally:
        os.close(folder)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)
    return freed
