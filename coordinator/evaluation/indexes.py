"""Keeps `State.index`: which jobs, trials, nodes, tasks and leaf tasks the rules look at next. Pure.

Rule: the index is a function of the rest of the state, and these functions alone write it. Whoever changes a job, a
node, an entry or a leaf files it again, so that no event looks at all that was ever run. `validate` recounts it.
It does not know: events, or what is done with what is found here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, replace
from typing import TypeVar

from coordinator.evaluation.state import EntryState, Index, JobInfo, LeafState, NodeUse, State

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
        state.live.add(name)
        _put(index.jobs, info.job.purpose, name, info)
        if node is not None:
            _put(index.jobs_on, node, name, info)
    else:
        state.live.discard(name)
        _drop(index.jobs, info.job.purpose, name)
        if node is not None:
            _drop(index.jobs_on, node, name)
    hosted = info.job.purpose == "host"
    for member, trial in enumerate(info.trials):
        phase = info.members[0 if hosted else member] if trial in state.live_trials else "ended"
        (index.running.add if phase == "running" else index.running.discard)(trial)
        if phase == "pending" and info.phase == "submitted" and not hosted:
            _cancellable(state, trial)
        else:
            index.cancellable.pop(trial, None)


def _cancellable(state: State, trial: str) -> None:
    if state.counters.get(f"cancel/{trial}"):
        state.index.cancellable.pop(trial, None)
    else:
        state.index.cancellable[trial] = None


def mark_cancelled(state: State, trial: str) -> None:
    """The coordinator ends this trial: its death counts against no node and no shard."""
    state.counters[f"cancel/{trial}"] = 1
    state.index.cancellable.pop(trial, None)


def begin_trials(state: State, info: JobInfo) -> None:
    """The trials of a job live from its intent on, each on its lane."""
    for member, (trial, lane) in enumerate(zip(info.trials, info.lanes, strict=True)):
        state.live_trials[trial] = (info.job.name, member)
        state.trial_lane[trial] = lane
        state.index.lane_trials[lane] = state.index.lane_trials.get(lane, 0) + 1
        _put(state.index.lanes, lane.rpartition("/")[0], trial, lane)
    _file_node_of(state, info)


def end_trial(state: State, trial: str) -> tuple[str, int] | None:
    """A trial is over: its lane is free. Returns (job, member); None where it was over already."""
    where = state.live_trials.pop(trial, None)
    if where is not None:
        _drop(state.index.lanes, state.trial_lane[trial].rpartition("/")[0], trial)
        info = state.jobs[where[0]]
        file_job(state, info)
        _file_node_of(state, info)
    return where


# --- nodes ---------------------------------------------------------------------------------------------------------------


def _file_node_of(state: State, info: JobInfo) -> None:
    node = state.nodes.get(info.job.node or "")
    if node is not None:
        file_node(state, node)


def file_node(state: State, node: NodeUse) -> None:
    """A node's status, lanes, rung, attempts, holder or living trials have changed."""
    index = state.index
    _move(index.nodes, _node_group(state, node), node.name, node)
    if node.holder is not None:
        index.held[node.name] = node
    else:
        index.held.pop(node.name, None)
    before = index.in_use.pop(node.name, 0)
    after = node.lanes if node.status in ("staging", "ready") else 0
    if after:
        index.in_use[node.name] = after
    index.lanes_in_use += after - before


def _node_group(state: State, node: NodeUse) -> str:
    if node.status == "aside":
        return "aside"
    if node.status == "offered" and node.lanes:
        return "offered"
    if node.status == "offered" and not node.attempts:
        return "ahead"
    free = node.lanes > len(state.index.lanes.get(node.name, ()))
    return "free" if node.status == "ready" and node.rung != "host" and free else ""


# --- entries and their leaf tasks ----------------------------------------------------------------------------------------


def file_entry(state: State, entry: EntryState) -> None:
    """An entry's status or its sets have changed."""
    _move(state.index.entries, _entry_group(state, entry), entry.index, entry)
    for task in entry.sets:
        leaf = state.leaves.get(task)
        if leaf is not None and leaf.planned.executes:
            _file_executable(state, leaf)


def _entry_group(state: State, entry: EntryState) -> str:
    if entry.terminal:
        return ""
    if entry.status != "built" or not entry.sets:
        return entry.status
    if any(task not in state.leaves for task in entry.sets):
        return "unplanned"
    return "answered" if all(task in state.index.answered for task in entry.sets) else "built"


def file_leaf(state: State, leaf: LeafState) -> None:
    """What a leaf task lacks has changed: shards, documents to execute, verdicts."""
    task, answered = leaf.planned.task, state.index.answered
    lacks = bool(leaf.todo or leaf.complete or leaf.executes > leaf.executed)
    if lacks == (task in answered):
        (answered.discard if lacks else answered.add)(task)
        file_entry(state, state.entries[leaf.planned.entry])
    elif leaf.planned.executes:
        _file_executable(state, leaf)


def _file_executable(state: State, leaf: LeafState) -> None:
    """May an `execute` job be made of its documents? Past its limit a judge's jobs would only hold workers; one more than
    that waits ready for its turn.
    """
    size, at_once = state.record.options.execute_documents, leaf.planned.executes_at_once
    whole = leaf.complete and (len(leaf.complete) >= size or leaf.todo == 0)
    full = at_once and leaf.executes - leaf.executed > at_once
    if whole and not full and state.entries[leaf.planned.entry].status == "built":
        state.index.executable[leaf.planned.task] = leaf
    else:
        state.index.executable.pop(leaf.planned.task, None)


# --- from nothing ----------------------------------------------------------------------------------------------------------


def recounted(state: State) -> Index:
    """The index of this state, made anew; the state itself is only read."""
    copy = replace(state, index=Index(), live=set())
    for trial, lane in state.trial_lane.items():
        copy.index.lane_trials[lane] = copy.index.lane_trials.get(lane, 0) + 1
        if trial in state.live_trials:
            _put(copy.index.lanes, lane.rpartition("/")[0], trial, lane)
    for info in state.jobs.values():
        file_job(copy, info)
    for node in state.nodes.values():
        file_node(copy, node)
    for leaf in state.leaves.values():
        file_leaf(copy, leaf)
    for entry in state.entries:
        file_entry(copy, entry)
    return copy.index


def validate(state: State) -> None:
    """Every invariant of the state, recounted; AssertionError names the first that does not hold. For tests."""
    todo = sum(1 for s in state.shards.values() if s.frame is None and not s.quarantined)
    assert state.todo == todo, f"todo is {state.todo}, counted {todo}"
    for task, leaf in state.leaves.items():
        missing = sum(1 for s in leaf.planned.shards if state.shards[s].frame is None)
        assert leaf.todo == missing, f"{task}: todo is {leaf.todo}, counted {missing}"
        at_once = leaf.planned.executes_at_once
        ahead = leaf.executes - leaf.executed
        assert not at_once or ahead <= at_once + 1, f"{task}: {ahead} jobs for a judge that takes {at_once}"
    assert state.live == {n for n, j in state.jobs.items() if j.live}, "live jobs"
    assert all(state.jobs[n].phase == "intended" for n in state.held), f"held jobs {sorted(state.held)}"
    for trial, (job, member) in state.live_trials.items():
        info = state.jobs[job]
        assert info.live, f"{trial} lives in the ended job {job}"
        assert info.trials[member] == trial, f"{trial} is not member {member} of {job}"
    again = recounted(state)
    for part in fields(Index):
        kept, made = getattr(state.index, part.name), getattr(again, part.name)
        assert kept == made, f"index.{part.name} is not what is counted"
    assert state.outstanding == {n for n, m in state.metrics.items() if not m.done}, "outstanding metric jobs"
    for entry in state.entries:
        if entry.status == "scored":
            assert entry.result_file, f"{entry.name} is scored without a result file"
            assert all(state.leaves[t].todo == 0 for t in entry.sets), f"{entry.name} is scored in part"
    if state.ended_at is not None:
        assert not state.live, f"ended with live jobs {sorted(state.live)}"
        assert all(e.terminal for e in state.entries), "ended with entries open"
