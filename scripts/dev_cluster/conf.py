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
STAGE = Path("/run/evalspan-dev/stage")
# Each node's spool folder under one short path: a step's socket has the node's name in it, and 107 characters at most.
SHORT_SPOOL = Path("/run/evalspan-dev/spool")


SLURM = """\
ClusterName={spec.name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={base_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket},cred_expire={cred_expire}
StateSaveLocation={layout.state}
SlurmdSpoolDir={spool}
SlurmctldPidFile={layout.run}/slurmctld.pid
SlurmdPidFile={layout.run}/slurmd.%n.pid
SlurmctldLogFile={layout.log}/slurmctld.log
SlurmdLogFile={layout.log}/slurmd.%n.log
EnforcePartLimits={spec.part_limits}
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
DefMemPerCPU=1000
ReturnToService=2
SlurmdTimeout={spec.slurmd_timeout_s}
SlurmctldTimeout=30
MessageTimeout=10
KillWait=3
MinJobAge=120
MaxJobCount=20000
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=5,default_queue_depth=2000,bf_max_job_test=2000,bf_continue
PriorityType=priority/multifactor
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobCompType=jobcomp/filetxt
JobCompLoc={layout.log}/jobcomp.log
"""


def slurm_conf(spec: ClusterSpec, layout: Layout, *, host: str, base_port: int) -> str:
    """slurm.conf: slurmctld listens at `base_port`, the nodes at the ports after it, on loopback."""
    more = [real_site.CONFINED if spec.cgroups else real_site.UNCONFINED]
    more.append(real_site.ACCOUNTING if spec.accounting else real_site.NO_ACCOUNTING)
    if spec.max_array:
        more.append("MaxArraySize={spec.max_array}\n")
    if spec.power_save:
        more.append(real_site.POWER)
    if spec.private_shm:
        more.append("JobContainerType=job_container/tmpfs\nPrologFlags=Contain\n")
    if spec.gpu_jobs_only or spec.demand_account:
        more.append("JobSubmitPlugins=lua\n")
    values = {"spec": spec, "layout": layout, "host": host, "base_port": base_port}
    values |= {"cred_expire": CRED_EXPIRE_S, "port": base_port + 1 + len(spec.node_names)}
    values["spool"] = SHORT_SPOOL if spec.mixed else f"{layout.spool}/%n"
    text = "".join([SLURM, *more]).format(**values)
    return text + "\n".join([*_nodes(spec, base_port + 1), *_partitions(spec), ""])


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
        f"PartitionName=spare PriorityTier=1 PreemptMode=REQUEUE GraceTime={spec.grace_s} {gpu_nodes}",
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


NAMESPACE = """\
#!/bin/sh
# {name}: furnishes the namespaces of a node or of the submit side, then holds them.
set -eu
umask 022
# The CPU mattered only for the making of the namespaces (ns_order.py).
taskset -pc "$ALL_CPUS" $$ >/dev/null
{view}mount --bind {hosts} /etc/hosts
if [ "$1" != login ]; then
  mount -t tmpfs -o size=4096m,mode=1777 tmpfs /dev/shm
  hostname "$1"
{node}fi
: > {run}/"$1".ready
set +e
# The submit side has no pid namespace that would take a second process with it.
[ "$1" != login ] || exec sleep 2147483
while :; do sleep 2147483; done
"""


def namespace_script(spec: ClusterSpec, layout: Layout, plan: ViewPlan) -> str:
    """The first process of a node (argument: its name) or of the submit side (argument: `login`).

    It ends only by a signal. On a node it is process 1: the shell's wait reaps orphans, which `proctrack/linuxproc`
    would otherwise count as running.
    """
    quoted = {key: shlex.quote(str(getattr(layout, key))) for key in ("hosts", "run", "spool", "private")}
    node = ""
    if spec.mixed:
        node += f'  mkdir -p {SHORT_SPOOL}; mount --bind {quoted["spool"]}/"$1" {SHORT_SPOOL}\n'
    if spec.private_shm:
        node += f'  mount --bind {quoted["private"]}/"$1" {quoted["private"]}\n'
    view = "".join(f"{line}\n" for line in view_lines(plan))
    return NAMESPACE.format(name=spec.name, node=node, view=view, **quoted)


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
        how = BY_ENTRY if bind.by_entry else "mount --rbind {source} {target}"
        target = shlex.quote(str(bind.target))
        lines += [
            f"mkdir -p {target}",
            how.replace("{source}", f"{stage}/{index}").replace("{target}", target),
        ]
    return [*lines, f"umount -l {stage}"]


BY_ENTRY = """\
for entry in {source}/* {source}/.[!.]*; do
  [ -L "$entry" ] && continue
  at={target}/"${entry##*/}"
  if [ -d "$entry" ]; then mkdir -p "$at"; elif [ -f "$entry" ]; then : > "$at"; else continue; fi
  mount --rbind "$entry" "$at"
done"""
