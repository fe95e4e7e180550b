"""Sites on which a precursor is of no use: real clusters, and the toy evaluation."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dev_cluster.api import Cluster
from support import sites
from support.clusters import cluster

MakeSite = Callable[..., sites.Site]


@pytest.fixture(scope="session")
def odd_cluster() -> Iterator[Cluster]:
    """All oddities at once: private /dev/shm, whole nodes, no job without a GPU beside them."""
    with cluster(nodes=2, gpus=2, cpu_nodes=1, private_shm=True, exclusive=True, gpu_jobs_only=True) as made:
        yield made


@pytest.fixture(scope="session")
def plain_cluster() -> Iterator[Cluster]:
    with cluster(nodes=1, gpus=2, cpu_nodes=1) as made:
        yield made


@pytest.fixture(scope="session")
def tight_cluster() -> Iterator[Cluster]:
    """n1 has 400 MiB; every partition has MaxTime one hour."""
    with cluster(nodes=2, gpus=2, cpu_nodes=1, small_mb=400) as made:
        for partition in ("gpu", "spare", "cpu"):
            argv = ["scontrol", "update", f"partitionname={partition}", "maxtime=60"]
            subprocess.run(argv, check=True, env=made.env, timeout=60)
        yield made


@pytest.fixture
def make_site(toy_model: Path, tmp_path: Path) -> MakeSite:
    """The ordinary user's folder on a cluster, with the toy model, its suite and a config."""

    def make(cluster: Cluster, *, more: str = "") -> sites.Site:
        return sites.on_cluster(cluster, tmp_path.name, toy_model, more='cpu_partition = "cpu"\n' + more)

    return make
