"""Parsers for the output of Slurm's commands. Pure. Called by both Slurm clusters.

Rule: every answer begins with its header and every record ends with a mark, so a truncated or missing answer differs from "no
jobs" and raises ClusterError. A job state not in PHASES is "unknown". Tested versions: docs/site/slurm.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from coordinator.site.cluster import ClusterError, JobPhase, JobState, NodeState
from coordinator.site.cluster.node_choice import apply_node_settings, exclude_node
from coordinator.site.cluster.sbatch_text import SlurmOptions, is_ours
from coordinator.site.cluster.slurm_limits import remedy_of

FIELD_END, RECORD_END = (
    "\x1f",
    "\x1e",
)  # names and comments of the user's other jobs may contain any printable text
# array's id (or the job's), member, state, submitted, started, node, reason, comment, name
QUEUE_FIELDS = ("%F", "%K", "%T", "%V", "%S", "%N", "%r", "%k", "%j")
QUEUE_FORMAT = FIELD_END.join(QUEUE_FIELDS) + RECORD_END
NODE_FIELDS = (
    "NodeList",
    "Partition",
    "Available",
    "StateLong",
    "Gres",
    "GresUsed",
    "Reason",
    "CPUsState",
    "Memory",
    "AllocMem",
    "Features_act",
)
NODE_FORMAT = (
    ",".join(f"{name}:{FIELD_END}" for name in NODE_FIELDS[:-1]) + f",{NODE_FIELDS[-1]}:{RECORD_END}"
)

PHASES: dict[str, JobPhase] = {
    **dict.fromkeys(
        (
            "PENDING",
            "CONFIGURING",
            "REQUEUED",
            "REQUEUE_FED",
            "REQUEUE_HOLD",
            "SPECIAL_EXIT",
            "RESV_DEL_HOLD",
            "POWER_UP_NODE",
        ),
        "pending",
    ),
    **dict.fromkeys(
        ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "EXPEDITING"), "running"
    ),
    **dict.fromkeys(
        (
            "COMPLETING",  # ending or ended: on a dead node this state lasts for minutes
            "COMPLETED",
            "CANCELLED",
            "FAILED",
            "TIMEOUT",
            "NODE_FAIL",
            "PREEMPTED",
            "BOOT_FAIL",
            "DEADLINE",
            "OUT_OF_MEMORY",
            "LAUNCH_FAILED",
            "RECONFIG_FAIL",
        ),
        "ended",
    ),
}

USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing", "planned"})
# sinfo's marks of unusable nodes: not responding, power changes, maintenance, reboot; not "-" (planned).
BAD_MARKS = "*~#!%$@^"
POWER_DOWN_MARKS = "~#"  # of a node that is powered down or booting


def own_words(stderr: str) -> str:
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def not_cancelled(stderr: str) -> str:
    """Return errors of `scancel` other than those about jobs that are gone; "" if none."""
    return own_words("\n".join(line for line in stderr.splitlines() if remedy_of(line) != "gone"))


def parse_queue(text: str, token: str | None) -> list[JobState]:
    """Parse `squeue --format=QUEUE_FORMAT` with its header into the jobs whose comment has `token`.

    None: all jobs, with the expected start of pending ones.
    """
    jobs = []
    for fields in _records(text, len(QUEUE_FIELDS), "squeue"):
        array, index, state, submitted, started, node, reason, comment, name = fields
        if token is not None and not is_ours(comment, token):
            continue
        if not array.isdigit():
            raise ClusterError(f"squeue printed a job id that cannot be read: {array[:40]!r}")
        jobs.append(
            job_state(
                job_id=array,
                name=name,
                index=int(index) if index.isdigit() else 0,
                state=state,
                node=node,
                reason=reason,
                submitted_at=_seconds(submitted),
                # before it has a node: Slurm's own estimate
                started_at=_seconds(started) if node or token is None else None,
            )
        )
    return jobs


def job_state(*, state: str, node: str, reason: str, **rest: Any) -> JobState:
    """Return the record of one member from Slurm's fields. `rest`: other fields of JobState."""
    return JobState(
        phase=PHASES.get(state, "unknown"),
        state="OUT_OF_MEMORY" if (state, reason) == ("COMPLETING", "OutOfMemory") else state,
        node=node or None,
        reason="" if reason == "None" else reason,
        **rest,
    )


NodeRow = tuple[NodeState, bool]
"""A node in one of its partitions, usable if the partition is up; and whether that is the site's default."""


def parse_sinfo(text: str) -> list[NodeRow]:
    return [_row(fields) for fields in _records(text, len(NODE_FIELDS), "sinfo")]


def nodes_of(listed: Iterable[NodeRow], options: SlurmOptions) -> list[NodeState]:
    """Return the nodes of the set partitions, by name.

    A node that only the CPU partition reaches counts as having no GPUs. Excluded nodes are not usable.
    """
    seen: dict[str, list[NodeState]] = {}
    defaults: set[str] = set()
    for row, default in listed:
        seen.setdefault(row.name, []).append(row)
        defaults.update(row.partitions if default else ())
    certain = _names(options.trial_partition) or defaults
    trials = certain | _names(options.settings.borrow.best_effort)
    staging = _names(options.role("stage").partition)  # a precursor runs on its trials' node
    reachable = trials | _names(options.metric_partition) | _names(options.build_partition)
    nodes = []
    for _, rows in sorted(seen.items()):
        names = tuple(name for row in rows for name in row.partitions)
        if reachable.isdisjoint(names):
            continue
        usable = {name for row in rows if _usable(row, options) for name in row.partitions}
        node = replace(
            rows[0],
            usable=not usable.isdisjoint(reachable),
            partitions=names,
            # reachable only through partitions that may preempt a job
            best_effort=bool(usable & trials - certain) and not usable & certain,
        )
        if trials.isdisjoint(names):
            node = replace(node, gpus=0, gpus_free=0, gpu_type="")
        if staging and node.gpus and not node.best_effort and staging.isdisjoint(node.partitions):
            nodes.append(exclude_node(node, "[slurm.precursor] partition"))
        else:
            nodes.append(apply_node_settings(node, options.settings))
    return nodes


def _usable(row: NodeState, options: SlurmOptions) -> bool:
    base = row.state.lower().rstrip(BAD_MARKS + "-+")
    good = base in USABLE_STATES or (options.settings.cluster.reservation is not None and base == "reserved")
    bad = set(BAD_MARKS) - set(POWER_DOWN_MARKS if options.settings.nodes.wake else "")
    return good and row.usable and not set(row.state) & bad


def is_reserved(node: NodeState) -> bool:
    """Return whether it is unusable because of a reservation, with no other reason given by an admin."""
    return not node.usable and not node.reason and node.state.startswith(("reserved", "maint"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """One reservation that has not ended. Times in unix seconds."""

    name: str
    nodes: str  # a hostlist
    start: float
    end: float
    active: bool = False
    users: tuple[str, ...] = ()  # "-name": all except that one
    accounts: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"reservation {self.name} of {self.nodes} until {self.until}"

    @property
    def until(self) -> str:
        return local_time(self.end)


def local_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")  # noqa: DTZ006 (local time)


def parse_reservations(text: str) -> list[Reservation]:
    """Parse `scontrol --oneliner show reservation`; unreadable reservations are omitted."""
    found = []
    for line in text.splitlines():
        row = dict(re.findall(r"(\S+?)=(\S*)", line))
        start, end = _seconds(row.get("StartTime", "")), _seconds(row.get("EndTime", ""))
        if start is None or end is None or not row.get("ReservationName"):
            continue
        lists = {key: row.get(key, "") for key in ("Users", "Accounts", "Groups")}
        named = {k: () if v in ("", "(null)") else tuple(v.split(",")) for k, v in lists.items()}
        found.append(
            Reservation(
                name=row["ReservationName"],
                nodes=row.get("Nodes", ""),
                start=start,
                end=end,
                active=row.get("State") == "ACTIVE",
                users=named["Users"],
                accounts=named["Accounts"],
                groups=named["Groups"],
            )
        )
    return found


def _names(partitions: str | None) -> set[str]:
    return set(partitions.split(",")) if partitions else set()


def _row(fields: list[str]) -> NodeRow:
    name, partition, available, state, gres, gres_used, reason, cpus, memory, allocated, features = fields
    gpus, gpu_type = parse_gres(gres)
    counts = cpus.split("/")  # allocated / idle / other / total
    try:
        idle, total, memory_mb, used_mb = int(counts[1]), int(counts[3]), int(memory), int(allocated)
    except (IndexError, ValueError) as error:
        raise ClusterError(f"sinfo printed a node that cannot be read: {fields!r}") from error
    node = NodeState(
        name=name,
        usable=available == "up",
        state=state,
        gpus=gpus,
        gpus_free=max(0, gpus - parse_gres(gres_used)[0]),
        gpu_type=gpu_type,
        cpus=total,
        cpus_free=idle,
        memory_mb=memory_mb,
        memory_free_mb=max(0, memory_mb - used_mb),
        features=() if features in ("", "(null)") else tuple(features.split(",")),
        partitions=(partition.rstrip("*"),),
        reason="" if reason.lower() in ("none", "(null)", "n/a") else reason.strip(),
    )
    return node, partition.endswith("*")


def parse_gres(text: str) -> tuple[int, str]:
    """Parse (GPUs, type) of a node from "gpu:a100:8(S:0-1),nvme:2"; several types are joined by "+".

    A GPU slice (MIG) counts as one, with a type of its own: "gpu:1g.10gb:7".
    """
    count, types = 0, []
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        words = item.strip().split(":")
        if words[0] != "gpu":
            continue
        if len(words) > 1 and (number := re.fullmatch(r"(\d+)(K?)", words[-1])):
            count += int(number[1]) * (1024 if number[2] else 1)
            types += words[1:-1]
        else:
            count += 1
            types += words[1:]
    return count, "+".join(dict.fromkeys(types))


def seconds_of(text: str) -> int | None:
    """Parse Slurm's [[days-]hours:]minutes:seconds as seconds; None for UNLIMITED and any other text."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d\d)", text, re.ASCII)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _seconds(text: str) -> float | None:
    """Parse a time as unix seconds; without SLURM_TIME_FORMAT, Slurm prints local ISO time."""
    if text.isdigit():
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _records(text: str, width: int, command: str) -> Iterator[list[str]]:
    """Yield records below the header. Raise ClusterError for a missing header or end mark, or another width."""
    # SLURM_CLUSTERS adds a line above the header
    body = re.sub(r"\ACLUSTER: [^\n]*\n", "", text)
    *records, rest = body.split(RECORD_END)
    rows = [record.removeprefix("\n").split(FIELD_END) for record in records]
    if not rows or rest.strip() or any(len(row) != width for row in rows):
        raise ClusterError(f"{command} printed unreadable output: {text[:120]!r}")
    yield from rows[1:]
