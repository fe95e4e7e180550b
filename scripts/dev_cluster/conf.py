"""The text of every configuration file and of the script that furnishes a node's namespaces.

Rule: pure functions from values to text. Written for Slurm 22.05 and later.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dev_cluster import real_site
from dev_cluster.site_view import ViewPlan
from dev_cluster.spec import MIXED_MB, ClusterSpec, Layout

# The expiry of a job's credential is also how long Slurm holds a requeued job back (default 120 s).
CRED_EXPIRE_S = 30
SCHEDULER = "batch_sched_delay=0,bf_interval=2,sched_interval=5,default_queue_depth=2000,bf_max_job_test=2000,bf_continue"
STAGE = Path("/run/evalspan-dev/stage")
# Each node's spool folder under one short path: a step's socket has the node's name in it, and 107 characters at most.
SHORT_SPOOL = Path("/run/evalspan-dev/spool")


def slurm_conf(spec: ClusterSpec, layout: Layout, *, host: str, base_port: int) -> str:
    """slurm.conf: slurmctld listens at `base_port`, the nodes at the ports after it, on loopback."""
    spool = f"{SHORT_SPOOL}" if spec.mixed else f"{layout.spool}/%n"
    lines = [
        f"ClusterName={spec.name}",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={base_port}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket},cred_expire={CRED_EXPIRE_S}",
        f"StateSaveLocation={layout.state}",
        f"SlurmdSpoolDir={spool}",
        f"SlurmctldPidFile={layout.run}/slurmctld.pid",
        f"SlurmdPidFile={layout.run}/slurmd.%n.pid",
        f"SlurmctldLogFile={layout.log}/slurmctld.log",
        f"SlurmdLogFile={layout.log}/slurmd.%n.log",
        f"EnforcePartLimits={spec.part_limits}",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "SlurmdParameters=config_overrides",
        "GresTypes=gpu",
        "DefMemPerCPU=1000",
        "ReturnToService=2",
        f"SlurmdTimeout={spec.slurmd_timeout_s}",
        "SlurmctldTimeout=30",
        "MessageTimeout=10",
        "KillWait=3",
        "MinJobAge=120",
        "MaxJobCount=20000",
        "SchedulerType=sched/backfill",
        f"SchedulerParameters={SCHEDULER}",
        "PriorityType=priority/multifactor",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={layout.log}/jobcomp.log",
    ]
    lines += real_site.process_lines(spec)
    lines += (
        real_site.accounting_lines(layout, base_port + 1 + len(spec.node_names))
        if spec.accounting
        else real_site.NO_ACCOUNTING
    )
    if spec.max_array:
        lines.append(f"MaxArraySize={spec.max_array}")
    if spec.power_save:
        lines += real_site.power_lines(layout)
    if spec.private_shm:
        lines += ["JobContainerType=job_container/tmpfs", "PrologFlags=Contain"]
    if spec.gpu_jobs_only or spec.demand_account:
        lines.append("JobSubmitPlugins=lua")
    return "\n".join([*lines, *_nodes(spec, base_port + 1), *_partitions(spec), ""])


def _nodes(spec: ClusterSpec, port: int) -> list[str]:
    size = f"CPUs={spec.cpus} NodeAddr=127.0.0.1 State=UNKNOWN"
    lines = []
    for offset, name in enumerate(spec.node_names):
        gres = ""
        if name in spec.gpu_node_names:
            gres = f" Gres=gpu:{gpu_type(spec, name)}{spec.gpus} Feature=rack{offset % 2 + 1}"
        small = (spec.small_mb or (MIXED_MB if spec.mixed else 0)) if offset == 0 else 0
        memory = f"RealMemory={small or spec.memory_mb}"
        lines.append(f"NodeName={name} NodeHostname={name} Port={port + offset} {size} {memory}{gres}")
    return lines


def gpu_type(spec: ClusterSpec, node: str) -> str:
    """The type of a node's GPUs with a colon behind it; "" where they have none."""
    if spec.untyped_gres:
        return ""
    return "h100:" if spec.mixed and node == spec.gpu_node_names[1] else "a100:"


def _partitions(spec: ClusterSpec) -> list[str]:
    share = " OverSubscribe=EXCLUSIVE" if spec.exclusive else ""
    share += f" MaxMemPerCPU={spec.cpu_memory_mb}" if spec.cpu_memory_mb else ""
    times = f"DefaultTime={min(60, spec.max_time or 60)} MaxTime={spec.max_time or 'INFINITE'} State=UP"
    gpu_nodes = f"Nodes={','.join(spec.gpu_node_names)} {times}{share}"
    lines = [
        f"PartitionName=gpu Default=YES PriorityTier=10 PreemptMode=OFF {gpu_nodes}",
        f"PartitionName=spare PriorityTier=1 PreemptMode={spec.spare_mode} GraceTime={spec.grace_s} {gpu_nodes}",
    ]
    if spec.cpu_nodes:
        lines.append(f"PartitionName=cpu PriorityTier=10 PreemptMode=OFF Nodes=c[1-{spec.cpu_nodes}] {times}")
    return lines


def gres_conf(spec: ClusterSpec, layout: Layout) -> str:
    """gres.conf. Slurm takes a GPU's index from the end of its file's name, and asks of the file only that it be a device:
    links to /dev/null serve. So nothing appears in the host's /dev, and no real GPU is confused with ours.
    """
    lines = ["AutoDetect=off"]
    for name in spec.gpu_node_names:
        kind = gpu_type(spec, name).rstrip(":")
        files = f"File={layout.devices}/nvidia[0-{spec.gpus - 1}]"
        lines.append(f"NodeName={name} Name=gpu{f' Type={kind}' if kind else ''} {files}")
    return "\n".join([*lines, ""])


def job_submit(spec: ClusterSpec, rules: str) -> str:
    """job_submit.lua: `rules`, behind which of them this site has."""
    asked = {"gpu_jobs_only": spec.gpu_jobs_only, "demand_account": spec.demand_account}
    return "".join(f"local {name} = {str(value).lower()}\n" for name, value in asked.items()) + rules


def job_container_conf(layout: Layout) -> str:
    return f"AutoBasePath=true\nBasePath={layout.private}\n"


def hosts(spec: ClusterSpec, host: str, present: str) -> str:
    """/etc/hosts of nodes and submit side: `present`, that of the machine, then every node's name as this machine."""
    names = "\n".join(f"127.0.0.1 {name}" for name in spec.node_names)
    return f"{present.rstrip()}\n127.0.0.1 {host}\n{names}\n"


def namespace_script(spec: ClusterSpec, layout: Layout, plan: ViewPlan) -> str:
    """The first process of a node (argument: its name) or of the submit side (argument: `login`).

    It ends only by a signal. On a node it is process 1: the shell's wait reaps orphans, which `proctrack/linuxproc`
    would otherwise count as running.
    """
    quoted = {key: shlex.quote(str(getattr(layout, key))) for key in ("hosts", "run", "spool", "private")}
    node_lines = [
        f"mount -t tmpfs -o size={spec.shm_mb}m,mode=1777 tmpfs /dev/shm",
        'hostname "$1"',
    ]
    if spec.mixed:
        node_lines.append(f'mkdir -p {SHORT_SPOOL}; mount --bind {quoted["spool"]}/"$1" {SHORT_SPOOL}')
    if spec.private_shm:
        node_lines.append(f'mount --bind {quoted["private"]}/"$1" {quoted["private"]}')
    return "\n".join(
        [
            "#!/bin/sh",
            f"# {spec.name}: furnishes the namespaces of a node or of the submit side, then holds them.",
            "set -eu",
            "umask 022",
            "# The CPU mattered only for the making of the namespaces (ns_order.py).",
            'taskset -pc "$ALL_CPUS" $$ >/dev/null',
            *view_lines(plan),
            f"mount --bind {quoted['hosts']} /etc/hosts",
            'if [ "$1" != login ]; then',
            *(f"  {line}" for line in node_lines),
            "fi",
            f': > {quoted["run"]}/"$1".ready',
            "set +e",
            "# The submit side has no pid namespace that would take a second process with it.",
            '[ "$1" != login ] || exec sleep 2147483',
            "while :; do sleep 2147483; done",
            "",
        ]
    )


def view_lines(plan: ViewPlan) -> list[str]:
    """Shell lines that show the planned paths to every user; see `site_view`."""
    if not plan.binds:
        return []
    stage = shlex.quote(str(STAGE))
    lines = [f"mount -t tmpfs -o mode=700,size=4m tmpfs {stage}"]
    for index, bind in enumerate(plan.binds):
        lines.append(f"mkdir {stage}/{index}; mount --rbind {shlex.quote(str(bind.source))} {stage}/{index}")
    lines += [f"mount -t tmpfs -o mode=755,size=4m tmpfs {shlex.quote(str(mask))}" for mask in plan.masks]
    for index, bind in enumerate(plan.binds):
        target = shlex.quote(str(bind.target))
        lines.append(f"mkdir -p {target}")
        if bind.by_entry:
            lines += [
                f"for entry in {stage}/{index}/* {stage}/{index}/.[!.]*; do",
                '  [ -L "$entry" ] && continue',
                f'  at={target}/"${{entry##*/}}"',
                '  if [ -d "$entry" ]; then mkdir -p "$at"; elif [ -f "$entry" ]; then : > "$at"; else continue; fi',
                '  mount --rbind "$entry" "$at"',
                "done",
            ]
        else:
            lines.append(f"mount --rbind {stage}/{index} {target}")
    lines.append(f"umount -l {stage}")
    return lines
