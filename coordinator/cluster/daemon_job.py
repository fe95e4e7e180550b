"""The coordinator's own job: what it asks for, and the one line that submits it. Pure.

Rule: `init`, `status`, `watch` and the doctor take the job from here. Its sbatch script repeats the size for those who type
the line by hand. One daemon a folder: the job's name is the folder's, and Slurm runs one job of a name (singleton).
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from coordinator.cluster import Job
from coordinator.cluster.sbatch_text import SlurmOptions
from coordinator.config.schema import SlurmConfig

DAEMON_SECONDS = 86_400  # time limit where partition, account and QOS allow it
DAEMON = "evalspan-daemon"  # begins the job's name; the script is DAEMON.sbatch
MEMORY_MB = 1024


def own_options(options: SlurmOptions) -> SlurmOptions:
    """Options of the coordinator's own job: no role of jobs that it submits is its."""
    settings = options.settings.model_copy(update={"slurm": SlurmConfig()})
    return replace(options, settings=settings)


def daemon_job(options: SlurmOptions) -> Job:
    """The job on the CPU partition, before limits. Its name ends with the digest of the work folder."""
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
    """What a person types. `rest`: words behind the script, with a space before them. `named`: as the folder's daemon."""
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
    """Seconds as Slurm's days-hours:minutes:seconds."""
    minutes, rest = divmod(seconds, 60)
    days, minutes = divmod(minutes, 24 * 60)
    clock = f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
    return f"{days}-{clock}" if days else clock.removeprefix("0")
