"""Runs many programs over several lanes, in input order, with bounded memory.

Rule: every program gets one verdict. A lane that dies costs its own program one more try, and other
programs nothing. Programs are pulled as lanes take them, at most WINDOW ahead of the oldest without
a verdict. Called from `cli`, `levels` and `scoring`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from evaljobs.sandbox import levels
from evaljobs.sandbox.isolation.lane import Lane, LaneDeadError
from evaljobs.sandbox.records import Job, Level, Program, SandboxUnavailableError, Verdict, jobs, refused

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
    pool = _Pool(level, iter(programs), max(1, workers))
    try:
        yield from pool.run()
    finally:
        pool.close()


@dataclass(slots=True, kw_only=True)
class _Task:
    """A program in progress: the jobs that it still needs, and the results of its finished ones."""

    index: int
    program_id: str
    left: collections.deque[Job]
    shared: bool  # its program and test share a process
    seconds: float = 0.0
    deaths: int = 0


@dataclass(slots=True)
class _Pool:
    level: Level
    source: Iterator[Program | Verdict]
    workers: int
    idle: list[Lane] = field(default_factory=list)
    busy: dict[Lane, _Task] = field(default_factory=dict)
    starting: set[Lane] = field(default_factory=set)
    again: collections.deque[_Task] = field(default_factory=collections.deque)
    done: dict[int, Verdict] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    pulled: int = 0
    yielded: int = 0
    exhausted: bool = False

    def run(self) -> Iterator[Verdict]:
        while True:
            self._feed()
            while self.yielded in self.done:
                verdict = self.done.pop(self.yielded)
                self.yielded += 1
                yield verdict
            if not self.busy and not self.again and self.exhausted and not self.done:
                return
            if self.busy or self.starting:
                self._wait()

    # --- giving out work

    def _feed(self) -> None:
        """Give every idle lane a task, and start lanes while there are tasks for them."""
        while True:
            if self.idle:
                task = self.again.popleft() if self.again else self._pull()
                if task is None:
                    return
                self._send(self.idle.pop(), task)
                continue
            if len(self.busy) + len(self.starting) >= self.workers:
                return
            if len(self.again) <= len(self.starting):  # a lane is starting for each of these
                task = self._pull()
                if task is None:
                    return
                self.again.append(task)
            self._start()

    def _pull(self) -> _Task | None:
        """The next program to run; None if there is none, or the window is full."""
        while not self.exhausted and self.pulled - self.yielded < WINDOW:
            try:
                item = next(self.source)
            except StopIteration:
                self.exhausted = True
                return None
            index, self.pulled = self.pulled, self.pulled + 1
            if isinstance(item, Verdict):
                self.done[index] = item
                continue
            try:
                needed = collections.deque(jobs(item))
                shared = any(job.in_process for job in needed)
                return _Task(index=index, program_id=item.id, left=needed, shared=shared)
            except (ValueError, TypeError) as error:
                self.done[index] = refused(item.id, str(error))
        return None

    def _start(self) -> None:
        lane = Lane(self.level)
        self.starting.add(lane)
        self.selector.register(lane, selectors.EVENT_READ)

    def _send(self, lane: Lane, task: _Task) -> None:
        self.busy[lane] = task
        try:
            lane.send(task.left[0])
        except LaneDeadError:
            self._bury(lane)

    # --- taking results

    def _wait(self) -> None:
        """Wait until a lane sends a message or is overdue."""
        now = time.monotonic()
        nearest = min(lane.deadline for lane in (*self.busy, *self.starting))
        for key, _ in self.selector.select(max(0.0, nearest - now) + 0.01):
            lane = key.fileobj
            if isinstance(lane, Lane):
                self._receive(lane)
        now = time.monotonic()
        for lane in [lane for lane in (*self.busy, *self.starting) if lane.deadline < now]:
            if lane in self.starting:
                raise SandboxUnavailableError("the sandbox did not start in time")
            self._bury(lane)

    def _receive(self, lane: Lane) -> None:
        try:
            result = lane.receive()
        except LaneDeadError:
            self._bury(lane)
            return
        if lane in self.starting and lane.ready:
            self.starting.discard(lane)
            self.idle.append(lane)
        task = self.busy.get(lane)
        if result is None or task is None:
            return
        del self.busy[lane]
        self.idle.append(lane)
        self._advance(task, *result)

    def _advance(self, task: _Task, verdict: str, reason: str, seconds: float) -> None:
        task.seconds += seconds
        task.left.popleft()
        if verdict == "pass" and task.left:
            self.again.append(task)
        else:
            self._finish(task, verdict, reason)

    def _finish(self, task: _Task, verdict: str, reason: str) -> None:
        self.done[task.index] = Verdict(
            id=task.program_id,
            verdict=verdict,
            seconds=round(task.seconds, 6),
            isolation=self.level.value + ("+in-process" if task.shared else ""),
            reason=reason,
        )

    def _bury(self, lane: Lane) -> None:
        """End a lane that died or hangs; its task is tried once more elsewhere."""
        self.selector.unregister(lane)
        lane.close()
        self.starting.discard(lane)
        if lane in self.idle:
            self.idle.remove(lane)
        task = self.busy.pop(lane, None)
        if task is None:
            return
        task.deaths += 1
        if task.deaths < _TRIES:
            self.again.append(task)
        else:
            self._finish(task, "crash", "the sandbox around this program died twice")

    def close(self) -> None:
        for lane in (*self.idle, *self.busy, *self.starting):
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(lane)
            lane.close()
        self.selector.close()
