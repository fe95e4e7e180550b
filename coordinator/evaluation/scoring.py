"""Scoring: metric jobs off the GPUs (programs to execute, answers to judge, tasks to score) and the workers that run them.

Rule: a task is scored once every response and verdict of it is there; no partial score. Workers start when the first
trial runs, since their imports overlap its load, and stay while anything is open. Called from: `step`, `ending`.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.evaluation import indexes, jobs, memory, shards
from coordinator.evaluation.actions import Action, EnqueueMetric
from coordinator.evaluation.events import JobIntended, MetricJobsDied, MetricJobsLost
from coordinator.evaluation.job_specs import Site, worker_job
from coordinator.evaluation.jobs import Due
from coordinator.evaluation.state import EntryState, JobInfo, LeafState, MetricState, State
from evaljobs.contract.outcomes import Executed, Failed, Scored

MAX_ATTEMPTS = 3  # score jobs of one entry
MAX_LOSSES = 10  # times that RQ may forget a metric job: more than an hour, the waits between being doubled
MAX_WORKER_JOBS = 20  # in a row that ended and had no metric job done
MAX_WORKER_PAUSE_SECONDS = 60.0  # between the starts of two such
WAITING_SECONDS = 30.0  # that metric jobs wait before more workers are submitted


def lost(state: State, event: MetricJobsLost) -> list[Action]:
    actions: list[Action] = []
    for metric in [state.scoring.metrics[n] for n in event.jobs if n in state.scoring.outstanding]:
        metric.losses += 1
        metric.enqueued_at = event.at
        if metric.losses > MAX_LOSSES:
            actions += _gone(state, metric.name, f"the queue forgot it {metric.losses} times")
        else:
            actions.append(EnqueueMetric(name=metric.name))
    return actions


def died(state: State, event: MetricJobsDied) -> list[Action]:
    return [a for name, why in event.jobs.items() for a in _gone(state, name, why)]


def executed(state: State, outcome: Executed, _at: float) -> list[Action]:
    _done(state, outcome.name)
    for item, why in sorted(outcome.failed.items())[:5]:
        state.warnings.append(_item_failed(outcome.task, item, why))
    return []


def scored(state: State, outcome: Scored, _at: float) -> list[Action]:
    entry = state.entries[outcome.entry]
    if _done(state, outcome.name) and entry.status == "scoring":
        entry.status, entry.result_file = "scored", outcome.result_file
        entry.unscored = outcome.unscored
        indexes.file_entry(state, entry)
        for item, why in list(outcome.unscored.items())[:5]:
            task, _, document = item.rpartition(" ")
            state.warnings.append(_item_failed(task, document, why))
    return []


def _item_failed(task: str, document: str, why: str) -> str:
    return f"{task}: item {document} failed: {why}"


def _done(state: State, name: str) -> bool:
    metric = state.scoring.metrics.get(name)
    if metric is None or metric.done:
        return False
    metric.done = True
    state.scoring.outstanding.discard(name)
    state.scoring.worker_attempts = 0
    if metric.kind == "execute":
        state.shards.leaves[metric.task].executed += 1
        indexes.file_leaf(state, state.shards.leaves[metric.task])
    return True


def _gone(state: State, name: str, why: str) -> list[Action]:
    """A metric job ended without an outcome. It counts as failed, so that it is not enqueued for ever."""
    metric = state.scoring.metrics.get(name)
    if metric is None:
        return []
    outcome = Failed(name=name, job=metric.kind, blame="retry", error=f"{name}: {why}", entry=metric.entry)
    return failed(state, outcome, 0.0)


def failed(state: State, outcome: Failed, at: float) -> list[Action]:
    metric = state.scoring.metrics.get(outcome.name)
    if metric is None or metric.done:
        return []
    _done(state, outcome.name)
    entry = state.entries[metric.entry]
    actions: list[Action] = []
    had_mb = outcome.memory_mb
    if had_mb is not None and memory.short(state, "metric", outcome.name, had_mb=had_mb):
        # workers that have less end; what they run is run again by their successors
        few = [
            i for i in state.live_jobs("metric") if i.job.memory_mb < state.record.options.worker_memory_mb
        ]
        actions += jobs.end(state, few, at)
    if metric.kind == "execute":
        # the score job runs whatever verdicts are missing; it fails the entry if it cannot
        state.warnings.append(f"{outcome.name}: {outcome.error}")
    elif outcome.blame == "operator" or entry.score_attempts - entry.score_attempts_before >= MAX_ATTEMPTS:
        shards.fail_entry(state, entry, outcome.error)
    elif entry.status == "scoring":
        entry.status = "built"
        indexes.file_entry(state, entry)
    return actions


def out_of_memory(state: State, info: JobInfo) -> None:
    """The kernel ended a worker, or a process of one. Where no more can be asked for and nothing gets done, that is the end."""
    if not memory.job_short(state, info) and state.scoring.worker_attempts:
        state.ending.close(memory.why(state, "metric", info.job.name), instead=True)


def _metrics(state: State, now: float) -> list[Action]:
    actions: list[Action] = []
    executable = state.index.executable
    while executable:
        actions.append(_execute(state, next(iter(executable.values())), now))
    for _, entry in sorted(state.index.entries.get("answered", {}).items()):
        entry.status = "scoring"
        indexes.file_entry(state, entry)
        name = f"score-{entry.index}-{entry.score_attempts}"
        entry.score_attempts += 1
        metric = MetricState(
            name=name,
            kind="score",
            entry=entry.index,
            seconds=sum(
                state.shards.leaves[name].planned.metric_seconds
                for name in entry.leaves.values()
                if not state.shards.leaves[name].planned.executes
            ),
            enqueued_at=now,
        )
        actions.append(_enqueue(state, metric))
    return actions


def needs_no_gpu(state: State, entry: EntryState) -> bool:
    """Every response of the entry is there."""
    planned = bool(entry.sets) and entry.sets.keys() <= entry.leaves.keys()
    return planned and not any(state.shards.leaves[name].todo for name in entry.leaves.values())


def _execute(state: State, leaf: LeafState, now: float) -> Action:
    size = state.record.options.execute_documents
    documents, leaf.complete = leaf.complete[:size], leaf.complete[size:]
    name = f"execute-{leaf.name}-{leaf.executes}"
    entry = next(index for index in leaf.entries if state.entries[index].status == "built")
    leaf.executes += 1
    indexes.file_leaf(state, leaf)
    metric = MetricState(
        name=name,
        kind="execute",
        entry=entry,
        task=leaf.name,
        documents=tuple(sorted(documents)),
        seconds=leaf.planned.metric_seconds * len(documents) / max(1, leaf.planned.documents),
        enqueued_at=now,
    )
    return _enqueue(state, metric)


def _enqueue(state: State, metric: MetricState) -> EnqueueMetric:
    state.scoring.metrics[metric.name] = metric
    state.scoring.outstanding.add(metric.name)
    return EnqueueMetric(name=metric.name)


# --- workers -----------------------------------------------------------------------------------------------------------------


def scoring_due(state: State, site: Site, now: float, *, submits: bool) -> Due:
    return [*_metrics(state, now), *_workers(state, site, now, submits=submits)]


def _workers(state: State, site: Site, now: float, *, submits: bool) -> Due:
    scoring = state.scoring
    if not state.shards.leaves or not (scoring.outstanding or state.index.running):
        return []
    there = [phase for i in state.live_jobs("metric") for phase in i.members.values() if phase != "ended"]
    if there:
        count = _more_workers(state, there, now)
    elif scoring.worker_attempts >= MAX_WORKER_JOBS:
        why = f"{scoring.worker_attempts} worker jobs ended before they had a metric job done; see their logs"
        state.ending.close(why, instead=True)
        return []
    else:
        count = 0 if now < scoring.workers_due_at else state.plan.workers or state.record.options.workers
    if not count or not submits:
        return []
    actions: Due = []
    size = state.record.options.array_size or count
    for first in range(0, count, size):  # several jobs where the site takes only small arrays
        event = worker_job(state, site, min(size, count - first), now)
        intended(state, event)
        actions += jobs.submission(event)
    return actions


def _more_workers(state: State, there: Sequence[str], now: float) -> int:
    """The prediction was wrong where jobs wait though all workers run: as many more as wait, within the settings."""
    scoring = state.scoring
    most = min(state.record.options.workers, len(scoring.outstanding))
    if most <= len(there) or "pending" in there or now - scoring.grown_at < WAITING_SECONDS:
        return 0
    scoring.grown_at = now
    waiting = sum(now - scoring.metrics[n].enqueued_at >= WAITING_SECONDS for n in scoring.outstanding)
    return most - len(there) if waiting > len(there) else 0


def intended(state: State, event: JobIntended) -> list[Action]:
    """Worker jobs that follow one another, with no metric job done in between, come with growing pauses."""
    scoring = state.scoring
    if not state.live_jobs("metric"):
        scoring.worker_attempts += 1
        scoring.workers_due_at = event.at + min(2.0**scoring.worker_attempts, MAX_WORKER_PAUSE_SECONDS)
        scoring.grown_at = event.at
    jobs.intended(state, event)
    return []


def restarted(state: State, now: float) -> list[Action]:
    """Redis may have lost metric jobs: all without an outcome are enqueued again."""
    actions: list[Action] = []
    for name in sorted(state.scoring.outstanding):
        metric = state.scoring.metrics[name]
        metric.enqueued_at = min(metric.enqueued_at, now)
        actions.append(EnqueueMetric(name=name))
    return actions
