"""The planning policies by the name that `[plan] policy` gives them.

Rule: each is a pure function from sets and lanes to a plan; evaluations and simulations call the same one.
Used by `make_plan` and by the simulator's commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from coordinator.planning.model import Lane, Plan, WorkSet
from coordinator.planning.planner import plan
from coordinator.planning.round_robin import plan_round_robin


class Planner(Protocol):
    """Sets and lanes to a plan; seconds throughout. See `planner.plan` for the arguments and errors."""

    def __call__(
        self,
        sets: Sequence[WorkSet],
        lanes: Sequence[Lane],
        *,
        load_seconds: float,
        shard_overhead_seconds: float = ...,
        cpu_slots: int = ...,
        shards_per_task: int | None = ...,
        stage_seconds: float = ...,
    ) -> Plan: ...


PLANNERS: Mapping[str, Planner] = {"evalspan": plan, "round-robin": plan_round_robin}
