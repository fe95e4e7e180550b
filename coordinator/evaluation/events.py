"""Events of one evaluation: facts in the past tense, each with the time at which the coordinator learned of it.

Rule: an event is in the journal before any effect of it. A later process reads the journal, so events are pydantic
records. Called from: `step`, which looks up the subject of an event; `coordinator.runtime`, which makes most of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from coordinator.cluster import Job
from coordinator.diagnosis.verdict import Diagnosis
from coordinator.evaluation.records import JOURNAL_FORMAT, EvaluationRecord
from evaljobs.contract.names import ShardId
from evaljobs.contract.outcomes import Outcome
from evaljobs.contract.specs import DEFERRED, CheckpointSpec, FrameRef, Record


class Event(Record):
    at: float  # unix seconds, when the coordinator learned of it


class Accepted(Event):
    """The first event of a journal. Then: the evaluation is running, its entries are unbuilt."""

    kind: Literal["accepted"] = "accepted"
    record: EvaluationRecord  # what is evaluated, and how
    journal_format: Literal[10] = JOURNAL_FORMAT  # of all lines
    code: str = ""  # version and commit of the coordinator; "": not known


class CheckpointConverted(Event):
    """What the conversion left was looked at. Then: request sets are looked up; without a checkpoint the evaluation closes."""

    kind: Literal["checkpoint-converted"] = "checkpoint-converted"
    checkpoint: CheckpointSpec | None = None  # what is evaluated; None: the conversion left none
    error: str = ""  # why it left none


class RequestSetsFound(Event):
    """Which entries' request sets are on disk, whole and unchanged: looked up at the start, and after some were removed. Then:
    these entries are built; build jobs for the others are due.
    """

    kind: Literal["request-sets-found"] = "request-sets-found"
    sets: dict[int, dict[str, str]]  # entry -> {leaf task: folder}
    folders: dict[int, str]  # entry -> where its sets lie or shall be built
    batch_size: int | Literal["auto"]  # of the suite, or as an earlier evaluation probed it


class Offer(Record):
    """GPUs of a node that this evaluation may use."""

    node: str  # its name
    gpus: int  # free ones that it may use
    node_memory_mb: int = 0  # of the node; 0: unknown
    largest_mb: int = 0  # of the largest node that the settings allow; 0: unknown
    gpu_type: str = ""  # as Gres names it; "": not said
    best_effort: bool = False  # jobs there may be preempted


class NodesOffered(Event):
    """Nodes with free GPUs. Then: a new or withdrawn node is offered, one in use may have more lanes."""

    kind: Literal["nodes-offered"] = "nodes-offered"
    offers: tuple[Offer, ...]  # one a node


class MemoryOffered(Event):
    """Nodes whose GPUs are busy with other jobs and whose memory has room. Then: weights may be prefetched there."""

    kind: Literal["memory-offered"] = "memory-offered"
    nodes: tuple[str, ...]  # their names


class BackOffOver(Event):
    """A time is over. Then: a node in back-off is offered or ready, held jobs are submitted again."""

    kind: Literal["back-off-over"] = "back-off-over"
    nodes: tuple[str, ...] = ()  # whose back-off is over


class NodeWithdrawn(Event):
    """The node shall be used no more. Then: it is withdrawn, its trials end, and it may be offered again."""

    kind: Literal["node-withdrawn"] = "node-withdrawn"
    node: str  # its name
    reason: str  # it drained, died or is cordoned


class JobIntended(Event):
    """The evaluation decided to submit this job. A replay makes the job from this event and decides nothing anew. Then: the
    job is intended; its entries are building, its node is staging.
    """

    kind: Literal["job-intended"] = "job-intended"
    job: Job  # all that it asks of the cluster
    entries: tuple[int, ...] = ()  # of a build job
    lanes: tuple[str, ...] = ()  # of a trial or host job, one a member
    trials: tuple[str, ...] = ()  # of a trial or host job, one a member
    precursor: str | None = None  # the job whose staged weights the trials read
    # lanes that the evaluation uses on the job's node from now on; 0: a prefetch, or a job without a node
    node_lanes: int = 0


class ShardsDealt(Event):
    """The evaluation moved shards of lanes that it lost. A replay decides nothing anew. Then: they are queued anew."""

    kind: Literal["shards-dealt"] = "shards-dealt"
    lanes: dict[str, str]  # shard -> its lane from now on


class TokenBudgetReduced(Event):
    """A unit of this entry did not fit a GPU's memory. A replay decides nothing anew. Then: the entry is unbuilt, and its
    tasks start again with the smaller budget.
    """

    kind: Literal["token-budget-reduced"] = "token-budget-reduced"
    entry: int  # of the suite
    token_budget: int  # padded tokens of a forward pass, from now on


class EntryFailed(Event):
    """The evaluation gave up an entry. Then: it has failed, and its shards are withdrawn unless other entries have them."""

    kind: Literal["entry-failed"] = "entry-failed"
    entry: int  # of the suite
    error: str  # why it cannot be scored


class Closed(Event):
    """The evaluation cannot go on. Then: it closes; the first reason stands."""

    kind: Literal["closed"] = "closed"
    reason: str  # why
    inference_only: bool = False  # entries that have all responses are scored
    instead: bool = False  # this reason stands


class NodeBackedOff(Event):
    """A node failed. Then: it is in back-off; where no node is in use the evaluation waits for one."""

    kind: Literal["node-backed-off"] = "node-backed-off"
    node: str  # its name
    why: str  # it failed
    until: float  # unix seconds
    at_fault: bool = False  # other evaluations would fail there, too


class StorageChosen(Event):
    """Nothing is staged on this node. Then: it is ready, and its trials read storage."""

    kind: Literal["storage-chosen"] = "storage-chosen"
    node: str  # its name
    lanes: int  # that are used there


class PlanAsked(Event):
    """Responses of earlier evaluations were asked for, or a plan. Then: neither is asked for before the answer."""

    kind: Literal["plan-asked"] = "plan-asked"
    # (entry, leaf task) whose responses are looked for; none: a plan is made
    looked_for: tuple[tuple[int, str], ...] = ()


class TrialsCancelled(Event):
    """Trials that have not started have no shard to run. Then: they are cancelled."""

    kind: Literal["trials-cancelled"] = "trials-cancelled"
    trials: tuple[str, ...]  # their names


class MetricEnqueued(Event):
    """Responses are whole. Then: this metric job is in the queue, and the entry of a score job is scoring."""

    kind: Literal["metric-enqueued"] = "metric-enqueued"
    name: str  # of the job
    entry: int  # of the suite
    task: str = ""  # of an execute job: the name of a leaf task; "": a score job
    documents: tuple[int, ...] = ()  # of an execute job
    seconds: float = 0.0  # predicted


class WeightsReleased(Event):
    """No shard needs what these precursors stage. Then: they end, and their nodes may stage again."""

    kind: Literal["weights-released"] = "weights-released"
    jobs: tuple[str, ...]  # their names


class WorkDone(Event):
    """Every entry is scored or has failed. Then: results are written; jobs are released or cancelled."""

    kind: Literal["work-done"] = "work-done"


class Ended(Event):
    """No job is left. Then: the evaluation has ended; a retry that waited for that begins."""

    kind: Literal["ended"] = "ended"


class JobSubmitted(Event):
    """The cluster has taken the job. Then: it is submitted; where it was ended meanwhile it is cancelled."""

    kind: Literal["job-submitted"] = "job-submitted"
    job: str  # its name
    job_id: str  # the cluster's


class JobNotSubmitted(Event):
    """Submission failed. Then, by its reason: the job is intended again, uncertain, held, or ended; after eight submissions in
    doubt the evaluation closes.
    """

    kind: Literal["job-not-submitted"] = "job-not-submitted"
    job: str  # its name
    error: str  # the cluster's words
    # absent: it surely did not happen; in-doubt: it may have happened all the same; limit: a limit on jobs is reached, and it
    # is tried again after a pause; refused: asking again is useless, also of a job in the queue that its partition will never
    # start, everywhere or on the job's node alone
    reason: Literal["absent", "in-doubt", "limit", "refused", "refused-on-node"] = "absent"


class LimitReached(Event):
    """Builds or trials wait for a limit on this user's jobs, which idle jobs of the evaluation fill. Then: an idle node is
    withdrawn, workers end, or fewer lanes are used.
    """

    kind: Literal["limit-reached"] = "limit-reached"
    why: str  # the cluster's word
    others: bool = False  # jobs of other evaluations run, and will end


class JobStarted(Event):
    """A member of a job runs. Then: it is running, and metric workers may be intended."""

    kind: Literal["job-started"] = "job-started"
    job: str  # its name
    index: int = 0  # of the member in the job's array
    node: str | None = None  # that it runs on; None: not listed
    started_at: float | None = None  # unix seconds, by the cluster
    submitted_at: float | None = None  # unix seconds, by the cluster
    waited_for: str = ""  # the cluster's last reason before it started


class JobEnded(Event):
    """A member of a job is over. Then: the job is ended once all members are; trials without an outcome count as dead, and
    their shards are queued again.
    """

    kind: Literal["job-ended"] = "job-ended"
    job: str  # its name
    index: int = 0  # of the member in the job's array
    state: str  # the cluster's word
    lost: bool = False  # it vanished from a successful listing
    shard: str | None = None  # the one that its trial ran, by the queue
    # the node, where it has no log: Slurm gave the job to the node and ended it before it began
    unlaunched: str = ""
    cause: Diagnosis | None = None  # why it ended without an outcome, by its log; None: not looked for


class OutcomeSeen(Event):
    """A job left an outcome file. Then, by its kind: entries are built or scored, a node is ready, a trial has ended; after a
    failure the job is tried again, or the entry has failed.
    """

    kind: Literal["outcome-seen"] = "outcome-seen"
    outcome: Outcome  # what the file holds
    # unix seconds at which the file was written, at most `at`; both differ where a job ended while no coordinator ran;
    # None: not known
    left_at: float | None = None
    cause: Diagnosis | None = None  # why the job failed; None: it did not


class PlannedLeaf(Record):
    """A leaf task as planned."""

    task: str  # leaf task of lm-eval
    # of its shards: the task's, or "task#2" where another entry asks other requests of the task
    name: str
    entry: int  # of the suite
    key: str  # the request digest
    folder: str  # of its request set
    executes: bool  # its metric runs programs or asks a judge
    sampled: bool  # generations are drawn
    documents: int  # in all
    shards: tuple[str, ...]  # their names, in order
    shard_documents: tuple[tuple[int, ...], ...] = ()  # of each shard; of an `execute` metric alone
    # its `execute` jobs that get anywhere at the same time (a judge's endpoint sets it); 0: no limit
    executes_at_once: int = 0
    metric_seconds: float = 0.0  # what its metric is predicted to take for all documents

    @property
    def cut(self) -> str:
        """Of its shards (`ShardId`)."""
        return ShardId.parse(self.shards[0]).cut if self.shards else ""


class PlannedLane(Record):
    """Shards dealt to one lane, in order."""

    lane: str  # its name
    node: str  # that it is on
    # (shard, rank that every lane compares by: lower is sooner, predicted seconds)
    shards: tuple[tuple[str, float, float], ...]


class Planned(Event):
    """The plan is made. Then: its shards are to do, and the work queue is filled."""

    kind: Literal["planned"] = "planned"
    batch_size: int  # of the request sets
    leaves: tuple[PlannedLeaf, ...]  # leaf tasks that are planned
    lanes: tuple[PlannedLane, ...]  # each with its shards
    predicted_makespan_seconds: float  # from now on
    lower_bound_seconds: float  # no plan can be sooner
    gpu_seconds: float  # predicted, in all
    work_seconds_95: float = (
        0.0  # inference on one lane after the other at the 95th percentile; 0: not predicted
    )
    load_seconds_95: float = 0.0  # one trial's load at the 95th percentile; 0: not predicted
    workers: int = 0  # for metrics, to start with; 0: not predicted
    sigma: float = 0.0  # spread of the log of predicted seconds; 0: not predicted


class ResponsesFound(Event):
    """Responses of earlier evaluations that answer these requests, now in files of this one's folder. Then: their shards are
    done, entries with `scores` are scored; the rest is planned.
    """

    kind: Literal["responses-found"] = "responses-found"
    leaves: tuple[PlannedLeaf, ...] = ()  # those that are answered, and those whose shards another entry has
    shards: tuple[tuple[str, FrameRef], ...] = ()  # with the place of each record
    scores: dict[int, str] = Field(
        default_factory=dict
    )  # entry -> score file, where the score keys are equal, too
    sources: dict[str, str] = Field(default_factory=dict)  # name of a leaf task -> the earlier evaluation
    # more are answered for a checkpoint with equal samples; whether its content is equal a precursor is to say
    alike: bool = False


class ShardsDumped(Event):
    """Whole shards found in response files, checksums right. Then: they are done; metric jobs of what is whole are due."""

    kind: Literal["shards-dumped"] = "shards-dumped"
    shards: tuple[tuple[str, FrameRef], ...]  # with the place of each record


class ShardCorrupted(Event):
    """A shard's record turned out unreadable after it was counted. Then: it runs again; the third time its task fails."""

    kind: Literal["shard-corrupted"] = "shard-corrupted"
    shard: str  # its name
    error: str  # what is wrong with the record


class ShardsStray(Event):
    """Shards neither queued, claimed by a living trial, nor done. Then: they are queued again."""

    kind: Literal["shards-stray"] = "shards-stray"
    shards: tuple[str, ...]  # their names
    again: tuple[str, ...] = ()  # those that were stray before, and queued since


class TrialHung(Event):
    """A running trial has made no progress for too long. Then: its job is cancelled, its shard runs elsewhere."""

    kind: Literal["trial-hung"] = "trial-hung"
    trial: str  # its name
    shard: str | None  # that it ran
    seconds: float  # without progress


class StragglersFound(Event):
    """Trials slower than the prior by three sigma while others are not. Then: no trial follows them on their lanes."""

    kind: Literal["stragglers-found"] = "stragglers-found"
    trials: dict[str, float]  # trial -> times as long as the others


class CancelAsked(Event):
    """The evaluation is cancelled. Then: it closes; one whose results are written stays as it is."""

    kind: Literal["cancel-asked"] = "cancel-asked"
    reason: str  # by whom, or why


class RetryAsked(Event):
    """Failed entries shall be tried again, and those scored that have items without a score. Then: the evaluation is running
    again; one that is ending ends first.
    """

    kind: Literal["retry-asked"] = "retry-asked"
    # entries whose responses or request sets are not on disk any more: they begin anew
    gone: tuple[int, ...] = ()


class PriorityAsked(Event):
    """A submission changed the priority. Then: the evaluation goes before those of a lower one."""

    kind: Literal["priority-asked"] = "priority-asked"
    priority: int  # higher goes first


class Restarted(Event):
    """A coordinator took over. Then: effects that can be repeated are repeated, submissions are looked up first."""

    kind: Literal["restarted"] = "restarted"
    # unix seconds of the last sign of the coordinator before it, by the journal's age; None: it is this process, where the
    # evaluation was parked
    seen_at: float | None = None


class ResultsWritten(Event):
    """results.json and the report are written. Then: the evaluation is leaving, and ended when its last job has ended."""

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
    | RetryAsked
    | PriorityAsked
    | Restarted
    | ResultsWritten
)
EVENT: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="kind")], config=DEFERRED)
