"""What a refused submission costs: its node where the node is the reason, time where a limit is, else the evaluation."""

from __future__ import annotations

from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.evaluation.job_ends import MAX_SUBMISSIONS


def test_as_many_metric_workers_come_in_small_arrays_as_in_one() -> None:
    """At once, in several jobs."""
    world = World(1, Faults(), record(entries=8, workers=4, array_size=2))
    while not world.state.live_jobs("metric"):
        world.state.plan.workers = 3
        world.tick()
    assert sorted(info.job.count for info in world.state.live_jobs("metric")) == [1, 2]


def test_more_refusals_of_a_limit_than_submissions_are_counted_end_nothing() -> None:
    """Kept out for four hours, the evaluation waits, and is scored once the limit has room."""
    world = World(1, Faults(), record(entries=2))
    world.odd.submitted = 0
    for _ in range(4 * 720):
        world.tick()
    assert max(len(times) for times in world.refusals.values()) > MAX_SUBMISSIONS
    assert world.state.jobs.held
    assert not world.state.ending.reason
    world.odd.submitted = 1 << 20
    world.run_to_scores()
