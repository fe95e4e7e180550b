"""The makespan that no schedule beats.

    LB = T_stage + max( L + Σg/m,  max_j(L + first_j + c_j^min),  L + min_j first_j + Σc/k )

for m GPUs, k CPU slots, L a worker's load, g_j and c_j a set's GPU and metric seconds. A metric that may start per
shard has first_j = one batch and c_j^min = c_j / (slots it may use at once); one that needs the whole set has
first_j = max(g_j/m, one batch) and c_j^min = c_j. Lanes that arrive late or differ in speed turn g/m into the earliest
time at which all lanes together have worked g seconds, which is no later than any schedule's.

Rule: optimistic in every term (no overhead, no contention, work infinitely divisible over lanes).
It does not know: any plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.packing.work import Lane, WorkSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of each term, staging included; `binding` names the set when its CPU tail is the largest term."""

    gpu_seconds: float
    tail_seconds: float
    cpu_seconds: float
    tail_of: str

    @property
    def seconds(self) -> float:
        return max(self.gpu_seconds, self.tail_seconds, self.cpu_seconds)

    @property
    def binding(self) -> str:
        """The binding term in words: `GPU time`, `CPU slots`, or `the tail of X`."""
        if self.gpu_seconds >= max(self.tail_seconds, self.cpu_seconds):
            return "GPU time"
        return f"the tail of {self.tail_of}" if self.tail_seconds >= self.cpu_seconds else "CPU slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSet:
    """What a set took in a run that is over: GPU seconds of its inference, CPU seconds of its metric."""

    name: str
    gpu_seconds: float
    documents: int
    metric_seconds: float
    executes: bool


class Capacity:
    """Work that a group of lanes can have done by a time: Σ speed · max(0, t - start)."""

    def __init__(self, lanes: Sequence[Lane], load_seconds: float, stage_seconds: float) -> None:
        if not lanes:
            raise ValueError("a plan needs at least one lane")
        if any(lane.speed <= 0 for lane in lanes):
            raise ValueError("a lane's speed must be above 0")
        pairs = sorted(
            (max(lane.ready_at_seconds, stage_seconds) + load_seconds, lane.speed) for lane in lanes
        )
        self._starts: list[float] = []  # distinct starts, ascending
        self._speeds: list[float] = []  # summed speed from that start on
        self._fastest: list[float] = []  # the fastest lane from that start on
        for start, speed in pairs:
            if self._starts and self._starts[-1] == start:
                self._speeds[-1] += speed
                self._fastest[-1] = max(self._fastest[-1], speed)
            else:
                self._starts.append(start)
                self._speeds.append(speed + (self._speeds[-1] if self._speeds else 0.0))
                self._fastest.append(max(speed, self._fastest[-1] if self._fastest else 0.0))

    def earliest(self, work: float) -> float:
        """When `work` GPU seconds, infinitely divisible, can be done at the earliest."""
        done = 0.0
        for index, (start, speed) in enumerate(zip(self._starts, self._speeds, strict=True)):
            finish = start + (work - done) / speed
            if index + 1 == len(self._starts) or finish <= self._starts[index + 1]:
                return finish
            done += speed * (self._starts[index + 1] - start)
        raise AssertionError("unreachable: the last start always returns")

    def earliest_single(self, work: float) -> float:
        """When one lane can have done `work` GPU seconds at the earliest."""
        return min(start + work / speed for start, speed in zip(self._starts, self._fastest, strict=True))


def bound(
    sets: Sequence[WorkSet],
    lanes: Sequence[Lane],
    *,
    load_seconds: float,
    cpu_slots: int,
    stage_seconds: float = 0.0,
) -> Bound:
    """Every term of the lower bound of a plan; ValueError without lanes or CPU slots."""
    sizes = [
        _Size(
            work.name,
            sum(work.batch_seconds),
            min(work.batch_seconds, default=0.0),
            max(work.batch_seconds, default=0.0),
            work.metric_seconds,
            min(work.metric_parallelism, cpu_slots) if work.metric == "execute" else 0,
        )
        for work in sets
    ]
    return _bound(sizes, Capacity(lanes, load_seconds, stage_seconds), cpu_slots)


def lower_bound(
    sets: Sequence[WorkSet],
    lanes: Sequence[Lane],
    *,
    load_seconds: float,
    cpu_slots: int,
    stage_seconds: float = 0.0,
) -> float:
    """Seconds from now that no schedule beats."""
    return bound(
        sets, lanes, load_seconds=load_seconds, cpu_slots=cpu_slots, stage_seconds=stage_seconds
    ).seconds


def measured_lower_bound(
    sets: Sequence[MeasuredSet], *, gpus: int, cpu_slots: int, load_seconds: float, before_seconds: float
) -> float:
    """The bound of a run that is over, from its measured seconds; `before_seconds` passed before any GPU could load."""
    lanes = [Lane(name=str(index), node="") for index in range(gpus)]
    sizes = []
    for work in sets:
        one = work.gpu_seconds / max(1, work.documents)
        slots = min(cpu_slots, max(1, work.documents)) if work.executes else 0
        sizes.append(_Size(work.name, work.gpu_seconds, one, one, work.metric_seconds, slots))
    return before_seconds + _bound(sizes, Capacity(lanes, load_seconds, 0.0), cpu_slots).seconds


@dataclass(frozen=True, slots=True)
class _Size:
    name: str
    gpu_seconds: float
    shortest_batch: float
    longest_batch: float
    metric_seconds: float
    slots: int  # 0: the metric needs the whole set


def _bound(sizes: Sequence[_Size], capacity: Capacity, cpu_slots: int) -> Bound:
    if cpu_slots < 1:
        raise ValueError("metrics need at least one CPU slot")
    gpu = capacity.earliest(sum(size.gpu_seconds for size in sizes))
    tail, tail_of, first_of_all = 0.0, "", float("inf")
    for size in sizes:
        if size.slots:
            first = capacity.earliest_single(size.shortest_batch)
            least = size.metric_seconds / size.slots
        else:
            first = max(capacity.earliest(size.gpu_seconds), capacity.earliest_single(size.longest_batch))
            least = size.metric_seconds
        first_of_all = min(first_of_all, first)
        if first + least > tail:
            tail, tail_of = first + least, size.name
    cpu = first_of_all + sum(size.metric_seconds for size in sizes) / cpu_slots if sizes else 0.0
    return Bound(gpu_seconds=gpu, tail_seconds=tail, cpu_seconds=cpu, tail_of=tail_of)
