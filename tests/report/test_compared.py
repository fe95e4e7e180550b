"""Laws of the simulated baselines in a report: this run's own seconds, and costs that add up."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from support.trainings import leave

from coordinator.evaluation.events import PlannedLeaf
from coordinator.evaluation.records import EvaluationRecord
from coordinator.evaluation.state import EntryState, LeafState, NodeUse, State
from coordinator.report.counterfactual import POLICIES, without_evalspan
from coordinator.report.measurements import Report
from coordinator.report.render import show

COSTS: dict[str, Any] = {"load_seconds": 10.0, "read_seconds": 4.0, "build_seconds": 6.0}


@pytest.fixture
def paths(tmp_path):
    return leave(tmp_path, 1, 0.5)


def state(paths: Any, lanes: int, *tasks: str, executes: bool = False) -> State:
    record = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    made = State(record=record, entries=[], batch_size=8)
    made.nodes.by_name["n"] = NodeUse(name="n", lanes=lanes)
    for index, task in enumerate(tasks):
        made.entries.append(EntryState(index=index, name=task, sets={task: "folder"}, leaves={task: task}))
        planned = PlannedLeaf(
            task=task,
            entry=index,
            key="k",
            folder="f",
            executes=executes,
            sampled=False,
            documents=40,
            shards=(),
        )
        made.shards.leaves[task] = LeafState(planned=planned, todo=0, entries=[index])
    return made


def test_one_data_set_on_one_lane_costs_its_parts(paths):
    """Build, read, load, inference and metric follow one another in a job per data set."""
    made = without_evalspan(
        state(paths, 1, "a"), gpu_seconds={"a": 100.0}, metric_seconds={"a": 7.0}, **COSTS
    )
    assert set(made) == set(POLICIES)
    assert made["a job a data set"] == pytest.approx(6 + 4 + 10 + 100 + 7)


def test_each_policy_pays_at_least_the_inference_and_a_load(paths):
    """Two lanes share the work at best; more lanes never take longer with a job a data set."""
    seconds = {"a": 60.0, "b": 50.0, "c": 40.0}
    for executes in (False, True):
        makespans = []
        for lanes in (1, 2, 3):
            made = without_evalspan(
                state(paths, lanes, *seconds, executes=executes),
                gpu_seconds=seconds,
                metric_seconds={"a": 5.0},
                **{**COSTS, "read_seconds": 0.0},
            )
            assert all(m >= sum(seconds.values()) / lanes + 10.0 for m in made.values())
            makespans.append(made["a job a data set"])
        assert makespans == sorted(makespans, reverse=True)


def test_what_did_not_run_is_not_simulated(paths):
    """No shard, no baseline; a task that has none is left out."""
    assert without_evalspan(state(paths, 1, "a"), gpu_seconds={}, metric_seconds={}, **COSTS) == {}
    both = without_evalspan(state(paths, 1, "a", "b"), gpu_seconds={"a": 100.0}, metric_seconds={}, **COSTS)
    assert both["a job a data set"] == pytest.approx(6 + 4 + 10 + 100)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_report_shows_them_and_the_cost_at_any_width(paths, width):
    """Names and figures whole; how many times as long where there is room; no line is too wide."""
    report = Report.model_validate_json(paths.report.read_bytes()).model_copy(
        update={"without_evalspan": {"OpenCompass, num-worker": 180.0}}
    )
    out = io.StringIO()
    show(Console(file=out, width=width, color_system=None), report, None, 2.0, verbose=True)
    text = out.getvalue()
    assert "OpenCompass, num-worker" in text
    assert "3:00 min" in text
    assert "2.0000" in text, "an hour at 2"
    assert ("2.00 x" in text) == (width > 40)
    assert max(map(len, text.splitlines())) <= width


def test_the_report_names_a_node_whole(paths):
    """Names of 60 characters that differ at their end."""
    nodes = {f"gpu-node-of-the-very-long-named-cluster-in-building-12-n{i:04d}": "shm" for i in (1, 2)}
    report = Report.model_validate_json(paths.report.read_bytes()).model_copy(update={"nodes": nodes})
    out = io.StringIO()
    show(Console(file=out, width=80, color_system=None), report, None, 2.0, verbose=True)
    text = "".join(out.getvalue().split())
    assert all(node in text for node in nodes), text
