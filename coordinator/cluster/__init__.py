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
    """A job to submit. `name` is deterministic and unique per attempt; by it a lost job is found again.

    A job with `count > 1` is one array: member i runs the same argv with EVALSPAN_INDEX=i.
    """

    name: str  # unique for each attempt
    argv: tuple[str, ...]  # what it runs
    log: str  # path; "%i" stands for the member's index
    count: int = 1  # members; more than 1: an array
    node: str | None = None  # the only node it may run on
    exclude: tuple[str, ...] = ()  # nodes that a job without `node` may not run on
    gpus: int = 0  # per member
    cpus: int = 1  # per member
    memory_mb: int = 1024  # per member
    time_limit_seconds: int = 3600  # of each member
    comment: str = ""  # for Slurm's --comment
    env: Mapping[str, str] = field(default_factory=dict)  # variables that it gets
    secrets: tuple[str, ...] = ()  # names of the coordinator's secret variables that this job gets
    best_effort: bool = False  # to partitions that may preempt it at any time
    purpose: Purpose = "trial"  # what kind of job
    gpu_type: str = ""  # of its GPUs, in Slurm's word; known when it is submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesJob(Job):
    """A job on several nodes of Slurm: srun starts argv `tasks` times on each. No evaluation has one, so no journal."""

    nodes: tuple[str, ...]
    tasks: int = 1


def nodes_of(job: Job) -> tuple[str, ...]:
    """The nodes that a job names; none: it may run on any."""
    if isinstance(job, NodesJob):
        return job.nodes
    return () if job.node is None else (job.node,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What the cluster lists of one member of a submitted job. An unlisted state is "unknown"."""

    job_id: str  # as `cancel` takes it; of the array where the job is one
    name: str
    index: int  # 0 where the job is no array
    phase: JobPhase
    state: str  # in the cluster's own words
    node: str | None = None
    reason: str = ""
    submitted_at: float | None = None  # unix seconds
    started_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What the cluster lists of one node that this user may use."""

    name: str
    usable: bool  # up, neither drained nor reserved to others
    state: str
    gpus: int
    gpus_free: int
    cpus: int
    cpus_free: int
    memory_mb: int
    memory_free_mb: int
    gpu_type: str = ""  # as the cluster names it; "": it names none
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    best_effort: bool = False  # open only to jobs that may be preempted
    counts_memory: bool = True  # the cluster refuses a job whose memory does not fit
    reason: str = ""  # an admin's words why it is down or drained; or the setting that excludes it
    excluded: str = ""  # the setting that excludes it


class ClusterError(Exception):
    """A call to the cluster failed. It may have had effect: a job is looked up by its name before it is submitted again."""

    stderr: str | None = None  # of the command that failed; None: it printed none


class RefusedError(ClusterError):
    """The cluster refused for good, in its own words: partition, account, QOS. The operator must act.

    `of_node`: the reason may be the node that the job names alone (its memory, its GPUs, its
    absence).
    """

    def __init__(self, message: str, *, of_node: bool = False) -> None:
        super().__init__(message)
        self.of_node = of_node


class LimitError(ClusterError):
    """A limit on this user's jobs is reached: the job was not submitted; a later attempt may succeed."""


class Cluster(Protocol):
    """Five methods. All raise ClusterError; a failed listing says nothing, so no job counts as gone."""

    def submit(self, job: Job) -> str:
        """Submit `job`; its id. RefusedError: for good. LimitError: a later try may succeed."""
        ...

    def jobs(self) -> list[JobState]:
        """All jobs of this work folder's evaluations that the cluster still lists, in one query."""
        ...

    def nodes(self) -> list[NodeState]:
        """All nodes that this user may use, in one query."""
        ...

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End these jobs (or members, "id_index"); ignores ids that are gone."""
        ...

    def check(self, job: Job) -> None:
        """Check, without submitting, that the job would be accepted; else RefusedError."""
        ...
