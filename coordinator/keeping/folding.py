"""Folds the files of an ended evaluation into archives, a zip file for each of its folders.

Rule: an archive is written beside its folder under a temporary name, made durable and read back; only then does it take
its name, and only then the folder's files go. So a reader (`evaljobs.contract.folded`) finds each file at any time,
and a fold that was killed is done again. Called at the end of an evaluation, by the daemon in a process of its own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coordinator.base.isolate import isolated, traceback_of
from coordinator.keeping.retention import MOST_FILES
from coordinator.runtime.journal import alone
from coordinator.runtime.status_file import Ended, read_status
from evaljobs.contract.folded import archive_of, members
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import file_mode, sync_folder

log = logging.getLogger(__name__)


# File WORK_DIR/ID/.folding-RANDOM: an unfinished archive | the coordinator | at the next fold
TEMPORARY = ".folding-"  # how names of unfinished archives begin
_PART_BYTES = 1 << 20


def folders_of(paths: EvaluationPaths) -> tuple[Path, ...]:
    """The folders that are folded, in this order until MOST_FILES are left: what people open by hand comes last."""
    return (
        paths.specs,
        paths.outcomes,
        paths.release,
        paths.verdicts,
        paths.judgements,
        paths.responses,
        paths.logs,
        paths.scores,
        paths.samples,
    )


def fold(paths: EvaluationPaths, most: int = MOST_FILES) -> bool:
    """Fold an evaluation of more than `most` files until at most so many are left. False where it stays as it is.

    BlockingIOError where a coordinator or another fold works on it; OSError where the disk refuses: all files
    are still there.
    """
    if count_files(paths) <= most:
        return False
    with alone(paths.journal):
        if not isinstance(read_status(paths), Ended):
            return False
        fold_held(paths, most)
    return True


def fold_held(paths: EvaluationPaths, most: int = MOST_FILES) -> None:
    """`fold` an evaluation that has ended and whose journal's lock the caller holds."""
    for left in paths.root.glob(f"{TEMPORARY}*"):  # of a fold that was killed
        left.unlink(missing_ok=True)
    for folder in folders_of(paths):
        if count_files(paths) <= most:
            break
        fold_folder(folder)


def try_fold(paths: EvaluationPaths, aside: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """`fold`; where it cannot be done now, a later daemon does it. `aside`: around a fold that has something to do."""
    try:
        if count_files(paths) > MOST_FILES:
            with aside():
                fold(paths)
    except OSError as error:
        log.warning("%s is not folded: %s", paths.root.name, error)


def _not_folded(name: str, error: Exception) -> None:
    if not isinstance(error, BlockingIOError):  # a coordinator works on it again
        log.warning("%s is not folded: %s", name, error, exc_info=traceback_of(error))


def count_files(paths: EvaluationPaths) -> int:
    """Files, not folders, of an evaluation."""
    return sum(len(names) for _, _, names in os.walk(paths.root))


@dataclass(frozen=True, slots=True)
class _Loose:
    """A loose file as it was when it was found."""

    path: Path
    size: int
    stamp: tuple[int, int, int]  # inode, mtime in ns, size

    @property
    def unchanged(self) -> bool:
        return _stamp(self.path.lstat()) == self.stamp


def fold_folder(folder: Path) -> None:
    """Fold one folder; its members of an earlier fold stay. What is no regular file stays loose."""
    loose = _loose_files(folder)
    archive = archive_of(folder)
    if loose and not _all_there(loose, archive):
        _write_archive(archive, loose, stored=folder.name == "responses")
    for file in loose:
        with contextlib.suppress(FileNotFoundError):
            if file.unchanged:
                file.path.unlink()
    with contextlib.suppress(OSError):  # not there, or not empty
        folder.rmdir()


def _loose_files(folder: Path) -> list[_Loose]:
    """Regular files, without unfinished ones (`write_atomic`), which are removed: their writers have ended."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            there = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(there.st_mode) or not _is_text(entry.name):
                continue
            if entry.name.startswith("."):
                Path(entry.path).unlink(missing_ok=True)
                continue
            found.append(_Loose(Path(entry.path), there.st_size, _stamp(there)))
    return found


def _is_text(name: str) -> bool:
    """Can an archive hold this name? A job may write any bytes."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _stamp(there: os.stat_result) -> tuple[int, int, int]:
    return there.st_ino, there.st_mtime_ns, there.st_size


def _all_there(loose: list[_Loose], archive: Path) -> bool:
    """Does the archive hold these very files? So it is after a fold that was killed while it removed them."""
    with contextlib.suppress(OSError):
        held = members(archive)
        return all(
            (info := held.get(file.path.name)) is not None
            and info.file_size == file.size
            and _crc(file.path) == info.CRC
            for file in loose
        )
    return False


def _crc(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            total = zlib.crc32(part, total)
    return total


def _write_archive(archive: Path, loose: list[_Loose], *, stored: bool) -> None:
    """Write the archive anew, from the loose files and from its members that no loose file replaces."""
    descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=archive.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), file_mode(archive.parent))
            # response files hold compressed records and are read in place
            kind = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            with zipfile.ZipFile(file, "w", compression=kind) as new:
                sums = {f.path.name: _add(new, f.path) for f in loose}
                sums |= _copied(archive, new, without=sums)
            file.flush()
            os.fsync(file.fileno())
        _check(temporary, sums)
        temporary.replace(archive)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(archive.parent)


def _add(new: zipfile.ZipFile, path: Path) -> tuple[int, int]:
    """Add a file; bytes and CRC-32 of what was read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as source:
        there = os.fstat(descriptor)
        info = zipfile.ZipInfo(path.name, _when(there.st_mtime))
        info.compress_type, info.external_attr = new.compression, stat.S_IMODE(there.st_mode) << 16
        info.file_size = there.st_size  # whether the member needs the 64-bit form
        size = total = 0
        with new.open(info, "w") as target:
            while part := source.read(_PART_BYTES):
                target.write(part)
                size, total = size + len(part), zlib.crc32(part, total)
    return size, total


def _copied(
    archive: Path, new: zipfile.ZipFile, without: dict[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Copy the members of an earlier fold, but for those that are loose again."""
    if not archive.exists():
        return {}
    sums = {}
    try:
        with zipfile.ZipFile(archive) as old:
            for info in old.infolist():
                if info.filename in without:
                    continue
                copy = zipfile.ZipInfo(info.filename, info.date_time)
                copy.compress_type, copy.external_attr = info.compress_type, info.external_attr
                copy.file_size = info.file_size
                with old.open(info) as source, new.open(copy, "w") as target:  # checks the member's CRC-32
                    shutil.copyfileobj(source, target, _PART_BYTES)
                sums[info.filename] = info.file_size, info.CRC
    except (zipfile.BadZipFile, zlib.error) as error:
        raise OSError(errno.EIO, f"the archive is damaged: {error}", str(archive)) from error
    return sums


def _check(archive: Path, sums: dict[str, tuple[int, int]]) -> None:
    """Read an archive back. OSError where it does not hold these files, with these bytes and CRC-32s."""
    try:
        with zipfile.ZipFile(archive) as written:
            there = {info.filename: (info.file_size, info.CRC) for info in written.infolist()}
            damaged = written.testzip()
    except zipfile.BadZipFile as error:
        raise OSError(f"{archive} was not written whole: {error}") from error
    if there != sums or damaged is not None:
        raise OSError(f"{archive} was not written whole ({damaged or 'its list of files'})")


def _when(mtime: float) -> tuple[int, int, int, int, int, int]:
    """A time as zip files have it: local, and from 1980 on."""
    at = time.localtime(mtime)
    return (at[0], at[1], at[2], at[3], at[4], at[5]) if 1980 <= at[0] <= 2107 else (1980, 1, 1, 0, 0, 0)


def fold_all(work_dir: Path, names: Iterable[str] | None = None) -> int:
    """Fold these evaluations of a work folder, or all, that have ended; how many were folded. An error of one is logged."""
    folded = 0
    if names is None:
        names = sorted(journal.parent.name for journal in work_dir.glob("*/journal.jsonl"))
    for name in names:
        with isolated(partial(_not_folded, name)):
            folded += fold(EvaluationPaths(work_dir / name))
    return folded
