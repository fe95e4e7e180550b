"""Slurm's reasons for a pending job, and the states of its nodes, in plain words with what to do. Pure.

Rule: Slurm's own word stays in the sentence, since a site's admins ask for it; an unlisted one stands alone. The words are
those of Slurm's `job_reason_string`. Called by `status`, `watch`, `report` and the live screen; by
`coordinator.runtime.detect`, which withdraws jobs that can never start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from coordinator.base.words import first_of
from coordinator.cluster import NodeState

WAITS = {
    "Resources": "no node has enough free GPUs, CPUs or memory yet",
    "Priority": "jobs of higher priority go first",
    "Dependency": "another job has to end first",
    "BeginTime": "its start is delayed, as after a requeue",
    "Licenses": "a licence is not free",
    "Reservation": "its reservation has not begun: `scontrol show reservation`",
    "JobArrayTaskLimit": "enough members of its array run",
    "JobHeldUser": "it is held: `scontrol release JOBID`",
    "JobHeldAdmin": "an admin holds it: ask the site",
    "JobHoldMaxRequeue": "Slurm requeued it too often and holds it: cancel it, and evalspan submits another",
    "Cleaning": "Slurm clears up an earlier run of it",
    "Prolog": "its node runs the site's prolog",
    "PartitionDown": "the partition is down: wait for the site, or set [cluster] partition",
    "PartitionInactive": "the partition takes no jobs: wait for the site, or set [cluster] partition",
    "PartitionNodeLimit": "the partition allows fewer nodes, or they are down",
    "NodeDown": "its node is down",
    "ReqNodeNotAvail": "its node is down, drained or reserved, or its GPUs are used by another job",
    "ReqNodeNotAvail, Reserved for maintenance": "its node is reserved for maintenance: `scontrol show reservation` says until when",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": "its nodes are down, drained or reserved",
    "QOSUsageThreshold": "the account has used less than the QOS demands: set another [cluster] qos",
}
NEVER = {
    "PartitionTimeLimit": "the partition allows less time: lower the --time in [cluster] extra_args",
    "InvalidAccount": "the account may not be used: set [cluster] account",
    "InvalidQOS": "the QOS may not be used: set [cluster] qos",
    "AccountNotAllowed": "the partition does not allow the account: set [cluster] account or partition",
    "QOSNotAllowed": "the partition does not allow the QOS: set [cluster] qos or partition",
    "BadConstraints": "no node has what the job demands: see [cluster] extra_args",
    "MaxMemPerLimit": "the partition allows less memory: lower [trial] memory_mb or [metric] memory_mb",
    "DependencyNeverSatisfied": "the job that it depends on has failed: see [cluster] extra_args",
    "ReservationDeleted": "its reservation is gone: set [cluster] reservation",
}
"""Reasons that no wait mends."""
OF_OTHERS = (
    "not in group permitted to use this partition"  # end of a reason that begins with the user's number
)
OF_A_NODE = frozenset({"BadConstraints"})  # of those, what one node alone may be the reason for
# QOSMaxGRESPerJob, AssocGrpCPURunMinutesLimit, QOSMinCpuNotSatisfied, ...
_LIMIT = re.compile(r"(QOS|Assoc)(Grp|Max|Min)(Wall|CPU|Cpu|Mem|GRES|Node|Jobs|Submit)?(\w*)")
_WHOSE = {"QOS": ("the QOS", "[cluster] qos"), "Assoc": ("the account or user", "[cluster] account")}
_WHAT = {
    "Wall": ("time", "the --time in [cluster] extra_args"),
    "CPU": ("CPUs", "[trial] cpus or [metric] cpus"),
    "Mem": ("memory", "[trial] memory_mb or [metric] memory_mb"),
    "GRES": ("GPUs", "[trial] gpus_per_trial"),
}
MOST_NODES = 8  # named of those in one state


def in_words(reason: str) -> str:
    """What a pending job waits for; "" for Slurm's "None", which means that it was not looked at yet."""
    reason = reason.strip()
    if reason in ("", "None"):
        return ""
    word = reason.split(",", 1)[0]  # "ReqNodeNotAvail, UnavailableNodes:n1"
    said = WAITS.get(reason) or WAITS.get(word) or NEVER.get(word) or _limit_in_words(word)
    if _is_of_others(reason):
        said = "the partition is for other groups: set [cluster] partition"
    return f"{said} ({reason})" if said else reason


def never_starts(reason: str) -> bool:
    """Will a job that is pending for this reason wait for ever?"""
    found = _LIMIT.fullmatch(reason)
    return reason in NEVER or _is_of_others(reason) or (found is not None and _is_of_the_job(found))


def _is_of_others(reason: str) -> bool:
    return OF_OTHERS in reason.replace("_", " ")


def of_all_jobs(reason: str) -> bool:
    """Is it a limit on all jobs of a user or group, which starts the job once others have ended?"""
    found = _LIMIT.fullmatch(reason)
    return found is not None and not _is_of_the_job(found) and "Minutes" not in found[4]


def _is_of_the_job(limit: re.Match[str]) -> bool:
    """Is the limit on one job alone, so that no end of another job mends it?"""
    _, kind, _, rest = limit.groups()
    return kind == "Min" or (kind == "Max" and ("PerJob" in rest or "PerNode" in rest))


def _limit_in_words(word: str) -> str:
    found = _LIMIT.fullmatch(word)
    if found is None:
        return ""
    whose, setting = _WHOSE[found[1]]
    what, mend = _WHAT.get((found[3] or "").replace("Cpu", "CPU"), ("", ""))
    if _is_of_the_job(found):
        least = found[2] == "Min"
        mend = f"{'raise' if least else 'lower'} {mend}, or set" if mend else "set"
        asks = f"asks for {'less' if least else 'more'}{' ' if what else ''}{what}"
        return f"the job {asks} than {whose} {'demands' if least else 'allows'}: {mend} another {setting}"
    if "Minutes" in found[4]:
        return f"the budget of {whose} is used up: ask the site, or set another {setting}"
    return f"a limit of {whose} is reached: it starts as other jobs end; [borrow] max_nodes and max_gpus keep evalspan's fewer"


def unusable(nodes: Sequence[NodeState]) -> str:
    """The nodes that take no job, by their state and the admin's reason: "n1, n2 are drained (new driver)"."""
    found: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if not node.usable:
            found.setdefault((node.state, node.reason), []).append(node.name)
    said = []
    for (state, reason), names in found.items():
        shown, verb = first_of(names, MOST_NODES), "are" if len(names) > 1 else "is"
        said.append(f"{shown} {verb} {state}{f' ({reason})' if reason else ''}")
    return "; ".join(said)


def none_left(nodes: Sequence[NodeState]) -> str:
    """The settings that exclude every node with GPUs, and what those nodes have; "" where a node is left."""
    nodes = [n for n in nodes if n.gpus]
    if not nodes or not all(n.excluded for n in nodes):
        return ""
    settings = list(dict.fromkeys(n.excluded for n in nodes))
    has = [f"{n.name} ({', '.join((n.gpu_type or 'a Gres without type', *n.features))})" for n in nodes]
    verb = "leave" if len(settings) > 1 else "leaves"
    return f"{' and '.join(settings)} {verb} no node with GPUs; the cluster has {first_of(has, MOST_NODES)}"


def none_usable(nodes: Sequence[NodeState]) -> str:
    """Why no job can start on a GPU now; "" where a node with GPUs takes jobs."""
    gpu_nodes = [n for n in nodes if n.gpus]
    if not gpu_nodes or any(n.usable for n in gpu_nodes):
        return ""
    return f"no node with GPUs can be used now: {unusable(gpu_nodes)}"


def gpus_in_words(nodes: Sequence[NodeState], own: int) -> str:
    """Why no GPU is free: nodes that take no job, and GPUs that are used. "" where no node has GPUs.

    `own`: those that this work folder's trials use.
    """
    nodes = [n for n in nodes if n.gpus]
    total = sum(n.gpus for n in nodes if n.usable)
    used = total - sum(n.gpus_free for n in nodes if n.usable)
    of_ours = f", {own} of them by evalspan" if own else ""
    said = (f"{used} of {total} GPUs are used{of_ours}" if total else "", unusable(nodes))
    return "; ".join(filter(None, said))
