"""Laws of the shapes that make the development cluster a production site: cgroups, accounting, limits, power."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev_cluster import accounting, real_site
from dev_cluster.api import Cluster, DevClusterError
from dev_cluster.testing import cancel, sbatch, srun, state, wait_state
from support.sites import cluster

pytestmark = pytest.mark.slurm

TAKES_400_MIB = "python3 -c 'x = bytearray(400 << 20)'"

ASKS_FOR_4_HOURS = """
from coordinator.cluster import Job
from coordinator.cluster.slurm_cli import SlurmCli, SlurmOptions
job = Job(name="es-long", argv=("true",), log="/dev/null", time_limit_seconds=4 * 3600)
print(SlurmCli(SlurmOptions()).within_limits(job).time_limit_seconds)
"""

LIMITS_OF = """
import sys
from coordinator.cluster.slurm_rules import ask_accounting, ask_rules
found = ask_accounting(ask_rules())
for limit in found.limits(None, sys.argv[1], ["gpu"]):
    print(limit.name, limit.what, limit.most, limit.holder, sep="|")
"""


@pytest.fixture(scope="module")
def strict() -> Iterator[Cluster]:
    """Cgroups, accounting and a partition limit at once."""
    try:
        accounting.check_machine()
    except DevClusterError as error:
        pytest.skip(str(error))
    if not real_site.CGROUP_V1.is_dir():
        pytest.skip("cgroup v1 is not mounted")
    shape = {"cgroups": True, "accounting": True, "max_time": 60, "part_limits": "ALL"}
    with cluster(nodes=1, gpus=2, cpu_nodes=1, cpus=8, **shape) as made:
        yield made


@pytest.fixture(scope="module")
def mixed() -> Iterator[Cluster]:
    """A small node, another GPU type, long names, a reservation and no arrays."""
    with cluster(nodes=4, gpus=2, cpu_nodes=0, cpus=8, mixed=True, reservation=True, max_array=1) as made:
        yield made


def test_a_job_beyond_its_memory_is_ended_by_the_kernel(strict: Cluster) -> None:
    """With --cgroups Slurm calls that OUT_OF_MEMORY."""
    wait_state(strict, sbatch(strict, TAKES_400_MIB, "--mem=100"), "OUT_OF_MEMORY")
    wait_state(strict, sbatch(strict, TAKES_400_MIB, "--mem=800"), "COMPLETED")


def test_a_job_opens_its_own_gpus_alone(strict: Cluster) -> None:
    """With --cgroups the file of a GPU that was not asked for cannot be opened."""
    devices = strict.dir / "dev"
    opened = srun(strict, f"cat {devices}/nvidia0; cat {devices}/nvidia1; true", "--gpus=1", "-o/dev/null")
    assert opened == ""
    said = strict.run_as_user(
        ["srun", "--mem=100", "--gpus=1", "cat", devices / "nvidia0", devices / "nvidia1"]
    )
    assert said.stderr.count("No such device") == 1  # allowed, and no driver answers
    assert said.stderr.count("Operation not permitted") == 1


def test_a_quality_of_service_limits_jobs(strict: Cluster) -> None:
    """With --accounting a job beyond a limit waits with Slurm's reason, and one too many is refused."""
    late = sbatch(strict, "true", "--qos=short", "--time=40")
    shown = strict.run_as_user(["squeue", "--noheader", "-j", late, "-o", "%r"]).stdout.strip()
    assert (state(strict, late), shown) == ("PENDING", "QOSMaxWallDurationPerJobLimit")
    cancel(strict, late)
    jobs = [sbatch(strict, "exec sleep 600", "--qos=few-submits") for _ in range(4)]
    one_more = strict.run_as_user(["sbatch", "--qos=few-submits", "--wrap", "true"])
    assert "violates accounting/QOS policy" in one_more.stderr
    cancel(strict, *jobs)


def test_limits_of_qos_user_and_account_are_read(strict: Cluster) -> None:
    """As sacctmgr set them; that of the QOS hides that of user and account."""
    limited = {
        ("user", "evalspan-test"): ["grptres=cpu=8,mem=20G", "maxjobs=40"],
        ("account", real_site.ACCOUNT): ["grptres=gres/gpu=3", "grpsubmit=100"],
    }
    try:
        for (kind, name), limits in limited.items():
            accounting.modify(strict.record, kind, name, *limits)
        argv = [strict.python, "-c", LIMITS_OF, "few-cpus"]
        said = strict.run_as_user(argv, check=True).stdout.splitlines()
    finally:
        for (kind, name), limits in limited.items():
            nothing = [re.sub(r"[^=,]+(?=,|$)", "-1", limit) for limit in limits]
            accounting.modify(strict.record, kind, name, *nothing)
    own = "your association with account research"
    assert set(said) == {
        "GrpTRES|cpu|2|QOS few-cpus",
        f"MaxJobs|jobs|40|{own}",
        f"GrpTRES|mem|20480|{own}",
        "GrpTRES|gres/gpu|3|account research",
        "GrpSubmit|jobs|100|account research",
    }


def test_an_unknown_account_is_refused(strict: Cluster) -> None:
    done = strict.run_as_user(["sbatch", "--account=nope", "--wrap", "true"])
    assert "Invalid account" in done.stderr


def test_a_job_that_names_no_qos_asks_for_no_more_time_than_the_default_one_allows(strict: Cluster) -> None:
    accounting.set_default_qos(strict.record, "short")
    try:
        done = strict.run_as_user([strict.python, "-c", ASKS_FOR_4_HOURS], check=True)
        assert done.stdout.split() == ["1800"]
    finally:
        accounting.set_default_qos(strict.record, "normal")


def test_a_time_beyond_the_partition_is_refused(strict: Cluster) -> None:
    """With --max-time and --part-limits ALL."""
    done = strict.run_as_user(["sbatch", "--time=61", "--wrap", "true"])
    assert "time limit is invalid" in done.stderr


def test_nothing_of_a_site_is_left() -> None:
    """Its control groups, its database and its folder go with it."""
    try:
        accounting.check_machine()
    except DevClusterError as error:
        pytest.skip(str(error))
    with cluster(nodes=1, gpus=1, cpu_nodes=0, cpus=4, cgroups=True, accounting=True) as made:
        folder = made.dir
        srun(made, "true")
    assert not folder.exists()
    assert not list(Path("/sys/fs/cgroup").glob("*/slurm_n1/uid_*"))


def test_a_mixed_site_has_what_its_flag_says(mixed: Cluster) -> None:
    """n1 is small, n2 has another GPU type, the others have names of 60 characters, and run jobs."""
    shown = mixed.run_as_user(["sinfo", "--noheader", "-N", "-p", "gpu", "-o", "%N %m %G"]).stdout
    nodes = {name: (int(mb), gres) for name, mb, gres in (line.split() for line in shown.splitlines())}
    assert nodes["n1"] == (2000, "gpu:a100:2")
    assert nodes["n2"] == (64000, "gpu:h100:2")
    long = [name for name in nodes if len(name) == 60]
    assert [name[:-1] for name in long] == [long[0][:-1]] * 2
    for name in long:
        assert srun(mixed, "hostname", "--gpus=1", "-w", name) == name


def test_a_reservation_keeps_its_node(mixed: Cluster) -> None:
    job = sbatch(mixed, "true", "-w", "n1")
    shown = mixed.run_as_user(["squeue", "--noheader", "-j", job, "-o", "%T %r"]).stdout
    assert shown.startswith("PENDING")
    cancel(mixed, job)


def test_a_site_without_arrays_refuses_one(mixed: Cluster) -> None:
    """With --max-array 1."""
    done = mixed.run_as_user(["sbatch", "--array=0-1", "--wrap", "true"])
    assert "Invalid job array specification" in done.stderr


def test_a_node_without_power_boots_for_a_job(machine: None) -> None:
    """With --power-save a GPU node is off until a job needs it; with --untyped-gres its GPUs have no type."""
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8, power_save=True, untyped_gres=True) as made:
        assert {made.node_states()[name] for name in made.gpu_nodes} == {"idle~"}
        assert srun(made, "hostname", "--gpus=1", "-w", "n2") == "n2"
        assert made.node_states()["n1"] == "idle~"
        shown = made.run_as_user(["sinfo", "--noheader", "-n", "n2", "-p", "gpu", "-o", "%G"]).stdout
        assert shown.strip() == "gpu:2"
