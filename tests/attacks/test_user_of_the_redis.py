"""Attacks of another user of the same Redis: RQ's commands."""

from __future__ import annotations

from dev_cluster.testing import wait_until
from rq.command import send_shutdown_command
from support.metric_jobs import Bench
from support.metric_jobs import running as supervised

from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client
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
