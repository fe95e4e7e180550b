"""Planned makespan, bound and binding term over node counts, for `evalspan plan`.

Rule: CPU slots grow with nodes, as GPUs do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.lower_bound import bound
from coordinator.planning.model import Lane, WorkSet
from coordinator.planning.planner import plan


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One node count; `binding`: the term of the bound that limits the makespan."""

    nodes: int
    gpus: int
    makespan_seconds: float
    lower_bound_seconds: float
    binding: str


def what_if(
    sets: Sequence[WorkSet],
    node_counts: Sequence[int],
    *,
    gpus_per_node: int,
    gpus_per_trial: int = 1,
    cpu_slots_per_node: float = 1.0,
    load_seconds: float,
    shard_overhead_seconds: float = 0.05,
    stage_seconds: float = 0.0,
) -> list[WhatIf]:
    """A row for every node count; ValueError where a trial does not fit a node."""
    if not 1 <= gpus_per_trial <= gpus_per_node:
        raise ValueError(f"a trial of {gpus_per_trial} GPUs does not fit a node of {gpus_per_node}")
    rows = []
    trials = gpus_per_node // gpus_per_trial
    for nodes in node_counts:
        lanes = [
            Lane(name=f"{node}.{trial}", node=str(node)) for node in range(nodes) for trial in range(trials)
        ]
        slots = max(1, int(nodes * cpu_slots_per_node))
        planned = plan(
            sets,
            lanes,
            load_seconds=load_seconds,
            shard_overhead_seconds=shard_overhead_seconds,
            cpu_slots=slots,
            stage_seconds=stage_seconds,
        )
        floor = bound(sets, lanes, load_seconds=load_seconds, cpu_slots=slots, stage_seconds=stage_seconds)
        rows.append(
            WhatIf(
                nodes=nodes,
                gpus=nodes * gpus_per_node,
                makespan_seconds=planned.makespan_seconds,
                lower_bound_seconds=floor.seconds,
                binding=floor.binding,
            )
        )
    return rows


def sentence(rows: Sequence[WhatIf]) -> str:
    """`4 nodes: 26 min; 8 nodes: 15 min; the tail of X binds after 4 nodes`."""
    parts = [f"{_nodes(row.nodes)}: {_duration(row.makespan_seconds)}" for row in rows]
    ordered = sorted(rows, key=lambda row: row.nodes)
    for before, row in zip([None, *ordered], ordered, strict=False):
        if row.binding != "GPU time":
            after = f"after {_nodes(before.nodes)}" if before else f"from {_nodes(row.nodes)} on"
            return "; ".join([*parts, f"{row.binding} binds {after}"])
    return "; ".join(parts)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
