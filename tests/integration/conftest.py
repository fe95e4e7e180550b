"""Whole evaluations by the command line: a tiny model on toy tasks, on this machine and on a real Slurm."""

import pytest
from support import sites


@pytest.fixture
def local_site(tmp_path, toy_model):
    site = sites.local(tmp_path, toy_model, "--slots", "2")
    yield site
    site.end_workers()


@pytest.fixture
def warm_site(local_site, warm):
    """The same, whose jobs import little."""
    local_site.env["EVALSPAN_TRIAL_PROLOGUE"] = warm
    return local_site


@pytest.fixture
def slurm_site(plain_cluster, make_site):
    return make_site(plain_cluster)
