"""The two-stage flow shop of every planning policy: shards on lanes, then metrics on CPU slots. Pure.

Rule: a policy decides the cuts, their order and their lanes; only this module computes when lanes and metrics end. Called by
`planner`, whose policies are evalspan's own and that of Hu et al., NSDI 2024.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from coordinator.decide.planning.lower_bound import plan_bound
from coordinator.decide.planning.model import (
    LanePlan,
    Plan,
    PlannedShard,
    Problem,
    WorkSet,
    extreme_batches,
    running_sums,
    seconds_of,
)
from coordinator.decide.planning.shard_sizes import LAST_OVERHEAD_SHARE, Span, shards_of

LEVELLING_PASSES = 3  # of levelling, over all sets
MAX_LEVELLED_SETS = 32
"""Number of sets, largest first, whose cuts are moved: the others carry too little work."""
LEVEL_TOLERANCE = 1e-4
"""Lanes whose ends differ from the mean by less than this fraction count as ending together."""


@dataclass(frozen=True, slots=True)
class LaneAssignment:
    """Cuts on lanes, and when they end: seconds from now."""

    cuts: list[Span]  # by rank
    lane_of: list[int]  # lane of each cut
    makespan: float
    lane_ends: list[float]


class Shop:
    """One planning problem; `deal` is list scheduling in rank order on lanes of a few speeds."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.sets, self.lanes = problem, problem.sets, problem.lanes
        self.overhead, self.cpu_slots = problem.shard_overhead_seconds, problem.cpu_slots
        self.starts = [
            max(lane.ready_at_seconds, problem.stage_seconds) + problem.load_seconds for lane in self.lanes
        ]
        self.totals = [seconds_of(work.batch_seconds) for work in self.sets]
        self.total = sum(self.totals)
        self.width = sum(lane.speed for lane in self.lanes)
        self.horizon = self.total / self.width
        self._sums: dict[int, Sequence[float]] = {}
        self.dealt = 0  # shards over all tries
        self.metric_total = sum(work.metric_seconds for work in self.sets)
        self.at_once = [
            max(1, min(work.metric_parallelism, self.cpu_slots, len(work.batch_seconds)))
            if work.metric == "execute"
            else 1
            for work in self.sets
        ]
        self.tails = [
            work.metric_seconds / slots for work, slots in zip(self.sets, self.at_once, strict=True)
        ]

    def on(self, lanes: Sequence[int]) -> Shop:
        """Return the same problem on some of its lanes."""
        return Shop(replace(self.problem, lanes=[self.lanes[index] for index in lanes]))

    def sums(self, index: int) -> Sequence[float]:
        """Return running sums of a set's batch seconds, starting with 0.0."""
        if index not in self._sums:
            self._sums[index] = running_sums(self.sets[index].batch_seconds)
        return self._sums[index]

    def deal(self, cuts: list[Span], urgent_from: float) -> LaneAssignment:
        """Order cuts by rank, assign each to the lane that ends it soonest, then run the CPU stage."""
        cuts = sorted(
            cuts, key=lambda cut: (-cut[4] if cut[4] > urgent_from else 0.0, -cut[3], cut[0], cut[1])
        )
        by_speed: dict[float, list[tuple[float, int]]] = {}
        for index, lane in enumerate(self.lanes):
            by_speed.setdefault(lane.speed, []).append((self.starts[index], index))
        groups = sorted(by_speed.items(), reverse=True)
        for _, heap in groups:
            heapify(heap)
        lane_of: list[int] = []
        for cut in cuts:
            speed, heap = groups[0]
            end = heap[0][0] + cut[3] / speed
            for other, other_heap in groups[1:]:
                other_end = other_heap[0][0] + cut[3] / other
                if other_end < end:
                    heap, end = other_heap, other_end
            lane_index = heap[0][1]
            heapreplace(heap, (end + self.overhead, lane_index))
            lane_of.append(lane_index)
        return self.placed(cuts, lane_of)

    def level(self, dealt: LaneAssignment) -> LaneAssignment:
        """Return the try with cuts moved so that lanes end together; unchanged if that ends no sooner."""
        chains: dict[int, list[int]] = {}  # set -> ranks of its shards, in document order
        for place in sorted(range(len(dealt.cuts)), key=lambda place: dealt.cuts[place][1]):
            chains.setdefault(dealt.cuts[place][0], []).append(place)
        chains = {index: places for index, places in chains.items() if len(places) > 1}
        moved = level_ends(
            {i: [(dealt.lane_of[at], dealt.cuts[at][3]) for at in places] for i, places in chains.items()},
            {index: self.sums(index) for index in chains},
            dealt.lane_ends,
            [lane.speed for lane in self.lanes],
            self.overhead / LAST_OVERHEAD_SHARE,
        )
        cuts = list(dealt.cuts)
        for index, stops in moved.items():
            recut = shards_of(index, self.sets[index], self.sums(index), stops, self.cpu_slots)
            for place, cut in zip(chains[index], recut, strict=True):
                cuts[place] = cut
        again = self.placed(cuts, dealt.lane_of)
        return again if again.makespan < dealt.makespan else dealt

    def placed(self, cuts: list[Span], lane_of: list[int]) -> LaneAssignment:
        """Return the try with these cuts, by rank, each on the lane that `lane_of` names."""
        lane_ends = list(self.starts)
        ends: list[float] = []
        for cut, lane in zip(cuts, lane_of, strict=True):
            lane_ends[lane] += cut[3] / self.lanes[lane].speed + self.overhead
            ends.append(lane_ends[lane])
        makespan = max(max(ends, default=0.0), self._metrics_end(cuts, ends))
        return LaneAssignment(cuts, lane_of, makespan, lane_ends)

    def _metrics_end(self, cuts: list[Span], ends: list[float]) -> float:
        done: dict[int, float] = {}
        jobs: list[MetricJob] = []
        executed = [
            work.metric_seconds if work.metric == "execute" and total else 0.0
            for work, total in zip(self.sets, self.totals, strict=True)
        ]
        grain = MIN_JOB_SHARE * (self.metric_total / self.cpu_slots + self.horizon)
        for (index, first, stop, seconds, _), end in zip(cuts, ends, strict=True):
            if executed[index]:
                cost = executed[index] * (seconds / self.totals[index])
                if cost < 2 * grain or self.at_once[index] == 1:
                    jobs.append((end, cost, index))
                else:
                    jobs += divide_execute_shard(
                        end, cost, index, at_once=self.at_once[index], documents=stop - first, grain=grain
                    )
            elif done.get(index, -1.0) < end:
                done[index] = end
        jobs += [(end, self.sets[index].metric_seconds, index) for index, end in done.items()]
        return metrics_end(jobs, [work.metric_parallelism for work in self.sets], self.cpu_slots)


def level_ends(
    sizes: Mapping[int, Sequence[tuple[int, float]]],
    sums: Mapping[int, Sequence[float]],
    ends: Sequence[float],
    speeds: Sequence[float],
    shortest: float,
) -> dict[int, list[int]]:
    """Return new ends, in batches, of the shards of the sets whose cuts move, so that lanes end together.

    Each shard keeps its lane and rank; no shard falls below `shortest` seconds.

    `sizes`: set -> (lane, seconds) of its shards, in document order; `sums`: set -> running sums of its batch seconds.
    `ends`: seconds at which each lane ends; `speeds`: seconds of work that each lane does per second.
    """
    ends = list(ends)
    chains = {index: list(shards) for index, shards in sizes.items() if len(shards) > 1}
    order = sorted(chains, key=lambda index: (-sums[index][-1], index))[:MAX_LEVELLED_SETS]
    moved: dict[int, list[int]] = {}
    for _ in range(LEVELLING_PASSES):
        for index in order:
            cuts = _recut(sums[index], _aims(chains[index], ends, speeds, shortest), shortest)
            if cuts is None:
                continue
            first = 0
            for number, stop in enumerate(cuts):
                lane, before = chains[index][number]
                seconds = sums[index][stop] - sums[index][first]
                ends[lane] += (seconds - before) / speeds[lane]
                chains[index][number] = (lane, seconds)
                first = stop
            moved[index] = cuts
        if max(ends) <= (1 + LEVEL_TOLERANCE) * sum(ends) / len(ends):
            break
    return moved


def _aims(
    chain: Sequence[tuple[int, float]], ends: Sequence[float], speeds: Sequence[float], shortest: float
) -> list[float]:
    """Return the seconds that each shard should take so that this set's lanes end together, as far as possible."""
    held: dict[int, float] = {}
    spare: dict[int, float] = {}
    for lane, seconds in chain:
        held[lane] = held.get(lane, 0.0) + seconds
        spare[lane] = spare.get(lane, 0.0) + max(0.0, seconds - shortest)
    level = _level(spare, ends, speeds)
    aims = []
    for lane, seconds in chain:
        change = max((level - ends[lane]) * speeds[lane], -spare[lane])
        if change < 0:
            aims.append(seconds + change * max(0.0, seconds - shortest) / spare[lane])
        else:  # a set without seconds changes nothing
            aims.append(seconds + (change * seconds / held[lane] if held[lane] else 0.0))
    return aims


def _level(spare: Mapping[int, float], ends: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the time at which lanes that share their work end, each giving at most what it can spare."""
    earliest = sorted((ends[lane] - most / speeds[lane], lane) for lane, most in spare.items())
    given = sum(spare.values())  # given by lanes that end after the level anyway
    work = width = 0.0
    level = earliest[0][0]
    for end, lane in earliest:
        if width and end >= level:
            break
        given -= spare[lane]
        work += ends[lane] * speeds[lane]
        width += speeds[lane]
        level = (work + given) / width
    return level


def _recut(sums: Sequence[float], aims: Sequence[float], shortest: float) -> list[int] | None:
    """Return ends of shards near their aims; None if batches are too coarse for that many shards."""
    count = len(sums) - 1
    ends: list[int] = []
    first, goal = 0, 0.0
    for number, aim in enumerate(aims[:-1]):
        goal += aim
        most = count - (len(aims) - 1 - number)
        end = min(bisect_left(sums, goal, first + 1), most)
        if end - 1 > first and goal - sums[end - 1] < sums[end] - goal:
            end -= 1
        if sums[end] - sums[first] < shortest and end < most:
            end += 1
        if end <= first or sums[end] - sums[first] < shortest * (1 - 1e-9):
            return None
        ends.append(end)
        first = end
    if sums[count] - sums[first] < shortest * (1 - 1e-9):
        return None
    return [*ends, count]


def finished_plan(shop: Shop, best: LaneAssignment, floor: float) -> Plan:
    """Return the plan of a try; `floor`: the lower bound of the problem, in seconds."""
    shards: list[list[PlannedShard]] = [[] for _ in shop.lanes]
    names = [work.name for work in shop.sets]
    for rank, (cut, lane) in enumerate(zip(best.cuts, best.lane_of, strict=True)):
        index, first, end, seconds, _ = cut
        shards[lane].append(
            PlannedShard(
                set=names[index], first_batch=first, end_batch=end, seconds=seconds, rank=float(rank)
            )
        )
    held = sum(
        best.lane_ends[index] - shop.starts[index] + shop.problem.load_seconds
        for index, mine in enumerate(shards)
        if mine
    )
    return Plan(
        lanes=tuple(
            LanePlan(lane=lane.name, node=lane.node, shards=tuple(mine))
            for lane, mine in zip(shop.lanes, shards, strict=True)
        ),
        makespan_seconds=best.makespan,
        lower_bound_seconds=floor,
        gpu_seconds=held,
    )


def end_of(made: Plan, problem: Problem) -> float:
    """Return the seconds until the last metric of a plan ends with the metric seconds and CPU slots of `problem`.

    The problem has the lanes of the plan; nothing is replanned.
    """
    shop = Shop(problem)
    index = {work.name: number for number, work in enumerate(shop.sets)}
    shards = [(shard, lane) for lane, own in enumerate(made.lanes) for shard in own.shards]
    shards.sort(key=lambda pair: pair[0].rank)
    cuts = [(index[s.set], s.first_batch, s.end_batch, s.seconds, 0.0) for s, _ in shards]
    return shop.placed(cuts, [lane for _, lane in shards]).makespan


def open_shop(problem: Problem) -> tuple[Shop, float]:
    """Return the problem as a shop, and its lower bound in seconds.

    Raise ValueError for no lane, a speed, slot or shard count that is too small, or two sets of one name.
    """
    _check(problem.sets)
    if problem.shards_per_task is not None and problem.shards_per_task < 1:
        raise ValueError("a task needs at least one shard")
    floor = plan_bound(problem)
    return Shop(problem), floor.seconds


def _check(sets: Sequence[WorkSet]) -> None:
    if len({work.name for work in sets}) != len(sets):
        raise ValueError("two request sets have the same name")
    for work in sets:
        if work.metric_parallelism < 1:
            raise ValueError(f"{work.name}: a metric runs at least one job at once")
        if not 0 <= work.metric_seconds < inf:
            raise ValueError(f"{work.name}: metric seconds must be 0 or more")
        batches = work.batch_seconds
        if not (extreme_batches(batches)[0] >= 0 and seconds_of(batches) < inf):
            raise ValueError(f"{work.name}: batch seconds must be 0 or more")


# --- the second stage: metric jobs on CPU slots -------------------------------------------------------------------
# First come first served, as the job queue runs them. An `execute` metric is divisible by document: a shard's work becomes several
# jobs, as many as its set may run at once. A job that waits for its own set holds no slot.

MetricJob = tuple[float, float, int]
"""(ready at, CPU seconds, index of its set)"""


MIN_JOB_SHARE = 0.002
"""Minimum length of a job, as a share of the CPU work per slot."""


def divide_execute_shard(
    ready: float, seconds: float, index: int, *, at_once: int, documents: int, grain: float
) -> list[MetricJob]:
    """Return the jobs of an `execute` shard: at most `at_once`, each of at least one document and `grain` seconds."""
    pieces = min(at_once, documents, int(seconds / grain)) if grain > 0 else 1
    if pieces <= 1:
        return [(ready, seconds, index)]
    return [(ready, seconds / pieces, index)] * pieces


def metrics_end(jobs: Sequence[MetricJob], parallelism: Sequence[int], slots: int) -> float:
    """Return the seconds at which the last job ends; 0.0 without jobs. `parallelism[set]`: its concurrent jobs."""
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
    queued: list[tuple[float, int]] = []  # (ready, arrival number) of jobs waiting for a slot
    held: dict[int, deque[int]] = {}  # arrival numbers waiting for their own set
    running: dict[int, int] = {}
    ends: list[tuple[float, int]] = []  # (end, set) of jobs in slots
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
