"""Attacks of another user of the same Redis: RQ's commands, and a server that is none."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from rq.command import send_shutdown_command
from support.metric_jobs import Bench
from support.metric_jobs import running as supervised

from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import RedisAddress
from evaljobs.queue.work_queue import WorkQueue
from evaljobs.scoring import rq_jobs


def test_nothing_in_redis_commands_a_worker(shared_work: WorkPaths) -> None:
    """RQ's own commands and its suspension, which hold for all workers of a server, hold for no worker of evalspan."""
    bench = Bench(shared_work, "commanded")
    client = redis_client.connect(shared_work.redis_address)
    client.set("rq:suspended", 1)
    try:
        with supervised(bench) as process:
            bench.enqueue("first")
            wait_until(lambda: bench.failed("first"))
            for name in client.smembers(f"rq:workers:{rq_jobs.queue_name(bench.evaluation)}"):
                send_shutdown_command(client, name.decode().removeprefix("rq:worker:"))
            bench.enqueue("second")
            wait_until(lambda: bench.failed("second"))
            assert process.poll() is None
    finally:
        client.delete("rq:suspended")


# --- the address -----------------------------------------------------------------------------------------------------


def test_a_server_that_is_none_of_ours_is_no_queue(tmp_path: Path) -> None:
    """A stranger's program at the port of a server that has ended: whatever it answers is Redis being away."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        work = WorkPaths(tmp_path)
        address = RedisAddress(host="127.0.0.1", port=listener.getsockname()[1], username="u")
        redis_client.publish(address, work.redis_address)

        def serve() -> None:
            for answer in (
                b"-ERR " + b"x" * (1 << 16),
                b"HTTP/1.1 200 OK\r\n\r\n",
                b"*1000000000\r\n",
                b"\x00" * 64,
                b"$-5\r\n",
            ):
                for _ in range(2):
                    connection, _where = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(answer + b"\r\n")

        threading.Thread(target=serve, daemon=True).start()
        for _ in range(5):
            with pytest.raises(redis_client.QueueUnavailable):
                WorkQueue.connect(work.redis_address, "e").snapshot()
