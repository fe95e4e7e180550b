"""What the daemon's tests share: the machine's seeded world, and toy evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import sites, toys
from support.with_root import small_disk

ENTRIES: dict[str, dict[str, int]] = {"toy_choice": {}, "toy_sums": {"limit": 24}}


@pytest.fixture(scope="session")
def expected(toy_model: Path) -> dict[str, dict[str, Any]]:
    """lm-eval's own results of the two tasks, one run a task."""
    return toys.expected(toy_model, ENTRIES)


@pytest.fixture
def site(tmp_path: Path, toy_model: Path) -> Iterator[Any]:
    """A local site whose settings watch a folder of checkpoints, `run`, which is empty still."""
    watch = f'[watch]\nfolders = ["{tmp_path}/run"]\nsuite = "{tmp_path}/toys.toml"\n'
    site = sites.local(tmp_path, toy_model, entries=ENTRIES, more=watch)
    site.env["EVALSPAN_CLUSTER_SLOTS"] = "2"
    yield site
    site.stop_redis()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "16m") as made:
        yield made
