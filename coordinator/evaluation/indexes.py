"""Look-up tables of the state: which jobs, trials, nodes, entries and leaf tasks the rules look at next.

Rule: `State.index` is a function of the other parts, and this module alone writes it, with the sets of live jobs and
trials. A subject that changes a job, a node, an entry or a leaf task files it again, so that no event looks at all that
was ever run. Called from: every subject; `tests/support/simulated/invariants.py` recounts everything.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from coordinator.evaluation.state import EntryState, JobInfo, LeafState, NodeUse, State, Trial
from evaljobs.contract.names import LaneId

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _put(table: dict[str, dict[K, V]], group: str, key: K, item: V) -> None:
    table.setdefault(group, {})[key] = item


def _drop(table: dict[str, dict[K, V]], group: str, key: K) -> None:
    """An empty group is no group: two tables of equal content are equal."""
    items = table.get(group)
    if items is not None and items.pop(key, None) is not None and not items:
        del table[group]


def _move(table: dict[str, dict[K, V]], group: str, key: K, item: V) -> None:
    """Into this group alone; "": into none. The place in a group that it is in already stays."""
    for other in [name for name, items in table.items() if name != group and key in items]:
        _drop(table, other, key)
    if group:
        _put(table, group, key, item)


# --- jobs and trials ---------------------------------------------------------------------------------------------------


def file_job(state: State, info: JobInfo) -> None:
    """A job's phase, its members or its living trials have changed."""
    name, node, index = info.job.name, info.job.node, state.index
    if info.live:
        state.jobs.live.add(name)
        _put(index.jobs, info.job.purpose, name, info)
        if node is not None:
            _put(index.jobs_on, node, name, info)
    else:
        state.jobs.live.discard(name)
        _drop(index.jobs, info.job.purpose, name)
        if node is not None:
            _drop(index.jobs_on, node, name)
    hosted = info.job.purpose == "host"
    for trial in info.trials:
        live = state.trials.live.get(trial)
        phase = "ended" if live is None else info.members[live.member]
        (index.running.add if phase == "running" else index.running.discard)(trial)
        waits = phase == "pending" and info.phase == "submitted" and not hosted
        cancelled = state.trials.by_name[trial].cancelled
        (index.leaving.add if cancelled and phase != "ended" else index.leaving.discard)(trial)
        if waits and not cancelled:
            index.cancellable[trial] = None
        else:
            index.cancellable.pop(trial, None)


def mark_cancelled(state: State, trial: str) -> None:
    """The coordinator ends this trial: it is no capacity, and its death counts against no node and no shard."""
    state.trials.by_name[trial].cancelled = True
    file_job(state, state.jobs.by_name[state.trials.by_name[trial].job])


def begin_trials(state: State, info: JobInfo) -> None:
    """The trials of a job live from its intent on, each on its lane."""
    hosted = info.job.purpose == "host"
    for number, (trial, lane) in enumerate(zip(info.trials, info.lanes, strict=True)):
        made = Trial(name=trial, job=info.job.name, member=0 if hosted else number, lane=lane)
        state.trials.by_name[trial] = state.trials.live[trial] = made
        state.index.lane_trials[lane] = state.index.lane_trials.get(lane, 0) + 1
        _put(state.index.lanes, LaneId.parse(lane).node, trial, lane)
    _file_node_of(state, info)


def end_trial(state: State, name: str) -> Trial | None:
    """A trial is over: its lane is free. None where it was over already."""
    trial = state.trials.live.pop(name, None)
    if trial is not None:
        _drop(state.index.lanes, LaneId.parse(trial.lane).node, name)
        info = state.jobs.by_name[trial.job]
        file_job(state, info)
        _file_node_of(state, info)
    return trial


# --- nodes ---------------------------------------------------------------------------------------------------------------


def _file_node_of(state: State, info: JobInfo) -> None:
    node = state.nodes.by_name.get(info.job.node or "")
    if node is not None:
        file_node(state, node)


def file_node(state: State, node: NodeUse) -> None:
    """A node's status, lanes, rung, precursor or living trials have changed."""
    index = state.index
    _move(index.nodes, _node_group(state, node), node.name, node)
    if node.precursor is not None:
        index.staged[node.name] = node
    else:
        index.staged.pop(node.name, None)
    before = index.in_use.pop(node.name, 0)
    after = node.lanes if node.status in ("staging", "ready") else 0
    if after:
        index.in_use[node.name] = after
    index.lanes_in_use += after - before


def _node_group(state: State, node: NodeUse) -> str:
    if node.status in ("back-off", "offered"):
        return node.status
    free = node.lanes > len(state.index.lanes.get(node.name, ()))
    return "free" if node.status == "ready" and node.rung != "host" and free else ""


# --- entries and their leaf tasks ----------------------------------------------------------------------------------------


def file_entry(state: State, entry: EntryState) -> None:
    """An entry's status or its sets have changed."""
    _move(state.index.entries, _entry_group(state, entry), entry.index, entry)
    for name in entry.leaves.values():
        leaf = state.shards.leaves[name]
        if leaf.planned.executes:
            _file_executable(state, leaf)


def _entry_group(state: State, entry: EntryState) -> str:
    if entry.terminal:
        return ""
    if entry.status != "built" or not entry.sets:
        return entry.status
    if not entry.sets.keys() <= entry.leaves.keys():
        return "unplanned"
    return "answered" if state.index.answered.issuperset(entry.leaves.values()) else "built"


def file_leaf(state: State, leaf: LeafState) -> None:
    """What a leaf task lacks has changed: shards, documents to execute, verdicts."""
    answered = state.index.answered
    lacks = bool(leaf.todo or leaf.complete or leaf.executes > leaf.executed)
    if lacks == (leaf.name in answered):
        (answered.discard if lacks else answered.add)(leaf.name)
        for entry in leaf.entries:
            file_entry(state, state.entries[entry])
    elif leaf.planned.executes:
        _file_executable(state, leaf)


def drop_leaf(state: State, name: str) -> None:
    """A leaf task is planned no more. Its entries are filed by the caller."""
    state.index.answered.discard(name)
    state.index.executable.pop(name, None)


def _file_executable(state: State, leaf: LeafState) -> None:
    """May an `execute` job be made of its documents? Past its limit a judge's jobs would only hold workers; one more than
    that waits ready for its turn.
    """
    size, at_once = state.record.options.execute_documents, leaf.planned.executes_at_once
    whole = leaf.complete and (len(leaf.complete) >= size or leaf.todo == 0)
    full = at_once and leaf.executes - leaf.executed > at_once
    if whole and not full and any(state.entries[entry].status == "built" for entry in leaf.entries):
        state.index.executable[leaf.name] = leaf
    else:
        state.index.executable.pop(leaf.name, None)
