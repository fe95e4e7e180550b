"""A real Valkey for the tests of this folder, in a work folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from served import served_work

from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client


@pytest.fixture(scope="session")
def shared_work() -> Iterator[WorkPaths]:
    """A work folder whose server serves the whole session: tests use evaluations of their own."""
    with served_work("redis") as made:
        yield made


@pytest.fixture
def client(shared_work: WorkPaths) -> Iterator[redis.Redis]:
    with redis_client.connect(shared_work.redis_address) as made:
        yield made


@pytest.fixture
def work(tmp_path: Path) -> WorkPaths:
    """A work folder without a server."""
    return WorkPaths(tmp_path / "work")
