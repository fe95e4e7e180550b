"""The coordinator's side of the metric jobs: enqueue by name, list, recover. The only module here that imports RQ.

Rule: RQ is no truth. A job has a deterministic id and one argument, the path of its spec. Enqueuing a queued or running
job changes nothing. Enqueuing a job that RQ has finished, failed or partly lost starts it afresh; a job whose outcome
is on disk returns at once. Outcomes are files: RQ's word on a job is only a reason to look at them.
Called by `runtime`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rq import Retry
from rq.exceptions import AbandonedJobError, DuplicateJobError, NoSuchJobError

from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import QueueUnavailable, RedisAddress, explained
from evaljobs.scoring import rq_jobs

__all__ = ["MetricQueue", "QueueUnavailable"]

T = TypeVar("T")

RETRIES = 2  # further attempts after a work-horse or its worker died; a job's own errors are outcomes and not retried
RESULT_SECONDS = 600  # that RQ keeps the record of a finished job
FAILURE_SECONDS = 24 * 3600  # that RQ keeps the record of a failed job
# RQ's limit of a job; the worker sets the real one from the spec that it reads (evaljobs/scoring/worker.py)
TIMEOUT_SECONDS = 7 * 24 * 3600


class MetricQueue:
    """The metric jobs of one evaluation. Methods raise QueueUnavailable where Redis is away; all may be repeated."""

    def __init__(self, redis_file: Path, evaluation_id: str) -> None:
        self.evaluation_id = evaluation_id
        self._file = redis_file
        self._address: RedisAddress | None = None
        self._queue: Any = None

    def enqueue(self, name: str, spec: Path, *, first: bool = False) -> None:
        """Queue a job once; `first`: ahead of those that wait."""
        self._with(lambda queue: self._enqueue(queue, name, spec, first))

    def recover(self) -> None:
        """Queue the jobs of dead workers again (within 15 s of their death, if called every 3 s)."""
        self._with(rq_jobs.recover)

    def known(self) -> tuple[str, ...]:
        """Names of all jobs that are queued, popped or running: an outcome may still come from each."""
        return tuple(sorted(self._with(self._known)))

    def failed(self) -> dict[str, str]:
        """Failed jobs: name -> RQ's reason, one line. Their outcomes say more."""
        return self._with(self._failed)

    def remove(self) -> None:
        """Delete every job of the evaluation from Redis. To be called once no worker runs one."""
        self._with(self._remove)

    # --- with a queue ------------------------------------------------------------------------------------------------

    def _with(self, effect: Callable[[Any], T]) -> T:
        """Once more after a broken connection, at the address as it is published now."""
        return redis_client.once_more(lambda: self._once(effect), self._forget_address)

    def _forget_address(self) -> None:
        self._queue = None

    def _once(self, effect: Callable[[Any], T]) -> T:
        if self._queue is None:
            self._address = redis_client.read(self._file)
            client = redis_client.shared(self._address)
            self._queue = rq_jobs.open_queue(client, self.evaluation_id)
        with explained(self._address.where if self._address else "its address"):
            return effect(self._queue)

    def _enqueue(self, queue: Any, name: str, spec: Path, first: bool) -> None:
        rq_id = rq_jobs.job_id(self.evaluation_id, name)
        try:
            self._push(queue, rq_id, spec, first)
        except DuplicateJobError:
            if rq_id in self._live(queue):
                return
            _forget(queue, rq_id)
            with suppress(DuplicateJobError):
                self._push(queue, rq_id, spec, first)

    def _push(self, queue: Any, rq_id: str, spec: Path, first: bool) -> None:
        queue.enqueue_call(
            rq_jobs.FUNCTION,
            args=(str(spec),),
            job_id=rq_id,
            unique=True,
            at_front=first,
            # ahead of the queued jobs, which it preceded at its first attempt
            retry=Retry(max=RETRIES, enqueue_at_front=True),
            timeout=TIMEOUT_SECONDS,
            result_ttl=RESULT_SECONDS,
            failure_ttl=FAILURE_SECONDS,
            description=spec.name,
        )

    def _live(self, queue: Any) -> set[str]:
        """Ids in the queue, on their way to a worker, or running; one moment's view."""
        with queue.connection.pipeline(transaction=True) as pipe:
            pipe.lrange(queue.key, 0, -1)
            pipe.lrange(queue.intermediate_queue_key, 0, -1)
            pipe.zrange(queue.started_job_registry.key, 0, -1)
            queued, popped, running = pipe.execute()
        return {i.decode() for i in (*queued, *popped)} | {_of_execution(e) for e in running}

    def _known(self, queue: Any) -> set[str]:
        return {rq_jobs.job_name(self.evaluation_id, i) for i in self._live(queue)}

    def _failed(self, queue: Any) -> dict[str, str]:
        failed = queue.failed_job_registry.get_job_ids(cleanup=False)
        jobs = queue.job_class.fetch_many(failed, connection=queue.connection, serializer=queue.serializer)
        return {rq_jobs.job_name(self.evaluation_id, j.id): _last_line(j) for j in jobs if j is not None}

    def _remove(self, queue: Any) -> None:
        for job in self._live(queue) | set(queue.failed_job_registry.get_job_ids(cleanup=False)):
            _forget(queue, job)
        finished = queue.finished_job_registry.get_job_ids(cleanup=False)
        if finished:  # RQ would keep them for RESULT_SECONDS; their results lie in a key beside them
            queue.connection.delete(
                *map(queue.job_class.key_for, finished), *(f"rq:results:{job}" for job in finished)
            )
        queue.delete(delete_jobs=True)
        registries = (queue.started_job_registry, queue.failed_job_registry, queue.finished_job_registry)
        popped = queue.intermediate_queue_key
        seen = queue.connection.scan_iter(match=f"{popped}:first_seen:*", count=1000)  # by RQ, for a day
        queue.connection.delete(queue.key, popped, *(r.key for r in registries), *seen)


def _forget(queue: Any, rq_id: str) -> None:
    """Delete a job from Redis. RQ cannot read what a heartbeat leaves in an emptied Redis (KeyError), nor an execution
    that has expired beside its list (ValueError).
    """
    with suppress(NoSuchJobError, KeyError, ValueError):
        queue.job_class.fetch(rq_id, connection=queue.connection, serializer=queue.serializer).delete()
    parts = queue.connection.zrange(f"rq:executions:{rq_id}", 0, -1)
    executions = [f"rq:execution:{rq_id}:{part.decode()}" for part in parts]
    keys = (queue.job_class.key_for(rq_id), f"rq:executions:{rq_id}", f"rq:results:{rq_id}")
    queue.connection.delete(*keys, *executions)


def _of_execution(entry: bytes) -> str:
    """RQ's registry of running jobs holds "job:execution"."""
    return entry.decode().rpartition(":")[0]


def _last_line(job: Any) -> str:
    result = job.latest_result()
    text = ((result and result.exc_string) or "").strip()
    if AbandonedJobError.__name__ in text:  # RQ's clean-up, not a worker, wrote it
        return f"its worker died {RETRIES + 1} times"
    return text.splitlines()[-1][:400] if text else "no reason is known"
