"""A disk that is full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A work folder on a file system of its own without a free byte; its spool folder is there."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    try:
        (folder / "spool").mkdir()
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
