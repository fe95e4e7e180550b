"""Huge pages for a file in a tmpfs, requested two MiB at a time before the bytes are written.

MADV_COLLAPSE (Linux 6.1, madvise(2)) makes them for any setting of
transparent_hugepage/shmem_enabled but "deny". A huge page that lies ready costs a fifth of its 512
small ones, which are most of the cost of filling a tmpfs.

Rule: nothing depends on them. Where the kernel has none, or must move other pages to make one, the
rest of the copy uses small ones. Called by `publish.py` for each file, and by `copy.py` before each
write.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

EXTENT = 2 << 20  # bytes of a huge page (x86-64, and arm64 with 4 KiB pages)
LAST = 8  # huge pages whose cost says whether the next ones are worth it
DEAR = 0.0008  # processor seconds for one huge page above which small pages are cheaper (0.8 ms measured)
_COLLAPSE = 25  # MADV_COLLAPSE; the standard library has no name for it yet
_NONE, _FIXED, _NORESERVE = 0, 0x10, 0x4000  # PROT_NONE, MAP_FIXED, MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value


@dataclass(slots=True)
class Purse:
    """The cost of the last huge pages of one copy, all its files together.

    `closed`: no more are requested, since the kernel refused one, or the last `LAST` cost more than small pages would.
    """

    last: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def paid(self, seconds: float, *, made: bool) -> None:
        with self.lock:
            self.last.append(seconds)
            self.closed |= not made or (len(self.last) == LAST and sum(self.last) > LAST * DEAR)


class HugePages:
    """One file that is being filled. `prepare` before each write; from any thread."""

    def __init__(self, libc: ctypes.CDLL, descriptor: int, address: int, size: int, purse: Purse) -> None:
        self.libc, self.descriptor, self.address = libc, descriptor, address
        self.size, self.purse = size, purse
        self.lock = threading.Lock()
        self.prepared: set[int] = set()

    def prepare(self, offset: int, length: int) -> None:
        """Request huge pages for the extents of these bytes. The caller has not written there yet."""
        if self.purse.closed:
            return
        for start in range(offset // EXTENT * EXTENT, offset + length, EXTENT):
            with self.lock:
                if start in self.prepared or start + EXTENT > self.size:
                    continue
                self.prepared.add(start)
                began = time.thread_time()
                try:
                    os.pwrite(self.descriptor, b"\0", start)  # an extent without any page is not collapsed
                except OSError:  # no space: the write that follows says so
                    return
                made = self.libc.madvise(self.address + start, EXTENT, _COLLAPSE) == 0
            self.purse.paid(time.thread_time() - began, made=made)


@contextmanager
def huge_pages(descriptor: int, size: int, purse: Purse) -> Iterator[HugePages | None]:
    """For an empty file of `size` bytes, open for reading and writing; None where huge pages cannot help."""
    libc = _libc()
    if libc is None or size < EXTENT or purse.closed:
        yield None
        return
    span = size + EXTENT  # so that an aligned part of it holds the file
    room = libc.mmap(None, span, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
    if room in (None, _FAILED):
        yield None
        return
    try:
        address = -(-room // EXTENT) * EXTENT
        access = mmap.PROT_READ | mmap.PROT_WRITE
        there = libc.mmap(address, size, access, mmap.MAP_SHARED | _FIXED, descriptor, 0)
        yield HugePages(libc, descriptor, address, size, purse) if there == address else None
    finally:
        libc.munmap(room, span)


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    except (OSError, AttributeError):
        return None
    return libc
