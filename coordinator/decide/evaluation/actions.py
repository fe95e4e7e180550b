"""Actions of one evaluation: imperatives, one effect each.

Rule: the result of an effect returns as an event (named after the arrow). Every effect may be repeated safely. Called from:
the subjects, which return actions; `coordinator.runtime.effects` performs them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.site.cluster import Job
from evaljobs.contract.specs import Record


class Action(Record):
    pass


class FindRequestSets(Action):
    """Find the request sets on disk -> RequestSetsFound."""

    record: EvaluationRecord


class InspectConverted(Action):
    """Inspect the folder that a conversion wrote -> CheckpointConverted."""

    path: str


class SubmitJob(Action):
    """Write the job's specs (`job_specs.specs_of`), then submit it -> JobSubmitted | JobNotSubmitted."""

    job: Job


class CancelJob(Action):
    job_id: str
    index: int | None = None  # of one array member


class FindResponses(Action):
    """Look for responses of this and earlier evaluations before GPUs are asked for -> ResponsesFound."""

    sets: Mapping[int, Mapping[str, str]]  # entry -> {leaf task: folder}; each name appears once
    batch_size: int
    cuts: Mapping[int, str] = Field(default_factory=dict)  # entry -> `records.cut_of`; absent means ""


class MakePlan(Action):
    """Read batch indexes and priors, plan -> Planned | Closed."""

    sets: Mapping[int, Mapping[str, str]]  # as in `FindResponses`
    batch_size: int
    lanes: tuple[tuple[str, str], ...]  # (lane, node)
    cuts: Mapping[int, str] = Field(default_factory=dict)  # as in `FindResponses`


class FillQueue(Action):
    """Replace everything unclaimed in the work queue with these lanes."""

    lanes: Mapping[str, tuple[tuple[str, float, float], ...]]


class QueueShards(Action):
    lane: str
    shards: tuple[tuple[str, float, float], ...]


class WithdrawShards(Action):
    shards: tuple[str, ...]


class ReleaseClaims(Action):
    """Return a dead trial's claims to the queue."""

    trial: str


class EnqueueMetric(Action):
    """Write this metric job's spec and enqueue it, again if Redis lost it. `first`: ahead of pending jobs."""

    name: str
    first: bool = False


class JudgeScreen(Action):
    """Compare the scored documents of an entry with the reference's -> ScreenJudged | EntryFailed."""

    entry: int


class PublishSets(Action):
    """Publish where the request sets are, for trials that probe the batch size."""

    batch_size: int
    sets: Mapping[str, str]


class ReleasePrecursor(Action):
    """Tell a node's precursor to clear its memory and exit."""

    job: str


class StopWorkers(Action):
    pass


class WriteResults(Action):
    """Merge the entries' scores into results.json, write the report, update the priors -> ResultsWritten."""

    failed: Mapping[int, str]


class RemoveQueue(Action):
    """Delete this evaluation's keys from Redis."""
