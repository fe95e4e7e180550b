"""What production sites add to Slurm: cgroups, accounting with limits, power saving. Text of files, as `conf`.

Rule: pure functions from values to text. Written for Slurm 22.05 and later.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dev_cluster.spec import ClusterSpec, Layout

CGROUP_V1 = Path("/sys/fs/cgroup/memory")  # there where the machine has cgroup v1
NO_ACCOUNTING = ("AccountingStorageType=accounting_storage/none",)
ACCOUNT = "research"  # the account of the cluster's user
BOOT_SECONDS = 60  # longest boot of a node that was powered down


@dataclass(frozen=True, slots=True)
class Qos:
    """A quality of service and its limits, as `sacctmgr` takes them."""

    name: str
    limits: str


# One limit each, so that a try meets it alone: `--qos NAME`; and one with those of a busy site.
QOS = (
    Qos("short", "MaxWall=00:30:00"),
    Qos("few-jobs", "MaxJobsPerUser=2"),
    Qos("few-submits", "MaxSubmitJobsPerUser=4"),
    Qos("few-cpus", "GrpTRES=cpu=2"),
    Qos("few-gpus", "MaxTRESPerUser=gres/gpu=1"),
    Qos("busy", "MaxJobsPerUser=4 MaxWall=00:18:00 GrpTRES=gres/gpu=3"),
)


def process_lines(spec: ClusterSpec) -> list[str]:
    """slurm.conf: how jobs are followed, held to their limits and measured."""
    if not spec.cgroups:
        return [
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
        ]
    return [
        "ProctrackType=proctrack/cgroup",
        "TaskPlugin=task/cgroup",
        "JobAcctGatherType=jobacct_gather/cgroup",
        "JobAcctGatherFrequency=5",
    ]


def cgroup_conf(spec: ClusterSpec, version: tuple[int, int], cores: int) -> str:
    """cgroup.conf; "" where Slurm needs none. `cores`: of this machine; a node that claims more is not held to its cores."""
    if not spec.cgroups:
        return "CgroupPlugin=disabled\n" if version >= (23, 11) else ""
    first = CGROUP_V1.is_dir()
    lines = [
        f"CgroupPlugin=cgroup/{'v1' if first else 'v2'}",
        f"ConstrainCores={'yes' if spec.cpus <= cores else 'no'}",
    ]
    if first:
        lines += ["CgroupAutomount=no", "CgroupMountpoint=/sys/fs/cgroup"]
    return "\n".join([*lines, "ConstrainRAMSpace=yes", "ConstrainSwapSpace=no", "ConstrainDevices=yes", ""])


def accounting_lines(layout: Layout, port: int) -> list[str]:
    """slurm.conf: slurmdbd at `port`. Clients take AccountingStoragePass, not AuthInfo, for its munge socket."""
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={port}",
        f"AccountingStoragePass={layout.munge_socket}",
        "AccountingStorageEnforce=associations,limits,qos",
        "AccountingStorageTRES=gres/gpu",
    ]


def slurmdbd_conf(layout: Layout, port: int) -> str:
    """slurmdbd.conf: it listens at `port`; its database at the port after that. The file is for root alone."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={layout.munge_socket}",
            "DbdHost=localhost",
            "DbdAddr=127.0.0.1",
            f"DbdPort={port}",
            "SlurmUser=root",
            f"LogFile={layout.log}/slurmdbd.log",
            f"PidFile={layout.run}/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=127.0.0.1",
            f"StoragePort={port + 1}",
            "StorageUser=slurm",
            "StoragePass=slurm",
            "StorageLoc=slurm_acct_db",
            "",
        ]
    )


def database_argv(layout: Layout, port: int) -> list[str]:
    """The database: on loopback at `port`, with a small cache."""
    return [
        *["mariadbd", "--no-defaults", "--user=mysql", f"--datadir={layout.database}/data"],
        *[f"--socket={layout.database}/socket", f"--pid-file={layout.database}/pid"],
        *["--bind-address=127.0.0.1", f"--port={port}", "--innodb-buffer-pool-size=64M"],
    ]


def account_commands(cluster: str, user: str) -> Sequence[Sequence[str]]:
    """Arguments of `sacctmgr -i` that make the account, its QOS and the user."""
    every = ",".join(["normal", *(q.name for q in QOS)])
    return [
        *[["add", "qos", q.name, *q.limits.split()] for q in QOS],
        ["add", "account", ACCOUNT, f"cluster={cluster}"],
        ["add", "user", user, f"account={ACCOUNT}", f"qos={every}", "defaultqos=normal"],
    ]


def power_lines(layout: Layout) -> list[str]:
    """slurm.conf: nodes stay up until they are powered down by hand; one that is down boots for a job."""
    return [
        f"SuspendProgram={layout.conf}/power-off",
        f"ResumeProgram={layout.conf}/power-on",
        "SuspendTimeout=5",
        f"ResumeTimeout={BOOT_SECONDS}",
        "SuspendTime=100000",
    ]


def power_script(spec: ClusterSpec, command: Path, *, on: bool) -> str:
    """What Slurm runs, without open files, to boot nodes or to power them down. `command`: scripts/dev-cluster."""
    return f'#!/bin/sh\nexec </dev/null >/dev/null 2>&1\nexec {shlex.quote(str(command))} power {"on" if on else "off"} --name {spec.name} "$1"\n'
