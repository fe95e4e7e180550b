"""Simulated time equals hand-worked cases, no run or policy beats its bound, and a run is a function of its seeds."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.baselines import (
    Costs,
    opencompass_num_worker,
    per_dataset,
    run_tasks,
)
from simulation.policies import POLICIES, simulate_instance
from simulation.sampled_times import Predicted, Truth
from simulation.simulate import simulate
from support.drawn import some
from support.problems import alike, fixed, instance_text, instances, lanes, work_sets

from coordinator.decide.planning.instance import DataSet, parse_instance, plan_instance
from coordinator.decide.planning.make_plan import SHARD_OVERHEAD_SECONDS
from coordinator.decide.planning.model import Even, Lane, LanePlan, Plan, PlannedShard, Problem, WorkSet
from coordinator.decide.planning.planner import PLANNERS, SMALL_TAIL, plan, plan_round_robin

SIMULATE = Path(__file__).parents[2] / "scripts" / "simulate"
FEW = some(12)


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
@some(8)
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


@some(10)
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
    a large set every baseline takes longer."""

    def span(policy):
        return simulate_instance(instance_text(), policy, 0.3, 5)["makespan_seconds"]["median"]

    planned = plan_instance(instance_text())
    ours = simulate_instance(instance_text(), "evalspan", 0.0, 1)
    assert ours["makespan_seconds"]["median"] <= planned["planned_makespan_seconds"] * 1.001
    assert ours["lower_bound_seconds"] == pytest.approx(planned["lower_bound_seconds"])
    assert all(span(policy) > span("evalspan") for policy in POLICIES[:-1])


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


# --- the policy of Hu et al., NSDI 2024, section 6.2: how sets are split, batched, sorted and dealt ------------------

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


@some(20)
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
        metric = work.metric_seconds if work.metric_seconds >= SMALL_TAIL * share else 0.0
        small = max(sum(work.batch_seconds), work.metric_seconds) < SMALL_TAIL * share
        if small and units and units[-1]["small"] and units[-1]["lane"] == lane and len(on) > 1:
            units[-1]["seconds"] += shard.seconds
        else:
            assert small or shard.seconds <= share + max(work.batch_seconds) + 1e-6
            units.append({"lane": lane, "small": small, "metric": metric, "seconds": shard.seconds})
    if len(on) > 1:
        assert [unit["lane"] for unit in units] == [number % len(on) for number in range(len(units))]
        assert all(unit["seconds"] <= SMALL_TAIL * share + 1e-6 for unit in units if unit["small"])
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


# --- baselines follow their sources: hand-worked partitions and runs -------------------------------------------------

num_worker_4, num_worker_8 = (partial(opencompass_num_worker, workers=workers) for workers in (4, 8))


def data_set(name, docs):
    return DataSet(name=name, docs=docs, gpu_seconds=1.0, metric_seconds=0.0)


def sets(text):
    """NAME:DOCUMENTS each."""
    return [data_set(name, int(docs)) for name, docs in (word.split(":") for word in text.split())]


def ran(sets, costs, gpus, gpus_per_node):
    """A job a set, in order: sets of 10 documents, by (GPU, metric) seconds; predictions are right. The truth, the jobs."""
    rows = {
        name: {"batch_seconds": [gpu / 10] * 10, "metric_seconds": metric}
        for name, (gpu, metric) in zip("abc", sets, strict=False)
    }
    known = Truth(Predicted([WorkSet(name=name, **row) for name, row in rows.items()]), sigma=0.0, seed=0)
    tasks = per_dataset([data_set(name, 10) for name in rows])
    return known, run_tasks(tasks, known, Costs(**costs), gpus=gpus, gpus_per_node=gpus_per_node)


PARTITIONS = {
    # a: step 25, 4 pieces; b: step max(10, 16) = 16, 3 pieces; c whole; to buckets 0 1 2 3 0 1 2 3
    "num-worker cuts each set and deals all pieces round-robin": (
        num_worker_4,
        "a:100 b:40 c:16",
        "a 0 25, b 0 16 | a 25 50, b 16 32 | a 50 75, b 32 40 | a 75 100, c 0 16",
    ),
    "num-worker leaves empty buckets out": (num_worker_8, "a:10", "a 0 10"),
}


@pytest.mark.parametrize(("partition", "text", "tasks"), PARTITIONS.values(), ids=PARTITIONS)
def test_partitioners_follow_their_sources_to_the_document(partition, text, tasks):
    """Each task's pieces, in order: set, first document, end."""
    made = [", ".join(" ".join(map(str, piece)) for piece in task) for task in partition(sets(text))]
    assert " | ".join(made) == tasks


RUNS = {  # GPU and metric seconds; costs; GPUs, of each node; each job's end, and seconds with its GPU held
    # two read 4 s alone, 8 s together; a third, alone on the other node, reads in 4
    "jobs that load together share the NIC": (
        ([(10, 0)] * 3, {"preprocess": 3, "storage": 4, "load": 2}, 3, 2),
        [(23, 23), (23, 23), (19, 19)],
    ),
    # a reads alone until 1, then 3 s more in 6; b has read 3 of its 4 then, the last alone
    "a reader that comes later slows the first only while both read": (
        ([(10, 0)] * 2, {"storage": 4, "gap": 1}, 2, 2),
        [(17, 17), (18, 17)],
    ),
    "per-dataset keeps the GPU while the metric runs, first come, first served": (
        ([(10, 5), (20, 7)], {"preprocess": 1, "metric_slots": 1}, 1, 1),
        [(16, 16), (44, 28)],
    ),
    # inference ends at 10 and 20; the second's metric and GPU wait until 60
    "metrics on GPUs still need a CPU slot": (
        ([(10, 50), (20, 7)], {"metric_slots": 1}, 2, 2),
        [(60, 60), (67, 67)],
    ),
    "at most so many jobs run at once": (
        ([(10, 0), (20, 0), (5, 0)], {"running": 2}, 3, 8),
        [(10, 10), (20, 20), (15, 5)],
    ),
}


@pytest.mark.parametrize(("work", "jobs"), RUNS.values(), ids=RUNS)
def test_jobs_hold_gpus_links_and_slots_as_long_as_by_hand(work, jobs):
    """Ends, seconds held and seconds of inference of each job."""
    _, ended = ran(*work)
    assert [(job.end, job.held) for job in ended] == [pytest.approx(each) for each in jobs]
    assert [job.busy for job in ended] == pytest.approx([gpu for gpu, _ in work[0]])
