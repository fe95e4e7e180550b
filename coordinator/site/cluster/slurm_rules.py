"""Decides from Slurm's rules whether a precursor serves the trials on its node or one job hosts them.

Rule: parsers and decisions are pure and come first. A coordinator runs three `scontrol` and one `sbatch --test-only` once, at
its start or its first evaluation. If a rule is unknown the precursor is tried. Slurm's settings do not show a private
/dev/shm created by a site's prolog or SPANK plug-in: `evalspan doctor`, or the first trial that finds no weights, detects it.
Sources: slurm.conf(5) JobContainerType, NamespaceType, SelectType, OverSubscribe, MaxMemPerCPU; scontrol(1).
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from coordinator.base.run_command import CommandError, run_command
from coordinator.site.cluster import Cluster, ClusterError, Job, NodeState, RefusedError
from coordinator.site.cluster.sbatch_text import SlurmOptions
from coordinator.site.cluster.slurm_accounts import (
    ACCOUNT_FORMAT,
    QOS_FORMAT,
    USER_FORMAT,
    Accounting,
    parse_rows,
    parse_tres,
)
from coordinator.site.cluster.slurm_limits import Limit, setting_of
from coordinator.site.cluster.slurm_parse import seconds_of
from coordinator.site.config.checks import GPU_REQUEST

SCONTROL_SECONDS = 90.0  # time limit of one `scontrol`
SACCTMGR_SECONDS = 30.0  # of one `sacctmgr`
HOLDER_MEMORY_MB = 512  # MiB of the precursor in the check
GPU_REQUESTS = (GPU_REQUEST, "--gres=gpu:{type}:{n}", "--gpus-per-node={n}", "--gpus-per-node={type}:{n}")
FEW_WORKERS = 8  # minimum of metric workers, if the partition has the cores
PRIVATE_SHM_REASON = "/dev/shm is private to each job"
ENDING_PREEMPT_MODES = ("REQUEUE", "CANCEL")  # PreemptMode of a partition whose preempted jobs end
_ALLOWED = ("AllowAccounts", "DenyAccounts", "AllowQos", "DenyQos")
_UNSET = frozenset({"", "(null)", "N/A", "n/a", "none", "NONE", "UNLIMITED", "INFINITE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition of `scontrol show partition`."""

    name: str
    default: bool = False
    up: bool = True
    exclusive: bool = False  # jobs get whole nodes
    max_seconds: int | None = None  # None: no limit
    max_memory_per_cpu_mb: int | None = None  # memory beyond this raises a job's CPUs
    qos: str = ""
    nodes: str = ""
    cpus: int = 0  # total of its nodes; 0: unknown
    memory_mb: int | None = None  # total of its nodes, MiB; None: unknown
    hidden: bool = False
    tier: int = 0  # PriorityTier: jobs of a higher tier may preempt those of a lower one
    preempt_mode: str = "OFF"  # what happens to its preempted jobs
    allowed: Mapping[str, str] = field(default_factory=dict)  # AllowAccounts, DenyAccounts, AllowQos, DenyQos

    def refuses(self, account: str, qos: str) -> str:
        """Return why jobs of this account and QOS never start here; "" if they may. Source: slurm.conf(5)."""
        for value, kind, word in ((account, "Accounts", "accounts"), (qos, "Qos", "QOS")):
            only, none = self.allowed.get(f"Allow{kind}"), self.allowed.get(f"Deny{kind}")
            if only is not None and value and value not in only.split(","):
                return f"partition {self.name} is for {word} {only}, not {value}"
            if none is not None and value in none.split(","):
                return f"partition {self.name} is not for {word} {none}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRules:
    """Slurm's settings (`scontrol show config`) and all partitions."""

    config: Mapping[str, str]
    partitions: tuple[Partition, ...] = ()

    def chosen(self, names: str | None) -> tuple[Partition, ...]:
        """Return the partitions that a `--partition` value names; the site's default for None."""
        if names is None:
            return tuple(p for p in self.partitions if p.default)
        wanted = names.split(",")
        return tuple(p for p in self.partitions if p.name in wanted)

    @property
    def preemptible(self) -> frozenset[str]:
        """Return partitions whose jobs give way to those of another partition that is up."""
        if self.config.get("PreemptType") != "preempt/partition_prio":
            return frozenset()
        highest = max((p.tier for p in self.partitions if p.up), default=0)
        return frozenset(
            p.name for p in self.partitions if p.preempt_mode in ENDING_PREEMPT_MODES and p.tier < highest
        )

    def number(self, key: str) -> int | None:
        """Return a number of `scontrol show config`; None if it is unset or not a number."""
        text = self.config.get(key, "").split()
        return int(text[0]) if text and text[0].isdigit() else None


# --- reading, pure ---------------------------------------------------------------------------------------------------


def parse_config(text: str) -> dict[str, str]:
    """Parse the "Key = value" lines of `scontrol show config`; headings and blank lines are skipped."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_partitions(text: str) -> tuple[Partition, ...]:
    found = []
    for line in text.splitlines():
        row = dict(re.findall(r"(\S+?)=(\S*)", line))
        if not row.get("PartitionName"):
            continue
        found.append(
            Partition(
                name=row["PartitionName"],
                default=row.get("Default") == "YES",
                up=row.get("State", "UP") == "UP",
                exclusive=row.get("OverSubscribe", "").startswith("EXCLUSIVE"),
                max_seconds=seconds_of(row.get("MaxTime", "")),
                max_memory_per_cpu_mb=_positive(row.get("MaxMemPerCPU", "")),
                qos="" if row.get("QoS", "") in _UNSET else row.get("QoS", ""),
                nodes=row.get("Nodes", ""),
                cpus=_positive(row.get("TotalCPUs", "")) or 0,
                memory_mb=parse_tres(row.get("TRES", "")).get("mem"),
                hidden=row.get("Hidden") == "YES",
                tier=_positive(row.get("PriorityTier", "")) or 0,
                preempt_mode=row.get("PreemptMode", "OFF"),
                allowed={k: row[k] for k in _ALLOWED if row.get(k, "ALL") != "ALL" and row[k] not in _UNSET},
            )
        )
    return tuple(found)


def _positive(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) else None


def unknown_partition(rules: SiteRules, settings: Mapping[str, str | None]) -> str:
    """Return a message about settings that name a partition unknown to the cluster; "" if there are none.

    `settings`: name of a setting -> its value; None: the site's default partition.
    """
    known = {p.name for p in rules.partitions}
    for setting, value in settings.items():
        missing = [name for name in (value or "").split(",") if name and name not in known]
        if missing:
            shown = [p.name + (" (default)" if p.default else "") for p in rules.partitions if not p.hidden]
            there = ", ".join(shown) or "none"
            return f"the cluster has no partition {missing[0]!r} ({setting}); it has: {there}"
    return ""


def private_memory(config: Mapping[str, str]) -> str:
    """Return the plug-in that gives each job a private /dev/shm; empty if Slurm names none."""
    for key in ("NamespaceType", "JobContainerType"):
        value = config.get(key, "")
        if value.partition("/")[2] not in _UNSET:
            return f"{key}={value}"
    return ""


def whole_nodes(rules: SiteRules, partition: str | None) -> str:
    """Return why each job of the partition has its node to itself; "" if jobs share nodes."""
    exclusive = [p.name for p in rules.chosen(partition) if p.exclusive]
    if exclusive:
        return f"partition {', '.join(exclusive)} gives whole nodes (OverSubscribe=EXCLUSIVE)"
    if rules.config.get("SelectType") == "select/linear":
        return "this Slurm gives whole nodes (SelectType=select/linear)"
    return ""


def host_reason(rules: SiteRules, partition: str | None, refusal: str, *, stage: bool = True) -> str:
    """Return why one job must host a node's trials (rung 2); "" if a precursor serves them.

    `refusal`: the cluster's refusal of a job like the precursor; if it is about a setting of precursors, another rung does
    not help. `stage`: weights go to memory. Otherwise only whole nodes matter: a second trial would wait until the first
    leaves the node.
    """
    whole = whole_nodes(rules, partition)
    if whole or not stage:
        return whole
    if refusal and not setting_of(refusal):
        return f"no job without a GPU is taken beside the trials ({refusal})"
    plugin = private_memory(rules.config)
    return f"{PRIVATE_SHM_REASON} ({plugin})" if plugin else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeeds:
    """Requests of an evaluation's jobs on a node. Memory in MiB."""

    precursor_mb: int
    trial_mb: int
    trial_cpus: int
    trial_gpus: int


def crowding_reason(
    rules: SiteRules, partition: str | None, nodes: Iterable[NodeState], wants: NodeNeeds
) -> str:
    """Return why a precursor would keep trials off its node while one job could host all of them; otherwise "".

    Slurm raises a job's CPUs to its memory / MaxMemPerCPU, so a large model's precursor gets many. Observed on 22.05: a job
    with GPUs and CPUs keeps its CPUs, and only runs if the node has the raised number.
    """
    limits = [p.max_memory_per_cpu_mb or rules.number("MaxMemPerCPU") for p in rules.chosen(partition)]
    per_cpu = min((limit for limit in limits if limit), default=0)
    holder = ceil(wants.precursor_mb / per_cpu) if per_cpu else 1
    if holder <= 1:
        return ""
    for node in nodes:
        lanes = node.gpus // max(1, wants.trial_gpus)
        beside = min(lanes, max(0, node.cpus - holder) // wants.trial_cpus)
        hosted = max(lanes * wants.trial_cpus, ceil((lanes * wants.trial_mb + wants.precursor_mb) / per_cpu))
        if node.usable and beside < lanes and hosted <= node.cpus:
            return (
                f"a precursor is given {holder} CPUs for its memory (MaxMemPerCPU={per_cpu}):"
                f" {beside} of {lanes} trials would fit beside it on {node.name}"
            )
    return ""


# --- limits of one job -----------------------------------------------------------------------------------------------


def limits_on(job: Job, options: SlurmOptions, rules: SiteRules, accounting: Accounting) -> list[Limit]:
    """Return the limits of the job's account and QOS, and of the QOS of its partitions."""
    chosen = rules.chosen(options.partition_of(job))
    names, own = [p.name for p in chosen], [p.qos for p in chosen if p.qos]
    return accounting.limits(options.account_of(job), options.qos_of(job), names, own)


def within_limits(job: Job, options: SlurmOptions, rules: SiteRules, accounting: Accounting) -> Job:
    """Return the job with its time limit reduced to MaxTime of its partitions, and to MaxWall."""
    times = [p.max_seconds for p in rules.chosen(options.partition_of(job))]
    times += [limit.most for limit in limits_on(job, options, rules, accounting) if limit.what == "wall"]
    most = [seconds for seconds in times if seconds is not None]
    return replace(job, time_limit_seconds=min([job.time_limit_seconds, *most]))


# --- queries ------------------------------------------------------------------------------------------------------------


Ask = Callable[[Sequence[str]], str]
"""Runs a command of Slurm and returns its output, or raises ClusterError."""


def ask_slurm(argv: Sequence[str]) -> str:
    """Return the output of a Slurm command. Raise ClusterError with its message."""
    try:
        return run_command(argv, seconds=SACCTMGR_SECONDS if argv[0] == "sacctmgr" else SCONTROL_SECONDS)
    except CommandError as error:
        raise ClusterError(f"{' '.join(argv)}: {error}" if argv[0] == "scontrol" else str(error)) from error


def ask_rules(ask: Ask = ask_slurm) -> SiteRules:
    """Query the site's settings and partitions; those of other groups count as hidden. Raise ClusterError."""
    listing = ("--oneliner", "show", "partition")
    shown = {p.name for p in parse_partitions(ask(["scontrol", *listing]))}
    every = parse_partitions(ask(["scontrol", "--all", *listing]))
    return SiteRules(
        config=parse_config(ask(["scontrol", "show", "config"])),
        partitions=tuple(replace(p, hidden=p.hidden or p.name not in shown) for p in every),
    )


def ask_accounting(rules: SiteRules, ask: Ask = ask_slurm) -> Accounting | None:
    """Query this user's associations, the accounts above them, and all QOS; None: the site has no accounting.

    Raise ClusterError.
    """
    if rules.config.get("AccountingStorageType", "").partition("/")[2] in ("", "none"):
        return None

    def rows(fields: str, *words: str) -> list[dict[str, str]]:
        return parse_rows(ask(["sacctmgr", "-nP", "show", *words, f"format={fields}"]), fields)

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise ClusterError(f"{error.args[0]}, so accounting knows no such user") from error
    here = f"cluster={rules.config.get('ClusterName', '')}"
    own = rows(USER_FORMAT, "user", user, "withassoc", here)
    accounts: dict[str, dict[str, str]] = {}
    asked = {row["account"] for row in own}
    while asked:
        found = rows(ACCOUNT_FORMAT, "assoc", "where", here, f"accounts={','.join(sorted(asked))}", "user=")
        accounts |= {row["account"]: row for row in found}
        asked = {row["parentname"] for row in found} - accounts.keys() - {""}
    qos = {row["name"]: row for row in rows(QOS_FORMAT, "qos")}
    return Accounting(associations=own, accounts=accounts, qos=qos)


SAMPLE_PRECURSOR = Job(
    name="evalspan-check-stage", argv=("true",), log="/dev/null", memory_mb=HOLDER_MEMORY_MB, purpose="stage"
)


def refusal_of(cluster: Cluster, job: Job) -> str:
    """Return the cluster's refusal of the job; "" if it is accepted. Raise ClusterError."""
    try:
        cluster.check(job)
    except RefusedError as error:
        return str(error)
    return ""


def precursor_refusal(cluster: Cluster, nodes: Sequence[str], job: Job = SAMPLE_PRECURSOR) -> str:
    """Return the cluster's refusal of a precursor on a GPU node for lack of a GPU; otherwise "".

    A node that also refuses such a trial with a GPU (a reservation, memory, a limit) proves nothing, so the second node is
    tried. Raise ClusterError if the cluster does not answer.
    """
    for node in nodes[:2]:
        words = refusal_of(cluster, replace(job, node=node))
        if not words or not refusal_of(cluster, replace(job, node=node, gpus=1, purpose="trial")):
            return words
    return ""


def refusing_partitions(clusters: Mapping[str, Cluster]) -> dict[str, str]:
    """Return partitions that accept this user's job neither with nor without a GPU, with Slurm's message.

    `clusters`: one per partition.

    For instance those of other groups, accounts or QOS. Raise ClusterError.
    """
    with_gpu = replace(SAMPLE_PRECURSOR, gpus=1)
    found = {
        name: refusal_of(c, SAMPLE_PRECURSOR) and refusal_of(c, with_gpu) for name, c in clusters.items()
    }
    return {name: words for name, words in found.items() if words}


def account_demanded(rules: SiteRules, refusing: Callable[[str], Mapping[str, str]]) -> str | None:
    """Return the first account of this user, the default first, whose jobs some partition accepts; None: no account helps.

    `refusing`: account -> the partitions that refuse its jobs. Raise ClusterError.
    """
    try:
        accounting = ask_accounting(rules)
    except ClusterError:
        return None
    own = accounting.associations if accounting else ()
    every = {p.name for p in rules.partitions if p.up and not p.hidden}
    names = dict.fromkeys(
        row["account"] for row in sorted(own, key=lambda r: r["account"] != r["defaultaccount"])
    )
    return next((name for name in names if every - refusing(name).keys()), None)


def request_taken(cluster_with: Callable[[str], Cluster]) -> str | None:
    """Return the first of GPU_REQUESTS with which the cluster accepts a job with a GPU; None if there is none.

    `cluster_with`: creates a cluster that uses this form. Raise ClusterError.
    """
    trial = replace(SAMPLE_PRECURSOR, gpus=1, purpose="trial")
    return next((form for form in GPU_REQUESTS if not refusal_of(cluster_with(form), trial)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """A site's rules for hosting: `reason` why one job hosts every node's trials, otherwise the rules.

    `free`: the settings leave the choice to evalspan. `nodes`: usable ones with GPUs; `listed`: all.
    """

    reason: str = ""
    partition: str | None = None
    cpu_partition: str | None = None  # for metric workers; None: `partition`
    rules: SiteRules | None = None
    nodes: tuple[NodeState, ...] = ()
    listed: tuple[NodeState, ...] = ()
    free: bool = True

    def reason_for(self, wants: NodeNeeds) -> str:
        """Return why one job must host a node's trials of such an evaluation; "" if a precursor serves."""
        if self.reason or self.rules is None or not self.free:
            return self.reason
        return crowding_reason(self.rules, self.partition, self.nodes, wants)

    @property
    def array_size(self) -> int | None:
        """Return the maximum size of a job array (MaxArraySize; 1 if the site allows none); None if unknown."""
        most = None if self.rules is None else self.rules.number("MaxArraySize")
        return None if most is None else max(1, most)

    def workers_that_fit(self, wants: NodeNeeds, cpus: int, memory_mb: int = 0) -> int | None:
        """Return how many metric workers of `cpus` and `memory_mb` (MiB) their partition can run beside its trials.

        At least FEW_WORKERS if the partition has the cores and the memory, since more may pend in Slurm's queue. None if the
        number of cores is unknown. Memory counts only if Slurm allocates it.
        """
        if self.rules is None:
            return None
        chosen = self.rules.chosen(self.cpu_partition or self.partition)
        cores = sum(p.cpus for p in chosen)
        if not cores:
            return None
        left = cores
        if self.cpu_partition in (None, self.partition):
            left -= wants.trial_cpus * sum(n.gpus // max(1, wants.trial_gpus) for n in self.nodes)
        fit = max(left // cpus, min(FEW_WORKERS, cores // cpus))
        memory = [p.memory_mb for p in chosen if p.memory_mb]
        allotted = "MEMORY" in self.rules.config.get("SelectTypeParameters", "").upper()
        if memory_mb and allotted and len(memory) == len(chosen):
            fit = min(fit, sum(memory) // memory_mb)
        return max(1, fit)


def ask_hosting(cluster: Cluster, rules: SiteRules, options: SlurmOptions) -> Hosting:
    """Query the site's rules for staging and metrics. Raise ClusterError if the cluster does not answer."""
    listed, stage = tuple(cluster.nodes()), options.settings.stage.enabled
    free, partition = options.settings.stage.host_trials == "auto", options.trial_partition
    nodes = tuple(n for n in listed if n.usable and n.gpus)
    refusal = precursor_refusal(cluster, [n.name for n in nodes]) if stage and free else ""
    return Hosting(
        reason=host_reason(rules, partition, refusal, stage=stage) if free else "",
        partition=partition,
        cpu_partition=options.metric_partition,
        rules=rules,
        nodes=nodes,
        listed=listed,
        free=free and stage,
    )
