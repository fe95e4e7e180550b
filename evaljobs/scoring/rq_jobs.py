"""Metric jobs as RQ keeps them: their names, the guarded job class, and recovery of jobs whose worker died.

Rule: write access to Redis must not be a way to run code. A job read from Redis is data: one function name of `FUNCTIONS`
with one path, no callbacks, no webhooks, no repeats. Anything else is refused where it is read, before any import.
One queue per evaluation: RQ pops a job of a single queue through an intermediate list, so a worker that dies while it
pops loses no job.
Called by the metric workers, their supervisor, and the coordinator's metric queue.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterable, Mapping
from typing import Any, cast

import redis
from rq.exceptions import NoSuchJobError
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

MAX_DATA = (
    1 << 16
)  # bytes of a job's field and of its decompressed payload; evalspan's own have a few hundred
MAX_FIELDS = 64  # of a job's record; RQ's own have some thirty
_REFUSED = json.dumps(["refused", None, [], {}]).encode()


# A record as Redis gives it; a longer field comes empty, and one of many fields is none.
_READ_JOB = f"""
if redis.call('hlen', KEYS[1]) > {MAX_FIELDS} then return {{}} end
local found = {{}}
for _, name in ipairs(redis.call('hkeys', KEYS[1])) do
  local whole = #name <= 100 and redis.call('hstrlen', KEYS[1], name) <= {MAX_DATA}
  found[#found + 1] = string.sub(name, 1, 100)
  found[#found + 1] = whole and redis.call('hget', KEYS[1], name) or ''
end
return found
"""
_LAST_ERROR = f"""
local row = redis.call('xrevrange', KEYS[1], '+', '-', 'count', 1)[1]
for i = 1, row and #row[2] or 0, 2 do
  if row[2][i] == 'exc_string' then return string.sub(row[2][i + 1], 1, {MAX_DATA}) end
end
return ''
"""


class GuardedJob(Job):  # type: ignore[misc]
    """A job from Redis that imports nothing, calls nothing back and sends nothing, whatever its record says.

    No more than MAX_DATA bytes of a field of it leave Redis.
    """

    @classmethod
    def fetch_many(cls, job_ids: Iterable[str], connection: Any, serializer: Any = None) -> list[Any]:
        """The jobs of these ids; None for an id without a job."""
        return [cls._fetched(job_id, connection, serializer) for job_id in job_ids]

    @classmethod
    def _fetched(cls, job_id: str, connection: Any, serializer: Any) -> GuardedJob | None:
        try:
            return cast("GuardedJob", cls.fetch(job_id, connection=connection, serializer=serializer))
        except NoSuchJobError:
            return None

    def refresh(self) -> None:
        """Read the record anew; NoSuchJobError where there is none."""
        words = self.connection.eval(_READ_JOB, 1, self.key)
        if not words:
            raise NoSuchJobError(f"No such job: {self.key}")
        self.restore(dict(zip(words[::2], words[1::2], strict=True)))

    def last_error(self) -> str:
        """The end of the text of its last failure, MAX_DATA bytes at most; "" without one."""
        packed = self.connection.eval(_LAST_ERROR, 1, f"rq:results:{self.id}")
        try:
            unpacked = zlib.decompressobj().decompress(b64decode(packed[: len(packed) // 4 * 4]), MAX_DATA)
        except (ValueError, zlib.error):
            return ""
        return unpacked.decode(errors="replace")

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
        """(kind of spec, path of the spec); ValueError with the reason where the job is no metric job."""
        try:
            name, instance, args, kwargs = self.func_name, self.instance, self.args, self.kwargs
        except Exception as error:
            raise ValueError("its payload is not a metric job's JSON") from error
        kinds = [kind for kind, function in FUNCTIONS.items() if function == name]
        if not kinds:
            raise ValueError(f"its function {str(name)[:80]!r} is not on the list")
        if instance is not None or kwargs != {} or not isinstance(args, list) or len(args) != 1:
            raise ValueError("it does not have exactly one argument")
        if not isinstance(args[0], str) or "\0" in args[0]:
            raise ValueError("its argument is not a path")
        return kinds[0], args[0]


def _bounded(raw: Any) -> dict[Any, Any]:
    """The record with compressed fields of more than MAX_DATA bytes replaced, before RQ unpacks them."""
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
    return id_text(re.sub(rb"_([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), text.encode()))


def open_queue(client: redis.Redis, evaluation_id: str, job_class: type[GuardedJob] = GuardedJob) -> Any:
    """RQ's queue of an evaluation. Touches nothing."""
    return Queue(queue_name(evaluation_id), connection=client, job_class=job_class, serializer=JSONSerializer)


def popped_ids(queue: Any) -> list[str]:
    """Jobs that a worker has popped and not started yet."""
    return [id_text(i) for i in queue.connection.lrange(queue.intermediate_queue_key, 0, -1)]


def id_text(value: bytes) -> str:
    """An id in a list of RQ's. Others may write to it: what is no UTF-8 is an id of no job."""
    return value.decode(errors="replace")


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
            pipe.hget(f"rq:execution:{id_text(entry)}", name)
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
