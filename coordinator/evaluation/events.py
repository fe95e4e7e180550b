"""Events of one evaluation: facts in the past tense, each with the time at which the coordinator learned of it.

Rule: an event is in the journal before any effect of it. A later process reads the journal, so events are pydantic
records. Called from: `step`, which looks up the subject of an event; `coordinator.runtime`, which makes most of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from coordinator.cluster import Job
from coordinator.evaluation.records import EvaluationRecord
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Outcome
from evaljobs.contract.specs import CheckpointSpec, FrameRef, Record


class Event(Record):
    at: float  # unix seconds, when the coordinator learned of it


class Accepted(Event):
    """The first event of a journal."""

    kind: Literal["accepted"] = "accepted"
    record: EvaluationRecord
    # raised where lines mean something else in their old shape; absent before `JobIntended` was written
    journal_format: Literal[1] = 1
    signs: bool = False  # the coordinator leaves signs: the journal's mtime is the last of them
    code: str = ""  # version and commit of the coordinator; "" in older journals


class CheckpointConverted(Event):
    """What the conversion left was looked at: the checkpoint that is evaluated; None: `error` says why it is none."""

    kind: Literal["checkpoint-converted"] = "checkpoint-converted"
    checkpoint: CheckpointSpec | None = None
    error: str = ""


class RequestSetsFound(Event):
    """Which entries' request sets are on disk already, whole and unchanged: entry -> {leaf task: folder}."""

    kind: Literal["request-sets-found"] = "request-sets-found"
    sets: dict[int, dict[str, str]]
    folders: dict[int, str]  # entry -> where its sets lie or shall be built
    batch_size: int | Literal["auto"]


class Offer(Record):
    """GPUs of a node that this evaluation may use. `memory_mb`: free; `node_memory_mb`: in all, 0 where it is unknown."""

    node: str
    gpus: int
    memory_mb: int
    node_memory_mb: int = 0
    gpu_type: str = ""
    best_effort: bool = False  # jobs there may be preempted


class NodesOffered(Event):
    kind: Literal["nodes-offered"] = "nodes-offered"
    offers: tuple[Offer, ...]


class MemoryOffered(Event):
    """Nodes whose GPUs are busy with other jobs and whose memory has room: weights may be prefetched there."""

    kind: Literal["memory-offered"] = "memory-offered"
    nodes: tuple[str, ...]


class BackOffOver(Event):
    """A time is over: the back-off of these nodes, the pause between metric worker jobs (`workers`), the pause of jobs that
    a limit on jobs keeps out (`held`), or a precursor's time, which shall be renewed (`precursors`).
    """

    kind: Literal["back-off-over"] = "back-off-over"
    nodes: tuple[str, ...] = ()
    workers: bool = False
    held: bool = False
    precursors: bool = False


class NodeWithdrawn(Event):
    """The node shall be used no more: it drained, died or is cordoned."""

    kind: Literal["node-withdrawn"] = "node-withdrawn"
    node: str
    reason: str


class JobIntended(Event):
    """The evaluation decided to submit this job. A replay makes the job from this event and decides nothing anew.

    `entries`: of a build job; `lanes`, `trials`: of a trial or host job, one a member; `precursor`: the job whose staged
    weights the trials read; `node_lanes`: the lanes that the evaluation uses on the job's node from now on, 0 for a
    prefetch or a job without a node.
    """

    kind: Literal["job-intended"] = "job-intended"
    job: Job
    entries: tuple[int, ...] = ()
    lanes: tuple[str, ...] = ()
    trials: tuple[str, ...] = ()
    precursor: str | None = None
    node_lanes: int = 0


class ShardsDealt(Event):
    """The evaluation moved shards of lanes that it lost: shard -> its lane from now on. A replay decides nothing anew."""

    kind: Literal["shards-dealt"] = "shards-dealt"
    lanes: dict[str, str]


class TokenBudgetReduced(Event):
    """A unit of this entry did not fit a GPU's memory: its tasks start again with this budget. A replay decides nothing anew."""

    kind: Literal["token-budget-reduced"] = "token-budget-reduced"
    entry: int
    token_budget: int


class JobSubmitted(Event):
    kind: Literal["job-submitted"] = "job-submitted"
    job: str
    job_id: str


class JobNotSubmitted(Event):
    """Submission failed. maybe_done: it may have happened all the same; refused: asking again is useless, also of a job in
    the queue that its partition will never start; of_node: for the job's node alone; limited: a limit on jobs is
    reached, it surely did not happen, and it is tried again after a pause.
    """

    kind: Literal["job-not-submitted"] = "job-not-submitted"
    job: str
    error: str
    maybe_done: bool = False
    refused: bool = False
    of_node: bool = False
    limited: bool = False


class LimitReached(Event):
    """Builds or trials wait for a limit on this user's jobs (`why`: the cluster's word), which idle jobs of the evaluation
    fill.
    """

    kind: Literal["limit-reached"] = "limit-reached"
    why: str


class JobStarted(Event):
    kind: Literal["job-started"] = "job-started"
    job: str
    index: int = 0
    node: str | None = None
    started_at: float | None = None
    submitted_at: float | None = None
    ends_at: float | None = None  # unix seconds, by its time limit; None: unknown, or in older journals
    waited_for: str = ""  # the cluster's last reason before it started


class JobEnded(Event):
    """A member of a job is over; `state` is the cluster's word. lost: it vanished from a successful listing.

    `shard`: the one that its trial ran, by the queue. `unlaunched`: the node, where it has no log: Slurm gave it to the
    node and ended it before it began.
    """

    kind: Literal["job-ended"] = "job-ended"
    job: str
    index: int = 0
    state: str
    lost: bool = False
    shard: str | None = None
    unlaunched: str = ""


class OutcomeSeen(Event):
    """`left_at`: unix seconds at which its file was written, at most `at`. Both differ where a job ended while no
    coordinator ran.
    """

    kind: Literal["outcome-seen"] = "outcome-seen"
    outcome: Outcome
    left_at: float | None = None  # None: in journals of versions before 0.2.0


class PlannedLeaf(Record):
    """A leaf task as planned: its shards, and for an `execute` metric the documents of each shard.

    `executes_at_once`: its `execute` jobs that get anywhere at the same time (a judge's endpoint sets it); 0: no limit.
    `metric_seconds`: what its metric is predicted to take for all documents.
    """

    task: str
    entry: int
    key: str
    folder: str
    executes: bool
    sampled: bool
    documents: int
    shards: tuple[str, ...]
    shard_documents: tuple[tuple[int, ...], ...] = ()
    executes_at_once: int = 0
    metric_seconds: float = 0.0

    @property
    def cut(self) -> str:
        """Of its shards (`ShardId`)."""
        return ShardId.parse(self.shards[0]).cut if self.shards else ""


class PlannedLane(Record):
    """Shards dealt to one lane, in order, with predicted seconds and the rank that every lane compares by."""

    lane: str
    node: str
    shards: tuple[tuple[str, float, float], ...]  # (shard, rank: lower is sooner, predicted seconds)


class Planned(Event):
    kind: Literal["planned"] = "planned"
    batch_size: int
    leaves: tuple[PlannedLeaf, ...]
    lanes: tuple[PlannedLane, ...]
    predicted_makespan_seconds: float
    lower_bound_seconds: float
    gpu_seconds: float
    # at the 95th percentile: inference on one lane after the other, and one trial's load; 0: not predicted
    work_seconds_95: float = 0.0
    load_seconds_95: float = 0.0
    workers: int = 0  # for metrics, to start with; 0: not predicted
    sigma: float = 0.0  # spread of the log of predicted seconds; 0: not predicted


class ResponsesFound(Event):
    """Responses of earlier evaluations that answer these requests, in files of this one's folder; none: all are to be asked.

    `scores`: entry -> score file, where the score keys are equal, too. `sources`: leaf task -> the earlier evaluation.
    """

    kind: Literal["responses-found"] = "responses-found"
    leaves: tuple[PlannedLeaf, ...] = ()
    shards: tuple[tuple[str, FrameRef], ...] = ()
    scores: dict[int, str] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)


class PlanFailed(Event):
    kind: Literal["plan-failed"] = "plan-failed"
    error: str


class ShardsDumped(Event):
    """Whole shards found in response files, checksums right."""

    kind: Literal["shards-dumped"] = "shards-dumped"
    shards: tuple[tuple[str, FrameRef], ...]


class ShardCorrupted(Event):
    """A shard's record turned out unreadable after it was counted: it must run again."""

    kind: Literal["shard-corrupted"] = "shard-corrupted"
    shard: str
    error: str


class QueueLost(Event):
    """Redis does not hold this evaluation's queue (it restarted empty, or was never filled)."""

    kind: Literal["queue-lost"] = "queue-lost"


class ShardsStray(Event):
    """Shards neither queued, claimed by a living trial, nor done. `again`: those that were stray before, and queued since."""

    kind: Literal["shards-stray"] = "shards-stray"
    shards: tuple[str, ...]
    again: tuple[str, ...] = ()


class MetricJobsLost(Event):
    """Metric jobs without an outcome that RQ does not know (any more)."""

    kind: Literal["metric-jobs-lost"] = "metric-jobs-lost"
    jobs: tuple[str, ...]


class MetricJobsDied(Event):
    """Metric jobs without an outcome that RQ has given up: their workers died with them, again and again. name -> why."""

    kind: Literal["metric-jobs-died"] = "metric-jobs-died"
    jobs: dict[str, str]


class TrialHung(Event):
    """A running trial that has made no progress for too long."""

    kind: Literal["trial-hung"] = "trial-hung"
    trial: str
    shard: str | None
    seconds: float


class StragglersFound(Event):
    """Trials that are slower than the prior by three sigma while others are not: trial -> times as long as the others."""

    kind: Literal["stragglers-found"] = "stragglers-found"
    trials: dict[str, float]


class CancelAsked(Event):
    kind: Literal["cancel-asked"] = "cancel-asked"
    reason: str


class RetryAsked(Event):
    """Failed entries shall be tried again, and those scored that have items without a score."""

    kind: Literal["retry-asked"] = "retry-asked"


class PriorityAsked(Event):
    """It goes before evaluations of a lower priority from now on."""

    kind: Literal["priority-asked"] = "priority-asked"
    priority: int


class AskedFor(Event):
    """A further user asks for the evaluation. Of a cancelled one this user is the only asker from now on."""

    kind: Literal["asked-for"] = "asked-for"
    user: str


class AskWithdrawn(Event):
    """One of several users who asked for the evaluation cancelled it: it goes on for the others."""

    kind: Literal["ask-withdrawn"] = "ask-withdrawn"
    user: str


class Restarted(Event):
    """A coordinator took over: effects that can be repeated are repeated, submissions are looked up first.

    `seen_at`: unix seconds of the last sign of the coordinator before it, by the journal's age. None: that one left no
    signs, or it is this process, where the evaluation was parked.
    """

    kind: Literal["restarted"] = "restarted"
    seen_at: float | None = None
    # these three as of `Accepted`
    journal_format: Literal[1] = 1
    signs: bool = False
    code: str = ""


class ResultsWritten(Event):
    kind: Literal["results-written"] = "results-written"


AnyEvent = (
    Accepted
    | CheckpointConverted
    | RequestSetsFound
    | NodesOffered
    | MemoryOffered
    | BackOffOver
    | NodeWithdrawn
    | JobIntended
    | ShardsDealt
    | TokenBudgetReduced
    | JobSubmitted
    | JobNotSubmitted
    | LimitReached
    | JobStarted
    | JobEnded
    | OutcomeSeen
    | Planned
    | ResponsesFound
    | PlanFailed
    | ShardsDumped
    | ShardCorrupted
    | QueueLost
    | ShardsStray
    | MetricJobsLost
    | MetricJobsDied
    | TrialHung
    | StragglersFound
    | CancelAsked
    | RetryAsked
    | PriorityAsked
    | AskedFor
    | AskWithdrawn
    | Restarted
    | ResultsWritten
)
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")])
