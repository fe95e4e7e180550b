"""The fake pyslurm has the real one's names. Where pyslurm is installed; no slurm.conf is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.pyslurm_text import JOB_FIELDS, NODE_FIELDS, PARTITION_FIELDS

FAKE = Path(__file__).parent / "fake_pyslurm"
SUBMISSION = """
import json, pyslurm
called = ("submit", "load_environment", "load_sbatch_options")
print(json.dumps([n for n in dir(pyslurm.JobSubmitDescription) if not n.startswith("_") and n not in called]))
"""
OTHERS = """
import json, pyslurm
assert issubclass(pyslurm.RPCError, pyslurm.PyslurmError)
for collection in (pyslurm.Jobs, pyslurm.Nodes, pyslurm.Partitions, pyslurm.slurmctld.Config):
    collection.load
types = (pyslurm.Job, pyslurm.Node, pyslurm.Partition, pyslurm.slurmctld.Config)
print(json.dumps([pyslurm.__version__, *map(dir, types)]))
"""


@pytest.mark.skipif(importlib.util.find_spec("pyslurm") is None, reason="pyslurm is not installed")
def test_the_fake_has_the_names_of_the_real_module(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("pyslurm")
    assert spec is not None
    assert spec.origin is not None
    place = Path(spec.origin).parents[1]
    real = {"PYSLURM_DISABLE_AUTO_INIT": "1", "SLURM_CONF": "/nowhere"}
    assert ask(SUBMISSION, place, real) == ask(SUBMISSION, FAKE, {"FAKE_SLURM": str(tmp_path)})
    version, job, node, partition, config = ask(OTHERS, place, real)
    assert version.startswith("25.11.")
    assert {*JOB_FIELDS, "user_id", "cancel", "get_resource_layout_per_node"} <= set(job)
    assert {*NODE_FIELDS, "allocated_tres"} <= set(node)
    assert set(PARTITION_FIELDS) <= set(partition)
    assert {"accounting_storage_tres", "private_data"} <= set(config)


def ask(source: str, place: Path, env: dict[str, str]) -> Any:
    """What a program prints in JSON, whose `pyslurm` is the one in this folder."""
    path = f"{place}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)
