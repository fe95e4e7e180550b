"""Instances: what is accepted, refused, planned and simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.planner import Lane, WorkSet, plan
from coordinator.simulation.commands import POLICIES, plan_instance, quantile, simulate_instance, what_if
from coordinator.simulation.instance import parse_instance

BASE = {
    "schema_version": 1,
    "gpus": 4,
    "gpus_per_node": 2,
    "cpu_slots": 4,
    "load_seconds": 20.0,
    "shard_overhead_seconds": 1.0,
    "storage_seconds_alone": 4.5,
    "staging_seconds": 4.5,
    "preprocess_seconds": 45.0,
    "datasets": [
        {"name": "mmlu_5shot", "docs": 1400, "gpu_seconds": 4493.4, "metric_seconds": 4.0, "metric": "score"},
        {
            "name": "judge",
            "docs": 80,
            "gpu_seconds": 200,
            "metric_seconds": 900.0,
            "metric": "execute",
            "metric_parallelism": 1,
            "sigma": 0.5,
        },
        {"name": "squad2", "docs": 900, "gpu_seconds": 300.0},
    ],
}


def text(**changes):
    return json.dumps(BASE | changes)


@st.composite
def instances(draw):
    """Instances of a few sets, every optional cost present or absent."""
    data_sets = [
        {
            "name": f"set{index}",
            "docs": draw(st.integers(1, 60)),
            "gpu_seconds": draw(st.floats(0, 500)),
            "metric_seconds": draw(st.floats(0, 500)),
            "metric": draw(st.sampled_from(["score", "execute"])),
            "metric_parallelism": draw(st.integers(1, 5)),
            "labels": draw(st.integers(0, 5)),
        }
        for index in range(draw(st.integers(1, 10)))
    ]
    return json.dumps(
        BASE
        | {
            "gpus": draw(st.integers(1, 10)),
            "gpus_per_node": draw(st.integers(1, 4)),
            "cpu_slots": draw(st.integers(1, 6)),
            "datasets": data_sets,
        }
    )


@settings(max_examples=60)
@given(instances(), st.sampled_from(POLICIES), st.sampled_from([0.0, 0.3, None]))
def test_no_policy_beats_the_bound(instance, policy, sigma):
    """The bound is never beaten, by any policy, at any spread; GPUs are never busier than held."""
    got = simulate_instance(instance, policy, sigma, 3)
    assert got["makespan_seconds"]["median"] >= got["lower_bound_seconds"] * (1 - 1e-9)
    assert got["makespan_seconds"]["p95"] >= got["makespan_seconds"]["median"]
    assert got["ratio"]["median"] >= 1 - 1e-9
    assert 0.0 <= got["gpu_busy_fraction"] <= 1.0 + 1e-9


@settings(max_examples=60)
@given(instances())
def test_every_document_stands_in_exactly_one_shard(instance):
    """Over all lanes, the shards of a data set are its documents, each once."""
    got = plan_instance(instance)
    given_instance = json.loads(instance)
    assert [lane["gpu"] for lane in got["lanes"]] == list(range(given_instance["gpus"]))
    for data_set in given_instance["datasets"]:
        documents = [
            document
            for lane in got["lanes"]
            for shard in lane["shards"]
            if shard["dataset"] == data_set["name"]
            for document in range(shard["start_doc"], shard["end_doc"])
        ]
        assert sorted(documents) == list(range(data_set["docs"]))
    assert got["planned_makespan_seconds"] >= got["lower_bound_seconds"] * (1 - 1e-9)


def test_without_error_the_run_ends_as_planned():
    """At sigma 0 the simulated makespan is not above the planned one, and the bounds are equal."""
    planned = plan_instance(text())
    run = simulate_instance(text(), "evalspan", 0.0, 1)
    assert run["makespan_seconds"]["median"] <= planned["planned_makespan_seconds"] * 1.001
    assert run["lower_bound_seconds"] == pytest.approx(planned["lower_bound_seconds"])


def test_a_simulation_is_a_function_of_its_seeds():
    """The same seeds give the same figures."""
    for policy in POLICIES:
        assert simulate_instance(text(), policy, 0.6, 3) == simulate_instance(text(), policy, 0.6, 3)


def test_evalspan_is_no_slower_than_any_baseline_here():
    """On an instance with a long tail and a large set, every baseline takes longer."""
    ours = simulate_instance(text(), "evalspan", 0.3, 5)["makespan_seconds"]["median"]
    for policy in POLICIES[:-1]:
        assert simulate_instance(text(), policy, 0.3, 5)["makespan_seconds"]["median"] > ours


def test_a_full_node_always_reading_is_never_faster():
    """The pessimistic reading of contention is at least as slow as shared reads."""
    overlap = simulate_instance(text(), "per-dataset", 0.0, 1)
    full = simulate_instance(text(), "per-dataset", 0.0, 1, contention="full-node")
    assert full["makespan_seconds"]["median"] >= overlap["makespan_seconds"]["median"]


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ('{"schema_version": 1,\n "gpus": }', "line 2"),
        ("[]", "instance"),
        ("[" * 100_000, "nested"),
        (text(schema_version=2), "schema_version"),
        (text(gpus=0), "gpus"),
        (text(gpus=1.5), "gpus"),
        (text(load_seconds=float("nan")), "load_seconds"),
        (text(gpu=3), "gpu"),
        (text(**{"g\npu": 3}), r"^'g\\npu': "),
        (text(load_seconds=1e300), "load_seconds"),
        (text(load_seconds=10**400), "load_seconds"),
        (text(datasets=[]), "datasets"),
        (text(datasets=[{"name": "a", "docs": 1}]), "datasets.0.gpu_seconds"),
        (text(datasets=[{"name": "a", "docs": 0, "gpu_seconds": 1}]), "datasets.0.docs"),
        (text(datasets=[{"name": "a", "docs": 1, "gpu_seconds": 1, "metric": "sum"}]), "datasets.0.metric"),
        (text(datasets=[{"name": "a", "docs": 1, "gpu_seconds": 1}] * 2), "twice"),
        (text(datasets=[{"name": "a", "docs": 10**10, "gpu_seconds": 1}]), "docs"),
        (text(datasets=[{"name": "a", "docs": 1, "gpu_seconds": 1, "sigma": 300}]), "datasets.0.sigma"),
    ],
)
def test_what_is_no_instance_is_refused_with_its_place(bad, place):
    """ValueError names the line or the field."""
    with pytest.raises(ValueError, match=place) as refused:
        plan_instance(bad)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("policy", "sigma", "seeds"),
    [("fifo", 0.3, 1), ("paper", -1.0, 1), ("paper", 300.0, 1), ("paper", 0.3, 0)],
)
def test_what_cannot_be_simulated_is_refused(policy, sigma, seeds):
    """Unknown policies, spreads below 0 and no seed: ValueError."""
    with pytest.raises(ValueError):
        simulate_instance(text(), policy, sigma, seeds)


def test_what_if_says_what_binds():
    """More nodes shorten the run until the judge's tail binds; the sentence says from where on."""
    got = what_if(text(), [1, 2, 8])
    spans = [row["planned_makespan_seconds"] for row in got["rows"]]
    assert spans == sorted(spans, reverse=True)
    assert [row["gpus"] for row in got["rows"]] == [2, 4, 16]
    assert got["rows"][0]["binding"] == "GPU time"
    assert got["rows"][-1]["binding"] == "the tail of judge"
    assert got["sentence"].endswith("with more than 2 nodes the limit is the tail of judge, not GPU time")


def test_a_quantile_is_one_of_the_values():
    """p95 of 20 values is the 19th, of one value that one."""
    assert quantile(list(range(1, 21)), 0.95) == 19
    assert quantile([7.0], 0.95) == 7.0


def test_parsing_gives_one_batch_a_document():
    """Documents of a set are equal, and their seconds add up to the set's."""
    work = parse_instance(text()).sets()[1]
    assert len(work.batch_seconds) == 80
    assert sum(work.batch_seconds) == pytest.approx(200.0)


def test_a_plan_does_not_depend_on_the_interpreters_hash_seed():
    """Two interpreters with other hash seeds print the same plan."""
    code = (
        "import json, sys; from coordinator.simulation.commands import plan_instance;"
        "print(json.dumps(plan_instance(sys.argv[1])))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code, text()],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_a_plan_for_thousands_of_gpus_stays_within_its_budget_of_shards():
    """20,000 documents, 600 sets, 4,704 GPUs: every lane works, within the budget of shards."""
    sets = [
        WorkSet(name=str(index), batch_seconds=[30.0 + index % 7] * 40, metric_seconds=index % 11)
        for index in range(600)
    ]
    on = [Lane(name=str(index), node=str(index // 8)) for index in range(4704)]
    made = plan(sets, on, load_seconds=20.0, shard_overhead_seconds=0.05, cpu_slots=1200)
    assert all(lane.shards for lane in made.lanes)
    assert sum(len(lane.shards) for lane in made.lanes) <= 120_000
    assert made.makespan_seconds <= made.lower_bound_seconds + 2 * 36.05
