"""Laws of what RQ keeps of a failed job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.served import served_work

from coordinator.services.metric_queue import MetricQueue
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client
from evaljobs.scoring import rq_jobs

MOST_BYTES = 4 << 20  # of memory, for records that hold a hundred times as much


@pytest.fixture
def served() -> Iterator[WorkPaths]:
    with served_work("bounded") as made:
        yield made


def test_the_reason_of_a_failure_is_its_last_line(served: WorkPaths) -> None:
    """As RQ itself writes it, also where it is as long as a traceback may be."""
    queue = MetricQueue(served.redis_address, "e")
    queue.enqueue("score", "a", served.root / "specs" / "a.json")
    with redis_client.connect(served.redis_address) as client:
        rq_queue = rq_jobs.open_queue(client, "e")
        job = rq_queue.fetch_job(rq_jobs.job_id("e", "a"))
        text = "Traceback\n" + "  a line\n" * (5000) + "refused: no spec"
        job._handle_failure(text, pipeline := client.pipeline(), worker_name="w")
        pipeline.execute()
        rq_queue.failed_job_registry.add(job, ttl=100, exc_string=text)
        assert queue.failed() == {"a": "refused: no spec"}
        assert job.latest_result().exc_string == text
