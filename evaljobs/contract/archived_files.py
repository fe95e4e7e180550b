"""Files of an evaluation, loose or in its archive: `logs/x.log` may be the member of that name of `files.zip`.

Rule: files of an evaluation that may have ended are opened here, by their original path. A loose file takes precedence over a
member of its name, since a retry writes loose files beside the archive. A member stored without compression is read in place,
at any offset. Written by `coordinator.operations.keeping.archive`.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO

_HEADER_BYTES = 30  # of a member
_LENGTHS_AT = 26  # in the header: lengths of the member's name and of its extra field


def archive_of(root: Path) -> Path:
    """The archive of an evaluation's folder."""
    # File WORK_DIR/ID/files.zip: files of the folders of an ended evaluation that had more than 60 | the coordinator |
    # as its files
    return root / "files.zip"


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading, loose or archived. Raise FileNotFoundError, or OSError (EIO) for a damaged archive."""
    with contextlib.suppress(FileNotFoundError):
        return path.open("rb")
    archive, info = _member(path)
    with _errors_of(archive), archive.open("rb") as file:
        file.seek(info.header_offset + _LENGTHS_AT)
        start = info.header_offset + _HEADER_BYTES + sum(struct.unpack("<HH", file.read(4)))
        if info.compress_type == zipfile.ZIP_STORED:
            return io.BufferedReader(_Stored(archive, start, info.file_size))
        file.seek(start)
        return io.BytesIO(zipfile.ZipExtFile(file, "r", info).read())  # checks its CRC-32


def read_bytes(path: Path) -> bytes:
    """Return the whole file; errors as in `open_file`."""
    with open_file(path) as file:
        return file.read()


def file_size(path: Path) -> int:
    """Return the original size of a file in bytes; errors as in `open_file`."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return _member(path)[1].file_size


def file_exists(path: Path) -> bool:
    """Return whether such a file exists, loose or archived; False if the archive is damaged."""
    with contextlib.suppress(OSError):
        return file_size(path) >= 0
    return False


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Return paths of the files in `folder` whose names match, loose and archived, sorted; empty if the folder is missing.

    Temporary files (with names that begin with a dot) are skipped.
    """
    names: set[str] = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        names |= {entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)}
    prefix = f"{folder.name}/"
    names |= {
        n.removeprefix(prefix) for n in archive_members(archive_of(folder.parent)) if n.startswith(prefix)
    }
    return [folder / n for n in sorted(names) if not n.startswith(".") and fnmatch.fnmatchcase(n, pattern)]


def archive_members(archive: Path) -> Mapping[str, zipfile.ZipInfo]:
    """Return the members of an archive by name; empty if there is no archive. Raise OSError (EIO) if it is damaged."""
    try:
        there = archive.stat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return _read_members(archive, there.st_ino, there.st_mtime_ns, there.st_size)


@lru_cache(maxsize=8)
def _read_members(archive: Path, _inode: int, _mtime_ns: int, _size: int) -> Mapping[str, zipfile.ZipInfo]:
    """Read members once per content of an archive: listing 10,000 files takes a tenth of a second."""
    with _errors_of(archive), zipfile.ZipFile(archive) as opened:
        return {info.filename: info for info in opened.infolist()}


@contextlib.contextmanager
def _errors_of(archive: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, NotImplementedError) as error:
        raise OSError(errno.EIO, f"the archive is damaged: {error}", str(archive)) from error


def _member(path: Path) -> tuple[Path, zipfile.ZipInfo]:
    """Return the archive that contains the file of this path, and its entry there; errors as in `open_file`."""
    archive = archive_of(path.parent.parent)
    if info := archive_members(archive).get(f"{path.parent.name}/{path.name}"):
        return archive, info
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


class _Stored(io.FileIO):
    """The bytes of a stored member: `size` bytes of the archive from offset `start`."""

    def __init__(self, archive: Path, start: int, size: int) -> None:
        super().__init__(archive)
        self._start, self._end = start, start + size
        self.seek(0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: self._start, io.SEEK_CUR: super().tell(), io.SEEK_END: self._end}[whence]
        return super().seek(base + offset) - self._start

    def tell(self) -> int:
        return super().tell() - self._start

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return super().readinto(memoryview(buffer)[: max(0, self._end - super().tell())])

    def readall(self) -> bytes:
        return self.read(max(0, self._end - super().tell()))
