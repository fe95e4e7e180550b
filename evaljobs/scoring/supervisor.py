"""The process that keeps a metric worker alive: forks it, replaces it when it dies, and ends it in time.

Rule: the supervisor runs no job, so no job can end it. It replaces a worker that dies (with Redis, say), after a pause
where it did not live long. Where Redis stays away though the coordinator lives, it is this host that does not reach it: it
ends with 1, so that its job goes to another one. When it has to end, it lets running jobs finish for a while and then drops them:
they are run again elsewhere.
Called by `worker.main`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import redis

from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import QueueUnavailable, RedisAddress
from evaljobs.staging.coordinator_lease import CoordinatorLease, is_there
from evaljobs.trial.engines.tied import die_with_parent

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # between two looks at the children
REDIS_SECONDS = 2.0  # between two calls of Redis
# that a running job has to finish, of the 30 s that Slurm leaves between SIGTERM and SIGKILL
FINISH_SECONDS = 15.0
DROP_SECONDS = 5.0  # that a worker then has to drop its job, before SIGKILL
SHORT_LIFE_SECONDS = 5.0  # a worker that lived no longer than this is replaced after a pause
PAUSE_SECONDS = 1.0
MUTE_RENEWALS = 4  # of the coordinator's lease, one every 30 s, without an answer of its Redis


class Supervisor:
    """Keeps a worker alive, and ends on a signal, a file or a lease."""

    def __init__(self, options: argparse.Namespace, work: Callable[[], None]) -> None:
        """`work`: be one worker, in a forked child, until it ends."""
        self.options = options
        self.work = work
        self.children: dict[int, float] = {}  # pid -> started at, monotonic seconds
        self.stopping_since: float | None = None
        self.pressed = 0  # signals that the children have got since `stopping_since`
        self._start_after = 0.0
        self._called_at = 0.0
        self._address: RedisAddress | None = None
        self._answered = 0  # renewals of the lease when Redis answered last
        self.status = 0  # exit status
        lease: Path | None = options.lease_file
        self._lease = None if lease is None else CoordinatorLease(lease, options.lease_seconds)

    def run(self) -> int:
        """Keep workers until the end; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while True:
            self._reap()
            at = time.monotonic()
            if self.stopping_since is not None:
                if not self.children:
                    return self.status
                self._press(at - self.stopping_since)
            else:
                self._fork_missing(at)
                self._look(at)
                if self._over():
                    self.stopping_since = at
            time.sleep(POLL_SECONDS)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()

    def _over(self) -> bool:
        stop = self.options.stop_file
        if stop is not None and is_there(stop):
            return True
        if self._lease is not None and (expired := self._lease.expired()):
            log.error("%s: no coordinator waits for these metrics", expired)
            return True
        if self._lease is not None and self._lease.renewals - self._answered >= MUTE_RENEWALS:
            log.error(
                "this host does not reach Redis, though its coordinator lives: this job ends, and another goes on"
            )
            self.status = 1
            return True
        return False

    def _fork_missing(self, at: float) -> None:
        if not self.children and at >= self._start_after:
            sys.stdout.flush()
            sys.stderr.flush()
            parent = os.getpid()
            if (pid := os.fork()) == 0:
                self._be_a_worker(parent)
            self.children[pid] = at

    def _be_a_worker(self, parent: int) -> None:
        """In the child; never returns."""
        try:
            die_with_parent(signal.SIGTERM, parent)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            # a signal may have come while the supervisor's handler was still this process's, too
            if self.stopping_since is None:
                self.work()
        except QueueUnavailable as error:
            log.warning("worker %d: %s", os.getpid(), error)
        except BaseException:
            log.exception("worker %d", os.getpid())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _reap(self) -> None:
        while self.children:
            pid, _status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            started = self.children.pop(pid, None)
            if started is None:
                continue
            lived = time.monotonic() - started
            pause = PAUSE_SECONDS if lived < SHORT_LIFE_SECONDS else 0.0
            self._start_after = time.monotonic() + pause
            if self.stopping_since is None:
                log.warning("worker %d ended after %.1f s; starting another in %.1f s", pid, lived, pause)

    def _press(self, seconds: float) -> None:
        """SIGTERM: finish the running job. SIGTERM again: drop it, it is run elsewhere. Then SIGKILL."""
        due = sum(seconds >= at for at in (0.0, FINISH_SECONDS, FINISH_SECONDS + DROP_SECONDS))
        if due > self.pressed:
            self.pressed = due
            self._signal_children(signal.SIGTERM if due < 3 else signal.SIGKILL)

    def _signal_children(self, number: signal.Signals) -> None:
        for pid in self.children:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _look(self, at: float) -> None:
        if at - self._called_at < REDIS_SECONDS:
            return
        self._called_at = at
        try:
            address = redis_client.read(self.options.redis_file)
            self._follow(address)
            redis_client.shared(address).ping()
            self._answered = self._lease.renewals if self._lease is not None else 0
        except (QueueUnavailable, redis.RedisError, OSError) as error:
            log.warning("Redis: %s", error)

    def _follow(self, address: RedisAddress) -> None:
        """Use the published address. Workers of an earlier one end after their running job: RQ would ask there for ever."""
        if address == self._address:
            return
        if self._address is not None:
            self._signal_children(signal.SIGTERM)
        self._address = address
