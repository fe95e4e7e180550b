"""Simulates a plan by discrete events: lanes run their shards by rank, then steal; metrics follow.

Rule: a lane's choice uses ranks and predicted seconds, never the true ones. It takes its own next
shard; where lanes steal, an empty lane steals the lowest rank of the lane with the most predicted
seconds left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from coordinator.decide.planning.flow_shop import MIN_JOB_SHARE, MetricJob, divide_execute_shard, metrics_end
from coordinator.decide.planning.model import Lane, Plan, PlannedShard
from simulation.sampled_times import Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One shard's run, in seconds from the start."""

    shard: PlannedShard
    lane: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`busy_fraction`: inference seconds / seconds that GPUs were held. `tail_seconds`: from the first GPU without a shard to the
    last shard's end.
    """

    makespan_seconds: float
    busy_fraction: float
    lower_bound_seconds: float
    tail_seconds: float = 0.0
    spans: tuple[Span, ...] = ()


def simulate(
    plan: Plan,
    lanes: Sequence[Lane],
    truth: Truth,
    *,
    load_seconds: float,
    shard_overhead_seconds: float,
    cpu_slots: int,
    stage_seconds: float = 0.0,
    steal: bool = True,
    preprocess_seconds: float = 0.0,
) -> Run:
    """Run a plan with true seconds; `lanes` may differ from the planned ones except in their names.

    `preprocess_seconds`: each lane holds its GPU for that long before it loads; the bound omits them.
    """
    bound = truth.bound(lanes, load_seconds=load_seconds, cpu_slots=cpu_slots, stage_seconds=stage_seconds)
    by_name = {lane.name: lane for lane in lanes}
    here = [by_name[lane.lane] for lane in plan.lanes]
    queues = _Queues([lane.shards for lane in plan.lanes], steal=steal)
    before = preprocess_seconds + load_seconds
    free = [(max(lane.ready_at_seconds, stage_seconds) + before, number) for number, lane in enumerate(here)]
    heapify(free)
    spans: list[Span] = []
    held = busy = 0.0
    worked: set[int] = set()
    first_idle = inf
    while free:
        now, number = heappop(free)
        shard = queues.take(number)
        if shard is None:
            first_idle = min(first_idle, now)
            continue
        seconds = truth.gpu(truth.index[shard.set], shard.first_batch, shard.end_batch) / here[number].speed
        end = now + seconds + shard_overhead_seconds
        spans.append(Span(shard=shard, lane=here[number].name, start=now, end=end))
        held += end - now + (0.0 if number in worked else before)
        worked.add(number)
        busy += seconds
        heappush(free, (end, number))
    last = max((span.end for span in spans), default=0.0)
    parallelism = [work.metric_parallelism for work in truth.sets]
    return Run(
        makespan_seconds=max(last, metrics_end(metric_jobs(spans, truth, cpu_slots), parallelism, cpu_slots)),
        busy_fraction=busy / held if held else 0.0,
        lower_bound_seconds=bound.seconds,
        tail_seconds=max(0.0, last - first_idle),
        spans=tuple(spans),
    )


def metric_jobs(spans: Sequence[Span], truth: Truth, cpu_slots: int) -> list[MetricJob]:
    """Jobs for each shard of an `execute` set at its end; one per `score` set at its last shard's end."""
    jobs: list[MetricJob] = []
    grain = MIN_JOB_SHARE * (
        sum(truth.metric_seconds) / cpu_slots + max((span.end for span in spans), default=0.0)
    )
    done: dict[int, float] = {}
    for span in spans:
        index, first, end = truth.index[span.shard.set], span.shard.first_batch, span.shard.end_batch
        if truth.sets[index].metric == "execute":
            at_once = min(truth.sets[index].metric_parallelism, cpu_slots)
            work = (span.end, truth.metric_share(index, first, end), index)
            jobs += divide_execute_shard(*work, at_once=at_once, documents=end - first, grain=grain)
        else:
            done[index] = max(span.end, done.get(index, 0.0))
    return jobs + [(end, truth.metric_seconds[index], index) for index, end in done.items()]


class _Queues:
    """Each lane's shards by rank, and which lane has the most predicted seconds left."""

    def __init__(self, lanes: Sequence[Sequence[PlannedShard]], *, steal: bool) -> None:
        self._steal = steal
        self._shards = [deque(sorted(shards, key=lambda shard: shard.rank)) for shards in lanes]
        self._left = [sum(shard.seconds for shard in shards) for shards in lanes]
        self._most = [(-left, number) for number, left in enumerate(self._left)]
        heapify(self._most)

    def take(self, lane: int) -> PlannedShard | None:
        if not self._shards[lane]:
            richest = self._richest() if self._steal else None
            if richest is None:
                return None
            lane = richest
        shard = self._shards[lane].popleft()
        self._left[lane] -= shard.seconds
        heappush(self._most, (-self._left[lane], lane))
        return shard

    def _richest(self) -> int | None:
        while self._most:
            left, lane = self._most[0]
            if self._shards[lane] and -left == self._left[lane]:
                return lane
            heappop(self._most)
        return None
