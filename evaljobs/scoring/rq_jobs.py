"""Metric jobs as RQ keeps them: their names, their job class, and recovery of jobs whose worker died.

Rule: a job has one argument, the path of its spec. Its function is a label that nothing imports, and its callbacks are
dropped. One queue per evaluation: RQ pops a job of a single queue through an intermediate list, so a worker that dies
while it pops loses no job.
Called by the metric workers, their supervisor, and the coordinator's metric queue.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import redis
from redis.exceptions import LockError
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer

from evaljobs.contract.storage import patiently

FUNCTION = "evaljobs.scoring.worker.run_spec"

# seconds between two signs of a busy worker; a job is queued again HEARTBEAT_TTL seconds after its worker's last sign
HEARTBEAT_SECONDS = 2
HEARTBEAT_TTL = 8
RECOVER_SECONDS = 2.0  # between two looks for such jobs: with HEARTBEAT_TTL, recovery takes less than 15 s
GUARD_SECONDS = 5.0  # for which one process may keep the others from such a look, should it die meanwhile
# score of a running job that is to be queued again; a worker's sign sets it to a time of today
_GIVEN_UP = 1.0


class MetricJob(Job):  # type: ignore[misc]
    """A job that imports nothing and calls nothing back, whatever its record says."""

    def restore(self, raw_data: Any) -> None:
        super().restore(raw_data)
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None

    def _execute(self) -> str:
        from evaljobs.scoring import worker  # noqa: PLC0415 (the coordinator runs none)

        return patiently(lambda: worker.run_spec(worker.read_spec(self.args[0])))


def queue_name(evaluation_id: str) -> str:
    return f"evalspan-{evaluation_id}"


def job_id(evaluation_id: str, name: str) -> str:
    """RQ's id of a metric job: deterministic and, given the evaluation, reversible. RQ allows [A-Za-z0-9_-]."""
    return f"{_escape(evaluation_id)}-{_escape(name)}"


def job_name(evaluation_id: str, rq_id: str) -> str:
    """Inverse of `job_id`."""
    return _unescape(rq_id.removeprefix(f"{_escape(evaluation_id)}-"))


def _escape(text: str) -> str:
    return re.sub(rb"[^A-Za-z0-9-]", lambda m: b"_%02X" % m[0][0], text.encode()).decode()


def _unescape(text: str) -> str:
    return re.sub(rb"_([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), text.encode()).decode()


def open_queue(client: redis.Redis, evaluation_id: str) -> Any:
    """RQ's queue of an evaluation. Touches nothing."""
    return Queue(queue_name(evaluation_id), connection=client, job_class=MetricJob, serializer=JSONSerializer)


def popped_ids(queue: Any) -> list[str]:
    """Jobs that a worker has popped and not started yet."""
    return [i.decode() for i in queue.connection.lrange(queue.intermediate_queue_key, 0, -1)]


def recover(queue: Any) -> None:
    """Queue the jobs of dead workers again, HEARTBEAT_TTL + RECOVER_SECONDS after the death at the latest.

    Any number of processes may call it. RQ's own clean-up compares the clocks of two hosts: where the looking host's
    clock is ahead, RQ would queue every running job again. Here the expiry of keys in Redis decides. A job whose
    worker died between popping and starting it is queued again after a minute.
    """
    connection, running = queue.connection, queue.started_job_registry
    guard = connection.lock(f"{queue.key}:recovering", timeout=GUARD_SECONDS)
    if not guard.acquire(blocking=False):
        return  # another process does it at this moment: two at once would queue a job twice
    try:
        for entry in connection.zrange(running.key, 0, -1):  # "job:execution"
            # None HEARTBEAT_TTL seconds after the worker's last sign, which would also undo the mark
            if connection.hget(f"rq:execution:{entry.decode()}", "last_heartbeat") is None:
                connection.zadd(running.key, {entry: 0}, xx=True)
        running.cleanup(_GIVEN_UP)
        popped = IntermediateQueue(queue.key, connection)
        for rq_id in popped.get_job_ids():
            if rq_id in running or popped.set_first_seen(rq_id) or not popped.should_be_cleaned_up(rq_id):
                continue
            queue.push_job_id(rq_id, at_front=True)
            popped.remove(rq_id)
    finally:
        with suppress(LockError):  # this took so long that it is over, or another process's by now
            guard.release()
