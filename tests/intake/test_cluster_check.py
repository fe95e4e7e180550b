"""Laws of the check of a cluster before anything is submitted: a refusal names what the operator can act on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.simulated.parts import record

from coordinator.cluster import Job, RefusedError
from coordinator.cluster.node_choice import choose
from coordinator.cluster.slurm_rules import SiteRules, host_reason, precursor_refusal
from coordinator.config.schema import Config, NodesConfig
from coordinator.doctor import collect
from coordinator.errors import OperatorError
from coordinator.intake.validate import check_cluster


def test_an_evaluation_is_accepted_while_no_node_takes_jobs() -> None:
    """It waits, as `sbatch` would; a refusal that no node is the reason for is one all the same."""
    nodes = [replace(fake_node(n), usable=False, state="drained", reason="new driver") for n in ("n1", "n2")]
    cluster = FakeCluster(fleet=nodes)
    cluster.fail("check", RefusedError("Requested node configuration is not available"), times=9)
    check_cluster(cluster, record(1))
    cluster.fail("check", RefusedError("invalid partition specified: nope"), times=9)
    with pytest.raises(OperatorError, match="invalid partition"):
        check_cluster(cluster, record(1))


class Refusing(FakeCluster):
    """Refuses jobs of some purposes in words of the site's."""

    def __init__(self, words: str, *purposes: str) -> None:
        super().__init__(fleet=[fake_node("n1")])
        self.words, self.purposes = words, purposes

    def check(self, job: Job) -> None:
        if job.purpose in self.purposes:
            raise RefusedError(self.words)


def test_a_sites_own_refusal_of_jobs_with_gpus_names_the_setting_of_the_request() -> None:
    """A plug-in that wants a GPU type says so in its own words, and Slurm adds "Unspecified error"."""
    cluster = Refusing("lua: say which GPU; Batch job submission failed: Unspecified error", "trial")
    with pytest.raises(OperatorError, match=r"say which GPU.* \(\[slurm\] gpu_request says how"):
        check_cluster(cluster, record(1))


def test_a_wrong_setting_of_precursors_is_refused_and_no_reason_to_host_trials() -> None:
    """Else the evaluation would start on a lower rung, or end at its first precursor."""
    cluster = Refusing("Batch job submission failed: Invalid qos specification", "stage")
    refusal = precursor_refusal(cluster, ["n1"])
    assert host_reason(SiteRules(config={}), None, refusal) == ""
    with pytest.raises(OperatorError, match=r"\(stage\): .*Invalid qos.*\[slurm\.precursor\] qos"):
        check_cluster(cluster, record(1))
    kinds = {kind: status for kind, (status, _, _) in collect._job_kinds(Config(), cluster, cluster.nodes())}
    assert kinds == {"build": "ok", "stage": "fail", "trial": "ok", "metric": "ok"}


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


def test_a_partition_without_gpus_is_refused_with_what_lists_the_others() -> None:
    with pytest.raises(OperatorError, match=r"no node of the partition has GPUs: .*--partition .*sinfo"):
        check_cluster(FakeCluster(fleet=[fake_node("c1", gpus=0)]), record(1))
