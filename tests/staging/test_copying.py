"""Blocks, hashes and failures of the copier."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from evaljobs.staging.copy import Copy, SourceChanged, Stopped, copy_files, hash_file


def copies(folder: Path, contents: list[bytes]) -> list[Copy]:
    folder.mkdir(exist_ok=True)
    made = []
    for i, data in enumerate(contents):
        source = folder / f"s{i}"
        source.write_bytes(data)
        target = os.open(folder / f"t{i}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(target, len(data))
        made.append(
            Copy(
                name=f"f{i}", source=source, size=len(data), mtime_ns=source.stat().st_mtime_ns, target=target
            )
        )
    return made


def close(made: list[Copy]) -> None:
    for copy in made:
        os.close(copy.target)


@settings(max_examples=40)
@given(
    contents=st.lists(st.binary(max_size=3000), min_size=1, max_size=7),
    readers=st.integers(1, 6),
    block=st.sampled_from([1, 7, 256, 4096]),
)
def test_copies_every_byte_and_hashes_what_it_read(
    tmp_path: Path, contents: list[bytes], readers: int, block: int
) -> None:
    """For any files, readers and block size: equal bytes, and the hash of the whole file."""
    made = copies(tmp_path / "x", contents)
    seen: list[int] = []
    sums = copy_files(made, readers=readers, block=block, progress=seen.append)
    close(made)
    assert [(tmp_path / "x" / f"t{i}").read_bytes() for i in range(len(contents))] == contents
    assert sums == {f"f{i}": xxhash.xxh3_128(data).hexdigest() for i, data in enumerate(contents)}
    assert sum(seen) == sum(map(len, contents))


def test_short_reads_are_read_on(tmp_path: Path) -> None:
    """Storage may give fewer bytes than asked for: the rest is asked for again."""
    made = copies(tmp_path / "x", [os.urandom(10_000)])

    def drip(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(descriptor, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset)

    sums = copy_files(made, readers=3, block=4096, read=drip)
    close(made)
    assert sums["f0"] == hash_file(tmp_path / "x" / "t0") == hash_file(tmp_path / "x" / "s0")


def test_slow_first_blocks_do_not_starve_readers(tmp_path: Path) -> None:
    """One block of a file takes long: the others run ahead, then wait for its turn; it ends and is exact."""
    made = copies(tmp_path / "x", [os.urandom(64_000)])

    def slow_start(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0:
            time.sleep(0.2)  # storage that is slow, not a wait for a state
        return os.preadv(descriptor, buffers, offset)

    sums = copy_files(made, readers=4, block=1000, read=slow_start)
    close(made)
    assert sums["f0"] == hash_file(tmp_path / "x" / "s0")


@pytest.mark.parametrize("readers", [1, 8])
@pytest.mark.parametrize(
    ("what", "raises"),
    [("EIO", OSError), ("stop", Stopped), ("truncate", SourceChanged), ("append", SourceChanged)],
)
def test_what_happens_in_mid_copy_ends_all_readers_and_is_told(
    tmp_path: Path, what: str, raises: type[Exception], readers: int
) -> None:
    """An error of storage, a stop, a source that is written to: never a short or mixed copy, and no thread is left."""
    made = copies(tmp_path / "x", [bytes(50_000)])
    source, stop = made[0].source, threading.Event()

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        match what if offset == 20_000 else "":
            case "EIO":
                raise OSError(errno.EIO, "Input/output error")
            case "stop":
                stop.set()
            case "truncate":
                os.truncate(source, 10_000)
            case "append":
                with source.open("ab") as file:
                    file.write(b"more")
        return os.preadv(descriptor, buffers, offset)

    before = set(threading.enumerate())
    with pytest.raises(raises):
        copy_files(made, readers=readers, block=1000, read=read, stop=stop)
    close(made)
    assert set(threading.enumerate()) <= before
