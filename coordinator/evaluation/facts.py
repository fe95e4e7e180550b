"""What more than one handler records of the same happening: a job over, a shard done, a trial dead. Pure.

Rule: each function changes the state's records and counters together, so that no reader ever sees one without the
other; it returns the actions that the happening itself calls for. What becomes due because of it is `rules`' to say.
It does not know: which event brought the news.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coordinator.cluster import COORDINATOR_ENDED
from coordinator.evaluation import indexes
from coordinator.evaluation.messages import Action, CancelJob, ReleaseHolder, SubmitJob, WithdrawShards
from coordinator.evaluation.state import EntryState, HeldJob, JobInfo, NodeUse, State
from evaljobs.contract.specs import FrameRef

MAX_SUBMISSIONS = 8
MAX_METRIC_TRIES = 3
MAX_CONVERSIONS = 3
MAX_LOSSES = 10  # how often RQ may forget a metric job: more than an hour, the waits between being doubled
MAX_BUILDS = 3  # of one entry
MAX_BARREN_BUILDS = (
    6  # build jobs in a row that ended without a word and had nothing built, for each that runs at a time
)
MAX_UNREAD = 3  # times that a shard was run and left no record that can be read
MAX_NODE_FAILURES = 3
MAX_BARREN = 6  # trial deaths in a row, without one shard between them, before the evaluation fails …
# … which has done a shard already gets so many of each of its nodes: what worked before is not at fault by itself
MAX_RESTS = (
    5  # times that no node was left but resting ones, without one shard between them: 31 minutes in all
)
MAX_HOLDERS = 3  # holder jobs per node
HELD_SECONDS = (
    30.0  # before a job that a limit on jobs kept out is submitted again; doubled each time, up to …
)
MAX_HELD_SECONDS = 1800.0
NO_FAULT_OF_A_JOB = frozenset(
    {"PREEMPTED", "NODE_FAIL", COORDINATOR_ENDED}
)  # words for a job that was ended for no reason of its own
TAKEN = "PREEMPTED"  # a cluster's word for: its GPUs went to somebody of higher priority. No node or shard is to blame


def submit(state: State, info: JobInfo, now: float) -> SubmitJob:
    """The job is intended from now on."""
    info.changed_at = now
    state.jobs[info.job.name] = info
    indexes.file_job(state, info)
    return SubmitJob(job=info.job, specs=info.specs)


def hold_back(state: State, info: JobInfo, why: str, now: float) -> None:
    """A limit on jobs keeps this one out: `rules` submits it again after a pause."""
    key = f"held/{info.job.name}"
    times = state.counters.get(key, 0)
    state.counters[key] = times + 1
    pause = min(HELD_SECONDS * 2 ** min(times, 20), MAX_HELD_SECONDS)
    state.held[info.job.name] = HeldJob(why=why, due_at=now + pause)


def job_over(state: State, info: JobInfo, word: str) -> None:
    """All members of a job are over: what was not done by it is due again."""
    _build_over(state, info, word)
    if info.job.purpose == "convert" and state.conversion == "running":
        state.conversion = "due"
        state.conversion_tries += word not in NO_FAULT_OF_A_JOB
        if state.conversion_tries >= MAX_CONVERSIONS:
            state.fatal = (
                state.fatal or f"the conversion ended {MAX_CONVERSIONS} times ({word}); see {info.job.log}"
            )
    if info.job.purpose in ("stage", "host") and info.job.node is not None:
        node = state.nodes[info.job.node]
        if node.holder == info.job.name and node.status in ("staging", "ready"):
            node.holder = None
            node.attempts -= word == COORDINATOR_ENDED
            node.status = "offered" if node.attempts < MAX_HOLDERS or info.job.purpose == "stage" else "aside"
            node.why = f"{info.job.name} ended ({word})"
            indexes.file_node(state, node)
            if node.status == "aside":
                rest(state, f"{node.why}, see {info.job.log}")


def _build_over(state: State, info: JobInfo, word: str) -> None:
    """A build job makes its entries one after the other: the first that is not built was at work when it ended, and has a
    try less; the others were not come to. Where nothing is built between such ends the entries are not the reason.
    """
    left = [
        e
        for i in info.entries
        if (e := state.entries[i]).build_job == info.job.name and e.status == "building"
    ]
    for entry in left:
        entry.status = "unbuilt"
        indexes.file_entry(state, entry)
    if not left or word in NO_FAULT_OF_A_JOB:
        return
    first = left[0]
    first.build_tries += 1
    state.barren_builds += 1
    lost = left if state.barren_builds >= MAX_BARREN_BUILDS * state.record.options.build_jobs else left[:1]
    if first.build_tries >= MAX_BUILDS or len(lost) > 1:
        for entry in lost:
            fail_entry(
                state, entry, f"its build job ended {first.build_tries} times ({word}); see {info.job.log}"
            )


def staged_ahead(state: State, info: JobInfo) -> bool:
    """Is it a precursor on a node whose GPUs this evaluation does not have yet?"""
    node = state.nodes.get(info.job.node or "")
    return info.job.purpose == "stage" and node is not None and not node.lanes


def withdraw_node(state: State, node: NodeUse, why: str, now: float) -> list[Action]:
    """The node is used no more; it may be offered again."""
    node.status, node.why = "withdrawn", why
    node.aside_until = None
    node.holder, node.path = None, ""  # what is still being staged there is no reason to use it again
    indexes.file_node(state, node)
    there = sorted(state.index.jobs_on.get(node.name, {}).items())
    return end_jobs(state, [info for _, info in there], now)


def end_jobs(state: State, jobs: Iterable[JobInfo], now: float) -> list[Action]:
    """These shall end. One whose submission is in doubt is cancelled once it is known to be there: on a drained node it
    would wait for ever. Members whose trials have said that they ended are not cancelled: they exit by themselves, and a
    cancelled job looks failed in the site's accounting. What is still there after `Grace.overdue` is cancelled then.
    """
    actions: list[Action] = []
    for info in jobs:
        info.released_at = now if info.released_at is None else info.released_at
        for trial in info.trials:
            indexes.mark_cancelled(state, trial)
        if not info.job_id:
            continue
        left = [member for member in info.members if not _said_its_end(state, info, member)]
        if len(left) == len(info.members):
            actions.append(CancelJob(job_id=info.job_id))
        else:
            actions += [CancelJob(job_id=info.job_id, index=member) for member in left]
    return actions


def _said_its_end(state: State, info: JobInfo, member: int) -> bool:
    """Have all trials of this member of a job accounted for themselves?"""
    trials = info.trials if info.job.purpose == "host" else info.trials[member : member + 1]
    return bool(trials) and not any(trial in state.live_trials for trial in trials)


def let_go(state: State, info: JobInfo, now: float) -> list[Action]:
    """A holder, or a job of workers, is needed no more. Those that run end by themselves; those that do not yet would wait
    for their turn only to end, and go at once (one that has just started is ended by that, too).
    """
    info.released_at = now if info.released_at is None else info.released_at
    actions: list[Action] = [ReleaseHolder(job=info.job.name)] if info.job.purpose == "stage" else []
    if ("staged", info.job.name) in state.seen:
        return actions  # it runs, whether or not a listing has shown it
    waiting = [member for member, phase in info.members.items() if phase == "pending"]
    if info.job_id and len(waiting) == len(info.members):
        actions.append(CancelJob(job_id=info.job_id))
    elif info.job_id:
        actions += [CancelJob(job_id=info.job_id, index=member) for member in waiting]
    return actions


def gpus_taken(state: State, info: JobInfo, now: float) -> list[Action]:
    """A member of a node's job was preempted: the node has a lane less; without any, it is given up until it is free."""
    node = state.nodes.get(info.job.node or "")
    if node is None or node.status not in ("staging", "ready"):
        return []
    if info.job.purpose == "trial" and node.lanes > 1:
        node.lanes -= 1
        indexes.file_node(state, node)
        return []
    return withdraw_node(state, node, "a job of higher priority took it", now)


def fail_entry(state: State, entry: EntryState, error: str) -> list[Action]:
    """An entry cannot be scored: it says why, and its other shards are not worth a GPU any more."""
    entry.status, entry.error = "failed", error
    indexes.file_entry(state, entry)
    withdrawn = []
    for task in entry.sets:
        leaf = state.leaves.get(task)
        for name in leaf.planned.shards if leaf else ():
            shard = state.shards[name]
            if shard.frame is None and not shard.quarantined:
                shard.quarantined = True
                state.todo -= 1
                withdrawn.append(name)
    return [WithdrawShards(shards=tuple(withdrawn))] if withdrawn else []


def count_shard_done(state: State, name: str, frame: FrameRef) -> None:
    shard = state.shards[name]
    leaf = state.leaves[name.rsplit("|", 2)[0]]
    shard.frame = frame
    leaf.todo -= 1
    if not shard.quarantined:
        state.todo -= 1
    for document in shard.documents:
        leaf.waiting[document] -= 1
        if leaf.waiting[document] == 0:
            leaf.complete.append(document)
    indexes.file_leaf(state, leaf)


def take_back_shard(state: State, name: str) -> None:
    """A shard counted as done has to run again (its record cannot be read)."""
    shard = state.shards[name]
    leaf = state.leaves[name.rsplit("|", 2)[0]]
    shard.frame = None
    leaf.todo += 1
    if not shard.quarantined:
        state.todo += 1
    for document in shard.documents:
        leaf.waiting[document] += 1
        if document in leaf.complete:
            leaf.complete.remove(document)
    indexes.file_leaf(state, leaf)
    entry = state.entries[leaf.planned.entry]
    if entry.status == "scoring":
        entry.status = "built"
        indexes.file_entry(state, entry)


def count_trial_death(state: State, node_name: str | None, why: str) -> bool:
    """A trial died and no shard was to blame: the node may be. On a node that rests already it is no further news.

    Does it count against a node?
    """
    node = state.nodes.get(node_name or "")
    if node is not None and node.status in ("aside", "withdrawn"):
        return False
    state.barren += 1
    if node is not None:
        node.failures += 1
        if node.failures >= MAX_NODE_FAILURES:
            set_aside(state, node, why)
    worked = any(leaf.todo < len(leaf.planned.shards) for leaf in state.leaves.values())
    most = MAX_BARREN * (len(state.nodes) if worked else 1)
    if (state.todo or not state.leaves) and state.barren >= most:
        no_inference(state, f"trials keep failing; the last: {why}")
    return node is not None


def set_aside(state: State, node: NodeUse, why: str) -> None:
    """A node that is in use rests; `rules` says for how long."""
    if node.status in ("ready", "staging"):
        node.status, node.why = "aside", why
        indexes.file_node(state, node)
        state.warnings.append(f"node {node.name} set aside: {why}")
        rest(state, why)


def back_in_use(state: State, node: NodeUse) -> None:
    """A node's rest is over."""
    holds = node.holder is not None and node.holder in state.live and node.path
    node.aside_until = None
    node.status = "ready" if holds else "offered"
    node.holder = node.holder if holds else None
    indexes.file_node(state, node)


def rested_for_nothing(state: State, node: NodeUse) -> None:
    """What set it aside was not its fault: the next rest is no longer for this one."""
    node.asides -= node.aside_until is not None
    back_in_use(state, node)


def rest(state: State, why: str) -> None:
    """A node was set aside. Where it was the last one, the evaluation waits for the first to return; not for ever."""
    in_use = any(n.lanes and n.status in ("offered", "staging", "ready") for n in state.nodes.values())
    if in_use or not (state.todo or not state.leaves):
        return
    state.rests += 1
    if state.rests > MAX_RESTS:
        no_inference(state, f"no node is left; the last: {why}")


def no_inference(state: State, why: str) -> None:
    """No trial will do any more: entries that lack responses fail; the others need no GPU."""
    if not state.fatal:
        state.fatal, state.fatal_to = why, "inference"


def staging_stands(state: State, info: JobInfo) -> bool:
    """Is what the trials of this job read still there? Where its precursor is gone they died of that."""
    node = state.nodes.get(info.job.node or "")
    return info.job.purpose != "trial" or node is None or node.holder == info.holder


def staging_unseen(state: State, node: NodeUse, now: float) -> list[Action]:
    """A trial saw nothing of what its precursor staged, and that one is not known to be dead.

    The first time the node may have lost its memory (a power cut that the cluster has not noticed): staged again. Once
    more, or where another node has shown it: /dev/shm is private to each job, and the node's trials are hosted.
    """
    holder, node.holder = node.holder, None
    node.status, node.failures, state.barren = "offered", 0, 0
    if node.unseen or any(n.hosted for n in state.nodes.values()):
        node.hosted, node.attempts = True, 0
        node.why = "trials do not see what another job stages there: /dev/shm is private to each job"
        state.warnings.append(f"{node.name} is served by one job that holds its GPUs: {node.why}")
    else:
        node.unseen, node.why = True, "what was staged there is gone, or not to be seen by trials"
    indexes.file_node(state, node)
    info = state.jobs[holder] if holder is not None else None
    if info is None or not info.live:
        return []
    info.released_at = now
    return [ReleaseHolder(job=info.job.name)]


def count_unread(state: State, name: str, why: str) -> list[Action]:
    """A shard was run, and what it left cannot be read; the third time its task fails loudly."""
    shard = state.shards[name]
    shard.unread += 1
    if shard.unread < MAX_UNREAD or shard.quarantined:
        return []
    entry = state.entries[state.leaves[name.rsplit("|", 2)[0]].planned.entry]
    state.warnings.append(f"shard {name} quarantined: {why}")
    said = f"shard {name} was run {shard.unread} times and left no record that can be read; the last: {why}"
    return fail_entry(state, entry, said)


def reopen_entry(state: State, entry: EntryState) -> Mapping[str, tuple[tuple[str, float, float], ...]]:
    """A failed entry is tried again from where it stood; returns the shards to queue by lane."""
    entry.error, entry.build_tries, entry.score_tries_before = "", 0, entry.score_tries
    entry.status = "built" if entry.sets else "unbuilt"
    indexes.file_entry(state, entry)
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for task in entry.sets:
        leaf = state.leaves.get(task)
        for name in leaf.planned.shards if leaf else ():
            shard = state.shards[name]
            shard.kills, shard.died_on, shard.doubts, shard.unread = 0, [], {}, 0
            if shard.quarantined:
                shard.quarantined = False
                if shard.frame is None:
                    state.todo += 1
                    lanes.setdefault(shard.lane, []).append((name, shard.rank, shard.seconds))
    return {lane: tuple(shards) for lane, shards in lanes.items()}
