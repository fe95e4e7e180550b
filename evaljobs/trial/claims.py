"""A trial's claims: it reports shards that are on disk, and gets the next one, also while Redis is away.

Rule: while Redis is away, the trial runs unclaimed shards of its lane (`Ahead`). It reports
them before its next claim. Called from `trial.trial`, on the trial's thread alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from evaljobs.contract.specs import LaneSpec, TrialSpec
from evaljobs.errors import one_line
from evaljobs.queue.work_queue import Claim, QueueUnavailable, WorkQueue

log = logging.getLogger(__name__)


class Ahead:
    """Shards of a trial's lane that come next, as Redis last named them: none is claimed, so any trial may steal them.

    The trial's thread takes each name once; the heartbeat thread renews them. Where two trials ran one shard meanwhile,
    its first record on disk counts.
    """

    def __init__(self) -> None:
        self.away = False  # a call to Redis failed, and no heartbeat has succeeded since then
        self._names: tuple[str, ...] = ()
        self._had: set[str] = set()

    def renew(self, names: Iterable[str]) -> None:
        """Redis answers, and these shards come next: the first one first."""
        self._names = tuple(names)
        self.away = False

    def had(self, shard: str) -> None:
        """The trial has this shard from Redis, so it is not taken from here as well."""
        self._had.add(shard)

    def take(self, fits: Callable[[str], bool]) -> str | None:
        """While Redis is away: the next shard that the trial has not had and that `fits`; else None."""
        if not self.away:
            return None
        shard = next((name for name in self._names if name not in self._had and fits(name)), None)
        if shard is not None:
            self._had.add(shard)
        return shard


class QueueLostError(Exception):
    """Redis was away for longer than a GPU may wait for it."""


class Claims:
    """Claims of one trial. `idle` wraps each pause, `ahead` is renewed by the heartbeat thread."""

    def __init__(
        self,
        spec: TrialSpec,
        lane: LaneSpec,
        ahead: Ahead,
        *,
        idle: Callable[[], contextlib.AbstractContextManager[None]],
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._spec, self._lane, self._ahead = spec, lane, ahead
        self._idle, self._monotonic, self._sleep = idle, monotonic, sleep
        self._queue: WorkQueue | None = None
        self._unreported: list[str] = []  # shards on disk that Redis has as claimed or queued still

    def dumped(self, shard: str) -> None:
        """The shard is on disk: `next` reports it."""
        self._unreported.append(shard)

    def next(self, response_bytes: int, runs: Callable[[str], bool]) -> Claim:
        """The next claim; while Redis is away, a shard of `ahead` that this trial `runs`.

        `response_bytes`: length of the trial's response file. Where there is no such shard, the call
        waits for Redis; QueueLostError after `redis_patience_seconds`.
        """

        def claimed(queue: WorkQueue) -> Claim:
            while self._unreported:
                queue.done(self._lane.trial, self._unreported[0], response_bytes)
                del self._unreported[0]
            claim = queue.claim(self._lane.trial, self._lane.lane)
            if claim.shard is not None:
                self._ahead.had(claim.shard)
            return claim

        def unclaimed() -> Claim | None:
            shard = self._ahead.take(runs)
            return None if shard is None else Claim(kind="shard", shard=shard)

        return unclaimed() or self._retry(claimed, unclaimed)

    def give_back(self, shard: str) -> None:
        """Return an unfinished shard to the queue where Redis answers; else the coordinator finds it."""
        if self._queue is not None:
            with contextlib.suppress(QueueUnavailable):
                self._queue.give_back(self._lane.trial, shard)

    def _retry(self, effect: Callable[[WorkQueue], Claim], instead: Callable[[], Claim | None]) -> Claim:
        """Call `effect` on the queue. While Redis is away: what `instead` gives, else `effect` after growing pauses."""
        patience = self._spec.redis_patience_seconds
        deadline = self._monotonic() + patience
        pause = 0.2
        while True:
            try:
                if self._queue is None:
                    self._queue = WorkQueue.connect(Path(self._spec.redis_file), self._spec.evaluation_id)
                return effect(self._queue)
            except QueueUnavailable as error:
                self._ahead.away = True
                if (given := instead()) is not None:
                    log.warning("queue: %s; shards of this lane are run meanwhile", one_line(error))
                    return given
                if self._monotonic() + pause > deadline:
                    raise QueueLostError(f"Redis was away for {patience:g} s: {one_line(error)}") from error
                log.warning("queue: %s; again in %.1f s", one_line(error), pause)
            with self._idle():
                self._sleep(pause)
            pause = min(pause * 2, 10.0)
