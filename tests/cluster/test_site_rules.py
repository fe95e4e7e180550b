"""Laws of a site's rules: each oddity alone asks for hosts, no other rule does, workers fill what trials leave, and a cluster that
cannot run an evaluation is refused before anything is submitted."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, fake_node
from support.simulated.parts import record

from coordinator.errors import OperatorError
from coordinator.intake.validate import check_cluster
from coordinator.operations.doctor import collect
from coordinator.site.cluster import RefusedError
from coordinator.site.cluster.node_choice import apply_node_settings
from coordinator.site.cluster.slurm_rules import (
    FEW_WORKERS,
    Hosting,
    NodeNeeds,
    Partition,
    SiteRules,
    host_reason,
    parse_partitions,
    precursor_refusal,
)
from coordinator.site.config.schema import Config, NodesConfig

WANTS = NodeNeeds(precursor_mb=512, trial_mb=1000, trial_cpus=2, trial_gpus=1)


def test_without_staging_only_whole_nodes_matter():
    """Trials that read storage need no precursor; but on an exclusive node the second would wait for the first."""
    shared, whole = Partition(name="a"), Partition(name="b", exclusive=True)
    rules = SiteRules(config={"JobContainerType": "job_container/tmpfs"}, partitions=(shared, whole))
    assert not host_reason(rules, "a", "refused", stage=False)
    assert "refused" in host_reason(rules, "a", "refused")
    assert "tmpfs" in host_reason(rules, "a", "")
    assert "b gives whole nodes" in host_reason(rules, "a,b", "", stage=False)
    assert "select/linear" in host_reason(SiteRules(config={"SelectType": "select/linear"}), None, "")


@given(
    per_cpu=st.integers(0, 4000),
    cpus=st.integers(1, 64),
    gpus=st.integers(1, 8),
    wants=st.builds(
        NodeNeeds,
        precursor_mb=st.integers(512, 100_000),
        trial_mb=st.integers(100, 8000),
        trial_cpus=st.integers(1, 16),
        trial_gpus=st.just(1),
    ),
)
def test_hosts_only_where_that_lets_more_trials_run(per_cpu, cpus, gpus, wants):
    """A precursor of one CPU serves as ever; one that is given more makes way where all trials then fit, and only there."""
    partition = Partition(name="gpu", default=True, max_memory_per_cpu_mb=per_cpu or None)
    rules = SiteRules(config={}, partitions=(partition,))
    asks = Hosting(rules=rules, nodes=(fake_node("n1", gpus=gpus, cpus=cpus),)).reason_for(wants)
    holder = -(-wants.precursor_mb // per_cpu) if per_cpu else 1
    trials = gpus * wants.trial_cpus
    hosted = trials <= cpus and gpus * wants.trial_mb + wants.precursor_mb <= cpus * per_cpu
    assert bool(asks) == (holder > 1 and hosted and cpus < holder + trials)


@given(cores=st.integers(0, 4096), cpus=st.integers(1, 16), apart=st.booleans(), gpus=st.integers(1, 8))
def test_workers_that_fit_fill_the_cores_that_trials_leave(cores, cpus, apart, gpus):
    """One more would not fit; where the partition is the trials' own those go first, but for a few workers that may wait."""
    partitions = (Partition(name="gpu", default=True, cpus=cores), Partition(name="cpu", cpus=cores))
    site = Hosting(
        partition="gpu",
        cpu_partition="cpu" if apart else None,
        rules=SiteRules(config={}, partitions=partitions),
        nodes=(fake_node("n1", gpus=gpus, cpus=cores),),
    )
    left = cores - (0 if apart else 2 * gpus)
    few = max(1, min(FEW_WORKERS, cores // cpus))
    assert site.workers_that_fit(WANTS, cpus) == (max(few, left // cpus) if cores else None)
    assert Hosting().workers_that_fit(WANTS, cpus) is None


@pytest.mark.parametrize(("allots", "fit"), [("CR_Core_Memory", 15), ("CR_Core", 32)])
def test_no_more_workers_fit_than_memory_holds_where_slurm_allots_it(allots, fit):
    (partition,) = parse_partitions(
        "PartitionName=cpu Default=YES State=UP TotalCPUs=32 TotalNodes=4 TRES=cpu=32,mem=62.50G,node=4"
    )
    rules = SiteRules(config={"SelectTypeParameters": allots}, partitions=(partition,))
    site = Hosting(partition="gpu", cpu_partition="cpu", rules=rules)
    assert site.workers_that_fit(WANTS, 1, 4096) == fit


# --- before anything is submitted ----------------------------------------------------------------------------------------


class Refusing(FakeCluster):
    """Refuses jobs of some purposes in words of the site's."""

    def __init__(self, nodes, words="", *purposes):
        super().__init__(fleet=nodes)
        self.words, self.purposes = words, purposes

    def check(self, job):
        if job.purpose in self.purposes:
            raise RefusedError(self.words)


DOWN = [replace(fake_node(n), usable=False, state="drained", reason="new driver") for n in ("n1", "n2")]
OUT = Config(nodes=NodesConfig(exclude=("n1",), features=("nvlink",)))
LEFT_OUT = [apply_node_settings(fake_node(n), OUT) for n in ("n1", "n2")]
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
def test_a_cluster_that_cannot_run_an_evaluation_is_refused_with_what_to_set(case):
    nodes, refusal, says = CHECKED[case]
    said = ""
    try:
        check_cluster(Refusing(nodes, *refusal), record(1))
    except OperatorError as error:
        said = str(error)
    assert re.search(says, said) if says else said == ""


def test_a_wrong_setting_of_precursors_is_no_reason_to_host_trials():
    """Else the evaluation would start on a lower rung, or end at its first precursor. Other jobs are taken."""
    cluster = Refusing([fake_node("n1")], "Batch job submission failed: Invalid qos specification", "stage")
    assert host_reason(SiteRules(config={}), None, precursor_refusal(cluster, ["n1"])) == ""
    kinds = {kind: status for kind, (status, _, _) in collect._job_kinds(Config(), cluster, cluster.nodes())}
    assert kinds == {"build": "ok", "stage": "fail", "trial": "ok", "metric": "ok"}
