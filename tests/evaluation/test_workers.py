"""Metric workers under seeded failures: as many as are worth it, sent for again while they get anything done."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.cluster import Purpose
from coordinator.evaluation import events as ev
from coordinator.evaluation.job_specs import secrets_for
from coordinator.evaluation.scoring import MAX_WORKER_JOBS, WAITING_SECONDS
from evaljobs.contract.specs import JudgeOptions


@pytest.mark.parametrize("judged", [True, False])
def test_the_judges_key_reaches_workers_of_suites_with_judge_tasks_alone(judged: bool) -> None:
    plain = record(entries=2)
    tasks = (plain.suite.tasks[0], plain.suite.tasks[1].model_copy(update={"judge": judged}))
    judge = JudgeOptions(url="http://judge", model="m", api_key_env="JUDGE_KEY")
    suite = plain.suite.model_copy(update={"tasks": tasks})
    made = plain.model_copy(update={"suite": suite, "judge": judge})
    given = {purpose: secrets_for(made, purpose) for purpose in get_args(Purpose)}
    assert given.pop("metric") == (("JUDGE_KEY",) if judged else ())
    assert not any(given.values())


@pytest.mark.parametrize("seed", range(10))
def test_workers_that_get_something_done_are_sent_for_again_however_often_they_are_taken(seed: int) -> None:
    """Their jobs end (preemption, their time limit) whenever a metric job is done; all is scored in the end."""
    world = World(seed, Faults(metric_slow=0.95), record(entries=30))
    taken = 0
    while world.state.ended_at is None:
        world.tick()
        if not world.state.scoring.worker_attempts:
            taken += world.kill("metric")
    world.run_to_scores()
    assert taken > MAX_WORKER_JOBS


def test_workers_that_get_nothing_done_have_a_quarter_of_an_hour_and_a_retry_sends_for_more() -> None:
    """Where a node ends them at once they are sent for with pauses, then the entries say what happened."""
    world = World(1, Faults(metric_slow=1.0))
    ends: list[float] = []
    while world.state.ended_at is None:
        world.tick()
        ends += [world.now] * world.kill("metric")
    assert len(ends) >= MAX_WORKER_JOBS
    assert ends[-1] - ends[0] > 900
    assert all("worker jobs ended" in e.error for e in world.state.entries)
    world.faults.metric_slow = 0.0
    world.workers_stopped = False
    world.take([ev.RetryAsked(at=world.now)])
    world.run_to_scores()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), most=st.integers(1, 6), slow=st.sampled_from([0.0, 0.8, 0.97]))
def test_workers_are_as_many_as_are_worth_it_and_no_more(seed: int, most: int, slow: float) -> None:
    """They start once a trial runs, as many as the plan says; more come only where jobs have waited, never beyond the
    settings; when all is scored none is left."""
    world = World(seed, Faults(metric_slow=slow), record(entries=8, workers=most))
    most_seen = 0
    while world.state.ended_at is None:
        before = [j for j in world.jobs.values() if j.job.purpose == "metric"]
        waited = [world.now - m.enqueued_at for m in world.state.scoring.metrics.values() if not m.done]
        world.tick()
        jobs = [j for j in world.jobs.values() if j.job.purpose == "metric"]
        if jobs and not before:
            assert jobs[0].job.count == 1
            assert any(
                m.phase != "pending"
                for j in world.jobs.values()
                if j.job.purpose == "trial"
                for m in j.members.values()
            )
        elif len(jobs) > len(before):
            assert max(waited) >= WAITING_SECONDS - 5.0
        there = sum(m.phase != "ended" for j in jobs for m in j.members.values())
        most_seen = max(most_seen, there)
        assert there <= most
    assert most_seen <= (1 if slow == 0.0 else most)
    world.run_to_scores()
