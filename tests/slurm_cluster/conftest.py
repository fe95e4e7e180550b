"""Fixtures of the development cluster's own tests: real clusters, skipped where none can be started."""

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
def machine() -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def plain(machine: None) -> Iterator[Cluster]:
    """An ordinary site: two GPU nodes, one CPU node; mute nodes are noticed soon."""
    with dev_cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8, slurmd_timeout_s=5, grace_s=0) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def odd(machine: None) -> Iterator[Cluster]:
    """A site with all oddities at once."""
    with dev_cluster(
        nodes=1, gpus=2, cpu_nodes=1, cpus=8, private_shm=True, exclusive=True, gpu_jobs_only=True
    ) as cluster:
        yield cluster
