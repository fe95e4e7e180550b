"""Archives the files of an ended evaluation in one zip file, `files.zip`.

Rule: the archive is written beside the folders under a temporary name, synced and verified; only then is it renamed, and only
then are the files removed. So a reader (`evaljobs.contract.archived_files`) always finds each file, and an interrupted archiving is
repeated. Called at the end of an evaluation, by the daemon in a separate process, and by `prune`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
import time
import zipfile
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

from coordinator.base.isolate import isolate_errors, traceback_of
from coordinator.results.report.stored_documents import is_merged, read_documents
from coordinator.runtime.journal import exclude_coordinators
from coordinator.runtime.summary import read_ended_summary
from evaljobs.contract.archived_files import archive_of, file_size, files_in, open_file
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import file_mode, sync_folder

log = logging.getLogger(__name__)

# an ended evaluation with at most this many files keeps its folders, which people open by hand
MOST_FILES = 60
FOLDERS = (
    "specs", "outcomes", "release", "verdicts", "judgements", "responses", "logs", "scores", "samples",
)  # fmt: skip

# File WORK_DIR/ID/.files-RANDOM: an unfinished archive | the coordinator | at the next one
_TEMPORARY = ".files-"  # prefix of unfinished archives
_PART_BYTES = 1 << 20


def archive_ended(paths: EvaluationPaths, most: int = MOST_FILES) -> bool:
    """Merge an evaluation's columns, and archive it if it has more than `most` files. Return False if no file was archived.

    Raise BlockingIOError if a coordinator or a prune has it; OSError if the disk refuses, with all files still in place.
    """
    if count_files(paths) <= most and is_merged(paths):
        return False
    with exclude_coordinators(paths.journal):
        if read_ended_summary(paths) is None:
            return False
        if not is_merged(paths):
            read_documents(paths)
        if count_files(paths) <= most:
            return False
        write_archive(paths)
    return True


def archive_all(work_dir: Path, names: Iterable[str] | None = None) -> int:
    """Call `archive_ended` for these evaluations of a work folder, or for all, and return how many were archived. An error is
    logged; that evaluation keeps its files, and a later daemon archives it.
    """
    if names is None:
        names = sorted(journal.parent.name for journal in work_dir.glob("*/journal.jsonl"))
    archived = 0
    for name in names:
        with isolate_errors(partial(_not_archived, name)):
            archived += archive_ended(EvaluationPaths(work_dir / name))
    return archived


def _not_archived(name: str, error: Exception) -> None:
    if not isinstance(error, BlockingIOError):  # a coordinator has resumed it
        log.warning("%s is not archived: %s", name, error, exc_info=traceback_of(error))


def count_files(paths: EvaluationPaths) -> int:
    """Count the files, not folders, of an evaluation."""
    return sum(len(names) for _, _, names in os.walk(paths.root))


def write_archive(paths: EvaluationPaths, without: Collection[str] = ()) -> None:
    """Archive an ended evaluation whose journal's lock the caller holds; errors as in `archive_ended`.

    Members of earlier archives are kept, except those of the folders `without`.
    """
    for left in paths.root.glob(f"{_TEMPORARY}*"):  # from a process that was killed
        left.unlink(missing_ok=True)
    kept = [paths.root / name for name in FOLDERS if name not in without]
    loose = {path: there for folder in kept for path, there in _loose(folder)}
    if files := [path for folder in kept for path in _archivable(folder)]:
        _write(archive_of(paths.root), files)
    else:
        archive_of(paths.root).unlink(missing_ok=True)
    for path, there in loose.items():
        with contextlib.suppress(FileNotFoundError):
            if _stamp(path.lstat()) == _stamp(there):  # a job that ends late may still write
                path.unlink()
    for folder in (paths.root / name for name in FOLDERS):
        with contextlib.suppress(OSError):  # missing, or not empty
            folder.rmdir()


def _loose(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Return files in a folder that can be archived. Unfinished ones (`write_atomic`) are removed: their writers have ended."""
    for left in folder.glob(".*"):
        if not left.is_dir():
            left.unlink(missing_ok=True)
    return [(path, path.lstat()) for path in _archivable(folder) if os.path.lexists(path)]


def _archivable(folder: Path) -> list[Path]:
    """Return files of a folder, loose and archived, except links, pipes and names that are not text, which a job may leave."""
    return [
        path
        for path in files_in(folder)
        if path.name.isprintable() and (not os.path.lexists(path) or stat.S_ISREG(path.lstat().st_mode))
    ]


def _stamp(there: os.stat_result) -> tuple[int, int, int]:
    return there.st_ino, there.st_mtime_ns, there.st_size


def _write(archive: Path, files: list[Path]) -> None:
    """Write the archive. Raise OSError if it does not contain these files."""
    descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=archive.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), file_mode(archive.parent))
            with zipfile.ZipFile(file, "w") as new:
                for path in files:
                    _add(new, path)
            file.flush()
            os.fsync(file.fileno())
        _check(temporary, len(files))
        temporary.replace(archive)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(archive.parent)


def _check(archive: Path, files: int) -> None:
    """Read an archive back."""
    with zipfile.ZipFile(archive) as written:
        if (damaged := written.testzip()) is not None or len(written.infolist()) != files:
            raise OSError(f"{archive} was not written whole ({damaged or 'its list of files'})")


def _add(new: zipfile.ZipFile, path: Path) -> None:
    info = zipfile.ZipInfo(f"{path.parent.name}/{path.name}", time.localtime()[:6])
    # response files contain compressed records and are read in place
    stored = path.parent.name == "responses"
    info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    info.external_attr = 0o600 << 16
    info.file_size = file_size(path)  # determines whether the member needs the 64-bit format
    with open_file(path) as source, new.open(info, "w") as target:
        shutil.copyfileobj(source, target, _PART_BYTES)
