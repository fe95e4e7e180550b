"""State of one evaluation: changed in place by the subjects, read by everything else.

Rule: each subject has one part of the state, which only its own module writes; others call that module's public functions. No
event scans everything that ever ran. Rules count nodes and entries once per look. Replaying the journal rebuilds the
state exactly. Called from: the subjects, and every reader (allocation, runtime, report, cli).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import inf
from typing import Literal, NamedTuple

from coordinator.decide.evaluation.events import PlannedLeaf
from coordinator.decide.evaluation.records import EvaluationRecord, ScreenScore, cut_of
from coordinator.site.cluster import Job
from evaljobs.contract.names import LaneId
from evaljobs.contract.outcomes import TooLarge
from evaljobs.contract.specs import CheckpointSpec, FrameRef

EntryStatus = Literal["unbuilt", "building", "built", "scoring", "scored", "failed", "not asked"]
NodeStatus = Literal["offered", "staging", "ready", "back-off", "withdrawn"]
JobPhase = Literal["intended", "uncertain", "submitted", "ended"]
MemberPhase = Literal["pending", "running", "ended"]
IN_USE = ("offered", "staging", "ready")  # statuses of nodes in use or prefetched on


HELD_SECONDS = 30.0  # pause before a job that a limit kept out is submitted again; doubled each time
MAX_HELD_SECONDS = 1800.0  # longest such pause
FEWER_SECONDS = 1800.0  # how long an evaluation uses fewer nodes after a limit kept it out; doubled each time


class IllegalEventError(Exception):
    """An event that is impossible in this state: a bug of the caller, never the operator's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """Consecutive failures: retried after `first` seconds, doubled each time up to `longest`, at most `limit` times."""

    limit: float = inf
    first: float = 0.0
    longest: float = inf
    failures: int = 0
    due_at: float = 0.0  # unix seconds of the next attempt

    def failed(self, now: float = 0.0) -> Tries:
        """Return this with one more failure; the pause begins at `now` (unix seconds)."""
        pause = min(self.first * 2.0 ** min(self.failures, 60), self.longest)
        return replace(self, failures=self.failures + 1, due_at=now + pause)

    def due(self, now: float) -> bool:
        return now >= self.due_at

    @property
    def given_up(self) -> bool:
        return self.failures >= self.limit

    @property
    def anew(self) -> Tries:
        """Return this without failures."""
        return replace(self, failures=0, due_at=0.0) if self.failures else self


class Phase(IntEnum):
    """Progress of an evaluation. Phases follow one another; only a retry goes back."""

    RUNNING = 0
    CLOSING = 1  # there is a reason to end: entries that it applies to fail, the others are scored
    WRITING = 2  # every entry is scored or has failed; results are being written, jobs released or cancelled
    LEAVING = 3  # results are written; jobs are left
    ENDED = 4


class Look(NamedTuple):
    """Scored documents of an entry in screen mode."""

    blocks: int  # of documents
    result_file: str


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
    )  # leaf task -> its key in `Shards.leaves`, once planned
    build_job: str = ""  # the last job that was to build it
    building: Tries = Tries(limit=3)  # builds that failed, or that were in progress when their job ended
    score_jobs: int = 0
    looked: int = 0  # in screen mode: blocks of documents covered by the last look
    look: Look | None = None  # scored, but not judged yet
    screened: ScreenScore | None = None  # the answer to its question
    scoring: Tries = Tries(limit=3)  # score jobs that failed
    error: str = ""
    token_budget: int | None = None  # reduced after a unit did not fit a GPU's memory; None: the evaluation's
    result_file: str = ""
    unscored: Mapping[str, str] = field(default_factory=dict)  # items left out of all means, with the reason

    @property
    def terminal(self) -> bool:
        return self.status in ("scored", "failed", "not asked")


@dataclass(slots=True, kw_only=True)
class LeafState:
    """A leaf task after planning. `waiting`: missing shards of each document."""

    planned: PlannedLeaf
    todo: int
    # entries that its shards answer: those with equal requests
    entries: list[int] = field(default_factory=list)
    waiting: dict[int, int] = field(default_factory=dict)
    # document -> indices of its shards in the plan
    places: dict[int, list[int]] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)  # complete documents not yet given to an execute job
    executes: int = 0
    executed: int = 0

    @property
    def name(self) -> str:
        """Key in `Shards.leaves` and prefix of its shards' names."""
        return self.planned.name


UNREADABLE_TRIES = Tries(limit=3)  # runs of a shard that left no readable record


@dataclass(slots=True, kw_only=True)
class ShardState:
    leaf: str = ""  # name of its leaf task
    rank: float
    seconds: float
    lane: str
    documents: tuple[int, ...] = ()
    frame: FrameRef | None = None  # location of its responses, once on disk
    died_on: list[str] = field(default_factory=list)  # nodes of trials whose deaths with this shard count
    error: str = ""  # of the last such death
    unread: Tries = UNREADABLE_TRIES
    quarantined: bool = False
    undecided: bool = False  # in screen mode: a look has yet to say whether it is needed

    @property
    def is_to_do(self) -> bool:
        """Whether it is neither done nor quarantined."""
        return self.frame is None and not self.quarantined


@dataclass(slots=True, kw_only=True)
class NodeUse:
    """A node that this evaluation uses. `lanes`: trials that fit on it at once; 0: weights are prefetched there, once, before
    its GPUs are offered ("withdrawn": that failed, or was given up).
    """

    name: str
    lanes: int
    gpu_type: str = ""  # from the cluster
    gpu_name: str = ""  # from its jobs, if the cluster names no type
    memory_mb: int = 0  # total; 0: unknown
    status: NodeStatus = "offered"
    path: str = ""
    rung: str = ""
    precursor: str | None = None
    # precursors that failed before its trials read from storage, or hosts before a back-off
    staging: Tries = Tries(limit=3)
    best_effort: bool = False  # its jobs may be preempted
    hosted: bool = False  # its trials cannot see what a precursor stages: one job stages and hosts them
    unseen: bool = False  # its trials have once seen nothing of what a precursor had staged
    deaths: int = 0  # deaths of trials there that count, with no shard finished in between
    died_at: float | None = None  # unix seconds of the last death
    back_offs: int = 0
    back_off_until: float | None = None  # unix seconds; while status is "back-off"
    why: str = ""
    at_fault: bool = False  # the fault is certainly the node's own
    trials: dict[str, Trial] = field(default_factory=dict)  # living trials, by name

    @property
    def in_use(self) -> bool:
        """Whether this evaluation uses its GPUs."""
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
        """Number of lanes whose trials the cluster has started; all lanes of a running host."""
        return sum(trial.running for trial in self.trials.values())


@dataclass(slots=True, kw_only=True)
class Trial:
    """A trial, from its job's intent on; kept after its end."""

    name: str
    job: str
    member: int  # of the job; a host runs all trials as member 0
    lane: str
    running: bool = False
    cancelled: bool = False  # ended by the coordinator: its death counts against no node and no shard


@dataclass(slots=True, kw_only=True)
class JobInfo:
    """A job of this evaluation, from its intent to its end."""

    job: Job
    entries: tuple[int, ...] = ()
    lanes: tuple[str, ...] = ()  # trial jobs: member -> lane
    trials: tuple[str, ...] = ()  # trial jobs: member -> trial name
    precursor: str | None = None  # trial jobs: the precursor whose staged weights they read
    submissions: Tries = Tries(limit=8)  # submissions in doubt that turned out not to have happened
    # refusals by a limit on jobs
    refusals: Tries = Tries(first=HELD_SECONDS, longest=MAX_HELD_SECONDS)
    phase: JobPhase = "intended"
    job_id: str = ""
    changed_at: float = 0.0
    members: dict[int, MemberPhase] = field(default_factory=dict)
    released_at: float | None = None
    refused: str = ""
    unlaunched: str = ""  # node that could not launch it

    @property
    def live(self) -> bool:
        return self.phase != "ended"


@dataclass(slots=True, kw_only=True)
class MetricState:
    """An execute or score job given to RQ. `done` once its outcome has been seen."""

    name: str
    kind: Literal["execute", "score"]
    entry: int
    task: str = ""  # leaf task of an execute job
    documents: tuple[int, ...] = ()  # of an execute job: complete documents of `task`
    done: bool = False
    enqueued_at: float = 0.0
    seconds: float = 0.0  # predicted
    blocks: int = 0  # of a look of screen mode: of documents that it scores


@dataclass(slots=True, kw_only=True)
class Conversion:
    """Part of `builds`. "running": from the intent to the job's end; "made": until its folder is inspected."""

    status: Literal["none", "due", "running", "made", "done"] = "none"
    # the checkpoint to convert; `record.checkpoint` is then the converted one
    announced: CheckpointSpec | None = None
    path: str = ""
    tries: Tries = Tries(limit=3)  # jobs that ended without an outcome


@dataclass(slots=True, kw_only=True)
class Builds:
    """Part of `builds`, beside `State.entries`."""

    looked_up: bool = False  # request sets on disk have been looked up
    # consecutive build jobs that ended without an outcome or anything built; the pause applies after a node could not launch
    # one. Six for each job that runs at once: then all entries fail
    fruitless: Tries = Tries(first=HELD_SECONDS, longest=600.0)


@dataclass(slots=True, kw_only=True)
class Nodes:
    """Part of `nodes`."""

    by_name: dict[str, NodeUse] = field(default_factory=dict)
    largest_mb: int = 0  # memory of the largest node that was or could be offered; 0: unknown
    # digest of the checkpoint's complete files, from the hook or the first precursor
    content: str | None = None
    paused_at: float | None = None  # unix seconds at which a person paused it; None: it is not paused
    paused: str = ""  # the person's reason
    most: int = 0  # limit on nodes in use until `limited` is due, after a limit on jobs was reached
    limited: Tries = Tries(first=FEWER_SECONDS, longest=8 * 3600.0)
    # times that every node was in back-off, with no shard finished in between: 31 minutes in total
    all_backed_off: Tries = Tries(limit=6)


@dataclass(slots=True, kw_only=True)
class Jobs:
    """Part of `jobs`."""

    by_name: dict[str, JobInfo] = field(default_factory=dict)
    live: dict[str, JobInfo] = field(default_factory=dict)
    held: dict[str, str] = field(
        default_factory=dict
    )  # intended job that a limit on jobs keeps out -> the cluster's message
    unlaunched: set[str] = field(
        default_factory=set
    )  # nodes that could not launch a job: the next ones avoid them
    # (kind, detail) -> number of jobs so named
    attempts: dict[tuple[str, str], int] = field(default_factory=dict)
    doublings: dict[str, int] = field(default_factory=dict)  # memory setting -> times that it was doubled


@dataclass(slots=True, kw_only=True)
class Trials:
    """Part of `trials`."""

    by_name: dict[str, Trial] = field(default_factory=dict)
    live: dict[str, Trial] = field(default_factory=dict)
    idle: dict[str, Trial] = field(default_factory=dict)  # living ones that have not started or are cancelled
    on_lane: dict[str, int] = field(default_factory=dict)  # lane -> number of its trials so far
    stragglers: dict[str, float] = field(default_factory=dict)  # trial -> slowdown compared with the others
    deaths: int = 0  # consecutive deaths of trials without a shard, with none finished in between


@dataclass(slots=True, kw_only=True)
class Shards:
    """Part of `shards`."""

    by_name: dict[str, ShardState] = field(default_factory=dict)
    leaves: dict[str, LeafState] = field(default_factory=dict)
    todo: int = 0  # neither done nor quarantined, withdrawn or undecided
    undecided: int = 0  # to do only if a look says so; queued for trials that run
    # (leaf task name, cut) pairs that were planned and did not fit a GPU's memory: their answers no longer count
    retired: set[tuple[str, str]] = field(default_factory=set)
    # entry -> the unit that did not fit, until its token budget is reduced
    too_large: dict[int, TooLarge] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Plan:
    """Part of `shards`: requests to the planner, and its predictions."""

    pending: bool = False  # also while responses of earlier evaluations are looked up
    alike: bool = False  # from the last `ResponsesFound`
    # (entry, leaf task) pairs already looked up
    looked_for: set[tuple[int, str]] = field(default_factory=set)
    # leaf task name -> evaluation that its responses come from
    reused: dict[str, str] = field(default_factory=dict)
    # entries whose scores come from that evaluation, too
    reused_scores: set[int] = field(default_factory=set)
    made_at: float | None = None
    count: int = 0
    predicted_makespan_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    work_seconds_95: float = 0.0  # see `Planned`
    load_seconds_95: float = 0.0
    sigma: float = 0.0
    workers: int = 0  # metric workers that the plans justify; 0: not predicted


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
    reason: str = ""  # why it ends before its work is done; "": it does not
    inference_only: bool = False  # `reason` applies to inference only: entries with all responses are scored
    no_scores: bool = False  # `reason` also drops existing scores
    cancelled: str = ""  # reason given by the person who cancelled it
    retried: bool = False  # by a person, after it had ended
    retry_waits: bool = False  # a retry was requested while it was ending: it begins at the end
    ended_at: float | None = None  # unix seconds

    def close(
        self, reason: str, *, inference_only: bool = False, no_scores: bool = False, instead: bool = False
    ) -> None:
        """End for this reason. The first reason is kept, unless this one comes `instead` or drops scores."""
        if not self.reason or instead or no_scores:
            self.reason, self.inference_only, self.no_scores = reason, inference_only, no_scores
            self.phase = max(self.phase, Phase.CLOSING)


@dataclass(slots=True, kw_only=True)
class State:
    """The complete state of one evaluation."""

    record: EvaluationRecord
    entries: list[EntryState]
    batch_size: int | Literal["auto"]
    token_budget: int | Literal["auto"] | None = None  # of fast mode
    seen: set[tuple[str, str]] = field(default_factory=set)  # (kind, name) of outcomes already handled
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
        """Return the cut of an entry's requests, as `records.cut_of`."""
        budget = entry.token_budget or self.token_budget
        return cut_of(self.record.suite, entry.index, self.batch_size, budget, self.record.order)

    @property
    def ended_at(self) -> float | None:
        """Unix seconds; None while it is not over."""
        return self.ending.ended_at

    @property
    def converted_digest(self) -> str | None:
        """Digest of the announced checkpoint, which names its converted copy; None without a conversion."""
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
        """Whether no shard is to do but a plan is to come, which may need any number of lanes."""
        return not self.shards.todo and (self.plan_to_come or not self.shards.leaves)

    @property
    def plan_to_come(self) -> bool:
        """Whether an entry is not built, or not planned."""
        return bool(self.unbuilt or self.unplanned)

    @property
    def unbuilt(self) -> list[EntryState]:
        return [entry for entry in self.entries if entry.status in ("unbuilt", "building")]

    @property
    def unplanned(self) -> list[EntryState]:
        """Built entries with an unplanned leaf task."""
        return [e for e in self.entries if e.status == "built" and len(e.leaves) < len(e.sets)]

    @property
    def can_work(self) -> bool:
        """Whether nodes and workers are of use: checkpoint and request sets are known, and the end has not begun."""
        return self.builds.looked_up and self.conversion.status in ("none", "done") and not self.winding_down

    @property
    def waits_for_workers(self) -> bool:
        """Whether metric jobs are open and no worker runs or is on its way."""
        if not self.scoring.outstanding or not self.can_work:
            return False
        return not self.scoring.workers

    def wakes(self, now: float) -> bool:
        """Return whether a pause that something waits for is over. An evaluation that waits only for that has no other event."""
        times = [self.jobs.by_name[name].refusals for name in self.jobs.held]
        if self.can_work and any(entry.status == "unbuilt" for entry in self.entries):
            times += [self.builds.fruitless] if self.builds.fruitless.failures else []
        if self.waits_for_workers:
            times.append(self.scoring.fruitless)
        return any(tries.due(now) for tries in times)

    def lanes_to_do(self) -> set[str]:
        """Lanes whose own shards are to do. O(shards): for rules without stealing, and only while a lane may be idle."""
        return {s.lane for s in self.shards.by_name.values() if s.is_to_do and not s.undecided}

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
        """Return the jobs for this node that have not ended."""
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
        """Cores of the metric workers that the plans justify (the maximum, if nothing was predicted)."""
        options = self.record.options
        return max(1, (self.plan.workers or options.workers) * options.metric.cpus)

    @property
    def unscored_items(self) -> int:
        return sum(len(e.unscored) for e in self.entries if e.status == "scored")

    @property
    def waits_until(self) -> float | None:
        """Unix seconds at which the first node returns, while there is work and all nodes are in back-off; otherwise None."""
        if not (self.shards.todo or self.plans_later) or self.winding_down:
            return None
        times = [n.back_off_until for n in self.nodes.by_name.values() if n.status == "back-off"]
        in_use = any(n.in_use for n in self.nodes.by_name.values())
        known = [at for at in times if at is not None]
        return None if in_use or not known else min(known)

    def failed_entries(self) -> dict[int, str]:
        return {e.index: e.error for e in self.entries if e.status == "failed"}
