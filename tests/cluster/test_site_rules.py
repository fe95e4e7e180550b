"""Laws of the site's rules: what Slurm prints is read as what it means, and each oddity alone asks for a host."""

from __future__ import annotations

import pytest
from dev_cluster.api import Cluster
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cluster import fake_node

from coordinator.cluster.slurm_parse import seconds_of
from coordinator.cluster.slurm_rules import (
    FEW_WORKERS,
    Hosting,
    Partition,
    SiteRules,
    Wants,
    host_reason,
    parse_config,
    parse_partitions,
    private_memory,
    unknown_partition,
)
from coordinator.config import loading, template

ROW = (
    "PartitionName={name} Default=YES QoS=N/A MaxTime=2-00:00:00 Nodes=n1 OverSubscribe={share} State=UP "
    "TRESBillingWeights=CPU=1.0,Mem=0.25G MaxMemPerCPU=4000 MaxMemPerNode=UNLIMITED"
)


def test_a_partition_gives_way_where_slurm_preempts_by_partition() -> None:
    """Its jobs end for those of a higher tier; not without such a tier, nor under other preemption."""
    text = (
        "PartitionName=gpu PriorityTier=10 PreemptMode=REQUEUE State=UP\n"
        "PartitionName=spare PriorityTier=1 PreemptMode=REQUEUE State=UP\n"
        "PartitionName=kept PriorityTier=1 PreemptMode=OFF State=UP\n"
        "PartitionName=paused PriorityTier=1 PreemptMode=SUSPEND State=UP\n"
    )
    by_partition = {"PreemptType": "preempt/partition_prio"}
    every = parse_partitions(text)
    assert SiteRules(config=by_partition, partitions=every).preemptible == {"spare"}
    assert SiteRules(config=by_partition, partitions=every[1:]).preemptible == set()
    assert SiteRules(config={"PreemptType": "preempt/qos"}, partitions=every).preemptible == set()


def test_a_partition_that_the_cluster_lacks_is_named_with_its_setting() -> None:
    """Also one of several; hidden ones exist and are not listed."""
    text = "PartitionName=gpu Default=YES\nPartitionName=own Hidden=YES\nPartitionName=cpu\n"
    rules = SiteRules(config={}, partitions=parse_partitions(text))
    assert unknown_partition(rules, {"--partition": "gpu,own", "cpu_partition": None}) == ""
    assert unknown_partition(rules, {"--partition": "gpu,nope"}) == (
        "the cluster has no partition 'nope' (--partition); it has: gpu (default), cpu"
    )


NOPE = """
from pathlib import Path
from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.runtime import wiring
for setting in ({"partition": "nope"}, {"cpu_partition": "nope"}, {"partition": "gpu"}):
    config = Config.model_validate({"work_dir": Path("."), "cluster": {"kind": "slurm", **setting}})
    try:
        wiring.hosting(config, wiring.cluster_of(config))
    except OperatorError as error:
        print(error)
"""


@pytest.mark.slurm
def test_a_real_slurm_without_the_partition_says_which_it_has(slurm_site: Cluster) -> None:
    """Each setting that names one is checked before anything is submitted."""
    done = slurm_site.run_as_user([slurm_site.python, "-c", NOPE], cwd=slurm_site.repo, check=True)
    there = "it has: gpu (default), spare, cpu"
    assert done.stdout.splitlines() == [
        f"the cluster has no partition 'nope' (--partition, [cluster] partition); {there}",
        f"the cluster has no partition 'nope' ([cluster] cpu_partition); {there}",
    ]


@given(st.text())
def test_any_text_is_read_without_harm(text: str) -> None:
    """Garbage names no partition that asks for a host, and never raises."""
    parse_partitions(text)
    parse_config(text)
    seconds_of(text)


@pytest.mark.parametrize(
    ("value", "private"),
    [
        ("job_container/tmpfs", True),
        ("job_container/none", False),
        ("(null)", False),
        ("", False),
        ("namespace/linux", True),
    ],
)
def test_private_memory_is_told_by_the_plug_in(value: str, private: bool) -> None:
    """Slurm 25.11 renamed the plug-ins: both names count, and "none" is none."""
    assert bool(private_memory(parse_config(f"JobContainerType        = {value}"))) is private
    assert bool(private_memory({"NamespaceType": value})) is private


def test_without_staging_only_whole_nodes_matter() -> None:
    """Trials that read storage need no precursor; but on an exclusive node the second would wait for the first."""
    partitions = parse_partitions(
        ROW.format(name="a", share="NO") + "\n" + ROW.format(name="b", share="EXCLUSIVE")
    )
    rules = SiteRules(config={"JobContainerType": "job_container/tmpfs"}, partitions=partitions)
    assert not host_reason(rules, "a", "refused", stage=False)
    assert "refused" in host_reason(rules, "a", "refused")
    assert "tmpfs" in host_reason(rules, "a", "")
    assert "b gives whole nodes" in host_reason(rules, "a,b", "", stage=False)
    linear = SiteRules(config={"SelectType": "select/linear"})
    assert "select/linear" in host_reason(linear, None, "")


def test_the_reference_file_names_auto_and_both_answers_are_taken(tmp_path) -> None:
    """`auto` is the default; true and false of a file or the environment win over it."""
    assert 'host_trials = "auto"' in template.default_text("", {})
    assert loading.load(None, {}).stage.host_trials == "auto"
    for said, meant in (("true", True), ("false", False), ("auto", "auto")):
        assert loading.load(None, {"EVALSPAN_STAGE_HOST_TRIALS": said}).stage.host_trials == meant


@given(
    per_cpu=st.integers(0, 4000),
    cpus=st.integers(1, 64),
    gpus=st.integers(1, 8),
    precursor_mb=st.integers(512, 100_000),
    trial_mb=st.integers(100, 8000),
    trial_cpus=st.integers(1, 16),
)
def test_hosts_only_where_that_lets_more_trials_run(  # noqa: PLR0917
    per_cpu: int, cpus: int, gpus: int, precursor_mb: int, trial_mb: int, trial_cpus: int
) -> None:
    """A precursor of one CPU serves as ever; one that is given more makes way where all trials then fit, and only there."""
    partition = Partition(name="gpu", default=True, max_memory_per_cpu_mb=per_cpu or None)
    node = fake_node("n1", gpus=gpus, cpus=cpus)
    wants = Wants(precursor_mb=precursor_mb, trial_mb=trial_mb, trial_cpus=trial_cpus, trial_gpus=1)
    site = Hosting(rules=SiteRules(config={}, partitions=(partition,)), nodes=(node,))
    holder = -(-precursor_mb // per_cpu) if per_cpu else 1
    if site.reason_for(wants):
        assert holder > 1
        assert cpus - holder < gpus * trial_cpus <= cpus
        assert gpus * trial_mb + precursor_mb <= cpus * per_cpu
    elif holder > 1 and gpus * trial_cpus <= cpus and gpus * trial_mb + precursor_mb <= cpus * per_cpu:
        assert holder + gpus * trial_cpus <= cpus


@given(cores=st.integers(0, 4096), cpus=st.integers(1, 16), apart=st.booleans(), gpus=st.integers(1, 8))
def test_workers_that_fit_fill_the_cores_that_trials_leave(
    cores: int, cpus: int, apart: bool, gpus: int
) -> None:
    """One more would not fit; where the partition is the trials' own those go first, but for a few workers that may wait."""
    partitions = (Partition(name="gpu", default=True, cpus=cores), Partition(name="cpu", cpus=cores))
    wants = Wants(precursor_mb=512, trial_mb=1000, trial_cpus=2, trial_gpus=1)
    site = Hosting(
        partition="gpu",
        cpu_partition="cpu" if apart else None,
        rules=SiteRules(config={}, partitions=partitions),
        nodes=(fake_node("n1", gpus=gpus, cpus=cores),),
    )
    fit = site.workers_that_fit(wants, cpus)
    if not cores:
        assert fit is None
    else:
        left = cores - (0 if apart else 2 * gpus)
        assert fit is not None
        few = max(1, min(FEW_WORKERS, cores // cpus))
        assert fit >= few
        assert fit == few or fit * cpus <= left < (fit + 1) * cpus
    assert Hosting().workers_that_fit(wants, cpus) is None


@pytest.mark.parametrize(("allots", "fit"), [("CR_Core_Memory", 15), ("CR_Core", 32)])
def test_no_more_workers_fit_than_memory_holds_where_slurm_allots_it(allots: str, fit: int) -> None:
    (partition,) = parse_partitions(
        "PartitionName=cpu Default=YES State=UP TotalCPUs=32 TotalNodes=4 TRES=cpu=32,mem=62.50G,node=4"
    )
    rules = SiteRules(config={"SelectTypeParameters": allots}, partitions=(partition,))
    site = Hosting(partition="gpu", cpu_partition="cpu", rules=rules)
    wants = Wants(precursor_mb=512, trial_mb=1000, trial_cpus=2, trial_gpus=1)
    assert site.workers_that_fit(wants, 1, 4096) == fit
