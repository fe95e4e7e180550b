"""Slurm's reasons for a pending job, and the states of its nodes, in plain words. Pure. Called by `status`, `watch` and the live screen.

Rule: Slurm's own word stays in the sentence, since a site's admins ask for it; an unlisted one stands alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.base.words import first_of
from coordinator.cluster import NodeState

REASONS = {
    "Resources": "no node has enough free GPUs, CPUs or memory yet",
    "Priority": "jobs of higher priority go first",
    "Dependency": "another job has to end first",
    "BeginTime": "its start is delayed, as after a requeue",
    "Licenses": "a licence is not free",
    "Reservation": "its reservation has not begun",
    "JobArrayTaskLimit": "enough members of its array run",
    "JobHeldUser": "it is held: `scontrol release JOBID`",
    "JobHeldAdmin": "an admin holds it",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs",
    "PartitionNodeLimit": "the partition allows fewer nodes, or they are down",
    "PartitionTimeLimit": "the partition allows less time",
    "NodeDown": "its node is down",
    "ReqNodeNotAvail": "its node is down, drained or reserved, or its GPUs are used by another job",
    "InvalidAccount": "the account may not be used: set [cluster] account",
    "InvalidQOS": "the QOS may not be used: set [cluster] qos",
    "AccountNotAllowed": "the partition does not allow the account: set [cluster] account",
    "QOSNotAllowed": "the partition does not allow the QOS: set [cluster] qos",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": "its nodes are down, drained or reserved",
}
LIMITS = {"QOS": "a limit of the QOS is reached", "Assoc": "a limit of the account or user is reached"}
MOST_NODES = 8  # named of those in one state


def in_words(reason: str) -> str:
    """What a pending job waits for; "" for Slurm's "None", which means that it was not looked at yet."""
    reason = reason.strip()
    if reason in ("", "None"):
        return ""
    word = reason.split(",", 1)[0]  # "ReqNodeNotAvail, UnavailableNodes:n1"
    said = REASONS.get(reason) or REASONS.get(word)
    if said is None:
        said = next((words for begin, words in LIMITS.items() if word.startswith(begin)), None)
    return f"{said} ({reason})" if said else reason


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
