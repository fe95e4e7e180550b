"""A site with a node that is too small and partitions of one hour: real Slurm."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from dev_cluster.api import Cluster
from dev_cluster.testing import unfinished
from support.slurm_options import slurm_options

from coordinator.cluster import Job, RefusedError
from coordinator.cluster.slurm_cli import SlurmCli


def slurm(cluster: Cluster, *extra: str) -> SlurmCli:
    prefix = tuple(cluster.user_argv(["x"])[:-1])
    return SlurmCli(
        slurm_options(
            partition="gpu",
            cpu_partition="cpu",
            token="tight",  # noqa: S106 (no secret)
            command_prefix=prefix,
            env=dict(cluster.user_env),
            extra_args=extra,
        )
    )


def job(cluster: Cluster, **more: Any) -> Job:
    asked = {"name": "es-tight", "memory_mb": 100, "argv": ("sleep", "600")} | more
    return Job(log=str(cluster.user_dir / "tight.log"), **asked)


@pytest.mark.slurm
def test_a_refusal_that_one_node_causes_says_so(tight_cluster: Cluster) -> None:
    """Too little memory, and a node that is gone; a partition that is not there is no node's fault."""
    cluster = slurm(tight_cluster)
    for bad in (
        job(tight_cluster, node="n1", memory_mb=2000),
        job(tight_cluster, node="n9"),
        job(tight_cluster, node="n1", gpus=7),
        job(tight_cluster, node="c1", gpus=1),
    ):
        with pytest.raises(RefusedError) as caught:
            cluster.submit(bad)
        assert caught.value.of_node, str(caught.value)
    nowhere = SlurmCli(slurm_options(cluster.options, partition="nope"))
    with pytest.raises(RefusedError) as caught:
        nowhere.submit(job(tight_cluster, gpus=1))
    assert not caught.value.of_node


@pytest.mark.slurm
def test_a_job_that_its_partition_never_starts_is_told_by_its_reason(tight_cluster: Cluster) -> None:
    """Where a site's own arguments ask for more: what Slurm queues then is pending for PartitionTimeLimit."""
    cluster = slurm(tight_cluster, "--time=120")
    job_id = cluster.submit(job(tight_cluster, name="es-never"))
    deadline = time.monotonic() + 120
    while True:
        (state,) = (s for s in cluster.jobs() if s.name == "es-never")
        if state.reason == "PartitionTimeLimit":
            break
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    assert state.phase == "pending"
    cluster.cancel([job_id])


@pytest.mark.slurm
@pytest.mark.model
def test_an_evaluation_runs_on_a_tight_site(
    tight_cluster: Cluster, make_site: Any, expected: dict[str, Any]
) -> None:
    """With the default limits of hours; nothing is sent to the node that is too small; scores are equal."""
    site = make_site(tight_cluster)
    process = site.start(site.evaluate("--shards-per-task", "3"))
    seen: dict[str, tuple[str, str]] = {}
    end = time.monotonic() + 280
    while process.poll() is None:
        assert time.monotonic() < end
        rows = tight_cluster.run_as_user(["squeue", "--noheader", "--format=%j %l %n"]).stdout
        seen |= {w[0]: (w[1], w[-1]) for row in rows.splitlines() if (w := row.split())}
    out, err = process.communicate()
    assert process.returncode == 0, f"{out}\n{err}"
    assert dict(json.loads(out)["results"]) == expected
    ours = {n: w for n, w in seen.items() if n.startswith(f"es-{site.root().name.rpartition('-')[2]}-")}
    assert {n.split("-")[2] for n in ours} >= {"build", "stage", "trial"}
    assert not any("-n1-" in n for n in ours), ours
    assert all(len(limit) <= len("59:00") or limit == "1:00:00" for limit, _ in ours.values()), ours
    assert unfinished(tight_cluster) == []
