"""Nodes: offered, staged on, ready for trials, in back-off after failures, withdrawn; and prefetches.

Rule: weights are staged on a node before any GPU of it is held. A node that fails is left alone for a minute, then two,
then four ... up to an hour. Where every node is in back-off the evaluation waits for the first to return; not for ever.
Called from: `step`; the subjects that see a node fail.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.cluster import COORDINATOR_ENDED
from coordinator.evaluation import indexes, jobs, memory, renewals
from coordinator.evaluation.actions import Action
from coordinator.evaluation.events import (
    BackOffOver,
    Closed,
    JobIntended,
    MemoryOffered,
    NodeBackedOff,
    NodesOffered,
    NodeWithdrawn,
    Offer,
    StorageChosen,
    WeightsReleased,
)
from coordinator.evaluation.job_specs import Site, precursor_job, trial_job
from coordinator.evaluation.jobs import Due
from coordinator.evaluation.state import IllegalEventError, JobInfo, NodeUse, Prefetch, State
from evaljobs.contract.outcomes import Failed, Staged

BACK_OFF_SECONDS = 60.0  # of a failing node's first back-off; doubled each time
MAX_BACK_OFF_SECONDS = 3600.0
# times that every node was in back-off without a shard done in between: 31 minutes in all
MAX_ALL_BACKED_OFF = 5
# precursor jobs on one node before its trials read storage, or host jobs before a back-off
MAX_PRECURSORS = 3
IN_USE = ("offered", "staging", "ready")


# --- events and outcomes -------------------------------------------------------------------------------------------------


def offered(state: State, event: NodesOffered) -> list[Action]:
    for offer in event.offers:
        lanes = offer.gpus // state.record.options.trial.gpus_per_trial
        node = state.nodes.by_name.get(offer.node)
        if node is None and lanes > 0:
            node = state.nodes.by_name[offer.node] = _taken(state, offer, lanes)
        elif node is not None and node.status == "withdrawn" and lanes > 0:
            node.status, node.lanes, node.precursor = "offered", lanes, None
            node.attempts = node.deaths = 0
            node.gpu_type, node.best_effort = offer.gpu_type, offer.best_effort
        elif node is not None and lanes > node.lanes:
            node.lanes = lanes
        if node is not None:
            node.memory_mb = offer.node_memory_mb
            largest = (state.nodes.largest_mb, offer.largest_mb, offer.node_memory_mb)
            state.nodes.largest_mb = max(largest)
            indexes.file_node(state, node)
    return []


def _taken(state: State, offer: Offer, lanes: int) -> NodeUse:
    """A node's GPUs become free; what was prefetched there, or is being staged, is used."""
    node = NodeUse(name=offer.node, lanes=lanes, gpu_type=offer.gpu_type, best_effort=offer.best_effort)
    ahead = state.nodes.prefetches.pop(offer.node, None)
    if ahead is not None:
        name_gpus(node, ahead.gpu_name)
    if ahead is not None and ahead.status in ("staging", "ready"):
        node.status = "ready" if ahead.status == "ready" else "staging"
        node.path, node.rung, node.precursor, node.why = ahead.path, ahead.rung, ahead.precursor, ahead.why
    return node


def memory_offered(state: State, event: MemoryOffered) -> list[Action]:
    for name in event.nodes:
        if name not in state.nodes.by_name and name not in state.nodes.prefetches:
            state.nodes.prefetches[name] = Prefetch(name=name)
    return []


def back_off_over(state: State, event: BackOffOver) -> list[Action]:
    """A node's back-off is over: one more death there is enough for the next."""
    for node in [state.nodes.by_name[name] for name in event.nodes]:
        staged_still = node.precursor is not None and node.precursor in state.jobs.live and node.path
        node.back_off_until, node.at_fault = None, False
        node.deaths = max(0, node.deaths - 1)
        node.status = "ready" if staged_still else "offered"
        node.precursor = node.precursor if staged_still else None
        indexes.file_node(state, node)
    return jobs.held_over(state, event.at)


def withdrawn(state: State, event: NodeWithdrawn) -> list[Action]:
    if event.node not in state.nodes.by_name and event.node not in state.nodes.prefetches:
        raise IllegalEventError(f"node {event.node} is not used")
    return withdraw(state, event.node, event.reason, event.at)


def staged(state: State, outcome: Staged, at: float) -> list[Action]:
    info = state.jobs.by_name.get(outcome.name)
    if info is None:
        return []
    actions = renewals.staged(state, info, at)
    place = _place(state, info)
    if place is None or state.winding_down:
        return jobs.release(state, info, at) if info.live and info.job.purpose == "stage" else []
    place.path, place.why = outcome.path, outcome.why or place.why
    name_gpus(place, outcome.gpu_name)
    state.nodes.content = state.nodes.content or outcome.content
    if place.status != "back-off":  # a node whose back-off began meanwhile stays there
        place.status = "ready"
    if info.job.purpose == "stage":
        place.rung = outcome.rung
    _file(state, place)
    if outcome.rung == "storage":
        state.warnings.append(f"{place.name} reads the weights from storage: {outcome.why}")
    return actions


def name_gpus(place: NodeUse | Prefetch, name: str) -> None:
    """A job says what the GPUs of its node are: news where the cluster names no type."""
    if isinstance(place, Prefetch) or not place.gpu_type:
        place.gpu_name = place.gpu_name or name


def stage_failed(state: State, outcome: Failed, _at: float) -> list[Action]:
    info = state.jobs.by_name.get(outcome.name)
    place = _place(state, info) if info is not None else None
    if outcome.blame == "operator":
        state.ending.close(outcome.error)
    elif place is not None:
        place.why = outcome.error
        if isinstance(place, NodeUse):  # a prefetch is only an attempt
            state.warnings.append(f"staging on {place.name} failed: {outcome.error}")
    return []


def _place(state: State, info: JobInfo) -> NodeUse | Prefetch | None:
    """The node or prefetch that this job is the precursor (or host) of."""
    name = info.job.node or ""
    place = state.nodes.by_name.get(name) or state.nodes.prefetches.get(name)
    return place if place is not None and place.precursor == info.job.name else None


def _file(state: State, place: NodeUse | Prefetch) -> None:
    if isinstance(place, NodeUse):
        indexes.file_node(state, place)


def intended(state: State, event: JobIntended) -> None:
    """A precursor or host job is on its way to its node."""
    name = event.job.node or ""
    place = state.nodes.by_name.get(name) or state.nodes.prefetches.get(name)
    if place is None:
        raise IllegalEventError(f"{event.job.name} is for the node {name}, which is not used")
    if isinstance(place, NodeUse) and renewals.begin(state, place, event.job.name):
        return
    place.status, place.precursor = "staging", event.job.name
    if isinstance(place, NodeUse):
        place.attempts += 1
        place.lanes = event.node_lanes
        if event.job.purpose == "host":
            place.rung, place.why = "host", state.record.options.host_why or place.why
    _file(state, place)


# --- what befalls a node ---------------------------------------------------------------------------------------------------


def job_over(state: State, info: JobInfo, word: str) -> Due:
    """A precursor or host job has ended."""
    if renewals.ended(state, info):
        return []
    place = _place(state, info)
    if place is None or place.status not in ("staging", "ready"):
        return []
    grows = word == memory.OUT_OF_MEMORY and memory.job_short(state, info)
    place.precursor, place.why = None, f"{info.job.name} ended ({word})"
    if isinstance(place, Prefetch):
        place.status = "over"
        return []
    place.attempts -= word == COORDINATOR_ENDED or grows
    place.status = "offered"
    indexes.file_node(state, place)
    if place.attempts < MAX_PRECURSORS or info.job.purpose == "stage":
        return []
    return back_off(place, f"{place.why}, see {info.job.log}", info.changed_at)


def withdraw(state: State, name: str, why: str, now: float) -> list[Action]:
    """The node is used no more; it may be offered again. What is still being staged there is no reason to use it again."""
    node = state.nodes.by_name.get(name)
    if node is not None:
        node.status, node.why, node.back_off_until = "withdrawn", why, None
        node.precursor, node.path = None, ""
        indexes.file_node(state, node)
    if (ahead := state.nodes.prefetches.get(name)) is not None:
        ahead.status, ahead.why, ahead.precursor, ahead.path = "over", why, None, ""
    there = sorted(state.index.jobs_on.get(name, {}).items())
    return jobs.end(state, [info for _, info in there], now)


def withdraw_all(state: State) -> None:
    """A new attempt of the evaluation begins: other jobs may have these nodes by now, and what is free is offered."""
    for node in state.nodes.by_name.values():
        node.status, node.precursor, node.back_off_until = "withdrawn", None, None
        indexes.file_node(state, node)
    for ahead in state.nodes.prefetches.values():
        ahead.status, ahead.precursor = "over", None


def preempted(state: State, info: JobInfo, now: float) -> list[Action]:
    """A member of a node's job was preempted: the node has a lane less. Without any it is withdrawn until it is free."""
    name = info.job.node or ""
    place = state.nodes.by_name.get(name) or state.nodes.prefetches.get(name)
    if place is None or place.status not in ("staging", "ready"):
        return []
    if isinstance(place, NodeUse) and info.job.purpose == "trial" and place.lanes > 1:
        place.lanes -= 1
        indexes.file_node(state, place)
        return []
    return withdraw(state, name, "a job of higher priority took it", now)


def back_off(node: NodeUse, why: str, now: float, *, at_fault: bool = False) -> list[NodeBackedOff]:
    """Leave a node that is in use alone: for twice as long each time. `at_fault`: as of the event."""
    if node.status not in IN_USE:
        return []
    until = now + back_off_seconds(node.back_offs)
    return [NodeBackedOff(at=now, node=node.name, why=why, until=until, at_fault=at_fault)]


def back_off_seconds(before: int) -> float:
    """Length of a back-off of a node that has had so many before."""
    return min(BACK_OFF_SECONDS * 2.0**before, MAX_BACK_OFF_SECONDS)


def backed_off(state: State, event: NodeBackedOff) -> Due:
    node = state.nodes.by_name[event.node]
    if node.status not in IN_USE:
        return []
    node.status, node.why, node.at_fault = "back-off", event.why, event.at_fault
    node.back_off_until = event.until
    node.back_offs += 1
    indexes.file_node(state, node)
    state.warnings.append(f"node {node.name} is in back-off: {event.why}")
    in_use = any(n.status in IN_USE for n in state.nodes.by_name.values())
    if in_use or not (state.shards.todo or state.plans_later):
        return []
    state.nodes.all_backed_off += 1
    if state.nodes.all_backed_off <= MAX_ALL_BACKED_OFF:
        return []
    return [Closed(at=event.at, reason=f"no node is left; the last: {event.why}", inference_only=True)]


def hosts_trials(state: State, name: str | None) -> None:
    """A job that hosts trials has done shards: the node does not fail at it."""
    node = state.nodes.by_name.get(name or "")
    if node is not None:
        node.attempts = 0
        indexes.file_node(state, node)


def unseen(state: State, node: NodeUse, now: float) -> list[Action]:
    """A trial saw nothing of what its precursor staged, and that precursor is not known to be dead.

    The first time the node may have lost its memory (a power cut that the cluster has not noticed): staged again. Once
    more, or where another node has shown it: /dev/shm is private to each job, and the node's trials are hosted.
    """
    precursor, node.precursor = node.precursor, None
    node.status, node.deaths, state.trials.deaths = "offered", 0, 0
    if node.unseen or any(n.hosted for n in state.nodes.by_name.values()):
        node.hosted, node.attempts = True, 0
        node.why = "trials do not see what another job stages there: /dev/shm is private to each job"
        state.warnings.append(f"{node.name} is served by one job that holds its GPUs: {node.why}")
    else:
        node.unseen, node.why = True, "what was staged there is gone, or not to be seen by trials"
    indexes.file_node(state, node)
    info = state.jobs.by_name.get(precursor or "")
    if info is None or not info.live:
        return []
    return renewals.release(state, info, now)


def host(state: State, node: NodeUse, why: str, now: float) -> list[Action]:
    """A limit leaves no place for a precursor beside the node's trials: one job stages and hosts them."""
    actions = withdraw(state, node.name, why, now)
    node.status, node.hosted, node.attempts, node.why = "offered", True, 0, why
    state.warnings.append(f"{node.name} is served by one job that holds its GPUs: {why}")
    indexes.file_node(state, node)
    return actions


# --- rules -------------------------------------------------------------------------------------------------------------------


def nodes_due(state: State, site: Site, now: float) -> Due:
    """Prefetches, successors of precursors, and nodes taken into use, as many as there is work for."""
    resting = state.index.nodes.get("back-off", {}).values()
    if over := tuple(n.name for n in resting if now >= (n.back_off_until or 0)):
        yield BackOffOver(at=now, nodes=over)
    ahead = [p for p in state.nodes.prefetches.values() if p.status == "offered"]
    places: list[NodeUse | Prefetch] = [*ahead, *renewals.renewals_due(state, now)]
    for place in places:
        yield precursor_job(state, site, place, now)
    dealt = not state.plans_later and state.index.lanes_in_use and not state.record.options.plan.steals
    own: set[str] | None = None
    for node in list(state.index.nodes.get("offered", {}).values()):
        if not _wanted(state, node, now):
            break
        if dealt:
            own = state.lanes_to_do() if own is None else own
            if own.isdisjoint(node.lane_names):
                continue  # without stealing it would have nothing to run
        if _reads_storage(state, node):
            yield StorageChosen(at=now, node=node.name, lanes=_room(state, node))
        elif not _host_waits(state, node):
            yield _stage(state, site, node, now)


def reads_storage(state: State, event: StorageChosen) -> list[Action]:
    node = state.nodes.by_name[event.node]
    node.lanes, node.status, node.rung = event.lanes, "ready", "storage"
    node.path = state.record.checkpoint.source
    indexes.file_node(state, node)
    return []


def content_to_come(state: State) -> bool:
    """Will a precursor say what the checkpoint holds before the first trial starts?"""
    options, used = state.record.options, state.nodes.by_name.values()
    stages = options.stage.enabled and not options.stage.hosts and state.nodes.content is None
    return stages and not any(node.status == "ready" or node.hosted for node in used)


def _room(state: State, node: NodeUse) -> int:
    """Lanes of the node that the settings' limit on trials leaves."""
    most = state.record.options.max_trials
    return node.lanes if most is None else min(node.lanes, most - state.index.lanes_in_use)


def _wanted(state: State, node: NodeUse, now: float) -> bool:
    in_use, most = state.index.lanes_in_use, state.record.options.max_nodes
    if now < state.nodes.most_until and len(state.index.in_use) >= state.nodes.most:
        return False
    if _room(state, node) <= 0 or (most is not None and len(state.index.in_use) >= most):
        return False
    return state.plans_later or state.shards.todo > in_use  # else what is in use suffices


def _reads_storage(state: State, node: NodeUse) -> bool:
    stages = state.record.options.stage.enabled and node.attempts < MAX_PRECURSORS
    return not _hosts(state, node) and not stages


def _hosts(state: State, node: NodeUse) -> bool:
    return state.record.options.stage.hosts or node.hosted


def _host_waits(state: State, node: NodeUse) -> bool:
    """A host holds GPUs from its start: not before there are shards, but to probe for the batch size."""
    if not _hosts(state, node) or not state.plans_later:
        return False
    return state.batch_size != "auto" or bool(state.index.in_use)


def _stage(state: State, site: Site, node: NodeUse, now: float) -> JobIntended:
    lanes = _room(state, node)
    if not _hosts(state, node):
        return precursor_job(state, site, replace(node, lanes=lanes), now)
    if not state.plans_later:
        lanes = max(1, min(lanes, state.shards.todo - len(state.trials.live) + len(state.index.leaving)))
    return trial_job(state, site, node, node.lane_names[:lanes], now, hosted=True)


def release_due(state: State, now: float) -> Due:
    """Weights that no shard needs any more go while metrics still run; a shard that must run again after all has them
    staged anew.
    """
    if state.shards.todo or state.trials.live or not state.shards.leaves or state.plan.pending:
        return
    if not state.index.entries.keys().isdisjoint({"unbuilt", "building", "unplanned"}):
        return  # a plan is to come
    places: list[NodeUse | Prefetch] = [*state.index.staged.values(), *state.nodes.prefetches.values()]
    held = (state.jobs.by_name.get(place.precursor or "") for place in places)
    released = [
        i.job.name for i in held if i and i.live and i.job.purpose == "stage" and i.released_at is None
    ]
    if released:
        yield WeightsReleased(at=now, jobs=tuple(released))


def weights_released(state: State, event: WeightsReleased) -> list[Action]:
    actions: list[Action] = []
    for info in [state.jobs.by_name[name] for name in event.jobs]:
        place = _place(state, info)
        if place is not None:
            place.precursor, place.path = None, ""
            if isinstance(place, Prefetch):
                place.status = "over"
            elif place.status in ("staging", "ready"):
                place.status = "offered"
            _file(state, place)
        actions += renewals.release(state, info, event.at)
    return actions
