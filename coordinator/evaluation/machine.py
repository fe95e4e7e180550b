"""The transition table: `step(state, site, event) -> actions`. Pure: no clock, no IO, no randomness.

Rule: a handler records the fact; `rules.due` then looks at the state and says what is to be done about it. So an
effect follows from what is known, not from the order in which it was learnt, and a restart needs no special path. An
event that cannot be true raises `IllegalEventError` and changes nothing. The state is changed in place (100,000
shards are not copied per event); replaying a journal rebuilds it exactly.

It does not know: how long anything takes, Slurm, Redis, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coordinator.evaluation import blame, facts, indexes, job_events, rules
from coordinator.evaluation.messages import (
    Accepted,
    Action,
    AnyEvent,
    CancelAsked,
    CheckpointConverted,
    EnqueueMetric,
    FillQueue,
    FindRequestSets,
    InspectConverted,
    JobEnded,
    JobNotSubmitted,
    JobStarted,
    JobSubmitted,
    MarkSlow,
    MemoryOffered,
    MetricJobsDied,
    MetricJobsLost,
    NodesOffered,
    NodeWithdrawn,
    Offer,
    OutcomeSeen,
    PlanFailed,
    Planned,
    PlannedLeaf,
    PriorityAsked,
    PublishSets,
    QueueLost,
    QueueShards,
    RequestSetsFound,
    ResponsesFound,
    Restarted,
    RestOver,
    ResultsWritten,
    RetryAsked,
    ShardCorrupted,
    ShardsDumped,
    ShardsStray,
    StragglersFound,
    TrialHung,
)
from coordinator.evaluation.outcomes import metric_gone, outcome_seen
from coordinator.evaluation.specs import Site
from coordinator.evaluation.state import EntryState, IllegalEventError, LeafState, NodeUse, ShardState, State

REUSED_LANE = "reused"  # no trial's: others take from it


def start(event: Accepted) -> tuple[State, list[Action]]:
    """The state of a newly accepted evaluation."""
    record = event.record
    entries = [EntryState(index=i, name=t.name) for i, t in enumerate(record.suite.tasks)]
    state = State(record=record, entries=entries, batch_size=record.suite.batch_size)
    for entry in entries:
        indexes.file_entry(state, entry)
    if record.options.host_why:
        state.warnings.append(
            f"each node is served by one job that holds its GPUs: {record.options.host_why}"
        )
    if record.convert is not None:
        state.conversion, state.announced = "due", record.checkpoint
        return state, []
    return state, [FindRequestSets(record=record)]


def step(state: State, site: Site, event: AnyEvent) -> list[Action]:
    """Take in one event; what shall be done now. Raises IllegalEventError, and changes nothing then."""
    handler = _HANDLERS.get(type(event))
    if handler is None:
        raise IllegalEventError(f"{event.kind} cannot come to a running evaluation")
    actions = handler(state, event) + rules.due(state, site, event.at)
    if state.ended_at is not None and state.retry_waits:
        actions += _again(state) + rules.due(state, site, event.at)
    return actions


def _converted(state: State, event: CheckpointConverted) -> list[Action]:
    if state.conversion == "done" and event.checkpoint is None:
        state.conversion = "due"  # gone since then: somebody cleared it
    if state.conversion != "made":
        return []
    if event.checkpoint is None:
        state.fatal = state.fatal or f"[checkpoint] convert left no checkpoint: {event.error}"
        return []
    state.conversion = "done"
    state.record = state.record.model_copy(update={"checkpoint": event.checkpoint})
    return [] if state.looked_up else [FindRequestSets(record=state.record)]


def _found(state: State, event: RequestSetsFound) -> list[Action]:
    if event.folders.keys() != set(range(len(state.entries))):
        raise IllegalEventError("request sets were looked up for other entries")
    for entry in state.entries:
        entry.folder = event.folders[entry.index]
        if entry.index in event.sets and not entry.terminal:
            entry.sets = event.sets[entry.index]
            entry.status = "built"
            indexes.file_entry(state, entry)
    state.looked_up = True
    state.batch_size = event.batch_size
    return []


def _offered(state: State, event: NodesOffered) -> list[Action]:
    per_trial = state.record.options.gpus_per_trial
    for offer in event.offers:
        lanes = offer.gpus // per_trial
        known = state.nodes.get(offer.node)
        if known is None and lanes > 0:
            state.nodes[offer.node] = NodeUse(
                name=offer.node,
                lanes=lanes,
                gpu_type=offer.gpu_type,
                memory_mb=offer.memory_mb,
                best_effort=offer.best_effort,
            )
        elif known is not None and known.status == "withdrawn" and lanes > 0:
            known.status, known.lanes, known.holder = "offered", lanes, None
            _anew(known, offer)
        elif known is not None and lanes > known.lanes:
            if not known.lanes:
                _anew(known, offer)
            known.lanes = lanes
        if (node := state.nodes.get(offer.node)) is not None:
            indexes.file_node(state, node)
    return []


def _anew(node: NodeUse, offer: Offer) -> None:
    """A node that was given up, or was staged ahead: what was tried there, or known of it, then does not count."""
    node.attempts, node.failures, node.best_effort = 0, 0, offer.best_effort
    node.doubts = {}
    node.gpu_type, node.memory_mb = offer.gpu_type, offer.memory_mb


def _memory_offered(state: State, event: MemoryOffered) -> list[Action]:
    """A node without lanes is one where weights wait for GPUs; `rules` stages there, an offer gives it lanes."""
    for name in event.nodes:
        if name not in state.nodes:
            state.nodes[name] = NodeUse(name=name, lanes=0)
            indexes.file_node(state, state.nodes[name])
    return []


def _rested(_state: State, _event: RestOver) -> list[Action]:
    """`rules` takes back whose time is over at any event; this one says that time has passed though nothing happened."""
    return []


def _withdrawn(state: State, event: NodeWithdrawn) -> list[Action]:
    node = state.nodes.get(event.node)
    if node is None:
        raise IllegalEventError(f"node {event.node} is not used")
    return facts.withdraw_node(state, node, event.reason, event.at)


def _planned(state: State, event: Planned) -> list[Action]:
    state.plans += 1
    state.planning = False
    state.planned_at = event.at
    state.predicted_makespan_seconds = event.predicted_makespan_seconds
    state.lower_bound_seconds = event.lower_bound_seconds
    state.work_seconds_95 = max(state.work_seconds_95, event.work_seconds_95)
    state.load_seconds_95 = max(state.load_seconds_95, event.load_seconds_95)
    state.workers = max(state.workers, event.workers)
    state.sigma = max(state.sigma, event.sigma)
    where = {s: (lane.lane, rank, sec) for lane in event.lanes for s, rank, sec in lane.shards}
    for leaf in event.leaves:
        if leaf.task not in state.leaves:  # planned before (a retry): its shards stand
            _place(state, leaf, where)
    actions: list[Action] = [_fill(state)]
    return actions + _publish(state)


def _place(state: State, leaf: PlannedLeaf, where: Mapping[str, tuple[str, float, float]]) -> None:
    """The leaf task's shards are to do. `where`: shard -> lane, rank and seconds."""
    per_shard = leaf.shard_documents or ((),) * len(leaf.shards)
    places: dict[int, list[int]] = {}
    for place, (shard, documents) in enumerate(zip(leaf.shards, per_shard, strict=True)):
        lane, rank, seconds = where[shard]
        state.shards[shard] = ShardState(rank=rank, seconds=seconds, lane=lane, documents=documents)
        for document in documents:
            places.setdefault(document, []).append(place)
    waiting = {document: len(its) for document, its in places.items()}
    todo = len(leaf.shards)
    state.leaves[leaf.task] = LeafState(planned=leaf, todo=todo, waiting=waiting, places=places)
    state.todo += todo
    indexes.file_leaf(state, state.leaves[leaf.task])
    indexes.file_entry(state, state.entries[leaf.entry])  # it is planned, or one task less is to be


def _responses_found(state: State, event: ResponsesFound) -> list[Action]:
    state.planning = False
    fresh = [leaf for leaf in event.leaves if leaf.task not in state.leaves]
    for leaf in fresh:
        # the lane counts only where a record turns out unreadable and its shard runs again
        _place(state, leaf, dict.fromkeys(leaf.shards, (REUSED_LANE, 0.0, 1.0)))
        state.reused[leaf.task] = event.sources[leaf.task]
    for name, frame in event.shards:
        if state.shards[name].frame is None:
            facts.count_shard_done(state, name, frame)
    for index, file in event.scores.items():
        entry = state.entries[index]
        if entry.status == "built":
            entry.status, entry.result_file = "scored", file
            indexes.file_entry(state, entry)
            state.reused_scores.add(index)
    return [_fill(state), *_publish(state)] if fresh else []


def _publish(state: State) -> list[Action]:
    """Name the request sets to whom they were not named at the start: probing trials, and holders that keep them."""
    asked = state.record.suite.batch_size == "auto" or state.record.options.requests_mb
    if not asked or not state.leaves or state.batch_size == "auto":
        return []
    sets = {task: leaf.planned.folder for task, leaf in state.leaves.items()}
    return [PublishSets(batch_size=state.batch_size, sets=sets)]


def _fill(state: State) -> FillQueue:
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for name, shard in state.shards.items():
        if shard.frame is None and not shard.quarantined:
            lanes.setdefault(shard.lane, []).append((name, shard.rank, shard.seconds))
    return FillQueue(lanes={lane: tuple(shards) for lane, shards in lanes.items()})


def _plan_failed(state: State, event: PlanFailed) -> list[Action]:
    state.planning = False
    state.fatal = state.fatal or event.error
    return []


def _dumped(state: State, event: ShardsDumped) -> list[Action]:
    for name, frame in event.shards:
        shard = state.shards.get(name)
        if shard is None:
            raise IllegalEventError(f"responses of the unplanned shard {name}")
        if shard.frame is not None:
            continue  # a second copy: the first one counts
        facts.count_shard_done(state, name, frame)
        blame.done_by(state, frame)
    state.barren = state.rests = 0
    return []


def _corrupted(state: State, event: ShardCorrupted) -> list[Action]:
    shard = state.shards.get(event.shard)
    if shard is None or shard.frame is None:
        return []
    leaf = state.leaves[event.shard.rsplit("|", 2)[0]]
    if state.entries[leaf.planned.entry].terminal:
        return []  # its score stands, or will never be
    facts.take_back_shard(state, event.shard)
    if failed := facts.count_unread(state, event.shard, event.error):
        return failed
    state.warnings.append(f"shard {event.shard} runs again: {event.error}")
    return [QueueShards(lane=shard.lane, shards=((event.shard, shard.rank, shard.seconds),))]


def _queue_lost(state: State, _event: QueueLost) -> list[Action]:
    return refill(state)


def refill(state: State) -> list[Action]:
    """Whatever the queue should hold. Changes nothing, so it may be done again without a word in the journal."""
    return [_fill(state), *_mark(state)] if state.leaves and not state.winding_down else []


def _stray(state: State, event: ShardsStray) -> list[Action]:
    actions: list[Action] = []
    for name in event.again:
        shard = state.shards.get(name)
        if shard is not None and shard.frame is None and not shard.quarantined:
            actions += facts.count_unread(state, name, "response files hold no record of it")
    return [*actions, *requeue(state, event.shards)]


def requeue(state: State, shards: Iterable[str]) -> list[Action]:
    """Those of these shards that are to do. Changes nothing, as `refill`."""
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for name in shards:
        shard = state.shards.get(name)
        if shard is not None and shard.frame is None and not shard.quarantined:
            lanes.setdefault(shard.lane, []).append((name, shard.rank, shard.seconds))
    return [QueueShards(lane=lane, shards=tuple(todo)) for lane, todo in sorted(lanes.items())]


def _metrics_lost(state: State, event: MetricJobsLost) -> list[Action]:
    actions: list[Action] = []
    for metric in [state.metrics[n] for n in event.jobs if n in state.outstanding]:
        metric.losses += 1
        metric.enqueued_at = event.at
        if metric.losses > facts.MAX_LOSSES:
            actions += metric_gone(state, metric.name, f"the queue forgot it {metric.losses} times")
        else:
            actions.append(EnqueueMetric(name=metric.name, spec=metric.spec, seconds=metric.seconds))
    return actions


def _metrics_died(state: State, event: MetricJobsDied) -> list[Action]:
    return [a for name, why in event.jobs.items() for a in metric_gone(state, name, why)]


def _straggle(state: State, event: StragglersFound) -> list[Action]:
    for trial, times in sorted(event.trials.items()):
        if trial in state.live_trials and trial not in state.stragglers:
            state.stragglers[trial] = times
            state.warnings.append(f"{trial} is a straggler: it takes {times:.1f} times as long as the others")
    return _mark(state)


def _mark(state: State) -> list[Action]:
    living = {trial: times for trial, times in state.stragglers.items() if trial in state.live_trials}
    return [MarkSlow(trials=living)] if living else []


def _cancel(state: State, event: CancelAsked) -> list[Action]:
    state.retry_waits = False
    if state.results_written:
        return []  # it is over: its scores stand
    state.cancelled = state.cancelled or event.reason
    return []


def _retry(state: State, _event: RetryAsked) -> list[Action]:
    """Of one that runs, what has failed is tried again where the rest is under way; one that is ending ends first: its jobs
    are told to go, its nodes may be others' by then.
    """
    if not state.failed_entries() and not state.unscored_items:
        return []
    if state.winding_down and state.ended_at is None:
        state.retry_waits = True
        return []
    return _again(state) if state.ended_at is not None else _reopen(state)


def _again(state: State) -> list[Action]:
    """Go on with one that has ended: it has no job, no memory and no queue."""
    state.cancelled = ""
    state.asked_again = True
    state.results_asked = state.results_written = state.retry_waits = False
    state.ended_at = None
    state.conversion_tries = 0
    if state.conversion != "none":
        state.conversion = "due"  # its result was cleared with the evaluation's end
    for node in state.nodes.values():  # they may be others' by now: whatever is free is offered
        node.status, node.holder, node.aside_until = "withdrawn", None, None
        indexes.file_node(state, node)
    return _reopen(state)


def _reopen(state: State) -> list[Action]:
    state.fatal, state.fatal_to = "", "all"
    state.barren = state.rests = state.worker_tries = state.barren_builds = 0
    for entry in state.entries:
        if entry.status == "scored" and entry.unscored:
            entry.status, entry.unscored = "built", {}  # its responses are there: it is scored once more
            entry.score_tries_before = entry.score_tries
            indexes.file_entry(state, entry)
    requeue = [facts.reopen_entry(state, entry) for entry in state.entries if entry.status == "failed"]
    return [QueueShards(lane=lane, shards=shards) for part in requeue for lane, shards in part.items()]


def _prioritize(state: State, event: PriorityAsked) -> list[Action]:
    state.record = state.record.model_copy(update={"priority": event.priority})
    return []


def _restarted(state: State, event: Restarted) -> list[Action]:
    """Repeat what may be repeated. Jobs still "intended" are looked up by name before they are submitted again."""
    for name in state.live:
        info = state.jobs[name]
        if info.phase == "intended" and name not in state.held:
            info.phase, info.changed_at = "uncertain", 0.0
        info.changed_at = min(info.changed_at, event.at)  # a clock that was set back meanwhile
        info.released_at = info.released_at and min(info.released_at, event.at)
    for outstanding in state.outstanding:
        metric = state.metrics[outstanding]
        metric.enqueued_at = min(metric.enqueued_at, event.at)
    actions: list[Action] = []
    if state.conversion in ("made", "done"):
        actions.append(InspectConverted(path=state.converted_path))
    if not state.looked_up and state.conversion in ("none", "done"):
        actions.append(FindRequestSets(record=state.record))
    state.planning = False
    state.looked_for &= state.leaves.keys()
    state.results_asked = state.results_asked and state.results_written
    if not state.results_asked:
        actions += _publish(state)
    actions += [
        EnqueueMetric(name=m.name, spec=m.spec, seconds=m.seconds)
        for n in sorted(state.outstanding)
        for m in (state.metrics[n],)
    ]
    actions += rules.repeat_releases(state, event.at)
    return actions


def _results_written(state: State, _event: ResultsWritten) -> list[Action]:
    state.results_written = True
    return []


def _outcome(state: State, event: OutcomeSeen) -> list[Action]:
    key = (event.outcome.kind, event.outcome.name)
    if key in state.seen:
        return []  # a coordinator that took over finds the files of its predecessor
    state.seen.add(key)
    return outcome_seen(state, event.outcome, event.at)


_HANDLERS: dict[type, Callable[[State, Any], list[Action]]] = {
    CheckpointConverted: _converted,
    RequestSetsFound: _found,
    NodesOffered: _offered,
    MemoryOffered: _memory_offered,
    RestOver: _rested,
    NodeWithdrawn: _withdrawn,
    JobSubmitted: job_events.submitted,
    JobNotSubmitted: job_events.not_submitted,
    JobStarted: job_events.started,
    JobEnded: job_events.ended,
    OutcomeSeen: _outcome,
    Planned: _planned,
    ResponsesFound: _responses_found,
    PlanFailed: _plan_failed,
    ShardsDumped: _dumped,
    ShardCorrupted: _corrupted,
    QueueLost: _queue_lost,
    ShardsStray: _stray,
    MetricJobsLost: _metrics_lost,
    MetricJobsDied: _metrics_died,
    TrialHung: job_events.hung,
    StragglersFound: _straggle,
    CancelAsked: _cancel,
    RetryAsked: _retry,
    PriorityAsked: _prioritize,
    Restarted: _restarted,
    ResultsWritten: _results_written,
}
