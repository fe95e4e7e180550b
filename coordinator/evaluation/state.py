"""State of one evaluation: what the subjects change in place and everything else only reads.

Rule: one part for each subject; only the subject's own module writes it, others call that module's public functions.
No event looks at all that was ever run. What a rule asks about nodes and entries is counted anew, once a look.
A replay of the journal rebuilds the state exactly. Called from: the subjects, and every reader (allocation, runtime, report, cli).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import inf
from typing import Literal

from coordinator.cluster import Job
from coordinator.evaluation.events import PlannedLeaf
from coordinator.evaluation.records import EvaluationRecord, cut_of
from evaljobs.contract.names import LaneId
from evaljobs.contract.outcomes import TooLarge
from evaljobs.contract.specs import CheckpointSpec, FrameRef

EntryStatus = Literal["unbuilt", "building", "built", "scoring", "scored", "failed", "not asked"]
NodeStatus = Literal["offered", "staging", "ready", "back-off", "withdrawn"]
JobPhase = Literal["intended", "uncertain", "submitted", "ended"]
MemberPhase = Literal["pending", "running", "ended"]
IN_USE = ("offered", "staging", "ready")  # statuses of nodes that are in use, or prefetched on


HELD_SECONDS = 30.0  # pause before a job that a limit on jobs kept out is submitted again; doubled each time
MAX_HELD_SECONDS = 1800.0  # the longest such pause
FEWER_SECONDS = 1800.0  # for which an evaluation that a limit kept out uses fewer nodes; doubled each time


class IllegalEventError(Exception):
    """An event that cannot follow this state: a bug of the caller, never the operator's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """Failures in a row of one thing: it is tried again after a pause of `first` seconds, doubled each time up to `longest`,
    and given up after `limit` of them.
    """

    limit: float = inf
    first: float = 0.0
    longest: float = inf
    failures: int = 0
    due_at: float = 0.0  # unix seconds of the next try

    def failed(self, now: float = 0.0) -> Tries:
        """One more failure; the pause begins at `now` (unix seconds)."""
        pause = min(self.first * 2.0 ** min(self.failures, 60), self.longest)
        return replace(self, failures=self.failures + 1, due_at=now + pause)

    def due(self, now: float) -> bool:
        return now >= self.due_at

    @property
    def given_up(self) -> bool:
        return self.failures >= self.limit

    @property
    def anew(self) -> Tries:
        """Without failures."""
        return replace(self, failures=0, due_at=0.0) if self.failures else self


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
    building: Tries = Tries(limit=3)  # that failed, or during which the job ended
    score_jobs: int = 0  # so far
    scoring: Tries = Tries(limit=3)  # score jobs that failed
    error: str = ""
    token_budget: int | None = None  # after a unit did not fit a GPU's memory; None: the evaluation's
    result_file: str = ""
    unscored: Mapping[str, str] = field(default_factory=dict)  # items that count in no mean, with the reason

    @property
    def terminal(self) -> bool:
        return self.status in ("scored", "failed", "not asked")


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


UNREAD = Tries(limit=3)  # runs of a shard that left no record that can be read


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
    unread: Tries = UNREAD
    quarantined: bool = False


@dataclass(slots=True, kw_only=True)
class NodeUse:
    """A node that this evaluation uses. `lanes`: trials that fit on it at once; 0: weights are prefetched there, before an
    offer of its GPUs, by one attempt ("withdrawn": it failed, or was given up).
    """

    name: str
    lanes: int
    gpu_type: str = ""  # as the cluster names it
    gpu_name: str = ""  # as its jobs name it; only where the cluster names no type
    memory_mb: int = 0  # in all; 0: unknown
    status: NodeStatus = "offered"
    path: str = ""
    rung: str = ""
    precursor: str | None = None
    # precursors that failed before its trials read storage, or hosts before a back-off
    staging: Tries = Tries(limit=3)
    best_effort: bool = False  # its jobs may be preempted
    hosted: bool = False  # its trials cannot see what a precursor stages: one job stages and hosts them
    unseen: bool = False  # its trials saw nothing of what a precursor had staged, once
    deaths: int = 0  # of trials there that count, without a shard done in between
    died_at: float | None = None  # unix seconds of the last
    back_offs: int = 0  # how often it was in back-off
    back_off_until: float | None = None  # unix seconds; while status is "back-off"
    why: str = ""
    at_fault: bool = False  # its back-off is for a fault of its own, certainly
    trials: dict[str, Trial] = field(default_factory=dict)  # that live there, by name

    @property
    def in_use(self) -> bool:
        """Its GPUs are this evaluation's to use."""
        return self.lanes > 0 and self.status in IN_USE

    @property
    def lane_names(self) -> list[str]:
        return [str(LaneId(self.name, number)) for number in range(self.lanes)]

    @property
    def busy_lanes(self) -> set[str]:
        """Lanes with a living trial."""
        return {trial.lane for trial in self.trials.values()}

    @property
    def running_lanes(self) -> int:
        """Lanes whose trials the cluster has started: a job that hosts trials runs with all of its own."""
        return sum(trial.running for trial in self.trials.values())


@dataclass(slots=True, kw_only=True)
class Trial:
    """A trial from its job's intent on; it stays known after its end."""

    name: str
    job: str
    member: int  # of the job; a host runs all of its trials as member 0
    lane: str
    running: bool = False  # the cluster has started it
    cancelled: bool = False  # the coordinator ended it: its death counts against no node and no shard


@dataclass(slots=True, kw_only=True)
class JobInfo:
    """A job of this evaluation, from the intent to its end."""

    job: Job
    entries: tuple[int, ...] = ()
    lanes: tuple[str, ...] = ()  # trial jobs: member -> lane
    trials: tuple[str, ...] = ()  # trial jobs: member -> trial name
    precursor: str | None = None  # trial jobs: the precursor whose staged weights they read
    submissions: Tries = Tries(limit=8)  # that were in doubt and had not happened
    # by a limit on jobs
    refusals: Tries = Tries(first=HELD_SECONDS, longest=MAX_HELD_SECONDS)
    phase: JobPhase = "intended"
    job_id: str = ""
    changed_at: float = 0.0
    members: dict[int, MemberPhase] = field(default_factory=dict)
    released_at: float | None = None
    refused: str = ""
    unlaunched: str = ""  # the node that could not launch it

    @property
    def live(self) -> bool:
        return self.phase != "ended"


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
    seconds: float = 0.0  # predicted


@dataclass(slots=True, kw_only=True)
class Conversion:
    """Part of `builds`. "running": from the intent to the job's end; "made": until its folder was inspected."""

    status: Literal["none", "due", "running", "made", "done"] = "none"
    announced: CheckpointSpec | None = None  # what is converted; `record.checkpoint` is then what came of it
    path: str = ""
    tries: Tries = Tries(limit=3)  # jobs that ended without an outcome


@dataclass(slots=True, kw_only=True)
class Builds:
    """Part of `builds`, beside `State.entries`."""

    looked_up: bool = False  # request sets on disk were looked for
    # build jobs in a row that ended without an outcome and had nothing built; after one that its node could not launch, the
    # next comes with a pause. For each job that runs at a time, six: then all entries fail
    fruitless: Tries = Tries(first=HELD_SECONDS, longest=600.0)


@dataclass(slots=True, kw_only=True)
class Nodes:
    """Part of `nodes`."""

    by_name: dict[str, NodeUse] = field(default_factory=dict)
    largest_mb: int = 0  # memory of the largest node that was offered or could be; 0: unknown
    content: str | None = None  # of the checkpoint's whole files, by the hook or the first precursor
    paused_at: float | None = (
        None  # unix seconds since when a person lets it use none; None: it is not paused
    )
    paused: str = ""  # the person's reason
    most: int = 0  # nodes in use at once until `limited` is due, after a limit on jobs was reached
    limited: Tries = Tries(first=FEWER_SECONDS, longest=8 * 3600.0)
    # times that every node was in back-off, without a shard done in between: 31 minutes in all
    all_backed_off: Tries = Tries(limit=6)


@dataclass(slots=True, kw_only=True)
class Jobs:
    """Part of `jobs`."""

    by_name: dict[str, JobInfo] = field(default_factory=dict)
    live: dict[str, JobInfo] = field(default_factory=dict)  # not ended
    held: dict[str, str] = field(
        default_factory=dict
    )  # intended job that a limit on jobs keeps out -> its words
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
    idle: dict[str, Trial] = field(default_factory=dict)  # living ones that have not started or are cancelled
    on_lane: dict[str, int] = field(default_factory=dict)  # lane -> trials that it has had
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
    workers: dict[str, JobInfo] = field(default_factory=dict)  # worker jobs that have not ended
    # worker jobs since a metric job was last done
    fruitless: Tries = Tries(limit=20, first=2.0, longest=60.0)


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
    def may_use_nodes(self) -> bool:
        """Its end has not begun, and it is not paused."""
        return self.ending.phase == Phase.RUNNING and self.nodes.paused_at is None

    @property
    def winding_down(self) -> bool:
        return self.ending.phase >= Phase.WRITING

    @property
    def plans_later(self) -> bool:
        """No shard is to do, and a plan is to come: it may be worth any number of lanes."""
        return not self.shards.todo and (self.plan_to_come or not self.shards.leaves)

    @property
    def plan_to_come(self) -> bool:
        """Is an entry not built, or not planned?"""
        return bool(self.unbuilt or self.unplanned)

    @property
    def unbuilt(self) -> list[EntryState]:
        return [entry for entry in self.entries if entry.status in ("unbuilt", "building")]

    @property
    def unplanned(self) -> list[EntryState]:
        """Built entries of which a leaf task is not planned."""
        return [e for e in self.entries if e.status == "built" and len(e.leaves) < len(e.sets)]

    @property
    def can_work(self) -> bool:
        """Its checkpoint and request sets are known, and its end has not begun: nodes and workers are of use."""
        return self.builds.looked_up and self.conversion.status in ("none", "done") and not self.winding_down

    @property
    def waits_for_workers(self) -> bool:
        """Metric jobs are open, and no worker is there or on its way."""
        if not self.scoring.outstanding or not self.can_work:
            return False
        return not self.scoring.workers

    def wakes(self, now: float) -> bool:
        """Is a pause over for which something waits? An evaluation that waits for it alone has no other event."""
        times = [self.jobs.by_name[name].refusals for name in self.jobs.held]
        if self.can_work and any(entry.status == "unbuilt" for entry in self.entries):
            times += [self.builds.fruitless] if self.builds.fruitless.failures else []
        if self.waits_for_workers:
            times.append(self.scoring.fruitless)
        return any(tries.due(now) for tries in times)

    def lanes_to_do(self) -> set[str]:
        """Lanes whose own shards are to do. O(shards): for rules without stealing, and only while a lane may be idle."""
        return {s.lane for s in self.shards.by_name.values() if s.frame is None and not s.quarantined}

    @property
    def queue_epoch(self) -> str:
        return f"plan-{self.plan.count}"

    @property
    def all_terminal(self) -> bool:
        """Every entry that is asked is scored or has failed."""
        return all(entry.terminal for entry in self.entries)

    def live_jobs(self, purpose: str) -> list[JobInfo]:
        return [info for info in self.jobs.live.values() if info.job.purpose == purpose]

    def jobs_on(self, node: str) -> list[JobInfo]:
        """Jobs for this node that have not ended."""
        return [info for info in self.jobs.live.values() if info.job.node == node]

    @property
    def held_nodes(self) -> list[NodeUse]:
        """Nodes with GPUs that are staging or ready."""
        return [n for n in self.nodes.by_name.values() if n.lanes and n.status in ("staging", "ready")]

    @property
    def lanes_in_use(self) -> int:
        return sum(node.lanes for node in self.held_nodes)

    @property
    def running_trials(self) -> set[str]:
        return {name for name, trial in self.trials.live.items() if trial.running}

    @property
    def able_trials(self) -> int:
        """Living trials that the coordinator has not cancelled."""
        return len(self.trials.live) - sum(trial.cancelled for trial in self.trials.idle.values())

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
        in_use = any(n.in_use for n in self.nodes.by_name.values())
        known = [at for at in times if at is not None]
        return None if in_use or not known else min(known)

    def failed_entries(self) -> dict[int, str]:
        return {e.index: e.error for e in self.entries if e.status == "failed"}
