"""Instances: what is accepted, refused and planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from support.problems import instance_text, instances

from coordinator.planning.instance import plan_instance, what_if
from coordinator.planning.model import Lane, Problem, WorkSet
from coordinator.planning.planner import plan

ONE = {"name": "a", "docs": 1, "gpu_seconds": 1}


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


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ('{"schema_version": 1,\n "gpus": }', "line 2"),
        ("[]", "instance"),
        ("[" * 100_000, "nested"),
        (instance_text(schema_version=2), "schema_version"),
        (instance_text(gpus=0), "gpus"),
        (instance_text(gpus=1.5), "gpus"),
        (instance_text(load_seconds=float("nan")), "load_seconds"),
        (instance_text(gpu=3), "gpu"),
        (instance_text(**{"g\npu": 3}), r"^'g\\npu': "),
        (instance_text(load_seconds=1e300), "load_seconds"),
        (instance_text(load_seconds=10**400), "load_seconds"),
        (instance_text(datasets=[]), "datasets"),
        (instance_text(datasets=[{"name": "a", "docs": 1}]), "datasets.0.gpu_seconds"),
        (instance_text(datasets=[ONE | {"docs": 0}]), "datasets.0.docs"),
        (instance_text(datasets=[ONE | {"metric": "sum"}]), "datasets.0.metric"),
        (instance_text(datasets=[ONE] * 2), "twice"),
        (instance_text(datasets=[ONE | {"docs": 10**10}]), "docs"),
        (instance_text(datasets=[ONE | {"sigma": 300}]), "datasets.0.sigma"),
    ],
)
def test_what_is_no_instance_is_refused_with_its_place(bad, place):
    """ValueError names the line or the field."""
    with pytest.raises(ValueError, match=place) as refused:
        plan_instance(bad)
    assert "\n" not in str(refused.value)


def test_what_if_says_what_binds():
    """More nodes shorten the run until the judge's tail binds; the sentence says from where on."""
    got = what_if(instance_text(), [1, 2, 8])
    spans = [row["planned_makespan_seconds"] for row in got["rows"]]
    assert spans == sorted(spans, reverse=True)
    assert [row["gpus"] for row in got["rows"]] == [2, 4, 16]
    assert got["rows"][0]["binding"] == "GPU time"
    assert got["rows"][-1]["binding"] == "the tail of judge"
    assert got["sentence"].endswith("with more than 2 nodes the limit is the tail of judge, not GPU time")


def test_a_plan_does_not_depend_on_the_interpreters_hash_seed():
    """Two interpreters with other hash seeds print the same plan."""
    code = (
        "import json, sys; from coordinator.planning.instance import plan_instance;"
        "print(json.dumps(plan_instance(sys.argv[1])))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code, instance_text()],
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
    made = plan(Problem(sets, on, load_seconds=20.0, shard_overhead_seconds=0.05, cpu_slots=1200))
    assert all(lane.shards for lane in made.lanes)
    assert sum(len(lane.shards) for lane in made.lanes) <= 120_000
    assert made.makespan_seconds <= made.lower_bound_seconds + 2 * 36.05
