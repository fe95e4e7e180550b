"""Simulated time equals hand-worked cases, and no run beats its bound."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.sampled_times import Predicted, Truth
from simulation.simulate import simulate
from support.problems import fixed, lanes, work_sets

from coordinator.planning.batch_sums import Even
from coordinator.planning.cpu_stage import divided, metrics_end
from coordinator.planning.make_plan import SHARD_OVERHEAD_SECONDS
from coordinator.planning.model import Lane, LanePlan, Plan, PlannedShard, Problem, WorkSet
from coordinator.planning.planner import plan

FEW = settings(max_examples=80)


def shard(name, first, end, seconds, rank):
    return PlannedShard(set=name, first_batch=first, end_batch=end, seconds=seconds, rank=rank)


def given_plan(**shards):
    return Plan(
        lanes=tuple(LanePlan(lane=lane, node="n", shards=mine) for lane, mine in shards.items()),
        makespan_seconds=0.0,
        lower_bound_seconds=0.0,
        gpu_seconds=0.0,
    )


def run(made, on, sets, **more):
    truth = Truth(Predicted(sets), sigma=0.0, seed=0)
    costs = {"load_seconds": 10.0, "shard_overhead_seconds": 1.0, "cpu_slots": 2} | more
    return simulate(made, on, truth, **costs)


def test_an_empty_lane_steals_the_lowest_rank_of_the_fullest_lane():
    """b has no shard: it takes a's next in rank while a runs its head; both end by hand-worked
    times.
    """
    sets = [WorkSet(name="x", batch_seconds=[20.0, 30.0, 8.0])]
    made = given_plan(
        a=(shard("x", 0, 1, 20.0, 0.0), shard("x", 1, 2, 30.0, 1.0), shard("x", 2, 3, 8.0, 2.0)), b=()
    )
    got = run(made, [Lane(name="a", node="n"), Lane(name="b", node="n")], sets)
    # both loaded at 10; a runs rank 0 until 31, b rank 1 until 41, a rank 2 from 31 until 40
    assert [(span.lane, span.shard.rank, span.start, span.end) for span in got.spans] == [
        ("a", 0.0, 10.0, 31.0),
        ("b", 1.0, 10.0, 41.0),
        ("a", 2.0, 31.0, 40.0),
    ]
    assert got.makespan_seconds == pytest.approx(41.0)
    # 58 s of inference; held: a 10..40 and b 10..41, and 10 s of load each
    assert got.busy_fraction == pytest.approx(58 / 81)


def test_a_thief_takes_from_the_lane_with_most_seconds_left():
    """c steals from b (50 s left), not from a (30 s left), although a's has the lower rank."""
    sets = [WorkSet(name="x", batch_seconds=[5.0, 30.0, 5.0, 50.0])]
    made = given_plan(
        a=(shard("x", 0, 1, 5.0, 0.0), shard("x", 1, 2, 30.0, 1.0)),
        b=(shard("x", 2, 3, 5.0, 2.0), shard("x", 3, 4, 50.0, 3.0)),
        c=(),
    )
    on = [Lane(name=name, node="n") for name in "abc"]
    got = run(made, on, sets)
    stolen = next(span for span in got.spans if span.lane == "c")
    assert stolen.shard.rank == 3.0


def test_a_late_lane_starts_when_it_arrives_and_speed_counts():
    """Ready at 40, load 10: from 50 on, 20 s of work at speed 2 and 1 s overhead end at 61."""
    sets = [WorkSet(name="x", batch_seconds=[20.0])]
    made = given_plan(a=(shard("x", 0, 1, 20.0, 0.0),))
    got = run(made, [Lane(name="a", node="n", ready_at_seconds=40.0, speed=2.0)], sets)
    assert got.makespan_seconds == pytest.approx(61.0)


def test_a_score_waits_for_the_whole_set_and_an_execute_for_its_shard():
    """Shards end at 21 and 31: a score of 7 s ends at 38; an execute of 8 s at 35."""
    made = given_plan(a=(shard("x", 0, 1, 10.0, 0.0), shard("x", 1, 2, 9.0, 1.0)))
    on = [Lane(name="a", node="n")]
    scored = WorkSet(name="x", batch_seconds=[10.0, 9.0], metric_seconds=7.0)
    assert run(made, on, [scored]).makespan_seconds == pytest.approx(38.0)
    executed = WorkSet(
        name="x", batch_seconds=[10.0, 9.0], metric_seconds=19.0, metric="execute", metric_parallelism=1
    )
    # 10 s of CPU from 21 on, then the 9 s of the second shard from 31 on
    assert run(made, on, [executed]).makespan_seconds == pytest.approx(40.0)


def test_metric_jobs_are_served_in_order_on_their_slots():
    """Three jobs ready at 0, 1, 2 on two slots: 5, 4, 3 s end at 5, 5 and 8."""
    assert metrics_end([(0.0, 5.0, 0), (1.0, 4.0, 1), (2.0, 3.0, 2)], [9, 9, 9], 2) == pytest.approx(8.0)


def test_a_set_that_may_run_one_job_leaves_the_other_slot_to_others():
    """Set 0 may run one job at once: its second job waits until 10, set 1 uses the slot."""
    jobs = [(0.0, 10.0, 0), (0.0, 10.0, 0), (1.0, 3.0, 1)]
    assert metrics_end(jobs, [1, 9], 2) == pytest.approx(20.0)
    assert metrics_end([(0.0, 10.0, 0), (0.5, 1.0, 0), (1.0, 10.5, 1)], [1, 9], 2) == pytest.approx(11.5)


def test_a_shards_cpu_work_is_dealt_out_up_to_what_may_run_at_once():
    """12 s, 3 at once: three jobs of 4 s; one document is one job; no piece below the grain."""
    assert divided(5.0, 12.0, 0, at_once=3, documents=9, grain=0.1) == [(5.0, 4.0, 0)] * 3
    assert divided(5.0, 12.0, 0, at_once=3, documents=1, grain=0.1) == [(5.0, 12.0, 0)]
    assert divided(5.0, 12.0, 0, at_once=9, documents=9, grain=6.0) == [(5.0, 6.0, 0)] * 2


@FEW
@given(work_sets(), lanes(), fixed, st.sampled_from([0.0, 0.3, 0.6]), st.integers(0, 1000))
def test_no_run_beats_the_bound_of_its_own_truth(sets, on, costs, sigma, seed):
    """Whatever was drawn, the makespan is not below the bound of the drawn seconds."""
    truth = Truth(Predicted(sets), sigma=sigma, seed=seed)
    got = simulate(plan(Problem(sets, on, **costs)), on, truth, **costs)
    assert got.makespan_seconds >= got.lower_bound_seconds * (1 - 1e-9)


@FEW
@given(work_sets(), lanes(), fixed, st.integers(0, 1000))
def test_every_shard_runs_once_on_any_lane(sets, on, costs, seed):
    """Pulling and stealing lose no shard and run none twice; no lane runs two at a time."""
    made = plan(Problem(sets, on, **costs))
    got = simulate(made, on, Truth(Predicted(sets), sigma=0.6, seed=seed), **costs)
    assert sorted(span.shard.rank for span in got.spans) == sorted(
        one.rank for lane in made.lanes for one in lane.shards
    )
    for lane in on:
        mine = sorted((span.start, span.end) for span in got.spans if span.lane == lane.name)
        assert all(before[1] <= after[0] for before, after in pairwise(mine))


@FEW
@given(work_sets(), st.integers(1, 8), fixed, st.integers(0, 1000))
def test_no_lane_idles_while_shards_wait(sets, gpus, costs, seed):
    """Lanes end within one shard of each other: a wrong prior costs a shard, never a GPU."""
    on = [Lane(name=str(i), node="n") for i in range(gpus)]
    made = plan(Problem(sets, on, **costs))
    got = simulate(made, on, Truth(Predicted(sets), sigma=0.6, seed=seed), **costs)
    last_start = max(span.start for span in got.spans)
    ends = {lane.name: 0.0 for lane in on}
    for span in got.spans:
        ends[span.lane] = max(ends[span.lane], span.end)
    assert all(end == 0.0 or end >= last_start for end in ends.values())


@pytest.mark.long
@FEW
@given(st.integers(2, 16), st.integers(0, 1000))
def test_stealing_never_starves_a_long_tail(gpus, seed):
    """With sigma 0.6, every shard before the longest CPU tail starts before any shard of bulk that
    ranks after it and stood in the same lane; the tail's last shard starts in the first half of the
    run.
    """
    sets = [
        WorkSet(name=f"bulk{index}", batch_seconds=Even(each=1.0, number=150 * gpus), metric_seconds=1.0)
        for index in range(4)
    ] + [
        WorkSet(
            name="judge",
            batch_seconds=[1.0] * 60,
            metric_seconds=400.0,
            metric="execute",
            metric_parallelism=1,
        )
    ]
    on = [Lane(name=str(i), node="n") for i in range(gpus)]
    costs = {"load_seconds": 10.0, "shard_overhead_seconds": 0.5, "cpu_slots": 4}
    got = simulate(
        plan(Problem(sets, on, **costs)), on, Truth(Predicted(sets), sigma=0.6, seed=seed), **costs
    )
    judged = [span.start for span in got.spans if span.shard.set == "judge"]
    assert max(judged) <= max(span.end for span in got.spans) / 2


def test_a_draw_is_the_same_however_a_set_is_cut():
    """The seconds of parts add up to those of the whole, and a seed draws the same again."""
    predicted = Predicted([WorkSet(name="x", batch_seconds=[1.0, 2.0, 3.0] * 20, metric_seconds=5.0)])
    truth, again = (Truth(predicted, sigma=0.5, seed=7) for _ in range(2))
    parts = sum(truth.gpu(0, start, start + 7) for start in range(0, 56, 7)) + truth.gpu(0, 56, 60)
    assert parts == pytest.approx(truth.gpu_total(0))
    assert again.gpu_total(0) == truth.gpu_total(0)
    exact = Truth(predicted, sigma=0.0, seed=7)
    assert exact.gpu(0, 3, 9) == pytest.approx(12.0)


@pytest.mark.parametrize("width", [2, 8])
def test_a_short_run_whose_prior_is_ten_times_off_ends_together(width):
    """Sets of seconds, cut by what a shard costs besides, take ten times as long: the end is still
    shared, in the median of 20 draws to 20 % of the bound.
    """
    sets = [[0.02] * 60, [0.03] * 15, [0.2] * 15, [0.2] * 11]
    on = [Lane(name=str(number), node="n") for number in range(width)]
    costs = {"load_seconds": 7.0, "shard_overhead_seconds": SHARD_OVERHEAD_SECONDS, "cpu_slots": 2}
    made = plan(Problem([WorkSet(name=str(i), batch_seconds=one) for i, one in enumerate(sets)], on, **costs))
    real = Predicted(
        [WorkSet(name=str(i), batch_seconds=[10 * x for x in one]) for i, one in enumerate(sets)]
    )
    ratios = []
    for seed in range(20):
        run = simulate(made, on, Truth(real, sigma=0.4, seed=seed), **costs)
        ratios.append(run.makespan_seconds / run.lower_bound_seconds)
    assert median(ratios) <= 1.2
