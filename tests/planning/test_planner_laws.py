"""Laws every plan keeps, whatever the sets and lanes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracle import best_known, random_problem
from support.problems import alike, fixed, lanes, work_sets

from coordinator.planning.model import Lane, Problem, WorkSet
from coordinator.planning.planner import plan

FEW = settings(max_examples=120)


def covered(made, name):
    return sorted(
        (shard.first_batch, shard.end_batch)
        for lane in made.lanes
        for shard in lane.shards
        if shard.set == name
    )


def by_rank(made):
    return sorted((shard for lane in made.lanes for shard in lane.shards), key=lambda shard: shard.rank)


@FEW
@given(work_sets(), lanes(), fixed, st.one_of(st.none(), st.integers(1, 40)))
def test_every_batch_is_planned_exactly_once_and_no_plan_is_shorter_than_the_bound(sets, on, costs, forced):
    """A set's shards, in order, are its batches without gap or overlap; lanes are kept; planning twice gives equal plans."""
    made = plan(Problem(sets, on, **costs, shards_per_task=forced))
    assert made == plan(Problem(sets, on, **costs, shards_per_task=forced))
    assert made.makespan_seconds >= made.lower_bound_seconds * (1 - 1e-9)
    assert [lane.lane for lane in made.lanes] == [lane.name for lane in on]
    for work in sets:
        spans = covered(made, work.name)
        assert spans[0][0] == 0
        assert spans[-1][1] == len(work.batch_seconds)
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert all(first < end for first, end in spans)


@FEW
@given(work_sets(), lanes(), fixed)
def test_ranks_are_one_order_and_overhead_is_below_5_percent_of_a_shard_that_could_be_longer(sets, on, costs):
    """No rank stands twice, and every lane's shards stand by rank. A shard is 20 overheads long, or its whole set."""
    made = plan(Problem(sets, on, **costs))
    assert len({shard.rank for shard in by_rank(made)}) == len(by_rank(made))
    sizes = {work.name: len(work.batch_seconds) for work in sets}
    for lane in made.lanes:
        assert [shard.rank for shard in lane.shards] == sorted(shard.rank for shard in lane.shards)
        for shard in lane.shards:
            whole = shard.end_batch - shard.first_batch == sizes[shard.set]
            assert whole or shard.seconds >= 20 * costs["shard_overhead_seconds"] * (1 - 1e-6)


@pytest.mark.long
@FEW
@given(work_sets(), st.integers(1, 12), fixed)
def test_a_gpu_more_costs_at_most_one_shard(sets, gpus, costs):
    """A further GPU raises the planned makespan by at most the longest shard and its overhead."""
    before, after = (plan(Problem(sets, alike(count), **costs)) for count in (gpus, gpus + 1))
    longest = max(
        (shard.seconds for made in (before, after) for lane in made.lanes for shard in lane.shards),
        default=0.0,
    )
    slack = longest + costs["shard_overhead_seconds"]
    assert after.makespan_seconds <= before.makespan_seconds + slack + 1e-6


@given(
    st.lists(st.floats(0.1, 50), min_size=1, max_size=200),
    st.integers(1, 60),
)
@FEW
def test_forced_shards_are_that_many_and_nearly_equal(batches, pieces):
    """`shards_per_task` gives min(N, batches) shards within two batches of an equal share."""
    work = WorkSet(name="a", batch_seconds=batches)
    made = plan(Problem([work], alike(1), load_seconds=1.0, shards_per_task=pieces))
    shards = made.lanes[0].shards
    assert len(shards) == min(pieces, len(batches))
    share = sum(batches) / len(shards)
    if pieces <= len(batches) // 4:
        assert all(abs(shard.seconds - share) <= 2 * max(batches) + 1e-6 for shard in shards)


def test_a_long_cpu_tail_runs_first_and_feeds_the_cpu_early():
    """The shards before the longest tail have the lowest ranks, and the first of them is short."""
    bulk = WorkSet(name="bulk", batch_seconds=[1.0] * 4000, metric_seconds=2.0)
    tail = {"metric_seconds": 900.0, "metric": "execute", "metric_parallelism": 1}
    judge = WorkSet(name="judge", batch_seconds=[1.0] * 400, **tail)
    made = plan(Problem([bulk, judge], alike(8), load_seconds=20, shard_overhead_seconds=0.5, cpu_slots=8))
    shards = by_rank(made)
    judged = [shard for shard in shards if shard.set == "judge"]
    assert shards[: len(judged)] == judged
    assert judged[0].first_batch == 0
    assert judged[0].seconds <= 11.0
    assert made.makespan_seconds <= 1.02 * made.lower_bound_seconds


def test_a_program_test_of_one_batch_is_a_long_tail():
    """No number of slots shortens a metric that cannot be divided: its set runs first."""
    sets = [WorkSet(name=f"bulk{i}", batch_seconds=[100.0]) for i in range(100)]
    long = WorkSet(name="long", batch_seconds=[1.0], metric_seconds=900.0, metric="execute")
    made = plan(
        Problem([*sets, long], alike(10), load_seconds=20, shard_overhead_seconds=0.05, cpu_slots=1000)
    )
    assert by_rank(made)[0].set == "long"
    assert made.makespan_seconds <= 1025.0


@pytest.mark.parametrize("gpus", [31, 60, 64])
def test_lesser_tails_leave_a_slot_to_the_longest(gpus):
    """Two CPU slots: shorter tails must not hold both when the longest comes."""
    shapes = [("longest", 19.0, 3900.0), ("a", 226.0, 407.0), ("b", 68.0, 381.0), ("bulk", 21_000.0, 1.0)]
    sets = [
        WorkSet(name=name, batch_seconds=[seconds / 2000] * 2000, metric_seconds=tail)
        for name, seconds, tail in shapes
    ]
    made = plan(Problem(sets, alike(gpus), load_seconds=60, shard_overhead_seconds=0.5, cpu_slots=2))
    assert made.makespan_seconds <= 1.01 * made.lower_bound_seconds


def test_shards_shrink_towards_the_end_of_the_run():
    """On one large set, the last-ranked shards are the shortest."""
    work = WorkSet(name="a", batch_seconds=[1.0] * 20_000)
    shards = by_rank(plan(Problem([work], alike(4), load_seconds=5, shard_overhead_seconds=0.5)))
    assert shards[0].seconds > 10 * shards[-1].seconds
    assert shards[-1].seconds >= 10.0


def test_a_late_lane_and_a_fast_lane_get_their_share():
    """Two speeds: the fast lane takes more; a lane that arrives after the end takes nothing."""
    on = [
        Lane(name="slow", node="a"),
        Lane(name="fast", node="a", speed=2.0),
        Lane(name="late", node="b", ready_at_seconds=10_000.0),
    ]
    made = plan(Problem([WorkSet(name="a", batch_seconds=[1.0] * 3000)], on, load_seconds=10))
    work = {lane.lane: sum(shard.seconds for shard in lane.shards) for lane in made.lanes}
    assert work["fast"] == pytest.approx(2 * work["slow"], rel=0.05)
    assert work["late"] == 0.0
    assert made.makespan_seconds == pytest.approx(1010.0, rel=0.01)


@pytest.mark.parametrize(
    ("batches", "makespan", "held"),
    [([], 0.0, 0.0), ([3.0], 13.1, 13.1), ([0.1] * 50 + [1.0] * 50, 42.5, 85.0)],
)
def test_gpu_seconds_are_what_lanes_are_held(batches, makespan, held):
    """Load, work and overhead of lanes that run something; no work is no makespan; small sets need no lane of their own."""
    sets = [WorkSet(name=str(i), batch_seconds=[one]) for i, one in enumerate(batches)]
    made = plan(Problem(sets, alike(2), load_seconds=10, shard_overhead_seconds=0.1))
    assert made.makespan_seconds == pytest.approx(makespan)
    assert made.gpu_seconds == pytest.approx(held)
    assert bool(made.lower_bound_seconds) == bool(batches)


ONE = WorkSet(name="a", batch_seconds=[1.0])


@pytest.mark.parametrize(
    ("sets", "on", "more"),
    [
        ([ONE], [], {}),
        ([ONE] * 2, alike(1), {}),
        ([ONE], [Lane(name="l", node="n", speed=0.0)], {}),
        ([ONE], alike(1), {"cpu_slots": 0}),
        ([ONE], alike(1), {"shards_per_task": 0}),
        ([WorkSet(name="a", batch_seconds=[-1.0])], alike(1), {}),
        ([WorkSet(name="a", batch_seconds=[float("nan")])], alike(1), {}),
        ([WorkSet(name="a", batch_seconds=[1.0], metric_parallelism=0)], alike(1), {}),
    ],
)
def test_what_cannot_be_planned_is_refused(sets, on, more):
    """No lane, twins, no speed, no slot, no shard, negative or unknown seconds: ValueError."""
    with pytest.raises(ValueError):
        plan(Problem(sets, on, load_seconds=1.0, **more))


def test_seconds_that_cannot_be_divided_are_planned_all_the_same():
    """The least number above 0: no part of it is left for a lane, nor for a shard."""
    least = WorkSet(name="a", batch_seconds=[0.0, 5e-324])
    made = plan(Problem([least], alike(1), load_seconds=0.0, shard_overhead_seconds=0.0))
    assert covered(made, "a") == [(0, 2)]


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_is_within_5_percent_of_the_best_known(seed):
    """The best schedule of CP-SAT, on random problems of 1 to 500 sets and 1 to 512 GPUs."""
    pytest.importorskip("ortools")
    sets, on, costs = random_problem(seed)
    made = plan(Problem(sets, on, **costs))
    assert made.makespan_seconds <= 1.05 * best_known(made, sets, seconds=1, **costs)
