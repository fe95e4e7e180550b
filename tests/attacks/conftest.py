"""What several attackers need."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from support.with_root import USER


@pytest.fixture
def shared():
    """A folder that all may read, and in which USER has one of his own."""
    made = Path(tempfile.mkdtemp(prefix="attack-"))
    made.chmod(0o755)
    (made / "home").mkdir()
    os.chown(made / "home", USER, USER)
    yield made
    shutil.rmtree(made)
