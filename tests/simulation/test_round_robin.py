"""Laws of the policy of Hu et al., NSDI 2024, section 6.2: how sets are split, batched, sorted and dealt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from simulation.policies import simulate_instance
from simulation.sampled_times import Predicted, Truth
from simulation.simulate import simulate
from support.problems import fixed, instance_text, lanes, work_sets

from coordinator.planning.instance import parse_instance
from coordinator.planning.model import Lane, Problem, WorkSet
from coordinator.planning.planner import PLANNERS
from coordinator.planning.round_robin import SMALL, plan_round_robin

TWO = [Lane(name=name, node="n") for name in "ab"]


def dealt(made):
    """(lane number, shard) of all shards, by rank."""
    shards = ((number, shard) for number, lane in enumerate(made.lanes) for shard in lane.shards)
    return sorted(shards, key=lambda one: one[1].rank)


def named(**seconds):
    """Sets of ten equal batches, by GPU and metric seconds."""
    return [
        WorkSet(name=name, batch_seconds=[gpu / 10] * 10, metric_seconds=metric)
        for name, (gpu, metric) in seconds.items()
    ]


def test_large_sets_are_split_small_ones_batched_and_long_metrics_go_first():
    """8 s + 2 + 1 + 0.4 of GPU on 2 lanes, a share of 5.7 s: big is cut in two; code's metric is long and goes first; s and t
    are below a quarter of the share and fit into one together; t's own metric is too short to count. Queue: code, big, big, s with t."""
    sets = named(big=(8.0, 0.0), code=(2.0, 50.0), s=(1.0, 0.0), t=(0.4, 1.0))
    made = plan_round_robin(Problem(sets, TWO, load_seconds=1.0))
    whole = [(0, "code", 0, 10), (1, "big", 0, 5), (0, "big", 5, 10), (1, "s", 0, 10), (1, "t", 0, 10)]
    assert [(lane, s.set, s.first_batch, s.end_batch) for lane, s in dealt(made)] == whole


def test_the_planned_end_is_that_of_lanes_which_do_not_steal():
    """a: load 1, code 2 + big 4 and two overheads of 0.5: 8.0; code's metric of 50 s starts at 3.5 and ends at 53.5."""
    sets = named(big=(8.0, 0.0), code=(2.0, 50.0))
    made = plan_round_robin(Problem(sets, TWO, load_seconds=1.0, shard_overhead_seconds=0.5))
    assert made.makespan_seconds == pytest.approx(53.5)
    assert made.gpu_seconds == pytest.approx(8.0 + 5.5)


@settings(max_examples=120)
@given(work_sets(), lanes(), fixed)
def test_a_deal_is_whole_goes_round_the_lanes_and_runs_as_planned(sets, on, costs):
    """Each batch is dealt once: the shards of a set, in order, are its batches; lanes stand as given, each by rank.

    Small sets stand in batches of at most a quarter share, each on one lane; every other shard is a unit of its own, at most
    one batch longer than an even share. Units stand by metric where that is long, then by GPU seconds; lanes take turns.
    At sigma 0 the simulator runs the plan shard by shard: each on its lane, in its order, to the planned end.
    """
    made = plan_round_robin(Problem(sets, on, **costs))
    assert [lane.lane for lane in made.lanes] == [lane.name for lane in on]
    shards = [shard for _, shard in dealt(made)]
    assert [shard.rank for shard in shards] == list(range(len(shards)))
    for lane in made.lanes:
        assert [s.rank for s in lane.shards] == sorted(s.rank for s in lane.shards)
    for work in sets:
        spans = sorted((s.first_batch, s.end_batch) for s in shards if s.set == work.name)
        assert (spans[0][0], spans[-1][1]) == (0, len(work.batch_seconds))
        assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert made.makespan_seconds >= made.lower_bound_seconds * (1 - 1e-9)

    known = {work.name: work for work in sets}
    share = sum(sum(work.batch_seconds) for work in sets) / len(on)
    units = []
    for lane, shard in dealt(made):
        work = known[shard.set]
        metric = work.metric_seconds if work.metric_seconds >= SMALL * share else 0.0
        small = max(sum(work.batch_seconds), work.metric_seconds) < SMALL * share
        if small and units and units[-1]["small"] and units[-1]["lane"] == lane and len(on) > 1:
            units[-1]["seconds"] += shard.seconds
        else:
            assert small or shard.seconds <= share + max(work.batch_seconds) + 1e-6
            units.append({"lane": lane, "small": small, "metric": metric, "seconds": shard.seconds})
    if len(on) > 1:
        assert [unit["lane"] for unit in units] == [number % len(on) for number in range(len(units))]
        assert all(unit["seconds"] <= SMALL * share + 1e-6 for unit in units if unit["small"])
        keys = [(-unit["metric"], -unit["seconds"]) for unit in units]
        assert all(before[0] <= after[0] + 1e-9 for before, after in pairwise(keys))
        assert all(a[1] <= b[1] + 1e-6 for a, b in pairwise(keys) if a[0] == b[0])

    run = simulate(made, on, Truth(Predicted(sets), sigma=0.0, seed=0), steal=False, **costs)
    ran = {lane.lane: [] for lane in made.lanes}
    for span in sorted(run.spans, key=lambda span: span.start):
        ran[span.lane].append(span.shard)
    assert ran == {lane.lane: list(lane.shards) for lane in made.lanes}
    assert max((span.end for span in run.spans), default=0.0) <= made.makespan_seconds * (1 + 1e-9)


def test_the_simulator_runs_the_plan_that_an_evaluation_is_given():
    """`simulate --policy round-robin` is the evaluations' own planner, its lanes' queues and ranks, run without stealing;
    `paper` is later by the tokenization that each of its trials pays."""
    sets = [
        {"name": f"set{n}", "docs": 50, "gpu_seconds": 30.0 * n + 1, "metric_seconds": 9.0 - n}
        for n in range(8)
    ]
    text = instance_text(gpus=3, shard_overhead_seconds=0.1, staging_seconds=4.0, datasets=sets)
    instance = parse_instance(text)
    costs = {"load_seconds": 20.0, "shard_overhead_seconds": 0.1, "cpu_slots": 4, "stage_seconds": 4.0}
    made = PLANNERS["round-robin"](Problem(instance.sets(), instance.lanes(), **costs))
    truth = Truth(Predicted(instance.sets()), sigma=0.3, seed=0)
    run = simulate(made, instance.lanes(), truth, steal=False, **costs)

    def median(policy):
        return simulate_instance(text, policy, 0.3, 1)["makespan_seconds"]["median"]

    cached = median("round-robin")
    assert cached == run.makespan_seconds
    assert cached < median("paper") <= cached + 45.0 + 1e-6
