"""A world of its own for each test, in real node memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from staging.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    root = Path(tempfile.mkdtemp(prefix="staging-test-", dir="/dev/shm"))
    (root / "foreign").write_text("not ours")
    try:
        yield World(folder=tmp_path, root=root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
