"""A real Valkey for the tests of this folder, in a work folder of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from coordinator.redis_server import RedisServer
from evaljobs import redis_address
from evaljobs.paths import WorkPaths


@pytest.fixture(scope="session")
def shared_work() -> Iterator[WorkPaths]:
    """A work folder whose server serves the whole session: tests use evaluations of their own."""
    folder = Path(tempfile.mkdtemp(prefix="evalspan-redis-"))
    server = RedisServer(WorkPaths(folder))
    server.ensure()
    yield WorkPaths(folder)
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
def client(shared_work: WorkPaths) -> Iterator[redis.Redis]:
    with redis_address.connect(shared_work.redis_address) as made:
        yield made


@pytest.fixture
def work(tmp_path: Path) -> WorkPaths:
    """A work folder without a server."""
    return WorkPaths(tmp_path / "work")
