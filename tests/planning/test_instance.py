"""Instances, of a file or a suite: what is accepted, refused and planned, and what `evalspan plan` says of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import typed
from support.drawn import some
from support.problems import instance_text, instances

from coordinator.decide.planning import instance
from coordinator.decide.planning.instance import DataSet, Instance, plan_instance, what_if
from coordinator.errors import OperatorError
from coordinator.intake.suites import load_suite, suite_in_mode
from priors.hardware import NOMINAL_RATES, memory_bytes

ONE = {"name": "a", "docs": 1, "gpu_seconds": 1}


@some(20)
@given(instances())
def test_every_document_stands_in_exactly_one_shard(instance):
    """Over all lanes, the shards of a data set are its documents, each once."""
    got = plan_instance(instance)
    asked = json.loads(instance)
    assert [lane["gpu"] for lane in got["lanes"]] == list(range(asked["gpus"]))
    shards = [shard for lane in got["lanes"] for shard in lane["shards"]]
    planned = [(s["dataset"], n) for s in shards for n in range(s["start_doc"], s["end_doc"])]
    assert sorted(planned) == sorted(
        (one["name"], n) for one in asked["datasets"] for n in range(one["docs"])
    )
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
        "import json, sys; from coordinator.decide.planning.instance import plan_instance;"
        "print(json.dumps(plan_instance(sys.argv[1])))"
    )
    seeded = ({**os.environ, "PYTHONHASHSEED": seed} for seed in "12")
    words = [sys.executable, "-c", code, instance_text()]
    one, two = (subprocess.check_output(words, env=environment) for environment in seeded)
    assert one == two


def test_the_documented_instance_is_planned_and_its_keys_are_all_there():
    """The page's JSON runs as it stands; its table has each key of the format."""
    page = Path(__file__).parents[2].joinpath("docs", "evaluating", "plan.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert plan_instance(text)["planned_makespan_seconds"] > 0
    table = page.partition("| key | meaning |")[2]
    for key in {*Instance.model_fields, *DataSet.model_fields} - {"datasets"}:
        assert re.search(rf"`(datasets\[\]\.)?{key}`", table), key


def test_a_suites_instance_is_saved_and_taken_back(tmp_path):
    """The saved file plans to the same makespan. 70b on GPUs of 80 GB: 2 a trial, so 4 trials a node, and that is said."""
    saved = tmp_path / "i.json"
    words = ["--suite", "core", "--nodes", "2", "--model-size", "70b", "--work-dir", tmp_path]
    rows = [*words, "--save-instance", saved], [*words, "--json"], ["--instance", saved, "--json"]
    shown, first, again = (typed("plan", *row, env={"EVALSPAN_CONFIG": ""}) for row in rows)
    assert "a trial takes 2 GPUs" in shown.output
    assert json.loads(saved.read_text())["gpus_per_node"] == 4
    planned = json.loads(again.stdout)["planned_makespan_seconds"]
    assert planned == json.loads(first.stdout)["planned_makespan_seconds"]


@pytest.mark.parametrize("text", ["inf", "nan", "1e999b", "²b"])
def test_a_size_that_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(OperatorError):
        instance.parse_parameters(text)


@given(
    st.one_of(st.integers(1, 10**13), st.integers(1, 30).map(lambda tens: tens * 10**10)),
    st.sampled_from(["cpu", "own", *NOMINAL_RATES, "nvidia_a100_40gb"]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_a_trial_has_the_fewest_gpus_that_hold_the_model(parameters, hardware, node):
    """A power of two within a node; half of it would be too small."""
    memory, needed = memory_bytes(hardware), 2.2 * parameters
    try:
        gpus = instance.gpus_per_trial(parameters, hardware, node)
    except OperatorError:
        assert node * memory < needed
        return
    assert gpus in (1, 2, 4, 8)
    assert gpus <= node
    if memory is not None:
        assert gpus * memory >= needed * 0.999
        assert gpus == 1 or gpus / 2 * memory < needed * 1.001


@pytest.mark.parametrize(
    ("hardware", "gigabytes"),
    [
        ("cpu", None),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA GH200 480GB", 96),  # 480 GB are of its CPU
        ("NVIDIA GH200 144G HBM3e", 144),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10),  # of the slice
    ],
)
def test_each_type_with_figures_has_a_memory(hardware, gigabytes):
    """So that no large model is planned on a GPU that it does not fit; a type is known by its own name, too."""
    instance.check_hardware(hardware, [])
    assert memory_bytes(hardware) == (gigabytes and gigabytes * 10**9)


def test_a_suite_in_fast_mode_is_predicted_to_take_less():
    """A question's choices share its prompt; generation takes as long as in exact mode."""
    node = {"nodes": 1, "gpus_per_node": 8, "cpu_slots": 8}
    model = {"model_parameters": 7 * 10**9, "hardware": "a100", "engine": "hf"}
    exact, fast = (
        {row["name"]: row["gpu_seconds"] for row in made["datasets"]}
        for mode in ("exact", "fast")
        for made in [
            instance.instance_of_suite(suite_in_mode(load_suite("core"), mode, "hf"), {}, [], **node, **model)
        ]
    )
    assert fast["hellaswag"] < exact["hellaswag"] / 2
    assert fast["gsm8k"] == exact["gsm8k"]
    assert all(fast[name] <= exact[name] for name in exact)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    """Of an instance or a task list; one without an end, such as a device, is read no further than the limit."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for words in (["plan", "--instance"], ["import-tasks"]):
        assert "is not UTF-8 text" in str(typed(*words, tmp_path / "binary", code=1).exception)
    assert "is longer than 16 MiB" in str(typed("import-tasks", "/dev/zero", code=1).exception)
