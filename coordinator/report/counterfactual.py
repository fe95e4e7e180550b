"""Makespans that baseline policies would have had on this run's measured seconds, by simulation. Pure.

Rule: policies and their costs are those of `simulation.commands`; seconds are those measured here,
without spread. Round-robin is the plan of `[plan] policy = "round-robin"`, on staged weights. Each
job of a baseline pays a model load, a read of the weights and the building of its requests, as
measured once here. A cost not measured (reused request sets, no staging) counts as 0, in the
baselines' favour. Lanes and CPU slots are as in the run. Called by `measurements`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coordinator.evaluation.state import State
from coordinator.simulation.commands import simulate_instance

CACHED = "round-robin, tokens cached"  # pays for no building of requests, which the lower bound has
# shown name -> policy
POLICIES: Mapping[str, str] = {
    "a job a data set": "per-dataset",
    "OpenCompass, by size": "opencompass-size",
    "OpenCompass, num-worker": "opencompass-num-worker",
    CACHED: "round-robin",
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

    `gpu_seconds`: inference by leaf task. `metric_seconds`: CPU seconds by leaf task (execute) and
    entry (score). `read_seconds`: one reader alone reads the weights. `build_seconds`: sum over all
    request sets.
    """
    sets = _sets(state, gpu_seconds, metric_seconds)
    if not sets:
        return {}
    lanes = [n.lanes for n in state.nodes.by_name.values() if n.lanes] or [1]
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
    """Data sets of an instance: the leaf tasks that ran; leaves share their entry's scoring evenly."""
    sets = []
    for entry in state.entries:
        known = state.shards.leaves
        leaves = [
            n for n in entry.leaves.values() if gpu_seconds.get(n) and known[n].entries[0] == entry.index
        ]
        for task in leaves:
            planned = known[task].planned
            # an entry of one task may have the task's name: count its seconds once
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
