"""Laws of the shapes that make the development cluster an odd or a production site: each of its flags."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
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
def odd() -> Iterator[Cluster]:
    """All oddities at once."""
    shape = {"private_shm": True, "exclusive": True, "gpu_jobs_only": True}
    with cluster(nodes=1, gpus=2, cpu_nodes=1, cpus=8, **shape) as made:
        yield made


def need_accounting() -> None:
    try:
        accounting.check_machine()
    except DevClusterError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def strict() -> Iterator[Cluster]:
    """Cgroups, accounting and a partition limit at once."""
    need_accounting()
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


@pytest.mark.parametrize(
    ("site", "options", "says"),
    [
        ("odd", "-p gpu", "ask for a GPU"),
        ("odd", "-p spare", "ask for a GPU"),
        ("odd", "-p cpu,gpu", "ask for a GPU"),
        ("strict", "--account=nope", "Invalid account"),
        ("strict", "--time=61", "time limit is invalid"),
        ("mixed", "--array=0-1", "Invalid job array specification"),
    ],
)
def test_what_a_site_does_not_allow_is_refused(
    request: pytest.FixtureRequest, site: str, options: str, says: str
) -> None:
    """--gpu-jobs-only, --accounting, --max-time with --part-limits ALL, --max-array 1: at submission, in Slurm's words."""
    made: Cluster = request.getfixturevalue(site)
    done = made.run_as_user(["sbatch", *options.split(), "--wrap", "true"])
    assert done.returncode != 0
    assert says in done.stderr


def test_gpu_partitions_take_jobs_with_a_gpu(odd: Cluster) -> None:
    """With --gpu-jobs-only, however it is asked for; the cpu partition takes others."""
    for options in ("--gpus=1", "--gres=gpu:1", "--gpus-per-node=1", "-n1 --gpus-per-task=1", "-p cpu"):
        cancel(odd, sbatch(odd, "exec sleep 600", *options.split()))


def test_private_shm_is_empty_for_the_next_job(odd: Cluster) -> None:
    """With --private-shm a second job on the node finds neither /dev/shm nor /tmp of the first."""
    srun(odd, "echo weights > /dev/shm/left; touch /tmp/left", "-p", "cpu", "-w", "c1")
    assert srun(odd, "ls /dev/shm /tmp | grep left; true", "-p", "cpu", "-w", "c1") == ""


def test_exclusive_gives_whole_nodes(odd: Cluster) -> None:
    """With --exclusive a one-GPU job keeps its node from every other job."""
    first = sbatch(odd, "exec sleep 600", "--gpus=1")
    wait_state(odd, first, "RUNNING")
    second = sbatch(odd, "exec sleep 600", "--gpus=1")
    shown = odd.run_as_user(["squeue", "--noheader", "-j", first, "-o", "%C %h"]).stdout.split()
    assert shown[0] == "8"
    assert state(odd, second) == "PENDING"
    cancel(odd, first, second)


@pytest.mark.parametrize("private_shm", [False, True])
def test_a_closed_clone_is_usable(private_shm: bool) -> None:
    """A clone that is itself a 0700 folder in /tmp, with a venv in it, serves the user's jobs; the folder stays closed."""
    clone = Path(tempfile.mkdtemp(prefix="newcomer.", dir="/tmp"))
    try:
        (clone / "evaljobs").mkdir()
        (clone / "evaljobs" / "__init__.py").write_text("where = __file__\n")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(clone / ".venv")], check=True)
        # The cluster's own folder may lie in there too; with --private-shm it may not lie in /tmp.
        folder = None if private_shm else clone / "cluster"
        with cluster(
            nodes=1, gpus=1, cpu_nodes=0, cpus=4, repo=clone, dir=folder, private_shm=private_shm
        ) as made:
            assert not made.warnings
            code = "import evaljobs, sys; print(evaljobs.where, sys.prefix)"
            inside = srun(made, f'"{made.python}" -c "{code}"').split()
            assert inside == [f"{made.repo}/evaljobs/__init__.py", str(made.python.parents[1])]
            outside = made.run_as_user([made.python, "-c", code]).stdout.split()
            assert outside == inside
            assert (made.repo == clone) is not private_shm
        assert clone.stat().st_mode & 0o777 == 0o700
        assert os.listdir(clone / "evaljobs") == ["__init__.py"]  # noqa: PTH208
    finally:
        shutil.rmtree(clone)


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


def test_a_job_that_names_no_qos_asks_for_no_more_time_than_the_default_one_allows(strict: Cluster) -> None:
    accounting.set_default_qos(strict.record, "short")
    try:
        done = strict.run_as_user([strict.python, "-c", ASKS_FOR_4_HOURS], check=True)
        assert done.stdout.split() == ["1800"]
    finally:
        accounting.set_default_qos(strict.record, "normal")


def test_nothing_of_a_site_is_left() -> None:
    """Its control groups, its database and its folder go with it."""
    need_accounting()
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


def test_a_node_without_power_boots_for_a_job() -> None:
    """With --power-save a GPU node is off until a job needs it; with --untyped-gres its GPUs have no type."""
    with cluster(nodes=2, gpus=2, cpu_nodes=1, cpus=8, power_save=True, untyped_gres=True) as made:
        assert {made.node_states()[name] for name in made.gpu_nodes} == {"idle~"}
        assert srun(made, "hostname", "--gpus=1", "-w", "n2") == "n2"
        assert made.node_states()["n1"] == "idle~"
        shown = made.run_as_user(["sinfo", "--noheader", "-n", "n2", "-p", "gpu", "-o", "%G"]).stdout
        assert shown.strip() == "gpu:2"
