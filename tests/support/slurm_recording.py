"""What a real Slurm answers, written down: `PYTHONPATH=tests:scripts python -m support.slurm_recording [SITE…]`, as root.

Of each site of SITES the answers of read-only commands: tests/golden/sites/recorded/SITE.json. Of the site "listings", which has
jobs and nodes in many states, tests/cluster/recorded/NAME.txt; what is expected of those stands beside them, in NAME.json.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from dev_cluster import accounting, daemons
from dev_cluster.api import Cluster, dev_cluster
from dev_cluster.testing import cancel, sbatch, wait_state, wait_until

from coordinator.cluster.slurm_accounts import ACCOUNT_FORMAT, QOS_FORMAT, USER_FORMAT
from coordinator.cluster.slurm_parse import NODE_FORMAT, QUEUE_FORMAT
from support.goldens import HERE

PLAIN = {"nodes": 1, "gpus": 2, "cpu_nodes": 1, "cpus": 8}
PRODUCTION = {"nodes": 3, "memory_mb": 8000, "untyped_gres": True, "accounting": True, "max_time": 20}
LARGE = {"nodes": 8, "gpus": 8, "cpu_nodes": 2, "cpus": 32, "memory_mb": 512_000, "accounting": True}
LIMITED = {"cgroups": True, "accounting": True, "max_time": 60, "part_limits": "ALL"}
# Those of tests/odd_sites and tests/slurm_cluster; "large": that of the plans.
SITES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cgroups": {"cgroups": True},
    "accounts": {"accounting": True},
    "accounts-two-nodes": {"accounting": True, "nodes": 2},
    "max-time": {"max_time": 60},
    "max-time-enforced": {"max_time": 60, "part_limits": "ALL"},
    "untyped-gpus": {"untyped_gres": True},
    "mixed-nodes": {"mixed": True, "nodes": 4},
    "reservation": {"reservation": True, "nodes": 2},
    "power-saving": {"power_save": True},
    "no-arrays": {"max_array": 1},
    "all-limits": LIMITED,
    "busy": PRODUCTION | {"demand_account": True},
    "private-memory": {"private_shm": True},
    "whole-nodes": {"exclusive": True},
    "gpu-jobs-only": {"gpu_jobs_only": True},
    "memory-per-cpu": {"cpu_memory_mb": 1000},
    "two-minutes": {"max_time": 2},
    "large": LARGE,
    "listings": {"nodes": 4, "accounting": True},
}
# All fields, so that one who asks for others finds them.
NODES = (
    "Allocmem Available CPUs CPUsState Cores Disk Features Features_act Gres GresUsed Groups Memory NodeAddr NodeAIOT NodeHost "
    "NodeList OverSubscribe Partition PartitionName PreemptMode PriorityTier Reason Sockets StateCompact StateLong Threads Time Weight"
)
LIMITS = "GrpJobs GrpSubmit GrpTRES GrpWall MaxJobs MaxSubmit MaxTRES MaxTRESPerNode MaxWall"
ASSOCIATIONS = f"Account Cluster Partition User ParentName QOS DefaultQOS {LIMITS}"
QOS = (
    "Name Priority Flags MinTRES MaxTRES MaxTRESPerNode MaxTRESPU MaxTRESPA MaxWall MaxJobsPU MaxJobsPA MaxSubmitPU MaxSubmitPA "
    "GrpTRES GrpJobs GrpSubmit GrpWall Preempt PreemptMode"
)
SHOWN = ("config", "partition", "--all partition", "reservation")
# What differs from run to run, in `scontrol show config` and elsewhere.
VOLATILE = re.compile(
    r"^(BOOT_TIME|NEXT_JOB_ID|SlurmctldPort|SlurmctldHost|AccountingStoragePort|Slurmd?User|Configuration)\b"
)
# What a site's own rules refuse: shape's option -> (arguments that its jobs lack, arguments that they have).
REFUSING = {"gpu_jobs_only": ("--gres", ["--partition=gpu"]), "demand_account": ("--account", [])}
SACCTMGR = ("sacctmgr", "-nP", "show")
LISTINGS = {
    "squeue": ("squeue", "--me", "--all", "--array", "--states=all", f"--format={QUEUE_FORMAT}"),
    "sinfo": ("sinfo", "--Node", "--all", f"--Format={NODE_FORMAT}"),
    "partitions": ("scontrol", "--all", "--oneliner", "show", "partition"),
    "reservations": ("scontrol", "--oneliner", "show", "reservation"),
    "user": (*SACCTMGR, "user", "USER", "withassoc", f"format={USER_FORMAT}"),
    "accounts": (*SACCTMGR, "assoc", "where", "user=", f"format={ACCOUNT_FORMAT}"),
    "qos": (*SACCTMGR, "qos", f"format={QOS_FORMAT}"),
}


def ask(site: Cluster, *argv: str) -> str:
    """What a command prints, or "! " and its error, without names of this machine. "USER" stands for the site's user."""
    done = site.run_as_user([word.replace("USER", site.user) for word in argv])
    said = done.stdout if done.returncode == 0 else f"! {done.stderr}"
    return said.replace(str(site.dir), "/site").replace(site.user, "USER").replace(site.name, "site")


def rows(site: Cluster, names: str, *words: str) -> list[dict[str, str]]:
    fields = names.split()
    lines = ask(site, *SACCTMGR, *words, f"format={','.join(fields)}").splitlines()
    return [dict(zip(fields, line.split("|"), strict=False)) for line in lines]


def record(site: Cluster, shape: dict[str, Any]) -> dict[str, Any]:
    listed = ask(
        site, "sinfo", "--Node", "--all", f"--Format={','.join(f'{name}:|' for name in NODES.split())}"
    )
    found: dict[str, Any] = {
        "sinfo": [NODES.replace(" ", "|"), *(line.strip().rstrip("|") for line in listed.splitlines())]
    }
    for words in SHOWN:
        *options, subject = words.split()
        lines = ask(site, "scontrol", "--oneliner", *options, "show", subject).splitlines()
        found[f"{subject} all" if options else subject] = [line for line in lines if not VOLATILE.match(line)]
    found["config"].append("SlurmctldHost[0] = localhost(127.0.0.1)")
    if shape.get("accounting"):
        found["user"] = rows(site, f"DefaultAccount {ASSOCIATIONS}", "user", "USER", "withassoc")
        found["assoc"] = rows(site, ASSOCIATIONS, "assoc", "where", "user=")
        found["qos"] = rows(site, QOS, "qos")
    for lacks, has in (REFUSING[option] for option in REFUSING if shape.get(option)):
        said = ask(site, "sbatch", "--test-only", *has, "--wrap=true").removeprefix("! ").splitlines()
        found.setdefault("refuses", []).append({"lacks": lacks, "has": has, "says": said})
    return found


def play(site: Cluster) -> None:
    """Jobs and nodes in the states that a listing may show."""
    qos = "MinTRES=gres/gpu=1 MaxTRES=cpu=4,mem=15872M MaxJobsPerUser=7 MaxSubmitJobsPerAccount=44"
    for kind, name, values in (
        ("qos", "short", "MaxWall=30"),
        ("qos", "few-gpus", qos),
        ("account", "research", "GrpTRES=cpu=200,gres/gpu=64 GrpSubmitJobs=100"),
        ("user", site.user, "MaxJobs=40 MaxWall=45 GrpTRES=mem=2T"),
    ):
        accounting.modify(site.record, kind, name, *values.split())
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
    for member in range(2):
        wait_state(site, f"{array}_{member}", "RUNNING")
    sbatch(site, "sleep 600", log, "--job-name=a\nb|c\td", "--mem=100")
    sbatch(site, "sleep 600", "--comment=t2/ev", log, "--job-name=es-others")
    site.update("NodeName=n3", "State=DRAIN", "Reason=new driver, ask Ann")
    for words in (
        "Reservation=fix Users=root Nodes=n4 StartTime=now Flags=MAINT",
        "Reservation=later Users=-root Accounts=research Nodes=n[1-2] StartTime=now+2days",
    ):
        argv = ["scontrol", "create", *words.split(), "Duration=120"]
        subprocess.run(argv, check=True, env=daemons.daemon_env(site.record), capture_output=True)
    site.wait_node("n3", "drained")
    site.wait_node("n4", "maint", "reserved")
    for name, words in (
        ("held", "--hold"),
        ("drained", "-wn3"),
        ("qos", "--qos=few-gpus --gres=gpu:1 --cpus-per-task=6"),
        ("long", "-pspare --time=50"),
    ):
        job = sbatch(site, "sleep 600", ours, log, f"--job-name=es-{name}", *words.split())
        reason = ["squeue", "--noheader", "-j", job, "-o", "%r"]
        wait_until(lambda r=reason: site.run_as_user(r).stdout.strip() not in ("", "None"), "a reason")


def main(names: list[str]) -> None:
    for name in names or SITES:
        shape = PLAIN | SITES[name]
        with dev_cluster(name=None, **shape) as site:
            if name == "listings":
                play(site)
                for listing, words in LISTINGS.items():
                    (Path(__file__).parents[1] / "cluster" / "recorded" / f"{listing}.txt").write_text(
                        ask(site, *words)
                    )
                continue
            if name == "busy":
                accounting.set_default_qos(site.record, "busy")
            if shape.get("reservation"):  # its nodes are shown so a while after its begin
                site.wait_node("n1", "maint", "reserved")
            text = json.dumps(record(site, shape), indent=1)
            text = text.replace("Users=root ", "Users=admin ")  # not the user of a replay
        (HERE / "sites" / "recorded" / f"{name}.json").write_text(text + "\n")
        print(name, flush=True)  # noqa: T201 (a command)


if __name__ == "__main__":
    main(sys.argv[1:])
