"""Laws of the development cluster's sites: jobs, nodes and daemons behave as at a real one, in each shape that a flag makes.

Each test leaves its cluster whole.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from dev_cluster import accounting, procs, real_site
from dev_cluster.api import dev_cluster
from dev_cluster.site_view import Exposure, ViewPlan, closed_ancestor, plan_view
from dev_cluster.testing import cancel, rpcs, sbatch, srun, wait_state, wait_until
from hypothesis import given
from hypothesis import strategies as st
from support.sites import cluster

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def mixed():
    """A small node, another GPU type, long names, a reservation and no arrays."""
    if not os.environ.get("EVALSPAN_DEEP"):
        pytest.skip("scripts/check --deep runs this")
    with cluster(nodes=4, gpus=2, cpu_nodes=0, cpus=8, mixed=True, reservation=True, max_array=1) as made:
        yield made


# --- an ordinary site --------------------------------------------------------------------------------------------------


def test_a_job_is_the_ordinary_users_and_sees_its_nodes_memory(plain_cluster):
    """Its interpreter imports the venv's packages and the repository. A file left in /dev/shm is seen by the next job on that
    node and by none on another."""
    code = (
        "import os, sys, evaljobs; print(os.getuid(), os.environ['USER'], sys.executable, evaljobs.__file__)"
    )
    uid, user, python, module = srun(
        plain_cluster, f'"{plain_cluster.python}" -c "{code}"', "-p", "cpu"
    ).split()
    assert uid == str(plain_cluster.record.uid) != "0"
    assert (user, python) == (plain_cluster.user, str(plain_cluster.python))
    assert module.startswith(str(plain_cluster.repo))
    srun(plain_cluster, "echo weights > /dev/shm/left", "-w", "n1")
    assert srun(plain_cluster, "cat /dev/shm/left", "-w", "n1") == "weights"
    assert srun(plain_cluster, "ls /dev/shm", "-w", "n2") == ""
    assert srun(plain_cluster, "rm /dev/shm/left; hostname", "-w", "n1") == "n1"


def test_two_clusters_do_not_meet(plain_cluster):
    """Clusters side by side have their own queues, nodes and keys, under the same node names."""
    with dev_cluster(nodes=1, gpus=1, cpu_nodes=0, cpus=4) as other:
        assert not set(other.record.ports) & set(plain_cluster.record.ports)
        job = sbatch(plain_cluster, "exec sleep 600", "-w", "n1")
        srun(other, "touch /dev/shm/other", "-w", "n1")
        queue = ["squeue", "--noheader"]  # the job of srun is in it until its node is swept
        wait_until(lambda: other.run_as_user(queue, check=True).stdout == "", "the other queue is empty")
        assert srun(plain_cluster, "ls /dev/shm", "-w", "n1") == ""
        here, there = (made.record.layout.munge_socket for made in (plain_cluster, other))
        refused = plain_cluster.run_as_user(["sh", "-c", f"munge -n -S {here} | unmunge -S {there}"])
        assert "Invalid credential" in refused.stdout + refused.stderr
    wait_state(plain_cluster, job, "RUNNING")
    cancel(plain_cluster, job)


def test_jobs_outlive_their_slurmd_and_their_controller(plain_cluster):
    """slurmd, and then slurmctld, killed and started again: the job runs on at the same pid, and one that was held waits."""
    job = sbatch(plain_cluster, "exec sleep 600", "-w", "n1")
    held = sbatch(plain_cluster, "true", "--hold", "--job-name=held-until-saved")
    wait_state(plain_cluster, job, "RUNNING")

    def sleeps():  # while the shell becomes the sleep, /proc shows no environment
        return [procs.command_name(pid) for pid in plain_cluster.job_pids(job)] == ["sleep"]

    def on_disk():
        try:
            return b"held-until-saved" in (plain_cluster.record.layout.state / "job_state").read_bytes()
        except FileNotFoundError:  # not yet, or just being replaced: slurmctld unlinks the old one first
            return False

    wait_until(sleeps, "the job's script runs")
    wait_until(on_disk, "the queue is on disk")
    before, old = plain_cluster.job_pids(job), plain_cluster.node_pid("n1")
    plain_cluster.kill_slurmd("n1")
    plain_cluster.start_node("n1")
    plain_cluster.kill_controller()
    assert plain_cluster.run_as_user(["scontrol", "ping"]).returncode != 0
    plain_cluster.start_controller()
    wait_state(plain_cluster, job, "RUNNING")
    wait_state(plain_cluster, held, "PENDING")
    assert plain_cluster.job_pids(job) == before
    assert plain_cluster.node_pid("n1") != old
    cancel(plain_cluster, job, held)


def test_an_evaluation_costs_the_controller_few_rpcs(plain_cluster, make_site):
    """By sdiag, not by commands: two a listing, of jobs and partitions or of nodes and partitions, and one a submission. Its
    jobs are looked at each `poll_seconds` and once or twice for their ends, its nodes less often; a start asks for the site's
    rules once.
    """
    site = make_site(plain_cluster)
    site.env["EVALSPAN_CLUSTER_POLL_SECONDS"] = "10"
    assert site.run(site.command("submit", str(site.model), "--suite", str(site.suite))).returncode == 0
    before = rpcs(plain_cluster)
    done = site.run(site.command("daemon", "--until-idle"), timeout=400)
    assert done.returncode == 0, done.stderr
    kinds, events = rpcs(plain_cluster) - before, site.events()
    looks = 1 + (events[-1]["at"] - events[0]["at"]) / 10
    assert kinds["REQUEST_SUBMIT_BATCH_JOB"] == sum(e["kind"] == "job-submitted" for e in events)
    assert kinds["REQUEST_JOB_USER_INFO"] <= looks + 2
    assert kinds["REQUEST_NODE_INFO"] <= looks
    listings = kinds["REQUEST_JOB_USER_INFO"] + kinds["REQUEST_NODE_INFO"]
    assert kinds["REQUEST_PARTITION_INFO"] <= listings + 2
    assert kinds["REQUEST_BUILD_INFO"] <= 2
    assert kinds["REQUEST_FED_INFO"] <= 1  # `sbatch --test-only`
    assert kinds.total() <= kinds["REQUEST_SUBMIT_BATCH_JOB"] + 2 * listings + 6, kinds


# --- sites with rules --------------------------------------------------------------------------------------------------

# the site, what sbatch is given, what Slurm says: its refusal, or the state and the reason of a job that waits
SAID = {
    "a job without a GPU on a site of GPU jobs": ("odd_cluster", "-p gpu", "ask for a GPU"),
    "the same of a spare partition": ("odd_cluster", "-p spare", "ask for a GPU"),
    "the same of two partitions": ("odd_cluster", "-p cpu,gpu", "ask for a GPU"),
    "the same of the CPU partition": ("odd_cluster", "-p cpu --hold", "PENDING JobHeldUser"),
    "GPUs by each node": ("odd_cluster", "--gpus-per-node=1 --hold", "PENDING JobHeldUser"),
    "GPUs by each task": ("odd_cluster", "-n1 --gpus-per-task=1 --hold", "PENDING JobHeldUser"),
    "an unknown account": ("strict_cluster", "--account=nope", "Invalid account"),
    "a time beyond the partition": ("strict_cluster", "--time=61", "time limit is invalid"),
    "a time beyond the QOS": (
        "strict_cluster",
        "--qos=short --time=40",
        "PENDING QOSMaxWallDurationPerJobLimit",
    ),
    "an array where none is taken": ("mixed", "--array=0-1", "Invalid job array specification"),
    "a node that is reserved": ("mixed", "-w n1", "PENDING"),
}


@pytest.mark.parametrize("what", SAID)
def test_a_site_refuses_or_keeps_waiting_what_its_rules_say(what, request):
    """At the submission, in Slurm's own words, or by the reason that its queue shows."""
    name, words, says = SAID[what]
    site = request.getfixturevalue(name)
    done = site.run_as_user(["sbatch", "--parsable", *words.split(), "--wrap", "true"])
    if done.returncode:
        assert says in done.stderr
        return
    shown = site.run_as_user(["squeue", "--noheader", "-j", done.stdout.strip(), "-o", "%T %r"]).stdout
    cancel(site, done.stdout.strip())
    assert shown.startswith(says)


def test_a_job_opens_its_own_gpus_alone(strict_cluster):
    """With --cgroups the file of a GPU that was not asked for cannot be opened."""
    files = [strict_cluster.dir / "dev" / f"nvidia{number}" for number in (0, 1)]
    said = strict_cluster.run_as_user(["srun", "--mem=100", "--gpus=1", "cat", *files])
    assert said.stderr.count("No such device") == 1  # allowed, and no driver answers
    assert said.stderr.count("Operation not permitted") == 1


def test_a_quality_of_service_limits_jobs(strict_cluster):
    """With --accounting one too many is refused."""
    jobs = [sbatch(strict_cluster, "exec sleep 600", "--qos=few-submits") for _ in range(4)]
    one_more = strict_cluster.run_as_user(["sbatch", "--qos=few-submits", "--wrap", "true"])
    assert "violates accounting/QOS policy" in one_more.stderr
    cancel(strict_cluster, *jobs)


ASKS_FOR_4_HOURS = """
from coordinator.site.cluster import Job
from coordinator.site.cluster.slurm_cli import SlurmCli, SlurmOptions
job = Job(name="es-long", argv=("true",), log="/dev/null", time_limit_seconds=4 * 3600)
print(SlurmCli(SlurmOptions()).within_limits(job).time_limit_seconds)
"""
LIMITS_OF = """
from coordinator.site.cluster.slurm_rules import ask_accounting, ask_rules
for limit in ask_accounting(ask_rules()).limits(None, "few-cpus", ["gpu"]):
    print(limit.name, limit.what, limit.most, limit.holder, sep="|")
"""


def test_evalspan_reads_the_limits_of_qos_user_and_account(strict_cluster):
    """As sacctmgr set them; that of the QOS hides that of user and account. A job that names no QOS asks for no more time than
    the default one allows."""
    limited = {
        ("user", "evalspan-test"): ["grptres=cpu=8,mem=20G", "maxjobs=40"],
        ("account", real_site.ACCOUNT): ["grptres=gres/gpu=3", "grpsubmit=100"],
    }

    def said(code):
        return strict_cluster.run_as_user([strict_cluster.python, "-c", code], check=True).stdout.splitlines()

    try:
        for (kind, name), limits in limited.items():
            accounting.modify(strict_cluster.record, kind, name, *limits)
        found = said(LIMITS_OF)
        accounting.set_default_qos(strict_cluster.record, "short")
        assert said(ASKS_FOR_4_HOURS) == ["1800"]
    finally:
        accounting.set_default_qos(strict_cluster.record, "normal")
        for (kind, name), limits in limited.items():
            nothing = [re.sub(r"[^=,]+(?=,|$)", "-1", limit) for limit in limits]
            accounting.modify(strict_cluster.record, kind, name, *nothing)
    own = "your association with account research"
    assert set(found) == {
        "GrpTRES|cpu|2|QOS few-cpus",
        f"MaxJobs|jobs|40|{own}",
        f"GrpTRES|mem|20480|{own}",
        "GrpTRES|gres/gpu|3|account research",
        "GrpSubmit|jobs|100|account research",
    }


# --- folders that are closed to the user -------------------------------------------------------------------------------


def test_a_closed_clone_is_usable(plain_cluster):
    """A clone that is itself a 0700 folder in /tmp, with a venv in it, serves the user's jobs; the
    folder stays closed."""
    clone = Path(tempfile.mkdtemp(prefix="newcomer.", dir="/tmp"))
    try:
        (clone / "evaljobs").mkdir()
        (clone / "evaljobs" / "__init__.py").write_text("where = __file__\n")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(clone / ".venv")], check=True)
        with dev_cluster(nodes=1, gpus=1, cpu_nodes=0, cpus=4, repo=clone) as made:
            code = "import evaljobs, sys; print(evaljobs.where, sys.prefix)"
            inside = srun(made, f'"{made.python}" -c "{code}"').split()
            assert inside == [f"{clone}/evaljobs/__init__.py", str(made.python.parents[1])]
            assert made.run_as_user([made.python, "-c", code]).stdout.split() == inside
        assert clone.stat().st_mode & 0o777 == 0o700
        assert os.listdir(clone / "evaljobs") == ["__init__.py"]  # noqa: PTH208
    finally:
        shutil.rmtree(clone)


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda parts: Path("/", *parts))


def visible(path, plan, closed):
    """Whether everybody sees `path` once the plan is carried out, told by walking the mounts."""
    shown = [bind for bind in plan.binds if path.is_relative_to(bind.target)]
    if shown:
        nearest = max(shown, key=lambda bind: len(bind.target.parts))
        inner = path.relative_to(nearest.target).parts
        between = [nearest.source.joinpath(*inner[: i + 1]) for i in range(len(inner))]
        entered = between if nearest.by_entry else [nearest.source, *between]
        return not any(folder in closed for folder in entered)
    if any(path.is_relative_to(mask) for mask in plan.masks):
        return False
    return not any(folder in closed for folder in [*path.parents, path])


@given(wanted=st.sets(PATHS, max_size=4), closed=st.sets(PATHS, max_size=5))
def test_every_wanted_path_becomes_visible_and_only_closed_folders_are_covered(wanted, closed):
    """Whatever folders are closed above or at them; where none is there is no mount at all."""
    plan = plan_view([Exposure(source=p, target=p) for p in wanted], lambda p: p not in closed)
    assert all(visible(path, plan, closed) for path in wanted)
    assert set(plan.masks) <= closed
    assert all(any(path.is_relative_to(mask) for path in wanted) for mask in plan.masks)
    if all(closed_ancestor(path, lambda p: p not in closed) is None for path in wanted):
        assert plan == ViewPlan(masks=(), binds=())
