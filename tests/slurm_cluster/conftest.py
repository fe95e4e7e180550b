"""An ordinary site for the development cluster's own tests; skipped where none can be started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dev_cluster.api import Cluster
from support.sites import cluster


@pytest.fixture(scope="session")
def plain() -> Iterator[Cluster]:
    """Two GPU nodes, one CPU node; mute nodes are noticed soon."""
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8, slurmd_timeout_s=5, grace_s=0) as made:
        yield made
