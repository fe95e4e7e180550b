"""Laws every plan keeps, whatever the sets and lanes, and ends near the bound on the problems that were hard."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn import some
from support.oracle import best_known, random_problem
from support.problems import JUDGE, alike, fixed, lanes, work, work_sets

from coordinator.decide.planning.flow_shop import end_of
from coordinator.decide.planning.lower_bound import MeasuredSet, measured_lower_bound, plan_bound
from coordinator.decide.planning.make_plan import METRICS_SLACK, WORKER_SECONDS, fewest_workers
from coordinator.decide.planning.model import Even, Lane, Problem, WorkSet
from coordinator.decide.planning.planner import plan
from priors.estimate import PriorHistory, predict_metric

FEW = some(40)


def covered(made, name):
    of_set = (shard for lane in made.lanes for shard in lane.shards if shard.set == name)
    return sorted((shard.first_batch, shard.end_batch) for shard in of_set)


def by_rank(made):
    return sorted((shard for lane in made.lanes for shard in lane.shards), key=lambda shard: shard.rank)


@FEW
@given(work_sets(), lanes(), fixed, st.one_of(st.none(), st.integers(1, 40)))
def test_every_batch_is_planned_exactly_once_and_no_plan_is_shorter_than_the_bound(sets, on, costs, forced):
    """A set's shards, in order, are its batches without gap or overlap; lanes are kept; planning twice gives equal plans. No
    rank stands twice, and every lane's shards stand by rank. A shard is five overheads long, or its whole set."""
    made = plan(Problem(sets, on, **costs, shards_per_task=forced))
    assert made == plan(Problem(sets, on, **costs, shards_per_task=forced))
    assert made.makespan_seconds >= made.lower_bound_seconds * (1 - 1e-9)
    assert [lane.lane for lane in made.lanes] == [lane.name for lane in on]
    assert len({shard.rank for shard in by_rank(made)}) == len(by_rank(made))
    for lane in made.lanes:
        assert list(lane.shards) == sorted(lane.shards, key=lambda shard: shard.rank)
    sizes = {work.name: len(work.batch_seconds) for work in sets}
    for name, size in sizes.items():
        spans = covered(made, name)
        assert (spans[0][0], spans[-1][1]) == (0, size)
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert all(first < end for first, end in spans)
    for shard in by_rank(made) if forced is None else ():
        whole = shard.end_batch - shard.first_batch == sizes[shard.set]
        assert whole or shard.seconds >= 5 * costs["shard_overhead_seconds"] * (1 - 1e-6)


@pytest.mark.long
@FEW
@given(work_sets(), st.integers(1, 12), fixed)
def test_a_gpu_more_costs_at_most_one_shard(sets, gpus, costs):
    """A further GPU raises the planned makespan by at most the longest shard and its overhead."""
    before, after = (plan(Problem(sets, alike(count), **costs)) for count in (gpus, gpus + 1))
    longest = max((shard.seconds for made in (before, after) for shard in by_rank(made)), default=0.0)
    slack = longest + costs["shard_overhead_seconds"]
    assert after.makespan_seconds <= before.makespan_seconds + slack + 1e-6


@FEW
@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=200), st.integers(1, 60))
def test_forced_shards_are_that_many_and_nearly_equal(batches, pieces):
    """`shards_per_task` gives min(N, batches) shards within two batches of an equal share."""
    one = WorkSet(name="a", batch_seconds=batches)
    shards = by_rank(plan(Problem([one], alike(1), load_seconds=1.0, shards_per_task=pieces)))
    assert len(shards) == min(pieces, len(batches))
    share = sum(batches) / len(shards)
    if pieces <= len(batches) // 4:
        assert all(abs(shard.seconds - share) <= 2 * max(batches) + 1e-6 for shard in shards)


BULK = [work(f"bulk{i}", 1, 100.0) for i in range(100)]
LESSER = [("longest", 19.0, 3900.0), ("a", 226.0, 407.0), ("b", 68.0, 381.0), ("bulk", 21_000.0, 1.0)]
SLOTS = [work(name, 2000, seconds / 2000, tail) for name, seconds, tail in LESSER]
MMLU = [work("mmlu", 14042, 4493.4 / 14042, 4.0)]
HARD = {  # sets, GPUs, times the bound at most, seconds of a shard's overhead, CPU slots, the set that runs first
    "a long CPU tail": ([work("bulk", 4000, 1.0, 2.0), work("judge", 400, 1.0, 900.0, **JUDGE)], 8, 1.02, 0.5, 8, "judge"),
    "an undivided metric": ([*BULK, work("long", 1, 1.0, 900.0, "execute")], 10, 1.005, 0.05, 1000, "long"),
    **{f"lesser tails on {gpus} GPUs": (SLOTS, gpus, 1.01, 0.5, 2, "") for gpus in (31, 60, 64)},
    **{f"one set on {gpus} GPUs": (MMLU, gpus, 1.04, 1.0, 64, "") for gpus in (2, 8, 24, 32, 48, 64)},
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_a_plan_ends_near_the_bound_where_that_is_hard(name):
    """No number of slots shortens a metric that cannot be divided; shorter tails leave a slot to the longest; no lane waits
    for one large set. The longest tail's shards have the lowest ranks, and the first of them is short."""
    sets, gpus, within, overhead, slots, first = HARD[name]
    costs = {
        "load_seconds": 60.0 if sets is SLOTS else 20.0,
        "shard_overhead_seconds": overhead,
        "cpu_slots": slots,
    }
    made = plan(Problem(sets, alike(gpus, per_node=8), **costs))
    assert made.makespan_seconds <= within * made.lower_bound_seconds
    shards = by_rank(made)
    tail = [shard for shard in shards if shard.set == first]
    assert shards[: len(tail)] == tail
    assert not tail or (tail[0].first_batch == 0 and tail[0].seconds <= 11.0)


def test_shards_shrink_towards_the_end_of_the_run():
    """On one large set, the last-ranked shards are the shortest."""
    shards = by_rank(plan(Problem([work("a", 20_000)], alike(4), load_seconds=5, shard_overhead_seconds=0.5)))
    assert shards[0].seconds > 10 * shards[-1].seconds
    assert shards[-1].seconds >= 10.0


def test_a_late_lane_and_a_fast_lane_get_their_share():
    """Two speeds: the fast lane takes more; a lane that arrives after the end takes nothing."""
    slow = Lane(name="slow", node="a")
    on = [
        slow,
        Lane(name="fast", node="a", speed=2.0),
        Lane(name="late", node="b", ready_at_seconds=10_000.0),
    ]
    made = plan(Problem([work("a", 3000)], on, load_seconds=10))
    done = {lane.lane: sum(shard.seconds for shard in lane.shards) for lane in made.lanes}
    assert done["fast"] == pytest.approx(2 * done["slow"], rel=0.05)
    assert done["late"] == 0.0
    assert made.makespan_seconds == pytest.approx(1010.0, rel=0.01)


@pytest.mark.parametrize(
    ("batches", "makespan", "held"),
    [([], 0.0, 0.0), ([3.0], 13.1, 13.1), ([0.1] * 50 + [1.0] * 50, 42.5, 85.0)],
)
def test_gpu_seconds_are_what_lanes_are_held(batches, makespan, held):
    """Load, work and overhead of lanes that run something; no work is no makespan; small sets need no lane of their own."""
    sets = [work(str(i), 1, one) for i, one in enumerate(batches)]
    made = plan(Problem(sets, alike(2), load_seconds=10, shard_overhead_seconds=0.1))
    assert made.makespan_seconds == pytest.approx(makespan)
    assert made.gpu_seconds == pytest.approx(held)
    assert bool(made.lower_bound_seconds) == bool(batches)


ONE = work("a", 1)


@pytest.mark.parametrize(
    ("sets", "on", "more"),
    [
        ([ONE], [], {}),
        ([ONE] * 2, alike(1), {}),
        ([ONE], [Lane(name="l", node="n", speed=0.0)], {}),
        ([ONE], alike(1), {"cpu_slots": 0}),
        ([ONE], alike(1), {"shards_per_task": 0}),
        ([work("a", 1, -1.0)], alike(1), {}),
        ([work("a", 1, float("nan"))], alike(1), {}),
        ([work("a", 1, metric_parallelism=0)], alike(1), {}),
    ],
)
def test_what_cannot_be_planned_is_refused(sets, on, more):
    """No lane, twins, no speed, no slot, no shard, negative or unknown seconds: ValueError."""
    with pytest.raises(ValueError):
        plan(Problem(sets, on, load_seconds=1.0, **more))


def test_a_plan_for_thousands_of_gpus_stays_within_its_budget_of_shards():
    """20,000 documents, 600 sets, 4,704 GPUs: every lane works, within the budget of shards."""
    sets = [work(str(index), 40, 30.0 + index % 7, index % 11) for index in range(600)]
    made = plan(Problem(sets, alike(4704, per_node=8), load_seconds=20.0, cpu_slots=1200))
    assert all(lane.shards for lane in made.lanes)
    assert len(by_rank(made)) <= 120_000
    assert made.makespan_seconds <= made.lower_bound_seconds + 2 * 36.05


def test_a_plan_of_even_batches_is_the_plan_of_their_list():
    """Binary fractions, so that no sum rounds: the two plans are equal."""
    shapes = [(4000, 0.25, 30.0, "execute"), (700, 2.0, 5.0, "score"), (33, 0.5, 0.0, "score")]
    listed = [work(str(number), *shape) for number, shape in enumerate(shapes)]
    even = [
        replace(one, batch_seconds=Even(each=each, number=number))
        for one, (number, each, *_) in zip(listed, shapes, strict=True)
    ]
    costs = {"load_seconds": 20.0, "shard_overhead_seconds": 0.5, "cpu_slots": 8}
    assert plan(Problem(even, alike(12), **costs)) == plan(Problem(listed, alike(12), **costs))


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_within_5_percent_of_the_best_known(seed):
    """The best schedule of CP-SAT, on random problems of 1 to 500 sets and 1 to 512 GPUs."""
    pytest.importorskip("ortools")
    sets, on, costs = random_problem(seed)
    made = plan(Problem(sets, on, **costs))
    assert made.makespan_seconds <= 1.05 * best_known(made, sets, seconds=1, **costs)


# --- the bound, and the number of metric workers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "slots", "stage", "seconds", "binding"),
    [
        # staging + load + the work of two GPUs
        ([work(tail=1.0, metric="execute")], 4, 4.5, 4.5 + 10 + 100 / 2, "GPU time"),
        # load + a batch + the tail over min(3 allowed, 4 slots)
        (
            [work(tail=300.0, metric="execute", metric_parallelism=3)],
            4,
            0.0,
            10 + 1 + 300 / 3,
            "the tail of x",
        ),
        # the score of a whole set waits for its last batch, on one slot; one long batch makes its set wait
        ([work(tail=30.0)], 4, 0.0, 10 + 100 / 2 + 30, "the tail of x"),
        ([replace(work(tail=30.0), batch_seconds=[80.0, 20.0])], 4, 0.0, 10 + 80 + 30, "the tail of x"),
        # load + the first batch anywhere + all CPU seconds over the slots
        ([work(n, 3, 2.0, 300.0, "execute") for n in "xy"], 2, 0.0, 10 + 2 + 600 / 2, "CPU slots"),
        ([], 1, 0.0, 0.0, "GPU time"),
    ],
)
def test_the_bound_is_its_largest_term_and_names_it(sets, slots, stage, seconds, binding):
    """By hand, on two GPUs and a load of 10 s."""
    got = plan_bound(Problem(sets, alike(2), load_seconds=10, cpu_slots=slots, stage_seconds=stage))
    assert (got.seconds, got.binding) == (pytest.approx(seconds), binding)


def test_a_measured_run_is_bounded_by_the_same_formula():
    """before + load + the largest term, from measured seconds; documents are the smallest piece."""
    sets = [
        MeasuredSet(name="x", gpu_seconds=100.0, documents=50, metric_seconds=90.0, executes=True),
        MeasuredSet(name="y", gpu_seconds=60.0, documents=10, metric_seconds=70.0, executes=False),
    ]
    got = measured_lower_bound(sets, gpus=4, cpu_slots=2, load_seconds=10.0, before_seconds=5.0)
    # the terms: GPU time 50, the tail of x 57, the tail of y 10 + 15 + 70, CPU slots 92
    assert got == pytest.approx(100.0)


def crew_of(sets, on, *, most, cores=1, load_seconds=0.0, shard_overhead_seconds=0.05):
    """A plan, and when it ends with how many workers."""
    costs = {"load_seconds": load_seconds, "shard_overhead_seconds": shard_overhead_seconds}
    made = plan(Problem(sets, on, cpu_slots=most * cores, **costs))
    alike = [Lane(name=lane.name, node=lane.node) for lane in on]
    return made, lambda workers: end_of(made, Problem(sets, alike, cpu_slots=workers * cores, **costs))


@some(27)
@given(
    sets=work_sets(),
    on=lanes(),
    costs=fixed,
    most=st.integers(1, 40),
    cores=st.sampled_from([1, 4]),
    scored=st.sampled_from([True, True, False]),
)
def test_no_worker_is_spared_that_would_end_it_sooner(*, sets, on, costs, most, cores, scored):
    """The workers chosen, from 1 to the most, end within the slack of what the most would, each having its share of work;
    without metric seconds it is one."""
    sets = sets if scored else [replace(one, metric_seconds=0.0) for one in sets]
    _, end = crew_of(sets, on, most=most, cores=cores, load_seconds=costs["load_seconds"])
    seconds = sum(one.metric_seconds for one in sets)
    chosen = fewest_workers(end, most, seconds)
    assert 1 <= chosen <= most
    assert chosen == 1 or (chosen - 1) * WORKER_SECONDS < seconds
    assert end(chosen) <= METRICS_SLACK * end(max(1, min(most, int(seconds / WORKER_SECONDS)))) + 1e-9
    assert scored or end(1) == end(most)


EACH = {
    leaves: predict_metric("unheard-of", 8, False, PriorHistory([]), together=leaves).seconds
    for leaves in (2, 57)
}


@pytest.mark.parametrize(
    ("sets", "on", "most", "wanted"),
    [
        *(([work(str(n), 1, 0.1, each) for n in range(leaves)], 4, 32, [1]) for leaves, each in EACH.items()),
        ([work(tail=600.0, metric="execute")], 1, 16, range(6, 17)),
        ([work(tail=6.0, metric="execute")], 1, 16, [1]),
        ([work(each=0.01, tail=40.0, metric="execute")], 1, 16, [1]),
    ],
    ids=["two leaf tasks share a job's start", "so do 57", "long programs", "short programs", "few of them"],
)
def test_long_programs_get_many_workers_and_a_few_seconds_one(sets, on, most, wanted):
    """A second worker would start for as long as it worked, however many tasks share a few seconds of scoring."""
    _, end = crew_of(sets, alike(on), most=most)
    assert fewest_workers(end, most, sum(one.metric_seconds for one in sets)) in wanted


@some(13)
@given(sets=work_sets(), costs=fixed, slots=st.sampled_from([1, 2, 16]))
def test_the_end_is_the_planners(sets, costs, slots):
    """On lanes that are free at once, it predicts what the planner does."""
    known = {name: costs[name] for name in ("load_seconds", "shard_overhead_seconds")}
    made, end = crew_of(sets, alike(3), most=slots, **known)
    assert abs(end(slots) - made.makespan_seconds) <= 0.02 * made.makespan_seconds + 1e-6
