"""Effects of actions on the cluster, queues and files, and the resulting events.

Rule: every effect may be repeated safely. An effect that fails while Redis or the controller is unreachable is not an error:
a later audit or listing shows what is missing, and the state machine requests it again. Called by
`coordinator.runtime.runner`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from coordinator.base import clock
from coordinator.decide.evaluation import builds
from coordinator.decide.evaluation.actions import (
    Action,
    EnqueueMetric,
    FillQueue,
    FindRequestSets,
    FindResponses,
    InspectConverted,
    JudgeScreen,
    MakePlan,
    PublishSets,
    QueueShards,
    ReleaseClaims,
    ReleasePrecursor,
    RemoveQueue,
    StopWorkers,
    SubmitJob,
    WithdrawShards,
    WriteResults,
)
from coordinator.decide.evaluation.events import (
    AnyEvent,
    CheckpointConverted,
    Closed,
    EntryFailed,
    JobNotSubmitted,
    JobSubmitted,
    RequestSetsFound,
    ResultsWritten,
)
from coordinator.decide.evaluation.job_specs import (
    Site,
    environment_of_job,
    metric_spec,
    secrets_for,
    specs_of,
    workers_stop_file,
)
from coordinator.decide.evaluation.records import EvaluationRecord, cut_of, cut_on_disk
from coordinator.decide.evaluation.state import MetricState, State
from coordinator.decide.planning.make_plan import hardware_of, make_plan
from coordinator.errors import OperatorError
from coordinator.intake import request_sets
from coordinator.intake.checkpoint import CheckpointError, inspect_checkpoint
from coordinator.intake.source_keys import Present
from coordinator.runtime import gpu_names, reuse, screens
from coordinator.runtime.cluster_calls import Call, ClusterCalls
from coordinator.runtime.finalize import write_results
from coordinator.site.cluster import Cluster, ClusterError, JobState, LimitError, RefusedError
from coordinator.site.services.metric_queue import MetricQueue
from evaljobs.contract.paths import request_set_manifest
from evaljobs.contract.specs import BuildSpec
from evaljobs.contract.storage import write_atomic
from evaljobs.errors import OperatorError as DamagedError
from evaljobs.queue.redis_client import Link, QueueUnavailable
from evaljobs.queue.work_queue import QueuedShard, QueueSnapshot, WorkQueue
from priors.estimate import PriorHistory
from priors.table import read_observations

log = logging.getLogger(__name__)


class Performer:
    """Effects of one work folder."""

    def __init__(
        self,
        *,
        site: Site,
        cluster: Cluster,
        lm_eval_version: Callable[[], str],
        observations: Path,
        at_once: int = 1,
        calls: ClusterCalls | None = None,
    ) -> None:
        self.site = site
        self.cluster = cluster
        self.calls = calls or ClusterCalls()
        self.at_once = at_once  # concurrent submissions
        self.lm_eval_version = lm_eval_version
        self.observations = observations
        self.fence: Callable[[], None] = lambda: None  # of journals; set by the holder of the work folder
        self._queues: dict[str, WorkQueue] = {}
        self._redis = Link(site.paths.redis_address)
        self._submissions: dict[str, dict[str, Call[str]]] = {}  # evaluation id -> job name -> its call
        self._cancels: list[tuple[Sequence[str], Call[None]]] = []  # job ids, and the call that cancels them
        self._uncancelled: set[str] = set()  # job ids whose cancellation failed; it is requested only once

    def queue(self, evaluation_id: str) -> WorkQueue:
        """Return the evaluation's work queue, which caches its last snapshot."""
        return self._queues.setdefault(evaluation_id, WorkQueue(self._redis, evaluation_id))

    def metric_queue(self, evaluation_id: str) -> MetricQueue:
        return MetricQueue(self._redis, evaluation_id)

    def forget(self, evaluation_id: str) -> None:
        """Drop everything about an ended evaluation."""
        self._queues.pop(evaluation_id, None)
        self._submissions.pop(evaluation_id, None)

    def perform(self, state: State, action: Action) -> list[AnyEvent]:  # noqa: C901, PLR0911 (a case an action)
        """Perform an action and return the resulting events. The runner collects SubmitJob and CancelJob itself."""
        paths = self.site.of(state)
        match action:
            case FindRequestSets():
                return [self._find_request_sets(action.record)]
            case FindResponses():
                return [reuse.find_responses(state, action, self.site.paths, Present(self.site), clock.now())]
            case InspectConverted():
                return [_inspect_converted(state, action.path)]
            case MakePlan():
                return self._make_plan(state, action)
            case JudgeScreen():
                return [self._judge_screen(state, action)]
            case PublishSets():
                text = json.dumps({"batch_size": action.batch_size, "request_sets": dict(action.sets)})
                write_atomic(paths.request_sets, text.encode())
            case FillQueue() | QueueShards() | WithdrawShards() | ReleaseClaims():
                self._change_queue(state, action)
            case EnqueueMetric():
                self._enqueue_metric(state, state.scoring.metrics[action.name], first=action.first)
            case ReleasePrecursor():
                write_atomic(paths.release_file(action.job), b"")
            case StopWorkers():
                write_atomic(Path(workers_stop_file(paths)), b"")
            case RemoveQueue():
                self.remove_queues(state.evaluation_id, _level(state))
            case WriteResults():
                self._write_results(state, action.failed)
                return [ResultsWritten(at=clock.now())]
        return []

    def snapshot(self, state: State) -> QueueSnapshot | None:
        """Return the work queue now; None if the evaluation has none, or Redis is unreachable."""
        if not state.shards.leaves or state.winding_down:
            return None
        with suppress(QueueUnavailable):
            return self.queue(state.evaluation_id).snapshot()
        return None

    # --- request sets and plan -----------------------------------------------------------------------------------

    def _find_request_sets(self, record: EvaluationRecord) -> AnyEvent:
        sets: dict[int, dict[str, str]] = {}
        folders: dict[int, str] = {}
        batch_size, present = record.suite.batch_size, Present(self.site)
        names = request_sets.folder_names(record.suite, record.checkpoint, record.model, record.inputs)
        for index, name in enumerate(names):
            folder = self.site.paths.request_sets / name
            folders[index] = str(folder)
            cut = cut_of(record.suite, index, batch_size, record.suite.token_budget, record.order)
            there = request_sets.find_request_sets(folder, cut_on_disk(cut, batch_size), present)
            if there is not None:
                sets[index] = there
        return RequestSetsFound(at=clock.now(), sets=sets, folders=folders, batch_size=batch_size)

    def lost_sets(self, state: State) -> list[AnyEvent]:
        """Return events for request sets that were removed while an entry needs them."""
        held = [entry for entry in state.entries if entry.status in builds.HAVE_SETS]
        kept = {
            entry.index: dict(entry.sets)
            for entry in held
            if all(request_set_manifest(folder).exists() for folder in entry.sets.values())
        }
        if len(kept) == len(held):
            return []
        log.warning("%s: request sets were removed, and are built again", state.evaluation_id)
        folders = {entry.index: entry.folder for entry in state.entries}
        return [RequestSetsFound(at=clock.now(), sets=kept, folders=folders, batch_size=state.batch_size)]

    def _make_plan(self, state: State, action: MakePlan) -> list[AnyEvent]:
        hardware = hardware_of(state.nodes.by_name.values())
        try:
            read = request_sets.read_wanted(action)
            history = PriorHistory(read_observations(self.observations))
        except request_sets.RequestSetError as error:
            return self.lost_sets(state) or [Closed(at=clock.now(), reason=str(error))]
        except ValueError as error:
            why = f"{error}; move {self.observations} away to plan without it"
            return [Closed(at=clock.now(), reason=why)]
        return [make_plan(state.record, action, read, history, hardware=hardware, now=clock.now())]

    def _judge_screen(self, state: State, action: JudgeScreen) -> AnyEvent:
        try:
            return screens.judge_screen(state.record, action.entry, self.site.paths, clock.now())
        except (OperatorError, DamagedError, OSError) as error:
            why = f"it cannot be compared with its reference: {error}"
            return EntryFailed(at=clock.now(), entry=action.entry, error=why)

    # --- jobs ------------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Return how many submissions may begin now."""
        calls = [call for mine in self._submissions.values() for call in mine.values()]
        return self.at_once - sum(not call.done() for call in calls)

    def submitting(self, state: State) -> bool:
        """Return whether a submission of this evaluation is unanswered."""
        return bool(self._submissions.get(state.evaluation_id))

    def submit(self, state: State, actions: Sequence[SubmitJob]) -> list[AnyEvent]:
        """Begin these submissions and return events of all that have ended. Late ones are returned by a later call."""
        events: list[AnyEvent] = []
        mine = self._submissions.setdefault(state.evaluation_id, {})
        for action in actions:
            events += self._begin_submission(state, action, mine)
        self.calls.wait(mine.values())
        for name in [name for name, call in mine.items() if call.done()]:
            events.append(_submitted(name, mine.pop(name)))
        return events

    def _begin_submission(
        self, state: State, action: SubmitJob, mine: dict[str, Call[str]]
    ) -> list[AnyEvent]:
        paths = self.site.of(state)
        name = action.job.name
        info = state.jobs.by_name[name]
        if info.phase != "intended" or name in mine:
            return []  # an earlier submission had succeeded, and was found while this one waited
        if info.released_at is not None:
            return [JobNotSubmitted(at=clock.now(), job=name, error="nothing needs it any more")]
        for spec_name, made in specs_of(state, self.site, info).items():
            spec = made
            if isinstance(spec, BuildSpec) and spec.cut and state.record.screening is not None:
                task = state.record.suite.tasks[spec.entry]
                try:
                    blocks = screens.blocks_of(state.record, self.site.paths, task)
                except (OperatorError, DamagedError, OSError) as error:
                    return [JobNotSubmitted(at=clock.now(), job=name, error=str(error), reason="refused")]
                spec = spec.model_copy(update={"blocks": blocks})
            write_atomic(paths.spec(spec_name), spec.model_dump_json(indent=1).encode())
        if action.job.purpose == "metric":
            Path(workers_stop_file(paths)).unlink(missing_ok=True)
        env = environment_of_job(self.site, action.job.purpose)
        job = replace(action.job, env=env, secrets=secrets_for(state.record, action.job.purpose))
        mine[name] = self.calls.begin("a submission", partial(self.cluster.submit, job))
        return []

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel these jobs or members ("id_index") with one command, since a busy cluster takes time for each command."""
        if job_ids:
            call = self.calls.begin("a cancellation", partial(self.cluster.cancel, tuple(job_ids)))
            self._cancels.append((job_ids, call))
            self.calls.wait([call])
        self._note_failed_cancels()

    def _note_failed_cancels(self) -> None:
        ended = [(ids, call) for ids, call in self._cancels if call.done()]
        self._cancels = [(ids, call) for ids, call in self._cancels if not call.done()]
        for job_ids, call in ended:
            try:
                call.result()
            except ClusterError as error:
                log.warning("cancelling %s: %s", ", ".join(job_ids), error)
                self._uncancelled.update(job_ids)

    def cancel_again(self, listing: Iterable[JobState]) -> None:
        """Repeat failed cancellations of jobs that still exist.

        An id that `listing` does not show is dropped: a restarted controller reuses job ids.
        """
        self._note_failed_cancels()
        living = {job.job_id.partition("_")[0] for job in listing if job.phase != "ended"}
        again = sorted(i for i in self._uncancelled if i.partition("_")[0] in living)
        self._uncancelled.clear()
        self.cancel(again)

    def remove_queues(self, evaluation_id: str, level: int = logging.WARNING) -> None:
        """Delete an evaluation's keys from Redis. `level`: of the log line if Redis is unreachable."""
        try:
            self.queue(evaluation_id).remove()
            self.metric_queue(evaluation_id).remove()
        except QueueUnavailable as error:
            log.log(level, "queues of %s: %s", evaluation_id, error)

    # --- queues: an audit finds what Redis lost, and requests it again -------------------------------------------------

    def _change_queue(
        self, state: State, action: FillQueue | QueueShards | WithdrawShards | ReleaseClaims
    ) -> None:
        try:
            queue = self.queue(state.evaluation_id)
            match action:
                case FillQueue():
                    lanes = {lane: [_queued(s) for s in shards] for lane, shards in action.lanes.items()}
                    queue.fill(lanes, state.queue_epoch, steal=state.record.options.plan.steals)
                case QueueShards():
                    queue.add(action.lane, [_queued(s) for s in action.shards])
                case WithdrawShards():
                    queue.withdraw(action.shards)
                case ReleaseClaims():
                    queue.requeue_claims(action.trial)
        except QueueUnavailable as error:
            log.log(_level(state), "work queue: %s", error)

    def _enqueue_metric(self, state: State, metric: MetricState, *, first: bool) -> None:
        path = self.site.of(state).spec(metric.name)
        write_atomic(path, metric_spec(state, self.site, metric).model_dump_json(indent=1).encode())
        try:
            self.metric_queue(state.evaluation_id).enqueue(metric.name, path, first=first)
        except QueueUnavailable as error:
            log.warning("metric queue: %s", error)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _write_results(self, state: State, failed: Mapping[int, str]) -> None:
        with suppress(OSError):  # only predictions need them
            gpu_names.record_gpu_names(self.site.paths.gpu_names, state)
        write_results(state, self.site.of(state), failed, self.observations)
        with suppress(OSError):  # a copy of the checkpoint then does not find these answers
            reuse.keep_samples(state, self.site.paths)


def _inspect_converted(state: State, path: str) -> AnyEvent:
    announced = state.conversion.announced or state.record.checkpoint
    try:
        found = inspect_checkpoint(path)
    except CheckpointError as error:
        return CheckpointConverted(at=clock.now(), error=str(error))
    checkpoint = found.model_copy(update={"converted_from": announced.source, "step": announced.step})
    return CheckpointConverted(at=clock.now(), checkpoint=checkpoint)


def _queued(shard: tuple[str, float, float]) -> QueuedShard:
    name, rank, seconds = shard
    return QueuedShard(shard=name, rank=rank, seconds=seconds)


def _submitted(name: str, call: Call[str]) -> AnyEvent:
    """Return the event of a finished submission."""
    try:
        return JobSubmitted(at=clock.now(), job=name, job_id=call.result())
    except RefusedError as error:
        reason = "refused-on-node" if error.of_node else "refused"
        return JobNotSubmitted(at=clock.now(), job=name, error=str(error), reason=reason)
    except ClusterError as error:
        log.warning("submitting %s: %s", name, error)
        reason = "limit" if isinstance(error, LimitError) else "in-doubt"
        return JobNotSubmitted(at=clock.now(), job=name, error=str(error), reason=reason)


def _level(state: State) -> int:
    """Return the level of a log line about an unreachable Redis: a cancelled evaluation loses nothing by it.

    `scancel` of a job that runs a coordinator ends its Redis as well.
    """
    return logging.DEBUG if state.ending.cancelled else logging.WARNING
