"""How far an evaluation is: its stage, what it waits for, and the seconds that are left. Pure.

Rule: derived from the state and from what the cluster lists of its jobs. Called by `status` and the live screen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from coordinator.cluster import JobState
from coordinator.cluster.slurm_reasons import in_words
from coordinator.evaluation.state import JobInfo, Phase, State
from coordinator.report.render import by_reason, seconds
from evaljobs.queue.work_queue import QueueSnapshot

WAITS_SECONDS = 15.0  # a job that is pending for less is only starting
NOTHING_FREE = "nothing that it could run on is free"
NO_SLOT = f"{NOTHING_FREE} (`evalspan status` says what is used)"
LEAST_SECONDS = 1.0  # shown as left while a shard is to do
LOADING = {"import", "load"}  # phases of a trial before its model can infer
IN_USE = ("offered", "staging", "ready")
JOBS = {
    "build": "request-set job",
    "convert": "conversion job",
    "stage": "staging job",
    "trial": "trial",
    "host": "trial host",
    "metric": "metric-worker job",
}


def stage_of(state: State, now: float, snapshot: QueueSnapshot | None = None) -> str:
    """The furthest stage under way, in one or two words; "waits" where no job of it runs and none is starting.

    `snapshot`: its work queue, in which running trials say whether they load or infer; None: not read.
    """
    if state.ending.phase >= Phase.LEAVING:
        return "clearing" if state.ended_at is None else "cancelled" if state.ending.cancelled else "ended"
    if state.ending.cancelled or state.ending.reason:
        return "ending"
    if not state.shards.todo and not state.plans_later:
        return "scoring"
    stage, jobs = _under_way(state)
    if stage == "inference":
        return _trials_stage(state, snapshot)
    pending = [is_pending(info, now) for info in jobs]
    return "waits" if pending and all(pending) else stage


def _under_way(state: State) -> tuple[str, list[JobInfo]]:
    """The stage before the last response, and the jobs whose start it needs."""
    unbuilt = any(e.status in ("unbuilt", "building") for e in state.entries)
    early = unbuilt and not state.shards.leaves  # trials load meanwhile
    if state.trials.live and (state.index.running or done_shards(state)) and not early:
        return "inference", []
    if unbuilt:
        return "building requests", state.live_jobs("build")
    if state.trials.live:
        hosts = {t.job: state.jobs.by_name[t.job] for t in state.trials.live.values()}
        return "starting trials", list(hosts.values())
    if any(n.status in IN_USE for n in state.nodes.by_name.values()):
        return "staging", state.live_jobs("stage")
    return "waits", []


def _trials_stage(state: State, snapshot: QueueSnapshot | None) -> str:
    """What the running trials do: "inference" where one infers, or where some shards are done and no trial loads."""
    trials = {} if snapshot is None else snapshot.trials
    phases = {trials[name].phase for name in state.index.running if name in trials}
    if "infer" not in phases and phases & LOADING:
        return "loading"
    return "inference" if "infer" in phases or done_shards(state) else "starting trials"


def done_shards(state: State) -> int:
    return len(state.shards.by_name) - state.shards.todo


def is_pending(info: JobInfo, now: float) -> bool:
    """Was it submitted a while ago, and has the cluster started no member of it?"""
    return has_pending(info, now) and "running" not in info.members.values()


def has_pending(info: JobInfo, now: float) -> bool:
    """Was it submitted a while ago, and has the cluster not started all members of it?"""
    return (
        info.phase == "submitted"
        and now - info.changed_at >= WAITS_SECONDS
        and "pending" in info.members.values()
    )


def waits_of(state: State, now: float, listed: Sequence[JobState] = (), *, timed: bool = True) -> list[str]:
    """What it waits for, in sentences.

    `listed`: the cluster's jobs, where they were asked for; `now`: unix seconds; `timed`: say for how long.
    """
    if state.ended_at is not None:
        return []
    said = list(_pending_jobs(state, now, listed, timed=timed))
    if not said and stage_of(state, now) == "waits" and state.waits_until is None and not state.jobs.held:
        said.append(NO_SLOT)
    return said


Turn = tuple[float, float]  # -priority, accepted at (unix seconds)


def ahead_of(evaluation_id: str, turns: Mapping[str, Turn]) -> list[str]:
    """A sentence on the evaluations that are served before one that waits."""
    own = turns[evaluation_id]
    first = [other for other, turn in turns.items() if turn < own]
    if len(first) > 1:
        return [f"{len(first)} evaluations are served before it"]
    return [f"{other} is served before it" for other in first]


def with_turn(waits: Sequence[str], ahead: Sequence[str]) -> list[str]:
    """What it waits for: the evaluations `ahead` of it, rather than what they have not taken yet."""
    return [*(what for what in waits if what != NO_SLOT or not ahead), *ahead]


def turn_of(state: State) -> Turn:
    return -state.record.priority, state.record.accepted_at


def about(left: float) -> str:
    """Predicted seconds, without the digits that a prediction does not have."""
    return f"about {math.ceil(left)} s" if left < 100 else f"about {seconds(left)}"


def held_jobs(state: State, now: float, *, timed: bool = True) -> dict[str, str]:
    """Job that Slurm does not take yet -> why, and when it is submitted again. `timed`: a process goes on with it."""
    return {
        name: f"Slurm does not take it yet ({job.why})"
        + (f"; submitted again in {seconds(job.due_at - now)}" if timed else "")
        for name, job in sorted(state.jobs.held.items())
    }


def all_in_back_off(left: float | None) -> str:
    """`left`: seconds until the first node returns; None where a node is in use."""
    return "" if left is None else f"all nodes are in back-off: it waits for {seconds(left)} more"


def back_offs(state: State) -> list[str]:
    """Why nodes are in back-off, while all of them are."""
    if state.waits_until is None:
        return []
    resting = {n.name: n.why for n in state.nodes.by_name.values() if n.status == "back-off"}
    return [f"{names}: in back-off: {why}" for names, why in by_reason(resting).items()]


def _pending_jobs(state: State, now: float, listed: Sequence[JobState], *, timed: bool) -> Iterator[str]:
    """A sentence for each kind of pending job and each reason."""
    reasons = {(job.name, job.index): job.reason for job in listed if job.phase == "pending"}
    found: Counter[tuple[str, str]] = Counter()
    since: dict[tuple[str, str], float] = {}
    for name in sorted(state.jobs.live):
        info = state.jobs.by_name[name]
        if not has_pending(info, now):
            continue
        for member in (m for m, phase in info.members.items() if phase == "pending"):
            if listed and (name, member) not in reasons:
                continue  # it started since the journal was written
            what = (info.job.purpose, in_words(reasons.get((name, member), "")))
            found[what] += 1
            since[what] = min(since.get(what, now), info.changed_at)
    for (purpose, why), count in found.items():
        many = (
            f"{count} {JOBS.get(purpose, purpose)}s are"
            if count > 1
            else f"a {JOBS.get(purpose, purpose)} is"
        )
        how_long = f" for {seconds(now - since[purpose, why])}" if timed else ""
        yield f"{many} pending{how_long}{': ' if why else ''}{why}"


def eta_seconds(state: State, now: float) -> float | None:
    """Predicted seconds until the last score; None before the plan and when no work is left.

    Mixes the plan, which has the load and the CPU tail, with the pace of the shards so far, weighted by the share of
    work that is done. The plan's time runs from the start of the first trial. Never below what the shards to do need.
    """
    if state.plan.made_at is None or not state.shards.by_name:
        return None
    tail = _tail_seconds(state)
    if state.shards.todo == 0:
        return tail or None
    total = left = 0.0
    planned = set()
    for shard in state.shards.by_name.values():
        total += shard.seconds
        planned.add(shard.lane)
        if shard.frame is None and not shard.quarantined:
            left += shard.seconds
    work = max(LEAST_SECONDS, left / max(1, state.index.lanes_in_use or len(planned)), tail)
    elapsed = _inference_seconds(state, now)
    by_plan = max(work, state.plan.predicted_makespan_seconds - elapsed)
    share = (total - left) / total if total > 0 else 0.0
    if share <= 0:
        return by_plan
    return max(work, share * elapsed * left / (total - left) + (1 - share) * by_plan)


def _inference_seconds(state: State, now: float) -> float:
    """Seconds since the first of the present trials started; 0 while none has."""
    assert state.plan.made_at is not None
    starts = [
        info.changed_at
        for info in {t.job: state.jobs.by_name.get(t.job) for t in state.trials.live.values()}.values()
        if info is not None and "running" in info.members.values()
    ]
    return max(0.0, now - max(state.plan.made_at, min(starts))) if starts else 0.0


def _tail_seconds(state: State) -> float:
    """Predicted seconds of the metric jobs that are open."""
    open_ones = [state.scoring.metrics[name].seconds for name in state.scoring.outstanding]
    return max([sum(open_ones) / state.cpu_slots, *open_ones], default=0.0)
