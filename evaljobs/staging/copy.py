"""Copies of files at the speed of the hardware, hashed on the way.

Rules: readers take blocks from all files in turn, so that the files end together: the kernel takes one writer per tmpfs file
at a time, and slow storage answers concurrently. Each block is hashed in its file's order by the reader that wrote it, while
it is still in the processor's cache. A source that changes meanwhile is found by size and mtime. Called by `precursor.py`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from evaljobs.errors import OperatorError, RetryError

BLOCK = 1 << 20  # bytes: fits the second-level cache between its read, its write and its hash


class SourceChanged(OperatorError):  # noqa: N818 (a fact about the source)
    """A source file is missing or differs from its description."""


class TargetFailed(Exception):  # noqa: N818 (a fact about the target)
    """A target cannot be written: no space, quota, a failed file system."""


class CopyStopped(RetryError):  # noqa: N818 (a request, not an error)
    """The copy was asked to stop; its targets are incomplete."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One file to copy: `size` bytes (and mtime in ns, unless None) required of the source before and after."""

    name: str
    source: Path
    size: int
    mtime_ns: int | None
    target: int  # open for writing, already `size` bytes long


@dataclass(slots=True)
class _File:
    """A file being copied. `next`: the next block to hash."""

    copy: Copy
    source: int
    state: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    turn: threading.Condition = field(default_factory=threading.Condition)
    next: int = 0


def check_source(path: Path, size: int, mtime_ns: int | None) -> None:
    """Raise SourceChanged unless the file has this size and, if given, mtime."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise SourceChanged(f"{path} is gone") from error
    if found.st_size != size:
        raise SourceChanged(f"{path} has {found.st_size} bytes, {size} were announced")
    if mtime_ns is not None and found.st_mtime_ns != mtime_ns:
        raise SourceChanged(f"{path} was written to after it was announced")


def copy_files(
    copies: Sequence[Copy],
    *,
    readers: int,
    stop: threading.Event,
    block: int = BLOCK,
) -> dict[str, str]:
    """Copy all files, and return each name's xxh3_128 (hex) of the bytes read and written.

    Raises SourceChanged, Stopped, TargetFailed, and OSError of a source (EIO …); targets are then incomplete.
    """
    files: list[_File] = []
    try:
        for copy in copies:  # links are followed: the source is the user's
            check_source(copy.source, copy.size, copy.mtime_ns)
            files.append(_File(copy, os.open(copy.source, os.O_RDONLY | os.O_CLOEXEC)))
        crew = _Crew(files, stop, block)
        with ThreadPoolExecutor(max(1, readers)) as pool:
            for reader in [pool.submit(crew.work) for _ in range(readers)]:
                reader.result()
        if stop.is_set():
            raise CopyStopped("asked to stop while copying")
        for copy in copies:  # changed under us, or replaced
            check_source(copy.source, copy.size, copy.mtime_ns)
    finally:
        for file in files:
            os.close(file.source)
    return {file.copy.name: file.state.hexdigest() for file in files}


def _tickets(files: Sequence[_File], block: int) -> Iterator[tuple[_File, int]]:
    """Yield blocks in reading order: files proceed in proportion to their sizes."""
    counts = [-(-file.copy.size // block) for file in files]
    parts = ((at / count, number, at) for number, count in enumerate(counts) for at in range(count))
    return ((files[number], at) for _, number, at in sorted(parts))


class _Crew:
    """State shared by the readers of one copy."""

    def __init__(self, files: Sequence[_File], stop: threading.Event, block: int) -> None:
        self.stop, self.block = stop, block
        self.files, self.tickets = files, _tickets(files, block)
        self.lock = threading.Lock()
        self.failed = False

    def work(self) -> None:
        """Copy blocks in a reader's thread until none is left, one failed, or the copy is to stop."""
        with memoryview(mmap.mmap(-1, self.block)) as buffer:
            try:
                while True:
                    with self.lock:
                        ending = self.failed or self.stop.is_set()
                        ticket = None if ending else next(self.tickets, None)
                    if ticket is None:
                        return
                    self._block(*ticket, buffer)
            except BaseException:
                self.failed = True
                for file in self.files:
                    with file.turn:
                        file.turn.notify_all()
                raise

    def _block(self, file: _File, index: int, buffer: memoryview) -> None:
        """Copy and hash one block. Earlier blocks were taken before, so its turn comes."""
        offset = index * self.block
        with buffer[: min(self.block, file.copy.size - offset)] as view:
            done = 0
            while done < len(view):
                with view[done:] as rest:
                    got = os.preadv(file.source, [rest], offset + done)
                if got == 0:
                    raise SourceChanged(f"{file.copy.source} was truncated while it was read")
                done += got
            _write(file.copy, view, offset)
            with file.turn:
                file.turn.wait_for(lambda: file.next == index or self.failed)
            file.state.update(view)
        with file.turn:
            file.next = index + 1
            file.turn.notify_all()


def _write(copy: Copy, view: memoryview, offset: int) -> None:
    done = 0
    try:
        while done < len(view):
            done += os.pwrite(copy.target, view[done:], offset + done)
    except OSError as error:
        raise TargetFailed(f"writing {copy.name} failed: {error.strerror}") from error
