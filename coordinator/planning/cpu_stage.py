"""The second stage: metric jobs on CPU slots, first come first served, as the job queue runs them.

An `execute` metric is divisible by document: a shard's work becomes several jobs, as many as its
set may run at once. Rule: a job starts when it is ready, a slot is free and its set runs fewer jobs
than its limit. A job that waits for its own set holds no slot. Called by `flow_shop`, `make_plan`
and the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

MetricJob = tuple[float, float, int]
"""(ready at, CPU seconds, index of its set)"""


FINEST = 0.002
"""Least length of a job, as a share of the CPU work per slot."""


def divided(
    ready: float, seconds: float, index: int, *, at_once: int, documents: int, grain: float
) -> list[MetricJob]:
    """Jobs of an `execute` shard: at most `at_once`, each of a document and `grain` seconds or more."""
    pieces = min(at_once, documents, int(seconds / grain)) if grain > 0 else 1
    if pieces <= 1:
        return [(ready, seconds, index)]
    return [(ready, seconds / pieces, index)] * pieces


def metrics_end(jobs: Sequence[MetricJob], parallelism: Sequence[int], slots: int) -> float:
    """Seconds at which the last job ends; 0.0 without jobs. `parallelism[set]`: its jobs at once."""
    if not jobs:
        return 0.0
    counts: dict[int, int] = {}
    for _, _, index in jobs:
        counts[index] = counts.get(index, 0) + 1
    if any(parallelism[index] < count for index, count in counts.items()):
        return _run(jobs, parallelism, slots)
    if slots >= len(jobs):
        return max(ready + seconds for ready, seconds, _ in jobs)
    free = [0.0] * slots  # an ordered list of equal numbers is a heap
    for ready, seconds, _ in sorted(jobs):
        heapreplace(free, max(ready, free[0]) + seconds)
    return max(free)


def _run(jobs: Sequence[MetricJob], parallelism: Sequence[int], slots: int) -> float:
    arrivals = sorted(jobs)
    queued: list[tuple[float, int]] = []  # (ready, arrival number) of jobs that wait for a slot
    held: dict[int, deque[int]] = {}  # arrival numbers that wait for their own set
    running: dict[int, int] = {}
    ends: list[tuple[float, int]] = []  # (end, set) of jobs on slots
    now, last, arrived = 0.0, 0.0, 0
    while arrived < len(arrivals) or ends:
        if ends and (arrived == len(arrivals) or ends[0][0] <= arrivals[arrived][0]):
            now, index = heappop(ends)
            running[index] -= 1
            if held.get(index):
                number = held[index].popleft()
                heappush(queued, (arrivals[number][0], number))
        else:
            now = arrivals[arrived][0]
            heappush(queued, (now, arrived))
            arrived += 1
        while queued and len(ends) < slots:
            _, number = heappop(queued)
            _, seconds, index = arrivals[number]
            if running.get(index, 0) >= parallelism[index]:
                held.setdefault(index, deque()).append(number)
                continue
            running[index] = running.get(index, 0) + 1
            heappush(ends, (now + seconds, index))
            last = max(last, now + seconds)
    return last
