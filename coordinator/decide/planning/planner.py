"""Planning of request sets on free lanes: what runs where, in which order, and until when. Pure.

Rule: a two-stage flow shop. Shards before long CPU tails run first, longest tail first (Jackson's rule); all others longest
first, each on the lane that ends it soonest (LPT). A few ways to cut and order are tried, and the plan with the earliest
predicted end is kept. At run time lanes pull in rank order and steal, so a plan only has to be a good start. Called by
`make_plan` and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import ceil, exp, inf

from coordinator.decide.planning.flow_shop import LaneAssignment, Shop, finished_plan, open_shop
from coordinator.decide.planning.model import Plan, Problem
from coordinator.decide.planning.shard_sizes import (
    LAST_OVERHEAD_SHARE,
    OVERHEAD_SHARE,
    Sizes,
    Span,
    cut_evenly,
    cut_guided,
    shards_of,
)

MAX_SHARDS_A_LANE = 400
"""Maximum shards per lane: limits the work of queue and dump."""
MAX_SHARDS = 60_000
"""Approximate maximum of shards in a run: planning stays under a second."""
MIN_SHARDS_A_LANE = 12
"""A shard is at most 1/LONGEST of a lane's work, since it is also the unit of retry."""
URGENT_TAILS = (0.01, 0.002, 0.05, 1.0, 0.0)
"""A tail longer than this fraction of the horizon makes a shard urgent; tried in this order."""
TOP_TAILS = (0.999, 0.5, 0.2)
"""URGENT as fractions of the longest tail, tried if CPU slots determine the end: few sets are urgent then."""
GUIDED_SHARES = (3.0, 6.0)
"""A shard is 1/(shares x lanes) of the work left; tried in this order."""
EVEN_SHARES = (1.0, 2.0, 3.0, 4.0)
"""Shards of one size, for large overheads: fractions of a lane's work; tried in this order."""
URGENT_OR_NOT = (0.01, 1.0)
"""URGENT for shards of one size."""
CLEAR_GAIN = 0.98
"""Another way is chosen if its levelled plan ends before this fraction of the best plan's end."""
CLOSE_TO_BOUND = 1.01
"""No other way is tried if a plan ends within this factor of the bound."""
NEGLIGIBLE_JOB = 0.005
"""A metric job of one shard may take this fraction of the horizon: shards are not cut for less."""
MANY_SHARDS = 20_000
"""Shards cut over all tries before the search stops: planning stays under a second."""


def plan(problem: Problem) -> Plan:
    """Place every batch of every set on a lane, exactly once.

    Raise ValueError for no lane, a speed or slot count that is too small, or two sets of one name.
    """
    shop, floor = open_shop(problem)
    best = _search(shop, floor)
    if _slots_hold(best, floor):
        best = _on_fewer_lanes(shop, floor, best)
    return finished_plan(shop, best, floor)


def _slots_hold(best: LaneAssignment, floor: float) -> bool:
    """Return whether the end waits for CPU slots, beyond what the bound requires."""
    return best.makespan > max(CLOSE_TO_BOUND * floor, *best.lane_ends)


def _search(shop: Shop, floor: float) -> LaneAssignment:
    """Return the best of all ways within the budget of `shop.dealt`."""
    tries: list[LaneAssignment] = []
    best: LaneAssignment | None = None
    pieces = shop.problem.shards_per_task
    forced = None if pieces is None else _forced(shop, pieces)
    for shares, urgent_from, rare in _ways(shop):
        if rare and best is not None and not _slots_hold(best, floor):
            break
        attempt = shop.deal(_guided(shop, urgent_from, shares) if forced is None else forced, urgent_from)
        tries.append(attempt)
        if best is None or attempt.makespan < best.makespan:
            best = attempt
        shop.dealt += len(attempt.cuts)
        if shop.dealt > MANY_SHARDS or best.makespan <= floor * (1 + 1e-6):
            break
    assert best is not None
    if forced is not None or shop.dealt > MANY_SHARDS:
        return best
    return _levelled(shop, floor, best, tries)


def _levelled(shop: Shop, floor: float, best: LaneAssignment, tries: list[LaneAssignment]) -> LaneAssignment:
    """Return the best try levelled; or another, if overheads or uncuttable shards determine its end.

    In a near tie the try that was best before levelling is kept, since it tolerates wrong priors better.
    """
    ways = [(part * shop.horizon, parts) for parts in EVEN_SHARES for part in URGENT_OR_NOT]
    others = chain(
        (attempt for attempt in tries if attempt is not best),
        (shop.deal(_guided(shop, urgent_from, 0.0, parts), urgent_from) for urgent_from, parts in ways),
    )
    best = shop.level(best)
    for attempt in others:
        shop.dealt += len(attempt.cuts)
        if shop.dealt > MANY_SHARDS or best.makespan <= CLOSE_TO_BOUND * floor:
            break
        moved = shop.level(attempt)
        if moved.makespan < CLEAR_GAIN * best.makespan:
            best = moved
    return best


def _ways(shop: Shop) -> Iterator[tuple[float, float, bool]]:
    """Yield ways in order: (shares, tail seconds of an urgent shard, only if CPU slots determine the end)."""
    for shares in GUIDED_SHARES:
        for part in URGENT_TAILS:
            yield shares, part * shop.horizon, False
    longest = max(shop.tails, default=0.0)
    for shares in GUIDED_SHARES:
        for part in TOP_TAILS:
            yield shares, part * longest, True


def _on_fewer_lanes(shop: Shop, floor: float, best: LaneAssignment) -> LaneAssignment:
    """Try fewer lanes if CPU slots determine the end: more lanes may only worsen the order at the slots.

    Takes the shards off one more lane at a time, within the budget; these lanes may still steal.
    """
    order = sorted(
        range(len(shop.lanes)), key=lambda index: (shop.starts[index], -shop.lanes[index].speed, index)
    )
    for width in range(len(order) - 1, 0, -1):
        if shop.dealt > MANY_SHARDS:
            break
        kept = sorted(order[:width])
        narrow = shop.on(kept)
        fewer = _search(narrow, floor)
        shop.dealt += narrow.dealt
        if fewer.makespan < best.makespan:
            ends = list(shop.starts)
            for index, end in zip(kept, fewer.lane_ends, strict=True):
                ends[index] = end
            best = LaneAssignment(fewer.cuts, [kept[lane] for lane in fewer.lane_of], fewer.makespan, ends)
    return best


def _forced(shop: Shop, shards_per_task: int) -> list[Span]:
    """Cut every set into `shards_per_task` nearly equal shards."""
    cuts: list[Span] = []
    for index, work in enumerate(shop.sets):
        sums = shop.sums(index)
        cuts += shards_of(index, work, sums, cut_evenly(sums, shards_per_task), shop.cpu_slots)
    return cuts


def _guided(shop: Shop, urgent_from: float, shares: float, parts: float = MIN_SHARDS_A_LANE) -> list[Span]:
    """Cut sets in the usual execution order: urgent ones by tail, then longest first."""
    sizes = _sizes(shop, shares, parts)
    tails, totals = shop.tails, shop.totals
    order = sorted(
        range(len(totals)),
        key=lambda index: (-tails[index] if tails[index] > urgent_from else 0.0, -totals[index], index),
    )
    left, ahead = shop.total, 0.0
    cuts: list[Span] = []
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


def _sizes(shop: Shop, shares: float, longest: float) -> Sizes:
    """Return lengths of shards for 1 / (`shares` x lanes) of the work left; at most a lane's work / `longest`."""
    lane = shop.total / shop.width
    # a lane has shares x (1 + ln(lane / (shares x shortest))) guided shards: solved for the shortest
    room = MAX_SHARDS / len(shop.lanes) / shares - 1 if shares else inf
    finest = shares * exp(room) if room < 50 else MAX_SHARDS_A_LANE
    shortest = max(shop.overhead / LAST_OVERHEAD_SHARE, lane / min(MAX_SHARDS_A_LANE, finest))
    longest_seconds = max(shop.overhead / OVERHEAD_SHARE, shortest, lane / longest)
    return Sizes(width=shop.width, shortest=shortest, longest=longest_seconds, shares=shares)


def _aims(shop: Shop, index: int, sizes: Sizes, ahead: float | None) -> tuple[float, float]:
    """Return (seconds of a set's first shard, upper limit of its shards' seconds).

    `ahead`: GPU seconds dealt before this set if its tail is urgent, otherwise None.
    """
    work, total = shop.sets[index], shop.totals[index]
    if work.metric == "execute" and work.metric_seconds:
        # a shard's job takes one slot: at most the set's own tail, or a negligible fraction of the horizon
        job = max(shop.tails[index], NEGLIGIBLE_JOB * shop.horizon)
        limit = max(sizes.shortest, total * job / work.metric_seconds)
        return (sizes.longest if ahead is None else sizes.shortest), limit
    if ahead is None:
        return sizes.longest, sizes.longest
    # a score waits for its set's last shard: all lanes share it, and no shard is longer than the run so far
    limit = max(sizes.shortest, (ahead + total) / shop.width)
    return limit, limit


# --- the policy of Hu et al. -------------------------------------------------------------------------------------------

SMALL_TAIL = 0.25
"""Fraction of a lane's even share of GPU seconds: shorter sets are batched up to it; longer metrics go first."""

Portion = tuple[float, float, tuple[Span, ...]]
"""(CPU seconds of its metric if long, otherwise 0; GPU seconds; cuts that one lane runs in sequence)"""


def plan_round_robin(problem: Problem) -> Plan:
    """Plan with the trial coordinator's policy of Hu et al., NSDI 2024, section 6.2, on the same sets and lanes; errors as in
    `plan`.

    Large sets are split and small ones batched by their prior; long CPU metrics go first, then long inference; the sorted
    queue is dealt round-robin to the trials. Where the paper leaves something open, the choice that is faster for the policy
    is made: each lane is one trial, so a lane loads the model once.

    `shards_per_task` cuts each set into that many nearly equal shards, and batches none. The planned end assumes lanes that
    do not steal.
    """
    shop, floor = open_shop(problem)
    queue = sorted(_portions(shop), key=lambda portion: (-portion[0], -portion[1], portion[2][0][:2]))
    dealt = [(cut, number % len(shop.lanes)) for number, portion in enumerate(queue) for cut in portion[2]]
    return finished_plan(shop, shop.placed([cut for cut, _ in dealt], [lane for _, lane in dealt]), floor)


def _portions(shop: Shop) -> Iterator[Portion]:
    """Yield the portions to deal: pieces of large sets, whole sets, and batches of small ones."""
    share, forced = shop.total / len(shop.lanes), shop.problem.shards_per_task
    small: list[Portion] = []
    long = SMALL_TAIL * share
    for index, work in enumerate(shop.sets):
        if not work.batch_seconds:
            continue
        sums, cost = shop.sums(index), shop.totals[index]
        pieces = forced or (max(1, ceil(cost / share - 1e-9)) if share else 1)
        cuts = shards_of(index, work, sums, cut_evenly(sums, pieces), shop.cpu_slots)
        metric = work.metric_seconds if work.metric_seconds >= long else 0.0
        portions = [(metric, cut[3], (cut,)) for cut in cuts]
        if forced is None and not metric and cost < long:
            small += portions
        else:
            yield from portions
    yield from _batched(sorted(small, key=lambda portion: -portion[1]), long)


def _batched(small: Sequence[Portion], most: float) -> Iterator[Portion]:
    """Batch next-fit, in the order given: at most `most` GPU seconds per batch."""
    batch: list[Portion] = []
    for portion in small:
        if batch and sum(seconds for _, seconds, _ in batch) + portion[1] > most:
            yield _joined(batch)
            batch = []
        batch.append(portion)
    if batch:
        yield _joined(batch)


def _joined(batch: Sequence[Portion]) -> Portion:
    return 0.0, sum(seconds for _, seconds, _ in batch), tuple(cut for _, _, its in batch for cut in its)


PLANNERS: Mapping[str, Callable[[Problem], Plan]] = {"evalspan": plan, "round-robin": plan_round_robin}
"""Policies by their name in `[plan] policy`; evaluations and simulations call the same ones."""
