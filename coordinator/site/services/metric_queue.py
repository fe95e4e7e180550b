"""The coordinator's side of metric jobs: enqueue by name, find those that are gone. The only module here that imports RQ.

Rule: RQ holds no truth. A job has a deterministic id and one argument, the path of its spec. Enqueuing a queued or running
job changes nothing. Any other is enqueued again; a job whose outcome is on disk returns at once. Outcomes are files: RQ's
status of a job is only a reason to look for them. Called by `runtime`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from rq import Queue, Retry
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from evaljobs.queue.redis_client import Link, QueueUnavailable, metric_queue

__all__ = ["MetricQueue", "QueueUnavailable"]

T = TypeVar("T")

FUNCTION_LABEL = "evaljobs.scoring.worker.run_spec"  # a label that no worker imports
# further attempts after a work-horse or its worker died; a job's own errors are outcomes and are not retried
RETRIES = 2
RESULT_SECONDS = 600  # how long RQ keeps the record of a finished job
FAILURE_SECONDS = 24 * 3600  # how long RQ keeps the record of a failed job
# limit passed to RQ; the worker sets the real one from the job's spec (evaljobs/scoring/worker.py)
TIMEOUT_SECONDS = 7 * 24 * 3600


class MetricQueue:
    """The metric jobs of one evaluation. Methods raise QueueUnavailable if Redis is unreachable; all may be repeated."""

    def __init__(self, link: Link, evaluation_id: str) -> None:
        self.evaluation_id = evaluation_id
        self._link = link

    def enqueue(self, name: str, spec: Path, *, first: bool = False) -> None:
        """Enqueue a job once; `first`: ahead of pending jobs. One whose worker died has its remaining attempts."""
        self._with(lambda queue: self._enqueue(queue, name, spec, first))

    def gone(self, names: Iterable[str]) -> dict[str, str]:
        """Return jobs that are neither queued nor running: name -> why RQ gave it up, or "" if it has not.

        A job that a worker is just popping also seems gone, so only two consecutive looks count.
        """
        ids = {self.job_id(name): name for name in names}
        return {ids[rq_id]: why for rq_id, why in self._with(lambda queue: _gone(queue, ids)).items()}

    def remove(self) -> None:
        """Delete every job of the evaluation from Redis. Call this once no worker runs one."""
        self._with(self._remove)

    def job_id(self, name: str) -> str:
        """Return RQ's id of a job: only [A-Za-z0-9_-], unique for each evaluation and name."""
        return f"{_escape(self.evaluation_id)}__{_escape(name)}"

    # --- with a queue ------------------------------------------------------------------------------------------------

    def _with(self, effect: Callable[[Any], T]) -> T:
        name = metric_queue(self.evaluation_id)
        return self._link.call(
            lambda client: effect(Queue(name, connection=client, serializer=JSONSerializer))
        )

    def _enqueue(self, queue: Any, name: str, spec: Path, first: bool) -> None:
        rq_id = self.job_id(name)
        status, retries_left = _record(queue.connection, rq_id)
        if status and rq_id in _living(queue):
            return
        retries = max(0, retries_left - 1) if status == JobStatus.STARTED else RETRIES
        queue.connection.delete(queue.job_class.key_for(rq_id))
        queue.enqueue_call(
            FUNCTION_LABEL,
            args=(str(spec),),
            job_id=rq_id,
            # before the queued jobs, since it preceded them at its first attempt
            at_front=first or status == JobStatus.STARTED,
            retry=Retry(max=retries, enqueue_at_front=True) if retries else None,
            timeout=TIMEOUT_SECONDS,
            result_ttl=RESULT_SECONDS,
            failure_ttl=FAILURE_SECONDS,
            description=spec.name,
        )

    def _remove(self, queue: Any) -> None:
        queue.delete(delete_jobs=False)
        registries = (queue.started_job_registry, queue.failed_job_registry, queue.finished_job_registry)
        jobs = queue.connection.scan_iter(match=f"rq:*:{self.job_id('')}*", count=1000)
        queue.connection.delete(queue.intermediate_queue_key, *(r.key for r in registries), *jobs)


def _escape(text: str) -> str:
    return re.sub(rb"[^A-Za-z0-9-]", lambda m: b"_%02X" % m[0][0], text.encode()).decode()


def _living(queue: Any) -> set[str]:
    """Return ids of queued and running jobs; those whose execution has expired by Redis's clock do not count."""
    queued = queue.get_job_ids()
    running = queue.started_job_registry.get_job_and_execution_ids(cleanup=False)
    with queue.connection.pipeline(transaction=False) as pipe:
        for rq_id, execution in running:
            pipe.exists(f"rq:execution:{rq_id}:{execution}")
        there = pipe.execute()
    return {*queued, *(rq_id for (rq_id, _), lives in zip(running, there, strict=True) if lives)}


def _gone(queue: Any, ids: Iterable[str]) -> dict[str, str]:
    living = _living(queue)
    return {rq_id: _why(queue, rq_id) for rq_id in ids if rq_id not in living}


def _why(queue: Any, rq_id: str) -> str:
    status, retries_left = _record(queue.connection, rq_id)
    if status == JobStatus.STARTED and not retries_left:
        return f"its worker died {RETRIES + 1} times"
    if status != JobStatus.FAILED:
        return ""
    result = queue.job_class(rq_id, connection=queue.connection, serializer=queue.serializer).latest_result()
    text = ((result and result.exc_string) or "").strip()
    return text.splitlines()[-1][:400] if text else "no reason is known"


def _record(connection: Any, rq_id: str) -> tuple[str, int]:
    """Return status and retries left, or "" and 0. RQ's own reading fails on partial records of a wiped Redis."""
    status, left = connection.hmget(Queue.job_class.key_for(rq_id), "status", "retries_left")
    return (status or b"").decode(), int(left or 0)
