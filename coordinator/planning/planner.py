"""Plans request sets on free lanes: what runs where, in which order, and until when. Pure.

Rule: a two-stage flow shop. Shards before long CPU tails run first, longest tail first (Jackson's
rule); all others longest first, each on the lane that ends it soonest (LPT). A few ways to cut and
to order are tried and the plan with the earliest predicted end is kept. At run time lanes pull in
rank order and steal, so a plan is a good start and need not be right. Called by `make_plan` and the
simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain
from math import inf

from coordinator.planning.batch_sums import extremes, running, seconds_of
from coordinator.planning.cpu_stage import FINEST, MetricJob, divided, metrics_end
from coordinator.planning.lower_bound import lower_bound
from coordinator.planning.model import Lane, LanePlan, Plan, PlannedShard, WorkSet
from coordinator.planning.rebalance import levelled
from coordinator.planning.shard_sizes import (
    LONGEST,
    OVERHEAD_SHARE,
    Cut,
    Sizes,
    cut_evenly,
    cut_guided,
    shards_of,
    sizes_for,
)

__all__ = ["Lane", "LanePlan", "Plan", "PlannedShard", "WorkSet", "plan"]

URGENT = (0.01, 0.002, 0.05, 1.0, 0.0)
"""A tail longer than this part of the horizon makes a shard urgent; tried in this order."""
TOP_TAILS = (0.999, 0.5, 0.2)
"""URGENT as parts of the longest tail, tried where CPU slots hold the end: few sets are urgent then."""
SHARES = (3.0, 6.0)
"""Shards are 1/(shares x lanes) of the work left; tried in this order."""
EVEN = (1.0, 2.0, 3.0, 4.0)
"""Shards of one size, where overheads weigh: parts of a lane's work; tried in this order."""
URGENT_OR_NOT = (0.01, 1.0)
"""URGENT for shards of one size."""
CLEARLY = 0.98
"""Another way is taken where its levelled plan ends before this part of the best plan's end."""
CLOSE = 1.01
"""No other way is tried for a plan that ends within this factor of the bound."""
NEGLIGIBLE = 0.005
"""A metric job of one shard may take this part of the horizon: shards are not cut for less."""
MANY_SHARDS = 20_000
"""Shards cut over all tries after which no other way is tried: planning stays under a second."""


def plan(
    sets: Sequence[WorkSet],
    lanes: Sequence[Lane],
    *,
    load_seconds: float,
    shard_overhead_seconds: float = 0.05,
    cpu_slots: int = 1,
    shards_per_task: int | None = None,
    stage_seconds: float = 0.0,
) -> Plan:
    """Place every batch of every set on a lane, exactly once.

    A lane works from max(its ready time, `stage_seconds`) + `load_seconds` on; a shard takes its
    seconds / the lane's speed + `shard_overhead_seconds`. `shards_per_task` forces that many nearly
    equal shards a set. ValueError: no lane, a speed or a slot count below what can work, two sets
    of one name.
    """
    _check(sets)
    if shards_per_task is not None and shards_per_task < 1:
        raise ValueError("a task needs at least one shard")
    floor = lower_bound(
        sets, lanes, load_seconds=load_seconds, cpu_slots=cpu_slots, stage_seconds=stage_seconds
    )
    shop = _Shop(
        sets=sets,
        lanes=lanes,
        starts=[max(lane.ready_at_seconds, stage_seconds) + load_seconds for lane in lanes],
        load=load_seconds,
        overhead=shard_overhead_seconds,
        cpu_slots=cpu_slots,
    )
    best, dealt = _search(shop, shards_per_task, floor)
    if _slots_hold(best, floor):
        best = _on_fewer_lanes(shop, shards_per_task, floor, best, dealt)
    return _finished(shop, best, floor)


def _slots_hold(best: _Try, floor: float) -> bool:
    """Does the end wait for CPU slots, beyond what the bound requires?"""
    return best.makespan > max(CLOSE * floor, *best.lane_ends)


def _search(shop: _Shop, shards_per_task: int | None, floor: float) -> tuple[_Try, int]:
    """The best of all ways within the budget, and the number of shards dealt in the search."""
    tries: list[_Try] = []
    best: _Try | None = None
    dealt = 0
    forced = None if shards_per_task is None else _forced(shop, shards_per_task)
    for shares, urgent_from, rare in _ways(shop):
        if rare and best is not None and not _slots_hold(best, floor):
            break
        attempt = shop.deal(_guided(shop, urgent_from, shares) if forced is None else forced, urgent_from)
        tries.append(attempt)
        if best is None or attempt.makespan < best.makespan:
            best = attempt
        dealt += len(attempt.cuts)
        if dealt > MANY_SHARDS or best.makespan <= floor * (1 + 1e-6):
            break
    assert best is not None
    if forced is not None or dealt > MANY_SHARDS:
        return best, dealt
    return _levelled(shop, floor, best, tries, dealt)


def _levelled(shop: _Shop, floor: float, best: _Try, tries: list[_Try], dealt: int) -> tuple[_Try, int]:
    """The best try levelled; or another, where overheads or uncuttable shards hold its end.

    In a near tie the try that was best before levelling stays: it tolerates wrong priors better.
    """
    ways = [(part * shop.horizon, parts) for parts in EVEN for part in URGENT_OR_NOT]
    others = chain(
        (attempt for attempt in tries if attempt is not best),
        (shop.deal(_guided(shop, urgent_from, 0.0, parts), urgent_from) for urgent_from, parts in ways),
    )
    best = shop.level(best)
    for attempt in others:
        dealt += len(attempt.cuts)
        if dealt > MANY_SHARDS or best.makespan <= CLOSE * floor:
            break
        moved = shop.level(attempt)
        if moved.makespan < CLEARLY * best.makespan:
            best = moved
    return best, dealt


def _ways(shop: _Shop) -> Iterator[tuple[float, float, bool]]:
    """Ways in order: (shares, tail seconds of an urgent shard, only where CPU slots hold the end)."""
    for shares in SHARES:
        for part in URGENT:
            yield shares, part * shop.horizon, False
    longest = max(shop.tails, default=0.0)
    for shares in SHARES:
        for part in TOP_TAILS:
            yield shares, part * longest, True


def _on_fewer_lanes(shop: _Shop, shards_per_task: int | None, floor: float, best: _Try, dealt: int) -> _Try:
    """Try fewer lanes where CPU slots hold the end: more lanes may only worsen the order at the slots.

    Leaves one more lane without shards at a time, within the budget; these lanes may still steal.
    """
    order = sorted(
        range(len(shop.lanes)), key=lambda index: (shop.starts[index], -shop.lanes[index].speed, index)
    )
    for width in range(len(order) - 1, 0, -1):
        if dealt > MANY_SHARDS:
            break
        kept = sorted(order[:width])
        fewer, cost = _search(shop.on(kept), shards_per_task, floor)
        dealt += cost
        if fewer.makespan < best.makespan:
            ends = list(shop.starts)
            for index, end in zip(kept, fewer.lane_ends, strict=True):
                ends[index] = end
            best = _Try(fewer.cuts, [kept[lane] for lane in fewer.lane_of], fewer.makespan, ends)
    return best


def _check(sets: Sequence[WorkSet]) -> None:
    if len({work.name for work in sets}) != len(sets):
        raise ValueError("two request sets have the same name")
    for work in sets:
        if work.metric_parallelism < 1:
            raise ValueError(f"{work.name}: a metric runs at least one job at once")
        if not 0 <= work.metric_seconds < inf:
            raise ValueError(f"{work.name}: metric seconds must be 0 or more")
        batches = work.batch_seconds
        if not (extremes(batches)[0] >= 0 and seconds_of(batches) < inf):
            raise ValueError(f"{work.name}: batch seconds must be 0 or more")


@dataclass(frozen=True, slots=True)
class _Try:
    cuts: list[Cut]  # by rank
    lane_of: list[int]  # lane of each cut
    makespan: float
    lane_ends: list[float]


class _Shop:
    """One planning problem; `deal` is list scheduling in rank order on lanes of a few speeds."""

    def __init__(
        self,
        *,
        sets: Sequence[WorkSet],
        lanes: Sequence[Lane],
        starts: list[float],
        load: float,
        overhead: float,
        cpu_slots: int,
    ) -> None:
        self.sets, self.lanes, self.starts, self.load = sets, lanes, starts, load
        self.overhead, self.cpu_slots = overhead, cpu_slots
        self.totals = [seconds_of(work.batch_seconds) for work in sets]
        self.total = sum(self.totals)
        self.width = sum(lane.speed for lane in lanes)
        self.horizon = self.total / self.width
        self._sums: dict[int, Sequence[float]] = {}
        self.metric_total = sum(work.metric_seconds for work in sets)
        self.at_once = [
            max(1, min(work.metric_parallelism, cpu_slots, len(work.batch_seconds)))
            if work.metric == "execute"
            else 1
            for work in sets
        ]
        self.tails = [work.metric_seconds / slots for work, slots in zip(sets, self.at_once, strict=True)]

    def on(self, lanes: Sequence[int]) -> _Shop:
        """The same problem on some of its lanes."""
        return _Shop(
            sets=self.sets,
            lanes=[self.lanes[index] for index in lanes],
            starts=[self.starts[index] for index in lanes],
            load=self.load,
            overhead=self.overhead,
            cpu_slots=self.cpu_slots,
        )

    def sums(self, index: int) -> Sequence[float]:
        """Running sums of a set's batch seconds, from 0.0 on."""
        if index not in self._sums:
            self._sums[index] = running(self.sets[index].batch_seconds)
        return self._sums[index]

    def deal(self, cuts: list[Cut], urgent_from: float) -> _Try:
        """Order cuts by rank, deal each to the lane that ends it soonest, then run the CPU stage."""
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
        ends: list[float] = []
        lane_ends = list(self.starts)
        overhead = self.overhead
        for cut in cuts:
            speed, heap = groups[0]
            end = heap[0][0] + cut[3] / speed
            for other, other_heap in groups[1:]:
                other_end = other_heap[0][0] + cut[3] / other
                if other_end < end:
                    heap, end = other_heap, other_end
            end += overhead
            lane_index = heap[0][1]
            heapreplace(heap, (end, lane_index))
            lane_of.append(lane_index)
            ends.append(end)
            lane_ends[lane_index] = end
        makespan = max(max(ends, default=0.0), self._metrics_end(cuts, ends))
        return _Try(cuts, lane_of, makespan, lane_ends)

    def level(self, dealt: _Try) -> _Try:
        """The try with cuts moved so that lanes end together; unchanged where that ends no sooner."""
        chains: dict[int, list[int]] = {}  # set -> places of its shards in the ranks, by documents
        for place in sorted(range(len(dealt.cuts)), key=lambda place: dealt.cuts[place][1]):
            chains.setdefault(dealt.cuts[place][0], []).append(place)
        chains = {index: places for index, places in chains.items() if len(places) > 1}
        moved = levelled(
            {i: [(dealt.lane_of[at], dealt.cuts[at][3]) for at in places] for i, places in chains.items()},
            {index: self.sums(index) for index in chains},
            dealt.lane_ends,
            [lane.speed for lane in self.lanes],
            self.overhead / OVERHEAD_SHARE,
        )
        cuts = list(dealt.cuts)
        for index, stops in moved.items():
            again = shards_of(index, self.sets[index], self.sums(index), stops, self.cpu_slots)
            for place, cut in zip(chains[index], again, strict=True):
                cuts[place] = cut
        lane_ends = list(self.starts)
        ends: list[float] = []
        for cut, lane in zip(cuts, dealt.lane_of, strict=True):
            lane_ends[lane] += cut[3] / self.lanes[lane].speed + self.overhead
            ends.append(lane_ends[lane])
        makespan = max(max(ends, default=0.0), self._metrics_end(cuts, ends))
        return _Try(cuts, dealt.lane_of, makespan, lane_ends) if makespan < dealt.makespan else dealt

    def _metrics_end(self, cuts: list[Cut], ends: list[float]) -> float:
        done: dict[int, float] = {}
        jobs: list[MetricJob] = []
        executed = [
            work.metric_seconds if work.metric == "execute" and total else 0.0
            for work, total in zip(self.sets, self.totals, strict=True)
        ]
        grain = FINEST * (self.metric_total / self.cpu_slots + self.horizon)
        for (index, first, stop, seconds, _), end in zip(cuts, ends, strict=True):
            if executed[index]:
                cost = executed[index] * (seconds / self.totals[index])
                if cost < 2 * grain or self.at_once[index] == 1:
                    jobs.append((end, cost, index))
                else:
                    jobs += divided(
                        end, cost, index, at_once=self.at_once[index], documents=stop - first, grain=grain
                    )
            elif done.get(index, -1.0) < end:
                done[index] = end
        jobs += [(end, self.sets[index].metric_seconds, index) for index, end in done.items()]
        return metrics_end(jobs, [work.metric_parallelism for work in self.sets], self.cpu_slots)


def _forced(shop: _Shop, shards_per_task: int) -> list[Cut]:
    """`shards_per_task` nearly equal shards of every set."""
    cuts: list[Cut] = []
    for index, work in enumerate(shop.sets):
        sums = shop.sums(index)
        cuts += shards_of(index, work, sums, cut_evenly(sums, shards_per_task), shop.cpu_slots)
    return cuts


def _guided(shop: _Shop, urgent_from: float, shares: float, parts: float = LONGEST) -> list[Cut]:
    """Cut sets in the usual order of their runs: urgent ones by tail, then the longest first."""
    sizes = sizes_for(
        total=shop.total,
        lanes=len(shop.lanes),
        width=shop.width,
        overhead=shop.overhead,
        shares=shares,
        longest=parts,
    )
    tails, totals = shop.tails, shop.totals
    order = sorted(
        range(len(totals)),
        key=lambda index: (-tails[index] if tails[index] > urgent_from else 0.0, -totals[index], index),
    )
    left, ahead = shop.total, 0.0
    cuts: list[Cut] = []
    for index in order:
        work, total = shop.sets[index], totals[index]
        count = len(work.batch_seconds)
        if count == 1 or (count and total < 2 * sizes.shortest):
            cuts.append((index, 0, count, total, tails[index]))
        elif count:
            start, limit = _aims(shop, index, sizes, ahead if tails[index] > urgent_from else None)
            sums = shop.sums(index)
            cuts += shards_of(index, work, sums, cut_guided(sums, sizes, left, start, limit), shop.cpu_slots)
        left -= total
        ahead += total
    return cuts


def _aims(shop: _Shop, index: int, sizes: Sizes, ahead: float | None) -> tuple[float, float]:
    """(seconds of a set's first shard, seconds that none of its shards should pass).

    `ahead`: GPU seconds dealt before this set if its tail is urgent, else None.
    """
    work, total = shop.sets[index], shop.totals[index]
    if work.metric == "execute" and work.metric_seconds:
        # a shard's job takes one slot: at most the set's own tail, or a negligible part of the horizon
        job = max(shop.tails[index], NEGLIGIBLE * shop.horizon)
        limit = max(sizes.shortest, total * job / work.metric_seconds)
        return (sizes.longest if ahead is None else sizes.shortest), limit
    if ahead is None:
        return sizes.longest, sizes.longest
    # a score waits for its set's last shard: all lanes share it, no shard longer than the run so far
    limit = max(sizes.shortest, (ahead + total) / shop.width)
    return limit, limit


def _finished(shop: _Shop, best: _Try, floor: float) -> Plan:
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
        best.lane_ends[index] - shop.starts[index] + shop.load for index, mine in enumerate(shards) if mine
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
