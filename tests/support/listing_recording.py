"""Listings of a real Slurm with jobs and nodes in many states: `PYTHONPATH=tests:scripts python -m support.listing_recording`, as root.

Writes tests/cluster/recorded/NAME.txt. What is expected of each stands beside it, in NAME.json.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from dev_cluster import accounting, daemons
from dev_cluster.api import Cluster, dev_cluster
from dev_cluster.testing import cancel, sbatch, wait_state, wait_until

from coordinator.cluster.slurm_accounts import ACCOUNT_FORMAT, QOS_FORMAT, USER_FORMAT
from coordinator.cluster.slurm_parse import NODE_FORMAT, QUEUE_FORMAT

PLACE = Path(__file__).parents[1] / "cluster" / "recorded"
SHAPE = {"nodes": 4, "gpus": 2, "cpu_nodes": 1, "cpus": 8, "accounting": True}
SACCTMGR = ("sacctmgr", "-nP", "show")
COMMANDS = {
    "squeue": ("squeue", "--me", "--all", "--array", "--states=all", f"--format={QUEUE_FORMAT}"),
    "sinfo": ("sinfo", "--Node", "--all", f"--Format={NODE_FORMAT}"),
    "partitions": ("scontrol", "--all", "--oneliner", "show", "partition"),
    "reservations": ("scontrol", "--oneliner", "show", "reservation"),
    "user": (*SACCTMGR, "user", "USER", "withassoc", f"format={USER_FORMAT}"),
    "accounts": (*SACCTMGR, "assoc", "where", "user=", f"format={ACCOUNT_FORMAT}"),
    "qos": (*SACCTMGR, "qos", f"format={QOS_FORMAT}"),
}


def play(site: Cluster) -> None:
    """Jobs and nodes in the states that a listing may show."""
    for kind, name, *values in (
        ("qos", "short", "MaxWall=30"),
        (
            "qos",
            "few-gpus",
            "MinTRES=gres/gpu=1",
            "MaxTRES=cpu=4,mem=15872M",
            "MaxJobsPerUser=7",
            "MaxSubmitJobsPerAccount=44",
        ),
        ("account", "research", "GrpTRES=cpu=200,gres/gpu=64", "GrpSubmitJobs=100"),
        ("user", site.user, "MaxJobs=40", "MaxWall=45", "GrpTRES=mem=2T"),
    ):
        accounting.modify(site.record, kind, name, *values)
    site.update("PartitionName=spare", "QoS=short", "MaxTime=60")
    ours, log = "--comment=t/ev", f"--output={site.user_dir}/%j"
    site.user_env |= {"SBATCH_TIMELIMIT": "10", "SLURM_TIME_FORMAT": "%s"}
    for state, script in (("COMPLETED", "true"), ("FAILED", "false"), ("CANCELLED", "sleep 600")):
        job = sbatch(site, script, ours, log, f"--job-name=es-{state.lower()}")
        if state == "CANCELLED":
            cancel(site, job)
        wait_state(site, job, state)
    array = sbatch(
        site, "sleep 600", ours, log, "--array=0-3%2", "--gres=gpu:1", "-wn1", "--job-name=es-array"
    )
    wait_state(site, f"{array}_0", "RUNNING")
    wait_state(site, f"{array}_1", "RUNNING")
    sbatch(site, "sleep 600", log, "--job-name=a\nb|c\td", "--mem=100")
    sbatch(site, "sleep 600", "--comment=t2/ev", log, "--job-name=es-others")
    site.update("NodeName=n3", "State=DRAIN", "Reason=new driver, ask Ann")
    for name, *words in (
        ("fix", "Users=root", "Nodes=n4", "StartTime=now", "Flags=MAINT"),
        ("later", "Users=-root", "Accounts=research", "Nodes=n[1-2]", "StartTime=now+2days"),
    ):
        argv = ["scontrol", "create", f"Reservation={name}", "Duration=120", *words]
        subprocess.run(argv, check=True, env=daemons.daemon_env(site.record), capture_output=True)
    site.wait_node("n3", "drained")
    site.wait_node("n4", "maint", "reserved")
    for name, *words in (
        ("held", "--hold"),
        ("drained", "-wn3"),
        ("qos", "--qos=few-gpus", "--gres=gpu:1", "--cpus-per-task=6"),
        ("long", "-pspare", "--time=50"),
    ):
        job = sbatch(site, "sleep 600", ours, log, f"--job-name=es-{name}", *words)
        reason = ["squeue", "--noheader", "-j", job, "-o", "%r"]
        wait_until(lambda r=reason: site.run_as_user(r).stdout.strip() not in ("", "None"), "a reason")


def main() -> None:
    """Record every command."""
    with dev_cluster(name=None, **SHAPE) as site:
        play(site)
        for name, words in COMMANDS.items():
            said = site.run_as_user([w.replace("USER", site.user) for w in words], check=True).stdout
            for own, other in ((str(site.dir), "/site"), (site.user, "USER"), (site.name, "site")):
                said = said.replace(own, other)
            (PLACE / f"{name}.txt").write_text(said)


if __name__ == "__main__":
    main()
