"""Serves calls of Slurm's library, one JSON line each way. Run by `slurm_pyslurm`; the only importer of pyslurm.

Rule: a process of its own. The library ends its process where it finds no slurm.conf, holds
Python's lock while it waits for slurmctld, and makes every later library of its process global. It
ends when its standard input does. It decides nothing: names of calls and of fields come from
`pyslurm_text`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.cluster.pyslurm_text import JOB_FIELDS, NODE_FIELDS, PARTITION_FIELDS

# Slurm abbreviates the list of an array's waiting members, but where this variable says 0.
WHOLE_LISTS = "SLURM_BITSTR_LEN"
GPU = "gres/gpu"
HOLDING = (
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "CONFIGURING",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
)  # states of jobs that have their GPUs


def submit(pyslurm: Any, fields: Mapping[str, Any]) -> int:
    """A new job's id. `fields`: attributes of JobSubmitDescription."""
    return int(pyslurm.JobSubmitDescription(**fields).submit())


def jobs(pyslurm: Any) -> list[dict[str, Any]]:
    """JOB_FIELDS of all this user's jobs."""
    user, found = os.getuid(), []
    for job in pyslurm.Jobs.load().values():
        if job.user_id == user:
            try:
                found.append(_fields(job, JOB_FIELDS))
            except UnicodeDecodeError:  # evalspan's jobs have names and comments in UTF-8
                continue
    OWN_IDS.clear()
    for job in found:
        if not job["array_tasks_waiting"]:  # of member 0, pyslurm gives None for the number
            OWN_IDS[f"{job['array_id']}_{job['array_task_id'] or 0}"] = job["id"]
    return found


def nodes(pyslurm: Any) -> dict[str, Any]:
    """All "nodes" and "partitions", and GPUs "used" by node: None where this user may not see them."""
    listed = list(pyslurm.Nodes.load().values())
    config = pyslurm.slurmctld.Config.load()
    used: dict[str, int] | None = None
    if GPU in config.accounting_storage_tres:
        used = {node.name: int(node.allocated_tres.get(GPU, 0)) for node in listed}
    elif "jobs" not in config.private_data:
        used = gpus_of(pyslurm.Jobs.load().values())
    return {
        "nodes": [_fields(node, NODE_FIELDS) for node in listed],
        "partitions": [_fields(part, PARTITION_FIELDS) for part in pyslurm.Partitions.load().values()],
        "used": used,
    }


def gpus_of(jobs: Sequence[Any]) -> dict[str, int]:
    """GPUs in use by node: the sum over all jobs that hold some."""
    used: Counter[str] = Counter()
    for job in jobs:
        if job.state in HOLDING:
            for node, layout in job.get_resource_layout_per_node().items():
                for kind, held in layout["gres"].items():
                    if kind.partition(":")[0] == "gpu":
                        used[node] += held["count"] if isinstance(held, dict) else held
    return dict(used)


def cancel(pyslurm: Any, job_ids: Sequence[str]) -> list[str]:
    """End these jobs and members; those left for which pyslurm has no call, or Slurm did not confirm it.

    A member that waits has no id of its own; the last one of an array has the array's.
    """
    left = []
    for job_id in job_ids:
        own = int(job_id) if job_id.isdigit() else OWN_IDS.get(job_id)
        if own is None or job_id.startswith(f"{own}_"):
            left.append(job_id)
            continue
        try:
            pyslurm.Job(own).cancel()
        except pyslurm.PyslurmError:
            left.append(job_id)
    return left


OWN_IDS: dict[str, int] = {}  # a member's "id_index" -> its own id, of the last listing
CALLS: Mapping[str, Callable[..., Any]] = {"submit": submit, "jobs": jobs, "nodes": nodes, "cancel": cancel}


def answer(pyslurm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """{"ok": result}, {"error": Slurm's words}, or {"invalid": why pyslurm cannot express it}."""
    try:
        return {"ok": CALLS[request["call"]](pyslurm, *request["arguments"])}
    except pyslurm.PyslurmError as error:
        return {"error": str(error)}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        return {"invalid": f"{type(error).__name__}: {error}"}


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the library's own words are no answer
    os.putenv(WHOLE_LISTS, "0")  # for Slurm's library alone: pyslurm gives each job what is in os.environ
    os.environ["SLURM_UMASK"] = f"0{_umask():03o}"  # as sbatch does: jobs' files get the submitter's modes
    pyslurm = importlib.import_module("pyslurm")
    print(json.dumps({"ok": pyslurm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(pyslurm, json.loads(line))), file=answers, flush=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fields(item: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names}


if __name__ == "__main__":
    main()
