"""Shards: planned, queued, done, run again, quarantined; and the plan that assigns them to lanes.

Rule: a shard is done when its record was found complete in a response file; the first complete copy counts. A task that
cannot be scored fails loudly, and its other shards leave the queue. Called from: `step`; subjects that fail a task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, cycle

from coordinator.base.words import first_of
from coordinator.decide.evaluation import jobs, nodes
from coordinator.decide.evaluation.actions import (
    Action,
    FillQueue,
    FindResponses,
    MakePlan,
    PublishSets,
    QueueShards,
    WithdrawShards,
)
from coordinator.decide.evaluation.events import (
    Closed,
    EntryFailed,
    PlanAsked,
    Planned,
    PlannedLeaf,
    ResponsesFound,
    ShardCorrupted,
    ShardsDealt,
    ShardsDumped,
    ShardsStray,
)
from coordinator.decide.evaluation.jobs import Due
from coordinator.decide.evaluation.state import EntryState, IllegalEventError, LeafState, ShardState, State
from evaljobs.contract.names import LaneId, ShardId
from evaljobs.contract.specs import FrameRef, RequestSetManifest

REUSED_LANE = "reused"  # a lane without a trial: others take from it

Rows = dict[str, list[tuple[str, float, float]]]  # lane -> (shard, rank, seconds)


# --- plans ---------------------------------------------------------------------------------------------------------------


def plan_made(state: State, event: Planned) -> list[Action]:
    plan = state.plan
    plan.count += 1
    plan.pending = False
    plan.made_at = event.at
    plan.predicted_makespan_seconds = event.predicted_makespan_seconds
    plan.lower_bound_seconds = event.lower_bound_seconds
    plan.work_seconds_95 = max(plan.work_seconds_95, event.work_seconds_95)
    plan.load_seconds_95 = max(plan.load_seconds_95, event.load_seconds_95)
    plan.sigma = max(plan.sigma, event.sigma)
    plan.workers = max(plan.workers, event.workers)
    where = {s: (lane.lane, rank, sec) for lane in event.lanes for s, rank, sec in lane.shards}
    for leaf in event.leaves:
        _place(state, leaf, where)
    return [
        *publish_request_sets(state),
        _fill(state),
    ]  # a trial that claims a shard looks up its request set


def _place(state: State, leaf: PlannedLeaf, where: Mapping[str, tuple[str, float, float]]) -> None:
    """Mark the leaf task's shards as to do, unless they already are. `where`: shard -> lane, rank and seconds."""
    known = state.shards.leaves.get(leaf.name)
    made = _planned_anew(state, leaf, where) if known is None else known
    entry = state.entries[leaf.entry]
    if leaf.task not in entry.leaves:
        entry.leaves[leaf.task] = made.name
        made.entries.append(entry.index)
    _wanted_again(state, made)  # by an entry that was built after the ones that had it failed
    tell_undecided(state, made)


def tell_undecided(state: State, leaf: LeafState) -> None:
    """Tell a screened leaf task's shards that are needed from those whose need depends on a look."""
    looked = max((entry.looked for entry in open_entries(state, leaf)), default=0)
    for name, block in zip(leaf.planned.shards, leaf.planned.shard_blocks, strict=False):
        shard = state.shards.by_name[name]
        if shard.undecided != (block > looked):
            _count(state, shard, -shard.is_to_do)
            shard.undecided = block > looked
            _count(state, shard, shard.is_to_do)


def _count(state: State, shard: ShardState, change: int) -> None:
    if shard.undecided:
        state.shards.undecided += change
    else:
        state.shards.todo += change


def _planned_anew(
    state: State, leaf: PlannedLeaf, where: Mapping[str, tuple[str, float, float]]
) -> LeafState:
    per_shard = (leaf.shard_documents if leaf.executes else ()) or ((),) * len(leaf.shards)
    places: dict[int, list[int]] = {}
    for place, (shard, documents) in enumerate(zip(leaf.shards, per_shard, strict=True)):
        lane, rank, seconds = where[shard]
        state.shards.by_name[shard] = ShardState(
            leaf=leaf.name, rank=rank, seconds=seconds, lane=lane, documents=documents
        )
        for document in documents:
            places.setdefault(document, []).append(place)
    waiting = {document: len(its) for document, its in places.items()}
    todo = len(leaf.shards)
    made = LeafState(planned=leaf, todo=todo, waiting=waiting, places=places)
    # its execute jobs are numbered on from those of an earlier plan
    made.executes = made.executed = sum(m.task == made.name for m in state.scoring.metrics.values())
    state.shards.leaves[made.name] = made
    # another entry's requests may match these: look for them again
    state.plan.looked_for = {pair for pair in state.plan.looked_for if pair[1] != leaf.task}
    state.shards.todo += todo
    return made


def responses_found(state: State, event: ResponsesFound) -> list[Action]:
    plan = state.plan
    plan.pending, plan.alike = False, event.alike
    for leaf in event.leaves:
        # the lane only matters if a record turns out to be unreadable and its shard runs again
        _place(state, leaf, dict.fromkeys(leaf.shards, (REUSED_LANE, 0.0, 1.0)))
    plan.reused |= event.sources
    for name, frame in event.shards:
        if state.shards.by_name[name].frame is None:
            _done(state, name, frame)
    for index, file in event.scores.items():
        entry = state.entries[index]
        if entry.status == "built":
            entry.status, entry.result_file = "scored", file
            plan.reused_scores.add(index)
    return [*publish_request_sets(state), _fill(state)] if event.leaves else []


def publish_request_sets(state: State) -> list[Action]:
    """Publish the request sets to trials that started before these existed, early or to probe the batch size."""
    leaves, record = state.shards.leaves, state.record
    before = record.suite.batch_size == "auto" or record.options.early_trials
    if not before or not leaves or state.batch_size == "auto":
        return []
    sets = {name: leaf.planned.folder for name, leaf in leaves.items()}
    return [PublishSets(batch_size=state.batch_size, sets=sets)]


def shards_due(state: State, now: float) -> Due:
    """Look for responses of earlier evaluations, then plan, once every entry is built.

    If several entries have the same leaf task, the first is planned first; the others share its shards or make other
    requests. Responses for a checkpoint with equal samples are looked up again once the content is known.
    """
    if state.plan.pending or state.batch_size == "auto":
        return
    unplanned = state.unplanned
    if not unplanned or state.unbuilt:
        return
    turn: dict[str, int] = {}  # leaf task -> entry
    for entry in unplanned:
        turn |= {task: entry.index for task in entry.sets if task not in entry.leaves and task not in turn}
    fresh: dict[int, dict[str, str]] = {}
    for task, index in turn.items():
        fresh.setdefault(index, {})[_free_name(state, task)] = state.entries[index].sets[task]
    cuts = {index: state.cut_of(state.entries[index]) for index in fresh}
    if state.plan.alike and nodes.content_to_come(state):
        return
    known = set() if _looks_anew(state) else state.plan.looked_for
    unsought = {(index, task) for task, index in turn.items()} - known
    if unsought:
        yield PlanAsked(at=now, looked_for=tuple(sorted(unsought)))
        yield FindResponses(sets=fresh, batch_size=state.batch_size, cuts=cuts)
        return
    if state.record.rescores:  # its command found them; they were removed since
        yield Closed(at=now, reason=f"{state.record.rescores} has no answers to {first_of(sorted(turn))}")
        return
    lanes = tuple((lane, n.name) for n in state.nodes.by_name.values() if n.in_use for lane in n.lane_names)
    if not lanes:
        return
    most = state.record.options.max_trials
    lanes = lanes[:most] if most else lanes
    yield PlanAsked(at=now)
    yield MakePlan(sets=fresh, batch_size=state.batch_size, lanes=lanes, cuts=cuts)


def plan_asked(state: State, event: PlanAsked) -> list[Action]:
    plan = state.plan
    if _looks_anew(state):
        plan.alike = False
        plan.looked_for.clear()
    plan.looked_for.update(event.looked_for)
    plan.pending = True
    return []


def _looks_anew(state: State) -> bool:
    """Return whether the content is now known that decides about responses of a checkpoint with equal samples."""
    return state.plan.alike and state.nodes.content is not None


def _free_name(state: State, task: str) -> str:
    """Return an unused name for a leaf task whose requests differ from all planned ones."""
    names = (f"{task}#{number}" if number > 1 else task for number in count(1))
    return next(name for name in names if name not in state.shards.leaves)


def equal_leaf(
    state: State, entry: int, manifest: RequestSetManifest, folder: str, cut: str
) -> PlannedLeaf | None:
    """Return the planned leaf task with the same requests in the same batches, as this entry's; None if there is none."""
    for leaf in state.shards.leaves.values():
        its = leaf.planned
        if (its.task, its.key, its.cut, its.executes) == (
            manifest.task,
            manifest.key,
            cut,
            manifest.executes,
        ):
            return its.model_copy(update={"name": leaf.name, "entry": entry, "folder": folder})
    return None


def deal_due(state: State, now: float) -> Due:
    """Deal the shards of lost lanes round-robin, by rank, to the lanes of nodes in use; only without stealing."""
    if state.record.options.plan.steals or not state.shards.todo:
        return
    if len(state.trials.live) >= state.lanes_in_use:
        return
    kept = [lane for n in sorted(state.held_nodes, key=lambda n: n.name) for lane in n.lane_names]
    lost = state.lanes_to_do() - set(kept) - {trial.lane for trial in state.trials.live.values()}
    names = [n for n, s in state.shards.by_name.items() if s.lane in lost and is_to_do(state, n)]
    names.sort(key=lambda name: (state.shards.by_name[name].rank, name))
    if names:
        yield ShardsDealt(at=now, lanes=dict(zip(names, cycle(kept), strict=False)))


def shards_dealt(state: State, event: ShardsDealt) -> list[Action]:
    for name, lane in event.lanes.items():
        state.shards.by_name[name].lane = lane
    return requeue_shards(state, event.lanes)


# --- responses -------------------------------------------------------------------------------------------------------------


def shards_dumped(state: State, event: ShardsDumped) -> list[Action]:
    known = state.shards.by_name
    for name, _ in event.shards:
        if name not in known and not is_retired(state, name):
            raise IllegalEventError(f"responses of the unplanned shard {name}")
    for name, frame in event.shards:
        if name not in known or known[name].frame is not None:
            continue  # a second copy: the first counts
        _done(state, name, frame)
        trial = state.trials.by_name.get(frame.file.removesuffix(".frames"))
        if trial is not None:
            state.nodes.by_name[LaneId.parse(trial.lane).node].deaths = 0
            jobs.member_runs(state, state.jobs.by_name[trial.job], trial.member, event.at)
    state.trials.deaths = 0
    state.nodes.all_backed_off = state.nodes.all_backed_off.anew
    return []


def leaf_of(state: State, shard: str) -> LeafState:
    """Return the leaf task that a planned shard belongs to."""
    return state.shards.leaves[state.shards.by_name[shard].leaf]


def open_entries(state: State, leaf: LeafState) -> list[EntryState]:
    """Return the entries that its shards answer and that are neither scored nor failed."""
    return [state.entries[index] for index in leaf.entries if not state.entries[index].terminal]


def _done(state: State, name: str, frame: FrameRef) -> None:
    shard, leaf = state.shards.by_name[name], leaf_of(state, name)
    shard.frame = frame
    leaf.todo -= 1
    if not shard.quarantined:
        _count(state, shard, -1)
    for document in shard.documents:
        leaf.waiting[document] -= 1
        if leaf.waiting[document] == 0:
            leaf.complete.append(document)


def shard_corrupted(state: State, event: ShardCorrupted) -> Due:
    shard = state.shards.by_name.get(event.shard)
    if shard is None or shard.frame is None:
        return []
    if not open_entries(state, leaf_of(state, event.shard)):
        return []  # its score stands, or will never exist
    _take_back(state, event.shard)
    if failed := _unread(state, event.shard, event.error, event.at):
        return failed
    state.warnings.append(f"shard {event.shard} runs again: {event.error}")
    return [QueueShards(lane=shard.lane, shards=((event.shard, shard.rank, shard.seconds),))]


def _take_back(state: State, name: str) -> None:
    """Mark a shard that counted as done as to run again."""
    shard, leaf = state.shards.by_name[name], leaf_of(state, name)
    shard.frame = None
    leaf.todo += 1
    if not shard.quarantined:
        _count(state, shard, 1)
    for document in shard.documents:
        leaf.waiting[document] += 1
        if document in leaf.complete:
            leaf.complete.remove(document)
    for entry in open_entries(state, leaf):
        if entry.status == "scoring":
            entry.status = "built"


def _unread(state: State, name: str, why: str, now: float) -> Sequence[EntryFailed]:
    """Count a run of a shard that left no readable record. Fail its task the third time, or if no model is available."""
    shard = state.shards.by_name[name]
    shard.unread = shard.unread.failed()
    if not (shard.unread.given_up or state.record.rescores) or shard.quarantined:
        return []
    state.warnings.append(f"shard {name} quarantined: {why}")
    said = f"shard {name} was run {shard.unread.failures} times and left no record that can be read; the last: {why}"
    return fail_leaf(state, leaf_of(state, name), said, now)


# --- the work queue ----------------------------------------------------------------------------------------------------------


def refill_queue(state: State) -> list[Action]:
    """Return the actions that fill the queue. Changes nothing, so it may be repeated without an event."""
    return [_fill(state)] if state.shards.leaves and not state.winding_down else []


def shards_stray(state: State, event: ShardsStray) -> Due:
    why, again = "response files hold no record of it", [n for n in event.again if is_to_do(state, n)]
    failed = [one for name in again for one in _unread(state, name, why, event.at)]
    return failed or requeue_shards(state, event.shards)  # the audit finds the others again


def requeue_shards(state: State, names: Iterable[str]) -> list[Action]:
    """Queue those of these shards that are to do. Changes nothing, like `refill_queue`."""
    rows = _rows(state, names)
    return [QueueShards(lane=lane, shards=tuple(todo)) for lane, todo in sorted(rows.items())]


def _fill(state: State) -> FillQueue:
    rows = _rows(state, state.shards.by_name)
    return FillQueue(lanes={lane: tuple(todo) for lane, todo in rows.items()})


def _rows(state: State, names: Iterable[str]) -> Rows:
    rows: Rows = {}
    for name in names:
        if is_to_do(state, name):
            shard = state.shards.by_name[name]
            rows.setdefault(shard.lane, []).append((name, shard.rank, shard.seconds))
    return rows


def is_to_do(state: State, name: str) -> bool:
    """Return whether the shard is planned, and neither done nor quarantined."""
    shard = state.shards.by_name.get(name)
    return shard is not None and shard.is_to_do


# --- entries that fail, and are tried again ------------------------------------------------------------------------------------


def entry_failed(state: State, event: EntryFailed) -> list[Action]:
    """Fail an entry that cannot be scored, and withdraw its other shards unless other entries need them."""
    entry = state.entries[event.entry]
    if entry.terminal and not state.ending.no_scores:
        return []
    entry.status, entry.error = "failed", event.error
    return withdraw_shards(state, entry)


def withdraw_shards(state: State, entry: EntryState) -> list[Action]:
    """Take the shards of an entry that is over out of the queue, but for those that other open entries have."""
    withdrawn = []
    lost = [n for n in entry.leaves.values() if not open_entries(state, state.shards.leaves[n])]
    for name in shards_of(state, lost):
        shard = state.shards.by_name[name]
        if shard.is_to_do:
            _count(state, shard, -1)
            shard.quarantined = True
            withdrawn.append(name)
    return [WithdrawShards(shards=tuple(withdrawn))] if withdrawn else []


def fail_leaf(state: State, leaf: LeafState, error: str, now: float) -> Sequence[EntryFailed]:
    """Fail every entry that has this leaf task, since it cannot be answered."""
    return [EntryFailed(at=now, entry=entry.index, error=error) for entry in open_entries(state, leaf)]


def reopen_entry(state: State, entry: EntryState) -> list[Action]:
    """Retry a failed entry from where it stopped, and queue its shards."""
    entry.error, entry.building, entry.scoring = "", entry.building.anew, entry.scoring.anew
    entry.status = "built" if entry.sets else "unbuilt"
    again: list[str] = []
    for leaf in (state.shards.leaves[name] for name in entry.leaves.values()):
        for name in leaf.planned.shards:
            shard = state.shards.by_name[name]
            shard.died_on, shard.error, shard.unread = [], "", shard.unread.anew
        again += _wanted_again(state, leaf)
        tell_undecided(state, leaf)
    return requeue_shards(state, again)


def _wanted_again(state: State, leaf: LeafState) -> list[str]:
    """Mark its withdrawn shards as to do and return their names."""
    again = []
    for name in leaf.planned.shards if open_entries(state, leaf) else ():
        shard = state.shards.by_name[name]
        if shard.quarantined:
            shard.quarantined = False
            if shard.frame is None:
                _count(state, shard, 1)
                again.append(name)
    return again


def retire_plan(state: State, entry: EntryState, *, executes: bool) -> list[Action]:
    """Forget the plan of an entry whose requests are cut differently now, or are gone. The caller changes its status.

    Shards go with the last open entry that has them. `executes`: include tasks that execute programs; their answers are
    generated, so a token budget does not cut them.
    """
    withdrawn = []
    for task, known in list(entry.leaves.items()):
        leaf = state.shards.leaves[known]
        if leaf.planned.executes and not executes:
            continue
        leaf.entries.remove(entry.index)
        del entry.leaves[task]
        if open_entries(state, leaf):
            continue
        for name in leaf.planned.shards:
            if is_to_do(state, name):
                _count(state, state.shards.by_name[name], -1)
                withdrawn.append(name)
            del state.shards.by_name[name]
        for other in (state.entries[index] for index in leaf.entries):
            del other.leaves[task]  # a retried entry is planned again
        for metric in [state.scoring.metrics[name] for name in state.scoring.outstanding]:
            if metric.task == known:
                metric.done = True
                state.scoring.outstanding.discard(metric.name)
        state.shards.retired.add((known, leaf.planned.cut))
        del state.shards.leaves[known]
        state.plan.reused.pop(known, None)
    return [WithdrawShards(shards=tuple(withdrawn))] if withdrawn else []


def is_retired(state: State, shard: str) -> bool:
    """Return whether the shard belongs to a cut that did not fit a GPU's memory."""
    try:
        name = ShardId.parse(shard)
    except ValueError:  # its name comes from a file that a job wrote
        return False
    return (name.task, name.cut) in state.shards.retired


def shards_of(state: State, leaves: Iterable[str]) -> Iterable[str]:
    """Yield the shards of the planned leaf tasks with these names."""
    for name in leaves:
        yield from state.shards.leaves[name].planned.shards


def shards_restarted(state: State) -> list[Action]:
    """Repeat the request for a plan, and publish the request sets again."""
    state.plan.pending = False
    state.plan.looked_for.clear()
    return [] if state.winding_down else publish_request_sets(state)
