"""Describes a full disk or exhausted quota, with its location and free space.

Rule: one line for both, and for every file of a folder, so that a problem seen in many places is shown once. Called where an
OSError is shown to a user.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
FEW_FILES = 100  # free inodes below which their number may be the problem
FREE_SPACE_ADVICE = (
    "free some space, or pass another --work-dir; run the same command to resume"  # for a command that ends
)


def disk_shortage(error: BaseException, folder: Path | None = None) -> str:
    """Describe the disk that `error` or its cause found full, with its free space; "" for any other error.

    `folder`: named if the error names no file, or one in it; None: only the error's file counts.
    """
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRORS):
        cause = cause.__cause__
    if not isinstance(cause, OSError):
        return ""
    if isinstance(cause.filename, str) and not (folder and Path(cause.filename).is_relative_to(folder)):
        folder = Path(cause.filename).absolute().parent
    if folder is None:
        return f"a disk that this command writes to is full ({cause.strerror})"
    while not folder.exists() and folder != folder.parent:  # it was to be created
        folder = folder.parent
    if cause.errno == errno.EDQUOT:
        return (
            f"your disk quota for {folder} is used up ({_free(folder)} on its disk; `quota -s` shows yours)"
        )
    return f"the disk of {folder} is full ({_free(folder)})"


def _free(folder: Path) -> str:
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        return f"its free space cannot be read: {error.strerror}"
    files = f" and {disk.f_favail} files" if disk.f_favail < FEW_FILES else ""
    return f"{disk.f_bavail * disk.f_frsize / 1e6:.1f} MB{files} free"
