"""What the daemon's tests share: the scores of what it watches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import sites, toys


@pytest.fixture(scope="session")
def expected(toy_model: Path) -> dict[str, dict[str, Any]]:
    """lm-eval's own results of the two tasks, one run a task."""
    return toys.expected(toy_model, sites.WATCHED)
