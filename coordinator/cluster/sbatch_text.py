"""The batch script and the arguments of `sbatch` for a job. Pure. Called by both Slurm clusters.

Rule: script and arguments hold everything a job needs. `exec` puts the job's program in the shell's
place, so that Slurm's SIGTERM reaches it. bash reads back exactly the given argv and environment.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from coordinator.cluster import Job, Purpose, RefusedError
from coordinator.cluster.node_choice import NodeChoice

INDEX = "EVALSPAN_INDEX"
TERM_BEFORE_END_SECONDS = 60  # seconds before its time limit at which a job gets SIGTERM
# Variables of an enclosing Slurm job, or of the user's listings, that must not reach Slurm commands.
FOREIGN_PREFIXES = ("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_")
FOREIGN_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "GPU_DEVICE_ORDINAL",
        INDEX,
    }
)
KEPT_NAMES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
# Names of variables that hold secrets: HF_TOKEN, AWS_SECRET_ACCESS_KEY, WANDB_API_KEY, MYSQL_PWD.
SECRET = re.compile(
    r"(^|_)(SECRET|PASSWORD|PASSWD|APIKEY|JWT)(_|$)|(^|_)(KEY|TOKEN|PASS)$|_PWD$", re.IGNORECASE
)


GPU_REQUEST = "--gres=gpu:{n}"  # arguments that ask for a job's GPUs, unless the settings have others
ROLES: Mapping[Purpose, str] = {
    "build": "build",
    "convert": "build",
    "stage": "precursor",
    "host": "trial",
    "trial": "trial",
    "probe": "trial",
    "metric": "metric",
}
"""Purpose of a job -> the table [slurm.ROLE] of the settings that it follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What jobs of one role ask for in place of what SlurmOptions says of all; None: the same."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    extra_args: tuple[str, ...] = ()  # behind those of all jobs, so they override them


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """How this user's jobs are submitted on this site."""

    partition: str | None = None  # None: the site's default
    cpu_partition: str | None = None  # for jobs without GPUs; None: `partition`
    account: str | None = None
    qos: str | None = None
    best_effort: str | None = None  # partitions for jobs that may be preempted
    best_effort_qos: str | None = None  # for those jobs; None: `qos`
    nice: int | None = None
    reservation: str | None = None
    wake: bool = False  # nodes that are powered down may be used
    extra_args: tuple[str, ...] = ()  # last, so they override the arguments above
    roles: Mapping[str, Role] = field(default_factory=dict)  # by the names in ROLES
    gpu_request: str = GPU_REQUEST
    nodes: NodeChoice = field(default_factory=NodeChoice)
    secrets: tuple[str, ...] = ()  # variables that hold secrets, whatever their names
    log_mode: int = 0o600  # of jobs' logs: slurmstepd makes them by the umask with which `sbatch` was called
    chdir: str | None = None  # jobs' working directory; None: the coordinator's, if it exists
    token: str = "evalspan"  # noqa: S105 (no secret)  # begins --comment of every job: whose they are
    # Before every Slurm command: a program that runs its arguments, on its own stdin and stdout.
    command_prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # for the Slurm commands, e.g. SLURM_CONF
    timeout_seconds: float = (
        90.0  # per Slurm command; sites with thousands of jobs set MessageTimeout to 60 s
    )

    def role(self, purpose: Purpose) -> Role:
        return self.roles.get(ROLES[purpose], Role())

    @property
    def trial_partition(self) -> str | None:
        """The partitions whose nodes are offered to evaluations; None: the site's default."""
        return self.role("trial").partition or self.partition

    @property
    def metric_partition(self) -> str | None:
        """The partitions of metric workers; None: `partition`."""
        return self.role("metric").partition or self.cpu_partition

    @property
    def build_partition(self) -> str | None:
        """The partitions of builds and conversions; None: `partition`."""
        return self.role("build").partition or self.cpu_partition

    def partition_of(self, job: Job) -> str | None:
        """The partitions for a job: its role's; CPU jobs not bound to a node go to the CPU partition."""
        if job.best_effort:
            return self.best_effort
        own = self.role(job.purpose).partition
        if own is None and job.gpus == 0 and job.node is None:
            own = self.cpu_partition
        # a precursor stands beside its node's trials
        return own or (self.trial_partition if job.purpose == "stage" else self.partition)

    def account_of(self, job: Job) -> str | None:
        return self.role(job.purpose).account or self.account

    def qos_of(self, job: Job) -> str | None:
        own = self.role(job.purpose).qos or self.qos
        return self.best_effort_qos or own if job.best_effort else own

    def extra_args_of(self, job: Job) -> tuple[str, ...]:
        return (*self.extra_args, *self.role(job.purpose).extra_args)


def within_limits(
    job: Job,
    options: SlurmOptions,
    limits: Mapping[str | None, int],
    walls: Mapping[tuple[str, str], int] | None = None,
    partition_qos: Mapping[str | None, str] | None = None,
) -> Job:
    """Cut the job's time limit to MaxTime and MaxWall.

    `limits`: MaxTime in seconds by partition; None: the default one. `walls`: as of
    `slurm_accounts.parse_walls` and `default_walls`. `partition_qos`: as of
    `slurm_rules.partition_qos`.
    """
    names = options.partition_of(job)
    partitions = names.split(",") if names else (None,)
    most = [limits[n] for n in partitions if n in limits]
    account, qos = options.account_of(job) or "", options.qos_of(job)
    own = ("default qos", account) if qos is None else ("qos", qos)
    theirs = [own, ("account", account), *(("qos", (partition_qos or {}).get(n, "")) for n in partitions)]
    most += [walls[key] for key in theirs if walls and key in walls]
    return replace(job, time_limit_seconds=min([job.time_limit_seconds, *most]))


def comment_of(job: Job, token: str) -> str:
    """A job's `--comment`: the work folder's token, then the job's purpose."""
    return f"{token}/{job.comment}" if job.comment else token


def is_ours(comment: str, token: str) -> bool:
    return comment == token or comment.startswith(f"{token}/")


def quote(word: str) -> str:
    """Quote a word for bash in printable ASCII: sbatch refuses DOS line breaks, and locales differ.

    Bytes that are no UTF-8 (Python's surrogate escapes) stay as they are. ValueError for a NUL.
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
    """The script of a job: the mode of its log, its environment, then `exec` of its program."""
    lines = ["#!/bin/bash", "set -eu"]
    own = "/proc/self/fd/1"
    lines.append(f"if [ -f {own} ]; then chmod {log_mode:04o} {own} || :; fi")
    lines += [f"export {name}={quote(value)}" for name, value in sorted(job.env.items())]
    lines.append(f'export {INDEX}="${{SLURM_ARRAY_TASK_ID:-0}}"')
    lines.append("unset SLURM_JWT")  # sbatch needs this key, no job does
    lines.append(f"exec {' '.join(quote(word) for word in job.argv)}")
    return "\n".join(lines) + "\n"


def minutes_of(job: Job) -> int:
    """The job's time limit in whole minutes, as Slurm takes it."""
    return max(1, math.ceil(job.time_limit_seconds / 60))


def sbatch_arguments(job: Job, options: SlurmOptions) -> list[str]:
    """The arguments of `sbatch` for this job; the script itself comes on standard input.

    RefusedError for a log path that Slurm's file-name pattern cannot express.
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
    # `--signal` may come up to a minute early: a short job would get SIGTERM before it began.
    if job.time_limit_seconds > 2 * TERM_BEFORE_END_SECONDS:
        arguments.append(f"--signal=B:TERM@{TERM_BEFORE_END_SECONDS}")
    if job.count > 1:
        arguments.append(f"--array=0-{job.count - 1}")
    if job.node is not None:
        arguments.append(f"--nodelist={job.node}")
    elif job.exclude:
        arguments.append(f"--exclude={','.join(job.exclude)}")
    arguments += gpu_arguments(job, options.gpu_request)
    for flag, value in (
        ("partition", options.partition_of(job)),
        ("account", options.account_of(job)),
        ("qos", options.qos_of(job)),
        ("nice", options.nice),
        ("reservation", options.reservation),
        ("chdir", options.chdir),
    ):
        if value is not None:
            arguments.append(f"--{flag}={value}")
    return [*arguments, *options.extra_args_of(job)]


def check_gpu_request(template: str) -> str:
    """Return `template`; ValueError where it makes no arguments that ask for {n} GPUs, perhaps of a {type}."""
    try:
        words = shlex.split(template)
    except ValueError:  # an open quotation mark
        words = []
    other = re.search(r"[{}]", template.replace("{n}", "").replace("{type}", ""))
    if not words or not words[0].startswith("-") or "{n}" not in template or other:
        raise ValueError(
            'arguments of sbatch with {n} and at most {type}, such as "--gres=gpu:{type}:{n}" or "--gpus-per-node={n}"'
        )
    return template


def gpu_arguments(job: Job, template: str) -> list[str]:
    """The arguments that ask for a job's GPUs. RefusedError where they name a type and the node's Gres has none."""
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
    """Slurm's file-name pattern of the job's log: escapes "%" of a path; "%i" becomes the member.

    Outside of an array Slurm's "%a" is 4294967294, so the index is written out there.
    """
    if "\\" in job.log or "\n" in job.log:
        raise RefusedError(
            f"{job.log!r}: Slurm writes no log to a path with a backslash or a line break; rename the folder"
        )
    folder, slash, name = job.log.rpartition("/")
    pattern = ("%a" if job.count > 1 else "0").join(part.replace("%", "%%") for part in name.split("%i"))
    return folder.replace("%", "%%") + slash + pattern


def log_file(job: Job, index: int) -> str:
    """The path of a member's log. Replaces "%i" in the file's name only: folders may contain it."""
    folder, slash, name = job.log.rpartition("/")
    return folder + slash + name.replace("%i", str(index))


def client_environment(inherited: Mapping[str, str], options: SlurmOptions) -> dict[str, str]:
    """Environment of a Slurm command: without FOREIGN names."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name in KEPT_NAMES or not (name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES)
    }
    return {**kept, "LC_ALL": "C.UTF-8", **options.env, "SLURM_TIME_FORMAT": "%s"}


def submission_environment(inherited: Mapping[str, str], options: SlurmOptions, job: Job) -> dict[str, str]:
    """Environment of `sbatch` and, by `--export=ALL`, of the job.

    `--export` with names would have each node load the user's login environment first.
    """
    here = client_environment(inherited, options)
    kept = {name: value for name, value in here.items() if name in KEPT_NAMES}
    return without_secrets(here, options.secrets, job.secrets) | kept


def without_secrets(
    environment: Mapping[str, str], secrets: Collection[str], given: Collection[str]
) -> dict[str, str]:
    """The variables that a job may see. `secrets`: names beside SECRET; `given`: secrets for this job."""
    return {
        name: value
        for name, value in environment.items()
        if name in given or not (name in secrets or SECRET.search(name))
    }
