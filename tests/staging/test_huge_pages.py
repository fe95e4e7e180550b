"""Huge pages: a tmpfs of them as a root, and those that are asked for one by one, change no byte and leave nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from dev_cluster.testing import wait_until
from hypothesis import given
from hypothesis import strategies as st
from support.node_memory import MIB, ROOT, NodeMemory

from evaljobs.staging import store
from evaljobs.staging.copy import Copy, copy_files
from evaljobs.staging.huge_pages import DEAR, EXTENT, LAST, Purse, huge_pages

MOUNT = 'mount -t tmpfs -o huge=always,size=256m,mode=0755 none "$0" && exec "$@"'


def test_a_tmpfs_of_huge_pages_is_a_root_like_any_other(world: NodeMemory) -> None:
    """Byte for byte there, on the "shm" rung, and gone after the release. Mounted for the precursor alone."""
    place = world.root / "huge"
    place.mkdir()
    own = ["unshare", "--mount", "sh", "-c", MOUNT, str(place)]
    tried = subprocess.run([*own, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no tmpfs of huge pages can be mounted here: {tried.stderr.strip()}")
    checkpoint = world.checkpoint(size=8 * MIB)
    spec = world.spec(checkpoint, roots=(str(place),))
    path = world.paths.spec(spec.name)
    path.write_text(spec.model_dump_json())
    precursor = subprocess.Popen([*own, sys.executable, "-m", "evaljobs", "stage", str(path)], cwd=ROOT)
    try:
        staged = world.staged()
        assert (staged.rung, staged.storage_bytes) == ("shm", checkpoint.bytes)
        seen = Path(f"/proc/{precursor.pid}/root{place}")  # as the precursor sees it
        home = seen / store.home_name(os.geteuid())
        slot = home / checkpoint.digest
        assert (slot / store.MODEL / "config.json").stat().st_blksize > 4096, "huge pages"
        assert set(json.loads((slot / store.MANIFEST).read_text())["files"]) == {
            f.name for f in checkpoint.files
        }
        for file in checkpoint.files:
            source = Path(checkpoint.source) / file.name
            assert (slot / store.MODEL / file.name).read_bytes() == source.read_bytes()
        world.release()
        wait_until(lambda: world.outcome("cleared"))
        assert precursor.wait(120) == 0
    finally:
        precursor.kill()
        precursor.wait()
    assert not list(place.iterdir())
    place.rmdir()
    assert world.nothing_left()


@pytest.mark.parametrize("size", [EXTENT - 1, EXTENT, 2 * EXTENT + 12_345])
@pytest.mark.parametrize("block", [MIB, 700_001, 3 * MIB])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_bytes_are_the_same_whatever_pages_hold_them(
    world: NodeMemory, tmp_path: Path, size: int, block: int, where: str
) -> None:
    """Several readers, blocks within and across huge pages, a tail that has none; on a disk nothing is made of it."""
    source = tmp_path / "source"
    source.write_bytes(random.Random(size).randbytes(size))
    place = (world.root if where == "memory" else tmp_path) / "target"
    target, purse = os.open(place, os.O_RDWR | os.O_CREAT), Purse()
    os.ftruncate(target, size)
    with huge_pages(target, size, purse) as pages:
        copy = Copy(
            name="f", source=source, size=size, mtime_ns=source.stat().st_mtime_ns, target=target, pages=pages
        )
        sums = copy_files([copy], readers=4, block=block)
    os.close(target)
    assert place.read_bytes() == source.read_bytes()
    assert sums == {"f": xxhash.xxh3_128(source.read_bytes()).hexdigest()}
    assert (pages is None) is (size < EXTENT)
    place.unlink()


@given(st.lists(st.tuples(st.floats(0, 0.01), st.booleans()), max_size=40))
def test_no_more_are_asked_for_once_one_is_refused_or_the_last_were_dear(
    paid: list[tuple[float, bool]],
) -> None:
    """It closes at the first refusal, or when the last eight cost more than small pages would; and stays closed."""
    purse, closed = Purse(), False
    for at, (seconds, made) in enumerate(paid, start=1):
        purse.paid(seconds, made=made)
        last = [s for s, _ in paid[max(0, at - LAST) : at]]
        closed = closed or not made or (len(last) == LAST and sum(last) > LAST * DEAR)
        assert purse.closed is closed
