"""Scoring: metric jobs on CPUs (executing programs, judging answers, scoring tasks) and the workers that run them.

Rule: a task is scored once all of its responses and verdicts exist; there is no partial score. Workers start with the first
trial, so that their imports overlap its load, and stay while anything is open. Called from: `step`, `ending`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.decide.evaluation import jobs, screening
from coordinator.decide.evaluation.actions import Action, EnqueueMetric
from coordinator.decide.evaluation.events import (
    Closed,
    EntryFailed,
    JobIntended,
    MetricEnqueued,
)
from coordinator.decide.evaluation.footprint import gets_more, job_gets_more, out_of_memory_words
from coordinator.decide.evaluation.job_specs import Site, worker_job
from coordinator.decide.evaluation.jobs import Due
from coordinator.decide.evaluation.state import EntryState, JobInfo, LeafState, Look, MetricState, State
from evaljobs.contract.outcomes import Executed, Failed, Scored

WAITING_SECONDS = 30.0  # how long metric jobs wait before more workers are submitted


def programs_executed(state: State, outcome: Executed, _at: float) -> list[Action]:
    _done(state, outcome.name)
    for item, why in sorted(outcome.failed.items())[:5]:
        state.warnings.append(_item_failed(outcome.task, item, why))
    return []


def entry_scored(state: State, outcome: Scored, _at: float) -> list[Action]:
    entry = state.entries[outcome.entry]
    metric = state.scoring.metrics.get(outcome.name)
    if _done(state, outcome.name) and entry.status == "scoring":
        if metric is not None and metric.blocks:
            return screening.judge_look(entry, Look(metric.blocks, outcome.result_file), outcome.unscored)
        entry.status, entry.result_file = "scored", outcome.result_file
        entry.unscored = outcome.unscored
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
    state.scoring.fruitless = state.scoring.fruitless.anew
    if metric.kind == "execute":
        state.shards.leaves[metric.task].executed += 1
    return True


def metric_job_failed(state: State, outcome: Failed, at: float) -> Due:
    metric = state.scoring.metrics.get(outcome.name)
    if metric is None or metric.done:
        return []
    _done(state, outcome.name)
    entry = state.entries[metric.entry]
    found: list[Any] = []
    had_mb = outcome.memory_mb
    if had_mb is not None and gets_more(state, "metric", outcome.name, had_mb=had_mb):
        # end workers that have less; their successors repeat what they run
        few = [
            i
            for i in state.scoring.workers.values()
            if i.job.memory_mb < state.record.options.metric.memory_mb
        ]
        found += jobs.end_jobs(state, few, at)
    if metric.kind == "execute":
        # the score job runs missing verdicts itself, and fails the entry if it cannot
        state.warnings.append(f"{outcome.name}: {outcome.error}")
        return found
    if entry.status == "scoring":  # even if this outcome fails: that may not reach the journal
        entry.status = "built"
    entry.scoring = entry.scoring.failed()
    if outcome.blame == "operator" or entry.scoring.given_up:
        found.append(EntryFailed(at=at, entry=entry.index, error=outcome.error))
    return found


def worker_out_of_memory(state: State, info: JobInfo, now: float) -> Due:
    """Handle a worker, or its process, killed for lack of memory. Fail if no more can be requested and nothing gets done."""
    if job_gets_more(state, info) or not state.scoring.fruitless.failures:
        return []
    return [Closed(at=now, reason=out_of_memory_words(state, "metric", info.job.name), instead=True)]


def _metrics(state: State, now: float) -> Due:
    for leaf in state.shards.leaves.values():
        while leaf.complete and _executable(state, leaf):
            documents = leaf.complete[: state.record.options.execute_documents]
            yield MetricEnqueued(
                at=now,
                name=f"execute-{leaf.name}-{leaf.executes}",
                entry=next(index for index in leaf.entries if state.entries[index].status == "built"),
                task=leaf.name,
                documents=tuple(sorted(documents)),
                seconds=leaf.planned.metric_seconds * len(documents) / max(1, leaf.planned.documents),
            )
    if state.record.screening is not None:
        yield from screening.looks_due(state, now)
        return
    leaves = state.shards.leaves
    answered = {  # that lack neither a response nor a verdict
        name
        for name, leaf in leaves.items()
        if not leaf.todo and not leaf.complete and leaf.executed >= leaf.executes
    }
    theirs = {index for name in answered for index in leaves[name].entries}
    built = (state.entries[index] for index in sorted(theirs) if state.entries[index].status == "built")
    for entry in built:
        if len(entry.leaves) == len(entry.sets) and answered.issuperset(entry.leaves.values()):
            its = [leaves[name].planned for name in entry.leaves.values()]
            yield MetricEnqueued(
                at=now,
                name=f"score-{entry.index}-{entry.score_jobs}",
                entry=entry.index,
                seconds=sum(leaf.metric_seconds for leaf in its if not leaf.executes),
            )


def _executable(state: State, leaf: LeafState) -> bool:
    """Return whether an `execute` job may be made of its documents. Beyond a judge's limit, jobs would only occupy workers,
    so at most one more waits.
    """
    size, at_once = state.record.options.execute_documents, leaf.planned.executes_at_once
    whole = len(leaf.complete) >= size or leaf.todo == 0
    full = at_once and leaf.executes - leaf.executed > at_once
    return whole and not full and any(state.entries[entry].status == "built" for entry in leaf.entries)


def metric_enqueued(state: State, event: MetricEnqueued) -> list[Action]:
    if event.task:
        leaf, given = state.shards.leaves[event.task], set(event.documents)
        leaf.complete = [document for document in leaf.complete if document not in given]
        leaf.executes += 1
    else:
        entry = state.entries[event.entry]
        entry.status = "scoring"
        entry.score_jobs += 1
    state.scoring.outstanding.add(event.name)
    metric = state.scoring.metrics[event.name] = MetricState(
        name=event.name,
        kind="execute" if event.task else "score",
        entry=event.entry,
        task=event.task,
        documents=event.documents,
        blocks=event.blocks,
        seconds=event.seconds,
        enqueued_at=event.at,
    )
    return [enqueue_metric(state, metric)]


def enqueue_metric(state: State, metric: MetricState) -> Action:
    """Enqueue a metric job, ahead of others if its task's metric takes longer than an even share of all. Such jobs finish
    last, above all sequential ones of a judge.
    """
    seconds = {name: leaf.planned.metric_seconds for name, leaf in state.shards.leaves.items()}
    share = sum(seconds.values()) / max(1, state.plan.workers or state.record.options.workers)
    return EnqueueMetric(name=metric.name, first=seconds.get(metric.task, 0.0) > share)


def needs_no_gpu(state: State, entry: EntryState) -> bool:
    """Return whether all responses of the entry exist."""
    planned = bool(entry.sets) and entry.sets.keys() <= entry.leaves.keys()
    return planned and not any(state.shards.leaves[name].todo for name in entry.leaves.values())


# --- workers -----------------------------------------------------------------------------------------------------------------


def scoring_due(state: State, site: Site, now: float) -> Due:
    yield from _metrics(state, now)
    scoring = state.scoring
    running = (trial.running for trial in state.trials.live.values())
    if not state.shards.leaves or not (scoring.outstanding or any(running)):
        return
    if there := list(scoring.workers.values()):
        count = _more_workers(state, there, now)
    elif scoring.fruitless.given_up:
        why = f"{scoring.fruitless.failures} worker jobs ended before they had a metric job done; see their logs"
        yield Closed(at=now, reason=why, instead=True)
        return
    else:
        count = (state.plan.workers or state.record.options.workers) if scoring.fruitless.due(now) else 0
    size = state.record.options.array_size or count
    for first in range(0, count, size or 1):  # several jobs if the site only accepts small arrays
        yield worker_job(state, site, min(size, count - first), now)


def _more_workers(state: State, there: Sequence[JobInfo], now: float) -> int:
    """Return how many more workers waiting jobs are worth when all workers run: the prediction was too low."""
    scoring = state.scoring
    members = [phase for info in there for phase in info.members.values() if phase != "ended"]
    most = min(state.record.options.workers, len(scoring.outstanding)) - len(members)
    changed = any(now - info.changed_at < WAITING_SECONDS for info in there)
    if most <= 0 or changed or "pending" in members:
        return 0
    waiting = sum(now - scoring.metrics[n].enqueued_at >= WAITING_SECONDS for n in scoring.outstanding)
    return most if waiting > len(members) else 0


def worker_job_intended(state: State, event: JobIntended) -> None:
    """Record a worker job. Worker jobs in a row, with no metric job done in between, are submitted with growing pauses."""
    scoring = state.scoring
    scoring.workers[event.job.name] = state.jobs.by_name[event.job.name]
    if len(scoring.workers) == 1:  # it is the only one
        scoring.fruitless = scoring.fruitless.failed(event.at)


def worker_job_over(state: State, info: JobInfo, _word: str) -> Due:
    state.scoring.workers.pop(info.job.name, None)
    return []


def scoring_restarted(state: State, now: float) -> list[Action]:
    """Enqueue all metric jobs without an outcome again, since Redis may have lost them."""
    actions: list[Action] = []
    for name in sorted(state.scoring.outstanding):
        metric = state.scoring.metrics[name]
        metric.enqueued_at = min(metric.enqueued_at, now)
        actions.append(enqueue_metric(state, metric))
    return actions
