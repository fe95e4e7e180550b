"""Plans against the best schedule of CP-SAT; skipped where OR-Tools is not installed."""

from __future__ import annotations

import pytest
from support.oracle import best_known, random_problem

from coordinator.planning.planner import plan

pytest.importorskip("ortools")


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_is_within_5_percent_of_the_best_known(seed):
    """On random problems of 1 to 500 sets and 1 to 512 GPUs."""
    sets, lanes, costs = random_problem(seed)
    made = plan(sets, lanes, **costs)
    assert made.makespan_seconds <= 1.05 * best_known(made, sets, seconds=1, **costs)
