"""Simulated time equals hand-worked cases, no run or policy beats its bound, and a run is a function of its seeds."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.policies import POLICIES, quantile, simulate_instance
from simulation.sampled_times import Predicted, Truth
from simulation.simulate import simulate
from support.problems import alike, fixed, instance_text, instances, lanes, work_sets

from coordinator.planning.batch_sums import Even
from coordinator.planning.cpu_stage import divided, metrics_end
from coordinator.planning.instance import plan_instance
from coordinator.planning.make_plan import SHARD_OVERHEAD_SECONDS
from coordinator.planning.model import Lane, LanePlan, Plan, PlannedShard, Problem, WorkSet
from coordinator.planning.planner import plan

SIMULATE = Path(__file__).parents[2] / "scripts" / "simulate"
FEW = settings(max_examples=80)


LANE_RUNS = {
    # both loaded at 10; a runs rank 0 until 31, b rank 1 until 41, a rank 2 from 31 until 40. 58 s of inference; held: a
    # 10..40 and b 10..41, and 10 s of load each
    "an empty lane steals the lowest rank of the fullest lane": (
        ({"batch_seconds": [20.0, 30.0, 8.0]}, {"a": [0, 1, 2], "b": []}),
        ("a0 10 31, b1 10 41, a2 31 40", 41.0, 58 / 81),
    ),
    # c steals from b (50 s left), not from a (30 s left), although a's has the lower rank
    "a thief takes from the lane with most seconds left": (
        ({"batch_seconds": [5.0, 30.0, 5.0, 50.0]}, {"a": [0, 1], "b": [2, 3], "c": []}),
        ("a0 10 16, b2 10 16, c3 10 61, a1 16 47", 61.0, 90 / 124),
    ),
    # ready at 40, load 10: from 50 on, 20 s of work at speed 2 and 1 s overhead
    "a late lane starts when it arrives, and speed counts": (
        ({"batch_seconds": [20.0]}, {"a": [0]}, {"ready_at_seconds": 40.0, "speed": 2.0}),
        ("a0 50 61", 61.0, 10 / 21),
    ),
    "a score waits for the whole set": (
        ({"batch_seconds": [10.0, 9.0], "metric_seconds": 7.0}, {"a": [0, 1]}),
        ("a0 10 21, a1 21 31", 38.0, 19 / 31),
    ),
    # 10 s of CPU from 21 on, then the 9 s of the second shard from 31 on
    "an execute waits for its shard alone": (
        (
            {
                "batch_seconds": [10.0, 9.0],
                "metric_seconds": 19.0,
                "metric": "execute",
                "metric_parallelism": 1,
            },
            {"a": [0, 1]},
        ),
        ("a0 10 21, a1 21 31", 40.0, 19 / 31),
    ),
}


@pytest.mark.parametrize(("given", "wanted"), LANE_RUNS.values(), ids=LANE_RUNS)
def test_lanes_pull_and_steal_and_metrics_follow_as_by_hand(given, wanted):
    """Of one set, whose batches are its shards by rank, on lanes with 10 s of load and 1 s of overhead, and two CPU slots:
    lane, rank, start and end of each shard; the makespan; inference over the seconds that GPUs are held.
    """
    row, lanes, *more = given
    work = WorkSet(name="x", **row)
    plans = [
        LanePlan(
            lane=lane,
            node="n",
            shards=tuple(
                PlannedShard(set="x", first_batch=n, end_batch=n + 1, seconds=work.batch_seconds[n], rank=n)
                for n in mine
            ),
        )
        for lane, mine in lanes.items()
    ]
    made = Plan(lanes=tuple(plans), makespan_seconds=0.0, lower_bound_seconds=0.0, gpu_seconds=0.0)
    on = [Lane(name=lane, node="n", **(more[0] if more else {})) for lane in lanes]
    truth = Truth(Predicted([work]), sigma=0.0, seed=0)
    got = simulate(made, on, truth, load_seconds=10.0, shard_overhead_seconds=1.0, cpu_slots=2)
    spans = [f"{span.lane}{span.shard.rank} {span.start:g} {span.end:g}" for span in got.spans]
    assert (", ".join(spans), got.makespan_seconds) == wanted[:2]
    assert got.busy_fraction == pytest.approx(wanted[2])


@pytest.mark.parametrize(
    ("jobs", "parallelism", "end"),
    [
        ([(0.0, 5.0, 0), (1.0, 4.0, 1), (2.0, 3.0, 2)], [9, 9, 9], 8.0),
        ([(0.0, 10.0, 0), (0.0, 10.0, 0), (1.0, 3.0, 1)], [1, 9], 20.0),
        ([(0.0, 10.0, 0), (0.5, 1.0, 0), (1.0, 10.5, 1)], [1, 9], 11.5),
    ],
)
def test_metric_jobs_are_served_in_order_on_two_slots(jobs, parallelism, end):
    """(ready at, seconds, set) each. A set that may run one job at once leaves the other slot to others."""
    assert metrics_end(jobs, parallelism, 2) == pytest.approx(end)


@pytest.mark.parametrize(
    ("at_once", "documents", "grain", "jobs"),
    [(3, 9, 0.1, [(5.0, 4.0, 0)] * 3), (3, 1, 0.1, [(5.0, 12.0, 0)]), (9, 9, 6.0, [(5.0, 6.0, 0)] * 2)],
)
def test_a_shards_cpu_work_is_dealt_out_up_to_what_may_run_at_once(at_once, documents, grain, jobs):
    """12 s, 3 at once: three jobs of 4 s; one document is one job; no piece below the grain."""
    assert divided(5.0, 12.0, 0, at_once=at_once, documents=documents, grain=grain) == jobs


@FEW
@given(work_sets(), lanes(), fixed, st.sampled_from([0.0, 0.3, 0.6]), st.integers(0, 1000))
def test_every_shard_runs_once_and_no_run_beats_the_bound_of_its_own_truth(sets, on, costs, sigma, seed):
    """Whatever was drawn: pulling and stealing lose no shard and run none twice; no lane runs two at a time; the makespan
    is not below the bound of the drawn seconds."""
    made = plan(Problem(sets, on, **costs))
    got = simulate(made, on, Truth(Predicted(sets), sigma=sigma, seed=seed), **costs)
    assert got.makespan_seconds >= got.lower_bound_seconds * (1 - 1e-9)
    planned = sorted(one.rank for lane in made.lanes for one in lane.shards)
    assert sorted(span.shard.rank for span in got.spans) == planned
    for lane in on:
        mine = sorted((span.start, span.end) for span in got.spans if span.lane == lane.name)
        assert all(before[1] <= after[0] for before, after in pairwise(mine))


@FEW
@given(work_sets(), st.integers(1, 8), fixed, st.integers(0, 1000))
def test_no_lane_idles_while_shards_wait(sets, gpus, costs, seed):
    """Lanes end within one shard of each other: a wrong prior costs a shard, never a GPU."""
    on = alike(gpus)
    made = plan(Problem(sets, on, **costs))
    got = simulate(made, on, Truth(Predicted(sets), sigma=0.6, seed=seed), **costs)
    last_start = max(span.start for span in got.spans)
    ends = [max((span.end for span in got.spans if span.lane == lane.name), default=0.0) for lane in on]
    assert all(end == 0.0 or end >= last_start for end in ends)


@pytest.mark.long
@FEW
@given(st.integers(2, 16), st.integers(0, 1000))
def test_stealing_never_starves_a_long_tail(gpus, seed):
    """With sigma 0.6 the last shard before the longest CPU tail starts in the first half of the run."""
    tail = {"metric_seconds": 400.0, "metric": "execute", "metric_parallelism": 1}
    bulk = Even(each=1.0, number=150 * gpus)
    sets = [WorkSet(name=f"bulk{index}", batch_seconds=bulk, metric_seconds=1.0) for index in range(4)]
    sets.append(WorkSet(name="judge", batch_seconds=[1.0] * 60, **tail))
    costs = {"load_seconds": 10.0, "shard_overhead_seconds": 0.5, "cpu_slots": 4}
    made = plan(Problem(sets, alike(gpus), **costs))
    got = simulate(made, alike(gpus), Truth(Predicted(sets), sigma=0.6, seed=seed), **costs)
    judged = [span.start for span in got.spans if span.shard.set == "judge"]
    assert max(judged) <= max(span.end for span in got.spans) / 2


def test_a_draw_is_the_same_however_a_set_is_cut():
    """The seconds of parts add up to those of the whole, and a seed draws the same again."""
    predicted = Predicted([WorkSet(name="x", batch_seconds=[1.0, 2.0, 3.0] * 20, metric_seconds=5.0)])
    truth, again = (Truth(predicted, sigma=0.5, seed=7) for _ in range(2))
    parts = sum(truth.gpu(0, start, start + 7) for start in range(0, 56, 7)) + truth.gpu(0, 56, 60)
    assert parts == pytest.approx(truth.gpu_total(0))
    assert again.gpu_total(0) == truth.gpu_total(0)
    assert Truth(predicted, sigma=0.0, seed=7).gpu(0, 3, 9) == pytest.approx(12.0)


@pytest.mark.parametrize("width", [2, 8])
def test_a_short_run_whose_prior_is_ten_times_off_ends_together(width):
    """Sets of seconds, cut by what a shard costs besides, take ten times as long: the end is still
    shared, in the median of 20 draws to 20 % of the bound.
    """
    known, real = (
        [
            WorkSet(name=str(index), batch_seconds=[times * seconds] * number)
            for index, (seconds, number) in enumerate([(0.02, 60), (0.03, 15), (0.2, 15), (0.2, 11)])
        ]
        for times in (1, 10)
    )
    costs = {"load_seconds": 7.0, "shard_overhead_seconds": SHARD_OVERHEAD_SECONDS, "cpu_slots": 2}
    on = alike(width)
    made = plan(Problem(known, on, **costs))
    truths = [Truth(Predicted(real), sigma=0.4, seed=seed) for seed in range(20)]
    runs = [simulate(made, on, truth, **costs) for truth in truths]
    assert median(each.makespan_seconds / each.lower_bound_seconds for each in runs) <= 1.2


# --- policies ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(instances(), st.sampled_from(POLICIES), st.sampled_from([0.0, 0.3, None]))
def test_no_policy_beats_the_bound(instance, policy, sigma):
    """The bound is never beaten, by any policy, at any spread; GPUs are never busier than held. The same seeds give the
    same figures."""
    got = simulate_instance(instance, policy, sigma, 3)
    assert got["makespan_seconds"]["median"] >= got["lower_bound_seconds"] * (1 - 1e-9)
    assert got["makespan_seconds"]["p95"] >= got["makespan_seconds"]["median"]
    assert got["ratio"]["median"] >= 1 - 1e-9
    assert 0.0 <= got["gpu_busy_fraction"] <= 1.0 + 1e-9
    assert simulate_instance(instance, policy, sigma, 3) == got


def test_evalspan_ends_as_planned_and_no_baseline_is_faster_here():
    """At sigma 0 the makespan is not above the planned one, and the bounds are equal. On an instance with a long tail and
    a large set every baseline takes longer, and longer still where the node is always full of readers."""

    def span(policy, sigma, seeds, **how):
        return simulate_instance(instance_text(), policy, sigma, seeds, **how)["makespan_seconds"]["median"]

    planned = plan_instance(instance_text())
    ours = simulate_instance(instance_text(), "evalspan", 0.0, 1)
    assert ours["makespan_seconds"]["median"] <= planned["planned_makespan_seconds"] * 1.001
    assert ours["lower_bound_seconds"] == pytest.approx(planned["lower_bound_seconds"])
    assert all(span(policy, 0.3, 5) > span("evalspan", 0.3, 5) for policy in POLICIES[:-1])
    assert span("per-dataset", 0.0, 1, contention="full-node") >= span("per-dataset", 0.0, 1)


@pytest.mark.parametrize(
    "asked", [("fifo", 0.3, 1), ("paper", -1.0, 1), ("paper", 300.0, 1), ("paper", 0.3, 0)]
)
def test_what_cannot_be_simulated_is_refused(asked):
    """Unknown policies, spreads below 0 and no seed: ValueError."""
    with pytest.raises(ValueError):
        simulate_instance(instance_text(), *asked)


def test_a_quantile_is_one_of_the_values():
    """p95 of 20 values is the 19th, of one value that one."""
    assert (quantile(list(range(1, 21)), 0.95), quantile([7.0], 0.95)) == (19, 7.0)


def test_the_command_prints_what_the_function_returns(tmp_path):
    """`scripts/simulate --json`; what is no instance is refused in one line."""
    instance = tmp_path / "i.json"
    instance.write_text(instance_text())
    words = [SIMULATE, "--instance", instance, "--policy", "paper", "--sigma", "0.3"]
    done = subprocess.run([*words, "--seeds", "3", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == simulate_instance(instance_text(), "paper", 0.3, 3)
    instance.write_text("{}")
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert f"error: {instance}: schema_version: Field required" in refused.stderr
