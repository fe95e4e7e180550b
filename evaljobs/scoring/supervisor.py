"""The process that keeps metric workers alive: forks them, recovers dead ones' jobs, ends in time.

Rule: it runs no job itself, so it is there whatever a job does. A worker that dies (with Redis, say) is replaced, after
a pause where that happens again and again. Told to end, it lets jobs in hand finish, then drops them: others retry.
It does not know: what a worker does.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import redis

from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import QueueUnavailable
from evaljobs.scoring import rq_jobs
from evaljobs.staging.coordinator_lease import CoordinatorLease, is_there

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
NEWS_SECONDS = 0.5  # between two tries to give up what a dead worker was at
FINISH_SECONDS = 15.0  # for the job in hand, of the 30 s that Slurm leaves between SIGTERM and SIGKILL
DROP_SECONDS = 5.0
LOST_SECONDS = 900.0  # a worker job whose Redis is gone for so long has nobody to work for
SHORT_LIFE_SECONDS = 5.0
MAX_PAUSE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, parent: int) -> None:
    """Have the kernel send us `number` when `parent`, whose child we are, dies (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew what we want
        os.kill(os.getpid(), number)


class Supervisor:
    """Keeps `count` workers alive, recovers the jobs of dead ones, and ends when told to or when there is no work."""

    def __init__(
        self, options: argparse.Namespace, work: Callable[[], int], name: Callable[[int], str]
    ) -> None:
        """`work`: be one worker, in a forked child, until told to end; its exit code. `name`: how a worker's name in Redis
        begins, given its pid.
        """
        self.options = options
        self.work = work
        self.name = name
        self.children: dict[int, float] = {}  # pid -> started at, monotonic seconds
        self.stopping_since: float | None = None
        self.told = 0
        self._dead: list[int] = []  # whose jobs are still to be given up
        self._short_lives = 0
        self._start_after = 0.0
        self._recovered_at = 0.0
        self._worked_at = time.monotonic()
        self._answered_at = time.monotonic()
        self._queue: Any = None
        idle = options.burst_idle
        self._every = rq_jobs.RECOVER_SECONDS
        if idle is not None:  # how long nothing was to do is known as exactly as the queue is looked at
            self._every = max(NEWS_SECONDS, min(idle, self._every))
        lease: Path | None = options.lease_file
        self._lease = None if lease is None else CoordinatorLease(lease, options.lease_seconds)

    def run(self) -> int:
        """Until the end; 0, or 1 where Redis never came back."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while True:
            self._reap()
            at = time.monotonic()
            if self.stopping_since is not None:
                if not self.children:
                    return 0 if at - self._answered_at < LOST_SECONDS else 1
                self._press(at - self.stopping_since)
            else:
                self._fork_missing(at)
                self._look(at)
                if self._over(at):
                    self.stopping_since = at
            time.sleep(POLL_SECONDS)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()

    def _over(self, at: float) -> bool:
        options = self.options
        if options.stop_file is not None and is_there(options.stop_file):
            return True
        idle = (
            self._answered_at - self._worked_at
        )  # by the last look: since then a job may have come, or begun
        if options.burst_idle is not None and idle > 0 and idle >= options.burst_idle:
            return True
        if at - self._answered_at >= LOST_SECONDS:
            log.error("Redis has been away for %.0f s: giving up", LOST_SECONDS)
            return True
        if self._lease is not None and (nobody := self._lease.expired()):
            log.error("%s: nobody waits for these metrics", nobody)
            return True
        return False

    # --- children ----------------------------------------------------------------------------------------------------

    def _fork_missing(self, at: float) -> None:
        while len(self.children) < self.options.count and at >= self._start_after:
            sys.stdout.flush()
            sys.stderr.flush()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._be_a_worker(parent)
            self.children[pid] = at

    def _be_a_worker(self, parent: int) -> None:
        """In the child; never returns."""
        code = 1
        try:
            die_with_parent(signal.SIGTERM, parent)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            # told to end while the parent's handler was still ours: nobody says it again for FINISH_SECONDS
            code = self.work() if self.stopping_since is None else 0
        except QueueUnavailable as error:
            log.warning("worker %d: %s", os.getpid(), error)
        except BaseException:
            log.exception("worker %d", os.getpid())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self.children:
            pid, _status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            started = self.children.pop(pid, None)
            if started is None:
                continue
            self._dead.append(pid)
            lived = time.monotonic() - started
            self._short_lives = self._short_lives + 1 if lived < SHORT_LIFE_SECONDS else 0
            pause = min(MAX_PAUSE_SECONDS, 0.25 * 2**self._short_lives) if self._short_lives else 0.0
            self._start_after = time.monotonic() + pause
            if self.stopping_since is None:
                log.warning("worker %d ended after %.1f s; starting another in %.1f s", pid, lived, pause)

    def _press(self, seconds: float) -> None:
        """SIGTERM: finish the job in hand. Again: drop it (others retry it). SIGKILL: whatever it was."""
        due = sum(seconds >= at for at in (0.0, FINISH_SECONDS, FINISH_SECONDS + DROP_SECONDS))
        if due > self.told:
            self.told = due
            for pid in self.children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if due < 3 else signal.SIGKILL)

    # --- the queue -----------------------------------------------------------------------------------------------------

    def _look(self, at: float) -> None:
        every = NEWS_SECONDS if self._dead else self._every
        if at - self._recovered_at < every:
            return
        self._recovered_at = at
        try:
            if self._queue is None:
                address = redis_client.read(self.options.redis_file)
                self._queue = rq_jobs.open_queue(redis_client.client(address), self.options.queue)
            while self._dead:
                rq_jobs.give_up(self._queue, self.name(self._dead[-1]))
                self._dead.pop()
            rq_jobs.recover(self._queue)
            if not rq_jobs.is_idle(self._queue):
                self._worked_at = at
            self._answered_at = at
        except (QueueUnavailable, redis.RedisError, OSError) as error:
            log.warning("Redis: %s", error)
            self._queue = None
