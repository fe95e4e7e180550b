"""A cluster without processes: the Cluster protocol on plain values, for tests and benches.

Rule: state changes only by calls; time is a number that `advance` adds to. The next calls of a
method can be made to fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from coordinator.site.cluster import ClusterError, Job, JobState, NodeState, RefusedError
from coordinator.site.cluster.slurm_parse import PHASES

Method = Literal["submit", "jobs", "nodes", "cancel", "check"]


@dataclass(slots=True, kw_only=True)
class FakeMember:
    """One member of a submitted job. `ends_at`: unix seconds of the fake's clock."""

    job: Job
    job_id: str
    index: int
    submitted_at: float
    state: str = "PENDING"
    node: str | None = None
    started_at: float | None = None
    ends_at: float = math.inf

    @property
    def phase(self):
        return PHASES.get(self.state, "unknown")


def fake_node(name, *, gpus=8, cpus=64, memory_mb=512_000):
    """An idle node of partition "gpu" ("cpu" without GPUs)."""
    return NodeState(
        name=name,
        usable=True,
        state="idle",
        gpus=gpus,
        gpus_free=gpus,
        cpus=cpus,
        cpus_free=cpus,
        memory_mb=memory_mb,
        memory_free_mb=memory_mb,
        gpu_type="fake" if gpus else "",
        partitions=("gpu" if gpus else "cpu",),
    )


@dataclass(slots=True, kw_only=True)
class FakeCluster:
    """`seconds(job, index)`: how long a member runs; math.inf: until ended or cancelled."""

    fleet: Sequence[NodeState]
    seconds: Callable[[Job, int], float] = lambda _job, _index: math.inf
    now: float = 0.0  # unix seconds
    members: list[FakeMember] = field(default_factory=list)  # in the order of submission
    submitted: list[Job] = field(default_factory=list)  # every job that was submitted
    _failures: dict[Method, list[ClusterError]] = field(default_factory=dict)  # of the next calls

    # --- the protocol ------------------------------------------------------------------------------------------------

    def submit(self, job):
        self._fail("submit")
        self._refuse(job)
        self.submitted.append(job)
        job_id = str(len(self.submitted))
        self.members += [
            FakeMember(job=job, job_id=job_id, index=index, submitted_at=self.now)
            for index in range(job.count)
        ]
        return job_id

    def jobs(self):
        self._fail("jobs")
        return [
            JobState(
                job_id=m.job_id,
                name=m.job.name,
                index=m.index,
                phase=m.phase,
                state=m.state,
                node=m.node,
                submitted_at=m.submitted_at,
                started_at=m.started_at,
            )
            for m in self.members
        ]

    def nodes(self):
        self._fail("nodes")
        return [self._node(node) for node in self.fleet]

    def cancel(self, job_ids):
        self._fail("cancel")
        for member in self.members:
            if {member.job_id, f"{member.job_id}_{member.index}"} & set(job_ids) and member.phase != "ended":
                member.state = "CANCELLED"

    def check(self, job):
        self._fail("check")
        self._refuse(job)

    # --- the passing of time and injected events ---------------------------------------------------------------------

    def advance(self, seconds=0.0):
        """Let time pass: end due members, start jobs that fit, first come first served."""
        self.now += seconds
        for member in list(self.members):
            if member.phase == "running" and member.ends_at <= self.now:
                member.state = "COMPLETED"
        for member in self.members:
            if member.phase == "pending":
                self._start(member)

    def end(self, job_id, index=0, *, state="COMPLETED"):
        """End a member with this state, which Slurm need not have."""
        self.member(job_id, index).state = state

    def member(self, job_id, index=0):
        """A member; KeyError where the cluster has none of that id."""
        for member in self.members:
            if (member.job_id, member.index) == (job_id, index):
                return member
        raise KeyError(f"{job_id}_{index}")

    def fail(self, method, error, *, times):
        """Make the next `times` calls of `method` raise `error`, without effect."""
        self._failures.setdefault(method, []).extend([error] * times)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _fail(self, method):
        if errors := self._failures.get(method):
            raise errors.pop()

    def _refuse(self, job):
        names = {node.name for node in self.fleet}
        if job.node is not None and job.node not in names:
            raise RefusedError("Invalid node name specified", of_node=True)
        if not any(_fits(job, node) for node in self.fleet):
            raise RefusedError("Requested node configuration is not available", of_node=True)

    def _start(self, member):
        for node in map(self._node, self.fleet):
            free = replace(
                node, gpus=node.gpus_free, cpus=node.cpus_free, memory_mb=max(0, node.memory_free_mb)
            )
            if node.usable and _fits(member.job, free):
                member.state, member.node, member.started_at = "RUNNING", node.name, self.now
                member.ends_at = self.now + self.seconds(member.job, member.index)
                return

    def _node(self, node):
        there = [m.job for m in self.members if m.node == node.name and m.phase in ("running", "unknown")]
        gpus = sum(job.gpus for job in there)
        return replace(
            node,
            state="mixed" if there else node.state,
            gpus_free=node.gpus - gpus,
            cpus_free=node.cpus - sum(job.cpus for job in there),
            memory_free_mb=node.memory_mb - sum(job.memory_mb for job in there),
        )


def _fits(job, node):
    return (
        job.node in (None, node.name)
        and job.gpus <= node.gpus
        and job.cpus <= node.cpus
        and job.memory_mb <= node.memory_mb
    )
