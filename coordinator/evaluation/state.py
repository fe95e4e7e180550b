"""What is known of one evaluation: the memory that `machine.step` changes and everything else only reads.

Rule: state holds facts and intents, never effects; it is rebuilt by replaying the journal. Counters kept here
(`todo`, `index`) exist because what was ever run must not be looked at on every event; `indexes` keeps the index, and
its `validate` recounts them.

It does not know: time of day, files, Redis, Slurm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordinator.cluster import Job
from coordinator.evaluation.messages import PlannedLeaf
from coordinator.evaluation.records import EvaluationRecord
from evaljobs.contract.specs import CheckpointSpec, FrameRef, Spec

EntryStatus = Literal["unbuilt", "building", "built", "scoring", "scored", "failed"]
NodeStatus = Literal["offered", "staging", "ready", "aside", "withdrawn"]
JobPhase = Literal["intended", "uncertain", "submitted", "ended"]
MemberPhase = Literal["pending", "running", "ended"]


class IllegalEventError(Exception):
    """An event that cannot follow this state: a bug of the shell, never the operator's fault."""


@dataclass(slots=True, kw_only=True)
class EntryState:
    """One `[[task]]` of the suite."""

    index: int
    name: str
    status: EntryStatus = "unbuilt"
    folder: str = ""
    sets: Mapping[str, str] = field(default_factory=dict)  # leaf task -> folder
    build_job: str = ""  # the last that was to build it
    build_tries: int = 0  # that failed, or during which the job ended
    score_tries: int = 0
    score_tries_before: int = 0  # of those, the ones before it was last asked to be tried again
    error: str = ""
    result_file: str = ""
    unscored: Mapping[str, str] = field(default_factory=dict)  # items that count in no mean, with the reason

    @property
    def terminal(self) -> bool:
        return self.status in ("scored", "failed")


@dataclass(slots=True, kw_only=True)
class LeafState:
    """A leaf task after planning. `waiting` counts, for each document, the shards that still lack."""

    planned: PlannedLeaf
    todo: int
    waiting: dict[int, int] = field(default_factory=dict)
    places: dict[int, list[int]] = field(default_factory=dict)  # document -> its shards' places in the plan
    complete: list[int] = field(default_factory=list)  # whole documents not yet given to an execute job
    executes: int = 0  # execute jobs enqueued so far
    executed: int = 0


@dataclass(slots=True, kw_only=True)
class ShardState:
    rank: float
    seconds: float
    lane: str
    documents: tuple[int, ...] = ()
    frame: FrameRef | None = None  # set: its responses are on disk
    kills: int = 0  # trials that it took down
    died_on: list[str] = field(default_factory=list)  # nodes of those trials
    doubts: dict[str, int] = field(default_factory=dict)  # lane -> of those, what counts against it, too
    unread: int = 0  # times that it was run and left nothing that can be read
    quarantined: bool = False


@dataclass(slots=True, kw_only=True)
class NodeUse:
    """A node that this evaluation uses. `lanes` is how many trials fit on it at once; 0: staged ahead of its GPUs."""

    name: str
    lanes: int
    gpu_type: str = ""
    memory_mb: int = 0
    status: NodeStatus = "offered"
    path: str = ""
    rung: str = ""
    holder: str | None = None
    attempts: int = 0  # holder jobs so far
    best_effort: bool = False  # its jobs may be preempted
    hosted: bool = False  # its trials cannot see what a precursor stages: one job stages and hosts them
    unseen: bool = False  # its trials saw nothing of what a precursor had staged, once
    failures: int = 0  # trials that died there for no shard's fault
    doubts: dict[str, int] = field(
        default_factory=dict
    )  # lane -> trials in a row that a shard may have taken down
    asides: int = 0  # how often it was set aside
    aside_until: float | None = None  # unix seconds; while status is "aside"
    why: str = ""


@dataclass(slots=True, kw_only=True)
class JobInfo:
    """A job of ours, from the intent to its end."""

    job: Job
    specs: Mapping[str, Spec]
    entries: tuple[int, ...] = ()
    lanes: tuple[str, ...] = ()  # trial jobs: member -> lane
    trials: tuple[str, ...] = ()  # trial jobs: member -> trial name
    holder: str | None = None  # trial jobs: the precursor whose staging they read
    phase: JobPhase = "intended"
    job_id: str = ""
    changed_at: float = 0.0
    members: dict[int, MemberPhase] = field(default_factory=dict)
    released_at: float | None = None
    refused: str = ""

    @property
    def live(self) -> bool:
        return self.phase != "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldJob:
    """Why a job was not taken yet, in the cluster's words, and when it is tried again (unix seconds)."""

    why: str
    due_at: float


@dataclass(slots=True, kw_only=True)
class MetricState:
    """An execute or score job given to RQ. `done` once its outcome was seen."""

    name: str
    kind: Literal["execute", "score"]
    entry: int
    task: str = ""
    spec: Spec
    done: bool = False
    attempt: int = 0
    enqueued_at: float = 0.0
    losses: int = 0  # how often RQ forgot it
    seconds: float = 0.0  # predicted


@dataclass(slots=True, kw_only=True)
class Index:
    """What the rules look at next, by what is due for it: a function of the state that `coordinator.evaluation.indexes` keeps."""

    jobs: dict[str, dict[str, JobInfo]] = field(default_factory=dict)  # purpose -> jobs not ended, by name
    jobs_on: dict[str, dict[str, JobInfo]] = field(default_factory=dict)  # node -> the same
    lanes: dict[str, dict[str, str]] = field(default_factory=dict)  # node -> living trials there -> lane
    lane_trials: dict[str, int] = field(default_factory=dict)  # lane -> trials that it has had
    running: set[str] = field(default_factory=set)  # living trials that the cluster has started
    # living trials that the cluster has not started and that nothing has cancelled, the oldest first
    cancellable: dict[str, None] = field(default_factory=dict)
    # "aside"; "offered": with lanes; "ahead": without, not tried yet; "free": ready, and a lane of it has no trial
    nodes: dict[str, dict[str, NodeUse]] = field(default_factory=dict)
    held: dict[str, NodeUse] = field(default_factory=dict)  # nodes that have a holder
    in_use: dict[str, int] = field(default_factory=dict)  # node that is staging or ready -> lanes, where any
    lanes_in_use: int = 0  # their sum
    # not terminal, by status; of those built, "unplanned" lack a plan and "answered" lack neither response nor verdict
    entries: dict[str, dict[int, EntryState]] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)  # leaf tasks that lack neither
    executable: dict[str, LeafState] = field(
        default_factory=dict
    )  # leaf tasks of which an execute job is due


@dataclass(slots=True, kw_only=True)
class State:
    """All of one evaluation."""

    record: EvaluationRecord
    entries: list[EntryState]
    batch_size: int | Literal["auto"]
    # "running" from the intent to submit it until its job has ended, "made" until its folder has been looked at
    conversion: Literal["none", "due", "running", "made", "done"] = "none"
    announced: CheckpointSpec | None = None  # what is converted; `record.checkpoint` is then what came of it
    converted_path: str = ""
    looked_up: bool = False
    nodes: dict[str, NodeUse] = field(default_factory=dict)
    jobs: dict[str, JobInfo] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)  # names of jobs not ended
    held: dict[str, HeldJob] = field(default_factory=dict)  # intended jobs that a limit on jobs keeps out
    live_trials: dict[str, tuple[str, int]] = field(default_factory=dict)  # trial -> (job, member)
    trial_lane: dict[str, str] = field(default_factory=dict)
    leaves: dict[str, LeafState] = field(default_factory=dict)
    shards: dict[str, ShardState] = field(default_factory=dict)
    todo: int = 0  # shards neither done nor quarantined nor withdrawn
    planning: bool = False  # also while responses of earlier evaluations are looked for
    looked_for: set[str] = field(default_factory=set)  # leaf tasks whose responses were looked for there
    reused: dict[str, str] = field(default_factory=dict)  # leaf task -> evaluation that its responses are of
    reused_scores: set[int] = field(
        default_factory=set
    )  # entries whose scores are an earlier evaluation's, too
    planned_at: float | None = None
    plans: int = 0
    predicted_makespan_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    work_seconds_95: float = 0.0  # see `Planned`
    load_seconds_95: float = 0.0
    sigma: float = 0.0
    stragglers: dict[str, float] = field(
        default_factory=dict
    )  # trial -> times as long as the others; once named
    metrics: dict[str, MetricState] = field(default_factory=dict)
    outstanding: set[str] = field(default_factory=set)  # metric jobs without an outcome
    seen: set[tuple[str, str]] = field(default_factory=set)  # (kind, name) of outcomes taken in
    barren: int = 0  # trial failures in a row without a shard dumped in between
    rests: int = 0  # times in a row that no node was left but such as rest
    conversion_tries: int = 0  # conversions whose job ended without a word
    barren_builds: int = 0  # build jobs in a row that ended without a word and had nothing built
    worker_tries: int = 0  # worker jobs sent for since a metric job was last done
    workers_due_at: float = 0.0  # no others are sent for before, should these end
    workers: int = 0  # metric workers that the plans are worth; 0: not predicted
    grown_at: float = 0.0  # when more of them were last looked for
    counters: dict[str, int] = field(default_factory=dict)  # job attempts by kind and detail
    fatal: str = ""
    fatal_to: Literal["all", "inference"] = (
        "all"  # "inference": what has all its responses is scored all the same
    )
    cancelled: str = ""
    asked_again: bool = False  # by a person, after it had failed or been cancelled
    results_asked: bool = False
    results_written: bool = False
    retry_waits: bool = False  # asked for while it was ending: it is tried again once it has
    ended_at: float | None = None
    warnings: list[str] = field(default_factory=list)
    index: Index = field(default_factory=Index)

    @property
    def evaluation_id(self) -> str:
        return self.record.evaluation_id

    @property
    def turn(self) -> tuple[int, float, str]:
        """Sorts evaluations as they are served: by priority, then age."""
        return -self.record.priority, self.record.accepted_at, self.evaluation_id

    @property
    def winding_down(self) -> bool:
        return self.results_asked

    @property
    def can_work(self) -> bool:
        """Its checkpoint and request sets are known, and its end has not begun: nodes and workers are of use."""
        return self.looked_up and self.conversion in ("none", "done") and not self.winding_down

    @property
    def waits_for_workers(self) -> bool:
        """Metric jobs are open, and no worker is there or on its way."""
        if not self.outstanding or not self.can_work:
            return False
        return "metric" not in self.index.jobs

    @property
    def queue_epoch(self) -> str:
        return f"plan-{self.plans}"

    def next_attempt(self, kind: str, detail: str) -> int:
        key = f"{kind}/{detail}"
        attempt = self.counters.get(key, 0)
        self.counters[key] = attempt + 1
        return attempt

    @property
    def all_terminal(self) -> bool:
        """Every entry is scored or has failed."""
        return not self.index.entries

    def live_jobs(self, purpose: str) -> list[JobInfo]:
        return list(self.index.jobs.get(purpose, {}).values())

    def live_lanes(self, node: str) -> set[str]:
        return set(self.index.lanes.get(node, {}).values())

    def running_lanes(self, node: str) -> int:
        """Lanes of a node whose trials the cluster has started: a job that hosts trials runs with all of its own."""
        return sum(trial in self.index.running for trial in self.index.lanes.get(node, ()))

    @property
    def cpu_slots(self) -> int:
        """Cores of the metric workers that the plans are worth (the most, where nothing was predicted)."""
        options = self.record.options
        return max(1, (self.workers or options.workers) * options.worker_cpus)

    @property
    def unscored_items(self) -> int:
        return sum(len(e.unscored) for e in self.entries if e.status == "scored")

    @property
    def waits_until(self) -> float | None:
        """Unix seconds at which the first node returns, while there is work and all nodes rest; None otherwise."""
        if not (self.todo or not self.leaves) or self.ended_at is not None or self.results_asked:
            return None
        times = [n.aside_until for n in self.nodes.values() if n.status == "aside"]
        in_use = any(n.lanes and n.status in ("offered", "staging", "ready") for n in self.nodes.values())
        known = [at for at in times if at is not None]
        return None if in_use or not known else min(known)

    def failed_entries(self) -> dict[int, str]:
        return {e.index: e.error for e in self.entries if e.status == "failed"}
