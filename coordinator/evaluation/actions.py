"""Actions of one evaluation: orders in the imperative, each for exactly one effect.

Rule: whatever comes of an effect returns as an event (named after the arrow). Every effect may be repeated without
harm. Called from: the subjects, which return actions; `coordinator.runtime.effects` performs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.cluster import Job
from coordinator.evaluation.records import EvaluationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FindRequestSets:
    """Look which request sets are on disk -> RequestSetsFound."""

    record: EvaluationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConverted:
    """Look at the folder that a conversion left -> CheckpointConverted."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitJob:
    """Write the job's specs (`job_specs.specs_of`), then submit it -> JobSubmitted | JobNotSubmitted."""

    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJob:
    job_id: str
    index: int | None = None  # a member only


@dataclass(frozen=True, slots=True, kw_only=True)
class FindResponses:
    """Look for responses of this and earlier evaluations before GPUs are asked for -> ResponsesFound."""

    sets: Mapping[int, Mapping[str, str]]  # entry -> {name of a leaf task: folder}; a name stands once
    batch_size: int
    cuts: Mapping[int, str] = field(default_factory=dict)  # entry -> as `records.cut_of`; else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan:
    """Read batch indexes and priors, plan -> Planned | PlanFailed."""

    sets: Mapping[int, Mapping[str, str]]  # as of `FindResponses`
    batch_size: int
    lanes: tuple[tuple[str, str], ...]  # (lane, node)
    cuts: Mapping[int, str] = field(default_factory=dict)  # as of `FindResponses`


@dataclass(frozen=True, slots=True, kw_only=True)
class FillQueue:
    """Replace all that is unclaimed in the work queue by these lanes."""

    lanes: Mapping[str, tuple[tuple[str, float, float], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueShards:
    lane: str
    shards: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawShards:
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseClaims:
    """Return what a dead trial had claimed to the queue."""

    trial: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueMetric:
    """Write the spec of this metric job and queue it, again where Redis lost it."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSets:
    """Write where the request sets lie, for trials that probe the batch size."""

    batch_size: int
    sets: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePrecursor:
    """Tell a node's precursor to clear its memory and end."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResults:
    """Merge the entries' scores into results.json, write the report, learn priors -> ResultsWritten."""

    failed: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveQueue:
    """Take this evaluation's keys out of Redis."""


Action = (
    FindRequestSets
    | InspectConverted
    | SubmitJob
    | CancelJob
    | FindResponses
    | MakePlan
    | FillQueue
    | QueueShards
    | WithdrawShards
    | ReleaseClaims
    | EnqueueMetric
    | PublishSets
    | ReleasePrecursor
    | StopWorkers
    | WriteResults
    | RemoveQueue
)
