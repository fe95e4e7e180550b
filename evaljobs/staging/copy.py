"""Copies of files at the speed of the hardware, hashed on the way.

Rules: up to `WIDTH` files are written side by side, since the kernel takes one writer per tmpfs
file at a time. More readers are started only while storage makes reads wait; beyond that they would
slow each other. Each block is hashed in its file's order while it is still in the processor's
cache. A source that changes meanwhile is found by size and mtime. Called by `publish.py`:
`copy_files` for a copy, `hash_file` to verify one.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from evaljobs.errors import OperatorError, RetryError
from evaljobs.staging.huge_pages import HugePages

BLOCK = 1 << 20  # bytes: fits the second-level cache between its read, its write and its hash
WIDTH = 4  # files in flight
WAIT = 0.0005  # seconds off the processor after which a read counts as a wait for storage
PATIENCE = 2  # waits in a row after which a reader starts another: a single one may be a preemption

ReadBlock = Callable[
    [int, list[memoryview], int], int
]  # os.preadv's shape: descriptor, buffers, offset -> bytes read


class SourceChanged(OperatorError):  # noqa: N818 (a fact about the source)
    """A file of the source is gone or differs from its description."""


class TargetFailed(Exception):  # noqa: N818 (a fact about the target)
    """A target cannot be written: no space, quota, a file system that failed."""


class Stopped(RetryError):  # noqa: N818 (a request, not an error)
    """The copy was asked to stop; its targets are half-written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One file to copy: `size` bytes (and mtime in ns, unless None) that the source must have before and after."""

    name: str
    source: Path
    size: int
    mtime_ns: int | None
    target: int  # open for writing, already `size` bytes long
    pages: HugePages | None = None  # prepared before each write


@dataclass(slots=True)
class _File:
    """A file in flight. `waiting`: blocks that were written and wait for their turn to be hashed."""

    copy: Copy
    source: int
    state: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: dict[int, tuple[mmap.mmap, int]] = field(default_factory=dict)
    next: int = 0
    hashing: bool = False


def check_source(descriptor: int | Path, path: Path, size: int, mtime_ns: int | None) -> None:
    """Raise SourceChanged unless the file has this size and, where one is given, mtime."""
    try:
        found = os.stat(descriptor)  # noqa: PTH116 (a path or a descriptor)
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
    stop: threading.Event | None = None,
    progress: Callable[[int], None] = lambda _: None,
    read: ReadBlock = os.preadv,
    block: int = BLOCK,
) -> dict[str, str]:
    """Copy all files; give each name's xxh3_128 (hex) of the bytes that were read and written.

    `progress` is called with the bytes of each written block, from any thread. Raises SourceChanged, Stopped,
    TargetFailed, and OSError of a source (EIO …); targets are then half-written.
    """
    files: list[_File] = []
    try:
        for copy in copies:  # links are followed: the source is the user's
            check_source(copy.source, copy.source, copy.size, copy.mtime_ns)
            files.append(_File(copy, os.open(copy.source, os.O_RDONLY | os.O_CLOEXEC)))
        crew = _Crew(files, readers=readers, stop=stop, progress=progress, read=read, block=block)
        crew.run()
        for file in files:  # by descriptor and by name: changed under us, or replaced
            check_source(file.source, file.copy.source, file.copy.size, file.copy.mtime_ns)
            check_source(file.copy.source, file.copy.source, file.copy.size, file.copy.mtime_ns)
    finally:
        for file in files:
            os.close(file.source)
    return {file.copy.name: file.state.hexdigest() for file in files}


def _tickets(files: Sequence[_File], block: int) -> Iterator[tuple[_File, int]]:
    """Blocks in the order in which they are fetched: up to WIDTH files side by side, the largest first."""
    waiting = sorted((f for f in files if f.copy.size), key=lambda f: f.copy.size)
    flight: list[tuple[_File, Iterator[int]]] = []
    while waiting or flight:
        while waiting and len(flight) < WIDTH:
            file = waiting.pop()
            flight.append((file, iter(range(-(-file.copy.size // block)))))
        for entry in list(flight):
            index = next(entry[1], None)
            if index is None:
                flight.remove(entry)
            else:
                yield entry[0], index


class _Crew:
    """The reader threads of one copy."""

    def __init__(
        self,
        files: Sequence[_File],
        *,
        readers: int,
        stop: threading.Event | None,
        progress: Callable[[int], None],
        read: ReadBlock,
        block: int,
    ) -> None:
        self.block, self.read, self.progress = block, read, progress
        self.stop = stop if stop is not None else threading.Event()
        self.tickets = _tickets(files, block)
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        blocks = sum(-(-f.copy.size // block) for f in files)
        self.readers = max(1, min(readers, blocks))
        self.threads: list[threading.Thread] = []
        # A reader takes a buffer before a ticket. So some reader always works on a file's lowest unhashed block, and
        # the buffers that wait for that block come back. Last in, first out: the last one used is still in the cache.
        self.buffers: queue.LifoQueue[mmap.mmap] = queue.LifoQueue()
        for _ in range(2 * self.readers):
            self.buffers.put(mmap.mmap(-1, block))

    def run(self) -> None:
        """Start a reader for each processor; readers start more while storage makes them wait."""
        for _ in range(min(self.readers, len(os.sched_getaffinity(0)))):
            self._start_reader()
        for thread in self.threads:  # grows meanwhile: only a reader that was not joined yet starts another
            thread.join()
        if self.error is not None:
            raise self.error
        if self.stop.is_set():
            raise Stopped("asked to stop while copying")

    def _start_reader(self) -> None:
        with self.lock:
            if len(self.threads) < self.readers:
                thread = threading.Thread(target=self._work, daemon=True)
                self.threads.append(thread)
                thread.start()

    def _work(self) -> None:
        waits = 0
        try:
            while True:
                buffer = self.buffers.get()
                with self.lock:
                    ending = self.error is not None or self.stop.is_set()
                    ticket = None if ending else next(self.tickets, None)
                if ticket is None:
                    self.buffers.put(buffer)  # so that the next reader that waits for a buffer ends, too
                    return
                waits = waits + 1 if self._block(*ticket, buffer) else 0
                if waits >= PATIENCE:
                    self._start_reader()
        except BaseException as error:  # noqa: BLE001 (carried to the caller's thread)
            self.error = self.error or error
            self.buffers.put(mmap.mmap(-1, mmap.PAGESIZE))  # so that a reader that waits for a buffer ends

    def _block(self, file: _File, index: int, buffer: mmap.mmap) -> bool:
        """Copy one block; whether its read waited for storage, and not for the processor."""
        offset = index * self.block
        length = min(self.block, file.copy.size - offset)
        view = memoryview(buffer)[:length]
        try:
            done, busy, began = 0, time.thread_time(), time.perf_counter()
            while done < length:
                got = self.read(file.source, [view[done:]], offset + done)
                if got == 0:
                    raise SourceChanged(f"{file.copy.source} was truncated while it was read")
                done += got
            worked, took = time.thread_time() - busy, time.perf_counter() - began
            if file.copy.pages is not None:
                file.copy.pages.prepare(offset, length)
            _write(file.copy, view, offset)
        finally:
            view.release()
        self.progress(length)
        self._hash(file, index, buffer, length)
        return took > WAIT + 2 * worked

    def _hash(self, file: _File, index: int, buffer: mmap.mmap, length: int) -> None:
        """Hash this block if it is its turn, and those that waited for it; else the thread that hashes the file takes it."""
        with file.lock:
            file.waiting[index] = (buffer, length)
            if file.hashing:
                return
            file.hashing = True
        while True:
            with file.lock:
                ready = file.waiting.pop(file.next, None)
                if ready is None:
                    file.hashing = False
                    return
            with memoryview(ready[0]) as view:
                file.state.update(view[: ready[1]])
            file.next += 1
            self.buffers.put(ready[0])


def _write(copy: Copy, view: memoryview, offset: int) -> None:
    done = 0
    try:
        while done < len(view):
            done += os.pwrite(copy.target, view[done:], offset + done)
    except OSError as error:
        raise TargetFailed(f"writing {copy.name} failed: {error.strerror}") from error


def hash_file(path: int | Path, *, block: int = 8 * BLOCK) -> str:
    """xxh3_128 (hex) of a file, or of an open descriptor from its start."""
    state = xxhash.xxh3_128()
    buffer = memoryview(mmap.mmap(-1, block))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if isinstance(path, Path) else path
    try:
        offset = 0
        while got := os.preadv(descriptor, [buffer], offset):
            state.update(buffer[:got])
            offset += got
    finally:
        if isinstance(path, Path):
            os.close(descriptor)
    return state.hexdigest()
