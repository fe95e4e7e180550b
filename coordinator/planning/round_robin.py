"""The trial coordinator's policy of Hu et al., NSDI 2024, section 6.2, on the same sets and lanes as evalspan's own. Pure.

Rule: large sets are broken down and small ones batched by their prior; long CPU metrics go first, then long inference;
the sorted queue is dealt round-robin to the trials. Where the paper leaves something open, the choice that is faster
for the policy is taken: each lane is one trial, so a lane loads the model once.
Called through `planner.PLANNERS`, by `make_plan` for a real evaluation and by the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from coordinator.planning.flow_shop import Shop, finished, opened
from coordinator.planning.model import Plan, Problem
from coordinator.planning.shard_sizes import Span, cut_evenly, shards_of

SMALL = 0.25
"""Part of a lane's even share of GPU seconds: shorter sets are batched, up to so much; a metric that takes longer goes first."""

Portion = tuple[float, float, tuple[Span, ...]]
"""(CPU seconds of its metric where that is long, else 0; GPU seconds; cuts that one lane runs one after the other)"""


def plan_round_robin(problem: Problem) -> Plan:
    """Place every batch of every set on a lane, exactly once; errors as of `planner.plan`.

    `shards_per_task` cuts each set into that many nearly equal shards, and batches none. The planned end is that of
    lanes which do not steal.
    """
    shop, floor = opened(problem)
    queue = sorted(_portions(shop), key=lambda portion: (-portion[0], -portion[1], portion[2][0][:2]))
    dealt = [(cut, number % len(shop.lanes)) for number, portion in enumerate(queue) for cut in portion[2]]
    return finished(shop, shop.placed([cut for cut, _ in dealt], [lane for _, lane in dealt]), floor)


def _portions(shop: Shop) -> Iterator[Portion]:
    """What is dealt: pieces of large sets, whole sets, and batches of small ones."""
    share, forced = shop.total / len(shop.lanes), shop.problem.shards_per_task
    small: list[Portion] = []
    long = SMALL * share
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
    """Next-fit, in the order given: batches of at most `most` GPU seconds."""
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
