"""Cuts of request sets into shards: whole batches, in guided sizes that shrink towards the end of the run.

Rule: a shard is a share of the remaining work (guided self-scheduling). Its fixed overhead is at most 5 % of it, at most 20 %
at the end of the run, and it is short enough that one wrong prediction does not delay that end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.decide.planning.model import WorkSet

OVERHEAD_SHARE = 0.05
"""A shard's fixed overhead is at most this share of its seconds, unless the whole set or the work left is shorter."""
LAST_OVERHEAD_SHARE = 0.2
"""The same for the last shards of a run, whose length decides how long GPUs idle at its end."""
GROWTH = 1.4
"""Growth from shard to shard of a long tail: the CPU stage starts early and never idles."""

Span = tuple[int, int, int, float, float]
"""(index of set, first batch, end batch, seconds, tail: CPU seconds that only start after it)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits on the length of shards, in seconds; `width` lanes of speed 1 share the work."""

    width: float
    shortest: float
    longest: float
    shares: float  # a shard is 1 / (shares x width) of the work left; 0: always the longest

    def guided(self, left: float) -> float:
        if not self.shares:
            return self.longest
        return min(self.longest, max(self.shortest, left / (self.shares * self.width)))


def cut_evenly(sums: Sequence[float], pieces: int) -> list[int]:
    """Return ends of `pieces` shards of nearly equal seconds, fewer if there are fewer batches.

    `sums`: running sums of the batches' seconds, starting with 0.0.
    """
    count, total = len(sums) - 1, sums[-1]
    pieces = min(pieces, count)
    ends: list[int] = []
    first = 0
    for piece in range(1, pieces):
        goal = total * piece / pieces
        end = bisect_left(sums, goal, first + 1)
        if end - 1 > first and goal - sums[end - 1] < sums[min(end, count)] - goal:
            end -= 1
        first = min(end, count - (pieces - piece))
        ends.append(first)
    if count:
        ends.append(count)
    return ends


def cut_guided(sums: Sequence[float], sizes: Sizes, left: float, start: float, limit: float) -> list[int]:
    """Return ends of a set's shards when `left` seconds of the whole run remain to be dealt.

    The first shard takes about `start` seconds and each next one GROWTH times that, up to `limit` and to the guided size.
    """
    ends: list[int] = []
    first, target = 0, start
    count, total, shortest = len(sums) - 1, sums[-1], sizes.shortest
    while first < count:
        rest = total - sums[first]
        goal = min(target, limit, sizes.guided(left))
        target = min(target * GROWTH, sizes.longest)
        most = int(rest / shortest) if shortest > 0 else 1  # 0: the run takes about no time
        pieces = min(round(min(rest / goal, most + 1)), most) if goal > 0 else 1
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


def shards_of(
    index: int, work: WorkSet, sums: Sequence[float], ends: Iterable[int], slots: int
) -> list[Span]:
    """Return the cuts of one set with their tails; `slots`: number of CPU slots."""
    cuts: list[Span] = []
    first, total = 0, sums[-1]
    divisible = work.metric == "execute" and total > 0
    at_once = min(work.metric_parallelism, slots)
    for end in ends:
        seconds = sums[end] - sums[first]
        tail = work.metric_seconds
        if divisible:
            # all metric work after it, or its own if it has too few batches to use every slot
            tail *= max((1 - sums[first] / total) / at_once, seconds / total / min(at_once, end - first))
        cuts.append((index, first, end, seconds, tail))
        first = end
    return cuts
