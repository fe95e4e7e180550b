"""Cuts request sets into shards: whole batches, guided sizes that shrink towards the end of the run.

Rule: a shard is a share of the work still left (guided self-scheduling), never so short that its fixed overhead
passes 5 % of it, and never so long that one mistaken prediction holds the end of the run.
It does not know: lanes by name, nor which lane runs a shard.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from coordinator.packing.work import WorkSet

OVERHEAD_SHARE = 0.05
"""A shard's fixed overhead is at most this share of its seconds, unless the whole set is shorter."""
FINEST = 400
"""Shards a lane at most, where the overhead alone would allow more: the queue's and the dump's work is bounded too."""
LONGEST = 12
"""A shard is at most this part of a lane's work: it is also the unit of retry."""
GROWTH = 1.4
"""Each shard of a long tail over the one before: the CPU stage starts early and then never runs dry."""

Cut = tuple[int, int, int, float, float]
"""(index of set, first batch, end batch, seconds, tail: CPU seconds that can only start after this shard)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How long shards may be, seconds; `width` lanes of speed 1 take `total` seconds of work together."""

    total: float
    width: float
    shortest: float
    longest: float
    shares: float  # of the work left, a shard is 1 / (shares x width)

    def guided(self, left: float) -> float:
        return min(self.longest, max(self.shortest, left / (self.shares * self.width)))


def sizes_for(total: float, width: float, overhead: float, shares: float) -> Sizes:
    """Sizes for `total` GPU seconds on lanes of summed speed `width`."""
    lane = total / width
    shortest = max(overhead / OVERHEAD_SHARE, lane / FINEST)
    return Sizes(
        total=total, width=width, shortest=shortest, longest=max(shortest, lane / LONGEST), shares=shares
    )


class Prefix:
    """Batch seconds of a set and their running sums."""

    __slots__ = ("count", "sums", "total")

    def __init__(self, seconds: Sequence[float]) -> None:
        self.sums = list(accumulate(seconds, initial=0.0))
        self.count = len(seconds)
        self.total = self.sums[-1]


def cut_evenly(prefix: Prefix, pieces: int) -> list[int]:
    """Ends of `pieces` shards of nearly equal seconds, fewer if there are fewer batches."""
    pieces = min(pieces, prefix.count)
    ends: list[int] = []
    first = 0
    for piece in range(1, pieces):
        goal = prefix.total * piece / pieces
        end = bisect_left(prefix.sums, goal, first + 1)
        if end - 1 > first and goal - prefix.sums[end - 1] < prefix.sums[min(end, prefix.count)] - goal:
            end -= 1
        first = min(end, prefix.count - (pieces - piece))
        ends.append(first)
    if prefix.count:
        ends.append(prefix.count)
    return ends


def cut_guided(prefix: Prefix, sizes: Sizes, left: float, start: float, limit: float) -> list[int]:
    """Ends of the shards of a set when `left` seconds of the whole run are still to be dealt.

    The first shard takes about `start` seconds and each next one GROWTH times that, up to `limit` and to the guided
    size of what is left.
    """
    ends: list[int] = []
    first, target = 0, start
    sums, count, total, shortest = prefix.sums, prefix.count, prefix.total, sizes.shortest
    while first < count:
        rest = total - sums[first]
        goal = min(target, limit, sizes.guided(left))
        target = min(target * GROWTH, sizes.longest)
        pieces = min(round(rest / goal), int(rest / shortest)) if goal > 0 else 1
        if pieces <= 1:
            ends.append(count)
            break
        aim = min(rest / pieces, goal) if goal >= shortest else rest / pieces
        end = min(count, bisect_left(sums, sums[first] + aim * (1 - 1e-9), first + 1))
        if total - sums[end] < shortest:
            end = count
        ends.append(end)
        left -= sums[end] - sums[first]
        first = end
    return ends


def shards_of(index: int, work: WorkSet, prefix: Prefix, ends: Iterable[int], slots: int) -> list[Cut]:
    """The cuts of one set with their tails; `slots`: CPU slots there are."""
    cuts: list[Cut] = []
    first = 0
    sums, total = prefix.sums, prefix.total
    if work.metric == "score" or not work.metric_seconds or not total:
        tail = work.metric_seconds
        for end in ends:
            cuts.append((index, first, end, sums[end] - sums[first], tail))
            first = end
        return cuts
    rate = work.metric_seconds / total / min(work.metric_parallelism, slots)
    for end in ends:
        cuts.append((index, first, end, sums[end] - sums[first], rate * (total - sums[first])))
        first = end
    return cuts
