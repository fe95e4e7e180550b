"""What a suite can see, and what its tasks say, from evaluations as they lie in a work folder."""

import json
import math

import numpy as np
import pytest
from scipy import stats
from support.commands import typed
from support.trainings import leave, results

from coordinator.results.report.detection import detection_of, find_flips
from coordinator.results.report.measurements import Report, ShardSpan
from coordinator.results.report.signals import auto_cadences
from evaljobs.contract.columns import pack_columns
from evaljobs.contract.specs import CheckpointSpec, SuiteSpec, TaskEntry

INSTANCE = {
    "schema_version": 1,
    "gpus": 1,
    "gpus_per_node": 1,
    "cpu_slots": 1,
    "load_seconds": 1.0,
    "datasets": [
        {"name": "large", "docs": 50_000, "gpu_seconds": 100.0},
        {"name": "small", "docs": 400, "gpu_seconds": 10.0},
    ],
}


def answer(paths, right):
    """Leave 100 documents, of which those of `right` are answered rightly."""
    values = np.isin(np.arange(100), right).astype(float)
    known = {"doc_id": np.arange(100), "doc_hash": np.arange(100), "exact_match,none": values}
    paths.documents.write_bytes(pack_columns({(0, "add"): known}))
    paths.results.write_text(json.dumps(results(values.mean())))


def test_flips_are_those_of_neighbours_of_a_training(tmp_path):
    answer(leave(tmp_path, 10, 0.2), range(20))
    answer(leave(tmp_path, 20, 0.2), range(10, 30))  # 20 of 100 documents differ
    answer(leave(tmp_path, 30, 0.3), range(30))  # 10 differ
    answer(leave(tmp_path, 5, 0.9, parent="/runs/b"), range(90))  # alone in its training
    found = find_flips(tmp_path, "mini")
    assert found["add"] == pytest.approx((0.2 + 0.1) / 2, rel=0.02)
    assert "pages" not in found, "perplexity is no share"
    assert find_flips(tmp_path, "other") == {}


def test_a_row_says_what_is_needed_and_what_is_seen_by_known_flips_or_the_worst_case():
    found = detection_of(INSTANCE["datasets"], {"small": 0.1}, 0.01, 0.8)
    large, small = found["tasks"]
    errors = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert large["needed"] == math.ceil(errors**2 * (0.5 - 0.01**2) / 0.01**2)
    assert large["flips"] is None
    assert large["gpu_seconds_needed"] == pytest.approx(100 * large["needed"] / 50_000)
    assert small["needed"] == math.ceil(errors**2 * (0.1 - 0.01**2) / 0.01**2)
    assert small["gpu_seconds_needed"] == 10, "there are no more documents than all"
    assert small["detectable"] == pytest.approx(errors * math.sqrt((0.1 - small["detectable"] ** 2) / 400))
    assert found["detectable_mean"] == pytest.approx(errors * math.sqrt(0.5 / 50_000 + 0.1 / 400) / 2)


def test_documents_that_never_differed_are_not_taken_for_sure():
    (row,) = detection_of(INSTANCE["datasets"][1:], {"small": 0.0}, 0.01, 0.8)["tasks"]
    assert row["flips"] == 0
    assert row["needed"] > 500


def plan(folder, *more, code=0):
    file = folder / "instance.json"
    file.write_text(json.dumps(INSTANCE))
    return typed("plan", "--instance", file, "--work-dir", folder / "work", *more, code=code)


def test_plan_prints_a_row_a_task_and_json(tmp_path):
    said = plan(tmp_path, "--detect", "0.02").stdout
    assert "1 of 2 tasks have too few documents to show a change of 0.02 with power 0.8" in said
    assert "flips not known" in said
    found = json.loads(plan(tmp_path, "--detect", "0.02", "--power", "0.9", "--json").stdout)
    assert [row["task"] for row in found["tasks"]] == ["large", "small"]
    assert found["power"] == 0.9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--detect", "1.5"], "--detect is a change of a score between 0 and 1, such as 0.01, not 1.5"),
        (["--detect", "0"], "--detect is a change of a score between 0 and 1, such as 0.01, not 0"),
        (["--power", "0.9"], "--power is of --detect CHANGE"),
        (
            ["--detect", "0.01", "--power", "1"],
            "--power is a probability from 0.5 to below 1, such as 0.8, not 1",
        ),
    ],
)
def test_plan_refuses_what_is_no_change_or_power(tmp_path, words, said):
    assert said in str(plan(tmp_path, *words, code=1).exception)


def test_report_says_which_task_says_nothing_and_what_it_takes(tmp_path):
    shards = [
        ShardSpan(shard=f"{task}|0|4", trial="t", started_at=0, seconds=seconds)
        for task, seconds in (("add", 30.0), ("pages", 10.0))
    ]
    (tmp_path / "work").mkdir(mode=0o700)
    (tmp_path / "work" / "daemon.lock").touch()
    for step in range(1, 11):
        paths = leave(tmp_path / "work", step, 0.1 + 0.05 * step)
        scores = results(0.1 + 0.05 * step)
        scores["results"]["pages"]["word_perplexity,none"] = 10 + (-1) ** step  # noise alone
        paths.results.write_text(json.dumps(scores))
        made = Report.model_validate_json(paths.report.read_bytes())
        paths.report.write_text(made.model_copy(update={"shards": tuple(shards)}).model_dump_json())
    words = ["report", "--series", "/runs/a", "--signal", "--work-dir", tmp_path / "work"]
    said = " ".join(typed(*words).stdout.split())
    assert "1 of 2 tasks say nothing here (ratio below 2) and take 25 % of the GPU seconds: pages" in said
    add, pages = json.loads(typed(*words, "--json").stdout)["signals"]
    assert (add["task"], add["gpu_seconds"], add["every"]) == ("add", 30.0, 2)
    values = 0.1 + 0.05 * np.arange(1, 11)
    stages = values.reshape(2, 5).mean(1)
    assert add["signal"] == pytest.approx(np.ptp(stages) / stages.mean())
    assert add["noise"] == pytest.approx(values[-5:].std() / values[-5:].mean())
    assert pages["says_nothing"]
    assert pages["every"] == 10
    tasks = tuple(TaskEntry(name=name, every="auto") for name in ("add", "pages", "new"))
    suite = SuiteSpec(name="mini", tasks=tasks)
    coming = CheckpointSpec(source="/runs/a/step-11", digest="d", files=())
    assert auto_cadences(tmp_path / "work", suite, coming) == {"add": 2, "pages": 10, "new": 1}
    another = coming.model_copy(update={"source": "/runs/b/step-1"})
    assert auto_cadences(tmp_path / "work", suite, another) == {}
    refused = typed(*words, "--csv", code=1).exception
    assert "--signal is of --series FOLDER, without --html and --csv" in str(refused)
