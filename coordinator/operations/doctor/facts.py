"""The facts that `evalspan doctor` has read about a site, and the findings that it prints.

Rule: plain values. A fact that could not be read has a companion named `…_error` that says why. `collect` fills them in, and
`findings` judges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from coordinator.operations.doctor.node_jobs import NodeJob
from coordinator.site.cluster import Job, NodeState, Purpose
from coordinator.site.cluster.sbatch_text import SlurmOptions
from coordinator.site.cluster.slurm_accounts import Accounting
from coordinator.site.cluster.slurm_parse import Reservation
from coordinator.site.cluster.slurm_rules import SiteRules
from coordinator.site.config.schema import Config
from evaljobs.contract.specs import Record

Status = Literal["ok", "warn", "fail"]


class Finding(Record):
    """One line of the table. `todo`: what to do; empty for nothing. `settings`: what `init` writes for it."""

    what: str
    status: Status
    found: str
    todo: str = ""
    settings: tuple[tuple[str, int], ...] = Field((), exclude=True)


class Checkup(Record):
    """All findings, and the raw answers of nodes."""

    schema_version: int = 1
    cluster: str
    findings: tuple[Finding, ...]
    nodes: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(f.status == "fail" for f in self.findings)


@dataclass(slots=True, kw_only=True)
class Facts:
    """Facts that `collect` has read and measured. One named `…_error` says why the related facts are missing."""

    config: Config
    python: str  # version of evalspan's own interpreter
    # package -> version, in the trials' interpreter
    versions: Mapping[str, str | None] = field(default_factory=dict)
    engine_trouble: str = ""  # why the trials' interpreter cannot import its engine
    interpreter_error: str = ""
    work_fs: str
    work_free: int  # bytes
    locks_error: str = ""  # why files of the work folder cannot be locked; nothing after it was read
    cluster_error: str = ""
    gpus: Sequence[str] = ()  # this machine's, if jobs run here
    api: str = ""  # pyslurm's version, and what still uses Slurm's commands
    rules: SiteRules | None = None
    rules_error: str = ""
    accounting: Accounting | None = None  # the user's accounts and QOS; None: the site has no accounting
    accounting_error: str = ""
    options: SlurmOptions = field(default_factory=SlurmOptions)
    jobs: Mapping[Purpose, Job] = field(default_factory=dict)  # a sample of each kind that evaluations submit
    reservations: Sequence[Reservation] = ()
    user: str = ""
    gpu_nodes: Sequence[NodeState] = ()  # as Slurm lists them
    cpu_nodes: Sequence[NodeState] = ()  # the CPU partition's
    job_kinds: Mapping[Purpose, tuple[Status, str, bool]] = field(
        default_factory=dict
    )  # kind -> …, found, on GPUs
    host_reason: str = ""  # why one job per node must host its trials; "" if none must
    redis: str = ""  # where it answers, and who runs it
    redis_warnings: Sequence[str] = ()
    redis_error: str = ""
    answers: Sequence[NodeJob] = ()
    left_out: int = 0  # nodes that were not probed

    @property
    def slurm(self) -> bool:
        return self.config.cluster.kind == "slurm"

    @property
    def lanes(self) -> int:
        return max((n.gpus for n in self.gpu_nodes), default=0) // max(1, self.config.trial.gpus_per_trial)

    @property
    def hosting(self) -> bool:
        """Whether one job per node hosts its trials (rung 2)."""
        setting = self.config.stage.host_trials
        return setting is True or bool(self.host_reason and setting == "auto")


def make_finding(
    what: str, found: str, *, warn: str = "", fail: str = "", settings: Mapping[str, int] | None = None
) -> Finding:
    """Return a line of the table. `fail`, `warn`: what to do, which sets the status; neither: all is well.

    `settings`: those that a warning names ("borrow.max_nodes" -> value); `warn` is then appended.
    """
    todo, named = fail or warn, (settings or {}).items()
    if named and warn:
        todo = f"set {' and '.join('[{}] {} = {}'.format(*key.split('.'), n) for key, n in named)}{warn}"
    status: Status = "fail" if fail else "warn" if warn else "ok"
    return Finding(what=what, status=status, found=found, todo=todo, settings=(*named,))


def format_gigabytes(count: float | None) -> str:
    return "?" if count is None else f"{count / 1e9:.1f} GB"
