"""Laws on one real Slurm: what jobs get, what it refuses, and a controller or commands that fail as was seen.

Wrappers of its commands stand before them in the user's PATH, and pass on to them.
"""

import re
import shutil
import signal
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.slurm_options import on_site, slurm_options

from coordinator.site.cluster import ClusterError, Job, LimitError, RefusedError
from coordinator.site.cluster.node_choice import in_hostlist
from coordinator.site.cluster.slurm_cli import SlurmCli
from coordinator.site.cluster.slurm_rules import refusing_partitions, request_taken

pytestmark = pytest.mark.slurm


@pytest.fixture
def folder(plain_cluster):
    """A folder of the user: for logs, and for wrappers of Slurm's commands."""
    made = Path(plain_cluster.user_dir) / uuid.uuid4().hex[:8]
    plain_cluster.run_as_user(["mkdir", "-m", "777", str(made)], check=True)
    return made


def job(folder, script="exec sleep 600", **more):
    name = f"es-{uuid.uuid4().hex[:8]}"
    asked = {"log": str(folder / name), "memory_mb": 100, "time_limit_seconds": 600} | more
    return Job(name=name, argv=("sh", "-c", script), **asked)


def found(slurm, work):
    return [state for state in slurm.jobs() if state.name == work.name]


def wrapper(folder, name, script):
    """`true`: stands for the true command in the script."""
    (folder / name).write_text(f"#!/bin/sh\n{script.replace('true', str(shutil.which(name)))}\n")
    (folder / name).chmod(0o755)


GPUS, NODE = "echo $CUDA_VISIBLE_DEVICES", "echo $SLURMD_NODENAME"
FORMS = ("--gres=gpu:{n}", "--gres=gpu:{type}:{n}", "--gpus-per-node={n}", "--gpus={type}:{n}", "-G {n}")
CHOICES = ({"exclude": ("n[1,7-9]",)}, {"include": ("n[2-3]",)}, {"features": ("rack2",)})


def test_jobs_get_gpus_by_each_form_of_request_and_nodes_by_each_choice(plain_cluster, folder):
    """On a named node and on none; the check accepts what a submission does. Offers keep off the nodes that jobs keep off."""
    options = on_site(plain_cluster)
    asked = {}
    for form in FORMS:
        slurm = SlurmCli(slurm_options(options, partition="gpu", slurm={"gpu_request": form}))
        work = job(folder, GPUS, gpus=2, node="n2")
        slurm.check(replace(work, node=None))
        slurm.submit(work)
        asked[work.log] = "0,1"
    for choice in CHOICES:
        slurm = SlurmCli(slurm_options(options, partition="gpu", nodes=choice))
        assert {n.name: n.usable for n in slurm.nodes()} == {"n1": False, "n2": True}
        for work in (job(folder, NODE), job(folder, NODE)):
            slurm.submit(work)
            asked[work.log] = "n2"
    wait_until(lambda: all(s.phase == "ended" for s in SlurmCli(options).jobs()), "all jobs have ended")
    assert {log: Path(log).read_text().strip() for log in asked} == asked


# what a job asks for, settings -> the error, and whether its node may be the reason
REFUSED = {
    "a type of GPU that no node has": ({"gpus": 1}, {"slurm": {"gpu_request": "--gres=gpu:h100:{n}"}}, RefusedError, True),
    "memory that its node lacks": ({"node": "n1", "memory_mb": 900_000}, {}, RefusedError, True),
    "GPUs that its node lacks": ({"node": "n1", "gpus": 7}, {}, RefusedError, True),
    "a node that is gone": ({"node": "n9"}, {}, RefusedError, True),
    "a node of another partition": ({"node": "c1", "gpus": 1}, {}, RefusedError, True),
    "a partition that is not there": ({"gpus": 1}, {"partition": "nope"}, RefusedError, False),
    "a drained partition": ({"best_effort": True}, {}, LimitError, False),
    "a drained partition's node": ({"best_effort": True, "node": "n1"}, {}, LimitError, False),
}  # fmt: skip


def test_a_refusal_says_whether_its_node_or_time_may_end_it(plain_cluster, folder):
    """A job of a drained partition, as before a maintenance, is submitted again later."""
    plain_cluster.update("partitionname=spare", "state=drain")
    try:
        for what, (fields, settings, kind, of_node) in REFUSED.items():
            slurm = SlurmCli(on_site(plain_cluster, **{"borrow": {"best_effort": "spare"}, **settings}))
            with pytest.raises(kind) as caught:
                slurm.submit(job(folder, **fields))
            assert getattr(caught.value, "of_node", False) is of_node, what
            if kind is RefusedError:
                with pytest.raises(RefusedError):
                    slurm.check(job(folder, **fields))
    finally:
        plain_cluster.update("partitionname=spare", "state=up")


def test_a_job_that_its_partition_never_starts_is_told_by_its_reason(tight_cluster):
    """Where a site's own arguments ask for more: what Slurm queues then is pending for PartitionTimeLimit."""
    slurm = SlurmCli(on_site(tight_cluster, extra_args=("--time=120",)))
    job_id = slurm.submit(work := job(Path(tight_cluster.user_dir)))
    wait_until(lambda: found(slurm, work)[0].reason == "PartitionTimeLimit", "Slurm says the reason")
    assert found(slurm, work)[0].phase == "pending"
    slurm.cancel([job_id])


def test_slurm_reads_a_hostlist_as_evalspan_does(plain_cluster):
    for hosts in ("n[08-12,3]", "a[1-2]b[0-1],c", "n[098-101]", "r[1-2][00-01]"):
        named = plain_cluster.run_as_user(["scontrol", "show", "hostnames", hosts]).stdout.split()
        digits = {name: re.sub(r"\d", str(int(name[-1] == "1")), name) for name in named}
        assert named
        assert all(in_hostlist(name, hosts) for name in named)
        assert all(in_hostlist(other, hosts) == (other in named) for other in digits.values())


# --- partitions that are closed, or not there ----------------------------------------------------------------------------

RULES = """
from pathlib import Path
from coordinator.site.cluster.slurm_rules import ask_rules
from coordinator.site.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.runtime import wiring
print([p.name for p in ask_rules().partitions if p.hidden])
for setting in ({"partition": "nope"}, {"cpu_partition": "nope"}, {"partition": "cpu"}):
    config = Config.model_validate({"work_dir": Path("."), "cluster": {"kind": "slurm", **setting}})
    try:
        wiring.site_hosting(config, wiring.cluster_of(config))
    except OperatorError as error:
        print(error)
"""


def test_a_partition_of_another_group_refuses_and_one_that_is_not_there_is_named(plain_cluster):
    """Though listings with --all show its nodes, and its jobs would fit; `init` finds no form of request there, and elsewhere
    the one that the site takes.

    Slurm 25.11 takes the job with EnforcePartLimits=NO and never starts it: such a partition counts as hidden.
    """
    options = on_site(plain_cluster)
    each = {n: SlurmCli(slurm_options(options, partition=n)) for n in ("gpu", "cpu")}

    def asking(form):
        return SlurmCli(slurm_options(options, partition="gpu", slurm={"gpu_request": form}))

    def strict(form):  # a site that wants a type: Slurm refuses what no node has
        return asking(form if "{type}" in form else form.replace("gpu:", "gpu:none:"))

    assert [request_taken(asking), request_taken(strict)] == ["--gres=gpu:{n}", "--gres=gpu:{type}:{n}"]
    assert refusing_partitions(each) == {}
    version = plain_cluster.run_as_user(["sinfo", "--version"]).stdout.split()[1]
    plain_cluster.update("PartitionName=gpu", "AllowGroups=root")
    try:
        assert request_taken(asking) is None
        assert refusing_partitions(each).keys() == ({"gpu"} if version < "25.11" else set())
        done = plain_cluster.run_as_user(
            [plain_cluster.python, "-c", RULES], cwd=plain_cluster.repo, check=True
        )
    finally:
        plain_cluster.update("PartitionName=gpu", "AllowGroups=ALL")
    there = "it has: spare, cpu"
    assert done.stdout.splitlines() == [
        "['gpu']",
        f"the cluster has no partition 'nope' (--partition, [cluster] partition); {there}",
        f"the cluster has no partition 'nope' ([cluster] cpu_partition); {there}",
    ]


# --- faults --------------------------------------------------------------------------------------------------------------


def raised(call):
    with pytest.raises(ClusterError) as caught:
        call()
    assert type(caught.value) is ClusterError


def test_a_submission_that_happened_and_timed_out_is_found_by_its_name(plain_cluster, folder):
    """Fault 7: it is in the next listing, once, and with its id."""
    slurm = SlurmCli(on_site(plain_cluster, str(folder)))
    wrapper(folder, "sbatch", f'true "$@" > {folder}/id && exec sleep 600')
    for seconds in (3.0, 15.0, 75.0):  # longer where this machine was too slow to let it happen
        late, work = SlurmCli(replace(slurm.options, timeout_seconds=seconds)), job(folder)
        raised(lambda late=late, work=work: late.submit(work))
        if (folder / "id").read_text():
            break
    (state,) = found(slurm, work)
    assert state.job_id == (folder / "id").read_text().strip()
    assert state.phase in ("pending", "running")
    slurm.cancel([state.job_id])
    wait_until(lambda: all(s.phase == "ended" for s in found(slurm, work)), "it has ended")


def test_a_frozen_controller_is_no_news_and_its_thaw_is_news(plain_cluster, folder):
    """Fault 3: every call comes back within its time limit; afterwards the jobs are as they were."""
    slurm = SlurmCli(on_site(plain_cluster))
    job_id = slurm.submit(work := job(folder))
    quick = SlurmCli(replace(slurm.options, timeout_seconds=1.0))
    plain_cluster.signal_controller(signal.SIGSTOP)
    try:
        for call in (quick.jobs, quick.nodes, lambda: quick.submit(work), lambda: quick.cancel([job_id])):
            raised(call)
        raised(lambda: quick.check(work))
    finally:
        plain_cluster.signal_controller(signal.SIGCONT)

    def listed():  # the controller may first work off what was cancelled, or submitted, when we gave up
        try:
            return job_id in {s.job_id for s in found(slurm, work)}
        except ClusterError:
            return False

    wait_until(listed, "the controller answers")
    slurm.cancel([s.job_id for s in found(slurm, work)])
