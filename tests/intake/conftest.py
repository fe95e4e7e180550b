"""A folder for tests of several users: pytest's own are its user's alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which anybody may look."""
    folder = Path(tempfile.mkdtemp(prefix="open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
