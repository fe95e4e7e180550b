"""Shards in Redis: trials pull them, the coordinator fills.

Rule: every operation is one Lua script (queue_scripts.py), so a queue is never seen half-changed, and costs O(log n)
a shard. Redis is no truth: the coordinator can fill again at any time from its own state, and a living trial's
heartbeat registers its claim anew. Work may then be done twice (responses are deduplicated on files), but no shard
that was queued lies nowhere.
It does not know: what a shard holds, why its priority is what it is.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import redis

from evaljobs.queue import lua, redis_client
from evaljobs.queue.redis_client import QueueUnavailable, RedisAddress, explained

__all__ = ["Claim", "Progress", "QueueSnapshot", "QueueUnavailable", "QueuedShard", "WorkQueue"]

T = TypeVar("T")
CHUNK = 500  # shards in one script call: Redis serves others in between


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedShard:
    """A shard to do. Lower `priority` is claimed sooner; `seconds` (predicted, >= 0) decide who is stolen from."""

    shard: str
    priority: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a trial shall do: run `shard`; wait (the queue is not filled); or end (filled, and nothing is left)."""

    kind: Literal["shard", "wait", "drained"]
    shard: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A trial's own account. Times are unix seconds of the Redis host; `progress_at` moves only when a figure did."""

    phase: str = ""
    shard: str | None = None
    batches_done: int = 0
    batches: int = 0
    shards_done: int = 0
    response_bytes: int = 0  # length of its response file that is on disk
    beat_at: float = 0.0
    progress_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The queue at one moment. Costs O(trials), not O(shards)."""

    epoch: str | None  # of the last complete fill; None: not filled (Redis may have come back empty)
    unclaimed: int
    claims: Mapping[str, str]  # shard -> trial
    claimed_at: Mapping[str, float]  # shard -> unix seconds
    trials: Mapping[str, Progress]


class WorkQueue:
    """The shards of one evaluation. Every method raises QueueUnavailable where Redis is away or refuses.

    Any method may be called again after that: an effect that did happen is not doubled.
    """

    def __init__(
        self, client: redis.Redis, evaluation_id: str, *, address: RedisAddress | None = None
    ) -> None:
        self._prefix = f"evalspan:{{{evaluation_id}}}:"
        self._file: Path | None = None
        self._use(client, address)

    @classmethod
    def connect(cls, redis_file: Path, evaluation_id: str) -> WorkQueue:
        """The queue at the published address; QueueUnavailable where none is published.

        Follows the address: where Redis has moved, calls go to the new place.
        """
        address = redis_client.read(redis_file)
        queue = cls(redis_client.shared(address), evaluation_id, address=address)
        queue._file = redis_file
        return queue

    # --- coordinator -------------------------------------------------------------------------------------------------

    def fill(self, lanes: Mapping[str, Sequence[QueuedShard]], epoch: str, *, steal: bool = True) -> None:
        """Replace everything unclaimed by these lanes, forget what was withdrawn, and mark the queue as filled.

        Claimed shards stay claimed even where a lane names them. Trials wait until the fill is complete; one that
        was broken off leaves the queue unfilled. Safe to repeat. `steal` False: until the next fill, a trial claims
        shards of its own lane alone.
        """
        count = sum(len(shards) for shards in lanes.values())
        if len({s.shard for shards in lanes.values() for s in shards}) != count:
            raise ValueError("a fill names a shard twice")
        calls = [(lane, values) for lane, shards in lanes.items() for values in _chunks(shards)]
        token = uuid.uuid4().hex
        self._run(lua.BEGIN_FILL, token)
        for lane, values in calls:
            self._run(lua.FILL, token, lane, *values)
        self._run(lua.END_FILL, token, epoch, int(steal))

    def add(self, lane: str, shards: Sequence[QueuedShard]) -> None:
        """Queue these shards wherever they are now: queued elsewhere, withdrawn, or claimed by someone given up."""
        for values in _chunks(shards):
            self._run(lua.ADD, lane, *values)

    def withdraw(self, shards: Sequence[str]) -> None:
        """Nobody shall claim these any more, nor shall they return when a claim of them is given back."""
        for start in range(0, len(shards), CHUNK):
            self._run(lua.WITHDRAW, *shards[start : start + CHUNK])

    def release_claims(self, trial: str) -> tuple[str, ...]:
        """Queue the shards that a dead trial had claimed where they were planned, and return them.

        The release is for good: should the trial live after all, its heartbeats answer False and it claims nothing more.
        """
        return tuple(_text(s) for s in self._run(lua.RELEASE, trial))

    def mark_slow(self, trials: Mapping[str, float]) -> None:
        """These trials take so many times as long as the others: they claim only what does not hold up the end."""
        values = [value for trial, times in trials.items() for value in (trial, repr(float(times)))]
        if values:
            self._run(lua.MARK_SLOW, *values)

    def snapshot(self) -> QueueSnapshot:
        """Everything that the coordinator looks at every tick, in one round trip."""
        epoch, unclaimed, claims, trials = self._read(
            ("HGET", "meta", "epoch"), ("HLEN", "where"), ("HGETALL", "claims"), ("HGETALL", "trials")
        )
        claimed = {_text(s): json.loads(c) for s, c in claims.items()}
        return QueueSnapshot(
            epoch=None if epoch is None else _text(epoch),
            unclaimed=int(unclaimed),
            claims={s: trial for s, (trial, _) in claimed.items()},
            claimed_at={s: float(since) for s, (_, since) in claimed.items()},
            trials={_text(t): _progress(json.loads(p)) for t, p in trials.items()},
        )

    def unclaimed(self) -> tuple[str, ...]:
        """Every shard that waits to be claimed, in no order. O(shards)."""
        (names,) = self._read(("HKEYS", "where"))
        return tuple(_text(n) for n in names)

    def loads(self) -> dict[str, float]:
        """Predicted seconds that are still queued, by lane; lanes without a shard are absent."""
        (found,) = self._read(("ZRANGE", "load", 0, -1, "WITHSCORES"))
        return {_text(lane): float(score) for lane, score in zip(found[::2], found[1::2], strict=True)}

    def remove(self) -> None:
        """Take every key of the evaluation out of Redis."""
        self._run(lua.REMOVE)

    # --- trial -------------------------------------------------------------------------------------------------------

    def claim(self, trial: str, lane: str, holding: Collection[str] = ()) -> Claim:
        """The next shard: of the trial's own lane; where trials steal, else stolen, else a slow trial's once more (lua.py).

        `holding`: claimed shards the trial is still busy with (say, being dumped). A claim of it that it does not
        name is handed out again: the answer of an earlier call was lost.
        """
        answer = [_text(x) for x in self._run(lua.CLAIM, trial, lane, *holding)]
        match answer:
            case ["shard", shard]:
                return Claim(kind="shard", shard=shard)
            case ["wait"]:
                return Claim(kind="wait")
            case _:
                return Claim(kind="drained")

    def done(self, trial: str, shard: str, response_bytes: int) -> bool:
        """The shard's responses are on disk, the trial's file now `response_bytes` long.

        False where the shard had been given to someone else meanwhile (its responses count all the same).
        """
        return bool(self._run(lua.DONE, trial, shard, response_bytes))

    def give_back(self, trial: str, shard: str) -> bool:
        """Unfinished: others shall do it. False where it was the trial's no longer."""
        return bool(self._run(lua.GIVE_BACK, trial, shard))

    def heartbeat(
        self,
        trial: str,
        *,
        phase: str,
        shard: str | None = None,
        batches_done: int = 0,
        batches: int = 0,
    ) -> bool:
        """Say where the trial stands; registers its claim of `shard` where Redis has lost it.

        False where `shard` was given to someone else, or was done by the other of two that ran it, or where the trial was
        released: dropping it saves work, finishing it does no harm.
        """
        progress = {"phase": phase, "shard": shard or "", "batches_done": batches_done, "batches": batches}
        return bool(self._run(lua.HEARTBEAT, trial, shard or "", json.dumps(progress)))

    # --- Redis -------------------------------------------------------------------------------------------------------

    def _use(self, client: redis.Redis, address: RedisAddress | None) -> None:
        self._client = client
        self._address = address
        self._scripts: dict[str, Any] = {}

    def _run(self, script: str, *args: str | int) -> Any:
        """Run a script by its digest; it is sent whole where the server does not know it."""

        def effect() -> Any:
            if script not in self._scripts:
                self._scripts[script] = self._client.register_script(script)
            return self._scripts[script](keys=[self._prefix], args=args)

        return self._twice(effect)

    def _read(self, *commands: tuple[str | int, ...]) -> list[Any]:
        """Commands (verb, key below the prefix, arguments) in one transaction."""

        def effect() -> list[Any]:
            with self._client.pipeline(transaction=True) as pipe:
                for verb, name, *rest in commands:
                    pipe.execute_command(verb, f"{self._prefix}{name}", *rest)  # type: ignore[no-untyped-call]
                return pipe.execute()

        return self._twice(effect)

    def _twice(self, effect: Callable[[], T]) -> T:
        """Again after a broken connection: a restarted server breaks those that lay idle, and may have moved."""
        try:
            with explained(self._where):
                return effect()
        except QueueUnavailable as error:
            if not isinstance(error.__cause__, (redis.ConnectionError, OSError)):
                raise
            self._follow()
        with explained(self._where):
            return effect()

    @property
    def _where(self) -> str:
        return "its address" if self._address is None else self._address.where

    def _follow(self) -> None:
        if self._file is None:
            return
        address = redis_client.read(self._file)
        if address != self._address:
            self._use(redis_client.shared(address), address)


def _chunks(shards: Sequence[QueuedShard]) -> Iterator[list[str]]:
    """Shards as script arguments, CHUNK of them at a time."""
    for start in range(0, len(shards), CHUNK):
        values: list[str] = []
        for s in shards[start : start + CHUNK]:
            if not 0 <= s.seconds < float("inf"):
                raise ValueError(f"{s.shard} is predicted to take {s.seconds} s")
            values += (s.shard, repr(float(s.priority)), repr(float(s.seconds)))
        yield values


def _progress(fields: dict[str, Any]) -> Progress:
    return Progress(
        phase=str(fields.get("phase", "")),
        shard=fields.get("shard") or None,
        batches_done=int(fields.get("batches_done", 0)),
        batches=int(fields.get("batches", 0)),
        shards_done=int(fields.get("shards_done", 0)),
        response_bytes=int(fields.get("response_bytes", 0)),
        beat_at=float(fields.get("beat_at", 0.0)),
        progress_at=float(fields.get("progress_at", 0.0)),
    )


def _text(value: bytes | str) -> str:
    """Shard and trial names are UTF-8; the client may or may not decode."""
    return value if isinstance(value, str) else value.decode()
