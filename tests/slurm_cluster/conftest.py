"""Fixtures of the development cluster's own tests: real clusters, skipped where none can be started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dev_cluster.api import Cluster, unavailable
from support.sites import cluster


@pytest.fixture(scope="session")
def machine() -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def plain() -> Iterator[Cluster]:
    """An ordinary site: two GPU nodes, one CPU node; mute nodes are noticed soon."""
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8, slurmd_timeout_s=5, grace_s=0) as made:
        yield made


@pytest.fixture(scope="session")
def odd() -> Iterator[Cluster]:
    """A site with all oddities at once."""
    with cluster(
        nodes=1, gpus=2, cpu_nodes=1, cpus=8, private_shm=True, exclusive=True, gpu_jobs_only=True
    ) as made:
        yield made
