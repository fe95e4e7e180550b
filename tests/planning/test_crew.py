"""Laws of the number of metric workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import alike, fixed, lanes, work_sets

from coordinator.planning.flow_shop import end_of
from coordinator.planning.make_plan import SLACK, WORKER_SECONDS, fewest_workers
from coordinator.planning.model import Lane, Problem, WorkSet
from coordinator.planning.planner import plan
from priors.estimate import Learnt, predict_metric


def crew_of(sets, on, *, most, cores=1, factor=1.0, load_seconds=0.0, shard_overhead_seconds=0.05):
    costs = {"load_seconds": load_seconds, "shard_overhead_seconds": shard_overhead_seconds}
    made = plan(Problem(sets, on, cpu_slots=most * cores, **costs))
    scaled = [replace(work, metric_seconds=factor * work.metric_seconds) for work in sets]
    alike = [Lane(name=lane.name, node=lane.node) for lane in on]
    return made, lambda workers: end_of(made, Problem(scaled, alike, cpu_slots=workers * cores, **costs))


@settings(max_examples=80)
@given(sets=work_sets(), on=lanes(), costs=fixed, most=st.integers(1, 40), cores=st.sampled_from([1, 4]))
def test_no_worker_is_spared_that_would_end_it_sooner(sets, on, costs, most, cores) -> None:
    """The workers chosen, from 1 to the most, end within the slack of what the most would, each having its share of work."""
    _, end = crew_of(sets, on, most=most, cores=cores, load_seconds=costs["load_seconds"])
    work = sum(one.metric_seconds for one in sets)
    chosen = fewest_workers(end, most, work)
    assert 1 <= chosen <= most
    assert chosen == 1 or (chosen - 1) * WORKER_SECONDS < work
    assert end(chosen) <= SLACK * end(max(1, min(most, int(work / WORKER_SECONDS)))) + 1e-9


@pytest.mark.parametrize("leaves", [2, 57])
def test_a_few_seconds_of_scoring_get_one_worker_however_many_tasks_share_them(leaves) -> None:
    """A group's tasks are scored by one job: they share its start, and a second worker would start for as long as it worked."""
    each = predict_metric("unheard-of", 8, False, Learnt([]), together=leaves).seconds
    sets = [
        WorkSet(name=str(n), batch_seconds=[0.1], metric_seconds=each, metric="score") for n in range(leaves)
    ]
    _, end = crew_of(sets, alike(4), most=32, load_seconds=8.0)
    assert fewest_workers(end, 32, leaves * each) == 1


@settings(max_examples=40)
@given(sets=work_sets(), on=lanes(), most=st.integers(1, 40))
def test_without_metric_seconds_one_worker_is_enough(sets, on, most) -> None:
    """Nothing to compute: one worker, and the end is the GPUs'."""
    _, end = crew_of(sets, on, most=most, factor=0.0)
    assert fewest_workers(end, most, 0.0) == 1
    assert end(1) == end(most)


@settings(max_examples=40)
@given(sets=work_sets(), costs=fixed, slots=st.sampled_from([1, 2, 16]))
def test_the_end_is_the_planners(sets, costs, slots) -> None:
    """On lanes that are free at once, it predicts what the planner does."""
    known = {name: costs[name] for name in ("load_seconds", "shard_overhead_seconds")}
    made, end = crew_of(sets, alike(3), most=slots, **known)
    assert abs(end(slots) - made.makespan_seconds) <= 0.02 * made.makespan_seconds + 1e-6


def test_long_programs_get_many_workers_and_short_ones_few() -> None:
    """600 CPU seconds behind 100 s of GPU: the work asks for several; 6 CPU seconds for one."""
    long = [WorkSet(name="x", batch_seconds=[1.0] * 100, metric_seconds=600.0, metric="execute")]
    short = [WorkSet(name="x", batch_seconds=[1.0] * 100, metric_seconds=6.0, metric="execute")]
    assert fewest_workers(crew_of(long, alike(1), most=16)[1], 16, 600.0) >= 6
    assert fewest_workers(crew_of(short, alike(1), most=16)[1], 16, 6.0) == 1
