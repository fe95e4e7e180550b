"""A trial's claims: reports finished shards and gets the next one, even while Redis is unreachable.

Rule: while Redis is unreachable, the trial runs unclaimed shards of its lane (`UpcomingShards`), and reports them before its next
claim. Only called on the trial's thread, from `trial.trial`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from evaljobs.contract.specs import LaneSpec, TrialSpec
from evaljobs.errors import one_line
from evaljobs.queue.redis_client import Link, QueueUnavailable
from evaljobs.queue.work_queue import Claim, WorkQueue

log = logging.getLogger(__name__)


class UpcomingShards:
    """The next shards of a trial's lane, as last named by Redis: unclaimed, so any trial may steal them.

    The trial's thread takes each name once; the heartbeat thread renews them. If two trials run the same shard, its first
    record on disk counts.
    """

    def __init__(self) -> None:
        self.away = False  # a call to Redis failed, and no heartbeat has succeeded since
        self._names: tuple[str, ...] = ()
        self._had: set[str] = set()

    def renew(self, names: Iterable[str]) -> None:
        """Record that Redis answers and that these shards come next, in order."""
        self._names = tuple(names)
        self.away = False

    def had(self, shard: str) -> None:
        """Record that the trial got this shard from Redis, so that it is not taken from here as well."""
        self._had.add(shard)

    def take(self, fits: Callable[[str], bool]) -> str | None:
        """While Redis is unreachable, return the next new shard that `fits`; otherwise None."""
        if not self.away:
            return None
        shard = next((name for name in self._names if name not in self._had and fits(name)), None)
        if shard is not None:
            self._had.add(shard)
        return shard


class QueueLostError(Exception):
    """Redis was unreachable for longer than a GPU may wait for it."""


class Claims:
    """Claims of one trial. `pause` sleeps for some seconds, `ahead` is renewed by the heartbeat thread."""

    def __init__(
        self,
        spec: TrialSpec,
        lane: LaneSpec,
        ahead: UpcomingShards,
        *,
        pause: Callable[[float], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._spec, self._lane, self._ahead = spec, lane, ahead
        self._pause, self._monotonic = pause, monotonic
        self._queue = WorkQueue(Link(Path(spec.redis_file)), spec.evaluation_id)
        self._unreported: list[str] = []  # finished shards that Redis still has as claimed or queued

    def dumped(self, shard: str) -> None:
        """Record that the shard is on disk; `next` reports it."""
        self._unreported.append(shard)

    def next(self, response_bytes: int, runs: Callable[[str], bool]) -> Claim:
        """Return the next claim; while Redis is unreachable, a shard of `ahead` that this trial `runs`.

        `response_bytes`: length of the trial's response file. Without such a shard, the call waits for Redis and raises
        QueueLostError after `redis_patience_seconds`.
        """
        patience = self._spec.redis_patience_seconds
        deadline = self._monotonic() + patience
        pause = 0.2
        while (shard := self._ahead.take(runs)) is None:
            try:
                return self._claimed(response_bytes)
            except QueueUnavailable as error:
                self._ahead.away = True
                away = one_line(error)
            if (shard := self._ahead.take(runs)) is not None:
                break
            if self._monotonic() + pause > deadline:
                raise QueueLostError(f"Redis was unreachable for {patience:g} s: {away}")
            log.warning("queue: %s; retrying in %.1f s", away, pause)
            self._pause(pause)
            pause = min(pause * 2, 10.0)
        log.warning("Redis is unreachable; running %s of this lane meanwhile", shard)
        return Claim(kind="shard", shard=shard)

    def _claimed(self, response_bytes: int) -> Claim:
        while self._unreported:
            self._queue.done(self._lane.trial, self._unreported[0], response_bytes)
            del self._unreported[0]
        claim = self._queue.claim(self._lane.trial, self._lane.lane)
        if claim.shard is not None:
            self._ahead.had(claim.shard)
        return claim

    def give_back(self, shard: str) -> None:
        """Return an unfinished shard to the queue if Redis answers; otherwise the coordinator finds it."""
        with contextlib.suppress(QueueUnavailable):
            self._queue.give_back(self._lane.trial, shard)
