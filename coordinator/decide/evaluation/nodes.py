"""Nodes: offered, staged on, ready for trials, in back-off after failures, withdrawn; and prefetches.

Rule: weights are staged on a node before any of its GPUs is held. A failing node is left alone for a minute, then two, then
four, up to an hour. If every node is in back-off the evaluation waits for the first to return, a limited number of times.

Precursors and idle metric workers count towards limits on this user's jobs (MaxJobs, GrpTRES, MaxSubmit) that builds and
trials need. If no work under the limit is left to end, the evaluation keeps as many nodes as the limit serves with all their
trials, at most half of them. If no other evaluation's work is left to end either, it gives up the precursor of its last node,
and one job there stages and hosts the trials. If that job alone is too large, it gets half the lanes. What evaluations give
up for each other: `coordinator.decide.allocation.job_limits`. Called from: `step`; the subjects that see a node fail.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.decide.evaluation import jobs
from coordinator.decide.evaluation.actions import Action, StopWorkers
from coordinator.decide.evaluation.events import (
    BackOffOver,
    Closed,
    JobIntended,
    LimitReached,
    MemoryOffered,
    NodeBackedOff,
    NodesOffered,
    NodeWithdrawn,
    PauseAsked,
    ResumeAsked,
    StorageChosen,
    WeightsReleased,
)
from coordinator.decide.evaluation.footprint import OUT_OF_MEMORY, job_gets_more
from coordinator.decide.evaluation.job_specs import Site, precursor_job, trial_job
from coordinator.decide.evaluation.jobs import Due
from coordinator.decide.evaluation.state import IN_USE, IllegalEventError, JobInfo, NodeUse, State
from coordinator.site.cluster import COORDINATOR_ENDED
from evaljobs.contract.outcomes import Failed, Staged

BACK_OFF_SECONDS = 60.0  # first back-off of a failing node; doubled each time
MAX_BACK_OFF_SECONDS = 3600.0


# --- events and outcomes -------------------------------------------------------------------------------------------------


def nodes_offered(state: State, event: NodesOffered) -> list[Action]:
    if state.nodes.paused_at is not None:
        return []
    for offer in event.offers:
        lanes = offer.gpus // state.record.options.trial.gpus_per_trial
        if lanes <= 0:
            continue
        node = state.nodes.by_name.setdefault(offer.node, NodeUse(name=offer.node, lanes=0))
        if not node.lanes or node.status == "withdrawn":  # anything prefetched there is used
            node.gpu_type, node.best_effort = offer.gpu_type, offer.best_effort
            node.staging, node.deaths = node.staging.anew, 0
        if node.status == "withdrawn":
            node.status, node.lanes, node.precursor = "offered", 0, None
        node.lanes = max(node.lanes, lanes)
        node.memory_mb = offer.node_memory_mb
        largest = (state.nodes.largest_mb, offer.largest_mb, offer.node_memory_mb)
        state.nodes.largest_mb = max(largest)
    return []


def memory_offered(state: State, event: MemoryOffered) -> list[Action]:
    for name in () if state.nodes.paused_at is not None else event.nodes:
        if name not in state.nodes.by_name:
            state.nodes.by_name[name] = NodeUse(name=name, lanes=0)
    return []


def back_off_over(state: State, event: BackOffOver) -> list[Action]:
    """End a node's back-off. One more death there is enough for the next."""
    for node in [state.nodes.by_name[name] for name in event.nodes]:
        staged_still = node.precursor is not None and node.precursor in state.jobs.live and node.path
        node.back_off_until, node.at_fault = None, False
        node.deaths = max(0, node.deaths - 1)
        node.status = "ready" if staged_still else "offered"
        node.precursor = node.precursor if staged_still else None
    return jobs.held_job_over(state, event.at)


def node_withdrawn(state: State, event: NodeWithdrawn) -> list[Action]:
    if event.node not in state.nodes.by_name:
        raise IllegalEventError(f"node {event.node} is not used")
    return withdraw_node(state, event.node, event.reason, event.at)


def evaluation_paused(state: State, event: PauseAsked) -> list[Action]:
    """Builds, and scores of tasks that have all their answers, go on: they need no node with GPUs."""
    if not state.may_use_nodes:
        return []
    state.nodes.paused_at, state.nodes.paused = event.at, event.reason
    used = [node.name for node in state.nodes.by_name.values() if node.status != "withdrawn"]
    return [action for name in used for action in withdraw_node(state, name, "it is paused", event.at)]


def evaluation_resumed(state: State, _event: ResumeAsked) -> list[Action]:
    state.nodes.paused_at, state.nodes.paused = None, ""
    return []


def weights_staged(state: State, outcome: Staged, at: float) -> list[Action]:
    info = state.jobs.by_name.get(outcome.name)
    if info is None:
        return []
    place = _place(state, info)
    if place is None or state.winding_down:
        return jobs.release_job(state, info, at) if info.live and info.job.purpose == "stage" else []
    place.path, place.why = outcome.path, outcome.why or place.why
    name_gpus(place, outcome.gpu_name)
    state.nodes.content = state.nodes.content or outcome.content
    if place.status != "back-off":  # unless its back-off began meanwhile
        place.status = "ready"
    if info.job.purpose == "stage":
        place.rung = outcome.rung
    if outcome.rung == "storage":
        state.warnings.append(f"{place.name} reads the weights from storage: {outcome.why}")
    return []


def name_gpus(place: NodeUse, name: str) -> None:
    """Record the GPU model that a job reports, if the cluster names no type."""
    if not place.gpu_type:
        place.gpu_name = place.gpu_name or name


def staging_failed(state: State, outcome: Failed, _at: float) -> list[Action]:
    info = state.jobs.by_name.get(outcome.name)
    place = _place(state, info) if info is not None else None
    if outcome.blame == "operator":
        state.ending.close(outcome.error)
    elif place is not None:
        place.why = outcome.error
        if place.lanes:  # a prefetch gets only one attempt
            state.warnings.append(f"staging on {place.name} failed: {outcome.error}")
    return []


def _place(state: State, info: JobInfo) -> NodeUse | None:
    """Return the node that this job is the precursor or host of."""
    place = state.nodes.by_name.get(info.job.node or "")
    return place if place is not None and place.precursor == info.job.name else None


def node_job_intended(state: State, event: JobIntended) -> None:
    """Record a precursor or host job for its node."""
    place = state.nodes.by_name.get(event.job.node or "")
    if place is None:
        raise IllegalEventError(f"{event.job.name} is for the node {event.job.node}, which is not used")
    place.status, place.precursor = "staging", event.job.name
    place.lanes = event.node_lanes
    if event.job.purpose == "host":
        place.rung, place.why = "host", state.record.options.host_why or place.why


# --- what happens to a node
# --------------------------------------------------------------------------------------------------


def node_job_over(state: State, info: JobInfo, word: str) -> Due:
    """Handle the end of a precursor or host job."""
    place = _place(state, info)
    if place is None or place.status not in ("staging", "ready"):
        return []
    grows = word == OUT_OF_MEMORY and job_gets_more(state, info)
    served = word in jobs.SERVED_STATES and place.status == "ready"
    place.precursor, place.why = None, f"{info.job.name} ended ({word})"
    place.status = "offered" if place.lanes else "withdrawn"
    if not (word == COORDINATOR_ENDED or grows or served):
        place.staging = place.staging.failed()
    if not place.staging.given_up or info.job.purpose == "stage":
        return []
    return back_off_node(place, f"{place.why}, see {info.job.log}", info.changed_at)


def withdraw_node(state: State, name: str, why: str, now: float) -> list[Action]:
    """Stop using the node; it may be offered again, but weights still being staged there are no reason to use it."""
    node = state.nodes.by_name.get(name)
    if node is not None:
        node.status, node.why, node.back_off_until = "withdrawn", why, None
        node.precursor, node.path = None, ""
    return jobs.end_jobs(state, state.jobs_on(name), now)


def withdraw_all_nodes(state: State) -> None:
    """Withdraw all nodes for a retry: other jobs may have them by now, and free ones are offered again."""
    state.nodes.paused_at, state.nodes.paused = None, ""
    for node in state.nodes.by_name.values():
        node.status, node.precursor, node.back_off_until = "withdrawn", None, None


def member_preempted(state: State, info: JobInfo, now: float) -> list[Action]:
    """Handle a preempted member of a node's job: the node loses a lane. Without lanes it is withdrawn until it is free."""
    name = info.job.node or ""
    place = state.nodes.by_name.get(name)
    if place is None or place.status not in ("staging", "ready"):
        return []
    if info.job.purpose == "trial" and place.lanes > 1:
        place.lanes -= 1
        return []
    return withdraw_node(state, name, "a job of higher priority took it", now)


def back_off_node(node: NodeUse, why: str, now: float, *, at_fault: bool = False) -> list[NodeBackedOff]:
    """Put a node in use into back-off, twice as long each time. `at_fault`: as in the event."""
    if not node.in_use:
        return []
    until = now + back_off_seconds(node.back_offs)
    return [NodeBackedOff(at=now, node=node.name, why=why, until=until, at_fault=at_fault)]


def back_off_seconds(before: int) -> float:
    """Return the length of the next back-off of a node, given the number of earlier ones."""
    return min(BACK_OFF_SECONDS * 2.0**before, MAX_BACK_OFF_SECONDS)


def node_backed_off(state: State, event: NodeBackedOff) -> Due:
    node = state.nodes.by_name[event.node]
    if not node.in_use:
        return []
    node.status, node.why, node.at_fault = "back-off", event.why, event.at_fault
    node.back_off_until = event.until
    node.back_offs += 1
    state.warnings.append(f"node {node.name} is in back-off: {event.why}")
    if any(n.in_use for n in state.nodes.by_name.values()) or not (state.shards.todo or state.plans_later):
        return []
    state.nodes.all_backed_off = state.nodes.all_backed_off.failed()
    if not state.nodes.all_backed_off.given_up:
        return []
    return [Closed(at=event.at, reason=f"no node is left; the last: {event.why}", inference_only=True)]


def hosts_trials(state: State, name: str | None) -> None:
    """Record that a job that hosts trials has finished shards: the node is not failing."""
    node = state.nodes.by_name.get(name or "")
    if node is not None:
        node.staging = node.staging.anew


def staging_unseen(state: State, node: NodeUse, now: float) -> list[Action]:
    """Handle a trial that saw nothing of what its precursor staged, though that precursor is not known to be dead.

    The first time the node may have lost its memory (a power cut the cluster has not noticed), so the weights are staged
    again. The second time, or once another node has shown it, /dev/shm is private to each job and the node's trials are
    hosted.
    """
    precursor, node.precursor = node.precursor, None
    node.status, node.deaths, state.trials.deaths = "offered", 0, 0
    if node.unseen or any(n.hosted for n in state.nodes.by_name.values()):
        node.hosted, node.staging = True, node.staging.anew
        node.why = "trials do not see what another job stages there: /dev/shm is private to each job"
        state.warnings.append(f"{node.name} is served by one job that holds its GPUs: {node.why}")
    else:
        node.unseen, node.why = True, "what was staged there is gone, or not to be seen by trials"
    info = state.jobs.by_name.get(precursor or "")
    if info is None or not info.live:
        return []
    return jobs.release_job(state, info, now)


def host_on_node(state: State, node: NodeUse, why: str, now: float) -> list[Action]:
    """Switch a node to one job that stages and hosts its trials, since a limit leaves no room for a precursor."""
    actions = withdraw_node(state, node.name, why, now)
    node.status, node.hosted, node.staging, node.why = "offered", True, node.staging.anew, why
    state.warnings.append(f"{node.name} is served by one job that holds its GPUs: {why}")
    return actions


# --- rules -------------------------------------------------------------------------------------------------------------------


def nodes_due(state: State, site: Site, now: float) -> Due:
    """Prefetch, and take nodes into use, as far as there is work for them."""
    dealt = not state.record.options.plan.steals and not state.plans_later and state.lanes_in_use
    own: set[str] | None = None
    offered = [n for n in state.nodes.by_name.values() if n.status == "offered"]
    for node in (n for n in offered if not n.lanes):
        yield precursor_job(state, site, node, now)
    for node in (n for n in offered if n.lanes):
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
    return []


def content_to_come(state: State) -> bool:
    """Return whether a precursor will report the checkpoint's content before the first trial starts."""
    options, used = state.record.options, state.nodes.by_name.values()
    stages = options.stage.enabled and not options.stage.hosts and state.nodes.content is None
    return stages and not any(node.status == "ready" or node.hosted for node in used)


def _room(state: State, node: NodeUse) -> int:
    """Return how many lanes of the node the settings' limit on trials allows."""
    most = state.record.options.max_trials
    return node.lanes if most is None else min(node.lanes, most - state.lanes_in_use)


def _wanted(state: State, node: NodeUse, now: float) -> bool:
    in_use, most = state.lanes_in_use, state.record.options.max_nodes
    held = len(state.held_nodes)
    if not state.nodes.limited.due(now) and held >= state.nodes.most:
        return False
    if _room(state, node) <= 0 or (most is not None and held >= most):
        return False
    return state.plans_later or state.shards.todo > in_use  # the nodes in use suffice


def _reads_storage(state: State, node: NodeUse) -> bool:
    stages = state.record.options.stage.enabled and not node.staging.given_up
    return not _hosts(state, node) and not stages


def _hosts(state: State, node: NodeUse) -> bool:
    return state.record.options.stage.hosts or node.hosted


def _host_waits(state: State, node: NodeUse) -> bool:
    """Return whether a host must wait. It holds GPUs from its start, so it needs shards to run or a batch size to probe."""
    if not _hosts(state, node) or not state.plans_later:
        return False
    return state.batch_size != "auto" or bool(state.held_nodes)


def _stage(state: State, site: Site, node: NodeUse, now: float) -> JobIntended:
    lanes = _room(state, node)
    if not _hosts(state, node):
        return precursor_job(state, site, replace(node, lanes=lanes), now)
    if not state.plans_later:
        lanes = max(1, min(lanes, state.shards.todo - state.able_trials))
    return trial_job(state, site, node, node.lane_names[:lanes], now, hosted=True)


def release_due(state: State, now: float) -> Due:
    """Release weights that no shard needs, while metrics still run. A shard that has to run again later stages them again."""
    if state.shards.todo or state.trials.live or not state.shards.leaves or state.plan.pending:
        return
    if state.plan_to_come or state.shards.undecided:
        return
    held = (state.jobs.by_name.get(node.precursor or "") for node in state.nodes.by_name.values())
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
            if place.status in IN_USE:
                place.status = "offered" if place.lanes else "withdrawn"
        actions += jobs.release_job(state, info, event.at)
    return actions


# --- limits on this user's jobs ---------------------------------------------------------------------------------------


def limit_reached(state: State, event: LimitReached) -> list[Action]:
    """Handle a limit on jobs that is reached while no job of this evaluation is about to end."""
    if not state.can_work:
        return []
    idle = sorted(idle_nodes(state), key=lambda n: (n.status == "ready", n.name))
    in_use = len(state.held_nodes)
    # running jobs occupy the limit: each kept node needs a place for its precursor and one per trial
    lives = [phase for info in state.jobs.live.values() for phase in info.members.values()]
    served = lives.count("running") // (1 + state.lanes_in_use // max(1, in_use))
    if spare := idle[: in_use - max(1, min(served, in_use // 2))]:
        why = f"a limit on jobs is reached: {event.why}"
        actions = [action for node in spare for action in withdraw_node(state, node.name, why, event.at)]
        _use_no_more(state, event.at)
        names = ", ".join(node.name for node in spare)
        verb = "are" if len(spare) > 1 else "is"
        state.warnings.append(f"{names} {verb} given up for a while, so that other jobs start: {event.why}")
        return actions
    if event.others:
        return []
    if state.scoring.workers and not state.scoring.outstanding:
        workers = [info for info in state.scoring.workers.values() if info.released_at is None]
        released = [action for info in workers for action in jobs.release_job(state, info, event.at)]
        return [StopWorkers(), *released] if workers else []
    if idle:
        return host_on_node(state, idle[0], event.why, event.at)
    return _fewer_lanes(state, event)


def _use_no_more(state: State, now: float) -> None:
    """Use no more nodes than now for a while: each additional one would stage the weights in vain."""
    use = state.nodes
    use.most = len(state.held_nodes)
    use.limited = use.limited.failed(now)


def _fewer_lanes(state: State, event: LimitReached) -> list[Action]:
    """Halve the lanes of a host job that is too large for the limit. Limits on the number of jobs do not apply."""
    if "Job" in event.why:
        return []
    for info in state.live_jobs("host"):
        node = state.nodes.by_name[info.job.node or ""]
        if "running" not in info.members.values() and info.released_at is None and node.lanes > 1:
            actions = host_on_node(state, node, event.why, event.at)
            node.lanes //= 2
            return actions
    return []


def idle_nodes(state: State) -> list[NodeUse]:
    """Return nodes in use without a running trial; none if no precursor of theirs runs and so counts towards the limit."""
    staged = (node for node in state.held_nodes if node.precursor is not None)
    found = [n for n in staged if not n.hosted and n.rung != "host" and not n.running_lanes]
    precursors = (state.jobs.by_name[n.precursor or ""] for n in found)
    return found if any("running" in info.members.values() for info in precursors) else []


def uncleared_nodes(state: State) -> list[str]:
    """Return nodes that may still hold weights: the last job that staged them there ended without freeing them."""
    last = {
        info.job.node: name
        for name, info in state.jobs.by_name.items()
        if ("staged", name) in state.seen and state.nodes.by_name[info.job.node or ""].rung != "storage"
    }
    return sorted(node or "" for node, name in last.items() if ("cleared", name) not in state.seen)
