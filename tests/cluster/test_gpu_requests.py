"""Requests for GPUs, options of roles and the choice of nodes on a real Slurm."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from dev_cluster.api import Cluster
from support.slurm_options import slurm_options

from coordinator.cluster import Job, LimitError, NodeState, RefusedError
from coordinator.cluster.node_choice import in_hostlist
from coordinator.cluster.slurm_cli import SlurmCli
from coordinator.config.schema import NodesConfig

pytestmark = pytest.mark.slurm

FORMS = ("--gres=gpu:{n}", "--gres=gpu:{type}:{n}", "--gpus-per-node={n}", "--gpus={type}:{n}", "-G {n}")


def slurm(site: Cluster, **more: object) -> SlurmCli:
    """`more`: arguments of `slurm_options`."""
    options = {
        "partition": "gpu",
        "cpu_partition": "cpu",
        "token": uuid.uuid4().hex[:8],
        "borrow": {"best_effort": "spare"},
        "command_prefix": tuple(site.user_argv(["x"])[:-1]),
        "env": dict(site.user_env),
    }
    return SlurmCli(slurm_options(**(options | more)))


def job(site: Cluster, script: str, **more: object) -> Job:
    asked: dict[str, object] = {
        "name": f"es-ask-{uuid.uuid4().hex[:8]}",
        "argv": ("sh", "-c", script),
        "log": str(Path(site.user_dir) / f"{uuid.uuid4().hex[:8]}.log"),
        "memory_mb": 100,
    }
    return Job(**(asked | more))  # type: ignore[arg-type]


def run(cluster: SlurmCli, work: Job) -> str:
    """Run it to its end; what it printed."""
    cluster.submit(work)
    end = time.monotonic() + 120
    while not all(s.phase == "ended" for s in cluster.jobs() if s.name == work.name):
        assert time.monotonic() < end, cluster.jobs()
        time.sleep(0.1)
    return Path(work.log).read_text().strip()


@pytest.mark.parametrize("form", FORMS)
def test_a_job_gets_its_gpus_by_every_form_of_request(slurm_site: Cluster, form: str) -> None:
    """On a named node and on none; the check accepts what a submission does."""
    cluster = slurm(slurm_site, slurm={"gpu_request": form})
    work = job(slurm_site, "echo $CUDA_VISIBLE_DEVICES", gpus=2, node=slurm_site.gpu_nodes[1])
    cluster.check(replace(work, node=None))
    assert run(cluster, work) == "0,1"


def test_a_request_for_gpus_that_no_node_has_is_refused_by_the_check(slurm_site: Cluster) -> None:
    cluster = slurm(slurm_site, slurm={"gpu_request": "--gres=gpu:h100:{n}"})
    with pytest.raises(RefusedError):
        cluster.check(job(slurm_site, "true", gpus=1))


def states(cluster: SlurmCli) -> dict[str, NodeState]:
    return {n.name: n for n in cluster.nodes()}


@pytest.mark.parametrize(
    "choice",
    [
        NodesConfig(exclude=("n[1,7-9]",)),
        NodesConfig(include=("n[2-3]",)),
        NodesConfig(features=("rack2",)),
    ],
)
def test_offers_and_jobs_without_a_node_keep_off_the_same_nodes(
    slurm_site: Cluster, choice: NodesConfig
) -> None:
    cluster = slurm(slurm_site, nodes=choice, cpu_partition=None)
    found = states(cluster)
    assert (found["n1"].usable, found["n2"].usable) == (False, True)
    assert [run(cluster, job(slurm_site, "echo $SLURMD_NODENAME")) for _ in range(2)] == ["n2"] * 2


def test_a_job_of_a_drained_partition_is_submitted_again_later(slurm_site: Cluster) -> None:
    """As before a maintenance; a job on a named node, too."""
    cluster = slurm(slurm_site)
    slurm_site.update("partitionname=spare", "state=drain")
    try:
        for node in (None, "n1"):
            with pytest.raises(LimitError, match="partition not available"):
                cluster.submit(job(slurm_site, "true", best_effort=True, node=node))
    finally:
        slurm_site.update("partitionname=spare", "state=up")


@pytest.mark.parametrize("hosts", ["n[08-12,3]", "a[1-2]b[0-1],c", "n[098-101]", "r[1-2][00-01]"])
def test_slurm_reads_a_hostlist_as_evalspan_does(slurm_site: Cluster, hosts: str) -> None:
    named = slurm_site.run_as_user(["scontrol", "show", "hostnames", hosts]).stdout.split()
    digits = {name: re.sub(r"\d", str(int(name[-1] == "1")), name) for name in named}
    assert named
    assert all(in_hostlist(name, hosts) for name in named)
    assert all(in_hostlist(other, hosts) == (other in named) for other in digits.values())
