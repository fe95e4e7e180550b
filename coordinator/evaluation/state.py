"""State of one evaluation: what the subjects change in place and everything else only reads.

Rule: one part for each subject; only the subject's own module writes it, others call that module's public functions.
`index` holds look-up tables that `indexes` alone writes, so that no event looks at all that was ever run. A replay of
the journal rebuilds the state exactly. Called from: the subjects, and every reader (allocation, runtime, report, cli).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from coordinator.cluster import Job
from coordinator.evaluation.events import PlannedLeaf
from coordinator.evaluation.records import EvaluationRecord, cut_of
from evaljobs.contract.names import LaneId
from evaljobs.contract.outcomes import TooLarge
from evaljobs.contract.specs import CheckpointSpec, FrameRef

EntryStatus = Literal["unbuilt", "building", "built", "scoring", "scored", "failed"]
NodeStatus = Literal["offered", "staging", "ready", "back-off", "withdrawn"]
JobPhase = Literal["intended", "uncertain", "submitted", "ended"]
MemberPhase = Literal["pending", "running", "ended"]


class IllegalEventError(Exception):
    """An event that cannot follow this state: a bug of the caller, never the operator's fault."""


class Phase(IntEnum):
    """How far an evaluation is; each phase comes after the one before it, and only a retry goes back."""

    RUNNING = 0
    CLOSING = 1  # a reason to end stands: entries that it concerns fail, the others are scored
    WRITING = (
        2  # every entry is scored or has failed; results are being written, jobs are released or cancelled
    )
    LEAVING = 3  # results are written; jobs of it are still there
    ENDED = 4


@dataclass(slots=True, kw_only=True)
class EntryState:
    """One `[[task]]` of the suite."""

    index: int
    name: str
    status: EntryStatus = "unbuilt"
    folder: str = ""
    sets: Mapping[str, str] = field(default_factory=dict)  # leaf task -> folder
    leaves: dict[str, str] = field(
        default_factory=dict
    )  # leaf task -> its name in `Shards.leaves`, once planned
    build_job: str = ""  # the last that was to build it
    build_attempts: int = 0  # that failed, or during which the job ended
    score_attempts: int = 0
    score_attempts_before: int = 0  # of those, the ones before the last retry
    error: str = ""
    token_budget: int | None = None  # after a unit did not fit a GPU's memory; None: the evaluation's
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
    entries: list[int] = field(default_factory=list)  # that its shards answer: those that ask equal requests
    waiting: dict[int, int] = field(default_factory=dict)
    places: dict[int, list[int]] = field(default_factory=dict)  # document -> its shards' places in the plan
    complete: list[int] = field(default_factory=list)  # whole documents not yet given to an execute job
    executes: int = 0  # execute jobs enqueued so far
    executed: int = 0

    @property
    def name(self) -> str:
        """Its name in `Shards.leaves` and in the names of its shards."""
        return self.planned.name


@dataclass(slots=True, kw_only=True)
class ShardState:
    leaf: str = ""  # name of the leaf task that it is part of
    rank: float
    seconds: float
    lane: str
    documents: tuple[int, ...] = ()
    frame: FrameRef | None = None  # set: its responses are on disk
    died_on: list[str] = field(default_factory=list)  # nodes of trials whose deaths with it count
    error: str = ""  # of the last of these deaths
    unread: int = 0  # times that it was run and left nothing that can be read
    quarantined: bool = False


@dataclass(slots=True, kw_only=True)
class NodeUse:
    """A node that this evaluation uses. `lanes`: trials that fit on it at once, at least 1."""

    name: str
    lanes: int
    gpu_type: str = ""  # as the cluster names it
    gpu_name: str = ""  # as its jobs name it; only where the cluster names no type
    memory_mb: int = 0  # in all; 0: unknown
    status: NodeStatus = "offered"
    path: str = ""
    rung: str = ""
    precursor: str | None = None
    attempts: int = 0  # precursor and host jobs so far
    best_effort: bool = False  # its jobs may be preempted
    hosted: bool = False  # its trials cannot see what a precursor stages: one job stages and hosts them
    unseen: bool = False  # its trials saw nothing of what a precursor had staged, once
    deaths: int = 0  # of trials there that count, without a shard done in between
    died_at: float | None = None  # unix seconds of the last
    back_offs: int = 0  # how often it was in back-off
    back_off_until: float | None = None  # unix seconds; while status is "back-off"
    why: str = ""
    at_fault: bool = False  # its back-off is for a fault of its own, certainly

    @property
    def lane_names(self) -> list[str]:
        return [str(LaneId(self.name, number)) for number in range(self.lanes)]


@dataclass(slots=True, kw_only=True)
class Prefetch:
    """Weights staged on a node before its GPUs are free. An offer of the GPUs turns it into a `NodeUse`.

    "over": its one attempt failed or was withdrawn; the node is not tried again before its GPUs are offered.
    """

    name: str
    status: Literal["offered", "staging", "ready", "over"] = "offered"
    path: str = ""
    rung: str = ""
    gpu_name: str = ""
    precursor: str | None = None
    why: str = ""


@dataclass(slots=True, kw_only=True)
class Trial:
    """A trial from its job's intent on; it stays known after its end."""

    name: str
    job: str
    member: int  # of the job; a host runs all of its trials as member 0
    lane: str
    cancelled: bool = False  # the coordinator ended it: its death counts against no node and no shard


@dataclass(slots=True, kw_only=True)
class JobInfo:
    """A job of this evaluation, from the intent to its end."""

    job: Job
    entries: tuple[int, ...] = ()
    lanes: tuple[str, ...] = ()  # trial jobs: member -> lane
    trials: tuple[str, ...] = ()  # trial jobs: member -> trial name
    precursor: str | None = None  # trial jobs: the precursor whose staged weights they read
    submissions: int = 0  # that may have happened, in doubt afterwards
    refusals: int = 0  # by a limit on jobs
    phase: JobPhase = "intended"
    job_id: str = ""
    changed_at: float = 0.0
    members: dict[int, MemberPhase] = field(default_factory=dict)
    released_at: float | None = None
    refused: str = ""
    unlaunched: str = ""  # the node that could not launch it
    successor: str = ""  # of a precursor: the one that holds its node's weights after it

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
    task: str = ""  # of an execute job: the name of a leaf task
    documents: tuple[int, ...] = ()  # of an execute job: whole ones of `task`
    done: bool = False
    enqueued_at: float = 0.0
    losses: int = 0  # how often RQ forgot it
    seconds: float = 0.0  # predicted


@dataclass(slots=True, kw_only=True)
class Index:
    """Look-up tables of what the rules look at next: a function of the other parts, kept by `indexes`."""

    jobs: dict[str, dict[str, JobInfo]] = field(default_factory=dict)  # purpose -> jobs not ended, by name
    jobs_on: dict[str, dict[str, JobInfo]] = field(default_factory=dict)  # node -> the same
    lanes: dict[str, dict[str, str]] = field(default_factory=dict)  # node -> living trials there -> lane
    lane_trials: dict[str, int] = field(default_factory=dict)  # lane -> trials that it has had
    running: set[str] = field(default_factory=set)  # living trials that the cluster has started
    # living trials that the cluster has not started and that nothing has cancelled, the oldest first
    cancellable: dict[str, None] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)  # living trials that the coordinator has cancelled
    # "back-off"; "offered"; "free": ready, and a lane of it has no trial
    nodes: dict[str, dict[str, NodeUse]] = field(default_factory=dict)
    staged: dict[str, NodeUse] = field(default_factory=dict)  # nodes that have a precursor
    in_use: dict[str, int] = field(default_factory=dict)  # node that is staging or ready -> lanes, where any
    lanes_in_use: int = 0  # their sum
    # not terminal, by status; of those built, "unplanned" lack a plan and "answered" lack neither response nor verdict
    entries: dict[str, dict[int, EntryState]] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)  # names of leaf tasks that lack neither
    # names of leaf tasks of which an execute job is due
    executable: dict[str, LeafState] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Conversion:
    """Part of `builds`. "running": from the intent to the job's end; "made": until its folder was inspected."""

    status: Literal["none", "due", "running", "made", "done"] = "none"
    announced: CheckpointSpec | None = None  # what is converted; `record.checkpoint` is then what came of it
    path: str = ""
    attempts: int = 0  # jobs that ended without an outcome


@dataclass(slots=True, kw_only=True)
class Builds:
    """Part of `builds`, beside `State.entries`."""

    looked_up: bool = False  # request sets on disk were looked for
    # build jobs in a row that ended without an outcome and had nothing built
    deaths_without_progress: int = 0
    due_at: float = 0.0  # unix seconds; the next build job comes no sooner


@dataclass(slots=True, kw_only=True)
class Nodes:
    """Part of `nodes`."""

    by_name: dict[str, NodeUse] = field(default_factory=dict)
    largest_mb: int = 0  # memory of the largest node that was offered or could be; 0: unknown
    prefetches: dict[str, Prefetch] = field(default_factory=dict)
    content: str | None = None  # of the checkpoint's whole files, by the hook or the first precursor
    most: int = 0  # nodes in use at once until `most_until`, after a limit on jobs was reached
    most_until: float = 0.0  # unix seconds
    most_times: int = 0  # such times, one after the other
    # precursor that runs and has no successor -> unix seconds from which it needs one
    renewals: dict[str, float] = field(default_factory=dict)
    # consecutive times that every node was in back-off, without a shard done in between
    all_backed_off: int = 0


@dataclass(slots=True, kw_only=True)
class Jobs:
    """Part of `jobs`."""

    by_name: dict[str, JobInfo] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)  # names of jobs not ended
    held: dict[str, HeldJob] = field(default_factory=dict)  # intended jobs that a limit on jobs keeps out
    unlaunched: set[str] = field(
        default_factory=set
    )  # nodes that could not launch a job: the next avoid them
    attempts: dict[tuple[str, str], int] = field(default_factory=dict)  # (kind, detail) -> jobs so named
    doublings: dict[str, int] = field(default_factory=dict)  # setting of memory -> times it was doubled


@dataclass(slots=True, kw_only=True)
class Trials:
    """Part of `trials`."""

    by_name: dict[str, Trial] = field(default_factory=dict)
    live: dict[str, Trial] = field(default_factory=dict)
    stragglers: dict[str, float] = field(default_factory=dict)  # trial -> times as long as the others
    deaths: int = 0  # of trials without a shard, in a row, without one done in between


@dataclass(slots=True, kw_only=True)
class Shards:
    """Part of `shards`."""

    by_name: dict[str, ShardState] = field(default_factory=dict)
    leaves: dict[str, LeafState] = field(default_factory=dict)  # by name
    todo: int = 0  # neither done nor quarantined nor withdrawn
    # (name of a leaf task, cut) that were planned and did not fit a GPU's memory: their answers count no more
    retired: set[tuple[str, str]] = field(default_factory=set)
    # entry -> the unit that did not fit, until its token budget is reduced
    too_large: dict[int, TooLarge] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Plan:
    """Part of `shards`, too: what is asked of the planner, and what it predicted."""

    pending: bool = False  # also while responses of earlier evaluations are looked for
    alike: bool = False  # as of `ResponsesFound`, the last one
    # (entry, leaf task) whose earlier responses were looked for
    looked_for: set[tuple[int, str]] = field(default_factory=set)
    reused: dict[str, str] = field(default_factory=dict)  # name of a leaf task -> evaluation of its responses
    reused_scores: set[int] = field(default_factory=set)  # entries whose scores are that evaluation's, too
    made_at: float | None = None
    count: int = 0
    predicted_makespan_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    work_seconds_95: float = 0.0  # see `Planned`
    load_seconds_95: float = 0.0
    sigma: float = 0.0
    workers: int = 0  # metric workers that the plans are worth; 0: not predicted


@dataclass(slots=True, kw_only=True)
class Scoring:
    """Part of `scoring`."""

    metrics: dict[str, MetricState] = field(default_factory=dict)
    outstanding: set[str] = field(default_factory=set)  # metric jobs without an outcome
    worker_attempts: int = 0  # worker jobs since a metric job was last done
    workers_due_at: float = 0.0  # unix seconds; the next worker job comes no sooner
    grown_at: float = 0.0  # unix seconds when one of them was last asked for or started


@dataclass(slots=True, kw_only=True)
class Ending:
    """Part of `ending`."""

    phase: Phase = Phase.RUNNING
    reason: str = ""  # why it ends before its work is done; "" where it does not
    inference_only: bool = False  # `reason` concerns inference alone: entries with all responses are scored
    no_scores: bool = False  # `reason` takes the scores of entries that have one, too
    cancelled: str = ""  # a person's reason
    retried: bool = False  # by a person, after it had ended
    retry_waits: bool = False  # a retry was asked for while it was ending: it begins at the end
    ended_at: float | None = None  # unix seconds

    def close(
        self, reason: str, *, inference_only: bool = False, no_scores: bool = False, instead: bool = False
    ) -> None:
        """End for this reason. The first reason stands, unless this one comes `instead`, or takes scores."""
        if not self.reason or instead or no_scores:
            self.reason, self.inference_only, self.no_scores = reason, inference_only, no_scores
            self.phase = max(self.phase, Phase.CLOSING)


@dataclass(slots=True, kw_only=True)
class State:
    """All of one evaluation."""

    record: EvaluationRecord
    entries: list[EntryState]
    batch_size: int | Literal["auto"]
    token_budget: int | Literal["auto"] | None = None  # of fast mode
    seen: set[tuple[str, str]] = field(default_factory=set)  # (kind, name) of outcomes taken in
    warnings: list[str] = field(default_factory=list)
    conversion: Conversion = field(default_factory=Conversion)
    builds: Builds = field(default_factory=Builds)
    nodes: Nodes = field(default_factory=Nodes)
    jobs: Jobs = field(default_factory=Jobs)
    trials: Trials = field(default_factory=Trials)
    shards: Shards = field(default_factory=Shards)
    plan: Plan = field(default_factory=Plan)
    scoring: Scoring = field(default_factory=Scoring)
    ending: Ending = field(default_factory=Ending)
    index: Index = field(default_factory=Index)

    @property
    def evaluation_id(self) -> str:
        return self.record.evaluation_id

    def cut_of(self, entry: EntryState) -> str:
        """The cut of an entry's requests, as `records.cut_of`."""
        budget = entry.token_budget or self.token_budget
        return cut_of(self.record.suite, entry.index, self.batch_size, budget)

    @property
    def ended_at(self) -> float | None:
        """Unix seconds; None while it goes on."""
        return self.ending.ended_at

    @property
    def converted_digest(self) -> str | None:
        """Digest of the announced checkpoint, which names its converted copy; None where none is converted."""
        announced = self.conversion.announced
        return None if announced is None else announced.digest

    @property
    def winding_down(self) -> bool:
        return self.ending.phase >= Phase.WRITING

    @property
    def plans_later(self) -> bool:
        """No shard is to do, and a plan is to come: it may be worth any number of lanes."""
        ahead = not self.index.entries.keys().isdisjoint({"unbuilt", "building", "unplanned"})
        return not self.shards.todo and (ahead or not self.shards.leaves)

    @property
    def can_work(self) -> bool:
        """Its checkpoint and request sets are known, and its end has not begun: nodes and workers are of use."""
        return self.builds.looked_up and self.conversion.status in ("none", "done") and not self.winding_down

    @property
    def waits_for_workers(self) -> bool:
        """Metric jobs are open, and no worker is there or on its way."""
        if not self.scoring.outstanding or not self.can_work:
            return False
        return "metric" not in self.index.jobs

    def lanes_to_do(self) -> set[str]:
        """Lanes whose own shards are to do. O(shards): for rules without stealing, and only while a lane may be idle."""
        return {s.lane for s in self.shards.by_name.values() if s.frame is None and not s.quarantined}

    @property
    def queue_epoch(self) -> str:
        return f"plan-{self.plan.count}"

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
        return max(1, (self.plan.workers or options.workers) * options.metric.cpus)

    @property
    def unscored_items(self) -> int:
        return sum(len(e.unscored) for e in self.entries if e.status == "scored")

    @property
    def waits_until(self) -> float | None:
        """Unix seconds at which the first node returns, while there is work and all nodes are in back-off; None otherwise."""
        if not (self.shards.todo or self.plans_later) or self.winding_down:
            return None
        times = [n.back_off_until for n in self.nodes.by_name.values() if n.status == "back-off"]
        in_use = any(n.status in ("offered", "staging", "ready") for n in self.nodes.by_name.values())
        known = [at for at in times if at is not None]
        return None if in_use or not known else min(known)

    def failed_entries(self) -> dict[int, str]:
        return {e.index: e.error for e in self.entries if e.status == "failed"}
