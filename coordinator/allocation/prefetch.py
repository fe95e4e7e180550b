"""Which waiting checkpoint is staged ahead, and on which nodes whose GPUs are still busy; and whether one that is cleared
leaves its pages to another. Pure.

Rule: only the next checkpoint in the daemon's order; only where an evaluation of ours already infers from staged
weights (it will give those GPUs back, and its own staging is over); only within a share of the memory that is free
there. A checkpoint is counted once a node, however many evaluations wait with it, and a node holds one ahead at most.
It does not know: what node memory really looks like (the precursor checks the same share there, `node_room`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from coordinator.allocation.allocate import Demand, Limits
from coordinator.cluster import NodeState

NEAR = 0.1  # pages of a checkpoint that is at most this share larger or smaller are worth keeping for another


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An evaluation that waits for its first GPU. `memory_mb`: what its precursor asks of a node."""

    demand: Demand
    digest: str
    memory_mb: int
    known: frozenset[str] = frozenset()  # nodes where it has staged ahead, is doing so, or could not


@dataclass(slots=True, kw_only=True)
class Held:
    """Digests that we hold on a node: those that trials infer from, and those that wait there for GPUs."""

    inferring: set[str] = field(default_factory=set)
    ahead: set[str] = field(default_factory=set)


def heir(
    node: NodeState | None, digest: str, memory_mb: int, candidates: Iterable[Candidate], limits: Limits
) -> bool:
    """Whether an evaluation waits that may soon stage here another checkpoint of about this size, beside what is held.

    Its precursor needs `memory_mb` of its own before the old holder ends: where there is no room for both, nothing is kept.
    """
    if node is None or not node.usable or (limits.partition and limits.partition not in node.partitions):
        return False
    return any(
        c.digest != digest
        and node.name not in c.known
        and node.gpus >= c.demand.gpus_per_trial
        and abs(c.memory_mb - memory_mb) <= NEAR * memory_mb
        and c.memory_mb <= node.memory_free_mb
        for c in candidates
    )


def choose(
    nodes: Iterable[NodeState],
    candidates: Sequence[Candidate],
    held: Mapping[str, Held],
    limits: Limits,
    *,
    share: float,
    cordoned: AbstractSet[str] = frozenset(),
) -> dict[str, tuple[str, ...]]:
    """Evaluation id -> nodes to stage on now. `share`: of a node's free memory; 0 is never."""
    order = sorted(candidates, key=lambda c: c.demand.turn)
    if not order or share <= 0:
        return {}
    serving = sorted(
        (
            n
            for n in nodes
            if n.usable
            and n.name not in cordoned
            and (limits.partition is None or limits.partition in n.partitions)
            and (n.name in held and held[n.name].inferring)
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
            if node.gpus < candidate.demand.gpus_per_trial:
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
