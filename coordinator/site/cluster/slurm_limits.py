"""Table of Slurm's limits and reasons: what each means, what ends it, and the setting concerned. Pure.

Rule: each refusal of `sbatch`, each reason of a pending job and each limit of accounting is a row here. Sentences keep
Slurm's own term, since a site's admins ask for it. Sources: slurm_errno.c and `job_reason_string` of Slurm; sacctmgr(1).
Called where a submission fails, by `validate`, `doctor`, `status`, and `coordinator.runtime.detect`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from coordinator.site.cluster import ClusterError, LimitError, RefusedError

Remedy = Literal["time", "settings", "node", "away", "gone", ""]
"""What ends it: time or the end of other jobs; other settings; those or another node. "away": the controller was not reached,
so it may or may not have the job. "gone": the job has ended. "": not in the table.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of Slurm, with its messages."""

    ends: Remedy
    reason: str = ""  # squeue's reason for a pending job
    means: str = ""  # the reason in plain words, with a remedy
    errors: tuple[str, ...] = ()  # substrings of commands' errors, in lower case
    setting: str = ""  # the setting that an error is about, and the command that lists valid values


_YOURS = "`sacctmgr show associations user=$USER` lists yours"
_PARTITION = "--partition, [cluster] or [slurm.ROLE] partition"
RULES = (
    # --- the controller: before all others ---
    Rule("away", errors=("unable to contact slurm", "timed out", "connection refused", "connection reset", "connect failure",
        "transport endpoint", "zero bytes", "unable to establish", "standby mode", "temporarily unable", "authentication",
        "munge", "resource temporarily")),
    Rule("gone", errors=("invalid job id", "already completing or completed", "already finished")),
    # --- partition, account, QOS, reservation ---
    Rule("settings", errors=("invalid partition",), setting=f"{_PARTITION}; `sinfo --summarize` lists them"),
    Rule("settings", "not in group permitted to use this partition",  # begins with the user's number
        "the partition is for other groups: set [cluster] partition", ("user's group not permitted",), _PARTITION),
    Rule("time", "PartitionDown", "the partition is down: wait for the site, or set [cluster] partition",
        ("required partition not available", "partition in down state")),
    Rule("time", "PartitionInactive", "the partition takes no jobs: wait for the site, or set [cluster] partition"),
    Rule("time", "PartitionNodeLimit", "the partition allows fewer nodes, or they are down"),
    Rule("settings", "InvalidAccount", "the account may not be used: set [cluster] account", ("invalid account",),
        f"--account, [cluster] or [slurm.ROLE] account; {_YOURS}"),
    Rule("settings", "AccountNotAllowed", "the partition does not allow the account: set [cluster] account or partition"),
    Rule("settings", "InvalidQOS", "the QOS may not be used: set [cluster] qos", ("invalid qos",),
        f"--qos, [cluster] or [slurm.ROLE] qos; {_YOURS}"),
    Rule("settings", "QOSNotAllowed", "the partition does not allow the QOS: set [cluster] qos or partition"),
    Rule("time", "QOSUsageThreshold", "the account has used less than the QOS demands: set another [cluster] qos",
        ("breached requested qos usage threshold",)),
    Rule("settings", "ReservationDeleted", "its reservation is gone: set [cluster] reservation",
        ("requested reservation is invalid",), "[cluster] reservation; `scontrol show reservation` lists them"),
    Rule("settings", errors=("access denied to requested reservation",),
        setting="[cluster] reservation; `scontrol show reservation` shows its users"),
    Rule("time", "Reservation", "its reservation has not begun: `scontrol show reservation`",
        ("requested reservation not usable now",)),
    # --- what a job asks for ---
    Rule("settings", "PartitionTimeLimit", "the partition allows less time: lower the --time in [cluster] extra_args",
        ("requested time limit is invalid", "invalid time limit")),
    Rule("settings", "MaxMemPerLimit", "the partition allows less memory: lower [trial] memory_mb or [metric] memory_mb"),
    Rule("settings", "DependencyNeverSatisfied", "the job that it depends on has failed: see [cluster] extra_args"),
    Rule("node", "BadConstraints", "no node has what the job demands: see [cluster] extra_args",
        ("invalid node name", "requested nodes not in this partition", "requested node configuration is not available",
        "invalid trackable resource", "requested gres option unsupported", "more processors requested than permitted",
        "cpu count specification invalid", "memory specification can not be satisfied",
        "memory required by task is not available")),
    Rule("node", errors=("invalid generic resource", "invalid gres"),
        setting="[slurm] gpu_request; `sinfo -N -O NodeList,Gres` lists what nodes have"),
    Rule("settings", errors=("no partition specified", "invalid wckey", "invalid feature", "invalid job array",
        "invalid user id", "invalid group id", "invalid license", "invalid --", "invalid numeric value",
        "multiple partition job request not supported", "node count specification invalid", "access/permission denied",
        "unspecified error",  # a site's job_submit plug-in refused; its message precedes this
        "unrecognized option", "unknown option", "requires an argument")),
    # --- other jobs, and the nodes' states ---
    Rule("time", errors=("violates accounting/qos policy", "system submissions disabled")),
    Rule("time", "Resources", "no node has enough free GPUs, CPUs or memory yet",
        ("requested nodes are busy", "resources temporarily unavailable")),
    Rule("time", "Priority", "jobs of higher priority go first"),
    Rule("time", "Dependency", "another job has to end first"),
    Rule("time", "BeginTime", "its start is delayed, for instance after a requeue"),
    Rule("time", "Licenses", "no licence is free"),
    Rule("time", "JobArrayTaskLimit", "enough members of its array run"),
    Rule("time", "JobHeldUser", "it is held: `scontrol release JOBID`"),
    Rule("time", "JobHeldAdmin", "an admin holds it: ask the site"),
    Rule("time", "JobHoldMaxRequeue", "Slurm requeued it too often and holds it: cancel it, and evalspan submits another"),
    Rule("time", "Cleaning", "Slurm is cleaning up its previous run"),
    Rule("time", "Prolog", "its node is running the site's prolog"),
    Rule("time", "NodeDown", "its node is down"),
    Rule("time", "ReqNodeNotAvail, Reserved for maintenance",
        "its node is reserved for maintenance: `scontrol show reservation` says until when"),
    Rule("time", "ReqNodeNotAvail", "its node is down, drained or reserved, or its GPUs are used by another job",
        ("required node not available",)),
    Rule("time", "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
        "its nodes are down, drained or reserved"),
)  # fmt: skip
"""If an error matches two rows, the first counts."""
_REASONS = {rule.reason: rule for rule in RULES if rule.reason}


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that limits count."""

    word: str  # in squeue's reasons
    unit: str  # of amounts in a finding
    noun: str = ""  # in descriptions of a reason
    of_trials: str = ""  # the setting for the amount that trials and builds request
    of_metrics: str = ""  # … and that metric workers request

    def setting(self, role: str) -> str:
        """Return the setting for jobs of a role of `sbatch_text.ROLES`; "" if there is none."""
        return {"metric": self.of_metrics, "precursor": ""}.get(role, self.of_trials)


RESOURCES = {
    "cpu": Resource("CPU", "CPUs", "CPUs", "[trial] cpus", "[metric] cpus"),
    "mem": Resource("Mem", "MB", "memory", "[trial] memory_mb", "[metric] memory_mb"),
    "gres/gpu": Resource("GRES", "GPUs", "GPUs", "[trial] gpus_per_trial"),
    "node": Resource("Node", "nodes"),
    "jobs": Resource("Jobs", "jobs"),
    "wall": Resource("Wall", "", "time", "the --time in [cluster] extra_args"),
}
"""TRES of sacctmgr, "jobs" or "wall" -> its description."""
LIMIT_NAMES = {
    "mintres": "MinTRES",
    "maxtres": "MaxTRES",
    "maxtrespernode": "MaxTRESPerNode",
    "maxtrespu": "MaxTRESPerUser",
    "maxtrespa": "MaxTRESPerAccount",
    "grptres": "GrpTRES",
    "maxjobs": "MaxJobs",
    "maxjobspu": "MaxJobsPerUser",
    "maxjobspa": "MaxJobsPerAccount",
    "grpjobs": "GrpJobs",
    "maxsubmit": "MaxSubmitJobs",
    "maxsubmitpu": "MaxSubmitJobsPerUser",
    "maxsubmitpa": "MaxSubmitJobsPerAccount",
    "grpsubmit": "GrpSubmit",
    "maxwall": "MaxWall",
}
"""Field of sacctmgr -> the limit's name for `sacctmgr modify` and the site's admins."""
PARTITION_QOS = "the partition's QOS "  # prefix of the holder of its limits
# QOSMaxGRESPerJob, AssocGrpCPURunMinutesLimit, QOSMinCpuNotSatisfied, ...
_REACHED = re.compile(r"(QOS|Assoc)(Grp|Max|Min)(Wall|CPU|Cpu|Mem|GRES|Node|Jobs|Submit)?(\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit on jobs. `what`: a key of RESOURCES, or a type of GPU such as "gres/gpu:a100"."""

    name: str
    what: str
    most: int  # the minimum for MinTRES; memory in MiB, time in seconds
    holder: str  # "QOS normal", "account lab", "your association with account lab"

    @property
    def least(self) -> bool:
        return self.name == "MinTRES"

    @property
    def of_a_job(self) -> bool:
        return self.name in ("MinTRES", "MaxTRES", "MaxTRESPerNode", "MaxWall")

    @property
    def shared(self) -> bool:
        return not self.holder.startswith("your") and (
            self.name.startswith("Grp") or self.name.endswith("Account")
        )

    @property
    def carrier(self) -> str:
        """The field of the settings that subjects a job to it."""
        if self.holder.startswith(PARTITION_QOS):
            return "partition"
        return "qos" if self.holder.startswith("QOS") else "account"


# --- errors of commands ----------------------------------------------------------------------------------------------


def _rule_of(words: str) -> Rule | None:
    lower = words.lower()
    return next((rule for rule in RULES if any(phrase in lower for phrase in rule.errors)), None)


def remedy_of(words: str) -> Remedy:
    """Return what ends an error of a command. Slurm has one error for all limits; the printed reason is more specific."""
    rule = _rule_of(words)
    found = rule.ends if rule else ""
    return "settings" if found == "time" and _never_in(words) else found


def _never_in(words: str) -> str:
    """Return the reason in an error because of which the job would never start; "" if there is none."""
    return next((word for word in re.findall(r"\w+", words) if never_starts(word)), "")


def submission_error(words: str) -> ClusterError:
    """Return the error for a failed submission's message."""
    kind, never = remedy_of(words), _never_in(words)
    if kind == "time":
        return LimitError(words)
    if kind in ("settings", "node"):
        return RefusedError(f"{limit_in_words(never)}: {words}" if never else words, of_node=kind == "node")
    return ClusterError(words)


def setting_of(words: str) -> str:
    """Return the setting that a refusal is about, and how to list its values; "" if unknown."""
    rule = _rule_of(words)
    return rule.setting if rule else ""


# --- reasons of pending jobs -----------------------------------------------------------------------------------------


def _rule_of_reason(reason: str) -> Rule | None:
    for said in (reason, reason.split(",", 1)[0]):  # "ReqNodeNotAvail, UnavailableNodes:n1"
        if said in _REASONS:
            return _REASONS[said]
    # 25.11: "uid_1001_not_in_group_permitted_to_use_this_partition_(gpu)"
    words = reason.replace("_", " ")
    return next((rule for said, rule in _REASONS.items() if " " in said and said in words), None)


def limit_in_words(reason: str) -> str:
    """Describe what a pending job waits for; "" for Slurm's "None": not yet considered."""
    reason = reason.strip()
    if reason in ("", "None"):
        return ""
    rule = _rule_of_reason(reason)
    said = rule.means if rule else _limit_in_words(reason.split(",", 1)[0])
    return f"{said} ({reason})" if said else reason


def never_starts(reason: str) -> bool:
    """Return whether a job pending for this reason will never start."""
    rule, found = _rule_of_reason(reason), _REACHED.fullmatch(reason)
    return rule.ends != "time" if rule else found is not None and _is_of_the_job(found)


def of_a_node(reason: str) -> bool:
    """Return whether the cause may be a single node."""
    rule = _rule_of_reason(reason)
    return rule is not None and rule.ends == "node"


def of_all_jobs(reason: str) -> bool:
    """Return whether a limit on all jobs of a user or group is the reason, so that the job starts once others have ended."""
    found = _REACHED.fullmatch(reason)
    return found is not None and not _is_of_the_job(found) and "Minutes" not in found[4]


def _is_of_the_job(limit: re.Match[str]) -> bool:
    """Return whether the limit applies to a single job, so that the end of other jobs does not help."""
    _, kind, _, rest = limit.groups()
    return kind == "Min" or (kind == "Max" and ("PerJob" in rest or "PerNode" in rest))


def _limit_in_words(word: str) -> str:
    found = _REACHED.fullmatch(word)
    if found is None:
        return ""
    of_qos = found[1] == "QOS"
    whose, setting = ("the QOS", "[cluster] qos") if of_qos else ("the account or user", "[cluster] account")
    if _is_of_the_job(found):
        least, counted = found[2] == "Min", (found[3] or "").upper()
        what = next((r for r in RESOURCES.values() if r.word.upper() == counted), Resource("", ""))
        mends = " or ".join(filter(None, (what.of_trials, what.of_metrics)))
        mend = f"{'raise' if least else 'lower'} {mends}, or set" if mends else "set"
        asks = " ".join(filter(None, ("asks for", "less" if least else "more", what.noun)))
        return f"the job {asks} than {whose} {'demands' if least else 'allows'}: {mend} another {setting}"
    if "Minutes" in found[4]:
        return f"the budget of {whose} is used up: ask the site, or set another {setting}"
    return f"a limit of {whose} is reached: it starts as other jobs end; [borrow] max_nodes and max_gpus keep evalspan's fewer"
