"""Scoring: metric jobs off the GPUs (programs to execute, answers to judge, tasks to score) and the workers that run them.

Rule: a task is scored once every response and verdict of it is there; no partial score. Workers start when the first
trial runs, since their imports overlap its load, and stay while anything is open. Called from: `step`, `ending`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.evaluation import indexes, jobs, memory
from coordinator.evaluation.actions import Action, EnqueueMetric
from coordinator.evaluation.events import (
    Closed,
    EntryFailed,
    JobIntended,
    MetricEnqueued,
    MetricJobsDied,
    MetricJobsLost,
)
from coordinator.evaluation.job_specs import Site, worker_job
from coordinator.evaluation.jobs import Due
from coordinator.evaluation.state import EntryState, JobInfo, MetricState, State
from evaljobs.contract.outcomes import Executed, Failed, Scored

MAX_ATTEMPTS = 3  # score jobs of one entry
MAX_LOSSES = 10  # times that RQ may forget a metric job: more than an hour, the waits between being doubled
MAX_WORKER_JOBS = 20  # in a row that ended and had no metric job done
MAX_WORKER_PAUSE_SECONDS = 60.0  # between the starts of two such
WAITING_SECONDS = 30.0  # that metric jobs wait before more workers are submitted


def lost(state: State, event: MetricJobsLost) -> Due:
    found: list[Any] = []
    for metric in [state.scoring.metrics[n] for n in event.jobs if n in state.scoring.outstanding]:
        metric.losses += 1
        metric.enqueued_at = event.at
        if metric.losses > MAX_LOSSES:
            found += _gone(state, metric.name, f"the queue forgot it {metric.losses} times", event.at)
        else:
            found.append(_enqueue(state, metric))
    return found


def died(state: State, event: MetricJobsDied) -> Due:
    return [a for name, why in event.jobs.items() for a in _gone(state, name, why, event.at)]


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


def _gone(state: State, name: str, why: str, at: float) -> Due:
    """A metric job ended without an outcome. It counts as failed, so that it is not enqueued for ever."""
    metric = state.scoring.metrics.get(name)
    if metric is None:
        return []
    outcome = Failed(name=name, job=metric.kind, blame="retry", error=f"{name}: {why}", entry=metric.entry)
    return failed(state, outcome, at)


def failed(state: State, outcome: Failed, at: float) -> Due:
    metric = state.scoring.metrics.get(outcome.name)
    if metric is None or metric.done:
        return []
    _done(state, outcome.name)
    entry = state.entries[metric.entry]
    found: list[Any] = []
    had_mb = outcome.memory_mb
    if had_mb is not None and memory.short(state, "metric", outcome.name, had_mb=had_mb):
        # workers that have less end; what they run is run again by their successors
        few = [
            i for i in state.live_jobs("metric") if i.job.memory_mb < state.record.options.metric.memory_mb
        ]
        found += jobs.end(state, few, at)
    if metric.kind == "execute":
        # the score job runs whatever verdicts are missing; it fails the entry if it cannot
        state.warnings.append(f"{outcome.name}: {outcome.error}")
        return found
    if entry.status == "scoring":  # also of one that fails: that may not reach the journal
        entry.status = "built"
        indexes.file_entry(state, entry)
    if outcome.blame == "operator" or entry.score_attempts - entry.score_attempts_before >= MAX_ATTEMPTS:
        found.append(EntryFailed(at=at, entry=entry.index, error=outcome.error))
    return found


def out_of_memory(state: State, info: JobInfo, now: float) -> Due:
    """The kernel ended a worker, or a process of one. Where no more can be asked for and nothing gets done, that is the end."""
    if memory.job_short(state, info) or not state.scoring.worker_attempts:
        return []
    return [Closed(at=now, reason=memory.why(state, "metric", info.job.name), instead=True)]


def _metrics(state: State, now: float) -> Due:
    executable, size = state.index.executable, state.record.options.execute_documents
    while executable:
        leaf = next(iter(executable.values()))
        documents = leaf.complete[:size]
        yield MetricEnqueued(
            at=now,
            name=f"execute-{leaf.name}-{leaf.executes}",
            entry=next(index for index in leaf.entries if state.entries[index].status == "built"),
            task=leaf.name,
            documents=tuple(sorted(documents)),
            seconds=leaf.planned.metric_seconds * len(documents) / max(1, leaf.planned.documents),
        )
    for _, entry in sorted(state.index.entries.get("answered", {}).items()):
        leaves = [state.shards.leaves[name].planned for name in entry.leaves.values()]
        yield MetricEnqueued(
            at=now,
            name=f"score-{entry.index}-{entry.score_attempts}",
            entry=entry.index,
            seconds=sum(leaf.metric_seconds for leaf in leaves if not leaf.executes),
        )


def enqueued(state: State, event: MetricEnqueued) -> list[Action]:
    if event.task:
        leaf, given = state.shards.leaves[event.task], set(event.documents)
        leaf.complete = [document for document in leaf.complete if document not in given]
        leaf.executes += 1
        indexes.file_leaf(state, leaf)
    else:
        entry = state.entries[event.entry]
        entry.status = "scoring"
        entry.score_attempts += 1
        indexes.file_entry(state, entry)
    state.scoring.outstanding.add(event.name)
    metric = state.scoring.metrics[event.name] = MetricState(
        name=event.name,
        kind="execute" if event.task else "score",
        entry=event.entry,
        task=event.task,
        documents=event.documents,
        seconds=event.seconds,
        enqueued_at=event.at,
    )
    return [_enqueue(state, metric)]


def _enqueue(state: State, metric: MetricState) -> Action:
    """Ahead of the others where the task's metric is longer than an even share of all: its jobs end last, most of all
    those of a judge, which follow one another.
    """
    seconds = {name: leaf.planned.metric_seconds for name, leaf in state.shards.leaves.items()}
    share = sum(seconds.values()) / max(1, state.plan.workers or state.record.options.workers)
    return EnqueueMetric(name=metric.name, first=seconds.get(metric.task, 0.0) > share)


def needs_no_gpu(state: State, entry: EntryState) -> bool:
    """Every response of the entry is there."""
    planned = bool(entry.sets) and entry.sets.keys() <= entry.leaves.keys()
    return planned and not any(state.shards.leaves[name].todo for name in entry.leaves.values())


# --- workers -----------------------------------------------------------------------------------------------------------------


def scoring_due(state: State, site: Site, now: float) -> Due:
    yield from _metrics(state, now)
    scoring = state.scoring
    if not state.shards.leaves or not (scoring.outstanding or state.index.running):
        return
    there = [phase for i in state.live_jobs("metric") for phase in i.members.values() if phase != "ended"]
    if there:
        count = _more_workers(state, there, now)
    elif scoring.worker_attempts >= MAX_WORKER_JOBS:
        why = f"{scoring.worker_attempts} worker jobs ended before they had a metric job done; see their logs"
        yield Closed(at=now, reason=why, instead=True)
        return
    else:
        count = 0 if now < scoring.workers_due_at else state.plan.workers or state.record.options.workers
    size = state.record.options.array_size or count
    for first in range(0, count, size or 1):  # several jobs where the site takes only small arrays
        yield worker_job(state, site, min(size, count - first), now)


def _more_workers(state: State, there: Sequence[str], now: float) -> int:
    """The prediction was wrong where jobs wait though all workers run: as many more as wait, within the settings."""
    scoring = state.scoring
    most = min(state.record.options.workers, len(scoring.outstanding))
    if most <= len(there) or "pending" in there or now - scoring.grown_at < WAITING_SECONDS:
        return 0
    waiting = sum(now - scoring.metrics[n].enqueued_at >= WAITING_SECONDS for n in scoring.outstanding)
    return most - len(there) if waiting > len(there) else 0


def intended(state: State, event: JobIntended) -> None:
    """Worker jobs that follow one another, with no metric job done in between, come with growing pauses."""
    scoring = state.scoring
    if len(state.live_jobs("metric")) == 1:  # this one alone
        scoring.worker_attempts += 1
        scoring.workers_due_at = event.at + min(2.0**scoring.worker_attempts, MAX_WORKER_PAUSE_SECONDS)
    scoring.grown_at = event.at


def restarted(state: State, now: float) -> list[Action]:
    """Redis may have lost metric jobs: all without an outcome are enqueued again."""
    actions: list[Action] = []
    for name in sorted(state.scoring.outstanding):
        metric = state.scoring.metrics[name]
        metric.enqueued_at = min(metric.enqueued_at, now)
        actions.append(_enqueue(state, metric))
    return actions
