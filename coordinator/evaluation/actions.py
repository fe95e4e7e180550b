"""Actions of one evaluation: orders in the imperative, each for exactly one effect.

Rule: whatever comes of an effect returns as an event (named after the arrow). Every effect may be repeated without
harm. Called from: the subjects, which return actions; `coordinator.runtime.effects` performs them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from coordinator.cluster import Job
from coordinator.evaluation.records import EvaluationRecord
from evaljobs.contract.specs import Record


class Action(Record):
    pass


class FindRequestSets(Action):
    """Look which request sets are on disk -> RequestSetsFound."""

    record: EvaluationRecord


class InspectConverted(Action):
    """Look at the folder that a conversion left -> CheckpointConverted."""

    path: str


class SubmitJob(Action):
    """Write the job's specs (`job_specs.specs_of`), then submit it -> JobSubmitted | JobNotSubmitted."""

    job: Job


class CancelJob(Action):
    job_id: str
    index: int | None = None  # a member only


class FindResponses(Action):
    """Look for responses of this and earlier evaluations before GPUs are asked for -> ResponsesFound."""

    sets: Mapping[int, Mapping[str, str]]  # entry -> {name of a leaf task: folder}; a name stands once
    batch_size: int
    cuts: Mapping[int, str] = Field(default_factory=dict)  # entry -> as `records.cut_of`; else ""


class MakePlan(Action):
    """Read batch indexes and priors, plan -> Planned | Closed."""

    sets: Mapping[int, Mapping[str, str]]  # as of `FindResponses`
    batch_size: int
    lanes: tuple[tuple[str, str], ...]  # (lane, node)
    cuts: Mapping[int, str] = Field(default_factory=dict)  # as of `FindResponses`


class FillQueue(Action):
    """Replace all that is unclaimed in the work queue by these lanes."""

    lanes: Mapping[str, tuple[tuple[str, float, float], ...]]


class QueueShards(Action):
    lane: str
    shards: tuple[tuple[str, float, float], ...]


class WithdrawShards(Action):
    shards: tuple[str, ...]


class ReleaseClaims(Action):
    """Return what a dead trial had claimed to the queue."""

    trial: str


class EnqueueMetric(Action):
    """Write the spec of this metric job and queue it, again where Redis lost it. `first`: ahead of those that wait."""

    name: str
    first: bool = False


class PublishSets(Action):
    """Write where the request sets lie, for trials that probe the batch size."""

    batch_size: int
    sets: Mapping[str, str]


class ReleasePrecursor(Action):
    """Tell a node's precursor to clear its memory and end."""

    job: str


class StopWorkers(Action):
    pass


class WriteResults(Action):
    """Merge the entries' scores into results.json, write the report, learn priors -> ResultsWritten."""

    failed: Mapping[int, str]


class RemoveQueue(Action):
    """Take this evaluation's keys out of Redis."""
