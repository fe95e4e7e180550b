"""What an outcome file changes in the state. Pure.

Rule: an outcome is a job's own account; one that comes twice, or from a job that was given up, changes nothing.
It does not know: how outcomes are found.
"""

from __future__ import annotations

from coordinator.evaluation import blame, facts, indexes
from coordinator.evaluation.messages import Action, InspectConverted, ReleaseClaims
from coordinator.evaluation.state import State
from evaljobs.contract.outcomes import (
    Built,
    Cleared,
    Converted,
    Executed,
    Failed,
    Probed,
    Scored,
    Staged,
    TrialEnded,
)

AnyOutcome = Built | Converted | Staged | Cleared | TrialEnded | Probed | Executed | Scored | Failed


def outcome_seen(state: State, outcome: AnyOutcome, at: float) -> list[Action]:  # noqa: PLR0911 (a table)
    """Take in one outcome; actions beyond those that `rules.due` finds."""
    match outcome:
        case Built():
            return _built(state, outcome)
        case Converted():
            return _converted(state, outcome)
        case Staged():
            return _staged(state, outcome, at)
        case TrialEnded():
            return _trial_ended(state, outcome)
        case Probed():
            return _probed(state, outcome)
        case Executed():
            return _executed(state, outcome)
        case Scored():
            return _scored(state, outcome)
        case Failed():
            return _failed(state, outcome, at)
        case Cleared():
            return []  # the end of its job says it, too


def _built(state: State, outcome: Built) -> list[Action]:
    entry = state.entries[outcome.entry]
    if entry.terminal or outcome.batch_size != state.batch_size:
        return []
    entry.sets = outcome.sets
    entry.status = "built"
    entry.error = ""
    indexes.file_entry(state, entry)
    state.barren_builds = 0
    return []


def _converted(state: State, outcome: Converted) -> list[Action]:
    if state.conversion != "running":
        return []
    state.conversion, state.converted_path = "made", outcome.path
    return [InspectConverted(path=outcome.path)]


def _staged(state: State, outcome: Staged, at: float) -> list[Action]:
    node = state.nodes.get(outcome.node)
    info = state.jobs.get(outcome.name)
    if node is None or info is None:
        return []
    if node.holder != outcome.name or state.results_asked:
        if info.live and info.job.purpose == "stage":
            return facts.let_go(state, info, at)
        return []
    node.path, node.why = outcome.path, outcome.why or node.why
    if node.status != "aside":  # one that was set aside meanwhile rests all the same
        node.status = "ready"
    if info.job.purpose == "stage":
        node.rung = outcome.rung
    indexes.file_node(state, node)
    if outcome.rung == "storage":
        state.warnings.append(f"{node.name} reads the weights from storage: {outcome.why}")
    return []


def _trial_ended(state: State, outcome: TrialEnded) -> list[Action]:
    where = indexes.end_trial(state, outcome.name)
    if where is None:
        return []
    job = state.jobs[where[0]].job
    if job.purpose == "host" and job.node in state.nodes and outcome.shards:
        state.nodes[job.node].attempts = 0  # this node does host trials
        indexes.file_node(state, state.nodes[job.node])
    if outcome.reason == "queue-lost":
        state.warnings.append(f"{outcome.name} lost the work queue")
    if outcome.shards == 0 and outcome.reason == "queue-lost":
        facts.count_trial_death(
            state, state.jobs[where[0]].job.node, f"{outcome.name} could not reach the work queue"
        )
    return [] if outcome.reason == "drained" else [ReleaseClaims(trial=outcome.name)]


def _probed(state: State, outcome: Probed) -> list[Action]:
    if state.batch_size != "auto":
        return []
    state.batch_size = outcome.batch_size
    for entry in state.entries:
        if entry.status == "built":
            entry.status = "unbuilt"  # requests are there; the batches of this size are added
            entry.build_tries = 0
            indexes.file_entry(state, entry)
    return []


def _executed(state: State, outcome: Executed) -> list[Action]:
    _metric_done(state, outcome.name)
    for item, why in sorted(outcome.failed.items())[:5]:
        state.warnings.append(_item_failed(outcome.task, item, why))
    return []


def _metric_done(state: State, name: str) -> bool:
    metric = state.metrics.get(name)
    if metric is None or metric.done:
        return False
    metric.done = True
    state.outstanding.discard(name)
    state.worker_tries = 0
    if metric.kind == "execute":
        state.leaves[metric.task].executed += 1
        indexes.file_leaf(state, state.leaves[metric.task])
    return True


def _scored(state: State, outcome: Scored) -> list[Action]:
    entry = state.entries[outcome.entry]
    if _metric_done(state, outcome.name) and entry.status == "scoring":
        entry.status, entry.result_file = "scored", outcome.result_file
        entry.unscored = outcome.unscored
        indexes.file_entry(state, entry)
        for item, why in list(outcome.unscored.items())[:5]:
            task, _, document = item.rpartition(" ")
            state.warnings.append(_item_failed(task, document, why))
    return []


def _item_failed(task: str, document: str, why: str) -> str:
    return f"{task}: item {document} failed: {why}"


def _failed(state: State, outcome: Failed, at: float) -> list[Action]:
    match outcome.job:
        case "build":
            return _build_failed(state, outcome)
        case "convert":
            if outcome.blame == "operator":
                state.fatal = state.fatal or outcome.error
            return []  # otherwise its job's end says that it is due again
        case "stage" | "host":
            return _stage_failed(state, outcome)
        case "trial":
            return _trial_failed(state, outcome, at)
        case "execute" | "score":
            return _metric_failed(state, outcome)


def _build_failed(state: State, outcome: Failed) -> list[Action]:
    if outcome.entry is None:
        return []
    entry = state.entries[outcome.entry]
    if entry.status != "building":
        return []
    entry.build_tries += 1
    state.barren_builds = 0
    if outcome.blame == "operator" or entry.build_tries >= facts.MAX_BUILDS:
        return facts.fail_entry(state, entry, outcome.error)
    entry.status = "unbuilt"
    indexes.file_entry(state, entry)
    return []


def _stage_failed(state: State, outcome: Failed) -> list[Action]:
    node = state.nodes.get(outcome.node or "")
    if outcome.blame == "operator":
        state.fatal = state.fatal or outcome.error
    elif node is not None and node.holder == outcome.name:
        node.why = outcome.error
        if node.lanes:  # ahead of its GPUs it was a try
            state.warnings.append(f"staging on {node.name} failed: {outcome.error}")
    return []


def _trial_failed(state: State, outcome: Failed, at: float) -> list[Action]:
    where = indexes.end_trial(state, outcome.name)
    actions: list[Action] = [ReleaseClaims(trial=outcome.name)] if where is not None else []
    node = state.nodes.get(outcome.node or "")
    if outcome.unstaged and node is not None:  # news even where the job's end was seen first
        info = state.jobs.get(outcome.name.rpartition(".")[0])
        if info is None or node.hosted or node.holder != info.holder:
            return actions  # a sibling has said so, or the precursor's own end
        if node.status == "ready" and node.holder in state.live:
            return actions + facts.staging_unseen(state, node, at)
    if where is None:
        return blame.told_late(state, outcome.name, outcome.shard, outcome.error)
    where_it_ran = state.jobs[where[0]].job.node
    if outcome.shard is not None:
        return actions + blame.died_with(state, where_it_ran, outcome.name, outcome.shard, outcome.error)
    facts.count_trial_death(state, where_it_ran, outcome.error)
    if outcome.blame == "operator":
        state.fatal = state.fatal or outcome.error
    return actions


def metric_gone(state: State, name: str, why: str) -> list[Action]:
    """A metric job came to an end without an outcome: it counts as failed, so nothing is asked for without end."""
    metric = state.metrics.get(name)
    if metric is None:
        return []
    failed = Failed(name=name, job=metric.kind, blame="retry", error=f"{name}: {why}", entry=metric.entry)
    return _metric_failed(state, failed)


def _metric_failed(state: State, outcome: Failed) -> list[Action]:
    metric = state.metrics.get(outcome.name)
    if metric is None or metric.done:
        return []
    _metric_done(state, outcome.name)
    entry = state.entries[metric.entry]
    if metric.kind == "execute":
        # the score job runs whatever verdicts are missing; it fails the entry if it cannot
        state.warnings.append(f"{outcome.name}: {outcome.error}")
    elif (
        outcome.blame == "operator" or entry.score_tries - entry.score_tries_before >= facts.MAX_METRIC_TRIES
    ):
        facts.fail_entry(state, entry, outcome.error)
    elif entry.status == "scoring":
        entry.status = "built"
        indexes.file_entry(state, entry)
    return []
