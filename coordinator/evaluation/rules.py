"""What is due, given what is known: the rules that `machine.step` applies after every event. Pure.

Rule: each rule reads the state, records its intent in it, and returns the actions of that intent; applied twice it
does nothing the second time. None of them looks at all that was ever run: `state.index` has what is due.
It does not know: the order of events, clocks, files.
"""

from __future__ import annotations

from coordinator.evaluation import indexes, metric_rules
from coordinator.evaluation.facts import (
    MAX_HOLDERS,
    MAX_NODE_FAILURES,
    back_in_use,
    end_jobs,
    fail_entry,
    let_go,
    submit,
)
from coordinator.evaluation.messages import (
    Action,
    CancelJob,
    FindResponses,
    MakePlan,
    QueueShards,
    RemoveQueue,
    StopWorkers,
    SubmitJob,
    WriteResults,
)
from coordinator.evaluation.specs import (
    Site,
    build_job,
    convert_job,
    holder_job,
    host_job,
    trial_job,
)
from coordinator.evaluation.state import NodeUse, State

ASIDE_SECONDS = 60.0  # that a failing node rests the first time; doubled each time
MAX_ASIDE_SECONDS = 3600.0


def due(state: State, site: Site, now: float) -> list[Action]:
    """Everything that the state calls for and that has not been asked for yet."""
    if state.ended_at is not None:
        return []
    actions: list[Action] = []
    if (state.fatal or state.cancelled) and not state.all_terminal:
        actions += _close_entries(state)
    if state.conversion == "due" and not state.results_asked and not state.fatal and not state.cancelled:
        state.conversion = "running"
        actions.append(submit(state, convert_job(state, site), now))
    if state.can_work and not state.all_terminal:
        actions += _builds(state, site, now)
        _return_nodes(state, now)
        actions += _nodes(state, site, now)
        actions += _plan(state)
        actions += _deal_anew(state)
        actions += _trials(state, site, now)
        actions += metric_rules.metrics(state, site, now)
        actions += metric_rules.workers(state, site, now)
        actions += _release_holders(state, now)
    actions += _finish(state, now)
    return actions + _submit_held(state, now)


def _submit_held(state: State, now: float) -> list[Action]:
    """Jobs whose pause is over. One that shall end is not submitted: its turn comes at once, and says so."""
    due = [n for n, h in state.held.items() if now >= h.due_at or state.jobs[n].released_at is not None]
    for name in due:
        del state.held[name]
    return [SubmitJob(job=state.jobs[n].job, specs=state.jobs[n].specs) for n in due]


def _builds(state: State, site: Site, now: float) -> list[Action]:
    unbuilt = state.index.entries.get("unbuilt")
    if not unbuilt:
        return []
    waiting = [unbuilt[i] for i in sorted(unbuilt)]
    parts = min(state.record.options.build_jobs, len(waiting))
    actions: list[Action] = []
    for part in range(parts):
        entries = waiting[part::parts]
        info = build_job(state, site, entries)
        for entry in entries:
            entry.status, entry.build_job = "building", info.job.name
            indexes.file_entry(state, entry)
        actions.append(submit(state, info, now))
    return actions


def _return_nodes(state: State, now: float) -> None:
    """A node that was set aside is tried again after a minute, then two, then four …; one more failure is enough then."""
    for node in list(state.index.nodes.get("aside", {}).values()):
        if node.aside_until is None:
            node.aside_until = now + min(ASIDE_SECONDS * 2**node.asides, MAX_ASIDE_SECONDS)
            node.asides += 1
        elif now >= node.aside_until:
            node.failures, node.doubts = MAX_NODE_FAILURES - 1, {}
            back_in_use(state, node)


def _nodes(state: State, site: Site, now: float) -> list[Action]:
    """Take offered nodes into use, as many as there is work for: stage on each, before any GPU is held."""
    options = state.record.options
    ahead = list(state.index.nodes.get("ahead", {}).values())  # their GPUs are busy: once, ahead of them
    actions = [_submit_holder(state, site, node, now) for node in ahead]
    offered = list(state.index.nodes.get("offered", {}).values())
    own = _lanes_with_work(state) if offered and state.leaves and not options.steal else None
    for node in offered:
        in_use, nodes_in_use = state.index.lanes_in_use, len(state.index.in_use)
        most = options.max_trials if options.max_trials is not None else in_use + node.lanes
        if in_use >= most or (options.max_nodes is not None and nodes_in_use >= options.max_nodes):
            break
        if state.leaves and state.todo - len(state.live_trials) <= in_use - len(state.live_trials):
            break  # what is in use already suffices
        if own is not None and in_use and own.isdisjoint(_lanes(node)):
            continue  # without stealing it would have nothing to run
        node.lanes = min(node.lanes, most - in_use)
        if options.host_trials or node.hosted:
            if not state.leaves and (state.batch_size != "auto" or nodes_in_use):
                continue  # a host holds GPUs from its start: not before there are shards, but to probe for their size
            actions.append(_submit_host(state, site, node, now))
        elif options.stage and node.attempts < MAX_HOLDERS:
            actions.append(_submit_holder(state, site, node, now))
        else:
            node.status, node.rung, node.path = "ready", "storage", state.record.checkpoint.source
            indexes.file_node(state, node)
    return actions


def _submit_holder(state: State, site: Site, node: NodeUse, now: float) -> Action:
    node.status = "staging"
    info = holder_job(state, site, node)
    node.attempts += 1
    node.holder = info.job.name
    indexes.file_node(state, node)
    return submit(state, info, now)


def _submit_host(state: State, site: Site, node: NodeUse, now: float) -> Action:
    node.status, node.rung, node.why = "staging", "host", state.record.options.host_why or node.why
    if state.leaves:
        node.lanes = max(1, min(node.lanes, state.todo - len(state.live_trials)))
    info = host_job(state, site, node, [f"{node.name}/{i}" for i in range(node.lanes)])
    node.attempts += 1
    node.holder = info.job.name
    indexes.begin_trials(state, info)
    return submit(state, info, now)


def _plan(state: State) -> list[Action]:
    if state.planning or state.batch_size == "auto":
        return []
    entries = state.index.entries
    if "unbuilt" in entries or "building" in entries or "unplanned" not in entries:
        return []
    fresh = {
        index: {task: folder for task, folder in entry.sets.items() if task not in state.leaves}
        for index, entry in sorted(entries["unplanned"].items())
    }
    unsought = {task for sets in fresh.values() for task in sets} - state.looked_for
    if unsought:
        state.looked_for |= unsought
        state.planning = True
        return [FindResponses(sets=fresh, batch_size=state.batch_size)]
    lanes = tuple(
        (f"{n.name}/{i}", n.name)
        for n in state.nodes.values()
        if n.status in ("staging", "ready", "offered")
        for i in range(n.lanes)
    )
    if not lanes:
        return []
    most = state.record.options.max_trials
    state.planning = True
    return [MakePlan(sets=fresh, batch_size=state.batch_size, lanes=lanes[:most] if most else lanes)]


def _lanes(node: NodeUse) -> list[str]:
    return [f"{node.name}/{i}" for i in range(node.lanes)]


def _lanes_with_work(state: State) -> set[str]:
    """Lanes whose own shards are to do. O(shards): asked only without stealing, while a lane is idle or a node is offered."""
    return {s.lane for s in state.shards.values() if s.frame is None and not s.quarantined}


def _deal_anew(state: State) -> list[Action]:
    """Without stealing, the shards of lanes that are lost go round-robin, by rank, to the lanes of the nodes in use."""
    if state.record.options.steal or len(state.live_trials) >= state.index.lanes_in_use or not state.todo:
        return []
    kept = [lane for name in sorted(state.index.in_use) for lane in _lanes(state.nodes[name])]
    lost = _lanes_with_work(state) - set(kept) - {state.trial_lane[trial] for trial in state.live_trials}
    shards = sorted(
        (shard.rank, name)
        for name, shard in state.shards.items()
        if shard.lane in lost and shard.frame is None and not shard.quarantined
    )
    dealt: dict[str, list[tuple[str, float, float]]] = {}
    for number, (rank, name) in enumerate(shards):
        shard = state.shards[name]
        shard.lane = kept[number % len(kept)]
        dealt.setdefault(shard.lane, []).append((name, rank, shard.seconds))
    return [QueueShards(lane=lane, shards=tuple(its)) for lane, its in sorted(dealt.items())]


def _trials(state: State, site: Site, now: float) -> list[Action]:
    """As many trials as there are shards that no living trial can be holding, on the lanes that are free.

    Without stealing, a trial for each free lane whose own shards are to do.
    """
    actions: list[Action] = []
    probing = state.batch_size == "auto"
    if not state.leaves and not probing:
        return []
    need = 1 - len(state.live_trials) if probing else state.todo - len(state.live_trials)
    own = None
    if not probing and not state.record.options.steal:
        idle = len(state.live_trials) < state.index.lanes_in_use
        own = _lanes_with_work(state) if idle else set()
        need = len(own)
    if need < 0:
        actions += _cancel_pending(state, -need)
    shunned = _shunned(state)
    for node in _least_in_doubt(state) if need > 0 else ():
        if need <= 0:
            break
        busy = state.live_lanes(node.name)
        free = [
            lane
            for i in range(node.lanes)
            if (lane := f"{node.name}/{i}") not in busy
            and lane not in shunned
            and (own is None or lane in own)
        ]
        # a lane that was preempted is gone, whichever number it bore
        free = free[: max(0, min(need, node.lanes - len(busy)))]
        if free:
            info = trial_job(state, site, node, free)
            info.holder = node.holder
            indexes.begin_trials(state, info)
            need -= len(free)
            actions.append(submit(state, info, now))
    return actions


def _least_in_doubt(state: State) -> list[NodeUse]:
    """Nodes with a free lane; those where trials have died lately come last."""
    free = state.index.nodes.get("free", {})
    return sorted(free.values(), key=lambda n: n.failures + sum(n.doubts.values()))


def _shunned(state: State) -> set[str]:
    """Lanes of stragglers, for as long as another trial runs: the next trial there might get the same slow GPU."""
    if not state.stragglers or not state.index.running:
        return set()
    return {state.trial_lane[trial] for trial in state.stragglers}


def _cancel_pending(state: State, surplus: int) -> list[Action]:
    """Pending trials for which no shard is left hold nothing yet: they go, the last that were called for before others."""
    actions: list[Action] = []
    while surplus > 0 and state.index.cancellable:
        trial = next(reversed(state.index.cancellable))
        indexes.mark_cancelled(state, trial)
        surplus -= 1
        job, member = state.live_trials[trial]
        info = state.jobs[job]
        actions.append(CancelJob(job_id=info.job_id, index=member if info.job.count > 1 else None))
    return actions


def _release_holders(state: State, now: float) -> list[Action]:
    """Weights that no shard will be asked of any more go while metrics still run; a shard that must run again after all
    has them staged anew.
    """
    if state.todo or state.live_trials or not state.leaves or state.planning:
        return []
    if not state.index.entries.keys().isdisjoint({"unbuilt", "building", "unplanned"}):
        return []  # a plan is to come
    actions: list[Action] = []
    for node in list(state.index.held.values()):
        info = state.jobs.get(node.holder or "")
        if info is None or not info.live or info.job.purpose != "stage" or info.released_at is not None:
            continue
        node.holder, node.path = None, ""
        node.status = "offered" if node.status in ("staging", "ready") else node.status
        indexes.file_node(state, node)
        actions += let_go(state, info, now)
    return actions


def _finish(state: State, now: float) -> list[Action]:
    if not state.all_terminal:
        return []
    actions: list[Action] = []
    if not state.results_asked:
        state.results_asked = True
        actions.append(StopWorkers())
        actions += _cancel_live(state, now)
        actions += [WriteResults(failed=state.failed_entries()), RemoveQueue()]
        for info in [*state.live_jobs("stage"), *state.live_jobs("metric")]:
            if info.released_at is None:
                actions += let_go(state, info, now)
    if state.results_written and not state.live:
        state.ended_at = now
    return actions


def _cancel_live(state: State, now: float) -> list[Action]:
    """Trials and builds that are still there have nothing to do any more. Holders and workers end by themselves."""
    jobs = (state.jobs[name] for name in sorted(state.live))
    return end_jobs(state, [i for i in jobs if i.job.purpose in ("trial", "host", "build", "convert")], now)


def repeat_releases(state: State, now: float) -> list[Action]:
    """After a restart: say again what was said to jobs that shall end, whether or not it was heard. Holders and workers
    that run end by themselves.
    """
    told = [i for name in sorted(state.live) if (i := state.jobs[name]).released_at is not None]
    actions: list[Action] = [StopWorkers()] if state.results_asked else []
    for info in told:
        actions += let_go(state, info, now) if info.job.purpose in ("stage", "metric") else []
    return actions + end_jobs(state, [i for i in told if i.job.purpose not in ("stage", "metric")], now)


def _close_entries(state: State) -> list[Action]:
    why = state.fatal or f"cancelled: {state.cancelled}"
    spared = not state.cancelled and state.fatal_to == "inference"
    actions: list[Action] = []
    for entry in state.entries:
        if entry.terminal or (spared and metric_rules.needs_no_gpu(state, entry)):
            continue
        if spared:
            actions += fail_entry(state, entry, why)
        else:
            entry.status, entry.error = "failed", why  # its shards go with the queue
            indexes.file_entry(state, entry)
    return actions
