"""Whole evaluations by the command line: a tiny model on toy tasks, on this machine and on a real Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dev_cluster.api import Cluster
from support import sites


@pytest.fixture
def local_site(tmp_path: Path, toy_model: Path) -> Iterator[sites.Site]:
    site = sites.local(tmp_path, toy_model, "--slots", "2")
    yield site
    site.end_workers()


@pytest.fixture
def warm_site(local_site: sites.Site, warm: str) -> sites.Site:
    """The same, whose jobs import little."""
    local_site.env["EVALSPAN_TRIAL_PROLOGUE"] = warm
    return local_site


@pytest.fixture
def slurm_site(plain_cluster: Cluster, make_site: Callable[[Cluster], sites.Site]) -> sites.Site:
    return make_site(plain_cluster)
