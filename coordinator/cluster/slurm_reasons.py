"""Slurm's reasons for a pending job in plain words. Pure. Called by `status`, `watch` and the live screen.

Rule: Slurm's own word stays in the sentence, since a site's admins ask for it; an unlisted one stands alone.
"""

from __future__ import annotations

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
    "ReqNodeNotAvail": "its node is down, drained or reserved",
    "InvalidAccount": "the account may not be used: set [cluster] account",
    "InvalidQOS": "the QOS may not be used: set [cluster] qos",
    "AccountNotAllowed": "the partition does not allow the account: set [cluster] account",
    "QOSNotAllowed": "the partition does not allow the QOS: set [cluster] qos",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": "its nodes are down, drained or reserved",
}
LIMITS = {"QOS": "a limit of the QOS is reached", "Assoc": "a limit of the account or user is reached"}


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
