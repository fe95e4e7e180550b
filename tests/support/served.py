"""A work folder with its own Redis server, for fixtures."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from coordinator.site.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client


@contextmanager
def served_work(name):
    """The folder's path is short: a socket may have to fit."""
    folder = Path(tempfile.mkdtemp(prefix=f"evalspan-{name}-"))
    server = RedisServer(WorkPaths(folder))
    server.ensure()
    try:
        yield WorkPaths(folder)
    finally:
        server.stop()
        shutil.rmtree(folder)


def server_pid(work):
    """The server's pid, as the server says it."""
    with redis_client.make_client(redis_client.read_address(work.redis_address)) as client:
        return int(client.info("server")["process_id"])
