"""Laws of RQ's records that others may write to: no more of them than a bound reaches the coordinator or a worker."""

from __future__ import annotations

import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Iterator

import pytest
from rq.exceptions import NoSuchJobError
from support.served import served_work

from coordinator.services.metric_queue import MetricQueue
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client
from evaljobs.scoring import rq_jobs
from evaljobs.scoring.rq_jobs import MAX_DATA, GuardedJob

MOST_BYTES = 4 << 20  # of memory, for records that hold a hundred times as much


@pytest.fixture
def served() -> Iterator[WorkPaths]:
    with served_work("bounded") as made:
        yield made


def test_results_and_fields_of_any_size_cost_bounded_memory(served: WorkPaths) -> None:
    """A result that unpacks to 256 MB, and a field of 32: the reason is cut, the job is refused."""
    queue = MetricQueue(served.redis_address, "e")
    spec = served.root / "specs" / "a.json"
    queue.enqueue("score", "a", spec)
    ids = {name: rq_jobs.job_id("e", name) for name in ("a", "bomb", "wide")}
    with redis_client.connect(served.redis_address) as client:
        rq_queue = rq_jobs.open_queue(client, "e")
        registry = rq_queue.failed_job_registry.key
        packer = zlib.compressobj()
        bomb = b"".join(packer.compress(b"y" * (1 << 20)) for _ in range(256)) + packer.flush()
        client.xadd(f"rq:results:{ids['a']}", {"type": 2, "exc_string": b64encode(bomb)})
        whole = client.hgetall(f"rq:job:{ids['a']}")
        client.hset(f"rq:job:{ids['bomb']}", mapping={**whole, b"data": b"x" * (32 << 20)})
        del whole
        client.hset(f"rq:job:{ids['wide']}", mapping={f"f{n}": "x" for n in range(1000)})
        client.zadd(registry, dict.fromkeys(ids.values(), 9e12))
        tracemalloc.start()
        try:
            failed = queue.status().failed
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert failed.keys() == {"a", "bomb"}
        assert set(failed["a"]) == {"y"}
        assert peak < MOST_BYTES
        job = GuardedJob.fetch(ids["bomb"], connection=client, serializer=rq_queue.serializer)
        with pytest.raises(ValueError, match="not a metric job"):
            job.order()
        with pytest.raises(NoSuchJobError):
            GuardedJob.fetch(ids["wide"], connection=client, serializer=rq_queue.serializer)


def test_the_reason_of_a_failure_is_its_last_line(served: WorkPaths) -> None:
    """As RQ itself writes it, also where it is as long as a traceback may be."""
    queue = MetricQueue(served.redis_address, "e")
    queue.enqueue("score", "a", served.root / "specs" / "a.json")
    with redis_client.connect(served.redis_address) as client:
        rq_queue = rq_jobs.open_queue(client, "e")
        job = rq_queue.fetch_job(rq_jobs.job_id("e", "a"))
        text = "Traceback\n" + "  a line\n" * (MAX_DATA // 20) + "refused: no spec"
        job._handle_failure(text, pipeline := client.pipeline(), worker_name="w")
        pipeline.execute()
        rq_queue.failed_job_registry.add(job, ttl=100, exc_string=text)
        assert queue.status().failed == {"a": "refused: no spec"}
        assert job.latest_result().exc_string == text
