"""What production sites add to Slurm: cgroups, accounting with limits, power saving. Text of files, as `conf`.

Rule: pure templates and functions from values to text. Written for Slurm 22.05 and later.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dev_cluster.spec import ClusterSpec, Layout

CGROUP_V1 = Path("/sys/fs/cgroup/memory")  # there where the machine has cgroup v1
ACCOUNT = "research"  # the account of the cluster's user
# QOS -> its limits, as `sacctmgr` takes them. One limit each, so that a try meets it alone; and one with those of a busy site.
QOS = {
    "short": "MaxWall=00:30:00",
    "few-jobs": "MaxJobsPerUser=2",
    "few-submits": "MaxSubmitJobsPerUser=4",
    "few-cpus": "GrpTRES=cpu=2",
    "few-gpus": "MaxTRESPerUser=gres/gpu=1",
    "four-jobs": "MaxJobsPerUser=4",
    "busy": "MaxJobsPerUser=4 MaxWall=00:18:00 GrpTRES=gres/gpu=3",
}

# --- lines of slurm.conf ----------------------------------------------------------------------------------------------

UNCONFINED = """\
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
"""
CONFINED = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/cgroup
JobAcctGatherFrequency=5
"""
# Clients take AccountingStoragePass, not AuthInfo, for slurmdbd's munge socket.
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={layout.munge_socket}
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
"""
NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none\n"
# Nodes stay up until they are powered down by hand; one that is down has 60 s to boot for a job.
POWER = """\
SuspendProgram={layout.conf}/power-off
ResumeProgram={layout.conf}/power-on
SuspendTimeout=5
ResumeTimeout=60
SuspendTime=100000
"""

# --- other files ------------------------------------------------------------------------------------------------------

# slurmdbd.conf, for root alone. slurmdbd listens at {port}; its database at the port after that.
SLURMDBD = """\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={layout.log}/slurmdbd.log
PidFile={layout.run}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""
CGROUP_CONF = """\
CgroupPlugin=cgroup/{version}
ConstrainCores={cores}
{mounts}ConstrainRAMSpace=yes
ConstrainSwapSpace=no
ConstrainDevices=yes
"""
# What Slurm runs, without open files, to boot nodes or to power them down.
POWER_SCRIPT = '#!/bin/sh\nexec </dev/null >/dev/null 2>&1\nexec {command} power {word} --name {name} "$1"\n'


def cgroup_conf(spec: ClusterSpec, version: tuple[int, int], cores: int) -> str:
    """cgroup.conf; "" where Slurm needs none. `cores`: of this machine; a node that claims more is not held to its cores."""
    if not spec.cgroups:
        return "CgroupPlugin=disabled\n" if version >= (23, 11) else ""
    first = CGROUP_V1.is_dir()
    return CGROUP_CONF.format(
        version="v1" if first else "v2",
        cores="yes" if spec.cpus <= cores else "no",
        mounts="CgroupAutomount=no\nCgroupMountpoint=/sys/fs/cgroup\n" if first else "",
    )


def power_scripts(spec: ClusterSpec, layout: Layout, command: Path) -> dict[Path, str]:
    """Programs of POWER; none without power saving. `command`: scripts/dev-cluster."""
    words = ("on", "off") if spec.power_save else ()
    quoted = shlex.quote(str(command))
    return {
        layout.conf / f"power-{word}": POWER_SCRIPT.format(command=quoted, word=word, name=spec.name)
        for word in words
    }


def account_commands(cluster: str, user: str) -> list[list[str]]:
    """Arguments of `sacctmgr -i` that make the account, its QOS and the user."""
    return [
        *(["add", "qos", name, *limits.split()] for name, limits in QOS.items()),
        ["add", "account", ACCOUNT, f"cluster={cluster}"],
        ["add", "user", user, f"account={ACCOUNT}", f"qos={','.join(['normal', *QOS])}", "defaultqos=normal"],
    ]
