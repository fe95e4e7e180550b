"""Translates between Slurm's commands and pyslurm: `sbatch`'s arguments one way, listings the other. Pure.

Rule: a job is described once, by `sbatch_arguments`; a listing is read once, by `slurm_parse`. So
this module decides nothing: it renames. An argument without a translation is refused by its name.
Written for pyslurm 25.11.2.
"""

from __future__ import annotations

import getopt
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from coordinator.cluster import RefusedError
from coordinator.cluster import slurm_parse as text

# --- submission ------------------------------------------------------------------------------------------------------


def _same(value: str) -> str:
    return value


def _time(value: str) -> str | int:
    """Minutes as a number: pyslurm fails on text of digits alone."""
    return int(value) if value.isdigit() else value


def _memory(value: str) -> str:
    if value.rstrip("KMGT") == "0":
        raise ValueError("--mem=0, all of a node's memory")  # pyslurm takes it for the default
    return value


def _signal(value: str) -> str:
    """Signals by their long names: "B:TERM@60" -> "B:SIGTERM@60"."""
    flags, colon, rest = value.rpartition(":")
    name, at, seconds = rest.partition("@")
    return f"{flags}{colon}{name if name.isdigit() else 'SIG' + name.removeprefix('SIG')}{at}{seconds}"


def _gres(value: str) -> str:
    """Each kind with its number: "gpu:a100" -> "gpu:a100:1"."""
    return ",".join(kind if kind.rpartition(":")[2].isdigit() else f"{kind}:1" for kind in value.split(","))


def _gpus(value: str) -> str:
    return _gres(",".join(f"gpu:{kind}" for kind in value.split(",")))


def _constant(value: object) -> Callable[[str], object]:
    return lambda _: value


# `sbatch`'s option, "=" behind it where it takes a value -> attribute of JobSubmitDescription, and its form there
FIELDS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "account=": ("account", _same),
    "array=": ("array", _same),
    "batch=": ("batch_constraints", _same),
    "begin=": ("begin_time", _same),
    "chdir=": ("working_directory", _same),
    "cluster-constraint=": ("cluster_constraints", _same),
    "comment=": ("comment", _same),
    "constraint=": ("constraints", _same),
    "container=": ("container", _same),
    "contiguous": ("requires_contiguous_nodes", _constant(value=True)),
    "core-spec=": ("cores_reserved_for_system", _same),
    "cores-per-socket=": ("cores_per_socket", _same),
    "cpus-per-gpu=": ("cpus_per_gpu", _same),
    "cpus-per-task=": ("cpus_per_task", _same),
    "deadline=": ("deadline", _same),
    "dependency=": ("dependencies", _same),
    "error=": ("standard_error", _same),
    "exclude=": ("excluded_nodes", _same),
    "exclusive=": ("resource_sharing", _same),
    "export=": ("environment", _same),
    "extra=": ("extra", _same),
    "gpus=": ("gpus", _same),
    "gpus-per-node=": ("gres_per_node", _gpus),
    "gpus-per-task=": ("gpus_per_task", _same),
    "gres=": ("gres_per_node", _gres),
    "hold": ("priority", _constant(0)),
    "input=": ("standard_in", _same),
    "job-name=": ("name", _same),
    "licenses=": ("licenses", _same),
    "mail-type=": ("mail_types", _same),
    "mail-user=": ("mail_user", _same),
    "mcs-label=": ("mcs_label", _same),
    "mem=": ("memory_per_node", _memory),
    "mem-per-cpu=": ("memory_per_cpu", _same),
    "mem-per-gpu=": ("memory_per_gpu", _same),
    "network=": ("network", _same),
    "nice=": ("nice", int),
    "no-requeue": ("is_requeueable", _constant(value=False)),
    "nodelist=": ("required_nodes", _same),
    "nodes=": ("nodes", _same),
    "ntasks=": ("ntasks", int),
    "ntasks-per-node=": ("ntasks_per_node", _same),
    "open-mode=": ("log_files_open_mode", _same),
    "output=": ("standard_output", _same),
    "oversubscribe": ("resource_sharing", _constant("yes")),
    "partition=": ("partitions", _same),
    "priority=": ("priority", int),
    "profile=": ("profile_types", _same),
    "qos=": ("qos", _same),
    "requeue": ("is_requeueable", _constant(value=True)),
    "reservation=": ("reservations", _same),
    "segment=": ("segment_size", _same),
    "signal=": ("signal", _signal),
    "sockets-per-node=": ("sockets_per_node", _same),
    "spread-job": ("spreads_over_nodes", _constant(value=True)),
    "thread-spec=": ("threads_reserved_for_system", _same),
    "threads-per-core=": ("threads_per_core", _same),
    "time=": ("time_limit", _time),
    "time-min=": ("time_limit_min", _time),
    "tmp=": ("temporary_disk_per_node", _same),
    "use-min-nodes": ("use_min_nodes", _constant(value=True)),
    "wait-all-nodes=": ("wait_all_nodes", lambda value: value == "1"),
    "wckey=": ("wckey", _same),
}
SILENT = ("parsable", "quiet", "verbose")  # they change what `sbatch` prints
SHORT = {
    "A": "account=", "C": "constraint=", "D": "chdir=", "H": "hold", "J": "job-name=", "L": "licenses=",
    "G": "gpus=", "N": "nodes=", "Q": "quiet", "a": "array=", "b": "begin=", "c": "cpus-per-task=", "d": "dependency=",
    "e": "error=", "i": "input=", "n": "ntasks=", "o": "output=", "p": "partition=",
    "q": "qos=", "s": "oversubscribe", "t": "time=", "v": "verbose", "w": "nodelist=", "x": "exclude=",
}  # fmt: skip
# Options that may stand without their value -> the value that is meant.
BARE = {"--exclusive": "no", "--nice": "100"}


def description(arguments: Sequence[str]) -> dict[str, Any]:
    """Attributes of pyslurm's JobSubmitDescription with the effect of these arguments of `sbatch`; the last one wins.

    RefusedError: names an argument that has no translation.
    """
    given = [f"{a}={BARE[a]}" if a in BARE else a for a in arguments]
    letters = "".join(letter + ":" * SHORT[letter].endswith("=") for letter in SHORT)
    try:
        pairs, rest = getopt.gnu_getopt(given, letters, [*FIELDS, *SILENT])
        known = {name.rstrip("=") for name in (*FIELDS, *SILENT)}
        # getopt would take "--gpu" for the only option that begins so
        rest += [a for a in given if a.startswith("--") and a[2:].partition("=")[0] not in known]
        if rest:
            raise getopt.GetoptError(f"{rest[0]} not recognized")  # noqa: TRY301
        fields: dict[str, Any] = {"profile_types": "none"}  # without it pyslurm asks for every profile
        for option, value in pairs:
            name = option.removeprefix("--") if option.startswith("--") else SHORT[option[1]].rstrip("=")
            if name not in SILENT:
                field, form = FIELDS.get(f"{name}=") or FIELDS[name]
                fields[field] = form(value)
    except (getopt.GetoptError, ValueError) as error:
        raise RefusedError(
            f"pyslurm cannot express this argument of sbatch: {error}; take it out of the settings, "
            'or set [cluster] api = "cli"'
        ) from error
    return fields


def environment(export: str, present: Mapping[str, str]) -> dict[str, Any]:
    """The attributes `environment` and `get_user_environment` for a value of `--export`.

    `present`: the submitter's variables. As of sbatch: "ALL"; "NIL" or "NONE"; or names and
    NAME=value, after "ALL," in addition to all. Bytes that are no UTF-8 are left out with their
    variable: pyslurm fails on them.
    """
    words = [word for word in export.split(",") if word]
    first = words[0].upper() if words else "NONE"
    found = dict(present) if first == "ALL" else {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            found[name] = value
        elif name in present:
            found[name] = present[name]
    own = {} if first in ("ALL", "NIL") else {"get_user_environment": True}
    return {"environment": {n: v for n, v in found.items() if _is_unicode(n + v)}, **own}


def _is_unicode(word: str) -> bool:
    """Is it free of Python's surrogate escapes?"""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- listings --------------------------------------------------------------------------------------------------------

JOB_FIELDS = (
    "allocated_nodes",
    "array_id",
    "array_task_id",
    "array_tasks_waiting",
    "comment",
    "end_time",
    "id",
    "name",
    "start_time",
    "state",
    "state_reason",
    "submit_time",
)
NODE_FIELDS = (
    "active_features",
    "allocated_cpus",
    "allocated_memory",
    "available_features",
    "configured_gres",
    "idle_cpus",
    "name",
    "partitions",
    "real_memory",
    "reason",
    "state",
    "total_cpus",
)
PARTITION_FIELDS = ("is_default", "max_time", "name", "state")


def queue_text(jobs: Iterable[Mapping[str, Any]]) -> str:
    """What `squeue --array --format=QUEUE_FORMAT` would print of these pyslurm Jobs."""
    columns = text.QUEUE_FORMAT.removesuffix(text.RECORD_END).split(text.FIELD_END)
    rows = [[_SQUEUE[column](job, member) for column in columns] for job in jobs for member in members(job)]
    return _listing(columns, rows)


# `squeue`'s format letter -> its text, of a Job and one of its members
_SQUEUE: Mapping[str, Callable[[Mapping[str, Any], int], object]] = {
    "%F": lambda job, _: job["array_id"] or job["id"],
    "%K": lambda _, member: member,
    "%N": lambda job, _: job["allocated_nodes"] or "",
    "%S": lambda job, _: job["start_time"] or "",
    "%T": lambda job, _: job["state"],
    "%V": lambda job, _: job["submit_time"] or "",
    "%e": lambda job, _: job["end_time"] or "",
    "%j": lambda job, _: job["name"] or "",
    "%k": lambda job, _: job["comment"] or "",
    "%r": lambda job, _: job["state_reason"] or "",
}


def members(job: Mapping[str, Any]) -> list[int]:
    """A Job's members: all that wait are one Job. [0] where the job is no array.

    pyslurm gives None for the number 0, so a started Job without a number is member 0.
    """
    waiting = job["array_tasks_waiting"]
    if not waiting or job["array_task_id"] is not None:
        return [job["array_task_id"] or 0]
    found: list[int] = []
    for part in waiting.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip())
        if match:
            first, last, step = match.groups()
            found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def nodes_text(
    nodes: Iterable[Mapping[str, Any]], partitions: Iterable[Mapping[str, Any]], used: Mapping[str, int]
) -> str:
    """What `sinfo --Node --Format=NODE_FORMAT` would print of these Nodes and Partitions. `used`: GPUs by node."""
    known = {p["name"]: p for p in partitions}
    rows = [
        [_SINFO[column](node, known[name], used) for column in text.NODE_FIELDS]
        for node in nodes
        for name in node["partitions"]
        if name in known
    ]
    return _listing(text.NODE_FIELDS, rows)


# `sinfo`'s column -> its text, of a Node, one of its Partitions, and the GPUs in use by node
_SINFO: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, int]], object]] = {
    "NodeList": lambda node, _, __: node["name"],
    "Partition": lambda _, part, __: part["name"] + "*" * part["is_default"],
    "Available": lambda _, part, __: part["state"].lower(),
    "Time": lambda _, part, __: f"{part['max_time']}:00" if isinstance(part["max_time"], int) else "infinite",
    "StateLong": lambda node, _, __: state_long(node["state"]),
    "Gres": lambda node, _, __: ",".join(f"{kind}:{n}" for kind, n in node["configured_gres"].items()),
    "GresUsed": lambda node, _, used: f"gpu:{used.get(node['name'], 0)}",
    "Reason": lambda node, _, __: node["reason"] or "none",
    "CPUsState": lambda node, _, __: f"{node['allocated_cpus']}/{node['idle_cpus']}/0/{node['total_cpus']}",
    "Memory": lambda node, _, __: node["real_memory"] or 0,
    "AllocMem": lambda node, _, __: node["allocated_memory"],
    "Features": lambda node, _, __: ",".join(node["available_features"]),
    "Features_act": lambda node, _, __: ",".join(node["active_features"]),
}

# Flags behind a node's state, and the mark that `sinfo` puts there; the first one counts.
_MARKS = {
    "MAINTENANCE": "$",
    "REBOOT_ISSUED": "^",
    "REBOOT_REQUESTED": "@",
    "POWERING_UP": "#",
    "POWERING_DOWN": "%",
    "POWERED_DOWN": "~",
    "POWER_DOWN": "!",
    "NOT_RESPONDING": "*",
}


def state_long(state: str) -> str:
    """The state as `sinfo` has it, from one as pyslurm and `scontrol` have it: "IDLE+DRAIN" -> "drained".

    As Slurm's node_state_string does it.
    """
    base, *flags = state.upper().split("+")
    mark = next((mark for flag, mark in _MARKS.items() if flag in flags), "")
    busy = base in ("ALLOCATED", "MIXED")
    ending = busy or "COMPLETING" in flags
    silent = "*" * ("NOT_RESPONDING" in flags)
    quiet = next((flag for flag in ("RESERVED", "BLOCKED", "PLANNED") if flag in flags), "")
    words = (
        ("INVALID_REG" in flags, "inval"),
        (mark == "$" and not (busy or base == "DOWN" or "DRAIN" in flags), f"maint{silent}"),
        (mark == "^" and not busy, "reboot^"),
        (mark == "@" and not busy, f"reboot{silent}"),
        ("DRAIN" in flags, f"{'draining' if ending else 'drained'}{mark}"),
        ("FAIL" in flags, f"{'failing' if ending else 'fail'}{silent}"),
        ("COMPLETING" in flags and base not in ("ALLOCATED", "DOWN"), f"completing{mark}"),
        (base == "IDLE" and bool(quiet) and not mark, quiet.lower()),
    )
    return next((word for holds, word in words if holds), base.lower() + mark)


def _listing(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [text.FIELD_END.join(str(field) for field in row) for row in (header, *rows)]
    return "".join(f"{line}{text.RECORD_END}\n" for line in lines)
