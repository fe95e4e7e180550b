"""Text that Slurm is given: the batch script and the arguments of `sbatch`. Pure.

Rule: everything a job needs is in its script and its arguments; nothing is inherited from the submitting shell but
what Slurm itself carries. `exec` makes our process the job, so that Slurm's SIGTERM reaches it.
It does not know: whether any of it is accepted.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.cluster import Job

INDEX = "EVALSPAN_INDEX"
TERM_BEFORE_END_SECONDS = 60  # how long before its time limit a job is told to hand back what it holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """How this user's jobs are submitted on this site."""

    partition: str | None = None
    cpu_partition: str | None = None  # of jobs without GPUs; None: `partition`
    account: str | None = None
    qos: str | None = None
    nice: int | None = None
    reservation: str | None = None
    gpu_request: str = "--gres=gpu:{gpus}"  # some sites want --gpus-per-node={gpus}
    extra_args: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()  # shell lines of trial-side jobs: modules, exports
    container: str = (
        ""  # template around the command of trial-side jobs, e.g. "apptainer exec --nv img.sif {command}"
    )
    token: str = "evalspan"  # noqa: S105 (no secret)  # in --comment of every job: whose they are
    command_prefix: tuple[str, ...] = ()  # before every Slurm command, e.g. ("ssh", "login")
    env: Mapping[str, str] = field(default_factory=dict)  # of the Slurm commands, e.g. SLURM_CONF
    timeout_seconds: float = 30.0

    def partition_of(self, job: Job) -> str | None:
        """A node's own jobs go where the node is; free CPU work goes to the CPU partition."""
        if job.gpus == 0 and job.node is None and self.cpu_partition is not None:
            return self.cpu_partition
        return self.partition


def batch_script(job: Job) -> str:
    """The script of a job: its environment, then our process in the shell's place."""
    lines = ["#!/bin/bash", "set -eu"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(job.env.items())]
    lines.append(f'export {INDEX}="${{SLURM_ARRAY_TASK_ID:-0}}"')
    lines.append(f"exec {shlex.join(job.argv)}")
    return "\n".join(lines) + "\n"


def sbatch_arguments(job: Job, options: SlurmOptions) -> list[str]:
    """The arguments of `sbatch` for this job; the script itself comes on standard input."""
    minutes = max(1, math.ceil(job.time_limit_seconds / 60))
    arguments = [
        "--parsable",
        f"--job-name={job.name}",
        f"--comment={options.token}",
        f"--output={log_pattern(job)}",
        "--open-mode=append",
        "--no-requeue",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={job.cpus}",
        f"--mem={job.memory_mb}M",
        f"--time={minutes}",
        "--export=ALL",
    ]
    if job.time_limit_seconds > 2 * TERM_BEFORE_END_SECONDS:
        arguments.append(f"--signal=B:TERM@{TERM_BEFORE_END_SECONDS}")
    if job.count > 1:
        arguments.append(f"--array=0-{job.count - 1}")
    if job.node is not None:
        arguments.append(f"--nodelist={job.node}")
    if job.gpus > 0:
        arguments.append(options.gpu_request.format(gpus=job.gpus))
    for flag, value in (
        ("partition", options.partition_of(job)),
        ("account", options.account),
        ("qos", options.qos),
        ("nice", options.nice),
        ("reservation", options.reservation),
    ):
        if value is not None:
            arguments.append(f"--{flag}={value}")
    return [*arguments, *options.extra_args]


def log_pattern(job: Job) -> str:
    """Slurm's own file-name pattern of the job's log: "%" of a path is escaped, "%i" is the member."""
    return job.log.replace("%i", "\0").replace("%", "%%").replace("\0", "%a" if job.count > 1 else "0")
