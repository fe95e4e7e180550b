"""One query of Slurm by pyslurm: prints the records that `slurm_parse` reads from squeue and sinfo, as JSON.

Rule: a separate process, and the only importer of pyslurm. Slurm's library exits if it finds no slurm.conf, and holds the GIL
while it waits for slurmctld. Started by `slurm_cli.SlurmApi`. Written for pyslurm 25.11.2.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from coordinator.site.cluster import JobState, NodeState
from coordinator.site.cluster.sbatch_text import is_ours
from coordinator.site.cluster.slurm_parse import NodeRow, job_state

GPU = "gres/gpu"


def query_jobs(pyslurm: Any, token: str) -> Iterable[JobState]:
    """Yield this user's jobs whose comment has `token`: each member of an array, as in `parse_queue`."""
    for job in pyslurm.Jobs.load().values():
        if job.user_id != os.getuid() or not is_ours(_comment(job), token):
            continue
        for member in array_members(job.array_task_id, job.array_tasks_waiting):
            yield job_state(
                job_id=str(job.array_id or job.id),
                name=job.name or "",
                index=member,
                state=job.state,
                node=job.allocated_nodes or "",
                reason=job.state_reason or "",
                submitted_at=job.submit_time,
                started_at=job.start_time if job.allocated_nodes else None,
            )


def _comment(job: Any) -> str:
    try:
        return job.comment or ""
    except UnicodeDecodeError:  # evalspan's are UTF-8
        return ""


def array_members(number: int | None, waiting: str | None) -> list[int]:
    """Return the array members in one of pyslurm's jobs, which combines all pending ones. [0] outside of arrays.

    pyslurm gives None for the number 0, so a started job without a number is member 0.
    """
    if not waiting or number is not None:
        return [number or 0]
    found: list[int] = []
    for first, last, step in re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", waiting):
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def query_nodes(pyslurm: Any) -> Iterable[NodeRow]:
    """Yield each node in each of its partitions, as in `parse_sinfo`."""
    partitions = {part.name: part for part in pyslurm.Partitions.load().values()}
    return [
        (_node(node, part), part.is_default)
        for node in pyslurm.Nodes.load().values()
        for part in map(partitions.get, node.partitions)
        if part is not None
    ]


def _node(node: Any, part: Any) -> NodeState:
    gpus = sum(n for kind, n in node.configured_gres.items() if kind.split(":")[0] == "gpu")
    memory = node.real_memory or 0
    return NodeState(
        name=node.name,
        usable=part.state == "UP",
        state=state_long(node.state),
        gpus=gpus,
        gpus_free=max(0, gpus - int(node.allocated_tres.get(GPU, 0))),
        gpu_type="+".join(kind[4:] for kind in node.configured_gres if kind.startswith("gpu:")),
        cpus=node.total_cpus,
        cpus_free=node.idle_cpus,
        memory_mb=memory,
        memory_free_mb=max(0, memory - node.allocated_memory),
        features=tuple(node.active_features),
        partitions=(part.name,),
        reason=node.reason or "",
    )


# Flags of a node's state, and the mark that `sinfo` appends; the first one counts.
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
    """Convert pyslurm's state to that of `sinfo`: "IDLE+DRAIN" -> "drained".

    Source: node_state_string of Slurm.
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


QUERIES: Mapping[str, Callable[..., Iterable[Any]]] = {
    "jobs": query_jobs,
    "nodes": query_nodes,
    "version": lambda _: (),
}


def main(query: str, *arguments: str) -> None:
    """Print {"version": pyslurm's, "found": records}; an error of Slurm is the last line of standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # messages of the library are not part of the answer
    pyslurm = importlib.import_module("pyslurm")
    try:
        rows = list(QUERIES[query](pyslurm, *arguments))
    except pyslurm.PyslurmError as error:
        sys.exit(str(error))
    print(
        json.dumps({"version": pyslurm.__version__, "found": rows}, default=asdict), file=answers, flush=True
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
