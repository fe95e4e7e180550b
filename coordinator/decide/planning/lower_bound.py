"""The makespan that no schedule beats.

    LB = T_stage + max( L + Σg/m,  max_j(L + first_j + c_j^min),  L + min_j first_j + Σc/k )

for m GPUs, k CPU slots, L a worker's load, g_j and c_j a set's GPU and metric seconds. A metric
that may start per shard has first_j = one batch and c_j^min = c_j / (slots it may use at once); one
that needs the whole set has first_j = max(g_j/m, one batch) and c_j^min = c_j. Lanes that arrive
late or differ in speed turn g/m into the earliest time at which all lanes together have worked g
seconds, which is no later than any schedule's.

Rule: optimistic in every term (no overhead, no contention, work infinitely divisible over lanes).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from coordinator.decide.planning.model import Lane, Problem, extreme_batches, seconds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of each term, with staging; `tail_of`: the set with the largest CPU tail."""

    gpu_seconds: float
    tail_seconds: float
    cpu_seconds: float
    tail_of: str

    @property
    def seconds(self) -> float:
        return max(self.gpu_seconds, self.tail_seconds, self.cpu_seconds)

    @property
    def binding(self) -> str:
        """Describe the binding term: `GPU time`, `CPU slots`, or `the tail of X`."""
        if self.gpu_seconds >= max(self.tail_seconds, self.cpu_seconds):
            return "GPU time"
        return f"the tail of {self.tail_of}" if self.tail_seconds >= self.cpu_seconds else "CPU slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSet:
    """Measured times of a set in an ended run: GPU seconds of its inference, CPU seconds of its metric."""

    name: str
    gpu_seconds: float
    documents: int
    metric_seconds: float
    executes: bool


class Size(NamedTuple):
    """A set for the bound: seconds, and slots its metric may use at once (0: it needs the whole set)."""

    name: str
    gpu_seconds: float
    shortest_batch: float
    longest_batch: float
    metric_seconds: float
    slots: int


class Capacity:
    """Work that a group of lanes can do by a time: Σ speed · max(0, t - start)."""

    def __init__(self, lanes: Sequence[Lane], load_seconds: float, stage_seconds: float) -> None:
        if not lanes:
            raise ValueError("a plan needs at least one lane")
        if any(lane.speed <= 0 for lane in lanes):
            raise ValueError("a lane's speed must be above 0")
        pairs = sorted(
            (max(lane.ready_at_seconds, stage_seconds) + load_seconds, lane.speed) for lane in lanes
        )
        self._kinds = frozenset(pairs)
        self._starts = [start for start, _ in pairs]  # ascending
        self._speeds = list(accumulate(speed for _, speed in pairs))  # cumulative, from that start on
        gaps = (after - before for before, after in pairwise(self._starts))
        # work done before that start
        self._done: list[float] = list(accumulate(map(mul, self._speeds, gaps), initial=0.0))

    def earliest(self, work: float) -> float:
        """Return the earliest time at which `work` GPU seconds, infinitely divisible, can be done."""
        at = max(0, bisect_left(self._done, work) - 1)
        return self._starts[at] + (work - self._done[at]) / self._speeds[at]

    def earliest_single(self, work: float) -> float:
        """Return the earliest time at which a single lane can have done `work` GPU seconds."""
        return min(start + work / speed for start, speed in self._kinds)


def plan_bound(problem: Problem) -> Bound:
    """Return the terms of a plan's lower bound (0 without batches). Raise ValueError without lanes or CPU slots."""
    sizes = [
        Size(
            work.name,
            seconds_of(work.batch_seconds),
            *extreme_batches(work.batch_seconds),
            work.metric_seconds,
            min(work.metric_parallelism, problem.cpu_slots) if work.metric == "execute" else 0,
        )
        for work in problem.sets
        if work.batch_seconds
    ]
    return measured_bound(
        sizes,
        problem.lanes,
        load_seconds=problem.load_seconds,
        cpu_slots=problem.cpu_slots,
        stage_seconds=problem.stage_seconds,
    )


def measured_lower_bound(
    sets: Sequence[MeasuredSet], *, gpus: int, cpu_slots: int, load_seconds: float, before_seconds: float
) -> float:
    """Return the bound of an ended run's measured seconds; `before_seconds` passed before any GPU could load."""
    lanes = [Lane(name=str(index), node="") for index in range(gpus)]
    sizes = []
    for work in sets:
        one = work.gpu_seconds / max(1, work.documents)
        slots = min(cpu_slots, max(1, work.documents)) if work.executes else 0
        sizes.append(Size(work.name, work.gpu_seconds, one, one, work.metric_seconds, slots))
    whole = measured_bound(sizes, lanes, load_seconds=load_seconds, cpu_slots=cpu_slots, stage_seconds=0.0)
    return before_seconds + whole.seconds


def measured_bound(
    sizes: Sequence[Size],
    lanes: Sequence[Lane],
    *,
    load_seconds: float,
    cpu_slots: int,
    stage_seconds: float,
) -> Bound:
    """Return the bound from sizes alone. Raise ValueError without lanes or CPU slots."""
    capacity = Capacity(lanes, load_seconds, stage_seconds)
    if cpu_slots < 1:
        raise ValueError("metrics need at least one CPU slot")
    if not sizes:
        return Bound(gpu_seconds=0.0, tail_seconds=0.0, cpu_seconds=0.0, tail_of="")
    gpu = capacity.earliest(sum(size.gpu_seconds for size in sizes))
    tail, tail_of, first_of_all = 0.0, "", float("inf")
    for name, total, shortest, longest, metric_seconds, slots in sizes:
        if slots:
            first = capacity.earliest_single(shortest)
            end = first + metric_seconds / slots
        else:
            first = max(capacity.earliest(total), capacity.earliest_single(longest))
            end = first + metric_seconds
        first_of_all = min(first_of_all, first)
        if end > tail:
            tail, tail_of = end, name
    cpu = first_of_all + sum(size.metric_seconds for size in sizes) / cpu_slots
    return Bound(gpu_seconds=gpu, tail_seconds=tail, cpu_seconds=cpu, tail_of=tail_of)
