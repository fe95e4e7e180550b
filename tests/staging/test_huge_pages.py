"""A tmpfs of huge pages as a root: staged there as anywhere else, and left as clean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from staging.world import MIB, ROOT, World, wait_for

from evaljobs import node_memory

MOUNT = 'mount -t tmpfs -o huge=always,size=256m,mode=0755 none "$0" && exec "$@"'


def test_a_tmpfs_of_huge_pages_is_a_root_like_any_other(world: World) -> None:
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
    holder = subprocess.Popen([*own, sys.executable, "-m", "evaljobs", "stage", str(path)], cwd=ROOT)
    try:
        staged = world.staged()
        assert (staged.rung, staged.storage_bytes) == ("shm", checkpoint.bytes)
        seen = Path(f"/proc/{holder.pid}/root{place}")  # as the precursor sees it
        home = seen / node_memory.home_name(os.geteuid())
        slot = home / checkpoint.digest
        assert (slot / node_memory.MODEL / "config.json").stat().st_blksize > 4096, "huge pages"
        assert set(json.loads((slot / node_memory.MANIFEST).read_text())["files"]) == {
            f.name for f in checkpoint.files
        }
        for file in checkpoint.files:
            source = Path(checkpoint.source) / file.name
            assert (slot / node_memory.MODEL / file.name).read_bytes() == source.read_bytes()
        world.release()
        wait_for(lambda: world.outcome("cleared"))
        assert holder.wait(30) == 0
    finally:
        holder.kill()
        holder.wait()
    assert not list(place.iterdir())
    place.rmdir()
    assert world.nothing_left()
