"""Moves the cuts inside sets so that lanes end together.

Rule: the shards of one set are a chain of documents. Moving a cut carries work from a lane that
ends late to one that ends early; each shard keeps its lane and rank. No shard falls below the
shortest. `planner` calls it, and checks whether the levelled plan is better with its CPU stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.planning.batch_sums import reaching

PASSES = 3  # over all sets
SETS = 32
"""Sets, the largest first, whose cuts are moved: others carry too little work."""
CLOSE = 1e-4
"""Lanes whose ends differ from the mean by less than this part of it end together."""


def levelled(
    sizes: Mapping[int, Sequence[tuple[int, float]]],
    sums: Mapping[int, Sequence[float]],
    ends: Sequence[float],
    speeds: Sequence[float],
    shortest: float,
) -> dict[int, list[int]]:
    """New ends, in batches, of the shards of those sets whose cuts move.

    `sizes`: set -> (lane, seconds) of its shards, by documents; `sums`: set -> running sums of its
    batch seconds. `ends`: seconds at which each lane ends; `speeds`: seconds of work each lane does
    a second.
    """
    ends = list(ends)
    chains = {index: list(shards) for index, shards in sizes.items() if len(shards) > 1}
    order = sorted(chains, key=lambda index: (-sums[index][-1], index))[:SETS]
    moved: dict[int, list[int]] = {}
    for _ in range(PASSES):
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
        if max(ends) <= (1 + CLOSE) * sum(ends) / len(ends):
            break
    return moved


def _aims(
    chain: Sequence[tuple[int, float]], ends: Sequence[float], speeds: Sequence[float], shortest: float
) -> list[float]:
    """Seconds that each shard should take so that this set's lanes end together, as far as it can."""
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
    """Seconds at which lanes end that share their work, each giving at most what it can spare."""
    earliest = sorted((ends[lane] - most / speeds[lane], lane) for lane, most in spare.items())
    given = sum(spare.values())  # by lanes that end after the level in any case
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
    """Ends of shards near their aims; None where batches are too coarse for that many shards."""
    count = len(sums) - 1
    ends: list[int] = []
    first, goal = 0, 0.0
    for number, aim in enumerate(aims[:-1]):
        goal += aim
        most = count - (len(aims) - 1 - number)
        end = min(reaching(sums, goal, first + 1), most)
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
