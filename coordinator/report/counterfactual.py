"""What the same work would have taken without evalspan, by simulation of this very run's measured seconds. Pure.

Rule: the policies and their costs are those of `simulation.commands`; the seconds are what was measured here, with no
spread. Round-robin is the plan that `[plan] policy = "round-robin"` would run, on staged weights. A model load, a read of the weights and the building of a task's requests cost each job of a baseline what they
cost here once; where request sets were reused or weights were not staged, that cost is taken as none, in the
baselines' favour. The same lanes, and as many CPU slots as there were workers.
It does not know: journals, or how it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coordinator.evaluation.state import State
from coordinator.simulation.commands import simulate_instance

# by the name that is shown
POLICIES: Mapping[str, str] = {
    "a job a data set": "per-dataset",
    "OpenCompass, by size": "opencompass-size",
    "OpenCompass, num-worker": "opencompass-num-worker",
    "round-robin, tokens cached": "round-robin",
    "round-robin, not cached": "paper",
}


def without_evalspan(
    state: State,
    *,
    gpu_seconds: Mapping[str, float],
    metric_seconds: Mapping[str, float],
    load_seconds: float,
    read_seconds: float,
    build_seconds: float,
) -> dict[str, float]:
    """Makespan in seconds by policy; empty where nothing was run.

    `gpu_seconds`: inference by leaf task. `metric_seconds`: CPU seconds by leaf task (execute) and entry (score).
    `read_seconds`: of the weights by one reader alone. `build_seconds`: of all request sets, summed.
    """
    sets = _sets(state, gpu_seconds, metric_seconds)
    if not sets:
        return {}
    lanes = [n.lanes for n in state.nodes.values() if n.lanes] or [1]
    instance = json.dumps(
        {
            "schema_version": 1,
            "gpus": sum(lanes),
            "gpus_per_node": max(lanes),
            "cpu_slots": state.cpu_slots,
            "load_seconds": load_seconds,
            "storage_seconds_alone": read_seconds,
            "staging_seconds": read_seconds,
            "preprocess_seconds": build_seconds / len(sets),
            "datasets": sets,
        }
    )
    made = {name: simulate_instance(instance, policy, 0.0, 1) for name, policy in POLICIES.items()}
    return {name: float(run["makespan_seconds"]["median"]) for name, run in made.items()}


def _sets(
    state: State, gpu_seconds: Mapping[str, float], metric_seconds: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Data sets of an instance: leaf tasks that ran, an entry's scoring shared evenly by its leaves."""
    sets = []
    for entry in state.entries:
        leaves = [t for t in entry.sets if t in state.leaves and gpu_seconds.get(t)]
        for task in leaves:
            planned = state.leaves[task].planned
            # an entry of one task may bear its name: its seconds are then counted once
            shared = metric_seconds.get(entry.name, 0.0) / len(leaves) if entry.name != task else 0.0
            sets.append(
                {
                    "name": task,
                    "docs": max(1, planned.documents),
                    "gpu_seconds": gpu_seconds[task],
                    "metric_seconds": metric_seconds.get(task, 0.0) + shared,
                    "metric": "execute" if planned.executes else "score",
                }
            )
    return sets
