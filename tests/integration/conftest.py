"""Whole evaluations by the command line: a tiny model on toy tasks, on this machine and on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dev_cluster.api import Cluster
from support import sites
from support.sites import cluster


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    with cluster(nodes=2, gpus=2, cpu_nodes=1, slurmd_timeout_s=10, grace_s=0) as made:
        yield made


@pytest.fixture
def local_site(tmp_path: Path, toy_model: Path) -> Iterator[sites.Site]:
    site = sites.local(tmp_path, toy_model, "--slots", "2")
    yield site
    site.end_workers()


@pytest.fixture
def slurm_site(slurm_cluster: Cluster, toy_model: Path, tmp_path: Path) -> sites.Site:
    return sites.on_cluster(slurm_cluster, tmp_path.name, toy_model)
