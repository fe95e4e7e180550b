"""Metric jobs as RQ keeps them: names, the guarded job class, and recovery of jobs whose worker died.

Rule: whoever can write to Redis must not thereby run code as us. A job read from Redis is data: one of our function
names with one path, no callbacks, no webhooks, no repeats; anything else is refused where it is read, and nothing is
imported on its behalf. One queue per evaluation: RQ moves a job of a single queue to an intermediate list while it is
popped, so that one dying worker cannot lose it.
It does not know: what a job computes.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import redis
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

EXECUTE = "evaljobs.scoring.worker.execute"
SCORE = "evaljobs.scoring.worker.score"
FUNCTIONS = (EXECUTE, SCORE)

# A job is given up HEARTBEAT_TTL after its worker's last sign; with a look every RECOVER_SECONDS that is below 15 s.
HEARTBEAT_SECONDS = 2
HEARTBEAT_TTL = 10
RECOVER_SECONDS = 3.0
POPPED_MS = 5_000  # a popped job that nobody started by then was lost with its worker
SEEN_MS = 30_000
_GIVEN_UP = (
    1.0  # the score of a running job that is to be queued again; a worker's sign gives it a time of today
)

MAX_DATA = 1 << 16  # bytes of a job's decompressed payload; ours have a few hundred
_REFUSED = json.dumps(["refused", None, [], {}]).encode()


class GuardedJob(Job):  # type: ignore[misc]
    """A job from Redis, disarmed: it never imports, calls back or sends anything of its own choosing."""

    @property
    def func(self) -> Any:
        """Nobody but our worker (which overrides this) runs jobs."""
        raise PermissionError(f"job {self.id} may not be run here")

    @property
    def success_callback(self) -> None:
        return None

    @property
    def failure_callback(self) -> None:
        return None

    @property
    def stopped_callback(self) -> None:
        return None

    def restore(self, raw_data: Any) -> None:
        """Take over what Redis holds; NoSuchJobError where that is no job at all."""
        try:
            super().restore(_bounded(raw_data))
        except NoSuchJobError:
            raise
        except Exception as error:
            raise NoSuchJobError(f"job {self.id} in Redis is malformed: {error!r}") from error
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
        self.webhooks: list[Any] = []
        self.repeats_left = None
        self._dependency_ids: list[str] = []

    def order(self) -> tuple[str, str]:
        """(function name, path); ValueError with the reason where it is not one of ours."""
        try:
            name, instance, args, kwargs = self.func_name, self.instance, self.args, self.kwargs
        except Exception as error:
            raise ValueError("its payload is not JSON of ours") from error
        if name not in FUNCTIONS:
            raise ValueError(f"its function {str(name)[:80]!r} is not on the list")
        if instance is not None or kwargs != {} or not isinstance(args, list) or len(args) != 1:
            raise ValueError("it does not have exactly one argument")
        if not isinstance(args[0], str) or "\0" in args[0]:
            raise ValueError("its argument is not a path")
        return name, args[0]


def _bounded(raw: Any) -> dict[Any, Any]:
    """Compressed fields that would grow beyond reason are replaced before RQ unpacks them."""
    bounded = dict(raw)
    for field, substitute in ((b"data", _REFUSED), (b"exc_info", b"")):
        value = bounded.get(field, b"")
        try:
            small = len(zlib.decompressobj().decompress(value, MAX_DATA + 1)) <= MAX_DATA
        except zlib.error:
            small = len(value) <= MAX_DATA
        if not small:
            bounded[field] = substitute
    return bounded


# --- names -----------------------------------------------------------------------------------------------------------


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


def started_registry(queue: Any) -> Any:
    return StartedJobRegistry(
        queue.name, connection=queue.connection, job_class=queue.job_class, serializer=JSONSerializer
    )


def popped_ids(queue: Any) -> list[str]:
    """Jobs on their way from the queue into a worker."""
    return [i.decode() for i in queue.connection.lrange(queue.intermediate_queue_key, 0, -1)]


def is_idle(queue: Any) -> bool:
    """Nothing is queued, on its way or running."""
    with queue.connection.pipeline(transaction=True) as pipe:
        pipe.llen(queue.key)
        pipe.llen(queue.intermediate_queue_key)
        pipe.zcard(started_registry(queue).key)
        return not any(pipe.execute())


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
"""  # in one go: a worker that has it already keeps it, and none looks while it is in no list


def to_its_place(queue: Any, rq_id: str, seconds: float) -> None:
    """Move a queued job behind the last that is predicted to take as long or longer. RQ itself knows front and back only."""
    queue.connection.eval(_TO_ITS_PLACE, 1, queue.key, rq_id, seconds, queue.job_class.key_for(""))


# --- recovery ----------------------------------------------------------------------------------------------------------


def recover(queue: Any) -> None:
    """Put jobs of dead workers back, within HEARTBEAT_TTL + RECOVER_SECONDS; any number of processes may call it.
    Jobs of workers that were given up (`give_up`) are put back at once.

    RQ's own clean-up does the same after 1 to 11 minutes, and compares the clocks of two hosts: where ours is ahead of a
    worker's it would take every running job for lost. Here Redis alone says whose last sign is too old.
    """
    guard = f"{queue.key}:recovering"
    if not queue.connection.set(guard, "1", nx=True, px=5_000):
        return  # another process is at it: two at once would queue a job twice
    try:
        silent = _silent(queue)
        if silent:  # unless its worker gives a sign first
            queue.connection.zadd(started_registry(queue).key, dict.fromkeys(silent, 0), xx=True)
        started_registry(queue).cleanup(_GIVEN_UP)
        for popped in popped_ids(queue):
            _recover_popped(queue, popped)
    finally:
        queue.connection.delete(guard)


def give_up(queue: Any, worker: str) -> None:
    """Have `recover` queue again at once what a worker was at whose name begins so: its parent has seen it dead."""
    connection, registry = queue.connection, started_registry(queue)
    running = connection.zrange(registry.key, 0, -1)
    popped = popped_ids(queue)
    with connection.pipeline(transaction=False) as pipe:
        for job in (*(entry.decode().rpartition(":")[0] for entry in running), *popped):
            pipe.hget(queue.job_class.key_for(job), "worker_name")
        its = [bool(name) and name.startswith(worker.encode()) for name in pipe.execute()]
    with connection.pipeline(transaction=False) as pipe:
        for entry, mine in zip(running, its, strict=False):
            if mine:
                pipe.zadd(registry.key, {entry: 0}, xx=True)
        for job, mine in zip(popped, its[len(running) :], strict=True):
            if mine:  # as one that was seen long ago
                pipe.set(_seen_key(queue, job), "1", px=SEEN_MS - POPPED_MS)
        pipe.execute()


def _seen_key(queue: Any, job: str) -> str:
    return f"{queue.intermediate_queue_key}:seen:{job}"


def _silent(queue: Any) -> list[bytes]:
    """Running jobs (RQ's "job:execution") whose execution record has expired: its life is HEARTBEAT_TTL after each sign."""
    running = queue.connection.zrange(started_registry(queue).key, 0, -1)
    with queue.connection.pipeline(transaction=False) as pipe:
        for entry in running:
            pipe.exists(f"rq:execution:{entry.decode()}")
        there = pipe.execute()
    return [entry for entry, alive in zip(running, there, strict=True) if not alive]


def _recover_popped(queue: Any, popped: str) -> None:
    connection, intermediate = queue.connection, queue.intermediate_queue_key
    if popped in started_registry(queue):
        return
    job = queue.fetch_job(popped)
    if job is None or job.get_status(refresh=False) in (JobStatus.FINISHED, JobStatus.FAILED):
        connection.lrem(intermediate, 1, popped)
        return
    seen = _seen_key(queue, popped)
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
