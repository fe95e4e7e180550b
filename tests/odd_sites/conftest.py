"""Sites on which a precursor is of no use: real clusters, and the toy evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.api import Cluster, dev_cluster, unavailable
from support import sites, toys

MakeSite = Callable[..., sites.Site]


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.toy_model(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="session")
def expected(toy_model: Path) -> dict[str, dict[str, Any]]:
    """lm-eval's own results of each task, one run a task."""
    return toys.expected(toy_model, sites.TOYS)


@pytest.fixture(scope="session")
def odd_cluster() -> Iterator[Cluster]:
    """All oddities at once: private /dev/shm, whole nodes, no job without a GPU beside them."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with dev_cluster(
        nodes=2, gpus=2, cpu_nodes=1, private_shm=True, exclusive=True, gpu_jobs_only=True
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def plain_cluster() -> Iterator[Cluster]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with dev_cluster(nodes=1, gpus=2, cpu_nodes=1) as cluster:
        yield cluster


@pytest.fixture
def make_site(toy_model: Path, tmp_path: Path) -> MakeSite:
    """The ordinary user's folder on a cluster, with the toy model, its suite and a config."""

    def make(cluster: Cluster, *, more: str = "") -> sites.Site:
        return sites.on_cluster(cluster, tmp_path.name, toy_model, more='cpu_partition = "cpu"\n' + more)

    return make
