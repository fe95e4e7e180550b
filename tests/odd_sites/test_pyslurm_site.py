"""A whole evaluation through pyslurm, where it is installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.testing import unfinished
from support.sites import cluster

PYSLURM = importlib.util.find_spec("pyslurm")
pytestmark = [
    pytest.mark.model,
    pytest.mark.slurm,
    pytest.mark.skipif(PYSLURM is None, reason="pyslurm is not installed: it builds on Slurm 25.11 alone"),
]


def test_an_evaluation_through_pyslurm_gives_the_scores_of_lm_eval(
    make_site: Any, expected: dict[str, Any]
) -> None:
    """No job is left, and `doctor` names what goes through commands."""
    assert PYSLURM is not None
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8) as real:
        site = make_site(real, more='api = "pyslurm"\n')
        site.env["PYTHONPATH"] = f"{Path(str(PYSLURM.origin)).parents[1]}:{site.env['PYTHONPATH']}"
        done = site.run(site.evaluate("--shards-per-task", "3"))
        assert done.returncode == 0, done.stderr
        assert dict(json.loads(done.stdout)["results"]) == expected
        assert unfinished(real) == []
        checked = site.run(site.command("doctor", "--cluster", "slurm", "--partition", "gpu"))
        assert "scancel" in checked.stdout, checked.stdout + checked.stderr
