"""Chooses nodes with busy GPUs that prefetch the next checkpoint. Pure.

Rule: only the next checkpoint in the daemon's order; only on a node where an evaluation infers from
staged weights (its staging is over, and its GPUs will come free); only within a share of the node's
free memory. A checkpoint counts once per node, however many evaluations wait for it; a node holds
one prefetch at most. The precursor checks the share again on the node (`precursor._make_room`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from coordinator.allocation.allocate import Demand, Limits
from coordinator.cluster import NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An evaluation that waits for its first GPU. `memory_mb`: MiB that its precursor asks of a node."""

    demand: Demand
    digest: str
    memory_mb: int
    known: frozenset[str] = frozenset()  # nodes with its prefetch: done, under way or failed


@dataclass(slots=True, kw_only=True)
class Held:
    """Checkpoint digests in a node's memory: those that trials infer from, and prefetched ones."""

    inferring: set[str] = field(default_factory=set)
    ahead: set[str] = field(default_factory=set)


def choose(
    nodes: Iterable[NodeState],
    candidates: Sequence[Candidate],
    held: Mapping[str, Held],
    limits: Limits,
    *,
    share: float,
    cordoned: AbstractSet[str] = frozenset(),
) -> dict[str, tuple[str, ...]]:
    """Evaluation id -> nodes to prefetch on now. `share`: of a node's free memory; 0: never."""
    order = sorted(candidates, key=lambda c: c.demand.turn)
    if not order or share <= 0:
        return {}
    serving = sorted(
        (
            n
            for n in nodes
            if n.usable and n.name not in cordoned and n.name in held and held[n.name].inferring
        ),
        key=lambda n: (-n.gpus, n.name),
    )
    free = {n.name: n.memory_free_mb for n in serving}
    there = {n.name: held[n.name].inferring | held[n.name].ahead for n in serving}
    chosen: dict[str, tuple[str, ...]] = {}
    for candidate in order:
        if candidate.digest != order[0].digest:
            continue
        mine = []
        wanted, room = candidate.demand.gpus, limits.max_nodes
        for node in serving:
            if wanted <= 0 or (room is not None and room <= 0):
                break
            if node.gpus < candidate.demand.gpus_per_trial or not candidate.demand.need.holds(node):
                continue
            name = node.name
            if name not in candidate.known:
                most = free[name] if candidate.digest in there[name] else int(share * free[name])
                if held[name].ahead - {candidate.digest} or candidate.memory_mb > most:
                    continue
                mine.append(name)
                free[name] -= candidate.memory_mb
                there[name].add(candidate.digest)
            wanted -= node.gpus
            room = None if room is None else room - 1
        if mine:
            chosen[candidate.demand.evaluation_id] = tuple(mine)
    return chosen
