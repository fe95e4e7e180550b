"""Laws of the pyslurm side that hold without pyslurm: what it would be told, and what is said where it is not there."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from coordinator.cluster import Job, RefusedError
from coordinator.cluster.sbatch_text import SlurmOptions
from coordinator.cluster.slurm_pyslurm import SlurmApi, description, states_of, unavailable

JOB = Job(
    name="es-a",
    argv=("true",),
    log="/w/l.%i",
    count=3,
    gpus=2,
    node="n1",
    memory_mb=100,
    time_limit_seconds=600,
)


def test_the_description_says_what_sbatch_is_told() -> None:
    said = description(JOB, SlurmOptions(partition="gpu", token="t", extra_args=("--constraint=a100",)))  # noqa: S106
    assert {
        k: said[k] for k in ("name", "comment", "array", "gres_per_node", "required_nodes", "partitions")
    } == {
        "name": "es-a",
        "comment": "t",
        "array": "0-2",
        "gres_per_node": "gpu:2",
        "required_nodes": "n1",
        "partitions": "gpu",
    }
    assert (said["memory_per_node"], said["time_limit"], said["is_requeueable"]) == ("100M", 10, False)
    assert (said["signal"], said["standard_output"]) == ("B:SIGTERM@60", "/w/l.%a")
    assert said["script"].startswith("#!/bin/bash\n#SBATCH --constraint=a100\nset -eu\n")
    assert "account" not in said


def test_an_array_that_waits_as_a_whole_is_all_of_its_members() -> None:
    """And a member that was split off is one."""
    fields = {
        "id": 7, "name": "es-a", "state": "PENDING", "allocated_nodes": None, "state_reason": "Priority",
        "submit_time": 5, "start_time": 9, "end_time": 99, "array_id": 7, "array_task_id": None, "array_tasks_waiting": "1-2",
    }  # fmt: skip
    waiting = states_of(SimpleNamespace(**fields))
    assert [(s.job_id, s.index, s.phase, s.started_at) for s in waiting] == [
        ("7", 1, "pending", None),
        ("7", 2, "pending", None),
    ]
    split = fields | {"id": 8, "array_task_id": 0, "state": "RUNNING", "allocated_nodes": "n1"}
    assert [(s.job_id, s.index, s.node, s.ends_at) for s in states_of(SimpleNamespace(**split))] == [
        ("7", 0, "n1", 99)
    ]
    alone = fields | {"array_id": None}
    assert [(s.job_id, s.index) for s in states_of(SimpleNamespace(**alone))] == [("7", 0)]


@pytest.mark.skipif(importlib.util.find_spec("pyslurm") is not None, reason="pyslurm is installed here")
def test_without_pyslurm_the_operator_is_told_what_to_do() -> None:
    assert "evalspan[slurm]" in str(unavailable())
    with pytest.raises(RefusedError, match=r"cluster\.api"):
        SlurmApi(SlurmOptions())
