"""The coordinator's own job: its requests, and the line that submits it. Pure.

Rule: `init`, `status`, `watch` and the doctor take the job from here. Its sbatch script repeats the requests for those who
type the line by hand. There is one daemon per folder: the job is named after the folder, and Slurm runs one job of a name
(singleton). Of what `init` finds about a site, only settings that differ from the defaults are written.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coordinator.site.cluster import Job, NodeState
from coordinator.site.cluster.sbatch_text import SlurmOptions
from coordinator.site.config.schema import SlurmConfig, TrialConfig

DAEMON_SECONDS = 86_400  # time limit if partition, account and QOS allow it
DAEMON = "evalspan-daemon"  # prefix of the job's name; the script is DAEMON.sbatch
MEMORY_MB = 1024


def own_options(options: SlurmOptions) -> SlurmOptions:
    """Return the options of the coordinator's own job, to which no role applies."""
    settings = options.settings.model_copy(update={"slurm": SlurmConfig()})
    return replace(options, settings=settings)


def daemon_job(options: SlurmOptions) -> Job:
    """Return the job on the CPU partition, before limits. Its name ends with the digest of the work folder."""
    name = f"{DAEMON}-{options.token.rpartition(':')[2]}"
    return Job(
        name=name,
        argv=(),
        log="",
        memory_mb=MEMORY_MB,
        time_limit_seconds=DAEMON_SECONDS,
        purpose="build",
        comment="daemon",
    )


def sbatch_line(job: Job, options: SlurmOptions, script: Path, rest: str = "", *, named: bool = True) -> str:
    """Return the command to type. `rest`: words after the script, with a leading space. `named`: as the folder's daemon."""
    own = own_options(options)
    words = ["sbatch"]
    for flag, value in (
        ("-p", own.partition_of(job)),
        ("-A", own.account_of(job)),
        ("-q", own.qos_of(job)),
        ("-t", slurm_time(job.time_limit_seconds)),
        ("-J", job.name if named else None),
    ):
        words += [flag, shlex.quote(value)] if value else []
    return " ".join([*words, shlex.quote(str(script))]) + rest


def slurm_time(seconds: int) -> str:
    """Format seconds as Slurm's days-hours:minutes:seconds."""
    minutes, rest = divmod(seconds, 60)
    days, minutes = divmod(minutes, 24 * 60)
    clock = f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
    return f"{days}-{clock}" if days else clock.removeprefix("0")


# --- what `init` writes about a site ------------------------------------------------------------------------------------


def probe_of(
    nodes: Sequence[NodeState],
    preemptible: AbstractSet[str] = frozenset(),
    refusing: Mapping[str, str] = MappingProxyType({}),
    max_seconds: Mapping[str, int] = MappingProxyType({}),
) -> tuple[str, dict[str, tuple[Any, str]]]:
    """Summarise the site in a line, and return setting ("cluster.partition") -> its value, and a comment for the reader.

    Chooses the non-preemptible partition with most GPUs, and one of nodes without GPUs, if any; a time limit within MaxTime.
    `preemptible`: partitions whose jobs may be preempted. `refusing`: those that accept no job of this user, with Slurm's
    message. Both kinds are chosen only if there is no other. `max_seconds`: partition -> MaxTime; no key: no limit.
    """
    gpus: Counter[str] = Counter()
    for node in nodes:
        for partition in node.partitions:
            gpus[partition] += node.gpus
    with_gpus = [name for name, count in gpus.most_common() if count]
    with_gpus.sort(key=lambda name: (name in refusing, name in preemptible))  # stable: by GPUs within each
    without = [name for name, count in sorted(gpus.items()) if not count]
    shapes = Counter((node.gpus, node.gpu_type or "GPUs") for node in nodes if node.gpus)
    summary = ", ".join(f"{n} nodes with {each} {kind}" for (each, kind), n in shapes.most_common())
    chosen: dict[str, tuple[Any, str]] = {"cluster.kind": ("slurm", "")}
    if with_gpus:
        notes = dict.fromkeys(preemptible, ", jobs may be preempted")
        notes |= {name: f", refuses your jobs: {words}" for name, words in refusing.items()}
        best, *others = (f"{name} ({gpus[name]} GPUs{notes.get(name, '')})" for name in with_gpus + without)
        chosen["cluster.partition"] = (with_gpus[0], f"{best}; others: {', '.join(others) or 'none'}")
        # if every partition refuses, the cause is not the partition
        every = refusing.keys() >= set(gpus)
        if taken := [name for name in without if every or name not in refusing]:
            chosen["cluster.cpu_partition"] = (taken[0], "")
        most = max_seconds.get(with_gpus[0])
        if most is not None and most < TrialConfig().time_limit_seconds:
            chosen["trial.time_limit"] = (slurm_time(most), f"MaxTime of partition {with_gpus[0]}")
    return summary or f"{len(nodes)} nodes without GPUs", chosen
