"""The seam to whatever runs jobs: one Protocol, kept by Slurm's command line, by pyslurm and by local processes.

Rule: the coordinator knows jobs, nodes and names; how they are asked for is known only here. Every implementation and
the fake pass one contract suite (tests/cluster/test_contract.py).

It does not know: evaluations, checkpoints, Redis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

JobPhase = Literal["pending", "running", "ended", "unknown"]
Purpose = Literal["build", "convert", "stage", "trial", "metric", "host", "probe"]
COORDINATOR_ENDED = "COORDINATOR_ENDED"
"""The local cluster's word for a job that ended with the coordinator that had submitted it: no fault of job or node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job to submit. `name` is our token: unique per attempt, deterministic, and how a lost job is found again.

    A job with `count > 1` is one array: member i runs the same argv with EVALSPAN_INDEX=i in its environment.
    """

    name: str
    argv: tuple[str, ...]
    log: str  # path; "%i" stands for the member's index
    count: int = 1
    node: str | None = None  # run there and nowhere else
    gpus: int = 0  # of each member
    cpus: int = 1
    memory_mb: int = 1024
    time_limit_seconds: int = 3600
    comment: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    best_effort: bool = False  # where it may be preempted at any time
    purpose: Purpose = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What the cluster says of one member of a job of ours. A state that is not in our list is "unknown"."""

    job_id: str  # of the array where it is one: what `cancel` takes
    name: str
    index: int  # 0 where the job is no array
    phase: JobPhase
    state: str  # the cluster's own word
    node: str | None = None
    reason: str = ""
    submitted_at: float | None = None  # unix seconds
    started_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What the cluster says of one node that we may use."""

    name: str
    usable: bool  # up, neither drained nor reserved to others
    state: str
    gpus: int
    gpus_free: int
    cpus: int
    cpus_free: int
    memory_mb: int
    memory_free_mb: int
    gpu_type: str = ""
    partitions: tuple[str, ...] = ()
    best_effort: bool = False  # ours only for jobs that may be preempted
    counts_memory: bool = True  # the cluster keeps jobs apart from memory that they do not fit into


class ClusterError(Exception):
    """The cluster did not do it. `maybe_done`: it may have happened all the same (a timed-out submission)."""

    def __init__(self, message: str, *, maybe_done: bool = False) -> None:
        super().__init__(message)
        self.maybe_done = maybe_done


class RefusedError(ClusterError):
    """The cluster refused for good, in its own words: partition, account, QOS. The operator must act.

    `of_node`: the reason may be the node that the job names alone (its memory, its GPUs, its absence).
    """

    def __init__(self, message: str, *, of_node: bool = False) -> None:
        super().__init__(message)
        self.of_node = of_node


class LimitError(ClusterError):
    """A limit on this user's jobs is reached: the job was surely not submitted, and may be taken later."""


class Cluster(Protocol):
    """Five methods in domain words. All raise ClusterError; a failed listing is "no news", never "gone"."""

    def submit(self, job: Job) -> str:
        """Submit `job`; returns the cluster's job id. RefusedError where asking again is useless, LimitError where it
        helps later.
        """
        ...

    def jobs(self) -> list[JobState]:
        """All jobs of this work folder's evaluations that the cluster still knows, in one query."""
        ...

    def nodes(self) -> list[NodeState]:
        """All nodes that we may use, in one query."""
        ...

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End these jobs (or members, "id_index"); ids that are gone already are fine."""
        ...

    def check(self, job: Job) -> None:
        """Would this job be accepted? Submits nothing. RefusedError with the cluster's own words if not."""
        ...
