"""A simulated cluster without processes: the Cluster protocol on plain values, for tests.

Rule: state changes only by calls; time is a number that `advance` adds to. The same seed and calls
give the same run. Faults that real clusters showed can be injected: a submission that happens and
times out, one acknowledged and lost, an id given out twice, a failed listing, an unknown state.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from coordinator.cluster import ClusterError, Job, JobPhase, JobState, NodeState, RefusedError
from coordinator.cluster.slurm_parse import PHASES

Method = Literal["submit", "jobs", "nodes", "cancel", "check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFaults:
    """Probability of each fault per call; of `death` per running member and `advance`."""

    submit_fails: float = 0.0  # not submitted; raises
    submit_times_out: float = 0.0  # submitted; raises with `maybe_done`
    submit_lost: float = 0.0  # acknowledged, then lost by the cluster
    no_news: float = 0.0  # jobs() and nodes() raise
    cancel_fails: float = 0.0
    death: float = 0.0  # a running member ends as FAILED
    vanishes: float = 0.0  # share of these that no listing shows afterwards


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
    def phase(self) -> JobPhase:
        return PHASES.get(self.state, "unknown")


@dataclass(slots=True)
class _Script:
    error: ClusterError
    done: bool  # the call has its effect before it raises


def fake_node(name: str, *, gpus: int = 8, cpus: int = 64, memory_mb: int = 512_000) -> NodeState:
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
    faults: FakeFaults = field(default_factory=FakeFaults)
    seed: int = 0
    now: float = 0.0  # unix seconds
    members: list[FakeMember] = field(default_factory=list)  # in the order of submission
    submitted: list[Job] = field(default_factory=list)  # every job that was submitted
    _random: random.Random = field(init=False)
    _down: dict[str, str] = field(default_factory=dict)
    _scripts: dict[Method, deque[_Script]] = field(default_factory=dict)
    _free_ids: list[str] = field(default_factory=list)  # ids to reuse, as a restarted slurmctld does
    _last_id: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    # --- the protocol ------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> str:
        script = self._next("submit")
        if script is not None and not script.done:
            raise script.error
        self._refuse(job)
        if self._chance(self.faults.submit_fails):
            raise ClusterError("fake: the controller cannot be reached")
        job_id = self._free_ids.pop() if self._free_ids else self._new_id()
        if not self._chance(self.faults.submit_lost):
            self.submitted.append(job)
            self.members += [
                FakeMember(job=job, job_id=job_id, index=index, submitted_at=self.now)
                for index in range(job.count)
            ]
        if script is not None:
            raise script.error
        if self._chance(self.faults.submit_times_out):
            raise ClusterError("fake: timed out", maybe_done=True)
        return job_id

    def jobs(self) -> list[JobState]:
        self._listing("jobs")
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

    def nodes(self) -> list[NodeState]:
        self._listing("nodes")
        return [self._node(node) for node in self.fleet]

    def cancel(self, job_ids: Sequence[str]) -> None:
        script = self._next("cancel")
        if script is not None and not script.done:
            raise script.error
        if self._chance(self.faults.cancel_fails):
            raise ClusterError("fake: the controller cannot be reached")
        for member in self.members:
            if {member.job_id, f"{member.job_id}_{member.index}"} & set(job_ids) and member.phase != "ended":
                member.state = "CANCELLED"
        if script is not None:
            raise script.error

    def check(self, job: Job) -> None:
        script = self._next("check")
        if script is not None:
            raise script.error
        self._refuse(job)

    # --- the passing of time and injected events ---------------------------------------------------------------------

    def advance(self, seconds: float = 0.0) -> None:
        """Let time pass: end due members, draw deaths, start jobs that fit, first come first served."""
        self.now += seconds
        for member in list(self.members):
            if member.phase != "running":
                continue
            if member.ends_at <= self.now:
                member.state = "COMPLETED"
            elif self._chance(self.faults.death):
                member.state = "FAILED"
                if self._chance(self.faults.vanishes):
                    self.members.remove(member)
        for member in self.members:
            if member.phase == "pending":
                self._start(member)

    def end(self, job_id: str, index: int = 0, *, state: str = "COMPLETED") -> None:
        """End a member with this state, which Slurm need not have."""
        self.member(job_id, index).state = state

    def member(self, job_id: str, index: int = 0) -> FakeMember:
        """A member; KeyError where the cluster has none of that id."""
        for member in self.members:
            if (member.job_id, member.index) == (job_id, index):
                return member
        raise KeyError(f"{job_id}_{index}")

    def lose(self, job_id: str, *, reuse_id: bool = False) -> None:
        """Forget a job as a killed slurmctld does; with `reuse_id` the next submission gets its id."""
        self.members = [m for m in self.members if m.job_id != job_id]
        if reuse_id:
            self._free_ids.append(job_id)

    def take_down(self, node: str, state: str = "down*") -> None:
        """Take a node down and end what ran there."""
        self._down[node] = state
        for member in self.members:
            if member.node == node and member.phase == "running":
                member.state = "NODE_FAIL"

    def bring_up(self, node: str) -> None:
        self._down.pop(node, None)

    def fail(self, method: Method, error: ClusterError, *, times: int = 1, done: bool = False) -> None:
        """Make the next `times` calls of `method` raise `error`; with `done` they take effect first."""
        self._scripts.setdefault(method, deque()).extend(_Script(error, done) for _ in range(times))

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _next(self, method: Method) -> _Script | None:
        queue = self._scripts.get(method)
        return queue.popleft() if queue else None

    def _listing(self, method: Method) -> None:
        script = self._next(method)
        if script is not None:
            raise script.error
        if self._chance(self.faults.no_news):
            raise ClusterError("fake: no news")

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def _new_id(self) -> str:
        self._last_id += 1
        return str(self._last_id)

    def _refuse(self, job: Job) -> None:
        names = {node.name for node in self.fleet}
        if job.node is not None and job.node not in names:
            raise RefusedError("Invalid node name specified", of_node=True)
        if not any(_fits(job, node) for node in self.fleet):
            raise RefusedError("Requested node configuration is not available", of_node=True)

    def _start(self, member: FakeMember) -> None:
        for node in map(self._node, self.fleet):
            free = replace(
                node, gpus=node.gpus_free, cpus=node.cpus_free, memory_mb=max(0, node.memory_free_mb)
            )
            if node.usable and _fits(member.job, free):
                member.state, member.node, member.started_at = "RUNNING", node.name, self.now
                member.ends_at = self.now + self.seconds(member.job, member.index)
                return

    def _node(self, node: NodeState) -> NodeState:
        there = [m.job for m in self.members if m.node == node.name and m.phase in ("running", "unknown")]
        gpus = sum(job.gpus for job in there)
        down = self._down.get(node.name)
        return replace(
            node,
            usable=node.usable and down is None,
            state=down or ("mixed" if there else node.state),
            gpus_free=node.gpus - gpus,
            cpus_free=node.cpus - sum(job.cpus for job in there),
            memory_free_mb=node.memory_mb - sum(job.memory_mb for job in there),
        )


def _fits(job: Job, node: NodeState) -> bool:
    return (
        job.node in (None, node.name)
        and job.gpus <= node.gpus
        and job.cpus <= node.cpus
        and job.memory_mb <= node.memory_mb
    )
