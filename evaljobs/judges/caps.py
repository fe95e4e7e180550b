"""Limits on requests to a judge that all workers share, kept in Redis.

Rule: a request is made only under a grant, which one script grants or refuses. Limits are the
requests in flight, the requests started in any 60 seconds, and the evaluation's cost cap, in which
each grant counts at its largest cost. There is no grant during a pause that the endpoint asked for,
nor a second one for the same ask. A grant that is not renewed (its worker died) ends by itself and
counts at its largest cost, since the request may have been billed. The files are the truth: no sum
in Redis counts for less than what they hold, or than this process has seen. Called from `asking`.

Keys below `evalspan:judge:{digest of url and model}:`
  grants   zset   ask by the time in ms at which its grant ends
  holders  hash   ask -> [token, evaluation, its largest cost]
  starts   zset   request by the time in ms of its start, of the last minute
  pause    text   expires when requests may start again
  spent    hash   evaluation -> millionths
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evaljobs.contract.specs import JudgeOptions
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import QueueUnavailable, explained

GRANT_SECONDS: Final = 20.0  # seconds until a grant that is not renewed ends
FULL_SECONDS: Final = 0.2  # seconds between two tries while all grants are taken

_COMMON = """
local P = KEYS[1]
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local DAY = 86400000

local function drop(ask, cost)
  local text = redis.call('HGET', P .. 'holders', ask)
  redis.call('ZREM', P .. 'grants', ask)
  redis.call('HDEL', P .. 'holders', ask)
  if not text then return end
  local holder = cjson.decode(text)
  if redis.call('HEXISTS', P .. 'spent', holder[2]) == 1 then
    redis.call('HINCRBY', P .. 'spent', holder[2], cost or holder[3])
  end
end
"""

# takes ask, token, grant ms, concurrency, starts a minute (0: any), evaluation, largest cost,
# cost cap ('': none), least sum spent
TAKE = (
    _COMMON
    + """
for _, ask in ipairs(redis.call('ZRANGEBYSCORE', P .. 'grants', '-inf', now)) do drop(ask, nil) end
local spent = math.max(tonumber(redis.call('HGET', P .. 'spent', ARGV[6]) or 0), tonumber(ARGV[9]))
redis.call('HSET', P .. 'spent', ARGV[6], string.format('%.0f', spent))
local pause = redis.call('PTTL', P .. 'pause')
if pause > 0 then return {'wait', pause} end
if redis.call('ZSCORE', P .. 'grants', ARGV[1]) then return {'wait', -1} end
if ARGV[8] ~= '' then
  local held = 0
  for _, text in ipairs(redis.call('HVALS', P .. 'holders')) do
    local holder = cjson.decode(text)
    if holder[2] == ARGV[6] then held = held + tonumber(holder[3]) end
  end
  local most = spent + tonumber(ARGV[7])
  if most > tonumber(ARGV[8]) then return {'over', tostring(spent)} end
  if most + held > tonumber(ARGV[8]) then return {'wait', -1} end
end
if redis.call('ZCARD', P .. 'grants') >= tonumber(ARGV[4]) then return {'wait', -1} end
local starts = P .. 'starts'
redis.call('ZREMRANGEBYSCORE', starts, '-inf', now - 60000)
local limit = tonumber(ARGV[5])
if limit > 0 and redis.call('ZCARD', starts) >= limit then
  local first = redis.call('ZRANGE', starts, 0, 0, 'WITHSCORES')
  return {'wait', tonumber(first[2]) + 60001 - now}
end
redis.call('ZADD', P .. 'grants', now + tonumber(ARGV[3]), ARGV[1])
redis.call('HSET', P .. 'holders', ARGV[1], cjson.encode({ARGV[2], ARGV[6], ARGV[7]}))
redis.call('ZADD', starts, now, ARGV[2])
for _, name in ipairs({'grants', 'holders', 'starts'}) do redis.call('PEXPIRE', P .. name, DAY) end
redis.call('PEXPIRE', P .. 'spent', 30 * DAY)
return {'granted', string.format('%.0f', spent)}
"""
)

# takes ask, token, cost
SETTLE = (
    _COMMON
    + """
local text = redis.call('HGET', P .. 'holders', ARGV[1])
if not text or cjson.decode(text)[1] ~= ARGV[2] then return 0 end
drop(ARGV[1], ARGV[3])
return 1
"""
)

# takes grant ms, then pairs of ask and token
RENEW = (
    _COMMON
    + """
for i = 2, #ARGV, 2 do
  local text = redis.call('HGET', P .. 'holders', ARGV[i])
  if text and cjson.decode(text)[1] == ARGV[i + 1] then
    redis.call('ZADD', P .. 'grants', 'XX', now + tonumber(ARGV[1]), ARGV[i])
  end
end
return 1
"""
)

# takes ms; the longer of two pauses holds
PAUSE = """
local ms = tonumber(ARGV[1])
if redis.call('PTTL', KEYS[1] .. 'pause') < ms then redis.call('SET', KEYS[1] .. 'pause', '1', 'PX', ms) end
return 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Permission to make one request."""

    ask: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The cost cap does not allow this request. `spent`: millionths so far."""

    spent: int


def prefix(judge: JudgeOptions) -> str:
    """The common prefix of a judge's keys."""
    digest = hashlib.sha256(f"{judge.url}\n{judge.model}".encode()).hexdigest()[:16]
    return f"evalspan:judge:{{{digest}}}:"


class Caps:
    """The limits of a judge for one evaluation. A context manager that renews its grants.

    Thread-safe. Methods raise QueueUnavailable where Redis is away, and may be repeated.
    """

    def __init__(
        self,
        redis_file: Path,
        judge: JudgeOptions,
        evaluation: str,
        *,
        spent: Callable[[], int],
        grant_seconds: float = GRANT_SECONDS,
    ) -> None:
        """`spent`: counts the millionths spent from the evaluation's files; called once."""
        self._file = redis_file
        self._judge = judge
        self._evaluation = evaluation
        self._spent = spent
        self._least: int | None = None  # millionths spent that are known of; None: the files were not read
        self._grant_ms = max(1, int(grant_seconds * 1000))
        self._prefix = prefix(judge)
        self._held: dict[str, str] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="judge-grants", daemon=True)

    def __enter__(self) -> Caps:
        self._renewer.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._renewer.join()

    def take(self, ask: str, most: int) -> Grant | Over | float:
        """A grant for a request that costs at most `most` millionths, or seconds to wait first."""
        token = uuid.uuid4().hex
        judge = self._judge
        cap = "" if judge.max_cost is None else str(round(judge.max_cost * 1_000_000))
        limits = (self._grant_ms, judge.concurrency, judge.requests_per_minute or 0)
        least = self._known_spent()
        word, figure = self._run(TAKE, ask, token, *limits, self._evaluation, most, cap, least)
        if word in (b"granted", b"over"):
            self._known_spent(int(float(figure)))
        if word == b"granted":
            with self._lock:
                self._held[ask] = token
            return Grant(ask=ask, token=token)
        if word == b"over":
            return Over(spent=int(float(figure)))
        return FULL_SECONDS if int(figure) < 0 else int(figure) / 1000

    def _known_spent(self, seen: int = 0) -> int:
        with self._lock:
            if self._least is None:
                self._least = self._spent()
            self._least = max(self._least, seen)
            return self._least

    def settle(self, grant: Grant, cost: int) -> None:
        """End a grant; the request has cost `cost` millionths."""
        with self._lock:
            self._held.pop(grant.ask, None)
        self._run(SETTLE, grant.ask, grant.token, cost)

    def pause(self, seconds: float) -> None:
        """Stop all requests to this judge for so many seconds, as the endpoint asked."""
        self._run(PAUSE, max(1, int(seconds * 1000)))

    def _renew(self) -> None:
        while not self._ended.wait(self._grant_ms / 4000):
            with self._lock:
                pairs = [part for pair in self._held.items() for part in pair]
            if pairs:
                with suppress(QueueUnavailable):  # Redis comes back, or the grants end
                    self._run(RENEW, self._grant_ms, *pairs)

    def _run(self, script: str, *arguments: str | float) -> Any:
        address = redis_client.read(self._file)  # each time: a Redis that was away may have a new one
        with explained(address.where):
            return redis_client.shared(address).eval(script, 1, self._prefix, *arguments)
