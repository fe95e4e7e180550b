"""What several attackers need."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.with_root import USER

STRANGER = USER + 1


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all may read, and in which USER and a stranger have folders of their own."""
    made = Path(tempfile.mkdtemp(prefix="attack-"))
    made.chmod(0o755)
    for name, uid in (("home", USER), ("stranger", STRANGER)):
        (made / name).mkdir()
        os.chown(made / name, uid, uid)
    yield made
    shutil.rmtree(made)
