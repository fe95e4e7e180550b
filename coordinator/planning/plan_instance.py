"""Plans an instance, and the same work on fewer and more nodes, for `evalspan plan`: instance text in, dicts out.

Rule: text that is not an instance raises ValueError with its line or field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.planning.instance import Instance, parse_instance
from coordinator.planning.lower_bound import bound
from coordinator.planning.model import Plan
from coordinator.planning.planner import PLANNERS


def plan_instance(json_text: str) -> dict[str, Any]:
    """The plan: each document is in exactly one shard of one GPU's lane, in the order of its run."""
    instance = parse_instance(json_text)
    planned = plan_of(instance, "evalspan")
    return {
        "schema_version": 1,
        "lower_bound_seconds": planned.lower_bound_seconds,
        "planned_makespan_seconds": planned.makespan_seconds,
        "lanes": [
            {
                "gpu": gpu,
                "shards": [
                    {"dataset": shard.set, "start_doc": shard.first_batch, "end_doc": shard.end_batch}
                    for shard in lane.shards
                ],
            }
            for gpu, lane in enumerate(planned.lanes)
        ],
    }


def what_if(json_text: str, nodes: Sequence[int] | None = None) -> dict[str, Any]:
    """A row per node count (by default powers of two up to four times the instance's) and a summary.

    CPU slots grow with nodes, as GPUs do. `binding`: the term of the bound that limits the makespan.
    """
    instance = parse_instance(json_text)
    here = max(1, -(-instance.gpus // instance.gpus_per_node))
    if nodes is None:
        nodes = [1 << power for power in range((4 * here).bit_length())]
    if not nodes or min(nodes) < 1:
        raise ValueError("node counts start at 1")
    rows: list[dict[str, Any]] = []
    for count in nodes:
        gpus = count * instance.gpus_per_node
        slots = max(1, int(count * instance.cpu_slots / here))
        resized = instance.model_copy(update={"gpus": gpus, "cpu_slots": slots})
        floor = bound(resized.problem())
        rows.append(
            {
                "nodes": count,
                "gpus": gpus,
                "planned_makespan_seconds": plan_of(resized, "evalspan").makespan_seconds,
                "lower_bound_seconds": floor.seconds,
                "binding": floor.binding,
            }
        )
    return {"schema_version": 1, "rows": rows, "sentence": _sentence(rows)}


def _sentence(rows: Sequence[dict[str, Any]]) -> str:
    """`4 nodes: 26 min; 8 nodes: 15 min; with more than 4 nodes the limit is the tail of X, not GPU time`."""
    parts = [f"{_nodes(row['nodes'])}: {_duration(row['planned_makespan_seconds'])}" for row in rows]
    ordered = sorted(rows, key=lambda row: row["nodes"])
    for before, row in zip([None, *ordered], ordered, strict=False):
        if row["binding"] != "GPU time":
            least = f"more than {_nodes(before['nodes'])}" if before else f"{_nodes(row['nodes'])} or more"
            return "; ".join([*parts, f"with {least} the limit is {row['binding']}, not GPU time"])
    return "; ".join(parts)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def plan_of(instance: Instance, planner: str) -> Plan:
    """The instance planned by the policy of this name in `PLANNERS`."""
    return PLANNERS[planner](instance.problem())
