"""The trials' environment in a node's page cache before its GPUs are held.

A trial that ends writes down which bytes of which files its process has touched: the modules' bytecode, and the pages of
mapped libraries. The next precursors read these ranges, many at a time, after they have copied the weights. Each trial would
otherwise wait for shared storage file by file, with a GPU held.

Rule: a help, never a condition. What cannot be read, or is gone, is left to the trials. Called from `trial` and `precursor`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import write_atomic

BLOCK = 128 << 10  # bytes: ranges begin and end at multiples; a file system reads about as much at once
IN_MEMORY = 0x40  # of the highest byte of a page's entry in /proc/self/pagemap: present (0x80) or swapped out
RENEWED_SECONDS = 3600.0  # a list younger than this is not written again
PATIENCE_SECONDS = 120.0  # the longest that a precursor reads ahead: trials that start then are no worse off

Ranges = list[tuple[int, int]]  # first byte and length


def list_of(work: WorkPaths) -> Path:
    """Return the file with the ranges that trials of this interpreter have touched."""
    return work.environments / f"{hashlib.sha256(sys.executable.encode()).hexdigest()[:16]}.json"


def record_touched(place: Path) -> None:
    """Write down what this process has touched, unless that was done lately. Raises OSError."""
    try:
        if time.time() - place.stat().st_mtime < RENEWED_SECONDS:
            return
    except FileNotFoundError:
        pass
    write_atomic(place, json.dumps(touched_ranges()).encode())


def touched_ranges() -> dict[str, Ranges]:
    """The ranges of each file that this process has read as a module or touched in a mapping. Raises OSError."""
    blocks: dict[str, set[int]] = {}
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _rights, offset, _device, inode, *path = line.split(maxsplit=5)
            if inode != "0" and path and not path[0].startswith(("/dev/", "/memfd:", "/SYSV")):
                start, end = (int(address, 16) for address in addresses.split("-"))
                pagemap.seek(start // mmap.PAGESIZE * 8)
                entries = pagemap.read((end - start) // mmap.PAGESIZE * 8)
                blocks.setdefault(path[0], set()).update(_blocks(entries, int(offset, 16)))
    libraries = {path: [(block * BLOCK, BLOCK) for block in sorted(own)] for path, own in blocks.items()}
    return libraries | {path: [(0, Path(path).stat().st_size)] for path in _bytecode()}


def _bytecode() -> Iterator[str]:
    for module in list(sys.modules.values()):
        for path in (getattr(module, "__cached__", None), getattr(module, "__file__", None)):
            if isinstance(path, str) and os.path.isfile(path):  # noqa: PTH113 (thousands)
                yield path
                break


def _blocks(entries: bytes, offset: int) -> Iterator[int]:
    """Numbers of the file's blocks of which a mapping has pages in memory. `entries`: its part of pagemap."""
    a_block, page, first = BLOCK // mmap.PAGESIZE, 0, offset // mmap.PAGESIZE
    while page < len(entries) // 8:
        behind = page + a_block - (first + page) % a_block
        if max(entries[page * 8 + 7 : behind * 8 : 8]) >= IN_MEMORY:
            yield (first + page) // a_block
        page = behind


def read_ahead(place: Path, *, readers: int, stop: threading.Event) -> int:
    """Read what a trial has touched into this node's page cache; returns the bytes. Reads nothing where no list is."""
    try:
        files: dict[str, Ranges] = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    with ThreadPoolExecutor(max(1, readers)) as pool:
        reading = (pool.submit(_read, path, ranges, stop, deadline) for path, ranges in files.items())
        return sum(part.result() for part in list(reading))


def _read(path: str, ranges: Sequence[tuple[int, int]], stop: threading.Event, deadline: float) -> int:
    done, buffer = 0, bytearray(BLOCK)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return 0
            for first, length in ranges:
                for at in range(first, first + length, BLOCK):
                    if stop.is_set() or time.monotonic() > deadline:
                        return done
                    done += os.preadv(descriptor, [buffer], at)
        finally:
            os.close(descriptor)
    except OSError:
        pass
    return done
