"""What the daemon's tests share: the scores of what it watches, and a small disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import sites, toys
from support.with_root import small_disk

from coordinator.runtime import registry


@pytest.fixture(scope="session")
def expected(toy_model: Path) -> dict[str, dict[str, Any]]:
    """lm-eval's own results of the two tasks, one run a task."""
    return toys.expected(toy_model, sites.WATCHED)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(registry, "PARKED_SECONDS", 1.0)
    with small_disk(tmp_path, "16m") as made:
        yield made
