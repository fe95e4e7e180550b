"""The work folder that the tests of this folder read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trainings import two_trainings


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return two_trainings(tmp_path / "work")
