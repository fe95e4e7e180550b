"""What a report makes of a journal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulated.parts import FakeJob, FakeMember, Faults, record
from support.simulated.world import World

from coordinator.cluster import JobState
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


def test_a_report_says_what_its_trials_waited_for() -> None:
    """The cluster's reason for the longest wait."""

    class Busy(World):
        def starts(self, job: FakeJob, member: FakeMember) -> bool:
            return self.dice.random() < 0.5 and super().starts(job, member)

        def listing(self) -> list[JobState]:
            rows = super().listing()
            return [replace(r, reason="Priority") if r.phase == "pending" else r for r in rows]

    world = Busy(3, Faults(), record())
    world.run()
    report = make_report(world.state, world.journal, [], world.now)
    assert report.stages.waited_for == "Priority"
    assert report.stages.queue_wait
