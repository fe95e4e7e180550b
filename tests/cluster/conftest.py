"""A real Slurm for the contract suite, skipped where none can be started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from dev_cluster.api import Cluster, dev_cluster, unavailable  # noqa: E402


@pytest.fixture(scope="session")
def slurm_site() -> Iterator[Cluster]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with dev_cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8, slurmd_timeout_s=10, grace_s=0) as cluster:
        yield cluster
