"""A work folder with its own Redis server, for fixtures."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client


@contextmanager
def served_work(name: str) -> Iterator[WorkPaths]:
    """The folder's path is short: a socket may have to fit."""
    folder = Path(tempfile.mkdtemp(prefix=f"evalspan-{name}-"))
    server = RedisServer(WorkPaths(folder))
    server.ensure()
    try:
        yield WorkPaths(folder)
    finally:
        server.stop()
        shutil.rmtree(folder)


def server_pid(work: WorkPaths) -> int:
    """The server's pid, as the server says it."""
    with redis_client.connect(work.redis_address) as client:
        return int(client.info("server")["process_id"])
