"""Division of free GPUs among evaluations. Pure. Called by the daemon's loop.

Rule: by priority, then age; each free GPU is offered once. An evaluation keeps the GPUs it uses and may grow on its nodes. A
GPU that was offered but is not yet used is not free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from coordinator.decide.evaluation.events import Offer
from coordinator.decide.evaluation.footprint import UNKNOWN_NEED, GpuNeed
from coordinator.site.cluster import NodeState

Turn = tuple[int, float, str]  # -priority, accepted at (unix seconds), evaluation id


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one evaluation could use: `gpus` more than its `in_use[node]`, on none of the `avoid` nodes.

    `precursor_mb`: MiB needed once per node; `trial_mb`: additional MiB per trial. `need`: of a trial's GPUs.
    """

    evaluation_id: str
    priority: int
    accepted_at: float
    gpus: int
    gpus_per_trial: int
    in_use: Mapping[str, int]
    avoid: frozenset[str] = frozenset()
    precursor_mb: int = 0
    trial_mb: int = 0
    need: GpuNeed = UNKNOWN_NEED

    @property
    def turn(self) -> Turn:
        """Sort key of demands: by priority, then age."""
        return -self.priority, self.accepted_at, self.evaluation_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on what all evaluations together may take of the cluster."""

    max_nodes: int | None = None
    max_gpus: int | None = None
    leave_nodes_free: int = 0


def allocate(
    nodes: Iterable[NodeState],
    demands: Sequence[Demand],
    limits: Limits,
    *,
    gpus_in_use: int,
    nodes_in_use: Collection[str] = (),
    promised: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    failures: Mapping[str, int] = MappingProxyType({}),
) -> Mapping[str, tuple[Offer, ...]]:
    """Return evaluation id -> offers: GPUs of a node that it may use, including those it uses there.

    First come nodes with its weights, then those with the fewest recent `failures`, whole free nodes and the largest offers,
    so that few nodes are staged; preemptible nodes come last. `gpus_in_use`, `nodes_in_use`: of all evaluations, for the
    limits. `promised`: node -> GPUs and MiB offered but not yet used. A node gets as many trials as its free memory holds. If
    no node could ever hold one, memory is ignored, since the cluster's refusal then names the reason. Nodes whose GPUs are
    too small for the weights are left out, unless all are, since the trial's error then names the reason.
    """
    nodes = [
        replace(n, gpus_free=max(0, n.gpus_free - gpus), memory_free_mb=n.memory_free_mb - megabytes)
        for n in nodes
        for gpus, megabytes in (promised.get(n.name, (0, 0)),)
    ]
    free = _free_nodes(nodes, failures, limits.leave_nodes_free)
    most = sum(n.gpus for n in nodes)
    left = most if limits.max_gpus is None else max(0, limits.max_gpus - gpus_in_use)
    in_use = set(nodes_in_use).union(*(d.in_use for d in demands))
    chosen = [n for n in nodes if n.gpus and not n.excluded]
    largest = max((n.memory_mb for n in chosen if n.counts_memory), default=0)
    taken: set[str] = set()
    offers: dict[str, tuple[Offer, ...]] = {}
    for demand in sorted(demands, key=lambda d: d.turn):
        mine: list[Offer] = []
        wanted = min(demand.gpus, left)
        for node, room in _suitable_nodes([n for n in free if n.name not in taken], chosen, demand):
            if wanted < demand.gpus_per_trial:
                break
            full = limits.max_nodes is not None and len(in_use) >= limits.max_nodes
            gpus = min(room, wanted)
            gpus -= gpus % demand.gpus_per_trial
            if gpus <= 0 or (full and node.name not in in_use):
                continue
            taken.add(node.name)
            in_use.add(node.name)
            wanted -= gpus
            left -= gpus
            mine.append(
                Offer(
                    node=node.name,
                    gpus=demand.in_use.get(node.name, 0) + gpus,
                    node_memory_mb=node.memory_mb,
                    largest_mb=largest,
                    gpu_type=node.gpu_type,
                    best_effort=node.best_effort,
                )
            )
        offers[demand.evaluation_id] = tuple(mine)
    return offers


def _free_nodes(nodes: Sequence[NodeState], failures: Mapping[str, int], spared: int) -> list[NodeState]:
    """Return usable nodes with a free GPU, best first, without the last `spared` idle ones."""
    usable = [n for n in nodes if n.usable and n.gpus_free > 0]
    usable.sort(key=lambda n: (n.best_effort, failures.get(n.name, 0), -n.gpus_free, n.name))
    idle = [n.name for n in usable if n.gpus_free == n.gpus]
    kept_free = set(idle[max(0, len(idle) - spared) :])
    return [n for n in usable if n.name not in kept_free]


def _suitable_nodes(
    free: Sequence[NodeState], chosen: Sequence[NodeState], demand: Demand
) -> Iterator[tuple[NodeState, int]]:
    """Yield the nodes that can serve `demand`, its own first, each with the most additional GPUs it can give.

    `chosen`: the cluster's nodes, free or not, which say whether any node could ever hold a trial.
    """
    fits_somewhere = any(_holds(n, n.memory_mb, demand, new=True) for n in chosen)
    too_small = set() if demand.need.refusal(chosen) else {n.name for n in chosen if not demand.need.holds(n)}
    unsuitable = demand.avoid | too_small
    for node in sorted(free, key=lambda n: n.name not in demand.in_use):
        if node.name in unsuitable:
            continue
        has = demand.in_use.get(node.name, 0)
        # GPUs of its own ended trials show as free before their end is seen: they are not new
        gpus = min(node.gpus_free, node.gpus - has)
        if fits_somewhere:
            trials = _holds(node, node.memory_free_mb, demand, new=not has)
            gpus = min(gpus, trials * demand.gpus_per_trial)
        yield node, gpus


def _holds(node: NodeState, megabytes: int, demand: Demand, *, new: bool) -> int:
    """Return how many trials `megabytes` of the node hold; `new`: after the evaluation's need per node."""
    if not node.counts_memory:
        return node.gpus
    left = megabytes - (demand.precursor_mb if new else 0)
    if left < 0:
        return 0
    return left // demand.trial_mb if demand.trial_mb else node.gpus


# --- prefetches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An evaluation waiting for its first GPU. `memory_mb`: MiB that its precursor requests."""

    demand: Demand
    digest: str
    memory_mb: int
    known: frozenset[str] = frozenset()  # nodes with its prefetch: done, in progress or failed


@dataclass(slots=True, kw_only=True)
class HeldCheckpoints:
    """Checkpoint digests in a node's memory: those that trials use, and prefetched ones."""

    inferring: set[str] = field(default_factory=set)
    ahead: set[str] = field(default_factory=set)


def choose_prefetches(
    nodes: Iterable[NodeState],
    candidates: Sequence[Candidate],
    held: Mapping[str, HeldCheckpoints],
    limits: Limits,
    *,
    share: float,
    cordoned: Collection[str] = frozenset(),
) -> dict[str, tuple[str, ...]]:
    """Return evaluation id -> nodes to prefetch on now. `share`: of a node's free memory; 0: never.

    Only the next checkpoint in the daemon's order; only on a node where an evaluation runs inference from staged weights (its
    staging is over, and its GPUs will become free); only within the share. A checkpoint counts once per node, however many
    evaluations wait for it; a node holds at most one prefetch. The precursor checks the share again on the node
    (`precursor._make_room`).
    """
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
