"""What is due off the GPUs: programs to execute, tasks to score, workers for both. Pure.

Rule: as in `rules`: each reads the state, records its intent in it, and applied twice does nothing the second time.
It does not know: the order of events, clocks, files, how a worker shares out its jobs.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.evaluation import indexes
from coordinator.evaluation.facts import submit
from coordinator.evaluation.messages import Action, EnqueueMetric
from coordinator.evaluation.specs import Site, execute_spec, score_spec, worker_job
from coordinator.evaluation.state import EntryState, LeafState, MetricState, State

MAX_WORKER_JOBS = 20  # in a row that ended and had no metric job done
MAX_WORKER_PAUSE_SECONDS = 60.0  # between the starts of two such
WAITING_SECONDS = 30.0  # that metric jobs wait before more workers are sent for


def metrics(state: State, site: Site, now: float) -> list[Action]:
    actions: list[Action] = []
    executable = state.index.executable
    while executable:
        actions.append(_execute(state, site, next(iter(executable.values())), now))
    for _, entry in sorted(state.index.entries.get("answered", {}).items()):
        entry.status = "scoring"
        indexes.file_entry(state, entry)
        name = f"score-{entry.index}-{entry.score_tries}"
        entry.score_tries += 1
        metric = MetricState(
            name=name,
            kind="score",
            entry=entry.index,
            spec=score_spec(state, site, entry, name),
            attempt=entry.score_tries,
            seconds=sum(
                state.leaves[t].planned.metric_seconds
                for t in entry.sets
                if not state.leaves[t].planned.executes
            ),
            enqueued_at=now,
        )
        actions.append(_enqueue(state, metric))
    return actions


def needs_no_gpu(state: State, entry: EntryState) -> bool:
    """Every response of the entry is there."""
    leaves = [state.leaves.get(task) for task in entry.sets]
    return bool(leaves) and all(leaf is not None and not leaf.todo for leaf in leaves)


def _execute(state: State, site: Site, leaf: LeafState, now: float) -> Action:
    size = state.record.options.execute_documents
    documents, leaf.complete = leaf.complete[:size], leaf.complete[size:]
    name = f"execute-{leaf.planned.task}-{leaf.executes}"
    leaf.executes += 1
    indexes.file_leaf(state, leaf)
    metric = MetricState(
        name=name,
        kind="execute",
        entry=leaf.planned.entry,
        task=leaf.planned.task,
        spec=execute_spec(state, site, leaf, documents, name),
        seconds=leaf.planned.metric_seconds * len(documents) / max(1, leaf.planned.documents),
        enqueued_at=now,
    )
    return _enqueue(state, metric)


def _enqueue(state: State, metric: MetricState) -> EnqueueMetric:
    state.metrics[metric.name] = metric
    state.outstanding.add(metric.name)
    return EnqueueMetric(name=metric.name, spec=metric.spec, seconds=metric.seconds)


def workers(state: State, site: Site, now: float) -> list[Action]:
    """Workers start when the first trial does (their imports overlap its load) and are kept while anything is open."""
    if not state.leaves or not (state.outstanding or state.index.running):
        return []
    there = [phase for i in state.live_jobs("metric") for phase in i.members.values() if phase != "ended"]
    if there:
        more = _more_workers(state, there, now)
        return [submit(state, worker_job(state, site, more), now)] if more else []
    if state.worker_tries >= MAX_WORKER_JOBS:
        state.fatal_to = "all"
        state.fatal = (
            f"{state.worker_tries} worker jobs ended before they had a metric job done; see their logs"
        )
        return []
    if now < state.workers_due_at:
        return []
    state.worker_tries += 1
    state.workers_due_at = now + min(2.0**state.worker_tries, MAX_WORKER_PAUSE_SECONDS)
    state.grown_at = now
    return [submit(state, worker_job(state, site, state.workers or state.record.options.workers), now)]


def _more_workers(state: State, there: Sequence[str], now: float) -> int:
    """The prediction was wrong where jobs wait though all workers run: as many more as wait, within the settings."""
    most = min(state.record.options.workers, len(state.outstanding))
    if most <= len(there) or "pending" in there or now - state.grown_at < WAITING_SECONDS:
        return 0
    state.grown_at = now
    waiting = sum(now - state.metrics[name].enqueued_at >= WAITING_SECONDS for name in state.outstanding)
    return most - len(there) if waiting > len(there) else 0
