"""A real Slurm for the contract suite, skipped where none can be started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dev_cluster.api import Cluster
from support.sites import cluster


@pytest.fixture(scope="session")
def slurm_site() -> Iterator[Cluster]:
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8, slurmd_timeout_s=10, grace_s=0) as made:
        yield made
