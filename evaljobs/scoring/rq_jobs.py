"""Metric jobs as RQ keeps them: their names, the guarded job class, and recovery of jobs whose worker died.

Rule: a job read from Redis is data: one function name of `FUNCTIONS` with one path; callbacks, webhooks and repeats are
dropped. Another name is refused where it is read, before any import.
One queue per evaluation: RQ pops a job of a single queue through an intermediate list, so a worker that dies while it
pops loses no job.
Called by the metric workers, their supervisor, and the coordinator's metric queue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import redis
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.serializers import JSONSerializer

EXECUTE = "evaljobs.scoring.worker.execute"
SCORE = "evaljobs.scoring.worker.score"
# kind of a metric spec -> the name of its RQ job. The names are labels: nothing is imported by them.
FUNCTIONS: Mapping[str, str] = {"execute": EXECUTE, "score": SCORE}

# seconds between two signs of a busy worker; a job is queued again HEARTBEAT_TTL seconds after its worker's last sign
HEARTBEAT_SECONDS = 2
HEARTBEAT_TTL = 10
RECOVER_SECONDS = 3.0  # between two looks for such jobs: with HEARTBEAT_TTL, recovery takes less than 15 s
POPPED_MS = 5_000  # ms after which a popped job that no worker has started is queued again
SEEN_MS = 30_000  # ms that the mark "seen popped" lives
# score of a running job that is to be queued again; a worker's sign sets it to a time of today
_GIVEN_UP = 1.0


class GuardedJob(Job):  # type: ignore[misc]
    """A job from Redis that imports nothing, calls nothing back and sends nothing, whatever its record says."""

    def restore(self, raw_data: Any) -> None:
        super().restore(raw_data)
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self.webhooks: list[Any] = []
        self.repeats_left = None
        self._dependency_ids: list[str] = []

    def order(self) -> tuple[str, str]:
        """(kind of spec, path of the spec); ValueError where the job is no metric job."""
        for kind, function in FUNCTIONS.items():
            if function == self.func_name:
                return kind, str(self.args[0])
        raise ValueError(f"its function {str(self.func_name)[:80]!r} is not on the list")


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


def open_queue(client: redis.Redis, evaluation_id: str, job_class: type[GuardedJob] = GuardedJob) -> Any:
    """RQ's queue of an evaluation. Touches nothing."""
    return Queue(queue_name(evaluation_id), connection=client, job_class=job_class, serializer=JSONSerializer)


def popped_ids(queue: Any) -> list[str]:
    """Jobs that a worker has popped and not started yet."""
    return [i.decode() for i in queue.connection.lrange(queue.intermediate_queue_key, 0, -1)]


def is_idle(queue: Any) -> bool:
    """Whether no job is queued, popped or running."""
    keys = (queue.key, queue.intermediate_queue_key, queue.started_job_registry.key)
    return not queue.connection.exists(*keys)  # Redis removes an empty list


_TO_ITS_PLACE = """
local queue, job, mine, prefix = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
if redis.call('lrem', queue, 1, job) == 0 then return end
redis.pcall('hset', prefix .. job, 'evalspan_seconds', mine)
local waiting = redis.call('lrange', queue, 0, -1)
for place = #waiting, 1, -1 do
  local seconds = redis.pcall('hget', prefix .. waiting[place], 'evalspan_seconds')
  if type(seconds) ~= 'string' or (tonumber(seconds) or 0) >= mine then
    redis.call('linsert', queue, 'after', waiting[place], job)
    return
  end
end
redis.call('lpush', queue, job)
"""  # one script: a job that a worker has popped stays popped, and no worker looks while the job is in no list


def to_its_place(queue: Any, rq_id: str, seconds: float) -> None:
    """Move a queued job behind the last one that is predicted to take as long or longer.

    RQ's own ways are no order by length: it enqueues at the front or at the back, and with several queues it pops
    without the intermediate list.
    """
    queue.connection.eval(_TO_ITS_PLACE, 1, queue.key, rq_id, seconds, queue.job_class.key_for(""))


def recover(queue: Any) -> None:
    """Queue the jobs of dead workers again, HEARTBEAT_TTL + RECOVER_SECONDS after the death at the latest.

    Any number of processes may call it. RQ's own clean-up takes 1 to 11 minutes and compares the clocks of two hosts:
    where the looking host's clock is ahead, RQ would queue every running job again. Here the expiry of keys in Redis
    decides.
    """
    guard = f"{queue.key}:recovering"
    if not queue.connection.set(guard, "1", nx=True, px=5_000):
        return  # another process does it at this moment: two at once would queue a job twice
    try:
        beats = _of_executions(queue, "last_heartbeat")  # None HEARTBEAT_TTL seconds after the last sign
        _mark_given_up(queue, [entry for entry, beat in beats.items() if beat is None])
        queue.started_job_registry.cleanup(_GIVEN_UP)
        for popped in popped_ids(queue):
            _recover_popped(queue, popped)
    finally:
        queue.connection.delete(guard)


def give_up(queue: Any, worker: str) -> None:
    """Have the next `recover` queue the running job of a dead worker. `worker`: how the worker's name begins.

    The worker writes its name to the execution before it forks; the work-horse writes it to the job later.
    """
    names = _of_executions(queue, "worker_name")
    _mark_given_up(queue, [e for e, name in names.items() if (name or b"").startswith(worker.encode())])


def _mark_given_up(queue: Any, entries: list[bytes]) -> None:
    """Entries of RQ's registry of running jobs ("job:execution"); a sign of the worker undoes the mark."""
    if entries:
        queue.connection.zadd(queue.started_job_registry.key, dict.fromkeys(entries, 0), xx=True)


def _of_executions(queue: Any, name: str) -> dict[bytes, bytes | None]:
    """Running jobs ("job:execution") with this field of their execution record; None where it is gone."""
    running = queue.connection.zrange(queue.started_job_registry.key, 0, -1)
    with queue.connection.pipeline(transaction=False) as pipe:
        for entry in running:
            pipe.hget(f"rq:execution:{entry.decode()}", name)
        return dict(zip(running, pipe.execute(), strict=True))


def _recover_popped(queue: Any, popped: str) -> None:
    connection, intermediate = queue.connection, queue.intermediate_queue_key
    if popped in queue.started_job_registry:
        return
    job = queue.fetch_job(popped)
    if job is None or job.get_status(refresh=False) in (JobStatus.FINISHED, JobStatus.FAILED):
        connection.lrem(intermediate, 1, popped)
        return
    seen = f"{intermediate}:seen:{popped}"
    if connection.set(seen, "1", nx=True, px=SEEN_MS):
        return
    if SEEN_MS - connection.pttl(seen) < POPPED_MS:
        return
    waiting = queue.get_job_position(popped) is not None
    with connection.pipeline() as pipe:
        pipe.lrem(intermediate, 1, popped)
        pipe.delete(seen)
        if not waiting:
            pipe.lpush(queue.key, popped)
        pipe.execute()
