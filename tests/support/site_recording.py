"""Answers of a real Slurm's read-only commands, recorded once a site: `PYTHONPATH=tests:scripts python -m support.site_recording [SITE…]`, as root."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from dev_cluster import accounting
from dev_cluster.api import Cluster, dev_cluster

from support.goldens import HERE

PLACE = HERE / "sites" / "recorded"
USER = "USER"  # stands for the name of the site's user
PLAIN = {"nodes": 1, "gpus": 2, "cpu_nodes": 1, "cpus": 8}
PRODUCTION = {"nodes": 3, "memory_mb": 8000, "untyped_gres": True, "accounting": True, "max_time": 20}
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
    "all-limits": {"cgroups": True, "accounting": True, "max_time": 60, "part_limits": "ALL"},
    "busy": PRODUCTION | {"demand_account": True},
    "private-memory": {"private_shm": True},
    "whole-nodes": {"exclusive": True},
    "gpu-jobs-only": {"gpu_jobs_only": True},
    "memory-per-cpu": {"cpu_memory_mb": 1000},
    "two-minutes": {"max_time": 2},
    "large": {"nodes": 8, "gpus": 8, "cpu_nodes": 2, "cpus": 32, "memory_mb": 512_000, "accounting": True},
}
NODES = [
    "Allocmem",
    "Available",
    "CPUs",
    "CPUsState",
    "Cores",
    "Disk",
    "Features",
    "Features_act",
    "Gres",
    "GresUsed",
    "Groups",
    "Memory",
    "NodeAddr",
    "NodeAIOT",
    "NodeHost",
    "NodeList",
    "OverSubscribe",
    "Partition",
    "PartitionName",
    "PreemptMode",
    "PriorityTier",
    "Reason",
    "Sockets",
    "StateCompact",
    "StateLong",
    "Threads",
    "Time",
    "Weight",
]
LIMITS = [
    "GrpJobs",
    "GrpSubmit",
    "GrpTRES",
    "GrpWall",
    "MaxJobs",
    "MaxSubmit",
    "MaxTRES",
    "MaxTRESPerNode",
    "MaxWall",
]
ASSOCIATIONS = ["Account", "Cluster", "Partition", "User", "ParentName", "QOS", "DefaultQOS", *LIMITS]
QOS = [
    "Name",
    "Priority",
    "Flags",
    "MinTRES",
    "MaxTRES",
    "MaxTRESPerNode",
    "MaxTRESPU",
    "MaxTRESPA",
    "MaxWall",
    "MaxJobsPU",
    "MaxJobsPA",
    "MaxSubmitPU",
    "MaxSubmitPA",
    "GrpTRES",
    "GrpJobs",
    "GrpSubmit",
    "GrpWall",
    "Preempt",
    "PreemptMode",
]
SHOWN = {
    "config": ["config"],
    "partition": ["partition"],
    "partition all": ["--all", "partition"],
    "reservation": ["reservation"],
}
# What differs from run to run, in `scontrol show config` and elsewhere.
VOLATILE = re.compile(
    r"^(BOOT_TIME|NEXT_JOB_ID|SlurmctldPort|SlurmctldHost|AccountingStoragePort|Slurmd?User|Configuration)\b"
)
# What a site's own rules refuse: shape's option -> (arguments that its jobs lack, arguments that they have).
REFUSING = {"gpu_jobs_only": ("--gres", ["--partition=gpu"]), "demand_account": ("--account", [])}


def rows(text: str, fields: list[str]) -> list[dict[str, str]]:
    return [dict(zip(fields, line.split("|"), strict=False)) for line in text.splitlines()]


def record(site: Cluster, shape: dict[str, Any]) -> dict[str, Any]:
    """Every answer, with all fields, so that one who asks for others finds them."""

    def ask(*argv: str) -> str:
        done = site.run_as_user([word.replace(USER, site.user) for word in argv])
        said = done.stdout if done.returncode == 0 else f"! {done.stderr}"
        said = said.replace(str(site.dir), "/site").replace(site.user, USER).replace(site.name, "site")
        return said.replace("Users=root ", "Users=admin ")  # not the user of a replay

    form = ",".join(f"{name}:|" for name in NODES)
    listed = ask("sinfo", "--Node", "--all", f"--Format={form}").splitlines()
    found: dict[str, Any] = {"sinfo": ["|".join(NODES), *(line.strip().rstrip("|") for line in listed)]}
    for name, words in SHOWN.items():
        lines = ask(
            "scontrol",
            "--oneliner",
            *(w for w in words if w[0] == "-"),
            "show",
            *(w for w in words if w[0] != "-"),
        )
        found[name] = [line for line in lines.splitlines() if not VOLATILE.match(line)]
    found["config"].append("SlurmctldHost[0] = localhost(127.0.0.1)")
    if shape.get("accounting"):
        show = ("sacctmgr", "-nP", "show")
        found["user"] = rows(
            ask(*show, "user", USER, "withassoc", f"format={','.join(['DefaultAccount', *ASSOCIATIONS])}"),
            ["DefaultAccount", *ASSOCIATIONS],
        )
        found["assoc"] = rows(
            ask(*show, "assoc", "where", "user=", f"format={','.join(ASSOCIATIONS)}"), ASSOCIATIONS
        )
        found["qos"] = rows(ask(*show, "qos", f"format={','.join(QOS)}"), QOS)
    for option, (lacks, has) in REFUSING.items():
        if shape.get(option):
            said = ask("sbatch", "--test-only", *has, "--wrap=true")
            found.setdefault("refuses", []).append(
                {"lacks": lacks, "has": has, "says": said.removeprefix("! ").splitlines()}
            )
    return found


def main(names: list[str]) -> None:
    PLACE.mkdir(parents=True, exist_ok=True)
    for name in names or SITES:
        shape = PLAIN | SITES[name]
        with dev_cluster(name=None, **shape) as site:
            if name == "busy":
                accounting.set_default_qos(site.record, "busy")
            if shape.get("reservation"):  # its nodes are shown so a while after its begin
                site.wait_node("n1", "maint", "reserved")
            text = json.dumps(record(site, shape), indent=1)
        (PLACE / f"{name}.json").write_text(text + "\n")
        print(name, flush=True)  # noqa: T201 (a command)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stderr}")
