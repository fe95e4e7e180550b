"""Laws of the check of a cluster before anything is submitted: a refusal names what the operator can act on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.fake_cluster import FakeCluster, fake_node
from support.simulated.parts import record

from coordinator.cluster import Job, NodeState, RefusedError
from coordinator.cluster.node_choice import choose
from coordinator.cluster.slurm_rules import SiteRules, host_reason, precursor_refusal
from coordinator.config.schema import Config, NodesConfig
from coordinator.doctor import collect
from coordinator.errors import OperatorError
from coordinator.intake.validate import check_cluster


class Refusing(FakeCluster):
    """Refuses jobs of some purposes in words of the site's."""

    def __init__(self, nodes: Sequence[NodeState], words: str = "", *purposes: str) -> None:
        super().__init__(fleet=nodes)
        self.words, self.purposes = words, purposes

    def check(self, job: Job) -> None:
        if job.purpose in self.purposes:
            raise RefusedError(self.words)


DOWN = [replace(fake_node(n), usable=False, state="drained", reason="new driver") for n in ("n1", "n2")]
OUT = Config(nodes=NodesConfig(exclude=("n1",), features=("nvlink",)))
LEFT_OUT = [choose(fake_node(n), OUT) for n in ("n1", "n2")]
JOBS = ("build", "stage", "trial", "metric")
PLUG_IN = "lua: say which GPU; Batch job submission failed: Unspecified error"
# fmt: off
# nodes, the site's refusal and the purposes of the jobs that it refuses, what is said; "": the evaluation is accepted
CHECKED = {
    "all nodes are drained: it waits, as sbatch would": (DOWN, ("Requested node configuration is not available", *JOBS), ""),
    "drained nodes are not the reason": (DOWN, ("invalid partition specified: nope", *JOBS), "invalid partition"),
    "a plug-in wants a GPU type": ([fake_node("n1")], (PLUG_IN, "trial"), r"say which GPU.* \(\[slurm\] gpu_request says how"),
    "a QOS of precursors": ([fake_node("n1")], ("Invalid qos specification", "stage"), r"\(stage\): .*Invalid qos.*\[slurm\.precursor\] qos"),
    "settings leave out every node": (LEFT_OUT, (), r"^\[nodes\] exclude and \[nodes\] features leave no node with GPUs; the cluster has n1 \(fake\), n2"),
    "settings leave one": ([*LEFT_OUT, fake_node("n3")], (), ""),
    "no node has GPUs": ([fake_node("c1", gpus=0)], (), "no node of the partition has GPUs: .*--partition .*sinfo"),
}
# fmt: on


@pytest.mark.parametrize("case", CHECKED)
def test_a_cluster_that_cannot_run_an_evaluation_is_refused_with_what_to_set(case: str) -> None:
    nodes, refusal, says = CHECKED[case]
    said = ""
    try:
        check_cluster(Refusing(nodes, *refusal), record(1))
    except OperatorError as error:
        said = str(error)
    assert re.search(says, said) if says else said == ""


def test_a_wrong_setting_of_precursors_is_no_reason_to_host_trials() -> None:
    """Else the evaluation would start on a lower rung, or end at its first precursor. Other jobs are taken."""
    cluster = Refusing([fake_node("n1")], "Batch job submission failed: Invalid qos specification", "stage")
    assert host_reason(SiteRules(config={}), None, precursor_refusal(cluster, ["n1"])) == ""
    kinds = {kind: status for kind, (status, _, _) in collect._job_kinds(Config(), cluster, cluster.nodes())}
    assert kinds == {"build": "ok", "stage": "fail", "trial": "ok", "metric": "ok"}
