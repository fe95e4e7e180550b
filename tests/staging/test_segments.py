"""Shared memory of engines' processes: what is ours and in no process is swept, all else stays."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from evaljobs.contract.outcomes import Staged
from evaljobs.contract.specs import CheckpointSpec, StageSpec
from evaljobs.staging import clean, precursor, segments
from evaljobs.staging.precursor import Holding


@pytest.fixture
def dead() -> Iterator[Path]:
    """A segment with PREFIX that no process has mapped."""
    place = segments.FOLDER / f"{segments.PREFIX}{secrets.token_hex(4)}"
    place.write_bytes(b"\0" * 4096)
    yield place
    place.unlink(missing_ok=True)


def test_segments_are_ours_by_name_within_the_context_alone() -> None:
    with segments.named():
        inside = shared_memory.SharedMemory(create=True, size=1)
    outside = shared_memory.SharedMemory(create=True, size=1)
    names = inside.name, outside.name
    for segment in (inside, outside):
        segment.close()
        segment.unlink()
    assert [name.startswith(segments.PREFIX) for name in names] == [True, False]


def test_a_segment_whose_name_is_gone_is_removed_without_an_error() -> None:
    """Its maker, a library, removes it when it ends, after the trial has."""
    with segments.named():
        made = shared_memory.SharedMemory(create=True, size=1)
    assert segments.unlink_mapped() >= 1
    assert not (segments.FOLDER / made.name).exists()
    made.close()
    made.unlink()


def test_a_semaphore_counts_as_mapped_though_it_was_made_under_another_name() -> None:
    libc, name = ctypes.CDLL(None, use_errno=True), f"{segments.PREFIX}{secrets.token_hex(4)}"
    libc.sem_open.restype = ctypes.c_void_p
    assert libc.sem_open(f"/{name}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
    try:
        assert f"sem.{name}" in segments.mapped([os.getpid()])
    finally:
        libc.sem_unlink(f"/{name}".encode())


def test_what_a_process_has_mapped_and_what_has_another_name_stays(dead: Path) -> None:
    with segments.named():
        used = shared_memory.SharedMemory(create=True, size=1)
    foreign = segments.FOLDER / f"psm_{secrets.token_hex(4)}"
    foreign.write_bytes(b"\0")
    try:
        segments.sweep()
        assert not dead.exists()
        assert foreign.exists()
        assert (segments.FOLDER / used.name).exists()
    finally:
        foreign.unlink()
        used.close()
        used.unlink()


@pytest.mark.parametrize("who", ["a precursor that clears", "clean"])
def test_segments_of_the_dead_are_swept(who: str, dead: Path, tmp_path: Path) -> None:
    if who == "clean":
        assert clean.clean_main(["--root", str(tmp_path)]) == 0
    else:
        folders = {"evaluation_dir": str(tmp_path), "lease_file": str(tmp_path / "lease")}
        checkpoint = CheckpointSpec(source=str(tmp_path), digest="d", files=())
        spec = StageSpec(name="stage", node="here", checkpoint=checkpoint, **folders)
        where = {"path": str(tmp_path), "rung": "storage", "bytes": 0, "storage_bytes": 0}
        staged = Staged(name="stage", node="here", seconds=0.0, **where)
        precursor.clear(Holding(spec=spec, staged=staged, slot=None), "released")
    assert not dead.exists()
