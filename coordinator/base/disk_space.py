"""Says of a full disk or a used-up quota where it is and how much is free.

Rule: one line for both, and for every file of a folder, so that a trouble seen in many places is shown once. Called
where an OSError is shown to a person.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

SHORT = frozenset({errno.ENOSPC, errno.EDQUOT})
FEW_FILES = 100  # files that a disk has room for, below which their number may be what is short
RESUMES = "free some, or give --work-dir another folder; the same command resumes"  # for a command that ends


def shortage(error: BaseException, folder: Path | None = None) -> str:
    """The disk that `error` or its cause found full, with its free space; "" for any other error.

    `folder`: named where the error names no file, or one in it; None: the error's file alone counts.
    """
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno in SHORT):
        cause = cause.__cause__
    if not isinstance(cause, OSError):
        return ""
    if isinstance(cause.filename, str) and not (folder and Path(cause.filename).is_relative_to(folder)):
        folder = Path(cause.filename).absolute().parent
    if folder is None:
        return f"a disk that this command writes to is full ({cause.strerror})"
    while not folder.exists() and folder != folder.parent:  # it was to be made
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
