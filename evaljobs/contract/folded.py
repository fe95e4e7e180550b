"""Files of an evaluation, loose or folded: `logs/x.log` may be the member `x.log` of `logs.zip` beside that folder.

Rule: what reads a file of an evaluation that may have ended opens it here, by the path at which it was written. A loose
file has precedence over a member of its name, since a retry writes loose files beside the archives. A member that was
stored without compression is read in place, at any offset. Written by `coordinator.keeping.folding`.
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
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO

_LOCAL_HEADER = struct.Struct(
    "<4s22xHH"
)  # of a member in a zip file: magic, bytes of its name and of its extra field
_LOCAL_MAGIC = b"PK\x03\x04"
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def archive_of(folder: Path) -> Path:
    """The archive that holds the folded files of `folder`."""
    # File WORK_DIR/ID/FOLDER.zip: files of a folder of an ended evaluation that had more than 60 | the coordinator |
    # as its files
    return folder.with_name(f"{folder.name}.zip")


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading, loose or folded. FileNotFoundError; OSError (EIO) for a damaged archive."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return open_member(path)


def read_bytes(path: Path) -> bytes:
    """The whole file; errors as of `open_file`."""
    with open_file(path) as file:
        return file.read()


def file_size(path: Path) -> int:
    """Bytes of a file as it was written; errors as of `open_file`."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return _member(path).file_size


def exists(path: Path) -> bool:
    """Is there such a file, loose or folded? False, too, where the archive is damaged."""
    with contextlib.suppress(OSError):
        return file_size(path) >= 0
    return False


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Paths of the files in `folder` whose names match, loose and folded, sorted; none where there is no such folder.

    Temporary files (their names begin with a dot) are left out.
    """
    names: set[str] = set()
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        names |= {entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)}
    names |= set(members(archive_of(folder)))  # after that: what a fold has just removed is there
    return [folder / n for n in sorted(names) if not n.startswith(".") and fnmatch.fnmatchcase(n, pattern)]


def members(archive: Path) -> Mapping[str, zipfile.ZipInfo]:
    """The members of an archive by name; none where there is no archive. OSError (EIO) where it is damaged."""
    try:
        with archive.open("rb") as file:
            return _members(file, archive)
    except FileNotFoundError:
        return {}


def _members(file: IO[bytes], archive: Path) -> Mapping[str, zipfile.ZipInfo]:
    there = os.fstat(file.fileno())
    return _read_members(str(archive), there.st_ino, there.st_mtime_ns, there.st_size)


@lru_cache(maxsize=8)
def _read_members(archive: str, _inode: int, _mtime_ns: int, _size: int) -> Mapping[str, zipfile.ZipInfo]:
    """Read once for each content of an archive: that of 10,000 files takes a tenth of a second to list."""
    try:
        with zipfile.ZipFile(archive) as opened:
            return {info.filename: info for info in opened.infolist()}
    except (zipfile.BadZipFile, struct.error, ValueError) as error:
        raise _damaged(archive, str(error)) from error


def _member(path: Path) -> zipfile.ZipInfo:
    info = members(archive_of(path.parent)).get(path.name)
    if info is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return info


def open_member(path: Path) -> IO[bytes]:
    """Open the folded file that had this path; errors as of `open_file`."""
    archive = archive_of(path.parent)
    try:
        file = archive.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        info = _members(file, archive).get(path.name)
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        start = _data_offset(file, info, archive)
        if info.compress_type == zipfile.ZIP_STORED:
            stack.pop_all()
            return io.BufferedReader(_Stored(file, start, info.file_size))
        file.seek(start)
        return io.BytesIO(_inflated(file.read(info.compress_size), info, archive))


def _data_offset(file: IO[bytes], info: zipfile.ZipInfo, archive: Path) -> int:
    """Where a member's bytes begin: behind a header whose length the list of members does not say."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or info.compress_type not in COMPRESSIONS:
        raise _damaged(archive, f"{info.filename} cannot be read")
    magic, name, extra = _LOCAL_HEADER.unpack(header)
    if magic != _LOCAL_MAGIC:
        raise _damaged(archive, f"{info.filename} is not where it should be")
    return int(info.header_offset + _LOCAL_HEADER.size + name + extra)


def _inflated(data: bytes, info: zipfile.ZipInfo, archive: Path) -> bytes:
    try:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        text = inflate.decompress(data, info.file_size + 1)
    except zlib.error as error:
        raise _damaged(archive, f"{info.filename}: {error}") from error
    if len(text) != info.file_size or zlib.crc32(text) != info.CRC:
        raise _damaged(archive, f"{info.filename} does not match its checksum")
    return text


def _damaged(archive: str | Path, why: str) -> OSError:
    return OSError(errno.EIO, f"the archive is damaged: {why}", str(archive))


class _Stored(io.RawIOBase):
    """The bytes of a stored member, `size` from offset `start` of the archive on."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file = file
        self._start = start
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek value {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
