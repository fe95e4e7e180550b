"""Which evaluation may use which free GPUs. Pure.

Rule: by priority, then age; a node's free GPUs are offered once. What an evaluation already uses stays its own.
It does not know: what an evaluation does with an offer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.cluster import NodeState
from coordinator.messages import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one evaluation could use: `gpus` more than it has."""

    evaluation_id: str
    priority: int
    accepted_at: float
    gpus: int
    gpus_per_trial: int
    nodes_in_use: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may be borrowed from the cluster at most."""

    max_nodes: int | None = None
    max_gpus: int | None = None
    leave_nodes_free: int = 0
    partition: str | None = None


def allocate(
    nodes: Iterable[NodeState], demands: Sequence[Demand], limits: Limits, *, gpus_in_use: int
) -> Mapping[str, tuple[Offer, ...]]:
    """Offers for each evaluation id. Whole free nodes first, then the fullest offers, so that few nodes are staged;
    those that a job of higher priority may take back come last.
    """
    usable = [
        n
        for n in nodes
        if n.usable and n.gpus_free > 0 and (limits.partition is None or limits.partition in n.partitions)
    ]
    usable.sort(key=lambda n: (n.best_effort, -n.gpus_free, n.name))
    idle = [n for n in usable if n.gpus_free == n.gpus]
    if limits.leave_nodes_free:
        spared = {n.name for n in idle[max(0, len(idle) - limits.leave_nodes_free) :]}
        usable = [n for n in usable if n.name not in spared]
    left = None if limits.max_gpus is None else max(0, limits.max_gpus - gpus_in_use)
    taken: set[str] = set()
    offers: dict[str, tuple[Offer, ...]] = {}
    for demand in sorted(demands, key=lambda d: (-d.priority, d.accepted_at, d.evaluation_id)):
        mine: list[Offer] = []
        wanted = demand.gpus
        room = None if limits.max_nodes is None else limits.max_nodes - len(demand.nodes_in_use)
        for node in usable:
            if (
                wanted <= 0
                or (left is not None and left < demand.gpus_per_trial)
                or (room is not None and len(mine) >= room)
            ):
                break
            if node.name in taken or node.name in demand.nodes_in_use:
                continue
            gpus = min(node.gpus_free, wanted if left is None else min(wanted, left))
            gpus -= gpus % demand.gpus_per_trial
            if gpus <= 0:
                continue
            taken.add(node.name)
            wanted -= gpus
            left = None if left is None else left - gpus
            mine.append(
                Offer(
                    node=node.name,
                    gpus=gpus,
                    memory_mb=node.memory_free_mb,
                    gpu_type=node.gpu_type,
                    best_effort=node.best_effort,
                )
            )
        offers[demand.evaluation_id] = tuple(mine)
    return offers
