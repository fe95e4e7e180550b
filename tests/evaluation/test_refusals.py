"""What a refused submission costs: its node where the node is the reason, time where a limit is, else the evaluation."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.world import LIMIT, World

from coordinator.evaluation import events as ev
from coordinator.evaluation import jobs
from coordinator.evaluation.job_ends import MAX_SUBMISSIONS


def test_as_many_metric_workers_come_in_small_arrays_as_in_one() -> None:
    """At once, in several jobs."""
    world = World(1, Faults(), record(entries=8, workers=4, array_size=2))
    while not world.state.live_jobs("metric"):
        world.state.plan.workers = 3
        world.tick()
    assert sorted(info.job.count for info in world.state.live_jobs("metric")) == [1, 2]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), most=st.integers(5, 8), cancelled=st.none() | st.integers(0, 60))
def test_a_job_that_a_limit_keeps_out_is_tried_again_with_growing_pauses_and_blames_no_node(
    seed: int, most: int, cancelled: int | None
) -> None:
    """However often it is kept out: no submission is counted, no node rests, all is scored or, once cancelled, ended."""
    world = World(seed, Faults(restart=0.02, submit_waits=0.2), record(entries=4, workers=2))
    world.odd.submitted = most
    for tick in range(3000):
        if world.state.ended_at is not None:
            break
        if tick == cancelled:
            world.take([ev.CancelAsked(at=world.now, reason="asked")])
        world.tick()
        for name, held in world.state.jobs.held.items():
            assert LIMIT in held.why
            assert held.due_at > world.now or name in {a.job.name for a in world.called}
    assert world.state.ended_at is not None, world.summary()
    assert cancelled is not None or all(e.status == "scored" for e in world.state.entries), world.summary()
    assert not any(n.back_offs or n.deaths for n in world.state.nodes.by_name.values())
    assert not any(info.submissions for info in world.state.jobs.by_name.values())
    for times in world.refusals.values():
        for number, (before, after) in enumerate(pairwise(times)):
            assert after - before >= min(jobs.HELD_SECONDS * 2**number, jobs.MAX_HELD_SECONDS)
    world.assert_nothing_left()


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
