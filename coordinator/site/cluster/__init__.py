"""The interface to a cluster: one Protocol, implemented by Slurm's commands, pyslurm and local processes.

Rule: only this room calls a cluster. All implementations pass one contract suite
(tests/cluster/test_contract.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

JobPhase = Literal["pending", "running", "ended", "unknown"]
Purpose = Literal["build", "convert", "stage", "trial", "metric", "host", "probe"]
CPU_SLOT = "cpu-slot"  # the `gpu_type` of a local cluster without GPUs
COORDINATOR_ENDED = "COORDINATOR_ENDED"
"""State of a local job that ended with its coordinator: neither the job nor the node is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job to submit. `name` is deterministic and unique per attempt, so that a lost job can be looked up.

    A job with `count > 1` is one array: member i runs the same argv with EVALSPAN_INDEX=i.
    """

    name: str  # unique per attempt
    argv: tuple[str, ...]
    log: str  # path; "%i" is replaced by the member's index
    count: int = 1  # members; more than 1: an array
    node: str | None = None  # only this node
    exclude: tuple[str, ...] = ()  # nodes to avoid, for jobs without `node`
    gpus: int = 0  # per member
    cpus: int = 1  # per member
    memory_mb: int = 1024  # per member
    time_limit_seconds: int = 3600  # of each member
    comment: str = ""  # for Slurm's --comment
    env: Mapping[str, str] = field(default_factory=dict)  # additional variables
    secrets: tuple[str, ...] = ()  # names of the coordinator's secret variables passed to this job
    best_effort: bool = False  # use partitions that may preempt it at any time
    purpose: Purpose = "trial"
    gpu_type: str = ""  # Slurm's name of its GPUs; known at submission


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesJob(Job):
    """A job on several nodes of Slurm: srun starts argv `tasks` times on each. Never part of an evaluation or a journal."""

    nodes: tuple[str, ...]
    tasks: int = 1


def nodes_of(job: Job) -> tuple[str, ...]:
    """Return the nodes that a job names; empty if it may run on any."""
    if isinstance(job, NodesJob):
        return job.nodes
    return () if job.node is None else (job.node,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One member of a submitted job as listed by the cluster. An unlisted state is "unknown"."""

    job_id: str  # as accepted by `cancel`; for arrays, that of the array
    name: str
    index: int  # 0 outside of arrays
    phase: JobPhase
    state: str  # as the cluster reports it
    node: str | None = None
    reason: str = ""
    submitted_at: float | None = None  # unix seconds
    started_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node that this user may use, as listed by the cluster."""

    name: str
    usable: bool  # up, neither drained nor reserved for others
    state: str
    gpus: int
    gpus_free: int
    cpus: int
    cpus_free: int
    memory_mb: int
    memory_free_mb: int
    gpu_type: str = ""  # as the cluster names it; "": unknown
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    best_effort: bool = False  # only open to jobs that may be preempted
    counts_memory: bool = True  # the cluster refuses jobs whose memory does not fit
    reason: str = ""  # an admin's reason why it is down or drained; or the setting that excludes it
    excluded: str = ""  # the setting that excludes it


class ClusterError(Exception):
    """A failed call to the cluster. It may have taken effect: a job is looked up by name before it is submitted again."""

    stderr: str | None = None  # of the failed command; None: unknown


class RefusedError(ClusterError):
    """A permanent refusal in the cluster's words: partition, account, QOS. The operator must act.

    `of_node`: the cause may be the node that the job names (its memory, its GPUs, its absence).
    """

    def __init__(self, message: str, *, of_node: bool = False) -> None:
        super().__init__(message)
        self.of_node = of_node


class LimitError(ClusterError):
    """A limit on this user's jobs was reached: the job was not submitted; a later attempt may succeed."""


class Cluster(Protocol):
    """Interface to a cluster. All methods raise ClusterError; a failed listing means nothing, so no job counts as gone."""

    def submit(self, job: Job) -> str:
        """Submit `job` and return its id. Raise RefusedError if retrying is useless, LimitError if it may succeed later."""
        ...

    def jobs(self) -> list[JobState]:
        """List all of this work folder's jobs that the cluster knows, in one query."""
        ...

    def nodes(self) -> list[NodeState]:
        """List all nodes that this user may use, in one query."""
        ...

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel these jobs (or members, "id_index"); ignore ids that are gone."""
        ...

    def check(self, job: Job) -> None:
        """Check without submitting that the job would be accepted. Raise RefusedError otherwise."""
        ...
