"""Events of one evaluation: facts in the past tense, each with the time at which the coordinator learned of it.

Rule: an event is journalled before it has any effect. Later processes read the journal, so events are pydantic records.
Called from: `step`, which looks up each event's handler; `coordinator.runtime`, which emits most of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from coordinator.decide.evaluation.records import JOURNAL_FORMAT, EvaluationRecord, ScreenScore
from coordinator.site.cluster import Job
from coordinator.site.diagnosis.diagnose import Diagnosis
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Outcome
from evaljobs.contract.specs import DEFERRED_BUILD, CheckpointSpec, FrameRef, Record


class Event(Record):
    at: float  # unix seconds at which the coordinator learned of it


class Accepted(Event):
    """The evaluation was accepted: the first event of a journal. The evaluation is now running, its entries unbuilt."""

    kind: Literal["accepted"] = "accepted"
    record: EvaluationRecord
    journal_format: Literal[10] = JOURNAL_FORMAT  # applies to every line of the journal
    code: str = ""  # version and commit of the coordinator; "": unknown


class CheckpointConverted(Event):
    """The output of the conversion was inspected. Request sets are looked up next; without a checkpoint it closes."""

    kind: Literal["checkpoint-converted"] = "checkpoint-converted"
    checkpoint: CheckpointSpec | None = None  # the checkpoint to evaluate; None: the conversion produced none
    error: str = ""  # why there is no checkpoint


class RequestSetsFound(Event):
    """The entries whose request sets are on disk, complete and unchanged; checked at the start and after some were removed.
    These entries are now built; build jobs for the others are due.
    """

    kind: Literal["request-sets-found"] = "request-sets-found"
    sets: dict[int, dict[str, str]]  # entry -> {leaf task: folder}
    folders: dict[int, str]  # entry -> folder of its sets, present or not
    batch_size: int | Literal["auto"]  # from the suite, or as probed by an earlier evaluation


class Offer(Record):
    """GPUs of a node that this evaluation may use."""

    node: str
    gpus: int  # free GPUs that it may use
    node_memory_mb: int = 0  # 0: unknown
    largest_mb: int = 0  # memory of the largest node that the settings allow; 0: unknown
    gpu_type: str = ""  # as in Gres; "": unknown
    best_effort: bool = False  # jobs may be preempted there


class NodesOffered(Event):
    """Nodes with free GPUs were offered. A new or withdrawn node becomes offered; a node in use may gain lanes."""

    kind: Literal["nodes-offered"] = "nodes-offered"
    offers: tuple[Offer, ...]  # one per node


class MemoryOffered(Event):
    """Nodes were found whose GPUs run other jobs but that have free memory. Weights may be prefetched there."""

    kind: Literal["memory-offered"] = "memory-offered"
    nodes: tuple[str, ...]


class BackOffOver(Event):
    """A back-off or pause has expired. A node in back-off becomes offered or ready; held jobs are submitted again."""

    kind: Literal["back-off-over"] = "back-off-over"
    nodes: tuple[str, ...] = ()  # nodes whose back-off has expired


class NodeWithdrawn(Event):
    """A node must not be used any more. It becomes withdrawn, its trials end, and it may be offered again."""

    kind: Literal["node-withdrawn"] = "node-withdrawn"
    node: str
    reason: str  # why: drained, failed or cordoned


class JobIntended(Event):
    """The evaluation decided to submit a job. A replay creates the job from this event without deciding again. The job is now
    intended; its entries are building, or its node is staging.
    """

    kind: Literal["job-intended"] = "job-intended"
    job: Job  # everything requested from the cluster
    entries: tuple[int, ...] = ()  # entries of a build job
    lanes: tuple[str, ...] = ()  # lanes of a trial or host job, one per member
    trials: tuple[str, ...] = ()  # trials of a trial or host job, one per member
    precursor: str | None = None  # job that staged the weights its trials read
    # lanes that the evaluation uses on this node from now on; 0: a prefetch, or a job without a node
    node_lanes: int = 0


class ShardsDealt(Event):
    """Shards were given to lanes: those of lost lanes, or those that a screen had held and that it needs now. A replay does not
    decide again. The shards are queued.
    """

    kind: Literal["shards-dealt"] = "shards-dealt"
    lanes: dict[str, str]  # shard -> its lane from now on


class TokenBudgetReduced(Event):
    """A unit of this entry did not fit a GPU's memory. A replay does not decide again. The entry is unbuilt, and its tasks
    restart with the smaller budget.
    """

    kind: Literal["token-budget-reduced"] = "token-budget-reduced"
    entry: int
    token_budget: int  # padded tokens per forward pass, from now on


class EntryFailed(Event):
    """The evaluation gave up on an entry. Its shards are withdrawn unless other entries need them."""

    kind: Literal["entry-failed"] = "entry-failed"
    entry: int
    error: str  # why it cannot be scored


class Closed(Event):
    """The evaluation cannot continue and closes. The first reason is kept."""

    kind: Literal["closed"] = "closed"
    reason: str
    inference_only: bool = False  # entries with all responses are still scored
    instead: bool = False  # replaces an earlier reason


class NodeBackedOff(Event):
    """A node failed and is in back-off. If no other node is in use the evaluation waits for one."""

    kind: Literal["node-backed-off"] = "node-backed-off"
    node: str
    why: str  # what failed
    until: float  # unix seconds
    at_fault: bool = False  # other evaluations would fail there too


class StorageChosen(Event):
    """Nothing is staged on this node. It is ready, and its trials read from storage."""

    kind: Literal["storage-chosen"] = "storage-chosen"
    node: str
    lanes: int  # lanes in use there


class PlanAsked(Event):
    """Responses of earlier evaluations, or a plan, were requested. Neither is requested again before the answer."""

    kind: Literal["plan-asked"] = "plan-asked"
    # (entry, leaf task) pairs to look up; empty: a plan is requested
    looked_for: tuple[tuple[int, str], ...] = ()


class TrialsCancelled(Event):
    """Trials that had not started have no shard left to run and are cancelled."""

    kind: Literal["trials-cancelled"] = "trials-cancelled"
    trials: tuple[str, ...]


class MetricEnqueued(Event):
    """A metric job was enqueued since the responses it needs are complete. An entry with a score job is scoring."""

    kind: Literal["metric-enqueued"] = "metric-enqueued"
    name: str
    entry: int
    task: str = ""  # leaf task of an execute job; "": a score job
    documents: tuple[int, ...] = ()  # documents of an execute job
    seconds: float = 0.0  # predicted
    blocks: int = 0  # of a score job in screen mode: of documents that it scores, from the first asked on


class ScreenJudged(Event):
    """A look of a screen evaluation was judged. A replay judges nothing again. The entry is scored and its other shards are
    withdrawn, or more of its documents are awaited.
    """

    kind: Literal["screen-judged"] = "screen-judged"
    entry: int  # of the suite
    settled: bool  # no further document is asked
    score: ScreenScore


class WeightsReleased(Event):
    """No shard needs the weights that these precursors hold. They exit, and their nodes may stage again."""

    kind: Literal["weights-released"] = "weights-released"
    jobs: tuple[str, ...]


class WorkDone(Event):
    """Every entry is scored or has failed. Results are written; jobs are released or cancelled."""

    kind: Literal["work-done"] = "work-done"


class Ended(Event):
    """No job is left, so the evaluation has ended; a pending retry begins."""

    kind: Literal["ended"] = "ended"


class JobSubmitted(Event):
    """The cluster accepted a job. It is submitted, or cancelled if it is no longer needed."""

    kind: Literal["job-submitted"] = "job-submitted"
    job: str
    job_id: str  # id given by the cluster


class JobNotSubmitted(Event):
    """A submission failed. Depending on the reason the job is intended again, uncertain, held or ended; after eight
    submissions in doubt the evaluation closes.
    """

    kind: Literal["job-not-submitted"] = "job-not-submitted"
    job: str
    error: str  # error message of the cluster
    # absent: it certainly did not happen; in-doubt: it may have happened; limit: a limit on jobs was reached, retried after a
    # pause; refused: retrying is useless, everywhere or on the job's node alone (also a pending job that its partition will
    # never start)
    reason: Literal["absent", "in-doubt", "limit", "refused", "refused-on-node"] = "absent"


class LimitReached(Event):
    """Builds or trials are blocked by a limit on this user's jobs that idle jobs of the evaluation count towards. An idle
    node is withdrawn, workers exit, or fewer lanes are used.
    """

    kind: Literal["limit-reached"] = "limit-reached"
    why: str  # reason given by the cluster
    others: bool = False  # jobs of other evaluations are running, and will end


class JobStarted(Event):
    """A member of a job started. Metric workers may be intended."""

    kind: Literal["job-started"] = "job-started"
    job: str
    index: int = 0  # array index of the member
    node: str | None = None  # None: not listed
    started_at: float | None = None  # unix seconds, from the cluster
    submitted_at: float | None = None  # unix seconds, from the cluster
    waited_for: str = ""  # the cluster's last pending reason


class JobEnded(Event):
    """A member of a job ended. The job has once all members have; trials without an outcome are dead, their shards queued
    again.
    """

    kind: Literal["job-ended"] = "job-ended"
    job: str
    index: int = 0  # array index of the member
    state: str  # final state reported by the cluster
    lost: bool = False  # missing from a successful listing
    shard: str | None = None  # shard that its trial was running, according to the queue
    # node on which it ended before it started, without a log
    unlaunched: str = ""
    cause: Diagnosis | None = None  # why it ended without an outcome, from its log; None: not examined


class OutcomeSeen(Event):
    """A job left an outcome file. Depending on its kind, entries are built or scored, a node is ready, or a trial has ended;
    after a failure the job is retried, or the entry has failed.
    """

    kind: Literal["outcome-seen"] = "outcome-seen"
    outcome: Outcome  # contents of the file
    # unix seconds at which the file was written, no later than `at`; earlier if the job ended while no coordinator ran; None:
    # unknown
    left_at: float | None = None
    cause: Diagnosis | None = None  # why the job failed; None: it did not


class PlannedLeaf(Record):
    """A leaf task as planned."""

    task: str
    # prefix of its shards' names: the task's, or "task#2" if another entry makes other requests of the same task
    name: str
    entry: int
    key: str  # request digest
    folder: str  # of its request set
    executes: bool  # its metric runs programs or calls a judge
    sampled: bool  # generations are sampled
    documents: int  # number of documents
    shards: tuple[str, ...]  # names in order
    # documents of each shard; only for an `execute` metric and in screen mode
    shard_documents: tuple[tuple[int, ...], ...] = ()
    shard_blocks: tuple[
        int, ...
    ] = ()  # in screen mode: the position of each shard's block in the asking order
    # number of `execute` jobs worth running at once (limited by a judge's endpoint); 0: no limit
    executes_at_once: int = 0
    metric_seconds: float = 0.0  # predicted metric time for all documents

    @property
    def cut(self) -> str:
        """Return the cut of its shards (`ShardId`)."""
        return ShardId.parse(self.shards[0]).cut if self.shards else ""

    def first(self, blocks: int) -> PlannedLeaf:
        """Return this with the shards of the first blocks only."""
        rows = zip(self.shards, self.shard_blocks, self.shard_documents, strict=True)
        kept = [(shard, documents) for shard, block, documents in rows if block < blocks]
        shards, documents = (tuple(each) for each in zip(*kept, strict=True)) if kept else ((), ())
        return self.model_copy(update={"shards": shards, "shard_documents": documents})


class PlannedLane(Record):
    """Shards assigned to one lane, in order."""

    lane: str
    node: str
    # (shard, rank across all lanes: lower runs sooner, predicted seconds)
    shards: tuple[tuple[str, float, float], ...]


class Planned(Event):
    """A plan was made. Its shards are to do, and the work queue is filled."""

    kind: Literal["planned"] = "planned"
    batch_size: int  # of the request sets
    leaves: tuple[PlannedLeaf, ...]
    lanes: tuple[PlannedLane, ...]
    predicted_makespan_seconds: float  # from now on
    lower_bound_seconds: float  # no plan can finish sooner
    gpu_seconds: float  # predicted total
    work_seconds_95: float = 0.0  # inference on one lane after the other, 95th percentile; 0: not predicted
    load_seconds_95: float = 0.0  # load time of one trial, 95th percentile; 0: not predicted
    workers: int = 0  # initial number of metric workers; 0: not predicted
    sigma: float = 0.0  # standard deviation of the log of predicted seconds; 0: not predicted


class ResponsesFound(Event):
    """Responses of earlier evaluations answer these requests and are now in this evaluation's folder. Their shards are done,
    and entries with `scores` are scored; the rest is planned.
    """

    kind: Literal["responses-found"] = "responses-found"
    # leaf tasks that are answered, or whose shards belong to another entry
    leaves: tuple[PlannedLeaf, ...] = ()
    shards: tuple[tuple[str, FrameRef], ...] = ()  # (shard, location of its record)
    scores: dict[int, str] = Field(
        default_factory=dict
    )  # entry -> score file, if the score keys match as well
    sources: dict[str, str] = Field(default_factory=dict)  # leaf task name -> the earlier evaluation
    # more responses exist for a checkpoint with equal samples; a precursor will say whether its content is equal
    alike: bool = False


class ShardsDumped(Event):
    """Complete shards with valid checksums were found in response files. They are done; metric jobs may be due."""

    kind: Literal["shards-dumped"] = "shards-dumped"
    shards: tuple[tuple[str, FrameRef], ...]  # (shard, location of its record)


class ShardCorrupted(Event):
    """The record of a finished shard turned out to be unreadable. The shard runs again; the third time its task fails."""

    kind: Literal["shard-corrupted"] = "shard-corrupted"
    shard: str
    error: str  # what is wrong with the record


class ShardsStray(Event):
    """Shards were found neither queued, nor claimed by a living trial, nor done. They are queued again."""

    kind: Literal["shards-stray"] = "shards-stray"
    shards: tuple[str, ...]
    again: tuple[str, ...] = ()  # those found stray before, and queued since


class TrialHung(Event):
    """A running trial has made no progress for too long. Its job is cancelled, and its shard runs elsewhere."""

    kind: Literal["trial-hung"] = "trial-hung"
    trial: str
    shard: str | None  # shard that it was running
    seconds: float  # seconds without progress


class StragglersFound(Event):
    """Trials were found three sigma slower than the prior while others are not. No trial follows them on their lanes."""

    kind: Literal["stragglers-found"] = "stragglers-found"
    trials: dict[str, float]  # trial -> slowdown compared with the others


class CancelAsked(Event):
    """Cancellation was requested. The evaluation closes; once its results are written it stays as it is."""

    kind: Literal["cancel-asked"] = "cancel-asked"
    reason: str  # who cancelled it, or why


class PauseAsked(Event):
    """The evaluation shall use no node. Then: its nodes are withdrawn, and none is offered; it keeps its answers."""

    kind: Literal["pause-asked"] = "pause-asked"
    reason: str  # by whom, or why


class ResumeAsked(Event):
    """The pause is over. Then: the evaluation is offered nodes again."""

    kind: Literal["resume-asked"] = "resume-asked"


class RetryAsked(Event):
    """A retry of failed entries, and of entries with unscored items, was requested. The evaluation is running again; one that
    is ending finishes that first.
    """

    kind: Literal["retry-asked"] = "retry-asked"
    # entries whose responses or request sets are no longer on disk: they start over
    gone: tuple[int, ...] = ()


class PriorityAsked(Event):
    """A submission or a person changed the priority."""

    kind: Literal["priority-asked"] = "priority-asked"
    priority: int  # higher goes first


class Restarted(Event):
    """A coordinator took over. Repeatable effects are repeated; submissions are looked up first."""

    kind: Literal["restarted"] = "restarted"
    # unix seconds of the previous coordinator's last sign of life, from the journal's mtime; None: the evaluation was parked
    # in this process
    seen_at: float | None = None


class ResultsWritten(Event):
    """results.json and the report were written. The evaluation is leaving, and ends with its last job."""

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
    | EntryFailed
    | Closed
    | NodeBackedOff
    | StorageChosen
    | PlanAsked
    | TrialsCancelled
    | MetricEnqueued
    | ScreenJudged
    | WeightsReleased
    | WorkDone
    | Ended
    | JobSubmitted
    | JobNotSubmitted
    | LimitReached
    | JobStarted
    | JobEnded
    | OutcomeSeen
    | Planned
    | ResponsesFound
    | ShardsDumped
    | ShardCorrupted
    | ShardsStray
    | TrialHung
    | StragglersFound
    | CancelAsked
    | PauseAsked
    | ResumeAsked
    | RetryAsked
    | PriorityAsked
    | Restarted
    | ResultsWritten
)
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(
    Annotated[AnyEvent, Field(discriminator="kind")], config=DEFERRED_BUILD
)
