"""The work queue of an evaluation in Redis: the coordinator fills it, trials claim shards.

Rule: every change is one Lua script (`lua.py`), so no process sees a queue half-changed; a script costs O(log n) per shard.
The coordinator's state is the truth: it can refill the queue at any time, and the heartbeat of a running trial registers its
claim again. A shard may then run twice (responses are deduplicated on files), but none is lost. Called from the coordinator's
`runtime` and from `trial.trial`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis
from pydantic import BaseModel

from evaljobs.queue import lua
from evaljobs.queue.redis_client import Link

MAX_SHARDS_AHEAD = 128  # shards named to a trial ahead of its claims; a lane seldom has more
OTHER_LANES = 4  # other lanes that these may come from
CHUNK = 500  # shards per script call, so that Redis can serve other clients


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedShard:
    """A shard to run. Lower `rank` is claimed first; predicted `seconds` steer stealing."""

    shard: str
    rank: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Answer to a claim: run `shard`; wait (the queue is not filled); or end (filled, and empty)."""

    kind: Literal["shard", "wait", "drained"]
    shard: str | None = None


class Progress(BaseModel, frozen=True):
    """A trial's state. Times are unix seconds of the Redis host; `progress_at` is the last change."""

    phase: str = ""
    shard: str | None = None
    batches_done: int = 0
    batches: int = 0
    shards_done: int = 0
    response_bytes: int = 0  # length of its response file on disk
    beat_at: float = 0.0
    progress_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The queue at one moment. Costs O(trials), not O(shards)."""

    epoch: str | None  # of the last complete fill; None: not filled, or lost by Redis
    unclaimed: int
    claims: Mapping[str, str]  # shard -> trial
    claimed_at: Mapping[str, float]  # shard -> unix seconds
    trials: Mapping[str, Progress]


class WorkQueue:
    """The shards of one evaluation. Methods raise QueueUnavailable if Redis is unreachable or refuses.

    Any call may then be repeated without doubling its effect.
    """

    def __init__(self, link: Link, evaluation_id: str) -> None:
        self._prefix = f"evalspan:{{{evaluation_id}}}:"
        self._link = link
        # claims and progress in Redis at the last snapshot: of thousands, few change
        self._claims: dict[bytes, tuple[str, float]] = {}
        self._progress: dict[bytes, Progress] = {}

    # --- coordinator -------------------------------------------------------------------------------------------------

    def fill(self, lanes: Mapping[str, Sequence[QueuedShard]], epoch: str, *, steal: bool = True) -> None:
        """Replace all unclaimed and withdrawn shards with these lanes, and mark the queue as filled.

        Claimed shards stay claimed even if a lane names them. Trials wait until the fill is complete; an interrupted fill
        leaves the queue unfilled. Safe to repeat. `steal` False: until the next fill, a trial only claims shards of its own
        lane.
        """
        token = uuid.uuid4().hex
        self._run(lua.BEGIN_FILL, token)
        for lane, shards in lanes.items():
            for values in _chunks(shards):
                self._run(lua.FILL, token, lane, *values)
        self._run(lua.END_FILL, token, epoch, int(steal))

    def add(self, lane: str, shards: Sequence[QueuedShard]) -> None:
        """Queue these shards, whether queued elsewhere, withdrawn, or claimed by a lost trial."""
        for values in _chunks(shards):
            self._run(lua.ADD, lane, *values)

    def withdraw(self, shards: Sequence[str]) -> None:
        """Remove these shards from the queue; giving back a claim does not return them, and a trial that runs one drops it."""
        for start in range(0, len(shards), CHUNK):
            self._run(lua.WITHDRAW, *shards[start : start + CHUNK])

    def requeue_claims(self, trial: str) -> tuple[str, ...]:
        """Queue the shards that a dead trial had claimed in their planned lanes, and return them.

        This is final: if the trial still runs, it can claim and register no shard.
        """
        return tuple(_text(s) for s in self._run(lua.REQUEUE, trial))

    def snapshot(self) -> QueueSnapshot:
        """Return the state that the coordinator reads every tick, in one round trip."""
        epoch, unclaimed, claims, trials = self._read(
            ("HGET", "meta", "epoch"), ("HLEN", "where"), ("HGETALL", "claims"), ("HGETALL", "trials")
        )
        self._claims = {c: self._claims.get(c) or json.loads(c) for c in claims.values()}
        self._progress = {p: self._progress.get(p) or _progress(json.loads(p)) for p in trials.values()}
        claimed = {_text(s): self._claims[c] for s, c in claims.items()}
        return QueueSnapshot(
            epoch=None if epoch is None else _text(epoch),
            unclaimed=unclaimed,
            claims={s: trial for s, (trial, _) in claimed.items()},
            claimed_at={s: float(since) for s, (_, since) in claimed.items()},
            trials={_text(t): self._progress[p] for t, p in trials.items()},
        )

    def unclaimed(self) -> tuple[str, ...]:
        """Return every queued shard, unordered. O(shards)."""
        (names,) = self._read(("HKEYS", "where"))
        return tuple(_text(n) for n in names)

    def remove(self) -> None:
        """Delete all keys of the evaluation from Redis."""
        self._run(lua.REMOVE)

    # --- trial -------------------------------------------------------------------------------------------------------

    def claim(self, trial: str, lane: str) -> Claim:
        """Claim the next shard: from the trial's own lane; if trials steal, otherwise a stolen one or a copy (`lua.py`).

        A claim that the trial still has is returned again, since the reply to that call was lost.
        """
        kind, *shard = map(_text, self._run(lua.CLAIM, trial, lane))
        return Claim(kind=kind, shard=shard[0] if shard else None)  # type: ignore[arg-type]

    def done(self, trial: str, shard: str, response_bytes: int) -> bool:
        """Record that the shard is on disk, the trial's file now `response_bytes` long.

        Return False if another trial has claimed the shard since (these responses still count).
        """
        return bool(self._run(lua.DONE, trial, shard, response_bytes))

    def give_back(self, trial: str, shard: str) -> bool:
        """Return an unfinished shard to the queue. Return False if the trial no longer had it."""
        return bool(self._run(lua.GIVE_BACK, trial, shard))

    def heartbeat(
        self,
        trial: str,
        *,
        phase: str,
        shard: str | None = None,
        batches_done: int = 0,
        batches: int = 0,
        looks: int = 0,
    ) -> bool:
        """Record the trial's progress, and register its claim of `shard` if Redis has lost it.

        `looks`: how often the trial's engine has passed between two of its steps: a kind of progress.

        Return False if another trial has `shard` or has done it, if it was withdrawn, or if this trial was dismissed. Dropping
        the shard then saves work; finishing it does no harm.
        """
        progress: dict[str, str | int] = {"phase": phase, "shard": shard or "", "looks": looks}
        progress |= {"batches_done": batches_done, "batches": batches}
        return bool(self._run(lua.HEARTBEAT, trial, shard or "", json.dumps(progress)))

    def ahead(self, lane: str) -> tuple[str, ...]:
        """Return at most AHEAD queued shards that a trial of this lane may run without Redis, in order.

        The lane's own come first. If trials steal, the ends of other lanes follow, since their own trials begin at the heads.
        These lanes are drawn at random, so that few trials draw the same.
        """
        own, head = self._read(
            ("HEXISTS", "meta", "own"), ("ZRANGE", f"lane:{lane}", 0, MAX_SHARDS_AHEAD - 1)
        )
        names = [_text(name) for name in head]
        if own or len(names) == MAX_SHARDS_AHEAD:
            return tuple(names)
        (drawn,) = self._read(("ZRANDMEMBER", "load", OTHER_LANES))
        others = [other for other in map(_text, drawn) if other != lane]
        if others:
            ends = self._read(*(("ZREVRANGE", f"lane:{other}", 0, MAX_SHARDS_AHEAD - 1) for other in others))
            names += [_text(name) for end in ends for name in end]
        return tuple(names[:MAX_SHARDS_AHEAD])

    # --- Redis -------------------------------------------------------------------------------------------------------

    def _run(self, script: str, *args: str | int) -> Any:
        """Run a script by its digest; the client sends its text if the server lacks it."""
        return self._link.call(lambda client: client.register_script(script)(keys=[self._prefix], args=args))

    def _read(self, *commands: tuple[str | int, ...]) -> list[Any]:
        """Run commands (verb, key below the prefix, arguments) in one transaction."""

        def effect(client: redis.Redis) -> list[Any]:
            with client.pipeline(transaction=True) as pipe:
                for verb, name, *rest in commands:
                    pipe.execute_command(verb, f"{self._prefix}{name}", *rest)  # type: ignore[no-untyped-call]
                return pipe.execute()

        return self._link.call(effect)


def _chunks(shards: Sequence[QueuedShard]) -> Iterator[list[str]]:
    """Yield shards as script arguments, CHUNK shards at a time."""
    for start in range(0, len(shards), CHUNK):
        some = shards[start : start + CHUNK]
        yield [text for s in some for text in (s.shard, repr(float(s.rank)), repr(float(s.seconds)))]


def _progress(fields: dict[str, Any]) -> Progress:
    return Progress.model_validate({**fields, "shard": fields.get("shard") or None})


def _text(value: bytes | str) -> str:
    """Decode shard and trial names, which are UTF-8; the client may already have decoded them."""
    return value if isinstance(value, str) else value.decode()
