"""Runs many programs over several lanes, in input order, with bounded memory.

Rule: every program gets one verdict. A lane that dies costs its own program one more try, and other
programs nothing. Programs are read at most WINDOW ahead of the oldest without a verdict. Called from
`__main__`, `levels` and `scoring`.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from evaljobs.sandbox import levels
from evaljobs.sandbox.isolation.lane import Lane, LaneDeadError
from evaljobs.sandbox.records import Job, Level, Program, Verdict, job_of, refused

WINDOW: Final = 4096  # programs read ahead of the oldest without a verdict
_TRIES: Final = 2


def run_programs(
    programs: Iterable[Program | Verdict],
    *,
    workers: int | None = None,
    level: Level | None = None,
    allow_unsafe: bool = False,
) -> Iterator[Verdict]:
    """Yield one verdict per program, in input order. A Verdict among the programs is passed on.

    `workers` lanes run at once, by default one per usable core. `level` is by default the best that
    holds here. Raises SandboxUnavailableError at once if it does not hold, or if only rlimits are
    left and not `allow_unsafe`. May be used from several threads and from forked processes.
    """
    chosen = levels.choose(level, allow_unsafe=allow_unsafe)
    return run_on(chosen, programs, workers or len(os.sched_getaffinity(0)))


def run_on(level: Level, programs: Iterable[Program | Verdict], workers: int) -> Iterator[Verdict]:
    """Like `run_programs`, on a level that has not been tried."""
    lanes = _Lanes(level)
    pool = ThreadPoolExecutor(max(1, workers))
    waiting: collections.deque[Future[Verdict]] = collections.deque()
    try:
        for program in programs:
            waiting.append(pool.submit(lanes.verdict, program))
            while waiting and (len(waiting) >= WINDOW or waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        lanes.close()
        pool.shutdown()


class _Lanes:
    """Lanes of one level; each thread of the pool borrows one for a program."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._idle: list[Lane] = []
        self._alive: set[Lane] = set()
        self._closed = False

    def verdict(self, program: Program | Verdict) -> Verdict:
        if isinstance(program, Verdict):
            return program
        try:
            job = job_of(program)
        except (ValueError, TypeError) as error:
            return refused(program.id, str(error))
        verdict, reason, seconds = self._run(job)
        return Verdict(
            id=program.id,
            verdict=verdict,
            seconds=round(seconds, 6),
            isolation=self._level.value,
            reason=reason,
        )

    def _run(self, job: Job) -> tuple[str, str, float]:
        for _ in range(_TRIES):
            if self._closed:
                break
            lane = self._take()
            try:
                result = lane.run(job)
            except LaneDeadError:
                self._alive.discard(lane)
                lane.close()
            else:
                self._idle.append(lane)
                return result
        return "crash", "the sandbox around this program died twice", 0.0

    def _take(self) -> Lane:
        try:
            return self._idle.pop()
        except IndexError:
            lane = Lane(self._level)
            self._alive.add(lane)
            if self._closed:  # while it started
                lane.close()
            return lane

    def close(self) -> None:
        """Kill all lanes, including busy ones."""
        self._closed = True
        for lane in list(self._alive):
            lane.close()
