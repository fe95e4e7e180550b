"""What a report makes of a journal."""

from __future__ import annotations

import pytest
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.report.measurements import make_report


@pytest.mark.parametrize("cpus", [1, 4])
def test_programs_count_every_core_of_their_worker(cpus: int) -> None:
    """CPU seconds of `execute` jobs are their seconds on all cores of the worker, against as many slots."""
    world = World(3, Faults(), record(worker_cpus=cpus, workers=5))
    world.run()
    executes = sum(metric.kind == "execute" for metric in world.state.scoring.metrics.values())
    report = make_report(world.state, world.journal, [], world.now)
    assert executes
    assert report.metric_seconds == {"t0": 1.0, "t1": 1.0 + cpus * executes, "t2": 1.0}
    assert world.state.cpu_slots == cpus  # the plan was worth one worker
