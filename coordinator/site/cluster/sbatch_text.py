"""The batch script and the arguments of `sbatch` for a job. Pure. Called by both Slurm clusters.

Rule: script and arguments contain everything a job needs. `exec` replaces the shell by the job's program, so that Slurm's
SIGTERM reaches it. bash reads back exactly the given argv and environment.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.site.cluster import Job, NodesJob, Purpose, RefusedError, nodes_of
from coordinator.site.cluster.job_environment import INDEX_VARIABLE
from coordinator.site.config.checks import GPU_REQUEST
from coordinator.site.config.schema import Config, RoleConfig

TERM_BEFORE_END_SECONDS = 60  # seconds before its time limit at which a job gets SIGTERM
ROLES: Mapping[Purpose, str] = {
    "build": "build",
    "convert": "build",
    "stage": "precursor",
    "host": "trial",
    "trial": "trial",
    "probe": "trial",
    "metric": "metric",
}
"""Purpose of a job -> the table [slurm.ROLE] of the settings that applies to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """How this user's jobs are submitted on this site: the settings, and additions to them."""

    settings: Config = field(default_factory=Config)
    secrets: tuple[str, ...] = ()  # variables with secrets, whatever their names
    log_mode: int = 0o600  # of jobs' logs, which slurmstepd creates by the umask of `sbatch`
    chdir: str | None = None  # jobs' working directory; None: the coordinator's, if it exists
    token: str = "evalspan"  # noqa: S105 (no secret)  # begins --comment of every job: whose they are
    # Prefix of every Slurm command: a program that runs its arguments with its own stdin and stdout.
    command_prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # for the Slurm commands, e.g. SLURM_CONF
    timeout_seconds: float = (
        90.0  # per Slurm command; sites with thousands of jobs set MessageTimeout to 60 s
    )

    def role(self, purpose: Purpose) -> RoleConfig:
        role: RoleConfig = getattr(self.settings.slurm, ROLES[purpose])
        return role

    @property
    def trial_partition(self) -> str | None:
        """The partitions whose nodes are offered to evaluations; None: the site's default."""
        return self.role("trial").partition or self.settings.cluster.partition

    @property
    def metric_partition(self) -> str | None:
        """The partitions of metric workers; None: those of all jobs."""
        return self.role("metric").partition or self.settings.cluster.cpu_partition

    @property
    def build_partition(self) -> str | None:
        """The partitions of builds and conversions; None: those of all jobs."""
        return self.role("build").partition or self.settings.cluster.cpu_partition

    def partition_of(self, job: Job) -> str | None:
        """Return the partitions for a job: its role's; CPU jobs not bound to a node go to the CPU partition."""
        if job.best_effort:
            return self.settings.borrow.best_effort
        own = self.role(job.purpose).partition
        if own is None and job.gpus == 0 and not nodes_of(job):
            own = self.settings.cluster.cpu_partition
        # a precursor runs beside its node's trials
        return own or (self.trial_partition if job.purpose == "stage" else self.settings.cluster.partition)

    def account_of(self, job: Job) -> str | None:
        return self.role(job.purpose).account or self.settings.cluster.account

    def qos_of(self, job: Job) -> str | None:
        own = self.role(job.purpose).qos or self.settings.cluster.qos
        return self.settings.borrow.best_effort_qos or own if job.best_effort else own


def comment_of(job: Job, token: str) -> str:
    """Return a job's `--comment`: the work folder's token, then the job's purpose."""
    return f"{token}/{job.comment}" if job.comment else token


def is_ours(comment: str, token: str) -> bool:
    return comment == token or comment.startswith(f"{token}/")


def quote_word(word: str) -> str:
    """Quote a word for bash in printable ASCII, since sbatch refuses DOS line breaks and locales differ.

    Non-UTF-8 bytes (Python's surrogate escapes) are kept. Raise ValueError for a NUL.
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


def batch_script(job: Job, log_mode: int = 0o600) -> str:
    """Return the script of a job: the mode of its log, its environment, then `exec` of its program."""
    lines = ["#!/bin/bash", "set -eu"]
    own = "/proc/self/fd/1"
    lines.append(f"if [ -f {own} ]; then chmod {log_mode:04o} {own} || :; fi")
    lines += [f"export {name}={quote_word(value)}" for name, value in sorted(job.env.items())]
    lines.append(f'export {INDEX_VARIABLE}="${{SLURM_ARRAY_TASK_ID:-0}}"')
    lines.append("unset SLURM_JWT")  # sbatch needs this key, jobs do not
    # a process that dies must not end the others, which report what they saw
    each = ["srun", "--kill-on-bad-exit=0", f"--cpus-per-task={job.cpus}"]
    start = each if isinstance(job, NodesJob) else []
    lines.append(f"exec {' '.join(quote_word(word) for word in (*start, *job.argv))}")
    return "\n".join(lines) + "\n"


def sbatch_arguments(job: Job, options: SlurmOptions) -> list[str]:
    """Return the arguments of `sbatch` for this job; the script is passed on standard input.

    Raise RefusedError for a log path that Slurm's file-name pattern cannot express.
    """
    arguments = [
        "--parsable",
        f"--job-name={job.name}",
        f"--comment={comment_of(job, options.token)}",
        f"--output={log_pattern(job)}",
        "--open-mode=append",
        "--no-requeue",
        f"--nodes={len(nodes_of(job)) or 1}",
        f"--ntasks-per-node={job.tasks}" if isinstance(job, NodesJob) else "--ntasks=1",
        f"--cpus-per-task={job.cpus}",
        f"--mem={job.memory_mb}M",
        f"--time={max(1, math.ceil(job.time_limit_seconds / 60))}",  # whole minutes
        "--export=ALL",  # of the environment that sbatch gets: `job_environment.submission_environment`
    ]
    # `--signal` may come up to a minute early: a short job would get SIGTERM before it began.
    if job.time_limit_seconds > 2 * TERM_BEFORE_END_SECONDS:
        arguments.append(f"--signal=B:TERM@{TERM_BEFORE_END_SECONDS}")
    if job.count > 1:
        arguments.append(f"--array=0-{job.count - 1}")
    if named := nodes_of(job):
        arguments.append(f"--nodelist={','.join(named)}")
    elif job.exclude:
        arguments.append(f"--exclude={','.join(job.exclude)}")
    arguments += gpu_arguments(job, options.settings.slurm.gpu_request)
    for flag, value in (
        ("partition", options.partition_of(job)),
        ("account", options.account_of(job)),
        ("qos", options.qos_of(job)),
        ("nice", options.settings.cluster.nice),
        ("reservation", options.settings.cluster.reservation),
        ("chdir", options.chdir),
    ):
        if value is not None:
            arguments.append(f"--{flag}={value}")
    return [*arguments, *options.settings.cluster.extra_args, *options.role(job.purpose).extra_args]


def gpu_arguments(job: Job, template: str) -> list[str]:
    """Return the arguments that request a job's GPUs. Raise RefusedError if they name a type and the node's Gres has none."""
    if not job.gpus:
        return []
    if "{type}" in template and not job.gpu_type:
        raise RefusedError(
            f"[slurm] gpu_request = {template!r} names a GPU type, and Gres of {job.node or 'the nodes'} has none: "
            f'try "{GPU_REQUEST}"',
            of_node=True,
        )
    filled = (w.replace("{n}", str(job.gpus)).replace("{type}", job.gpu_type) for w in shlex.split(template))
    return list(filled)


def log_pattern(job: Job) -> str:
    """Return Slurm's file-name pattern of the job's log: escapes "%" in a path; "%i" becomes the member.

    Outside of an array Slurm's "%a" is 4294967294, so the index is written out.
    """
    if "\\" in job.log or "\n" in job.log:
        raise RefusedError(
            f"{job.log!r}: Slurm writes no log to a path with a backslash or a line break; rename the folder"
        )
    folder, slash, name = job.log.rpartition("/")
    pattern = ("%a" if job.count > 1 else "0").join(part.replace("%", "%%") for part in name.split("%i"))
    return folder.replace("%", "%%") + slash + pattern


def log_file(job: Job, index: int) -> str:
    """Return the path of a member's log. Only replaces "%i" in the file's name: folders may contain it."""
    folder, slash, name = job.log.rpartition("/")
    return folder + slash + name.replace("%i", str(index))
