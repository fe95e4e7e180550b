"""The work queue of an evaluation in Redis: the coordinator fills it, trials claim shards.

Rule: every change is one Lua script (`lua.py`), so no process sees a queue half-changed; a script
costs O(log n) per shard. The coordinator's state is the truth: it can fill the queue again at any
time, and the heartbeat of a running trial registers its claim anew. A shard may then run twice
(responses are deduplicated on files), but none is lost. Called from the coordinator's `runtime` and
from `trial.trial`.
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

AHEAD = 128  # most shards that are named to a trial ahead of its claims; a lane seldom has more
OTHER_LANES = 4  # most lanes that these may come from besides the trial's own
CHUNK = 500  # most shards in one script call, so that Redis can serve other clients


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedShard:
    """A shard to run. Lower `rank` is claimed first; `seconds` (predicted) steer stealing."""

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

    epoch: str | None  # of the last complete fill; None: not filled, or Redis has lost it
    unclaimed: int
    claims: Mapping[str, str]  # shard -> trial
    claimed_at: Mapping[str, float]  # shard -> unix seconds
    trials: Mapping[str, Progress]


class WorkQueue:
    """The shards of one evaluation. Methods raise QueueUnavailable where Redis is away or refuses.

    Any call may then be repeated: its effect is not doubled.
    """

    def __init__(self, link: Link, evaluation_id: str) -> None:
        self._prefix = f"evalspan:{{{evaluation_id}}}:"
        self._link = link
        # what Redis says of claims and progress at the last snapshot: of thousands, few change
        self._claims: dict[bytes, tuple[str, float]] = {}
        self._progress: dict[bytes, Progress] = {}

    # --- coordinator -------------------------------------------------------------------------------------------------

    def fill(self, lanes: Mapping[str, Sequence[QueuedShard]], epoch: str, *, steal: bool = True) -> None:
        """Replace all unclaimed and withdrawn shards by these lanes, and mark the queue as filled.

        Claimed shards stay claimed even where a lane names them. Trials wait until the fill is
        complete; an interrupted fill leaves the queue unfilled. Safe to repeat. `steal` False: until
        the next fill, a trial claims shards of its own lane alone.
        """
        token = uuid.uuid4().hex
        self._run(lua.BEGIN_FILL, token)
        for lane, shards in lanes.items():
            for values in _chunks(shards):
                self._run(lua.FILL, token, lane, *values)
        self._run(lua.END_FILL, token, epoch, int(steal))

    def add(self, lane: str, shards: Sequence[QueuedShard]) -> None:
        """Queue these shards, be they queued elsewhere, withdrawn, or claimed by a lost trial."""
        for values in _chunks(shards):
            self._run(lua.ADD, lane, *values)

    def withdraw(self, shards: Sequence[str]) -> None:
        """Take these shards out of the queue; a claim that is given back does not return them."""
        for start in range(0, len(shards), CHUNK):
            self._run(lua.WITHDRAW, *shards[start : start + CHUNK])

    def requeue_claims(self, trial: str) -> tuple[str, ...]:
        """Queue the shards that a dead trial had claimed in their planned lanes, and return them.

        That is final: if the trial still runs, it can claim and register no shard.
        """
        return tuple(_text(s) for s in self._run(lua.REQUEUE, trial))

    def snapshot(self) -> QueueSnapshot:
        """The state that the coordinator reads every tick, in one round trip."""
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
        """Every queued shard, in no order. O(shards)."""
        (names,) = self._read(("HKEYS", "where"))
        return tuple(_text(n) for n in names)

    def remove(self) -> None:
        """Delete all keys of the evaluation in Redis."""
        self._run(lua.REMOVE)

    # --- trial -------------------------------------------------------------------------------------------------------

    def claim(self, trial: str, lane: str) -> Claim:
        """The next shard: from the trial's own lane; where trials steal, else stolen, else a copy (`lua.py`).

        A claim that the trial still has is returned again, since the answer to that call was lost.
        """
        kind, *shard = map(_text, self._run(lua.CLAIM, trial, lane))
        return Claim(kind=kind, shard=shard[0] if shard else None)  # type: ignore[arg-type]

    def done(self, trial: str, shard: str, response_bytes: int) -> bool:
        """Record that the shard is on disk, the trial's file now `response_bytes` long.

        False where another trial has claimed the shard since (these responses count all the same).
        """
        return bool(self._run(lua.DONE, trial, shard, response_bytes))

    def give_back(self, trial: str, shard: str) -> bool:
        """Return an unfinished shard to the queue. False where the trial no longer had it."""
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
        """Record the trial's progress; registers its claim of `shard` where Redis has lost it.

        `looks`: how often the trial's engine has come by between two of its steps: progress of a kind.

        False where another trial has `shard` or has done it, or where this trial was dismissed. To
        drop the shard then saves work; to finish it does no harm.
        """
        progress: dict[str, str | int] = {"phase": phase, "shard": shard or "", "looks": looks}
        progress |= {"batches_done": batches_done, "batches": batches}
        return bool(self._run(lua.HEARTBEAT, trial, shard or "", json.dumps(progress)))

    def ahead(self, lane: str) -> tuple[str, ...]:
        """At most AHEAD queued shards that a trial of this lane may run without Redis, in order.

        The lane's own come first. Where trials steal, the ends of other lanes follow: their own
        trials begin at the heads. These lanes are drawn at random, so that few trials draw the same.
        """
        own, head = self._read(("HEXISTS", "meta", "own"), ("ZRANGE", f"lane:{lane}", 0, AHEAD - 1))
        names = [_text(name) for name in head]
        if own or len(names) == AHEAD:
            return tuple(names)
        (drawn,) = self._read(("ZRANDMEMBER", "load", OTHER_LANES))
        others = [other for other in map(_text, drawn) if other != lane]
        if others:
            ends = self._read(*(("ZREVRANGE", f"lane:{other}", 0, AHEAD - 1) for other in others))
            names += [_text(name) for end in ends for name in end]
        return tuple(names[:AHEAD])

    # --- Redis -------------------------------------------------------------------------------------------------------

    def _run(self, script: str, *args: str | int) -> Any:
        """Run a script by its digest; the client sends its text where the server lacks it."""
        return self._link.call(lambda client: client.register_script(script)(keys=[self._prefix], args=args))

    def _read(self, *commands: tuple[str | int, ...]) -> list[Any]:
        """Commands (verb, key below the prefix, arguments) in one transaction."""

        def effect(client: redis.Redis) -> list[Any]:
            with client.pipeline(transaction=True) as pipe:
                for verb, name, *rest in commands:
                    pipe.execute_command(verb, f"{self._prefix}{name}", *rest)  # type: ignore[no-untyped-call]
                return pipe.execute()

        return self._link.call(effect)


def _chunks(shards: Sequence[QueuedShard]) -> Iterator[list[str]]:
    """Shards as script arguments, CHUNK shards at a time."""
    for start in range(0, len(shards), CHUNK):
        some = shards[start : start + CHUNK]
        yield [text for s in some for text in (s.shard, repr(float(s.rank)), repr(float(s.seconds)))]


def _progress(fields: dict[str, Any]) -> Progress:
    return Progress.model_validate({**fields, "shard": fields.get("shard") or None})


def _text(value: bytes | str) -> str:
    """Shard and trial names are UTF-8; the client may or may not decode them."""
    return value if isinstance(value, str) else value.decode()
