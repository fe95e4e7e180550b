"""Renewals of precursors: before a precursor's time limit, a second one on its node takes a lease in the same copy.

Rule: a precursor has at most one successor. Until the successor has staged, trials read what the first one holds, and
the first is released then. If the first ends sooner, the successor stages the weights again. Called from: `nodes`,
`step`; `coordinator.runtime.detect`, which wakes an evaluation that has no other event.
"""

from __future__ import annotations

from coordinator.evaluation import indexes, jobs
from coordinator.evaluation.actions import Action
from coordinator.evaluation.events import JobStarted
from coordinator.evaluation.state import JobInfo, NodeUse, State

RENEW_SECONDS = 600.0  # before its end at which a precursor gets a successor; at most half of its time


def job_started(state: State, event: JobStarted) -> list[Action]:
    """A member of a job runs; of a precursor, the time of its renewal is noted."""
    actions = jobs.started(state, event)
    info = jobs.known(state, event.job)
    if info.job.purpose == "metric":
        state.scoring.grown_at = event.at  # it has its time before more are asked for
    if info.job.purpose == "stage" and info.live and event.ends_at is not None:
        state.nodes.renewals[event.job] = event.ends_at - min(RENEW_SECONDS, (event.ends_at - event.at) / 2)
    return actions


def renewals_due(state: State, now: float) -> list[NodeUse]:
    """Nodes whose precursor needs a successor now."""
    if not state.shards.todo and not state.plans_later:
        return []
    found = []
    for name, at in state.nodes.renewals.items():
        node = state.nodes.by_name.get(state.jobs.by_name[name].job.node or "")
        if now >= at and node is not None and node.status == "ready" and node.precursor == name:
            found.append(node)
    return found


def begin(state: State, node: NodeUse, successor: str) -> bool:
    """A new precursor is on its way to the node. Is it the successor of one that holds the weights there?"""
    info = state.jobs.by_name.get(node.precursor or "")
    if info is None or not info.live or node.status != "ready":
        return False
    info.successor = successor
    state.nodes.renewals.pop(info.job.name, None)
    return True


def staged(state: State, info: JobInfo, now: float) -> list[Action]:
    """A precursor has staged: where it is a successor it holds the node's weights from now on, and the first one is released."""
    node = state.nodes.by_name.get(info.job.node or "")
    first = state.jobs.by_name.get(node.precursor or "") if node is not None else None
    if node is None or first is None or first.successor != info.job.name:
        return []
    node.precursor = info.job.name
    indexes.file_node(state, node)
    return jobs.release(state, first, now)


def ended(state: State, info: JobInfo) -> bool:
    """A precursor has ended. Does a successor stage the weights anew?"""
    state.nodes.renewals.pop(info.job.name, None)
    node = state.nodes.by_name.get(info.job.node or "")
    successor = state.jobs.by_name.get(info.successor)
    if node is None or node.precursor != info.job.name or successor is None or not successor.live:
        return False
    node.precursor, node.path = info.successor, ""
    if node.status == "ready":
        node.status = "staging"
    indexes.file_node(state, node)
    return True


def release(state: State, info: JobInfo, now: float) -> list[Action]:
    """A precursor is needed no more, and neither is its successor."""
    actions = jobs.release(state, info, now)
    successor = state.jobs.by_name.get(info.successor)
    if successor is not None and successor.live and successor.released_at is None:
        actions += jobs.release(state, successor, now)
    return actions
