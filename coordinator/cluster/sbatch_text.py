"""Text that Slurm is given: the batch script and the arguments of `sbatch`. Pure.

Rule: everything a job needs is in its script and its arguments. `exec` makes our process the job, so that Slurm's
SIGTERM reaches it. The script is what bash reads back as exactly the argv and environment that were given.
It does not know: whether any of it is accepted.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.cluster import Job, RefusedError

INDEX = "EVALSPAN_INDEX"
TERM_BEFORE_END_SECONDS = 60  # how long before its time limit a job is told to hand back what it holds
# What a coordinator that itself runs in a Slurm job, or a user with own listing habits, would hand on to our commands.
FOREIGN_PREFIXES = ("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_")
FOREIGN_NAMES = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", INDEX})
KEPT_NAMES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """How this user's jobs are submitted on this site."""

    partition: str | None = None  # None: the site's default
    cpu_partition: str | None = None  # of jobs without GPUs; None: `partition`
    account: str | None = None
    qos: str | None = None
    best_effort: str | None = None  # partitions of jobs that may be preempted
    best_effort_qos: str | None = None  # of those jobs; None: `qos`
    nice: int | None = None
    reservation: str | None = None
    gpu_request: str = "--gres=gpu:{gpus}"  # some sites want --gpus-per-node={gpus}
    extra_args: tuple[str, ...] = ()  # last, so they win over ours
    chdir: str | None = (
        None  # where jobs start; None: where the coordinator stands, if the node has that folder
    )
    token: str = "evalspan"  # noqa: S105 (no secret)  # begins --comment of every job: whose they are
    # Before every Slurm command: a program that runs the rest of its arguments, with our standard input and output.
    command_prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # of the Slurm commands, e.g. SLURM_CONF
    timeout_seconds: float = 30.0  # of each Slurm command; a frozen slurmctld holds them for 10 s and more

    def partition_of(self, job: Job) -> str | None:
        """A node's own jobs go where the node is; free CPU work goes to the CPU partition."""
        if job.best_effort:
            return self.best_effort
        if job.gpus == 0 and job.node is None and self.cpu_partition is not None:
            return self.cpu_partition
        return self.partition

    def qos_of(self, job: Job) -> str | None:
        return self.best_effort_qos or self.qos if job.best_effort else self.qos


def within_limits(job: Job, options: SlurmOptions, limits: Mapping[str | None, int]) -> Job:
    """The job with a time limit that every partition that it may go to allows. `limits`: MaxTime of those that have one."""
    names = options.partition_of(job)
    most = [limits[n] for n in (names.split(",") if names else (None,)) if n in limits]
    return replace(job, time_limit_seconds=min([job.time_limit_seconds, *most]))


def comment_of(job: Job, token: str) -> str:
    """What `--comment` of a job says: whose it is, then what for."""
    return f"{token}/{job.comment}" if job.comment else token


def is_ours(comment: str, token: str) -> bool:
    return comment == token or comment.startswith(f"{token}/")


def quote(word: str) -> str:
    """A word for bash, in printable ASCII: sbatch refuses DOS line breaks in a script, and a node's locale may differ.

    A word from the file system may hold bytes that are no UTF-8 (as Python's surrogate escapes); they stay as they are.
    ValueError for a NUL, which no argument can hold.
    """
    if "\0" in word:
        raise ValueError(f"an argument cannot hold a NUL: {word!r}")
    if word.isascii() and word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(_byte(b) for b in word.encode("utf-8", "surrogateescape")) + "'"


def _byte(value: int) -> str:
    char = chr(value)
    if char in "\\'":
        return f"\\{char}"
    return char if value < 0x80 and char.isprintable() else f"\\x{value:02x}"


def batch_script(job: Job) -> str:
    """The script of a job: its environment, then our process in the shell's place."""
    lines = ["#!/bin/bash", "set -eu"]
    lines += [f"export {name}={quote(value)}" for name, value in sorted(job.env.items())]
    lines.append(f'export {INDEX}="${{SLURM_ARRAY_TASK_ID:-0}}"')
    lines.append(f"exec {' '.join(quote(word) for word in job.argv)}")
    return "\n".join(lines) + "\n"


def minutes_of(job: Job) -> int:
    """Slurm's time limits are whole minutes."""
    return max(1, math.ceil(job.time_limit_seconds / 60))


def sbatch_arguments(job: Job, options: SlurmOptions) -> list[str]:
    """The arguments of `sbatch` for this job; the script itself comes on standard input.

    RefusedError for a log path that Slurm's file-name pattern cannot say.
    """
    arguments = [
        "--parsable",
        f"--job-name={job.name}",
        f"--comment={comment_of(job, options.token)}",
        f"--output={log_pattern(job)}",
        "--open-mode=append",
        "--no-requeue",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={job.cpus}",
        f"--mem={job.memory_mb}M",
        f"--time={minutes_of(job)}",
        "--export=ALL",
    ]
    # `--signal` may come up to a minute early: a short job would be told to end before it began.
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
        ("qos", options.qos_of(job)),
        ("nice", options.nice),
        ("reservation", options.reservation),
        ("chdir", options.chdir),
    ):
        if value is not None:
            arguments.append(f"--{flag}={value}")
    return [*arguments, *options.extra_args]


def log_pattern(job: Job) -> str:
    """Slurm's own file-name pattern of the job's log: "%" of a path is escaped, "%i" is the member.

    Outside of an array Slurm's "%a" is 4294967294, so there the index is written out.
    """
    if "\\" in job.log or "\n" in job.log:
        raise RefusedError(
            f"{job.log!r}: Slurm writes no log to a path with a backslash or a line break; rename the folder"
        )
    folder, slash, name = job.log.rpartition("/")
    pattern = ("%a" if job.count > 1 else "0").join(part.replace("%", "%%") for part in name.split("%i"))
    return folder.replace("%", "%%") + slash + pattern


def log_file(job: Job, index: int) -> str:
    """The path of a member's log. "%i" counts in the file's name alone: a work folder may be called anything."""
    folder, slash, name = job.log.rpartition("/")
    return folder + slash + name.replace("%i", str(index))


def client_environment(inherited: Mapping[str, str], options: SlurmOptions) -> dict[str, str]:
    """The environment of a Slurm command, and through `--export=ALL` of the job: ours without what belongs to others."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name in KEPT_NAMES or not (name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES)
    }
    return {**kept, "LC_ALL": "C.UTF-8", **options.env, "SLURM_TIME_FORMAT": "%s"}
