"""Laws of the check of a cluster before anything is submitted: a refusal names what the operator can act on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.simulated.parts import record

from coordinator.cluster import Job, RefusedError
from coordinator.cluster.node_choice import choose
from coordinator.cluster.slurm_cli import SlurmCli
from coordinator.cluster.slurm_rules import SiteRules, host_reason, precursor_refusal
from coordinator.config.schema import ClusterConfig, Config, NodesConfig
from coordinator.doctor import collect
from coordinator.errors import OperatorError
from coordinator.intake.validate import check_cluster
from coordinator.runtime.wiring import cluster_of


def test_an_evaluation_is_accepted_while_no_node_takes_jobs() -> None:
    """It waits, as `sbatch` would; a refusal that no node is the reason for is one all the same."""
    nodes = [replace(fake_node(n), usable=False, state="drained", reason="new driver") for n in ("n1", "n2")]
    cluster = FakeCluster(fleet=nodes)
    cluster.fail("check", RefusedError("Requested node configuration is not available"), times=9)
    check_cluster(cluster, record(1))
    cluster.fail("check", RefusedError("invalid partition specified: nope"), times=9)
    with pytest.raises(OperatorError, match="invalid partition"):
        check_cluster(cluster, record(1))


def test_a_sites_own_refusal_of_jobs_with_gpus_names_the_setting_of_the_request() -> None:
    """A plug-in that wants a GPU type says so in its own words, and Slurm adds "Unspecified error"."""

    class Typed(FakeCluster):
        def check(self, job: Job) -> None:
            if job.gpus:
                raise RefusedError("lua: say which GPU; Batch job submission failed: Unspecified error")

    cluster = Typed(fleet=[fake_node("n1")])
    with pytest.raises(
        OperatorError, match=r"say which GPU.* \(\[slurm\] gpu_request says how jobs ask for GPUs\)"
    ):
        check_cluster(cluster, record(1))


def test_a_wrong_setting_of_precursors_is_refused_and_no_reason_to_host_trials() -> None:
    """Else the evaluation would start on a lower rung, or end at its first precursor."""

    class WrongQos(FakeCluster):
        def check(self, job: Job) -> None:
            if job.purpose == "stage":
                raise RefusedError("Batch job submission failed: Invalid qos specification")

    cluster = WrongQos(fleet=[fake_node("n1")])
    refusal = precursor_refusal(cluster, ["n1"])
    assert host_reason(SiteRules(config={}), None, refusal) == ""
    with pytest.raises(OperatorError, match=r"\(stage\): .*Invalid qos.*\[slurm\.precursor\] qos"):
        check_cluster(cluster, record(1))
    kinds = collect._job_kinds(Config(), cluster, cluster.nodes())
    assert {kind: status for kind, (status, _, _) in kinds} == {
        "build": "ok",
        "stage": "fail",
        "trial": "ok",
        "metric": "ok",
    }


def test_settings_that_exclude_every_node_are_named_before_anything_is_submitted() -> None:
    nodes = [
        choose(fake_node(n), Config(nodes=NodesConfig(exclude=("n1",), features=("nvlink",))))
        for n in ("n1", "n2")
    ]
    cluster = FakeCluster(fleet=nodes)
    with pytest.raises(
        OperatorError,
        match=r"^\[nodes\] exclude and \[nodes\] features leave no node with GPUs; the cluster has n1 \(fake\), n2",
    ):
        check_cluster(cluster, record(1))
    check_cluster(FakeCluster(fleet=[*nodes, fake_node("n3")]), record(1))


def test_several_clusters_in_one_listing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`squeue` would print one table for each, and no job would ever be found again."""
    (tmp_path / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CLUSTERS", "east,west")
    config = Config(work_dir=tmp_path, cluster=ClusterConfig(kind="slurm"))
    with pytest.raises(OperatorError, match="SLURM_CLUSTERS names several clusters"):
        cluster_of(config)
    monkeypatch.setenv("SLURM_CLUSTERS", "east")
    assert isinstance(cluster_of(config), SlurmCli)


def test_a_partition_without_gpus_is_refused_with_what_lists_the_others() -> None:
    with pytest.raises(OperatorError, match=r"no node of the partition has GPUs: .*--partition .*sinfo"):
        check_cluster(FakeCluster(fleet=[fake_node("c1", gpus=0)]), record(1))
