"""Parts of a plan: sums of batches, the lower bound, cuts moved so that lanes end together, the number of metric workers."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import alike, fixed, lanes, work, work_sets

from coordinator.planning.batch_sums import Even, extremes, running, seconds_of
from coordinator.planning.flow_shop import end_of, levelled
from coordinator.planning.lower_bound import Capacity, MeasuredSet, bound, measured_lower_bound
from coordinator.planning.make_plan import SLACK, WORKER_SECONDS, fewest_workers
from coordinator.planning.model import Lane, Problem
from coordinator.planning.planner import plan
from priors.estimate import Learnt, predict_metric


@given(st.integers(0, 40), st.sampled_from([0.0, 0.25, 1.0, 3.5]), st.integers(-50, 50))
def test_even_batches_are_a_list_of_equal_numbers(count, each, index):
    """Length, items, sums and extremes are those of the list."""
    even, listed = Even(each=each, number=count), [each] * count
    assert (list(even), len(even)) == (listed, count)
    assert (seconds_of(even), extremes(even)) == (seconds_of(listed), extremes(listed))
    assert list(running(even)) == list(running(listed)) == list(accumulate(listed, initial=0.0))
    for sequence, of in ((even, listed), (running(even), running(listed))):
        if -len(of) <= index < len(of):
            assert sequence[index] == of[index]
        else:
            with pytest.raises(IndexError):
                sequence[index]


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
    got = bound(Problem(sets, alike(2), load_seconds=10, cpu_slots=slots, stage_seconds=stage))
    assert (got.seconds, got.binding) == (pytest.approx(seconds), binding)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=8),
    st.floats(0, 500),
)
def test_earliest_is_when_capacity_equals_the_work(pairs, asked):
    """At the returned time the lanes, of which some come late or are faster, have worked exactly the asked-for seconds; one
    lane alone has done them where it is soonest."""
    on = [
        Lane(name=str(i), node="n", ready_at_seconds=at, speed=speed) for i, (at, speed) in enumerate(pairs)
    ]
    capacity = Capacity(on, 3.0, 0.0)
    at = capacity.earliest(asked)
    done = sum(lane.speed * max(0.0, at - lane.ready_at_seconds - 3.0) for lane in on)
    assert done == pytest.approx(asked, abs=1e-6)
    alone = min(ready + 3.0 + asked / speed for ready, speed in pairs)
    assert capacity.earliest_single(asked) == pytest.approx(alone)


def test_a_measured_run_is_bounded_by_the_same_formula():
    """before + load + the largest term, from measured seconds; documents are the smallest piece."""
    sets = [
        MeasuredSet(name="x", gpu_seconds=100.0, documents=50, metric_seconds=90.0, executes=True),
        MeasuredSet(name="y", gpu_seconds=60.0, documents=10, metric_seconds=70.0, executes=False),
    ]
    got = measured_lower_bound(sets, gpus=4, cpu_slots=2, load_seconds=10.0, before_seconds=5.0)
    # the terms: GPU time 50, the tail of x 57, the tail of y 10 + 15 + 70, CPU slots 92
    assert got == pytest.approx(100.0)


@st.composite
def dealt(draw):
    """Shards of a few sets on lanes of some speeds: what `levelled` takes."""
    lanes, shortest = draw(st.integers(2, 6)), draw(st.floats(0.0, 5.0))
    speeds = draw(st.lists(st.floats(0.5, 2.0), min_size=lanes, max_size=lanes))
    sums, sizes, ends = {}, {}, [0.0] * lanes
    for index in range(draw(st.integers(1, 4))):
        batches = draw(st.lists(st.floats(0.1, 3.0), min_size=2, max_size=60))
        sums[index] = list(accumulate(batches, initial=0.0))
        inner = draw(st.sets(st.integers(1, len(batches) - 1), max_size=5))
        sizes[index] = []
        for first, stop in pairwise([0, *sorted(inner), len(batches)]):
            lane, seconds = draw(st.integers(0, lanes - 1)), sums[index][stop] - sums[index][first]
            sizes[index].append((lane, seconds))
            ends[lane] += seconds / speeds[lane]
    return sizes, sums, ends, speeds, shortest


@given(dealt())
def test_moved_cuts_cover_each_set_once_in_as_many_shards_none_too_short(problem):
    """As many shards as before, whole batches, each at least the shortest."""
    sizes, sums, *_, shortest = problem
    for index, cuts in levelled(*problem).items():
        assert len(cuts) == len(sizes[index])
        assert cuts[-1] == len(sums[index]) - 1
        for first, stop in pairwise([0, *cuts]):
            assert stop > first
            assert sums[index][stop] - sums[index][first] >= shortest * (1 - 1e-6)


@given(st.lists(st.floats(0.0, 50.0), min_size=2, max_size=12), st.integers(1, 4))
def test_a_set_that_reaches_every_lane_makes_them_end_together(others, each):
    """A set of fine documents with shards on all lanes evens them out to a document each."""
    lanes, documents, document = len(others), 600, 0.1
    sums = running(Even(each=document, number=lanes * each * documents))
    sizes = {0: [(number % lanes, document * documents) for number in range(lanes * each)]}
    before = [other + each * document * documents for other in others]
    cuts = levelled(sizes, {0: sums}, before, [1.0] * lanes, 0.0).get(0)
    after = before if cuts is None else list(others)
    for number, (first, stop) in enumerate(pairwise([0, *(cuts or [])])):
        after[number % lanes] += sums[stop] - sums[first]
    assert max(after) - min(after) <= 2 * document * each + 1e-6


def crew_of(sets, on, *, most, cores=1, load_seconds=0.0, shard_overhead_seconds=0.05):
    """A plan, and when it ends with how many workers."""
    costs = {"load_seconds": load_seconds, "shard_overhead_seconds": shard_overhead_seconds}
    made = plan(Problem(sets, on, cpu_slots=most * cores, **costs))
    alike = [Lane(name=lane.name, node=lane.node) for lane in on]
    return made, lambda workers: end_of(made, Problem(sets, alike, cpu_slots=workers * cores, **costs))


@settings(max_examples=80)
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
    assert end(chosen) <= SLACK * end(max(1, min(most, int(seconds / WORKER_SECONDS)))) + 1e-9
    assert scored or end(1) == end(most)


EACH = {
    leaves: predict_metric("unheard-of", 8, False, Learnt([]), together=leaves).seconds for leaves in (2, 57)
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


@settings(max_examples=40)
@given(sets=work_sets(), costs=fixed, slots=st.sampled_from([1, 2, 16]))
def test_the_end_is_the_planners(sets, costs, slots):
    """On lanes that are free at once, it predicts what the planner does."""
    known = {name: costs[name] for name in ("load_seconds", "shard_overhead_seconds")}
    made, end = crew_of(sets, alike(3), most=slots, **known)
    assert abs(end(slots) - made.makespan_seconds) <= 0.02 * made.makespan_seconds + 1e-6
